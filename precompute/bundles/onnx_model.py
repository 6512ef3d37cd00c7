"""A model as ONNX: its graph, and the weights that stand in a file beside it where one file cannot hold both."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import ExternalDataInfo

from cache.errors import BundleError
from cache.store.artefacts import open_draft, write_atomically

GRAPH_BYTES_MAX = (1 << 31) - (1 << 20)
"""Maximum bytes of weights inside an ONNX file: Protocol Buffers end at 2 GiB, and the graph wants some."""
WEIGHTS_BYTES_MAX = 1 << 36
"""Maximum bytes of a file of weights."""
SUFFIX = ".weights"
_ALIGNED = 4096
"""Pages begin there, which is what ONNX asks of tensors that are mapped."""
_SMALL = 1 << 16
"""Bytes of tensors that stay in the graph, since shapes and axes among them are read before anything runs."""


@dataclass(frozen=True, slots=True, eq=False)
class OnnxModel:
    """A serialised graph, and the arrays that its tensors of external data stand for, in their order."""

    graph: bytes
    weights: tuple[NDArray[Any], ...] = ()

    @classmethod
    def of(cls, model: onnx.ModelProto, constants: Mapping[str, NDArray[Any]]) -> Self:
        """A model with constants that its graph does not have yet, in the graph if they fit and outside if not."""
        if sum(array.nbytes for array in constants.values()) <= GRAPH_BYTES_MAX:
            inside, outside = constants, {}
        else:
            outside = {name: array for name, array in constants.items() if array.nbytes > _SMALL}
            inside = {name: array for name, array in constants.items() if name not in outside}
        tensors = [numpy_helper.from_array(array, name) for name, array in inside.items()]
        offset = 0
        for name, array in outside.items():
            tensors.append(_pointer(name, array, offset))
            offset = _aligned(offset + array.nbytes)
        model.graph.initializer.extend(tensors)
        if not outside:  # the checker wants to see the other file, too
            onnx.checker.check_model(model)
        return cls(model.SerializeToString(deterministic=True), tuple(outside.values()))

    def write(self, path: Path) -> Path | None:
        """Write the file, and beside it that of the weights, which is returned; None where there are none."""
        if not self.weights:
            write_atomically(path, self.graph)
            return None
        weights_path = path.with_suffix(SUFFIX)
        with open_draft(weights_path) as part, part.open("wb") as file:
            for array in self.weights:
                file.seek(_aligned(file.tell()))
                file.write(np.ascontiguousarray(array).data.cast("B"))
        model = onnx.load_from_string(self.graph)
        for tensor in _external(model):
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = weights_path.name
        write_atomically(path, model.SerializeToString(deterministic=True))
        return weights_path


def read_model(path: Path) -> onnx.ModelProto:
    """A model with all of its weights, of which those beside its file (`demand_weights`) may be hard links."""
    model = onnx.load(path, load_external_data=False)
    for tensor in _external(model):
        external_info = ExternalDataInfo(tensor)
        with (path.parent / external_info.location).open("rb") as file:
            file.seek(external_info.offset or 0)
            tensor.raw_data = file.read(external_info.length or -1)
        tensor.ClearField("external_data")
        tensor.data_location = TensorProto.DEFAULT
    return model


def demand_weights(name: str, path: Path, listed_weights: Path | None) -> None:
    """Raises BundleError where a model's weights beside its file are in others than the one that is listed."""
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception:  # of Protocol Buffers, where it is no model: ONNX Runtime says so better
        return
    expected_locations = set() if listed_weights is None else {listed_weights.name}
    locations = {ExternalDataInfo(tensor).location for tensor in _external(model)}
    if extra := sorted(locations - expected_locations):
        raise BundleError(
            f"{name} keeps weights in {', '.join(extra)} beside {path.name}, where bundle.json lists "
            + ("none" if listed_weights is None else listed_weights.name)
            + ': all of them belong into one file beside the model (all_tensors_to_one_file=True), which "weights" of '
            f"{name} names with path and sha256",
            model=name,
        )
    if expected_locations - locations:
        raise BundleError(
            f"bundle.json lists weights of {name}, and {path.name} uses none: leave them out",
            model=name,
        )


def _aligned(offset: int) -> int:
    """The first place from there on where a tensor may begin."""
    return -(-offset // _ALIGNED) * _ALIGNED


def _pointer(name: str, array: NDArray[Any], offset: int) -> TensorProto:
    """Tensor whose bytes are in the file of weights."""
    tensor = TensorProto(
        name=name,
        data_type=onnx.helper.np_dtype_to_tensor_dtype(array.dtype),
        dims=array.shape,
        data_location=TensorProto.EXTERNAL,
    )
    for key, value in (("location", SUFFIX), ("offset", offset), ("length", array.nbytes)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _external(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """Tensors with external data, in the main graph, in subgraphs and in functions."""
    graph = model.graph
    tensor_iterators = [_tensors(graph.node, graph.initializer, graph.sparse_initializer)]
    tensor_iterators += [_tensors(function.node) for function in model.functions]
    for tensor in chain.from_iterable(tensor_iterators):
        if tensor.data_location == TensorProto.EXTERNAL:
            yield tensor


def _tensors(
    nodes: Iterable[onnx.NodeProto],
    dense: Iterable[TensorProto] = (),
    sparse: Iterable[onnx.SparseTensorProto] = (),
) -> Iterator[TensorProto]:
    yield from dense
    for sparse_tensor in sparse:
        yield from (sparse_tensor.values, sparse_tensor.indices)
    for node in nodes:
        for attribute in node.attribute:
            yield from _tensors(
                (),
                [attribute.t, *attribute.tensors],
                [attribute.sparse_tensor, *attribute.sparse_tensors],
            )
            for graph in (attribute.g, *attribute.graphs):
                yield from _tensors(graph.node, graph.initializer, graph.sparse_initializer)

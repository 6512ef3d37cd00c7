"""ONNX models: a graph, a second file for large weights, and the graphs of plain towers, written node by node."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import ExternalDataInfo

from cache.errors import BundleError
from cache.store.artefacts import open_draft, write_atomically

GRAPH_BYTES_MAX = (1 << 31) - (1 << 20)
"""Maximum bytes of weights inside an ONNX file: Protocol Buffers end at 2 GiB, and the graph needs some."""

WEIGHTS_BYTES_MAX = 1 << 36
"""Maximum bytes of a file of weights."""

WEIGHTS_SUFFIX = ".weights"
_ALIGNED = 4096
"""Alignment of tensors in the weights file: that of pages, as ONNX requires for mapped tensors."""

_SMALL_BYTES = 1 << 16
"""Bytes up to which tensors stay in the graph, since shapes and axes among them are read before anything runs."""

OPSET = 21
IR_VERSION = 10

_CLASSES = frozenset({"classlabels_strings", "classlabels_int64s", "classlabels_ints"})
"""Attributes that list the classes of a classifier: of ensembles of trees, linear models, SVMs and ZipMap."""

_CLASS_TABLES: Mapping[str, tuple[int, ...]] = {
    "ArrayFeatureExtractor": (TensorProto.STRING, TensorProto.INT64, TensorProto.INT32),
    "Gather": (TensorProto.STRING,),
}
"""Operators that take a label out of a table of classes, with the types of such a table."""


@dataclass(frozen=True, slots=True, eq=False)
class OnnxModel:
    """Serialised graph, and the arrays of its external tensors, in their order."""

    graph: bytes
    weights: tuple[NDArray[Any], ...] = ()

    @classmethod
    def of(cls, model: onnx.ModelProto, constants: Mapping[str, NDArray[Any]]) -> Self:
        """Build a model with these constants, inside the graph if they fit, else outside."""
        if sum(array.nbytes for array in constants.values()) <= GRAPH_BYTES_MAX:
            inside, outside = constants, {}
        else:
            outside = {
                name: array for name, array in constants.items() if array.nbytes > _SMALL_BYTES
            }
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
        """Write the model and its weights file; return the path of the weights file, None without one."""
        if not self.weights:
            write_atomically(path, self.graph)
            return None
        weights_path = path.with_suffix(WEIGHTS_SUFFIX)
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
    """Read a model with all weights into memory; a weights file (`demand_weights`) may be a hard link."""
    model = onnx.load(path, load_external_data=False)
    for tensor in _external(model):
        external_info = ExternalDataInfo(tensor)
        with (path.parent / external_info.location).open("rb") as file:
            file.seek(external_info.offset or 0)
            tensor.raw_data = file.read(external_info.length or -1)
        tensor.ClearField("external_data")
        tensor.data_location = TensorProto.DEFAULT
    return model


def stated_classes(graph: onnx.GraphProto, count: int) -> tuple[str, ...]:
    """Return the `count` classes of a classifier in the order of its numbers, as texts; empty if no node has them.

    The last node with so many counts: an ensemble has the classes of its parts before its own.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in reversed(graph.node):
        for attribute in node.attribute:
            if attribute.name in _CLASSES and len(attribute.strings or attribute.ints) == count:
                return tuple(map(_class_text, attribute.strings or attribute.ints))
        # The label is taken out of a table of classes, by the place of the largest number.
        table = constants.get(node.input[0]) if node.input else None
        if (
            table is not None
            and table.data_type in _CLASS_TABLES.get(node.op_type, ())
            and np.prod(table.dims) == count
        ):
            return tuple(map(_class_text, numpy_helper.to_array(table).ravel().tolist()))
    return ()


def _class_text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def demand_weights(name: str, path: Path, listed_weights: Path | None) -> None:
    """Raise BundleError if a model's external weights are in other files than the listed one."""
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


def _pointer(name: str, array: NDArray[Any], offset: int) -> TensorProto:
    """Return a tensor whose bytes are in the weights file."""
    tensor = TensorProto(
        name=name,
        data_type=onnx.helper.np_dtype_to_tensor_dtype(array.dtype),
        dims=array.shape,
        data_location=TensorProto.EXTERNAL,
    )
    for key, value in (("location", WEIGHTS_SUFFIX), ("offset", offset), ("length", array.nbytes)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _aligned(offset: int) -> int:
    """Return the next aligned offset."""
    return -(-offset // _ALIGNED) * _ALIGNED


def _external(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """Yield the tensors with external data, in the main graph, in subgraphs and in functions."""
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


def refuse_negative_codes(
    graph: onnx.GraphProto, constants: dict[str, NDArray[Any]], features: Sequence[str]
) -> None:
    """Make each embedding fail on a negative code of a feature, as torch does; ONNX would count from the end.

    A negative code becomes one below the range that ONNX allows.
    """
    of_features, nodes = set(features), []
    for number, node in enumerate(graph.node):
        is_of_feature = not of_features.isdisjoint(node.input)
        if is_of_feature:
            of_features.update(node.output)
        if node.op_type == "Gather" and node.input[0] in constants and node.input[1] in of_features:
            index, name = node.input[1], f"larder_code_{number}"
            constants[f"{name}_zero"] = np.array(0, np.int64)
            axis = next((named.i for named in node.attribute if named.name == "axis"), 0)
            rows = constants[node.input[0]].shape[axis]
            constants[f"{name}_rows"] = np.array(rows, np.int64)
            nodes += [
                helper.make_node("Cast", [index], [f"{name}_wide"], to=TensorProto.INT64),
                helper.make_node("Less", [f"{name}_wide", f"{name}_zero"], [f"{name}_negative"]),
                helper.make_node("Sub", [f"{name}_wide", f"{name}_rows"], [f"{name}_below"]),
                helper.make_node(
                    "Where",
                    [f"{name}_negative", f"{name}_below", f"{name}_wide"],
                    [f"{name}_index"],
                ),
            ]
            node.input[1] = f"{name}_index"
        nodes.append(node)
    copied = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copied)


def history_tower(rows: NDArray[np.float32]) -> OnnxModel:
    """Build history int32 [n, length] -> vector [n, dims]: the sum of the table's rows; the last row is the padding."""
    return model_of(
        _sum_of_rows("vector"),
        [int32_info("history", ["rows", "length"])],
        [float32_info("vector", rows.shape[1])],
        {"table": rows, "axes": np.array([1], np.int64)},
    )


def item_tower(rows: NDArray[np.float32]) -> OnnxModel:
    """Build item_index int32 [n] -> vector [n, dims]: a row of the table."""
    return model_of(
        [helper.make_node("Gather", ["table", "item_index"], ["vector"], name="rows", axis=0)],
        [int32_info("item_index", ["rows"])],
        [float32_info("vector", rows.shape[1])],
        {"table": rows},
    )


def affinity_model(rows: NDArray[np.float32], centroids: NDArray[np.float32]) -> OnnxModel:
    """Build history -> probabilities [n, centroids]: softmax over the cosines with the (sharpened) centroids."""
    nodes = [
        *_sum_of_rows("summed"),
        # LpNormalization, not ReduceL2: the latter adds in another order when there is one row.
        helper.make_node("LpNormalization", ["summed"], ["direction"], name="unit", axis=1, p=2),
        helper.make_node("MatMul", ["direction", "centroids"], ["logits"], name="logits"),
        helper.make_node("Softmax", ["logits"], ["probabilities"], name="softmax", axis=-1),
    ]
    return model_of(
        nodes,
        [int32_info("history", ["rows", "length"])],
        [float32_info("probabilities", len(centroids))],
        {
            "table": rows,
            "axes": np.array([1], np.int64),
            "centroids": np.ascontiguousarray(centroids.T),
        },
    )


def _sum_of_rows(output: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("Gather", ["table", "history"], ["gathered"], name="rows", axis=0),
        helper.make_node("ReduceSum", ["gathered", "axes"], [output], name="sum", keepdims=0),
    ]


def int32_info(name: str, shape: list[str]) -> onnx.ValueInfoProto:
    """Return an int32 input or output of this shape."""
    return helper.make_tensor_value_info(name, TensorProto.INT32, shape)


def float32_info(name: str, width: int) -> onnx.ValueInfoProto:
    """Return a float32 input or output [rows, width]."""
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", width])


def model_of(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    constants: Mapping[str, NDArray[np.float32] | NDArray[np.int64]],
) -> OnnxModel:
    """Build and check a graph of these nodes and constants."""
    model = helper.make_model(
        helper.make_graph(nodes, "tower", inputs, outputs),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="larder",
    )
    return OnnxModel.of(model, constants)

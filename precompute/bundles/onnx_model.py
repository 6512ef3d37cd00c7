"""ONNX models: a graph, a second file for large weights, and the graphs of simple towers."""

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
"""Maximum bytes of weights inside an ONNX file: Protocol Buffers are limited to 2 GiB, and the graph needs some."""

WEIGHTS_BYTES_MAX = 1 << 36
"""Maximum bytes of a file of weights."""

WEIGHTS_SUFFIX = ".weights"
_ALIGNMENT_BYTES = 4096
"""Alignment of tensors in the weights file: the page size, which ONNX requires for mapped tensors."""

_INLINE_TENSOR_BYTES_MAX = 1 << 16
"""Bytes up to which tensors stay in the graph: shapes and axes, which are read before anything runs, are small."""

OPSET_VERSION = 21
IR_VERSION = 10

_CLASS_ATTRIBUTES = frozenset({"classlabels_strings", "classlabels_int64s", "classlabels_ints"})
"""Attributes that list the classes of a classifier: tree ensembles, linear models, SVMs and ZipMap."""

_CLASS_TABLE_TYPES_BY_OP: Mapping[str, tuple[int, ...]] = {
    "ArrayFeatureExtractor": (TensorProto.STRING, TensorProto.INT64, TensorProto.INT32),
    "Gather": (TensorProto.STRING,),
}
"""Operators that look a label up in a table of classes, with the types of such tables."""


@dataclass(frozen=True, slots=True, eq=False)
class OnnxModel:
    """Serialised graph, and the arrays of its external tensors in their order."""

    graph: bytes
    weights: tuple[NDArray[Any], ...] = ()

    @classmethod
    def of(cls, model: onnx.ModelProto, constants: Mapping[str, NDArray[Any]]) -> Self:
        """Build a model with these constants, inside the graph if they fit, else in the weights file."""
        if sum(array.nbytes for array in constants.values()) <= GRAPH_BYTES_MAX:
            inline_constants, external_constants = constants, {}
        else:
            external_constants = {
                name: array for name, array in constants.items() if array.nbytes > _INLINE_TENSOR_BYTES_MAX
            }
            inline_constants = {name: array for name, array in constants.items() if name not in external_constants}
        tensors = [numpy_helper.from_array(array, name) for name, array in inline_constants.items()]
        file_offset = 0
        for name, array in external_constants.items():
            tensors.append(_external_tensor(name, array, file_offset))
            file_offset = _align_offset(file_offset + array.nbytes)
        model.graph.initializer.extend(tensors)
        if not external_constants:  # the checker needs the other file, too
            onnx.checker.check_model(model)
        return cls(model.SerializeToString(deterministic=True), tuple(external_constants.values()))

    def write(self, model_path: Path) -> Path | None:
        """Write the model and its weights file; return the path of the weights file, None without one."""
        if not self.weights:
            write_atomically(model_path, self.graph)
            return None
        weights_path = model_path.with_suffix(WEIGHTS_SUFFIX)
        with open_draft(weights_path) as part_path, part_path.open("wb") as weights_file:
            for array in self.weights:
                weights_file.seek(_align_offset(weights_file.tell()))
                weights_file.write(np.ascontiguousarray(array).data.cast("B"))
        model = onnx.load_from_string(self.graph)
        for tensor in _external_tensors_of(model):
            for data_entry in tensor.external_data:
                if data_entry.key == "location":
                    data_entry.value = weights_path.name
        write_atomically(model_path, model.SerializeToString(deterministic=True))
        return weights_path


def read_model(model_path: Path) -> onnx.ModelProto:
    """Read a model with all weights into memory; a weights file (`demand_weights`) may be a hard link."""
    loaded_model = onnx.load(model_path, load_external_data=False)
    for tensor in _external_tensors_of(loaded_model):
        external_info = ExternalDataInfo(tensor)
        with (model_path.parent / external_info.location).open("rb") as weights_file:
            weights_file.seek(external_info.offset or 0)
            tensor.raw_data = weights_file.read(external_info.length or -1)
        tensor.ClearField("external_data")
        tensor.data_location = TensorProto.DEFAULT
    return loaded_model


def stated_classes(graph: onnx.GraphProto, class_count: int) -> tuple[str, ...]:
    """Return the `class_count` classes of a classifier in the order of its numbers, as texts; empty if it names none.

    If several nodes name that many classes, the last one counts: an ensemble names the classes of its parts first.
    """
    constant_by_name = {tensor.name: tensor for tensor in graph.initializer}
    for node in reversed(graph.node):
        for attribute in node.attribute:
            if attribute.name in _CLASS_ATTRIBUTES and len(attribute.strings or attribute.ints) == class_count:
                return tuple(map(_class_name_text, attribute.strings or attribute.ints))
        # The label is looked up in a table of classes, by the index of the largest number.
        class_table = constant_by_name.get(node.input[0]) if node.input else None
        if (
            class_table is not None
            and class_table.data_type in _CLASS_TABLE_TYPES_BY_OP.get(node.op_type, ())
            and np.prod(class_table.dims) == class_count
        ):
            return tuple(map(_class_name_text, numpy_helper.to_array(class_table).ravel().tolist()))
    return ()


def _class_name_text(class_value: object) -> str:
    return class_value.decode() if isinstance(class_value, bytes) else str(class_value)


def demand_weights(model_name: str, model_path: Path, listed_weights: Path | None) -> None:
    """Raise BundleError if a model's external weights are in files other than the listed one."""
    try:
        model = onnx.load(model_path, load_external_data=False)
    except Exception:  # raised if the file is no model, which ONNX Runtime reports better
        return
    expected_locations = set() if listed_weights is None else {listed_weights.name}
    used_locations = {ExternalDataInfo(tensor).location for tensor in _external_tensors_of(model)}
    if unlisted_files := sorted(used_locations - expected_locations):
        raise BundleError(
            f"{model_name} keeps weights in {', '.join(unlisted_files)} in the folder of {model_path.name}, but "
            "bundle.json lists "
            + ("none" if listed_weights is None else listed_weights.name)
            + (
                ": all of them must be in one file in the model's folder (all_tensors_to_one_file=True), which "
                f'"weights" of {model_name} names with path and sha256'
            ),
            model=model_name,
        )
    if expected_locations - used_locations:
        raise BundleError(
            f"bundle.json lists weights of {model_name}, but {model_path.name} uses none: remove the entry",
            model=model_name,
        )


def _external_tensor(tensor_name: str, tensor_values: NDArray[Any], file_offset: int) -> TensorProto:
    """Return a tensor with its bytes in the weights file."""
    tensor = TensorProto(
        name=tensor_name,
        data_type=onnx.helper.np_dtype_to_tensor_dtype(tensor_values.dtype),
        dims=tensor_values.shape,
        data_location=TensorProto.EXTERNAL,
    )
    for key, value in (("location", WEIGHTS_SUFFIX), ("offset", file_offset), ("length", tensor_values.nbytes)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _align_offset(file_offset: int) -> int:
    """Return the next aligned offset."""
    return -(-file_offset // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _external_tensors_of(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """Yield the tensors with external data, in the main graph, in subgraphs and in functions."""
    graph = model.graph
    tensor_iterators = [_all_tensors(graph.node, graph.initializer, graph.sparse_initializer)]
    tensor_iterators += [_all_tensors(function.node) for function in model.functions]
    for tensor in chain.from_iterable(tensor_iterators):
        if tensor.data_location == TensorProto.EXTERNAL:
            yield tensor


def _all_tensors(
    nodes: Iterable[onnx.NodeProto],
    dense_tensors: Iterable[TensorProto] = (),
    sparse_tensors: Iterable[onnx.SparseTensorProto] = (),
) -> Iterator[TensorProto]:
    yield from dense_tensors
    for sparse_tensor in sparse_tensors:
        yield from (sparse_tensor.values, sparse_tensor.indices)
    for node in nodes:
        for attribute in node.attribute:
            yield from _all_tensors(
                (), [attribute.t, *attribute.tensors], [attribute.sparse_tensor, *attribute.sparse_tensors]
            )
            for graph in (attribute.g, *attribute.graphs):
                yield from _all_tensors(graph.node, graph.initializer, graph.sparse_initializer)


def refuse_negative_codes(
    graph: onnx.GraphProto, constant_by_name: dict[str, NDArray[Any]], feature_names: Sequence[str]
) -> None:
    """Make each embedding fail for a negative code of a feature, as in torch; ONNX would count from the end.

    A negative code is replaced by one below the range that ONNX allows.
    """
    feature_values, new_nodes = set(feature_names), []
    for node_index, node in enumerate(graph.node):
        uses_feature = not feature_values.isdisjoint(node.input)
        if uses_feature:
            feature_values.update(node.output)
        if node.op_type == "Gather" and node.input[0] in constant_by_name and node.input[1] in feature_values:
            index_name, name_prefix = node.input[1], f"larder_code_{node_index}"
            constant_by_name[f"{name_prefix}_zero"] = np.array(0, np.int64)
            axis = next((node_attribute.i for node_attribute in node.attribute if node_attribute.name == "axis"), 0)
            table_row_count = constant_by_name[node.input[0]].shape[axis]
            constant_by_name[f"{name_prefix}_rows"] = np.array(table_row_count, np.int64)
            new_nodes += [
                helper.make_node("Cast", [index_name], [f"{name_prefix}_wide"], to=TensorProto.INT64),
                helper.make_node("Less", [f"{name_prefix}_wide", f"{name_prefix}_zero"], [f"{name_prefix}_negative"]),
                helper.make_node("Sub", [f"{name_prefix}_wide", f"{name_prefix}_rows"], [f"{name_prefix}_below"]),
                helper.make_node(
                    "Where",
                    [f"{name_prefix}_negative", f"{name_prefix}_below", f"{name_prefix}_wide"],
                    [f"{name_prefix}_index"],
                ),
            ]
            node.input[1] = f"{name_prefix}_index"
        new_nodes.append(node)
    copied_nodes = [type(node).FromString(node.SerializeToString()) for node in new_nodes]
    del graph.node[:]
    graph.node.extend(copied_nodes)


def history_tower(history_rows: NDArray[np.float32]) -> OnnxModel:
    """Build history int32 [n, length] -> vector [n, dims]: the sum of the table's rows; the last row is the padding."""
    return build_onnx_model(
        _sum_of_rows("vector"),
        [int32_info("history", ["rows", "length"])],
        [float32_info("vector", history_rows.shape[1])],
        {"table": history_rows, "axes": np.array([1], np.int64)},
    )


def item_tower(item_vectors: NDArray[np.float32]) -> OnnxModel:
    """Build item_index int32 [n] -> vector [n, dims]: a row of the table."""
    return build_onnx_model(
        [helper.make_node("Gather", ["table", "item_index"], ["vector"], name="rows", axis=0)],
        [int32_info("item_index", ["rows"])],
        [float32_info("vector", item_vectors.shape[1])],
        {"table": item_vectors},
    )


def affinity_model(history_rows: NDArray[np.float32], centroids: NDArray[np.float32]) -> OnnxModel:
    """Build history -> probabilities [n, centroids]: softmax over the (sharpened) cosines with the centroids."""
    nodes = [
        *_sum_of_rows("summed"),
        # LpNormalization, not ReduceL2, which adds in another order if there is only one row.
        helper.make_node("LpNormalization", ["summed"], ["direction"], name="unit", axis=1, p=2),
        helper.make_node("MatMul", ["direction", "centroids"], ["logits"], name="logits"),
        helper.make_node("Softmax", ["logits"], ["probabilities"], name="softmax", axis=-1),
    ]
    return build_onnx_model(
        nodes,
        [int32_info("history", ["rows", "length"])],
        [float32_info("probabilities", len(centroids))],
        {"table": history_rows, "axes": np.array([1], np.int64), "centroids": np.ascontiguousarray(centroids.T)},
    )


def _sum_of_rows(output_name: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("Gather", ["table", "history"], ["gathered"], name="rows", axis=0),
        helper.make_node("ReduceSum", ["gathered", "axes"], [output_name], name="sum", keepdims=0),
    ]


def int32_info(value_name: str, dimension_names: list[str]) -> onnx.ValueInfoProto:
    """Return an int32 input or output of this shape."""
    return helper.make_tensor_value_info(value_name, TensorProto.INT32, dimension_names)


def float32_info(value_name: str, width: int) -> onnx.ValueInfoProto:
    """Return a float32 input or output [rows, width]."""
    return helper.make_tensor_value_info(value_name, TensorProto.FLOAT, ["rows", width])


def build_onnx_model(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    constant_by_name: Mapping[str, NDArray[np.float32] | NDArray[np.int64]],
) -> OnnxModel:
    """Build and check a graph of these nodes and constants."""
    model = helper.make_model(
        helper.make_graph(nodes, "tower", inputs, outputs),
        opset_imports=[helper.make_opsetid("", OPSET_VERSION)],
        ir_version=IR_VERSION,
        producer_name="larder",
    )
    return OnnxModel.of(model, constant_by_name)

"""The live tower in int8, with static scales only, so that a row's answer never depends on its batch.

Embedding tables become int8 rows with one scale each. Products with constant weights become static QDQ S8S8 per
channel, calibrated on real inputs (ONNX Runtime's dynamic scheme is not batch-invariant). Their weights use 7 bits:
processors without VNNI add pairs of products in 16 bits, which saturate with larger weights.
"""

import cache.model.runtime  # noqa: F401 - before any other import of ONNX Runtime, see there

# isort: split
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.quant_utils import add_pre_process_metadata

from cache.errors import BundleError
from cache.model.tower import Inputs, Tower
from cache.model.tower_spec import TowerSpec
from cache.store.artefacts import write_atomically
from precompute.bundles.agreement import with_newest_item
from precompute.bundles.onnx_model import GRAPH_BYTES_MAX, read_model

CALIBRATION_ROWS_MAX = 512
"""Maximum number of rows that products are calibrated on."""
QUANTIZED_ROWS_AT_ONCE = 1 << 16
"""Rows of a table that become int8 at a time: a large table at once would be in memory three times."""
_PRODUCT_OPS = ("MatMul", "Gemm")
_OPSET_MIN = 13  # from this opset on, axes are inputs
_LAST_AXIS_NAME, _MIDDLE_AXIS_NAME = "larder_last_axis", "larder_middle_axis"


def quantize_tower(fp32_path: Path, spec: TowerSpec, calibration_inputs: Inputs, int8_path: Path) -> tuple[int, int]:
    """Write the int8 form of a tower to `int8_path`; return the number of (tables, products) that became int8.

    `calibration_inputs` are real inputs, of which at most CALIBRATION_ROWS_MAX rows are used. Raises BundleError if
    nothing can become int8.
    """
    model = read_model(fp32_path)
    opset_version = next(
        (opset_import.version for opset_import in model.opset_import if opset_import.domain in ("", "ai.onnx")), 0
    )
    if opset_version < _OPSET_MIN:
        raise BundleError(f"{fp32_path.name} has opset {opset_version}, quantizing needs {_OPSET_MIN} or newer")
    # before the products: then the model fits into one file, as their quantization needs
    table_count = _quantize_tables(model.graph)
    product_count = sum(1 for node in model.graph.node if _is_product(model.graph, node))
    if not table_count and not product_count:
        raise BundleError(f"{fp32_path.name} has no embedding table and no product to quantize")
    if sum(len(initializer.raw_data) for initializer in model.graph.initializer) > GRAPH_BYTES_MAX:
        raise BundleError(f"the int8 form of {fp32_path.name} would be larger than 2 GiB")
    if product_count:
        model = _quantize_products(model, Tower.open(fp32_path, spec), calibration_inputs)
    write_atomically(int8_path, model.SerializeToString(deterministic=True))
    return table_count, product_count


class _CalibrationReader(CalibrationDataReader):  # type: ignore[misc]
    """Reader of the batches that the tower itself would run, at most CALIBRATION_ROWS_MAX rows in all."""

    def __init__(self, tower: Tower, inputs: Inputs) -> None:
        self._calibration_batches = self._limit_rows(tower, inputs)

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        return next(self._calibration_batches, None)

    @staticmethod
    def _limit_rows(tower: Tower, inputs: Inputs) -> Iterator[dict[str, NDArray[Any]]]:
        # If a tower takes sums, long histories have the largest activations; if it takes means, histories of one item
        # do, which users unknown to the night often have. So each padded length and the newest items alone get a share
        # of the rows.
        input_batches = [feed for _, feed in tower.batches(inputs)]
        if (newest_item_inputs := with_newest_item(inputs)) is not None:
            input_batches += [feed for _, feed in tower.batches(newest_item_inputs)]
        rows_per_batch = max(1, CALIBRATION_ROWS_MAX // max(1, len(input_batches)))
        for input_batch in input_batches:
            yield {name: value[:rows_per_batch] for name, value in input_batch.items()}


def _is_product(graph: onnx.GraphProto, node: onnx.NodeProto) -> bool:
    constant_names = {initializer.name for initializer in graph.initializer}
    return node.op_type in _PRODUCT_OPS and node.input[1] in constant_names


def _quantize_products(model: onnx.ModelProto, tower: Tower, calibration_inputs: Inputs) -> onnx.ModelProto:
    """Return the model with int8 products, calibrated on the inputs of `tower`, from which it was made."""
    with tempfile.TemporaryDirectory() as folder:
        source_path, target_path = Path(folder) / "source.onnx", Path(folder) / "products.onnx"
        # Pre-processing would only infer shapes here (its symbolic form needs sympy).
        model = onnx.shape_inference.infer_shapes(model)
        for node_index, node in enumerate(model.graph.node):
            node.name = f"larder_{node_index}"
        product_names = [
            product_node.name for product_node in model.graph.node if _is_product(model.graph, product_node)
        ]
        add_pre_process_metadata(model)
        onnx.save(model, source_path)
        quantize_static(
            str(source_path),
            str(target_path),
            _CalibrationReader(tower, calibration_inputs),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=True,  # else pairs of products saturate the 16 bits in which AVX2 adds them
            op_types_to_quantize=list(_PRODUCT_OPS),
            nodes_to_quantize=product_names,
            extra_options={"MatMulConstBOnly": True},
        )
        return onnx.load(target_path)


def _quantize_tables(graph: onnx.GraphProto) -> int:
    """Replace every Gather from a constant float table; return the number of tables that became int8."""
    constant_by_name = {initializer.name: initializer for initializer in graph.initializer}
    table_by_gather_index = {
        index: constant_by_name[node.input[0]]
        for index, node in enumerate(graph.node)
        if node.op_type == "Gather"
        and node.input[0] in constant_by_name
        and _is_embedding_table(constant_by_name[node.input[0]], node)
    }
    for table in {table.name: table for table in table_by_gather_index.values()}.values():
        _add_int8_table(graph, table)
    new_nodes: list[onnx.NodeProto] = []
    gather_by_sum_output: dict[str, onnx.NodeProto] = {}
    for node_index, node in enumerate(graph.node):
        if node_index in table_by_gather_index:
            sum_node = _find_sum_of_gathered(graph, node)
            if sum_node is None:
                new_nodes += _gather_rows_nodes(node)
            else:
                gather_by_sum_output[sum_node.output[0]] = node
        elif node.output[0] in gather_by_sum_output:
            new_nodes += _sum_rows_nodes(gather_by_sum_output[node.output[0]], node)
        else:
            new_nodes.append(node)
    for tensor_name, axis in ((_LAST_AXIS_NAME, -1), (_MIDDLE_AXIS_NAME, 1)):
        graph.initializer.append(numpy_helper.from_array(np.array([axis], np.int64), tensor_name))
    used_names = {name for node in new_nodes for name in node.input}
    used_initializers = [initializer for initializer in graph.initializer if initializer.name in used_names]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(new_nodes)
    graph.initializer.extend(used_initializers)
    return len({table.name for table in table_by_gather_index.values()})


def _find_sum_of_gathered(graph: onnx.GraphProto, gather: onnx.NodeProto) -> onnx.NodeProto | None:
    """Return the ReduceSum over the length if the gathered rows are only used by it."""
    gathered_name = gather.output[0]
    using_nodes = [node for node in graph.node if gathered_name in node.input]
    rank_by_input = {graph_input.name: len(graph_input.type.tensor_type.shape.dim) for graph_input in graph.input}
    if len(using_nodes) != 1 or using_nodes[0].op_type != "ReduceSum" or rank_by_input.get(gather.input[1]) != 2:
        return None
    if gathered_name in {graph_output.name for graph_output in graph.output} or len(using_nodes[0].input) < 2:
        return None
    keeps_dims = next((attribute.i for attribute in using_nodes[0].attribute if attribute.name == "keepdims"), 1)
    return (
        using_nodes[0] if not keeps_dims and _constant_values(graph, using_nodes[0].input[1]) in ([1], [-2]) else None
    )


def _constant_values(graph: onnx.GraphProto, constant_name: str) -> list[int] | None:
    for initializer in graph.initializer:
        if initializer.name == constant_name:
            return [int(value) for value in numpy_helper.to_array(initializer).ravel()]
    for node in graph.node:
        if node.op_type == "Constant" and constant_name in node.output:
            constant_tensor = next(attribute.t for attribute in node.attribute if attribute.name == "value")
            return [int(number) for number in numpy_helper.to_array(constant_tensor).ravel()]
    return None


def _is_embedding_table(table: onnx.TensorProto, node: onnx.NodeProto) -> bool:
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
    is_matrix = table.data_type == TensorProto.FLOAT and len(table.dims) == 2
    return is_matrix and axis == 0


def _add_int8_table(graph: onnx.GraphProto, table: onnx.TensorProto) -> None:
    float_rows = numpy_helper.to_array(table)
    row_scales, int8_rows = (np.empty(len(float_rows), np.float32), np.empty(float_rows.shape, np.int8))
    for first_row in range(0, len(float_rows), QUANTIZED_ROWS_AT_ONCE):
        row_slice = slice(first_row, first_row + QUANTIZED_ROWS_AT_ONCE)
        row_scales[row_slice] = np.abs(float_rows[row_slice]).max(axis=1) / 127
        divisors = np.where(row_scales[row_slice] > 0, row_scales[row_slice], 1)[:, None]
        with np.errstate(invalid="ignore"):  # a row that is not finite has a scale that is not finite
            int8_rows[row_slice] = np.rint(float_rows[row_slice] / divisors).astype(np.int8)
    graph.initializer.append(numpy_helper.from_array(int8_rows, f"{table.name}_int8"))
    graph.initializer.append(numpy_helper.from_array(row_scales, f"{table.name}_scale"))


def _name_prefix(node: onnx.NodeProto) -> str:
    """Return a name prefix for replacements of a node that the graph and ONNX Runtime do not use."""
    return f"larder_{node.output[0]}"


def _gather_int8_nodes(node: onnx.NodeProto, name_prefix: str) -> list[onnx.NodeProto]:
    """Return nodes that gather int8 rows, cast to float, and their scales."""
    table_name, index_name = node.input[0], node.input[1]
    return [
        helper.make_node(
            "Gather", [f"{table_name}_int8", index_name], [f"{name_prefix}_int8"], name=f"{name_prefix}_rows"
        ),
        helper.make_node(
            "Gather", [f"{table_name}_scale", index_name], [f"{name_prefix}_scale"], name=f"{name_prefix}_scales"
        ),
        helper.make_node("Cast", [f"{name_prefix}_int8"], [f"{name_prefix}_float"], to=TensorProto.FLOAT),
    ]


def _gather_rows_nodes(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return nodes that gather int8 rows and their scales and multiply them: element by element, so batch-invariant."""
    name_prefix = _name_prefix(node)
    return [
        *_gather_int8_nodes(node, name_prefix),
        helper.make_node("Unsqueeze", [f"{name_prefix}_scale", _LAST_AXIS_NAME], [f"{name_prefix}_wide"]),
        helper.make_node("Mul", [f"{name_prefix}_float", f"{name_prefix}_wide"], [node.output[0]], name=node.name),
    ]


def _sum_rows_nodes(gather_node: onnx.NodeProto, sum_node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return nodes that sum gathered rows as one product per row of the batch: scales [1, L] x int8 rows [L, dims].

    That is 1.5 to 4 times as fast as a multiplication followed by a sum. ReduceSum adds in another order if the batch
    has one row; each of these products has the same shape in any batch.
    """
    name_prefix = _name_prefix(sum_node)
    return [
        *_gather_int8_nodes(gather_node, name_prefix),
        helper.make_node("Unsqueeze", [f"{name_prefix}_scale", _MIDDLE_AXIS_NAME], [f"{name_prefix}_weights"]),
        helper.make_node("MatMul", [f"{name_prefix}_weights", f"{name_prefix}_float"], [f"{name_prefix}_tall"]),
        helper.make_node(
            "Squeeze", [f"{name_prefix}_tall", _MIDDLE_AXIS_NAME], [sum_node.output[0]], name=sum_node.name
        ),
    ]

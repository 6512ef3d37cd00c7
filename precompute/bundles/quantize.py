"""The live tower in int8: static scales only, so that a row's answer never depends on its batch.

Embedding tables become int8 rows with one scale each; products with constant weights become static
QDQ S8S8 per channel, calibrated on real inputs (ONNX Runtime's dynamic scheme is not batch-invariant). Their weights
keep 7 bits: processors without VNNI multiply pairs into 16 bits, and clip what is larger.
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

ROWS_MAX = 512
"""Rows that products are calibrated on."""
ROWS_AT_ONCE = 1 << 16
"""Rows of a table that become int8 together: all of a large one would be in memory three times."""
_PRODUCTS = ("MatMul", "Gemm")
_OPSET_MIN = 13  # from there on, axes are inputs
_LAST, _MIDDLE = "larder_last_axis", "larder_middle_axis"


def quantize_tower(
    fp32: Path, spec: TowerSpec, calibration: Inputs, int8_path: Path
) -> tuple[int, int]:
    """Write the int8 form of a tower to `int8_path`; (tables, products) that became int8, BundleError when nothing can.

    `calibration` holds real inputs; at most ROWS_MAX of their rows are used.
    """
    model = read_model(fp32)
    opset = next(
        (
            opset_import.version
            for opset_import in model.opset_import
            if opset_import.domain in ("", "ai.onnx")
        ),
        0,
    )
    if opset < _OPSET_MIN:
        raise BundleError(f"{fp32.name} has opset {opset}, quantizing needs {_OPSET_MIN} or newer")
    table_count = _quantize_tables(
        model.graph
    )  # first: then all of it fits into one file, as the next step wants it
    product_count = sum(1 for node in model.graph.node if _is_product(model.graph, node))
    if not table_count and not product_count:
        raise BundleError(f"{fp32.name} holds no embedding table and no product to quantize")
    if sum(len(initializer.raw_data) for initializer in model.graph.initializer) > GRAPH_BYTES_MAX:
        raise BundleError(f"the int8 form of {fp32.name} would be larger than 2 GiB")
    if product_count:
        model = _quantize_products(model, Tower.open(fp32, spec), calibration)
    write_atomically(int8_path, model.SerializeToString(deterministic=True))
    return table_count, product_count


class _Reader(CalibrationDataReader):  # type: ignore[misc]
    """Feeds the batches that the tower itself would run, cut to ROWS_MAX rows in all."""

    def __init__(self, tower: Tower, inputs: Inputs) -> None:
        self._feeds = self._limited(tower, inputs)

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        return next(self._feeds, None)

    @staticmethod
    def _limited(tower: Tower, inputs: Inputs) -> Iterator[dict[str, NDArray[Any]]]:
        # Where a tower takes sums, long histories have the largest activations, and where it takes means, those of one
        # item, which users whom the night does not know often have: each padded length and the newest items alone get
        # their share.
        feeds = [feed for _, feed in tower.batches(inputs)]
        if (newest := with_newest_item(inputs)) is not None:
            feeds += [feed for _, feed in tower.batches(newest)]
        rows_per_feed = max(1, ROWS_MAX // max(1, len(feeds)))
        for feed in feeds:
            yield {name: value[:rows_per_feed] for name, value in feed.items()}


def _is_product(graph: onnx.GraphProto, node: onnx.NodeProto) -> bool:
    constants = {initializer.name for initializer in graph.initializer}
    return node.op_type in _PRODUCTS and node.input[1] in constants


def _quantize_products(
    model: onnx.ModelProto, tower: Tower, calibration: Inputs
) -> onnx.ModelProto:
    """The model with int8 products, calibrated on what `tower`, which it was made of, is fed."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "source.onnx", Path(folder) / "products.onnx"
        # Shapes are all that the pre-processing would add here (its symbolic form needs sympy).
        model = onnx.shape_inference.infer_shapes(model)
        for number, node in enumerate(model.graph.node):
            node.name = f"larder_{number}"
        products = [
            product_node.name
            for product_node in model.graph.node
            if _is_product(model.graph, product_node)
        ]
        add_pre_process_metadata(model)
        onnx.save(model, source)
        quantize_static(
            str(source),
            str(target),
            _Reader(tower, calibration),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=True,  # else two products overflow the 16 bits in which AVX2 adds them
            op_types_to_quantize=list(_PRODUCTS),
            nodes_to_quantize=products,
            extra_options={"MatMulConstBOnly": True},
        )
        return onnx.load(target)


def _quantize_tables(graph: onnx.GraphProto) -> int:
    """Replace every Gather from a constant float table; returns how many tables became int8."""
    constants = {initializer.name: initializer for initializer in graph.initializer}
    gathers = {
        index: constants[node.input[0]]
        for index, node in enumerate(graph.node)
        if node.op_type == "Gather"
        and node.input[0] in constants
        and _is_table(constants[node.input[0]], node)
    }
    for table in {table.name: table for table in gathers.values()}.values():
        _add_rows(graph, table)
    nodes: list[onnx.NodeProto] = []
    summed: dict[str, onnx.NodeProto] = {}
    for index, node in enumerate(graph.node):
        if index in gathers:
            total = _sum_after(graph, node)
            if total is None:
                nodes += _gather_rows(node)
            else:
                summed[total.output[0]] = node
        elif node.output[0] in summed:
            nodes += _sum_rows(summed[node.output[0]], node)
        else:
            nodes.append(node)
    for name, axis in ((_LAST, -1), (_MIDDLE, 1)):
        graph.initializer.append(numpy_helper.from_array(np.array([axis], np.int64), name))
    used = {name for node in nodes for name in node.input}
    used_initializers = [
        initializer for initializer in graph.initializer if initializer.name in used
    ]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(used_initializers)
    return len({table.name for table in gathers.values()})


def _sum_after(graph: onnx.GraphProto, gather: onnx.NodeProto) -> onnx.NodeProto | None:
    """The ReduceSum over the length that is all that happens to the gathered rows, if so."""
    rows = gather.output[0]
    users = [node for node in graph.node if rows in node.input]
    ranks = {
        graph_input.name: len(graph_input.type.tensor_type.shape.dim) for graph_input in graph.input
    }
    if len(users) != 1 or users[0].op_type != "ReduceSum" or ranks.get(gather.input[1]) != 2:
        return None
    if rows in {graph_output.name for graph_output in graph.output} or len(users[0].input) < 2:
        return None
    keeps = next(
        (attribute.i for attribute in users[0].attribute if attribute.name == "keepdims"), 1
    )
    return users[0] if not keeps and _constant(graph, users[0].input[1]) in ([1], [-2]) else None


def _constant(graph: onnx.GraphProto, name: str) -> list[int] | None:
    for initializer in graph.initializer:
        if initializer.name == name:
            return [int(value) for value in numpy_helper.to_array(initializer).ravel()]
    for node in graph.node:
        if node.op_type == "Constant" and name in node.output:
            value = next(attribute.t for attribute in node.attribute if attribute.name == "value")
            return [int(number) for number in numpy_helper.to_array(value).ravel()]
    return None


def _is_table(table: onnx.TensorProto, node: onnx.NodeProto) -> bool:
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
    is_matrix = table.data_type == TensorProto.FLOAT and len(table.dims) == 2
    return is_matrix and axis == 0


def _add_rows(graph: onnx.GraphProto, table: onnx.TensorProto) -> None:
    rows = numpy_helper.to_array(table)
    scales, int8_rows = np.empty(len(rows), np.float32), np.empty(rows.shape, np.int8)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        row_slice = slice(start, start + ROWS_AT_ONCE)
        scales[row_slice] = np.abs(rows[row_slice]).max(axis=1) / 127
        divisors = np.where(scales[row_slice] > 0, scales[row_slice], 1)[:, None]
        with np.errstate(invalid="ignore"):  # of a row that is not finite, its scale is not either
            int8_rows[row_slice] = np.rint(rows[row_slice] / divisors).astype(np.int8)
    graph.initializer.append(numpy_helper.from_array(int8_rows, f"{table.name}_int8"))
    graph.initializer.append(numpy_helper.from_array(scales, f"{table.name}_scale"))


def _name_prefix(node: onnx.NodeProto) -> str:
    """Return a prefix for a node's replacements, which no name of a team's graph or ONNX Runtime's quantizer has."""
    return f"larder_{node.output[0]}"


def _gathered(node: onnx.NodeProto, name_prefix: str) -> list[onnx.NodeProto]:
    """Gather int8 rows as floats, and their scales."""
    table, index = node.input[0], node.input[1]
    return [
        helper.make_node(
            "Gather", [f"{table}_int8", index], [f"{name_prefix}_int8"], name=f"{name_prefix}_rows"
        ),
        helper.make_node(
            "Gather",
            [f"{table}_scale", index],
            [f"{name_prefix}_scale"],
            name=f"{name_prefix}_scales",
        ),
        helper.make_node(
            "Cast", [f"{name_prefix}_int8"], [f"{name_prefix}_float"], to=TensorProto.FLOAT
        ),
    ]


def _gather_rows(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Gather int8 rows and their scales, multiply: element by element, so batch-invariant."""
    name_prefix = _name_prefix(node)
    return [
        *_gathered(node, name_prefix),
        helper.make_node("Unsqueeze", [f"{name_prefix}_scale", _LAST], [f"{name_prefix}_wide"]),
        helper.make_node(
            "Mul", [f"{name_prefix}_float", f"{name_prefix}_wide"], [node.output[0]], name=node.name
        ),
    ]


def _sum_rows(node: onnx.NodeProto, total: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The sum of gathered rows as one product per row of the batch: scales [1, L] x int8 rows [L, dims].

    Measured 1.5 to 4 times as fast as multiplying and summing in turn; and while ReduceSum adds in
    another order when the batch has one row, each of these products has the same shape in any batch.
    """
    name_prefix = _name_prefix(total)
    return [
        *_gathered(node, name_prefix),
        helper.make_node(
            "Unsqueeze", [f"{name_prefix}_scale", _MIDDLE], [f"{name_prefix}_weights"]
        ),
        helper.make_node(
            "MatMul", [f"{name_prefix}_weights", f"{name_prefix}_float"], [f"{name_prefix}_tall"]
        ),
        helper.make_node(
            "Squeeze", [f"{name_prefix}_tall", _MIDDLE], [total.output[0]], name=total.name
        ),
    ]

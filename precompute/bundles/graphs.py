"""ONNX graphs of the reference model, written node by node. Pure."""

from collections.abc import Mapping

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from precompute.bundles.onnx_model import OnnxModel

OPSET = 21
IR_VERSION = 10


def history_tower(rows: NDArray[np.float32]) -> OnnxModel:
    """history int32 [n, length] -> vector [n, dims]: the sum of the table's rows; the last row is the padding."""
    return model_of(
        _sum_of_rows("vector"),
        [ints("history", ["rows", "length"])],
        [floats("vector", rows.shape[1])],
        {"table": rows, "axes": np.array([1], np.int64)},
    )


def item_tower(rows: NDArray[np.float32]) -> OnnxModel:
    """item_index int32 [n] -> vector [n, dims]: a row of the table."""
    return model_of(
        [helper.make_node("Gather", ["table", "item_index"], ["vector"], name="rows", axis=0)],
        [ints("item_index", ["rows"])],
        [floats("vector", rows.shape[1])],
        {"table": rows},
    )


def affinity_model(rows: NDArray[np.float32], centroids: NDArray[np.float32]) -> OnnxModel:
    """history -> probabilities [n, centroids]: softmax over the cosines with the (sharpened) centroids."""
    nodes = [
        *_sum_of_rows("summed"),
        # LpNormalization, not ReduceL2: the latter adds in another order when there is one row.
        helper.make_node("LpNormalization", ["summed"], ["direction"], name="unit", axis=1, p=2),
        helper.make_node("MatMul", ["direction", "centroids"], ["logits"], name="logits"),
        helper.make_node("Softmax", ["logits"], ["probabilities"], name="softmax", axis=-1),
    ]
    return model_of(
        nodes,
        [ints("history", ["rows", "length"])],
        [floats("probabilities", len(centroids))],
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


def ints(name: str, shape: list[str]) -> onnx.ValueInfoProto:
    """An input or output int32 of this shape."""
    return helper.make_tensor_value_info(name, TensorProto.INT32, shape)


def floats(name: str, width: int) -> onnx.ValueInfoProto:
    """An input or output float32 [rows, width]."""
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", width])


def model_of(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    constants: Mapping[str, NDArray[np.float32] | NDArray[np.int64]],
) -> OnnxModel:
    """A checked graph of these nodes and constants."""
    model = helper.make_model(
        helper.make_graph(nodes, "tower", inputs, outputs),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="larder",
    )
    return OnnxModel.of(model, constants)

"""Classifiers as other libraries export them to ONNX, built node by node."""

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

WIDTH = 3
COEFFICIENTS = np.array([[1.0, -1.0], [0.5, 0.0], [-2.0, 0.25]], np.float32)
WEIGHT_BY_WORD = {"idiot": 3.0, "hate": 2.0}


def linear() -> onnx.ModelProto:
    """Softmax over three numbers: `features` float [n, 3] -> `label` int64 [n], `probabilities` float [n, 2]."""
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["features", "coefficients"], ["logits"]),
            helper.make_node("Softmax", ["logits"], ["probabilities"], axis=-1),
            helper.make_node("ArgMax", ["logits"], ["label"], axis=1, keepdims=0),
        ],
        "linear",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, [None, WIDTH])],
        [
            helper.make_tensor_value_info("label", TensorProto.INT64, [None]),
            helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, [None, 2]),
        ],
        [numpy_helper.from_array(COEFFICIENTS, "coefficients")],
    )
    return _model(graph)


def probabilities(features: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the output of `linear` for these rows, in float64."""
    exponentials = np.exp(features.astype(np.float64) @ COEFFICIENTS.astype(np.float64))
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


def of_texts() -> onnx.ModelProto:
    """The score of a word: `text` string [n, 1] -> `score` float [n, 1]."""
    encoder = helper.make_node(
        "LabelEncoder", ["text"], ["score"], domain="ai.onnx.ml", keys_strings=list(WEIGHT_BY_WORD),
        values_floats=list(WEIGHT_BY_WORD.values()), default_float=0.0,
    )  # fmt: skip
    graph = helper.make_graph(
        [encoder],
        "texts",
        [helper.make_tensor_value_info("text", TensorProto.STRING, [None, 1])],
        [helper.make_tensor_value_info("score", TensorProto.FLOAT, [None, 1])],
    )
    return _model(graph)


def linear_classifier(**classes: Any) -> onnx.ModelProto:
    """`linear` as one node of ONNX-ML, whose attribute states the classes, as skl2onnx exports a linear model."""
    model = linear()
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.append(
        helper.make_node(
            "LinearClassifier", ["features"], ["label", "probabilities"], domain="ai.onnx.ml",
            coefficients=COEFFICIENTS.T.ravel().tolist(), intercepts=[0.0, 0.0], post_transform="SOFTMAX", **classes,
        )
    )  # fmt: skip
    if "classlabels_strings" in classes:
        model.graph.output[0].type.tensor_type.elem_type = TensorProto.STRING
    return model


def with_table_of_classes(classes: list[str]) -> onnx.ModelProto:
    """`linear`, whose label is taken out of a table of classes by its place, as skl2onnx exports most classifiers."""
    model = linear()
    model.graph.initializer.append(helper.make_tensor("classes", TensorProto.STRING, [len(classes)], classes))
    extractor = helper.make_node("ArrayFeatureExtractor", ["classes", "label"], ["name"], domain="ai.onnx.ml")
    model.graph.node.append(extractor)
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("name", TensorProto.STRING, [None, None]))
    return model


def with_coefficients(coefficients: NDArray[np.float32]) -> onnx.ModelProto:
    """Return `linear` with other coefficients, as after another training."""
    model = linear()
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(coefficients, "coefficients"))
    return model


def with_dictionaries() -> onnx.ModelProto:
    """`linear`, whose probabilities are a list of dictionaries, as skl2onnx exports them by default."""
    model = linear()
    zipmap = helper.make_node(
        "ZipMap", ["probabilities"], ["output_probability"], domain="ai.onnx.ml", classlabels_int64s=[0, 1]
    )
    model.graph.node.append(zipmap)
    del model.graph.output[1]
    kind = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    model.graph.output.append(helper.make_value_info("output_probability", helper.make_sequence_type_proto(kind)))
    return model


def of_codes() -> onnx.ModelProto:
    """Two numbers for each code from 10 to 15: `code` int64 [n, 1] -> `values` float [n, 2]; it fails on others."""
    nodes = [
        helper.make_node("Sub", ["code", "first"], ["row"]),
        helper.make_node("Gather", ["rows", "row"], ["gathered"]),
        helper.make_node("Squeeze", ["gathered", "middle"], ["values"]),
    ]
    initializers = [
        numpy_helper.from_array(np.array(10), "first"),
        numpy_helper.from_array(np.arange(12, dtype=np.float32).reshape(6, 2), "rows"),
        numpy_helper.from_array(np.array([1]), "middle"),
    ]
    graph = helper.make_graph(
        nodes, "codes", [helper.make_tensor_value_info("code", TensorProto.INT64, [None, 1])],
        [helper.make_tensor_value_info("values", TensorProto.FLOAT, [None, 2])], initializers,
    )  # fmt: skip
    return _model(graph)


def with_a_locale(locale: str) -> onnx.ModelProto:
    """Return `of_texts` with a first step that lower-cases the text by the rules of a locale."""
    model = of_texts()
    normalizer = helper.make_node("StringNormalizer", ["text"], ["lower"], case_change_action="LOWER", locale=locale)
    model.graph.node[0].input[0] = "lower"
    model.graph.node.insert(0, normalizer)
    del model.graph.input[0]
    model.graph.input.append(helper.make_tensor_value_info("text", TensorProto.STRING, [1, None]))
    return model


def _model(graph: onnx.GraphProto) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 2)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)

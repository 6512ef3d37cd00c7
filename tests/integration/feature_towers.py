"""Bundles whose towers take feature columns, and the tables with these columns."""

import shutil
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import onnx
import pyarrow as pa
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from cache.model.tower_spec import InputSpec, TowerSpec
from precompute.bundles.bundle import Bundle, ModelFile, write_bundle
from precompute.bundles.onnx_model import OnnxModel
from precompute.config.settings import NightConfig

DIMS: Final = 16
COUNTRIES: Final = 5
SCENTS: Final = 4
COUNTRY = InputSpec("country", "feature", "int64", column="country")
TASTE = InputSpec("taste", "feature", "float32", column="taste", width=DIMS)
LOOKS_INPUT = InputSpec("looks", "feature", "float32", column="looks", width=DIMS)
MOODS: Final = ("glad", "sad")
MOOD = InputSpec("mood", "feature", "float32", column="mood", width=len(MOODS))
SCENT = InputSpec("scent", "feature", "float32", column="scent", width=SCENTS)


def model(
    nodes: list[Any],
    constants: Mapping[str, NDArray[Any]],
    inputs: list[tuple[str, int, list[str | int]]],
    dims: int = DIMS,
) -> OnnxModel:
    """Build an ONNX model of these nodes with the output `vector` float32 [n, dims]."""
    graph = helper.make_graph(
        nodes,
        "tower",
        [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in inputs],
        [helper.make_tensor_value_info("vector", TensorProto.FLOAT, ["n", dims])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    onnx_model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(onnx_model)
    return OnnxModel(onnx_model.SerializeToString())


def from_history_and_country(items: int, seed: int = 0, max_length: int = 64) -> ModelFile:
    """Build a user tower: the sum of a row for each of the last items and one for the country."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((items + 1, DIMS)).astype(np.float32)
    rows[-1] = 0
    return ModelFile(
        model(
            [
                helper.make_node("Gather", ["rows", "history"], ["gathered"]),
                helper.make_node("ReduceSum", ["gathered", "axes"], ["summed"], keepdims=0),
                helper.make_node("Gather", ["countries", "country"], ["home"]),
                helper.make_node("Add", ["summed", "home"], ["vector"]),
            ],
            {
                "rows": rows,
                "countries": 4 * rng.standard_normal((COUNTRIES, DIMS)).astype(np.float32),
                "axes": np.array([1], np.int64),
            },
            [("history", TensorProto.INT32, ["n", "l"]), ("country", TensorProto.INT64, ["n"])],
        ),
        TowerSpec(
            (InputSpec("history", "history", "int32", max_length=max_length, pad=items), COUNTRY), "vector", DIMS
        ),
    )


def from_taste() -> ModelFile:
    """Build a user tower without any part that can be int8."""
    nodes = [helper.make_node("Neg", ["taste"], ["vector"])]
    taste: list[tuple[str, int, list[str | int]]] = [("taste", TensorProto.FLOAT, ["n", DIMS])]
    return ModelFile(model(nodes, {}, taste), TowerSpec((TASTE,), "vector", DIMS))


def from_mood(times: float = 1.0) -> ModelFile:
    """Build a value model that returns the mood itself or a multiple of it."""
    nodes = [helper.make_node("Mul", ["mood", "times"], ["vector"])]
    weights = {"times": np.array([times], np.float32)}
    mood_model = model(nodes, weights, [("mood", TensorProto.FLOAT, ["n", len(MOODS)])], len(MOODS))
    return ModelFile(mood_model, TowerSpec((MOOD,), "vector", len(MOODS)), labels=MOODS)


def from_looks() -> ModelFile:
    """Build an item tower that needs no vocabulary."""
    rotation = np.linalg.qr(np.random.default_rng(1).standard_normal((DIMS, DIMS)))[0]
    return _product(LOOKS_INPUT, rotation.astype(np.float32), DIMS)


def from_scent() -> ModelFile:
    """Build a value model of items: the worth of each."""
    weights = np.random.default_rng(5).standard_normal((SCENTS, 1)).astype(np.float32)
    return _product(SCENT, weights, SCENTS, labels=("worth",))


def _product(spec: InputSpec, weights: NDArray[np.float32], width: int, labels: tuple[str, ...] = ()) -> ModelFile:
    dims = weights.shape[1]
    nodes = [helper.make_node("MatMul", [spec.name, "turn"], ["vector"], name="turn")]
    return ModelFile(
        model(nodes, {"turn": weights}, [(spec.name, TensorProto.FLOAT, ["n", width])], dims),
        TowerSpec((spec,), "vector", dims),
        entity="item",
        labels=labels,
    )


def vectors_column(count: int, seed: int, width: int = DIMS) -> Any:
    """Return an Arrow column of random vectors."""
    values = np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)
    return pa.array(values.tolist(), pa.list_(pa.float32()))


def with_towers(
    config: NightConfig, user_tower: Callable[[int], ModelFile], values: Mapping[str, ModelFile] | None = None
) -> Bundle:
    """Replace the bundle by one with the same vocabulary and other models."""
    folder = config.path(config.bundle)
    ids = [raw.decode() for raw in Bundle.open(folder).item_ids]
    shutil.rmtree(folder)
    return write_bundle(
        folder, name="features", version="1", dims=DIMS, item_ids=ids,
        user_tower=user_tower(len(ids)), item_tower=from_looks(), values=values,
    )  # fmt: skip

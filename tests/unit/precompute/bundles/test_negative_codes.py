"""A negative code of a feature is refused by an embedding like one beyond it, and a number that is no code is not."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from cache.errors import LarderError
from cache.model.tower import Tower
from cache.model.tower_spec import InputSpec, TowerSpec
from precompute.bundles.onnx_model import OnnxModel, refuse_negative_codes

SPEC = TowerSpec(
    (InputSpec("country", "feature", "int64", column="country"), InputSpec("debt", "feature", "int64", column="debt")),
    "vector",
    2,
)


def model() -> OnnxModel:
    """Tower that looks a country up, and adds a number."""
    nodes = [
        helper.make_node("Identity", ["country"], ["same"]),
        helper.make_node("Gather", ["table", "same"], ["rows"]),
        helper.make_node("Cast", ["debt"], ["debt_float"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["debt_float", "axes"], ["column"]),
        helper.make_node("Add", ["rows", "column"], ["vector"]),
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["n"]) for name in ("country", "debt")]
    output = helper.make_tensor_value_info("vector", TensorProto.FLOAT, ["n", 2])
    graph = helper.make_graph(nodes, "tower", inputs, [output])
    constants: dict[str, NDArray[Any]] = {
        "table": np.arange(6, dtype=np.float32).reshape(3, 2),
        "axes": np.array([1], np.int64),
    }
    refuse_negative_codes(graph, constants, ["country", "debt"])
    opset = helper.make_opsetid("", 18)
    return OnnxModel.of(helper.make_model(graph, opset_imports=[opset], ir_version=9), constants)


def test_a_negative_code_is_refused_as_one_beyond_the_table(tmp_path: Path) -> None:
    onnx.checker.check_model(onnx.load_from_string(model().graph))
    model().write(tmp_path / "tower.onnx")
    tower = Tower.open(tmp_path / "tower.onnx", SPEC)

    vectors = tower.run({"country": np.array([0, 2]), "debt": np.array([-7, 1])})

    assert vectors.tolist() == [[-7.0, -6.0], [5.0, 6.0]]
    for code in (-1, -3, -4, 3):
        with pytest.raises(LarderError, match=r"out of data bounds|out of bounds|cannot be run"):
            tower.run({"country": np.array([0, code]), "debt": np.array([0, 0])})

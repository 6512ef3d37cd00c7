"""Weights beside a model's file: the same model as with them inside, and no file but the one that is listed."""

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from cache.errors import BundleError
from cache.model.tower import Histories, Tower
from cache.model.tower_spec import InputSpec, TowerSpec
from precompute.bundles import onnx_model
from precompute.bundles.onnx_model import OnnxModel, demand_weights
from precompute.bundles.quantize import quantize_tower


@pytest.fixture
def outside(monkeypatch):
    """Limits under which every table of these tests stands beside its graph."""
    monkeypatch.setattr(onnx_model, "GRAPH_BYTES_MAX", 0)
    monkeypatch.setattr(onnx_model, "_INLINE_TENSOR_BYTES_MAX", 63)


def table(items, dims, seed=0):
    rows = np.random.default_rng(seed).standard_normal((items + 1, dims)).astype(np.float32)
    rows[-1] = 0
    return rows


def spec_of(items, dims):
    history = InputSpec("history", "history", "int32", max_length=64, pad=items)
    return TowerSpec((history,), "vector", dims)


@given(st.integers(4, 40), st.integers(4, 32), st.integers(0, 9))
def test_a_model_is_the_same_with_its_weights_in_a_file_of_their_own(tmp_path_factory, items, dims, seed):
    folder, rows, spec = (tmp_path_factory.mktemp("model"), table(items, dims, seed), spec_of(items, dims))
    histories = Histories.of([range(1 + seed % items), [0]])
    onnx_model.history_tower(rows).write(folder / "inside.onnx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_model, "GRAPH_BYTES_MAX", 0)
        patch.setattr(onnx_model, "_INLINE_TENSOR_BYTES_MAX", 63)
        model = onnx_model.history_tower(rows)
    written = [model.write(folder / name) for name in ("outside.onnx", "again.onnx")]

    outputs = [Tower.open(folder / f"{name}.onnx", spec).run({"history": histories}) for name in ("inside", "outside")]
    forms = [
        quantize_tower(folder / f"{name}.onnx", spec, {"history": histories}, folder / f"{name}.i8")
        for name in ("inside", "outside")
    ]

    assert outputs[0].tobytes() == outputs[1].tobytes()
    assert forms[0] == forms[1] == (1, 0)
    assert (folder / "inside.i8").read_bytes() == (folder / "outside.i8").read_bytes()
    assert written == [folder / "outside.weights", folder / "again.weights"]
    assert {file.read_bytes() for file in folder.glob("*.weights")} == {rows.tobytes()}
    assert (folder / "outside.onnx").stat().st_size < 1000


def test_several_arrays_begin_at_pages(tmp_path, outside):
    centroids = table(7, 8, 1)

    weights_file = onnx_model.affinity_model(table(9, 8), centroids).write(tmp_path / "affinity.onnx")

    assert weights_file is not None and weights_file.stat().st_size == 4096 + centroids.nbytes
    spec = TowerSpec(spec_of(9, 8).inputs, "probabilities", 8)
    probabilities = Tower.open(tmp_path / "affinity.onnx", spec).run({"history": Histories.of([[1, 2]])})
    assert probabilities.sum() == pytest.approx(1)
    demand_weights("affinity", tmp_path / "affinity.onnx", weights_file)


def test_weights_inside_are_one_file(tmp_path):
    path = tmp_path / "tower.onnx"

    assert onnx_model.item_tower(table(5, 4)).write(path) is None

    assert list(tmp_path.iterdir()) == [path]
    demand_weights("item_tower", path, None)


def test_weights_that_are_not_listed_are_refused_with_what_to_write(tmp_path, outside):
    weights_file = onnx_model.item_tower(table(5, 4)).write(tmp_path / "tower.onnx")

    with pytest.raises(BundleError, match=r'in tower\.weights .* lists none: .*"weights" of'):
        demand_weights("item_tower", tmp_path / "tower.onnx", None)
    with pytest.raises(BundleError, match=r"in tower\.weights .* lists other\.weights"):
        demand_weights("item_tower", tmp_path / "tower.onnx", tmp_path / "other.weights")
    demand_weights("item_tower", tmp_path / "tower.onnx", weights_file)


def test_weights_that_no_tensor_uses_are_refused(tmp_path):
    onnx_model.item_tower(table(5, 4)).write(tmp_path / "tower.onnx")

    with pytest.raises(BundleError, match=r"tower\.onnx uses none: remove the entry"):
        demand_weights("item_tower", tmp_path / "tower.onnx", tmp_path / "tower.weights")


def external(name, location):
    tensor = numpy_helper.from_array(np.ones(4, np.float32), name)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


def in_a_branch():
    """Weights of a subgraph, which `onnx.load` would look for as well."""
    output_info = helper.make_tensor_value_info("out", TensorProto.FLOAT, [4])
    branch = helper.make_graph([], "branch", [], [output_info], [external("out", "../secret")])
    return [helper.make_node("If", ["flag"], ["vector"], then_branch=branch, else_branch=branch)]


def in_an_attribute():
    return [helper.make_node("Constant", [], ["vector"], value=external("c", "../secret"))]


@pytest.mark.parametrize("nodes", [in_a_branch, in_an_attribute])
def test_weights_are_found_wherever_a_graph_may_hold_them(tmp_path, nodes):
    vector = helper.make_tensor_value_info("vector", TensorProto.FLOAT, [4])
    graph = helper.make_graph(nodes(), "tower", [], [vector])
    (tmp_path / "tower.onnx").write_bytes(helper.make_model(graph).SerializeToString())

    with pytest.raises(BundleError, match=r"in \.\./secret in the folder of tower\.onnx"):
        demand_weights("user_tower", tmp_path / "tower.onnx", None)


def test_a_tensor_in_a_function_is_found_too(tmp_path):
    graph = helper.make_graph([], "tower", [], [])
    function = helper.make_function("larder", "f", [], ["vector"], in_an_attribute(), [helper.make_opsetid("", 17)])
    model = helper.make_model(graph, functions=[function])
    (tmp_path / "tower.onnx").write_bytes(model.SerializeToString())

    with pytest.raises(BundleError, match="secret"):
        demand_weights("user_tower", tmp_path / "tower.onnx", None)


def test_what_is_no_model_is_left_to_onnx_runtime(tmp_path):
    (tmp_path / "tower.onnx").write_bytes(b"no model")

    demand_weights("user_tower", tmp_path / "tower.onnx", None)


def test_a_model_read_back_is_the_model(tmp_path):
    model = onnx_model.item_tower(table(5, 4))
    model.write(tmp_path / "tower.onnx")

    assert OnnxModel((tmp_path / "tower.onnx").read_bytes()).graph == model.graph
    onnx.checker.check_model(onnx.load(tmp_path / "tower.onnx"))

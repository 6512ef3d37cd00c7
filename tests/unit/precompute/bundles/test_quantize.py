"""int8 towers: what becomes int8, how far they agree, and that no batch mate matters."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from cache.errors import BundleError
from cache.model.tower import Histories, Tower
from cache.model.tower_spec import InputSpec, TowerSpec
from precompute.bundles.agreement import measure_agreement, select_input_rows
from precompute.bundles.quantize import quantize_tower
from tests.models import histories_of, train_small

ITEMS, DIMS = 3000, 32
HISTORY = InputSpec("history", "history", "int32", max_length=64, pad=ITEMS)


def save(path, nodes, constants, inputs, width):
    graph = helper.make_graph(
        nodes,
        "tower",
        inputs,
        [helper.make_tensor_value_info("vector", TensorProto.FLOAT, ["n", width])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


@pytest.fixture(scope="module")
def perceptron(tmp_path_factory):
    """A general tower: the mean of embeddings through two dense layers."""
    path = tmp_path_factory.mktemp("perceptron") / "user_tower.onnx"
    rng = np.random.default_rng(0)
    table = rng.standard_normal((ITEMS + 1, DIMS)).astype(np.float32)
    table[-1] = 0
    nodes = [
        helper.make_node("Gather", ["table", "history"], ["rows"], name="embedding"),
        helper.make_node("ReduceMean", ["rows"], ["mean"], name="mean", axes=[1], keepdims=0),
        helper.make_node("Gemm", ["mean", "w1", "b1"], ["hidden"], name="first"),
        helper.make_node("Relu", ["hidden"], ["active"], name="relu"),
        helper.make_node("MatMul", ["active", "w2"], ["vector"], name="second"),
    ]
    constants = {
        "table": table,
        "w1": rng.standard_normal((DIMS, 64)).astype(np.float32) / 6,
        "b1": rng.standard_normal(64).astype(np.float32) / 10,
        "w2": rng.standard_normal((64, DIMS)).astype(np.float32) / 8,
    }
    history = helper.make_tensor_value_info("history", TensorProto.INT32, ["n", "length"])
    save(path, nodes, constants, [history], DIMS)
    return path, TowerSpec((HISTORY,), "vector", DIMS)


def make_inputs(count, seed=1):
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, ITEMS, rng.integers(1, 80)) for _ in range(count)]
    return {"history": Histories.of(rows)}


def test_tables_and_products_of_a_general_tower_become_int8(perceptron, tmp_path):
    path, spec = perceptron
    int8_path = tmp_path / "int8.onnx"

    quantized_counts = quantize_tower(path, spec, make_inputs(300), int8_path)

    assert quantized_counts == (1, 2)
    assert int8_path.stat().st_size < 0.4 * path.stat().st_size
    kinds = {tensor.name: tensor.data_type for tensor in onnx.load(int8_path).graph.initializer}
    assert kinds["table_int8"] == TensorProto.INT8
    assert "table" not in kinds


def test_a_general_int8_tower_is_batch_invariant_and_agrees(perceptron, tmp_path):
    path, spec = perceptron
    int8_path = tmp_path / "int8.onnx"
    inputs = make_inputs(1200)
    quantize_tower(path, spec, select_input_rows(inputs, np.arange(400)), int8_path)
    exact, fast = Tower.open(path, spec), Tower.open(int8_path, spec)
    items = np.random.default_rng(2).standard_normal((500, DIMS)).astype(np.float32)

    facts = measure_agreement(exact, fast, inputs, items)

    assert facts["batch_invariant"]
    assert facts["overlap_at_20"] > 0.85
    assert facts["score_error_p99"] < 0.1
    all_vectors = fast.run(inputs)
    for size in (1, 2, 31, 700):
        rows = np.random.default_rng(size).choice(1200, size, replace=False)
        assert np.array_equal(fast.run(select_input_rows(inputs, rows)), all_vectors[rows])


def test_weights_of_products_leave_room_for_pairs_in_16_bits(tmp_path):
    # Given activations and weights at their maximum, which AVX2 multiplies in pairs
    path, int8_path = tmp_path / "tower.onnx", tmp_path / "int8.onnx"
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Gather", ["table", "history"], ["rows"], name="embedding"),
        helper.make_node("ReduceMax", ["rows"], ["most"], name="most", axes=[1], keepdims=0),
        helper.make_node("MatMul", ["most", "weights"], ["vector"], name="product"),
    ]
    constants = {
        "table": (1 - rng.random((ITEMS + 1, DIMS)) / 100).astype(np.float32),
        "weights": (1 - rng.random((DIMS, DIMS)) / 100).astype(np.float32),
    }
    history = helper.make_tensor_value_info("history", TensorProto.INT32, ["n", "length"])
    save(path, nodes, constants, [history], DIMS)
    spec, inputs = TowerSpec((HISTORY,), "vector", DIMS), make_inputs(300)

    quantize_tower(path, spec, inputs, int8_path)

    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(int8_path).graph.initializer}
    assert np.abs(values["weights_quantized"].astype(int)).max() == 64
    exact, fast = (Tower.open(tower_path, spec).run(inputs) for tower_path in (path, int8_path))
    assert np.abs(fast - exact).max() < 0.02 * np.abs(exact).max()


def test_the_reference_towers_keep_their_lists_in_int8(tmp_path):
    bundle = train_small(tmp_path / "bundle")
    inputs = {"history": histories_of()}
    item = Tower.open(bundle.item_tower.path, bundle.item_tower.spec)
    vectors = item.run({"item_index": np.arange(len(bundle.item_ids))})

    for model in (bundle.user_tower, bundle.value_models["user_affinity"]):
        int8_path = tmp_path / f"{model.name}.onnx"
        quantize_tower(model.path, model.spec, inputs, int8_path)
        facts = measure_agreement(
            Tower.open(model.path, model.spec),
            Tower.open(int8_path, model.spec),
            inputs,
            vectors if model is bundle.user_tower else None,
        )

        assert facts["batch_invariant"]
        assert facts["overlap_at_20" if model is bundle.user_tower else "overlap_at_1"] >= 0.98


def test_a_tower_of_means_finds_the_lists_of_histories_of_one_item(tmp_path):
    # Given a tower of means: the mean of many unlike items is much shorter than the vector of one item
    path, int8_path = tmp_path / "tower.onnx", tmp_path / "int8.onnx"
    rng = np.random.default_rng(0)
    table = rng.standard_normal((ITEMS + 1, DIMS)).astype(np.float32)
    table[-1] = 0
    nodes = [
        helper.make_node("Gather", ["table", "history"], ["rows"]),
        helper.make_node("ReduceSum", ["rows", "axes"], ["sum"], keepdims=0),
        helper.make_node("Equal", ["history", "pad"], ["is_pad"]),
        helper.make_node("Not", ["is_pad"], ["is_item"]),
        helper.make_node("Cast", ["is_item"], ["ones"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["ones", "axes"], ["count"], keepdims=1),
        helper.make_node("Div", ["sum", "count"], ["mean"]),
        helper.make_node("MatMul", ["mean", "weights"], ["vector"]),
    ]
    constants = {
        "table": table,
        "axes": np.array([1], np.int64),
        "pad": np.array(ITEMS, np.int32),
        "weights": rng.standard_normal((DIMS, DIMS)).astype(np.float32) / 6,
    }
    history = helper.make_tensor_value_info("history", TensorProto.INT32, ["n", "length"])
    save(path, nodes, constants, [history], DIMS)
    spec = TowerSpec((HISTORY,), "vector", DIMS)
    long_histories = [rng.integers(0, ITEMS, 60) for _ in range(300)]
    inputs = {"history": Histories.of(long_histories)}
    items = rng.standard_normal((500, DIMS)).astype(np.float32)

    # When it is calibrated on long histories
    quantize_tower(path, spec, inputs, int8_path)
    facts = measure_agreement(Tower.open(path, spec), Tower.open(int8_path, spec), inputs, items)

    # Then it finds the lists of both long histories and histories of one item
    assert facts["overlap_at_20_newest"] > 0.9
    assert facts["overlap_at_20"] > 0.9


def test_excluded_items_count_on_neither_side(tmp_path):
    bundle = train_small(tmp_path / "bundle")
    tower = Tower.open(bundle.user_tower.path, bundle.user_tower.spec)
    item = Tower.open(bundle.item_tower.path, bundle.item_tower.spec)
    vectors = item.run({"item_index": np.arange(len(bundle.item_ids))})
    inputs = {"history": histories_of()}

    facts = measure_agreement(tower, tower, inputs, vectors, excluded_ordinals=histories_of())

    assert facts["overlap_at_20"] == 1.0
    assert facts["score_error_p99"] == 0.0


def test_a_model_with_nothing_to_quantize_is_refused(tmp_path):
    path = tmp_path / "plain.onnx"
    taste = helper.make_tensor_value_info("taste", TensorProto.FLOAT, ["n", 3])
    save(path, [helper.make_node("Relu", ["taste"], ["vector"])], {}, [taste], 3)
    spec = TowerSpec((InputSpec("taste", "feature", "float32", column="taste", width=3),), "vector", 3)

    with pytest.raises(BundleError, match=r"plain\.onnx has no embedding table"):
        quantize_tower(path, spec, {"taste": np.ones((4, 3), np.float32)}, tmp_path / "int8.onnx")

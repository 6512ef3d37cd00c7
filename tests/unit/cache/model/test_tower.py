from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from cache.errors import BundleError, ModelFailed
from cache.model.tower import Histories, Tower, repeat_values
from cache.model.tower_spec import InputSpec, TowerSpec, padded_lengths_up_to
from precompute.bundles import onnx_model
from precompute.bundles.quantize import quantize_tower

ITEMS, DIMS = 500, 24
SPEC = TowerSpec((InputSpec("history", "history", "int32", max_length=100, pad=ITEMS),), "vector", DIMS)


@pytest.fixture(scope="module")
def rows():
    table = np.random.default_rng(0).standard_normal((ITEMS + 1, DIMS)).astype(np.float32)
    table[-1] = 0
    return table


@pytest.fixture(scope="module")
def model(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("tower") / "user_tower.onnx"
    onnx_model.history_tower(rows).write(path)
    return path


def make_histories(count: int, longest: int = 150, seed: int = 1) -> Histories:
    rng = np.random.default_rng(seed)
    return Histories.of([rng.integers(0, ITEMS, rng.integers(1, longest)) for _ in range(count)])


def test_a_history_is_the_sum_of_its_rows_and_keeps_its_last_items(model, rows):
    long = np.random.default_rng(2).integers(0, ITEMS, 140)
    histories = Histories.of([[3], [1, 2, 3], long, []])

    vectors = Tower.open(model, SPEC).run({"history": histories})

    assert np.allclose(vectors[0], rows[3])
    assert np.allclose(vectors[1], rows[1:4].sum(axis=0), atol=1e-5)
    assert np.allclose(vectors[2], rows[long[-100:]].sum(axis=0), atol=1e-4)
    assert not vectors[3].any()


def test_padding_depends_on_the_rows_own_length_only(model):
    tower = Tower.open(model, SPEC)
    histories = make_histories(50)

    lengths = {
        int(row): feed["history"].shape[1] for numbers, feed in tower.batches({"history": histories}) for row in numbers
    }

    assert tower.buckets == (16, 32, 64, 100)
    for row, length in enumerate(np.diff(histories.indptr)):
        assert lengths[row] == next(bucket for bucket in (16, 32, 64, 100, 1000) if bucket >= min(length, 100))


def test_int8_answers_are_bitwise_the_same_in_batches_of_1_to_4096(model, tmp_path):
    # Given a quantized tower and many histories
    histories = make_histories(4096, longest=60)
    int8 = tmp_path / "int8.onnx"
    quantize_tower(model, SPEC, {"history": histories.select_rows(np.arange(200))}, int8)
    tower = Tower.open(int8, SPEC, threads=2)

    full_batch_vectors = tower.run({"history": histories})

    rng = np.random.default_rng(5)
    for size in (1, 2, 3, 5, 16, 19, 20, 33, 100, 257, 1000, 2048, 4095):
        rows = rng.choice(4096, size, replace=False)
        part = tower.run({"history": histories.select_rows(rows)})
        assert np.array_equal(part.view(np.uint32), full_batch_vectors[rows].view(np.uint32)), size


def test_buckets_end_with_the_longest_length():
    assert padded_lengths_up_to(10) == (10,)
    assert padded_lengths_up_to(16) == (16,)
    assert padded_lengths_up_to(100) == (16, 32, 64, 100)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (replace(SPEC, inputs=(replace(SPEC.inputs[0], name="past"),)), ("history", "past")),
        (replace(SPEC, inputs=(replace(SPEC.inputs[0], dtype="int64"),)), ("tensor(int32)", "int64")),
        (replace(SPEC, output="embedding"), ("vector", "embedding")),
        (replace(SPEC, output_dims=25), ("24", "25")),
        (
            replace(SPEC, inputs=(InputSpec("history", "feature", "int32", column="age"),)),
            ("['rows', 'length']", "feature"),
        ),
        (replace(SPEC, inputs=()), ("history", "[]")),
    ],
)
def test_a_mismatch_names_both_sides(model, spec, named):
    with pytest.raises(BundleError) as caught:
        Tower.open(model, spec)

    for part in named:
        assert part in caught.value.message


def test_a_file_that_is_no_model_is_refused(tmp_path):
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"not a model")

    with pytest.raises(BundleError, match=r"broken\.onnx"):
        Tower.open(path, SPEC)


def test_a_specification_survives_json():
    assert TowerSpec.from_json(SPEC.to_json()) == SPEC


def test_an_unbound_feature_or_a_history_without_padding_is_refused():
    with pytest.raises(BundleError, match="pad"):
        InputSpec("history", "history", "int32")
    with pytest.raises(BundleError, match="column"):
        InputSpec("age", "feature", "float32")


def feature_model(path: Path) -> TowerSpec:
    """vector = [age, taste...]: one scalar and one vector feature."""
    nodes = [
        helper.make_node("Unsqueeze", ["age", "axis"], ["tall"]),
        helper.make_node("Concat", ["tall", "taste"], ["vector"], axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "features",
        [
            helper.make_tensor_value_info("age", TensorProto.FLOAT, ["n"]),
            helper.make_tensor_value_info("taste", TensorProto.FLOAT, ["n", 3]),
        ],
        [helper.make_tensor_value_info("vector", TensorProto.FLOAT, ["n", 4])],
        [numpy_helper.from_array(np.array([1], np.int64), "axis")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path)
    return TowerSpec(
        (
            InputSpec("age", "feature", "float32", column="user_age"),
            InputSpec("taste", "feature", "float32", column="taste", width=3),
        ),
        "vector",
        4,
    )


def test_features_alone_make_a_tower(tmp_path):
    path = tmp_path / "features.onnx"
    tower = Tower.open(path, feature_model(path))

    vectors = tower.run({"age": np.array([30.0]), "taste": np.array([[1, 2, 3]])})

    assert vectors.tolist() == [[30.0, 1.0, 2.0, 3.0]]


def test_a_wrong_feature_width_names_both_sides(tmp_path):
    path = tmp_path / "features.onnx"
    spec = feature_model(path)
    wrong = replace(spec, inputs=(spec.inputs[0], replace(spec.inputs[1], width=5)))

    with pytest.raises(BundleError, match="width 3 in the model, 5"):
        Tower.open(path, wrong)


def test_a_field_of_an_input_that_there_is_not_is_named_with_those_there_are() -> None:
    spec_json = SPEC.to_json()
    spec_json["inputs"][0]["dims"] = 4

    with pytest.raises(BundleError, match=r"no field 'dims'; there are name, .*width") as refused:
        TowerSpec.from_json(spec_json)

    assert refused.value.details["input"] == spec_json["inputs"][0]["name"]


@pytest.mark.parametrize("rows", [0, 1, 3_000, 40_000])
def test_repeated_values_are_those_of_numpy(rows: int) -> None:
    rng = np.random.default_rng(rows)
    values = rng.integers(-(2**62), 2**62, rows)
    counts = rng.integers(0, 12, rows) * rng.integers(0, 2, rows)
    assert np.array_equal(repeat_values(values, counts), np.repeat(values, counts))


def test_a_model_that_cannot_be_run_is_named_with_its_input(model):
    tower = Tower.open(model, SPEC)

    with pytest.raises(ModelFailed, match=r"^user_tower\.onnx cannot be run on history \[2, 16\]: "):
        tower.run({"history": Histories.of([[ITEMS + 7]])})

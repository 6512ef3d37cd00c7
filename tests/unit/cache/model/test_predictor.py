"""The one live path, over a small real model, real indexes and a real item table."""

import numpy as np
import pytest
from onnx import load, numpy_helper

from cache.errors import InvalidInput
from cache.model.input_preparation import LiveInput
from cache.model.tower import Histories
from cache.records import decode_record
from cache.topk.topk import Scorer
from precompute.bundles import onnx_model
from precompute.bundles.bundle import Bundle, ModelFile, write_bundle
from tests.models import ITEMS, K, histories_of, make_predictor, train_small

AT = 1_700_000_000


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return train_small(tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="module")
def world(bundle, tmp_path_factory):
    return make_predictor(bundle, tmp_path_factory.mktemp("live"))


def history(*numbers: int) -> LiveInput:
    return LiveInput(history=tuple(f"item-{number}".encode() for number in numbers))


def answer(world, table, *inputs, blocked=()):
    predictor, _ = world
    batch = [predictor.prepare(table, live_input) for live_input in inputs]
    fingerprints = list(range(1, len(batch) + 1))
    records = predictor.predict(table, batch, fingerprints, AT, blocked_ordinals=np.array(blocked, np.int64))
    layout = predictor._tables[table].layout
    return [decode_record(layout, record) for record in records]


def test_a_list_has_the_users_best_items_in_order_and_is_marked_live(world):
    record = answer(world, "user_topk", history(2, 4, 6))[0]

    assert record.is_live and record.fingerprint == 1 and record.scored_at == AT
    assert len(record.item_ordinals) == K
    assert (np.diff(record.numbers) <= 0).all()


def test_history_and_blocked_items_never_appear(world):
    _, items = world
    live_input = history(2, 4, 6, 8)
    history_ordinals = items.ordinals_of(list(live_input.history or ()))
    first = answer(world, "user_topk", live_input)[0]
    blocked = [int(ordinal) for ordinal in first.item_ordinals[:3]]

    record = answer(world, "user_topk", live_input, blocked=blocked)[0]

    assert not np.isin(first.item_ordinals, history_ordinals).any()
    assert not np.isin(record.item_ordinals, [*history_ordinals, *blocked]).any()
    assert record.item_ordinals[0] == first.item_ordinals[3]


def test_an_item_sent_twice_counts_once_where_it_stood_last(world):
    twice, deduplicated_record = answer(world, "user_topk", history(2, 4, 2, 6), history(4, 2, 6))
    assert twice.item_ordinals.tolist() == deduplicated_record.item_ordinals.tolist()
    assert twice.numbers.tolist() == deduplicated_record.numbers.tolist()


def test_many_blocked_items_are_skipped_inside_the_index(world, monkeypatch):
    monkeypatch.setattr("cache.model.candidate_search._BLOCKED_FILTERED_ABOVE", 4)
    _, items = world
    blocked = list(range(0, items.count, 2))

    record = answer(world, "user_topk", history(1), blocked=blocked)[0]

    assert len(record.item_ordinals) == K
    assert not np.isin(record.item_ordinals, blocked).any()


def test_a_list_is_short_when_fewer_items_remain(world):
    _, items = world
    blocked = list(range(4, items.count))

    record = answer(world, "user_topk", history(1), blocked=blocked)[0]

    assert 3 <= len(record.item_ordinals) <= 4


def test_fp32_live_answers_equal_the_nights(bundle, tmp_path):
    # Given the night's exact lists of all users
    predictor, items = make_predictor(bundle, tmp_path, precision="fp32")
    drawn = histories_of()
    # The night groups its histories, with each item once.
    histories = Histories.of([np.unique(part) for part in np.split(drawn.indices, drawn.indptr[1:-1])])
    ordinal = np.empty(ITEMS, np.int64)
    ordinal[items._model_index] = np.arange(ITEMS)
    excluded_histories = Histories(histories.indptr, ordinal[histories.indices])
    users = predictor._towers["user_tower"].run({"history": histories})
    night, scores = Scorer.of(items.vectors).top(users, K, excluded_histories)

    # When the live path is sent the same histories
    live_inputs = [
        history(*histories.indices[histories.indptr[row] : histories.indptr[row + 1]]) for row in range(len(histories))
    ]
    live = answer((predictor, items), "user_topk", *live_inputs)

    # Then every list is the night's
    for row, record in enumerate(live):
        assert np.allclose(record.numbers, scores[row], rtol=1e-5)
        assert record.item_ordinals.tolist() == night[row].tolist()


def test_an_int8_answer_does_not_depend_on_its_micro_batch(world):
    predictor, _ = world
    rng = np.random.default_rng(7)
    live_inputs = [history(*rng.integers(0, ITEMS, rng.integers(1, 30))) for _ in range(200)]
    prepared = [predictor.prepare("user_topk", live_input) for live_input in live_inputs]
    full_batch_records = predictor.predict("user_topk", prepared, range(200), AT)

    for size in (1, 2, 7, 19, 20, 64):
        rows = rng.choice(200, size, replace=False)
        part = predictor.predict("user_topk", [prepared[row] for row in rows], rows.tolist(), AT)
        assert part == [full_batch_records[row] for row in rows]


def test_vectors_and_values_come_from_their_towers(world, bundle):
    vector = answer(world, "user_vector", history(1, 2))[0]
    values = answer(world, "user_affinity", history(1, 2))[0]

    assert len(vector.numbers) == bundle.dims
    assert len(values.numbers) == len(bundle.value_models["user_affinity"].labels)
    assert values.numbers.sum() == pytest.approx(1, abs=1e-4)


def test_similar_items_leave_the_item_itself_out(world):
    for ordinal in range(5):
        record = answer(world, "item_similar", LiveInput(item_ordinal=ordinal))[0]

        assert ordinal not in record.item_ordinals
        assert len(record.item_ordinals) == K
        assert record.numbers[0] <= 1.0001


def test_unknown_history_ids_are_dropped_and_counted(world):
    predictor, _ = world
    known_input = predictor.prepare("user_topk", LiveInput(history=(b"item-1",)))
    mixed = predictor.prepare("user_topk", LiveInput(history=(b"item-1", b"nobody", b"else")))

    assert mixed.unknown_id_count == 2
    assert np.array_equal(mixed.history, known_input.history)


@pytest.mark.parametrize("source", [LiveInput(), LiveInput(history=()), LiveInput(history=(b"nobody",))])
def test_nothing_known_is_no_input(world, source):
    assert world[0].prepare("user_topk", source) is None


def test_a_feature_that_the_model_does_not_take_is_refused(world):
    with pytest.raises(InvalidInput, match="'age'; it takes none"):
        world[0].prepare("user_topk", LiveInput(history=(b"item-1",), features={"age": 3}))


def test_a_table_without_a_producer_is_not_supported(world):
    predictor, _ = world

    assert predictor.supports("user_topk")
    assert not predictor.supports("nothing")
    with pytest.raises(InvalidInput, match="nothing"):
        predictor.prepare("nothing", LiveInput())


def test_scores_of_given_items_equal_those_of_the_list(world):
    predictor, _ = world
    prepared = predictor.prepare("user_topk", history(2, 4))
    record = answer(world, "user_topk", history(2, 4))[0]

    (vector,) = predictor.vectors([prepared])
    scores = predictor.score_vector("user_topk", vector, record.item_ordinals.astype(np.int64))

    assert np.array_equal(scores, record.numbers)


def test_warming_runs_every_table(world):
    world[0].warm()


def test_a_bundle_with_shuffled_items_gives_the_same_answers(bundle, tmp_path):
    # Given the same model with its vocabulary in another order
    shuffled = shuffle(bundle, tmp_path / "shuffled")
    original_world, theirs = (
        make_predictor(bundle, tmp_path / "a", precision="fp32"),
        make_predictor(shuffled, tmp_path / "b", precision="fp32"),
    )
    assert original_world[1].ids_of(np.arange(ITEMS, dtype=np.uint32)) == theirs[1].ids_of(
        np.arange(ITEMS, dtype=np.uint32)
    )

    # When both compute the same inputs
    rng = np.random.default_rng(8)
    live_inputs = [history(*rng.choice(ITEMS, 6, replace=False)) for _ in range(40)]
    for table, inputs in (
        ("user_topk", live_inputs),
        ("user_affinity", live_inputs),
        ("item_similar", [LiveInput(item_ordinal=ordinal) for ordinal in range(ITEMS)]),
    ):
        mine, shuffled_answers = (answer(original_world, table, *inputs), answer(theirs, table, *inputs))

        # Then the answers are the same
        for first, second in zip(mine, shuffled_answers, strict=True):
            assert np.allclose(first.numbers, second.numbers, rtol=1e-4, atol=1e-6)
            if first.item_ordinals is not None:
                assert first.item_ordinals.tolist() == second.item_ordinals.tolist()


def shuffle(bundle: Bundle, output_folder) -> Bundle:
    """The same model with its items in another order."""
    order = np.random.default_rng(9).permutation(len(bundle.item_ids))

    def table(model, name="table"):
        graph = load(model.path).graph
        return next(numpy_helper.to_array(initializer) for initializer in graph.initializer if initializer.name == name)

    affinity = bundle.value_models["user_affinity"]
    rows = table(bundle.user_tower)
    padded = np.concatenate([rows[order], rows[-1:]])
    return write_bundle(
        output_folder,
        name="shuffled",
        version="1",
        dims=bundle.dims,
        item_ids=[bundle.item_ids[index].decode() for index in order],
        user_tower=ModelFile(onnx_model.history_tower(padded), bundle.user_tower.spec),
        item_tower=ModelFile(onnx_model.item_tower(table(bundle.item_tower)[order]), bundle.item_tower.spec, "item"),
        values={
            "user_affinity": ModelFile(
                onnx_model.affinity_model(padded, table(affinity, "centroids").T), affinity.spec, labels=affinity.labels
            )
        },
    )

"""Many inputs prepared at once: each as if it were alone."""

import os

import numpy as np
import pytest

from cache.errors import InvalidInput
from cache.model.input_preparation import LiveInput, PreparedInput, prepare_all
from cache.model.tower import Histories, Tower
from tests.models import ITEMS, histories_of, make_predictor, train_small


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    bundle = train_small(tmp_path_factory.mktemp("bundle"))
    return make_predictor(bundle, tmp_path_factory.mktemp("live"))


def drawn(seed: int, count: int) -> list[LiveInput]:
    rng = np.random.default_rng(seed)
    inputs: list[LiveInput] = []
    for _ in range(count):
        numbers = rng.integers(0, ITEMS + 10, rng.integers(0, 12))
        ids = tuple(f"item-{number}".encode() for number in numbers)
        inputs.append(LiveInput(history=ids or None))
    return inputs


def test_a_batch_is_prepared_as_its_inputs_one_by_one(world):
    predictor, _ = world
    inputs = drawn(3, 60)

    prepared_inputs = predictor.prepare_all("user_topk", inputs)

    assert any(prepared is None for prepared in prepared_inputs)
    for source, prepared in zip(inputs, prepared_inputs, strict=True):
        alone = predictor.prepare("user_topk", source)
        assert (alone is None) == (prepared is None)
        if alone is not None and prepared is not None:
            assert alone.history.tolist() == prepared.history.tolist()
            assert alone.excluded_ordinals.tolist() == prepared.excluded_ordinals.tolist()
            assert alone.unknown_id_count == prepared.unknown_id_count
            assert len(set(prepared.excluded_ordinals.tolist())) == len(prepared.excluded_ordinals)


def test_an_error_stands_where_its_input_was(world):
    predictor, _ = world
    good = LiveInput(history=(b"item-1",))
    invalid_input = LiveInput(history=(b"item-1",), features={"age": 3})

    first, second, third = predictor.prepare_all("user_topk", [good, invalid_input, good])

    assert first is not None and third is not None and isinstance(second, InvalidInput)


def test_an_item_is_its_own_input_next_to_unknown_items(world):
    predictor, items = world

    prepared_inputs = predictor.prepare_all(
        "item_similar", [LiveInput(item_ordinal=3), LiveInput(), LiveInput(item_ordinal=0)]
    )

    assert [prepared is None for prepared in prepared_inputs] == [False, True, False]
    assert prepared_inputs[0].excluded_ordinals.tolist() == [3]
    assert prepared_inputs[0].item_index == items.model_indices_of(np.array([3]))[0]


def test_a_reused_input_buffer_shows_nothing_of_the_batch_before(world):
    predictor, _ = world
    tower = predictor._towers["user_tower"]
    histories = histories_of()
    expected = [tower.run({"history": histories.select_rows(np.array([row]))})[0] for row in range(len(histories))]

    for rows in (np.arange(40), np.arange(40, 43), np.arange(7, 30)):
        part = Histories(histories.indptr, histories.indices).select_rows(rows)
        vectors = tower.run({"history": part})
        assert np.array_equal(vectors, np.array([expected[row] for row in rows]))


def test_threads_can_be_kept_on_cores_without_another_answer(world, tmp_path):

    bundle = train_small(tmp_path)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    pinned = Tower.open(bundle.user_tower.path, bundle.user_tower.spec, threads=2, cores=cores[:1])
    free = Tower.open(bundle.user_tower.path, bundle.user_tower.spec)

    assert np.array_equal(pinned.run({"history": histories_of()}), free.run({"history": histories_of()}))


def test_models_are_given_the_newest_of_a_history_and_all_of_it_is_excluded(world):
    predictor, items = world
    spec = predictor._towers["user_tower"].spec
    history = tuple(f"item-{number}".encode() for number in (4, 1, ITEMS + 5, 7, 2))

    full_input, cut = (
        prepare_all("user_topk", spec, items, [LiveInput(history=history)], limit)[0] for limit in (4, 2)
    )

    assert isinstance(full_input, PreparedInput) and isinstance(cut, PreparedInput)
    assert cut.history.tolist() == full_input.history.tolist()[-2:] and len(full_input.history) == 4
    assert cut.excluded_ordinals.tolist() == full_input.excluded_ordinals.tolist()
    assert cut.unknown_id_count == full_input.unknown_id_count == 1

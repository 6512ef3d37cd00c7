"""Many inputs prepared at once: each as if it were alone."""

import os

import numpy as np
import pytest

from cache.errors import InvalidInput
from cache.model.input_preparation import Prepared, prepare_all
from cache.model.predictor import LiveInput
from cache.model.tower import Histories, Tower
from tests.models import ITEMS, histories_of, make_predictor, train_small


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    bundle = train_small(tmp_path_factory.mktemp("bundle"))
    return make_predictor(bundle, tmp_path_factory.mktemp("live"))


def drawn(seed: int, count: int) -> list[LiveInput]:
    rng = np.random.default_rng(seed)
    found: list[LiveInput] = []
    for _ in range(count):
        numbers = rng.integers(0, ITEMS + 10, rng.integers(0, 12))
        ids = tuple(f"item-{number}".encode() for number in numbers)
        found.append(LiveInput(history=ids or None))
    return found


def test_a_batch_is_prepared_as_its_inputs_one_by_one(world):
    predictor, _ = world
    sent = drawn(3, 60)

    together = predictor.prepare_all("user_topk", sent)

    assert any(each is None for each in together)
    for source, found in zip(sent, together, strict=True):
        alone = predictor.prepare("user_topk", source)
        assert (alone is None) == (found is None)
        if alone is not None and found is not None:
            assert alone.history.tolist() == found.history.tolist()
            assert alone.excluded.tolist() == found.excluded.tolist()
            assert alone.dropped == found.dropped
            assert len(set(found.excluded.tolist())) == len(found.excluded)


def test_an_error_stands_where_its_input_was(world):
    predictor, _ = world
    good = LiveInput(history=(b"item-1",))
    bad = LiveInput(history=(b"item-1",), features={"age": 3})

    first, second, third = predictor.prepare_all("user_topk", [good, bad, good])

    assert first is not None and third is not None and isinstance(second, InvalidInput)


def test_an_item_is_its_own_input_beside_items_that_nobody_knows(world):
    predictor, items = world

    found = predictor.prepare_all(
        "item_similar", [LiveInput(item=3), LiveInput(), LiveInput(item=0)]
    )

    assert [each is None for each in found] == [False, True, False]
    assert found[0].excluded.tolist() == [3]
    assert found[0].item_index == items.to_model(np.array([3]))[0]


def test_a_reused_input_buffer_shows_nothing_of_the_batch_before(world):
    predictor, _ = world
    tower = predictor._towers["user_tower"]
    whole = histories_of()
    expected = [tower.run({"history": whole.take(np.array([row]))})[0] for row in range(len(whole))]

    for rows in (np.arange(40), np.arange(40, 43), np.arange(7, 30)):
        part = Histories(whole.indptr, whole.indices).take(rows)
        found = tower.run({"history": part})
        assert np.array_equal(found, np.array([expected[row] for row in rows]))


def test_threads_can_be_kept_on_cores_without_another_answer(world, tmp_path):

    bundle = train_small(tmp_path)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    pinned = Tower.open(bundle.user_tower.path, bundle.user_tower.spec, threads=2, cores=cores[:1])
    free = Tower.open(bundle.user_tower.path, bundle.user_tower.spec)

    assert np.array_equal(
        pinned.run({"history": histories_of()}), free.run({"history": histories_of()})
    )


def test_models_are_given_the_newest_of_a_history_and_all_of_it_is_excluded(world):
    predictor, items = world
    spec = predictor._towers["user_tower"].spec
    history = tuple(f"item-{number}".encode() for number in (4, 1, ITEMS + 5, 7, 2))

    whole, cut = (
        prepare_all("user_topk", spec, items, [LiveInput(history=history)], limit)[0]
        for limit in (4, 2)
    )

    assert isinstance(whole, Prepared) and isinstance(cut, Prepared)
    assert cut.history.tolist() == whole.history.tolist()[-2:] and len(whole.history) == 4
    assert cut.excluded.tolist() == whole.excluded.tolist()
    assert cut.dropped == whole.dropped == 1

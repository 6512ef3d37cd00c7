"""What a night without interactions puts in the place of histories and of what is popular."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from cache.model.ranking import Metric
from precompute.partitions.shard_input import ShardInput
from precompute.scoring.defaults import find_favourites
from precompute.scoring.input_samples import DRAWN_ITEMS_MAX, DRAWN_USERS_MAX, draw_histories

ITEMS, DIMS = 300, 8
RNG = np.random.default_rng(7)
VECTORS = RNG.normal(size=(ITEMS, DIMS)).astype(np.float32)


def items() -> Any:
    return SimpleNamespace(vectors=VECTORS, count=ITEMS, ids_of=lambda rows: [f"i{row}" for row in rows.tolist()])


def entities(count: int, without: tuple[int, ...] = ()) -> ShardInput:
    """Users with vectors and a feature, and no history."""
    vectors = RNG.normal(size=(count, DIMS)).astype(np.float32)
    vectors[list(without)] = np.nan
    return ShardInput(
        entity_ids=pa.array([f"u{row}" for row in range(count)], pa.string()),
        entity_hashes=np.arange(count, dtype=np.uint64),
        history_indptr=np.zeros(count + 1, np.int64),
        history_ordinals=np.empty(0, np.int64),
        features={"age": pa.array(range(count))},
        entity_vectors=vectors,
    )


def scored(users: NDArray[np.float32], metric: Metric) -> NDArray[np.float64]:
    user_vectors, right = users.astype(np.float64), VECTORS.astype(np.float64)
    if metric == "cosine":
        user_vectors /= np.linalg.norm(user_vectors, axis=1, keepdims=True)
        right /= np.linalg.norm(right, axis=1, keepdims=True)
    return np.asarray(user_vectors @ right.T)


@pytest.mark.parametrize("metric", ["inner_product", "cosine"])
def test_a_drawn_history_holds_some_of_the_items_that_suit_its_user_best(metric: Metric) -> None:
    original_entities = entities(40, without=(0, 7))

    drawn = draw_histories(original_entities, items(), metric, seed=0)

    assert original_entities.entity_vectors is not None and drawn.entity_vectors is not None
    kept_rows = [row for row in range(40) if row not in (0, 7)]
    assert drawn.entity_ids == original_entities.entity_ids.take(pa.array(kept_rows))
    assert drawn.features["age"].to_pylist() == kept_rows
    assert np.array_equal(drawn.entity_hashes, original_entities.entity_hashes[kept_rows])
    best_items = np.argsort(-scored(original_entities.entity_vectors[kept_rows], metric), axis=1)[:, :100]
    for row, suits in enumerate(best_items):
        history = drawn.history_ordinals[drawn.history_indptr[row] : drawn.history_indptr[row + 1]]
        assert 1 <= len(history) == len(set(history.tolist())) <= DRAWN_ITEMS_MAX
        assert set(history.tolist()) <= set(suits.tolist())


def test_the_same_seed_draws_the_same_and_another_seed_does_not() -> None:
    original_entities = entities(700)

    first, repeated_draw, reseeded_draw = (
        draw_histories(original_entities, items(), "inner_product", seed=seed) for seed in (0, 0, 1)
    )

    assert len(first.entity_ids) == DRAWN_USERS_MAX
    assert np.array_equal(first.history_ordinals, repeated_draw.history_ordinals)
    assert not np.array_equal(first.history_ordinals, reseeded_draw.history_ordinals)


@pytest.mark.parametrize("metric", ["inner_product", "cosine"])
def test_defaults_are_the_items_with_the_highest_mean_score(metric: Metric) -> None:
    users = RNG.normal(size=(50, DIMS)).astype(np.float32)

    ids, scores = find_favourites(items(), users, metric, 20)

    means = scored(users, metric).mean(axis=0)
    best_items = np.argsort(-means, kind="stable")[:20]
    assert ids == [f"i{item}" for item in best_items]
    assert np.allclose(scores, means[best_items], rtol=1e-5, atol=1e-6)


def test_there_are_no_more_defaults_than_items() -> None:
    ids, scores = find_favourites(items(), VECTORS[:3], "inner_product", 1000)

    assert len(ids) == len(scores) == ITEMS

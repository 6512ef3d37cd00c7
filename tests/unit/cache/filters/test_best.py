"""The best of some items are those of the night's own ranking over them: items, order and bits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.filters.filtering import SubsetSearch
from cache.model.ranking import Metric, rank


@pytest.mark.parametrize("metric", ["inner_product", "cosine"])
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 7, 100]), st.sampled_from([0.001, 0.1, 0.4, 1.0]))
def test_the_best_of_some_are_those_of_the_ranking(metric: Metric, seed: int, k: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    count, dims = 4_000, int(rng.choice([3, 16, 64]))
    vectors = rng.standard_normal((count, dims)).astype(np.float32)
    if seed % 3 == 0:  # ties in masses, and items without direction
        vectors = np.round(vectors).astype(np.float32)
    vector = rng.standard_normal(dims).astype(np.float32) * np.float32(seed % 5 != 0)
    ordinals = np.flatnonzero(rng.random(count) < share)

    best_items, scores = SubsetSearch(vectors).search(vector, ordinals, k, metric)

    items, expected_scores = rank(vector[None], vectors, ordinals[None], None, k, metric=metric)
    size = min(k, len(ordinals))
    np.testing.assert_array_equal(best_items, items[0, :size])
    np.testing.assert_array_equal(scores.view(np.uint32), expected_scores[0, :size].view(np.uint32))


def test_numbers_beyond_all_bounds_are_ranked_as_they_are() -> None:
    vectors = np.full((2_000, 4), 3e38, np.float32)

    with np.errstate(over="ignore"):
        best_items, _ = SubsetSearch(vectors).search(np.full(4, 3e38, np.float32), np.arange(2_000), 5)

    np.testing.assert_array_equal(best_items, np.arange(5))

"""Recall of what was held out, against the definition."""

import numpy as np
import pytest

from cache.model.tower import Histories
from precompute.bundles.held_out import RECALL_TOP_ITEMS, mean_recall


@pytest.mark.parametrize("users", [1, 7, 40])
def test_recall_is_the_mean_share_of_held_out_items_among_the_best_unseen_ones(users):
    rng = np.random.default_rng(users)
    items, vectors = rng.standard_normal((90, 5)), rng.standard_normal((users, 5))
    mixed = [rng.permutation(90) for _ in range(users)]
    input_histories = [permutation[: rng.integers(0, 10)] for permutation in mixed]
    targets = [permutation[20 : 21 + rng.integers(0, 30)] for permutation in mixed]

    measured_recall = mean_recall(
        vectors.astype(np.float32),
        items.astype(np.float32),
        Histories.of(input_histories),
        Histories.of(targets),
        "inner_product",
    )

    expected_recalls = []
    for vector, history, target_items in zip(vectors, input_histories, targets, strict=True):
        scores = items @ vector
        scores[history] = -np.inf
        top_items = np.argsort(-scores)[:RECALL_TOP_ITEMS]
        expected_recalls.append(len(set(top_items) & set(target_items)) / min(RECALL_TOP_ITEMS, len(target_items)))
    assert measured_recall == pytest.approx(np.mean(expected_recalls), abs=1e-9)

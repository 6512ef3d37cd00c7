"""Recall of what was held out, against the definition."""

import numpy as np
import pytest

from cache.model.tower import Histories
from precompute.reference.held_out import TOP, recall


@pytest.mark.parametrize("users", [1, 7, 40])
def test_recall_is_the_mean_share_of_held_out_items_among_the_best_unseen_ones(users):
    rng = np.random.default_rng(users)
    items, vectors = rng.standard_normal((90, 5)), rng.standard_normal((users, 5))
    mixed = [rng.permutation(90) for _ in range(users)]
    seen = [each[: rng.integers(0, 10)] for each in mixed]
    held = [each[20 : 21 + rng.integers(0, 30)] for each in mixed]

    found = recall(
        vectors.astype(np.float32),
        items.astype(np.float32),
        Histories.of(seen),
        Histories.of(held),
        "inner_product",
    )

    shares = []
    for vector, known, wanted in zip(vectors, seen, held, strict=True):
        scores = items @ vector
        scores[known] = -np.inf
        best = np.argsort(-scores)[:TOP]
        shares.append(len(set(best) & set(wanted)) / min(TOP, len(wanted)))
    assert found == pytest.approx(np.mean(shares), abs=1e-9)

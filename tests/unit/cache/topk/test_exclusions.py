"""Exclusions among so many items that their tiles take two bytes to count."""

import numpy as np

from cache.model.tower import Histories
from cache.topk.topk import Scorer

ITEMS, DIMS, USERS, K = 200_000, 8, 6, 50


def test_what_is_excluded_is_in_no_list_and_all_else_is() -> None:
    rng = np.random.default_rng(0)
    items = rng.standard_normal((ITEMS, DIMS)).astype(np.float32)
    users = rng.standard_normal((USERS, DIMS)).astype(np.float32)
    scores = users.astype(np.float64) @ items.T.astype(np.float64)
    exclusions = [np.concatenate([np.argsort(-row)[:400:2], rng.choice(ITEMS, 300, replace=False)]) for row in scores]

    top_items = Scorer.of(items).top(users, K, Histories.of(exclusions))[0]

    for row, user_exclusions, user_items in zip(scores, exclusions, top_items, strict=True):
        row[user_exclusions] = -np.inf
        assert set(np.argsort(-row)[:K].tolist()) == set(user_items.tolist())

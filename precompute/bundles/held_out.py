"""Ranks of items held out of known histories: recall@20, and the share of random items that they score above."""

import numpy as np
from numpy.typing import NDArray

from cache.model.ranking import Metric, unit_rows
from cache.model.tower import Histories
from cache.topk.topk import Scorer

TOP = 20

SHARE_ABOVE_RANDOM = "share_above_random"
"""Training fact of a bundle: share of pairs in which held-out items scored above random ones at its import."""

ITEMS_COMPARED = 2_000
"""Number of random items with whose scores those of held-out items are compared, at most."""


def recall(
    vectors: NDArray[np.float32],
    items: NDArray[np.float32],
    exclusions: Histories,
    held_out_items: Histories,
    metric: Metric,
) -> float:
    """Mean over users of `recalls`."""
    return float(recalls(vectors, items, exclusions, held_out_items, metric).mean())


def recalls(
    vectors: NDArray[np.float32],
    items: NDArray[np.float32],
    exclusions: Histories,
    held_out_items: Histories,
    metric: Metric,
) -> NDArray[np.float64]:
    """Recall@20 of each user's held-out items among those that were not seen: hits / min(20, number held out)."""
    top, counts = min(TOP, len(items)), np.diff(held_out_items.indptr)
    lists = Scorer.of(items, metric).top(
        np.ascontiguousarray(vectors, np.float32), top, exclusions
    )[0]
    # One number for each pair of a user and an item; none has an item past the end, as NO_ITEM is.
    pairs = np.repeat(np.arange(len(held_out_items)), counts) * len(items) + held_out_items.indices
    listed_pairs = np.arange(len(lists))[:, None] * len(items) + lists.astype(np.int64)
    hits = (np.isin(listed_pairs, pairs) & (lists < len(items))).sum(axis=1)
    return np.asarray(hits / np.minimum(top, counts), np.float64)


def shares_above_random(
    vectors: NDArray[np.float32],
    items: NDArray[np.float32],
    compared: NDArray[np.float32],
    held_out_items: Histories,
    users: int,
    metric: Metric,
) -> NDArray[np.float64]:
    """Return float64 [users]: the share of the compared items that a user's held-out items score above, else NaN.

    `vectors` and `held_out_items` have a row for each part of each user, the parts one after another. A user without
    a finite vector or without a held-out item has NaN.
    """
    if metric == "cosine":
        compared = unit_rows(compared)
    sums, counts = np.zeros(users), np.zeros(users)
    for row, clicked in enumerate(np.split(held_out_items.indices, held_out_items.indptr[1:-1])):
        if len(clicked) and np.isfinite(vectors[row]).all():
            rows = unit_rows(items[clicked]) if metric == "cosine" else items[clicked]
            scores, of_clicked = compared @ vectors[row], rows @ vectors[row]
            above = (scores < of_clicked[:, None]) + 0.5 * (scores == of_clicked[:, None])
            sums[row % users] += above.mean(axis=1).sum()
            counts[row % users] += len(clicked)
    with np.errstate(invalid="ignore"):
        return np.asarray(sums / counts, np.float64)

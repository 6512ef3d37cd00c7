"""Ranks of items held out of known histories: recall@20, and the share of random items with a lower score."""

import numpy as np
from numpy.typing import NDArray

from cache.model.ranking import Metric, unit_rows
from cache.model.tower import Histories
from cache.topk.topk import Scorer

RECALL_TOP_ITEMS = 20

SHARE_ABOVE_RANDOM_FACT = "share_above_random"
"""Training fact of a bundle: share of pairs in which held-out items scored above random ones at its import."""

COMPARED_ITEMS_MAX = 2_000
"""Maximum number of random items whose scores are compared with those of held-out items."""


def mean_recall(
    user_vectors: NDArray[np.float32],
    item_vectors: NDArray[np.float32],
    excluded_items: Histories,
    held_out_items: Histories,
    metric: Metric,
) -> float:
    """Return the mean over users of `recall_by_user`."""
    return float(recall_by_user(user_vectors, item_vectors, excluded_items, held_out_items, metric).mean())


def recall_by_user(
    user_vectors: NDArray[np.float32],
    item_vectors: NDArray[np.float32],
    excluded_items: Histories,
    held_out_items: Histories,
    metric: Metric,
) -> NDArray[np.float64]:
    """Return recall@20 of each user's held-out items among unseen items: hits / min(20, number held out)."""
    top_count, held_out_counts = (min(RECALL_TOP_ITEMS, len(item_vectors)), np.diff(held_out_items.indptr))
    top_lists = Scorer.of(item_vectors, metric).top(
        np.ascontiguousarray(user_vectors, np.float32), top_count, excluded_items
    )[0]
    # One number for each pair of user and item; no item has a number beyond the catalogue, such as NO_ITEM.
    held_out_pairs = (
        np.repeat(np.arange(len(held_out_items)), held_out_counts) * len(item_vectors) + held_out_items.indices
    )
    listed_pairs = np.arange(len(top_lists))[:, None] * len(item_vectors) + top_lists.astype(np.int64)
    hit_counts = (np.isin(listed_pairs, held_out_pairs) & (top_lists < len(item_vectors))).sum(axis=1)
    return np.asarray(hit_counts / np.minimum(top_count, held_out_counts), np.float64)


def shares_above_random(
    user_vectors: NDArray[np.float32],
    item_vectors: NDArray[np.float32],
    compared_vectors: NDArray[np.float32],
    held_out_items: Histories,
    user_count: int,
    metric: Metric,
) -> NDArray[np.float64]:
    """Return float64 [users]: the share of compared items that a user's held-out items score above, else NaN.

    `user_vectors` and `held_out_items` have a row for each part of each user, with all users of the first part first. A
    user without a finite vector or without a held-out item has NaN.
    """
    if metric == "cosine":
        compared_vectors = unit_rows(compared_vectors)
    share_sums, item_counts = np.zeros(user_count), np.zeros(user_count)
    for row, held_out_ordinals in enumerate(np.split(held_out_items.indices, held_out_items.indptr[1:-1])):
        if len(held_out_ordinals) and np.isfinite(user_vectors[row]).all():
            held_out_vectors = (
                unit_rows(item_vectors[held_out_ordinals]) if metric == "cosine" else item_vectors[held_out_ordinals]
            )
            compared_scores, held_out_scores = (
                compared_vectors @ user_vectors[row],
                held_out_vectors @ user_vectors[row],
            )
            scores_above = (compared_scores < held_out_scores[:, None]) + 0.5 * (
                compared_scores == held_out_scores[:, None]
            )
            share_sums[row % user_count] += scores_above.mean(axis=1).sum()
            item_counts[row % user_count] += len(held_out_ordinals)
    with np.errstate(invalid="ignore"):
        return np.asarray(share_sums / item_counts, np.float64)

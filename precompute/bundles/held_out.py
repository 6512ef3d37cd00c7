"""Recall@20 of items held out of known histories."""

import numpy as np
from numpy.typing import NDArray

from cache.model.ranking import Metric
from cache.model.tower import Histories
from cache.topk.topk import Scorer

TOP = 20


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

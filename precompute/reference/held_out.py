"""Recall@20 of what was held out of known histories."""

import numpy as np
from numpy.typing import NDArray

from cache.model.ranking import Metric, unpack
from cache.model.tower import Histories
from precompute.bundles.index import best_with, tiles

TOP = 20
_ROWS = 512
"""Users whose scores are held at once."""


def recall(
    vectors: NDArray[np.float32],
    items: NDArray[np.float32],
    seen: Histories,
    held: Histories,
    metric: Metric,
) -> float:
    """Mean recall@20 of held-out items among those that were not seen: hits / min(20, number held out)."""
    shares = []
    for start in range(0, len(vectors), _ROWS):
        rows = np.arange(start, min(start + _ROWS, len(vectors)))
        shares.append(_shares(vectors[rows], items, seen.take(rows), held.take(rows), metric))
    return float(np.concatenate(shares).mean())


def _shares(
    vectors: NDArray[np.float32],
    items: NDArray[np.float32],
    seen: Histories,
    held: Histories,
    metric: Metric,
) -> NDArray[np.float64]:
    top = min(TOP, len(items))
    keys = np.empty((len(vectors), 0), np.uint64)
    row_of = np.repeat(np.arange(len(seen)), np.diff(seen.indptr))
    for start, part in tiles(items, metric):
        scores = vectors @ part.T
        inside = (seen.indices >= start) & (seen.indices < start + len(part))
        scores[row_of[inside], seen.indices[inside] - start] = -np.inf
        keys = best_with(keys, scores, start, top)
    lists, counts = unpack(keys, top)[0], np.diff(held.indptr)
    wanted = np.repeat(np.arange(len(held)), counts) * len(items) + held.indices
    found = np.isin(np.arange(len(lists))[:, None] * len(items) + lists, wanted).sum(axis=1)
    return np.asarray(found / np.minimum(top, counts), np.float64)

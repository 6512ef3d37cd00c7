"""Exact top-K without the compiled kernel: FAISS products choose candidates, `cache.model.ranking` decides.

What is excluded goes, K and a few remain and are re-scored; each list is then certified against the
rounding of the products, and the few users whose list is not certain (ties in masses) are scored against
every item. So the result does not depend on tiles, threads or the processor's products.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import faiss as faiss_module
import numpy as np
from numpy.typing import NDArray

from cache.model.ranking import (
    Metric,
    pack_sort_keys,
    rank,
    score,
    top_sort_keys,
    unit_rows,
    unpack_sort_keys,
)
from cache.model.tower import Histories

faiss: Any = faiss_module  # its type stubs lag behind what the module has

Top = tuple[NDArray[np.uint32], NDArray[np.float32]]

_CHUNK_USERS = 1024
_CHUNK_CANDIDATES = 1 << 22
_RANK_USERS = 256
_SCAN_ITEMS = 8192
_SPARE = 16
_ROUNDING = 2.0**-23
"""Two float32 sums of d products differ by at most 2 * d * 2**-24 * |user| * |item|."""


@dataclass(frozen=True, slots=True, eq=False)
class ComparableItems:
    """Items as they are scored and as they are compared (unit vectors for cosine), with their lengths."""

    vectors: NDArray[np.float32]
    metric: Metric
    filtering: NDArray[np.float32]
    sizes: NDArray[np.float64]

    @classmethod
    def of(cls, vectors: NDArray[np.float32], metric: Metric) -> Self:
        """Items to compare, from float32 [items, dims] in ordinal order."""
        filtering = np.ascontiguousarray(unit_rows(vectors) if metric == "cosine" else vectors)
        return cls(vectors, metric, filtering, lengths(filtering))

    @property
    def longest(self) -> float:
        """The length of the longest compared vector."""
        return float(self.sizes.max(initial=0))


def chunks(
    excluded: NDArray[np.int64], k: int, threads: int, shape: tuple[int, int]
) -> Iterator[tuple[NDArray[np.int64], int]]:
    """(rows, candidates to fetch): users with like numbers of exclusions together, in even parts.

    `shape` is [items, dims].
    """
    members = np.argsort(excluded, kind="stable")
    start = 0
    while start < len(members):
        remaining_count = len(members) - start
        # Smaller parts than this leave BLAS for a kernel that takes five times as long.
        threshold = faiss.cvar.distance_compute_blas_threshold // shape[1] + 1
        parts = max(
            -(-remaining_count // max(_CHUNK_USERS, threshold)),
            min(threads, remaining_count // threshold),
        )
        end = start + -(-remaining_count // max(1, parts))
        fetch = min(k + int(excluded[members[end - 1]]) + _SPARE, shape[0])
        end = min(end, start + max(1, _CHUNK_CANDIDATES // max(1, fetch)))
        yield members[start:end], fetch
        start = end


class FlatChunk:
    """Users with like numbers of exclusions against all items."""

    def __init__(
        self,
        scorer: ComparableItems,
        users: NDArray[np.float32],
        excluded: Histories,
        k: int,
        fetch: int,
    ) -> None:
        self._scorer = scorer
        self._users = users
        self._queries = unit_rows(users) if scorer.metric == "cosine" else users
        self._lengths = lengths(self._queries)
        self._excluded = excluded
        self._k = k
        self._fetch = fetch

    def run(self) -> Top:
        """Top K of the chunk's users."""
        # One OpenMP thread (a setting of the calling thread) under each of our own: its teams spin
        # at barriers, which on shared cores made two threads slower than one.
        faiss.omp_set_num_threads(1)
        products, candidates = faiss.knn(
            self._queries, self._scorer.filtering, self._fetch, metric=faiss.METRIC_INNER_PRODUCT
        )
        # No item that is not a candidate scores more than this, but for rounding.
        bounds = products[:, -1].astype(np.float64)
        if self._fetch >= len(self._scorer.vectors):
            bounds[:] = -np.inf
        ranked = [
            self._settle(slice(start, start + _RANK_USERS), products, candidates, bounds)
            for start in range(0, len(self._users), _RANK_USERS)
        ]
        return np.concatenate([tile_top[0] for tile_top in ranked]), np.concatenate(
            [tile_top[1] for tile_top in ranked]
        )

    def _settle(
        self,
        rows: slice,
        products: NDArray[np.float32],
        candidates: NDArray[np.int64],
        bounds: NDArray[np.float64],
    ) -> Top:
        """Drop exclusions, keep K and a few, re-score, certify; scan the rows that fail."""
        scorer, k = self._scorer, self._k
        users, candidates = self._users[rows], candidates[rows]
        exclusions = self._excluded.select_rows(np.arange(len(self._users))[rows])
        filtered = np.where(
            self._among(candidates, exclusions) | (candidates < 0), -np.inf, products[rows]
        )
        limits = bounds[rows].copy()
        if candidates.shape[1] > k + _SPARE:
            candidate_columns = np.argpartition(-filtered, k + _SPARE, axis=1)
            cut = np.take_along_axis(filtered, candidate_columns[:, k + _SPARE :][:, :1], axis=1)[
                :, 0
            ]
            limits = np.maximum(limits, cut)
            candidate_columns = candidate_columns[:, : k + _SPARE]
            filtered = np.take_along_axis(filtered, candidate_columns, axis=1)
            candidates = np.take_along_axis(candidates, candidate_columns, axis=1)
        candidates = np.where(np.isneginf(filtered), -1, candidates)
        ordinals, scores = rank(users, scorer.vectors, candidates, None, k, metric=scorer.metric)
        margin = (users.shape[1] + 8) * _ROUNDING * self._lengths[rows] * scorer.longest
        if scorer.metric == "cosine":
            margin = np.full(len(users), (users.shape[1] + 16) * _ROUNDING)
        full = (candidates >= 0).sum(axis=1) >= k
        certified = np.isneginf(limits) | (full & (scores[:, -1] > limits + margin))
        for row in np.flatnonzero(~certified):
            banned = exclusions.indices[exclusions.indptr[row] : exclusions.indptr[row + 1]]
            ordinals[row], scores[row] = _scan(scorer, users[row], banned, k)
        return ordinals, scores

    def _among(self, candidates: NDArray[np.int64], exclusions: Histories) -> NDArray[np.bool_]:
        item_count = len(self._scorer.vectors)
        is_known = (exclusions.indices >= 0) & (exclusions.indices < item_count)
        owners = np.repeat(np.arange(len(exclusions)), np.diff(exclusions.indptr))
        banned = np.sort(owners[is_known] * item_count + exclusions.indices[is_known])
        if not len(banned):
            return np.zeros(candidates.shape, np.bool_)
        candidate_keys = np.arange(len(candidates))[:, None] * item_count + candidates
        at = np.minimum(np.searchsorted(banned, candidate_keys), len(banned) - 1)
        hit: NDArray[np.bool_] = banned[at] == candidate_keys
        return hit


def _scan(
    scorer: ComparableItems, user: NDArray[np.float32], banned: NDArray[np.int64], k: int
) -> Top:
    """Top K of one user against every item, in tiles: for ties in masses and vectors without direction."""
    item_count = len(scorer.vectors)
    keys = np.empty(0, np.uint64)
    allowed = np.ones(item_count, np.bool_)
    allowed[banned[(banned >= 0) & (banned < item_count)]] = False
    for start in range(0, item_count, _SCAN_ITEMS):
        ordinals = start + np.flatnonzero(allowed[start : start + _SCAN_ITEMS])
        scores = score(user[None], scorer.vectors, ordinals[None], scorer.metric)[0]
        keys = top_sort_keys(np.concatenate([keys, pack_sort_keys(scores, ordinals)])[None], k)[0]
        if not user.any() and len(keys) == k:
            break  # every score is zero: the first k ordinals are the answer
    top_lists = unpack_sort_keys(keys[None], k)
    return top_lists[0][0], top_lists[1][0]


def lengths(vectors: NDArray[np.float32]) -> NDArray[np.float64]:
    """Euclidean lengths of the rows, summed in float64."""
    row_lengths: NDArray[np.float64] = np.sqrt(
        np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64)
    )
    return row_lengths

"""Exact top-K without the compiled kernel: FAISS products choose candidates, `cache.model.ranking` decides.

Excluded items are dropped from the candidates, and slightly more than K of the rest are re-scored. Each list is then
certified against the rounding errors of the products; the few users whose list is not certain (many ties) are scored
against every item. So the result does not depend on tiles, threads or the processor's instructions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import faiss as faiss_module
import numpy as np
from numpy.typing import NDArray

from cache.model.ranking import Metric, pack_sort_keys, rank, score, top_sort_keys, unit_rows, unpack_sort_keys
from cache.model.tower import Histories

faiss: Any = faiss_module  # faiss' type stubs are incomplete

TopLists = tuple[NDArray[np.uint32], NDArray[np.float32]]

_CHUNK_USERS_MAX = 1024
_CHUNK_CANDIDATES_MAX = 1 << 22
_USERS_RANKED_AT_ONCE = 256
_ITEMS_SCANNED_AT_ONCE = 8192
_SPARE_CANDIDATES = 16
_FLOAT32_ROUNDING = 2.0**-23
"""Bound of the rounding errors: two float32 sums of d products differ by at most 2 * d * 2**-24 * |user| * |item|."""


@dataclass(frozen=True, slots=True, eq=False)
class ComparableItems:
    """Items' vectors for scores and for comparison (unit vectors for cosine), with their lengths."""

    vectors: NDArray[np.float32]
    metric: Metric
    compared_vectors: NDArray[np.float32]
    compared_lengths: NDArray[np.float64]

    @classmethod
    def of(cls, vectors: NDArray[np.float32], metric: Metric) -> Self:
        """Build from float32 [items, dims] in ordinal order."""
        filtering = np.ascontiguousarray(unit_rows(vectors) if metric == "cosine" else vectors)
        return cls(vectors, metric, filtering, row_lengths_of(filtering))

    @property
    def longest_length(self) -> float:
        """Length of the longest compared vector."""
        return float(self.compared_lengths.max(initial=0))


def user_chunks(
    exclusion_counts: NDArray[np.int64], k: int, threads: int, item_matrix_shape: tuple[int, int]
) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Yield (rows, number of candidates to fetch): users with similar numbers of exclusions, in chunks of similar size.

    `item_matrix_shape` is [items, dims].
    """
    user_rows = np.argsort(exclusion_counts, kind="stable")
    start = 0
    while start < len(user_rows):
        remaining_count = len(user_rows) - start
        # For smaller chunks faiss does not use BLAS, but a kernel that takes five times as long.
        users_for_blas = faiss.cvar.distance_compute_blas_threshold // item_matrix_shape[1] + 1
        part_count = max(
            -(-remaining_count // max(_CHUNK_USERS_MAX, users_for_blas)),
            min(threads, remaining_count // users_for_blas),
        )
        end = start + -(-remaining_count // max(1, part_count))
        candidate_count = min(k + int(exclusion_counts[user_rows[end - 1]]) + _SPARE_CANDIDATES, item_matrix_shape[0])
        end = min(end, start + max(1, _CHUNK_CANDIDATES_MAX // max(1, candidate_count)))
        yield user_rows[start:end], candidate_count
        start = end


class FlatChunk:
    """Search for users with similar numbers of exclusions over all items."""

    def __init__(
        self,
        compared_items: ComparableItems,
        user_vectors: NDArray[np.float32],
        exclusions: Histories,
        k: int,
        candidate_count: int,
    ) -> None:
        self._compared_items = compared_items
        self._user_vectors = user_vectors
        self._queries = unit_rows(user_vectors) if compared_items.metric == "cosine" else user_vectors
        self._query_lengths = row_lengths_of(self._queries)
        self._excluded = exclusions
        self._k = k
        self._candidate_count = candidate_count

    def run(self) -> TopLists:
        """Return the top K of the chunk's users."""
        # Each of our threads uses one OpenMP thread (a setting of the calling thread): OpenMP's teams spin at barriers,
        # which on shared cores made two threads slower than one.
        faiss.omp_set_num_threads(1)
        products, candidates = faiss.knn(
            self._queries,
            self._compared_items.compared_vectors,
            self._candidate_count,
            metric=faiss.METRIC_INNER_PRODUCT,
        )
        # Except for rounding errors, no item outside the candidates scores more than this.
        bounds = products[:, -1].astype(np.float64)
        if self._candidate_count >= len(self._compared_items.vectors):
            bounds[:] = -np.inf
        ranked = [
            self._settle_rows(slice(start, start + _USERS_RANKED_AT_ONCE), products, candidates, bounds)
            for start in range(0, len(self._user_vectors), _USERS_RANKED_AT_ONCE)
        ]
        return np.concatenate([tile_top[0] for tile_top in ranked]), np.concatenate(
            [tile_top[1] for tile_top in ranked]
        )

    def _settle_rows(
        self,
        user_rows: slice,
        candidate_products: NDArray[np.float32],
        candidate_ordinals: NDArray[np.int64],
        outside_score_bounds: NDArray[np.float64],
    ) -> TopLists:
        """Drop excluded items, keep slightly more than K candidates, re-score and certify them.

        For rows that fail, all items are scored.
        """
        compared_items, k = self._compared_items, self._k
        user_vectors, candidate_ordinals = self._user_vectors[user_rows], candidate_ordinals[user_rows]
        exclusions = self._excluded.select_rows(np.arange(len(self._user_vectors))[user_rows])
        filtered_products = np.where(
            self._exclusion_mask(candidate_ordinals, exclusions) | (candidate_ordinals < 0),
            -np.inf,
            candidate_products[user_rows],
        )
        outside_maxima = outside_score_bounds[user_rows].copy()
        if candidate_ordinals.shape[1] > k + _SPARE_CANDIDATES:
            candidate_columns = np.argpartition(-filtered_products, k + _SPARE_CANDIDATES, axis=1)
            cut_products = np.take_along_axis(
                filtered_products, candidate_columns[:, k + _SPARE_CANDIDATES :][:, :1], axis=1
            )[:, 0]
            outside_maxima = np.maximum(outside_maxima, cut_products)
            candidate_columns = candidate_columns[:, : k + _SPARE_CANDIDATES]
            filtered_products = np.take_along_axis(filtered_products, candidate_columns, axis=1)
            candidate_ordinals = np.take_along_axis(candidate_ordinals, candidate_columns, axis=1)
        candidate_ordinals = np.where(np.isneginf(filtered_products), -1, candidate_ordinals)
        ordinals, scores = rank(
            user_vectors, compared_items.vectors, candidate_ordinals, None, k, metric=compared_items.metric
        )
        rounding_margin = (
            (user_vectors.shape[1] + 8)
            * _FLOAT32_ROUNDING
            * self._query_lengths[user_rows]
            * compared_items.longest_length
        )
        if compared_items.metric == "cosine":
            rounding_margin = np.full(len(user_vectors), (user_vectors.shape[1] + 16) * _FLOAT32_ROUNDING)
        full_mask = (candidate_ordinals >= 0).sum(axis=1) >= k
        certified_mask = np.isneginf(outside_maxima) | (full_mask & (scores[:, -1] > outside_maxima + rounding_margin))
        for row in np.flatnonzero(~certified_mask):
            excluded_ordinals = exclusions.indices[exclusions.indptr[row] : exclusions.indptr[row + 1]]
            ordinals[row], scores[row] = _rank_all_items(compared_items, user_vectors[row], excluded_ordinals, k)
        return ordinals, scores

    def _exclusion_mask(self, candidate_ordinals: NDArray[np.int64], exclusions: Histories) -> NDArray[np.bool_]:
        item_count = len(self._compared_items.vectors)
        is_known = (exclusions.indices >= 0) & (exclusions.indices < item_count)
        exclusion_rows = np.repeat(np.arange(len(exclusions)), np.diff(exclusions.indptr))
        excluded_keys = np.sort(exclusion_rows[is_known] * item_count + exclusions.indices[is_known])
        if not len(excluded_keys):
            return np.zeros(candidate_ordinals.shape, np.bool_)
        candidate_keys = np.arange(len(candidate_ordinals))[:, None] * item_count + candidate_ordinals
        insertion_indexes = np.minimum(np.searchsorted(excluded_keys, candidate_keys), len(excluded_keys) - 1)
        hit_mask: NDArray[np.bool_] = excluded_keys[insertion_indexes] == candidate_keys
        return hit_mask


def _rank_all_items(
    compared_items: ComparableItems, user_vector: NDArray[np.float32], excluded_ordinals: NDArray[np.int64], k: int
) -> TopLists:
    """Return the top K of one user over every item, in tiles: for many ties and vectors of length 0."""
    item_count = len(compared_items.vectors)
    sort_keys = np.empty(0, np.uint64)
    allowed_mask = np.ones(item_count, np.bool_)
    allowed_mask[excluded_ordinals[(excluded_ordinals >= 0) & (excluded_ordinals < item_count)]] = False
    for start in range(0, item_count, _ITEMS_SCANNED_AT_ONCE):
        ordinals = start + np.flatnonzero(allowed_mask[start : start + _ITEMS_SCANNED_AT_ONCE])
        scores = score(user_vector[None], compared_items.vectors, ordinals[None], compared_items.metric)[0]
        sort_keys = top_sort_keys(np.concatenate([sort_keys, pack_sort_keys(scores, ordinals)])[None], k)[0]
        if not user_vector.any() and len(sort_keys) == k:
            break  # every score is zero: the result is the first k ordinals
    top_lists = unpack_sort_keys(sort_keys[None], k)
    return top_lists[0][0], top_lists[1][0]


def row_lengths_of(vectors: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the Euclidean lengths of the rows, summed in float64."""
    row_lengths: NDArray[np.float64] = np.sqrt(np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64))
    return row_lengths

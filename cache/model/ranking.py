"""Exact re-score, shared by the night and the live path: same vectors, same bits, same order. Pure."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cache.records import NO_ITEM

Metric = Literal["inner_product", "cosine"]

_GATHERED_NUMBERS_MAX = 1 << 21
_UNUSED_KEY = np.uint64(0)


def rank(
    user_vectors: NDArray[np.float32],
    item_vectors: NDArray[np.float32],
    candidate_ordinals: NDArray[np.int64],
    excluded_by_row: Sequence[NDArray[np.int64]] | None,
    k: int,
    *,
    metric: Metric = "inner_product",
) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """Return the best k of each row's candidates: (ordinals uint32 [n, k], scores float32 [n, k]).

    `candidate_ordinals` int64 [n, c] has distinct ordinals per row, -1: unused; `excluded_by_row` has one array of
    ordinals per row. Order: score descending, then ordinal ascending; unused slots are NO_ITEM and 0.
    """
    sort_keys = np.empty(candidate_ordinals.shape, np.uint64)
    rows_at_once = max(1, _GATHERED_NUMBERS_MAX // max(1, candidate_ordinals.shape[1] * item_vectors.shape[1]))
    for start in range(0, len(candidate_ordinals), rows_at_once):
        rows = slice(start, start + rows_at_once)
        sort_keys[rows] = pack_sort_keys(
            score(user_vectors[rows], item_vectors, candidate_ordinals[rows], metric), candidate_ordinals[rows]
        )
    sort_keys[candidate_ordinals < 0] = _UNUSED_KEY
    if excluded_by_row is not None:
        sort_keys[_exclusion_mask(candidate_ordinals, excluded_by_row, len(item_vectors))] = _UNUSED_KEY
    return unpack_sort_keys(top_sort_keys(sort_keys, k), k)


def score(
    user_vectors: NDArray[np.float32],
    item_vectors: NDArray[np.float32],
    candidate_ordinals: NDArray[np.int64],
    metric: Metric = "inner_product",
) -> NDArray[np.float32]:
    """Return the scores of each row's candidates, float32 [n, c]; those of unused candidates (-1) are meaningless.

    Uses einsum, not BLAS: it sums each vector in a fixed order, so that a pair's score has the same bits in any batch,
    in any tile and with any number of threads.
    """
    # Convert from memmap, which is slow to index.
    candidate_vectors = np.asarray(item_vectors)[np.maximum(candidate_ordinals, 0)]
    scores: NDArray[np.float32] = np.einsum("nd,ncd->nc", user_vectors, candidate_vectors)
    if metric == "cosine":
        length_products = np.sqrt(np.einsum("ncd,ncd->nc", candidate_vectors, candidate_vectors))
        length_products *= np.sqrt(np.einsum("nd,nd->n", user_vectors, user_vectors))[:, None]
        scores = np.divide(scores, length_products, out=np.zeros_like(scores), where=length_products > 0)
    return scores


def pack_sort_keys(scores: NDArray[np.float32], ordinals: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the sort key uint64 of each pair, ordered like (score, -ordinal); higher is better, 0 means none.

    One integer sort settles ties as well, and numpy sorts integers with SIMD.
    """
    score_bits = (scores + np.float32(0)).view(np.uint32)  # -0.0 + 0.0 is 0.0
    ordered_bits = np.where(score_bits >> 31, ~score_bits, score_bits | np.uint32(0x80000000))
    ordinal_bits = np.uint32(NO_ITEM) - ordinals.astype(np.uint32)
    return ordered_bits.astype(np.uint64) << np.uint64(32) | ordinal_bits


def top_sort_keys(sort_keys: NDArray[np.uint64], k: int) -> NDArray[np.uint64]:
    """Return the largest k keys of each row in descending order [n, min(k, c)]."""
    if sort_keys.shape[1] > 2 * k:
        sort_keys = np.partition(sort_keys, sort_keys.shape[1] - k, axis=1)[:, -k:]
    return np.sort(sort_keys, axis=1)[:, ::-1][:, :k]


def unpack_sort_keys(sort_keys: NDArray[np.uint64], k: int) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """Return (ordinals, scores), each [n, k], from `top_sort_keys`' keys.

    Key 0 and missing columns are unused slots.
    """
    ordinals = np.full((len(sort_keys), k), NO_ITEM, np.uint32)
    scores = np.zeros((len(sort_keys), k), np.float32)
    used_mask = sort_keys != _UNUSED_KEY
    ordered_bits = (sort_keys >> np.uint64(32)).astype(np.uint32)
    score_bits = np.where(ordered_bits >> 31, ordered_bits & np.uint32(0x7FFFFFFF), ~ordered_bits)
    ordinals_from_keys = np.uint32(NO_ITEM) - sort_keys.astype(np.uint32)
    width = sort_keys.shape[1]
    ordinals[:, :width] = np.where(used_mask, ordinals_from_keys, np.uint32(NO_ITEM))
    scores[:, :width] = np.where(used_mask, score_bits.view(np.float32), np.float32(0))
    return ordinals, scores


def _exclusion_mask(
    candidate_ordinals: NDArray[np.int64], excluded_by_row: Sequence[NDArray[np.int64]], item_count: int
) -> NDArray[np.bool_]:
    """Return a mask of candidates that are excluded for their own row; one sorted search for the whole batch."""
    exclusion_counts = np.fromiter(
        (len(row_exclusions) for row_exclusions in excluded_by_row), np.int64, len(excluded_by_row)
    )
    rows = np.repeat(np.arange(len(excluded_by_row)), exclusion_counts)
    ordinals = np.concatenate([*excluded_by_row, np.empty(0, np.int64)])
    # An unknown ordinal (-1) would give the key of the last item of the previous row.
    is_known = (ordinals >= 0) & (ordinals < item_count)
    excluded_keys = np.sort(rows[is_known] * item_count + ordinals[is_known])
    if not len(excluded_keys):
        return np.zeros(candidate_ordinals.shape, np.bool_)
    candidate_keys = np.arange(len(candidate_ordinals))[:, None] * item_count + candidate_ordinals
    insertion_indexes = np.searchsorted(excluded_keys, candidate_keys)
    hit_mask: NDArray[np.bool_] = excluded_keys[np.minimum(insertion_indexes, len(excluded_keys) - 1)] == candidate_keys
    return hit_mask & (candidate_ordinals >= 0)


def unit_rows(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return rows divided by their length; zero rows stay zero."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit_vectors: NDArray[np.float32] = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return unit_vectors

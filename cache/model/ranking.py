"""The exact re-score that the night and the live path share: same vectors, same bits, same order. Pure."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cache.records import NO_ITEM

Metric = Literal["inner_product", "cosine"]

_GATHER_NUMBERS = 1 << 21
_WORST = np.uint64(0)


def rank(
    users: NDArray[np.float32],
    item_vectors: NDArray[np.float32],
    candidates: NDArray[np.int64],
    excluded: Sequence[NDArray[np.int64]] | None,
    k: int,
    *,
    metric: Metric = "inner_product",
) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """The best k of each row's candidates: (ordinals uint32 [n, k], scores float32 [n, k]).

    `candidates` int64 [n, c] holds distinct ordinals per row, -1 = unused; `excluded` has one array of
    ordinals per row. Order: score descending, then ordinal ascending; unused slots are NO_ITEM and 0.
    """
    keys = np.empty(candidates.shape, np.uint64)
    step = max(1, _GATHER_NUMBERS // max(1, candidates.shape[1] * item_vectors.shape[1]))
    for start in range(0, len(candidates), step):
        rows = slice(start, start + step)
        keys[rows] = pack(
            score(users[rows], item_vectors, candidates[rows], metric), candidates[rows]
        )
    keys[candidates < 0] = _WORST
    if excluded is not None:
        keys[_among(candidates, excluded, len(item_vectors))] = _WORST
    return unpack(top_keys(keys, k), k)


def score(
    users: NDArray[np.float32],
    item_vectors: NDArray[np.float32],
    candidates: NDArray[np.int64],
    metric: Metric = "inner_product",
) -> NDArray[np.float32]:
    """float32 [n, c] scores of each row's candidates; unused ones (-1) get a meaningless number.

    einsum, not BLAS: its sum over a vector has one order whatever stands beside it, so a pair's score
    has the same bits in any batch, in any tile and with any number of threads.
    """
    # As a plain array: a memory map's own class is slow to index.
    gathered = np.asarray(item_vectors)[np.maximum(candidates, 0)]
    scores: NDArray[np.float32] = np.einsum("nd,ncd->nc", users, gathered)
    if metric == "cosine":
        lengths = np.sqrt(np.einsum("ncd,ncd->nc", gathered, gathered))
        lengths *= np.sqrt(np.einsum("nd,nd->n", users, users))[:, None]
        scores = np.divide(scores, lengths, out=np.zeros_like(scores), where=lengths > 0)
    return scores


def pack(scores: NDArray[np.float32], ordinals: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Sort key uint64 of each pair, which sorts like (score, -ordinal): higher is better, never 0 for a real pair.

    One integer sort then settles ties as well, and numpy sorts integers with SIMD.
    """
    bits = (scores + np.float32(0)).view(np.uint32)  # -0.0 + 0.0 is 0.0
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(0x80000000))
    low = np.uint32(NO_ITEM) - ordinals.astype(np.uint32)
    return ordered.astype(np.uint64) << np.uint64(32) | low


def top_keys(keys: NDArray[np.uint64], k: int) -> NDArray[np.uint64]:
    """The largest k keys of each row in descending order [n, min(k, c)]."""
    if keys.shape[1] > 2 * k:
        keys = np.partition(keys, keys.shape[1] - k, axis=1)[:, -k:]
    return np.sort(keys, axis=1)[:, ::-1][:, :k]


def unpack(keys: NDArray[np.uint64], k: int) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """(ordinals, scores), each [n, k], from `top_keys`'s keys; key 0 and missing columns are unused slots."""
    ordinals = np.full((len(keys), k), NO_ITEM, np.uint32)
    scores = np.zeros((len(keys), k), np.float32)
    used = keys != _WORST
    ordered = (keys >> np.uint64(32)).astype(np.uint32)
    bits = np.where(ordered >> 31, ordered & np.uint32(0x7FFFFFFF), ~ordered)
    low = np.uint32(NO_ITEM) - keys.astype(np.uint32)
    width = keys.shape[1]
    ordinals[:, :width] = np.where(used, low, np.uint32(NO_ITEM))
    scores[:, :width] = np.where(used, bits.view(np.float32), np.float32(0))
    return ordinals, scores


def _among(
    candidates: NDArray[np.int64], excluded: Sequence[NDArray[np.int64]], items: int
) -> NDArray[np.bool_]:
    """True where a candidate is excluded for its own row; one sorted search for the whole batch."""
    lengths = np.fromiter(
        (len(row_exclusions) for row_exclusions in excluded), np.int64, len(excluded)
    )
    rows = np.repeat(np.arange(len(excluded)), lengths)
    ordinals = np.concatenate([*excluded, np.empty(0, np.int64)])
    # An unknown ordinal (-1) would otherwise land on the last item of the row before.
    is_known = (ordinals >= 0) & (ordinals < items)
    banned = np.sort(rows[is_known] * items + ordinals[is_known])
    if not len(banned):
        return np.zeros(candidates.shape, np.bool_)
    candidate_keys = np.arange(len(candidates))[:, None] * items + candidates
    insertion_indexes = np.searchsorted(banned, candidate_keys)
    hit: NDArray[np.bool_] = (
        banned[np.minimum(insertion_indexes, len(banned) - 1)] == candidate_keys
    )
    return hit & (candidates >= 0)


def unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows divided by their length; zero rows stay zero."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    divided: NDArray[np.float32] = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return divided

"""Exact top-K of all items for many users: by the compiled kernel, or by FAISS where it was not built.

Both give the same bits: candidates are certified against rounding errors, and `cache.model.ranking` computes the
scores.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from cache.errors import ConfigError
from cache.model.ranking import Metric
from cache.model.tower import Histories
from cache.process.host import usable_cores
from cache.records import NO_ITEM
from cache.topk.compiled import K_MAX, Kernel, PackedItems, find_kernel, scores_fit_mask
from cache.topk.flat import ComparableItems, FlatChunk, TopLists, user_chunks

_SLAB_USERS = 1024
_LEAST_USERS = 256

Part = TypeVar("Part")


class AnyScorer(Protocol):
    """Items prepared for exact search on any device; all implementations return the same lists with the same bits."""

    def top(
        self,
        users: NDArray[np.float32],
        k: int,
        excluded: Histories | None = None,
        *,
        allowed: NDArray[np.bool_] | None = None,
        threads: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> TopLists:
        """Return the top K of each user: (ordinals uint32 [n, k], scores float32 [n, k]), as `Scorer.top` does."""


@dataclass(frozen=True, slots=True, eq=False)
class Scorer:
    """Items prepared for exact search; create it once for all shards."""

    compared_items: ComparableItems
    kernel_and_items: tuple[Kernel, PackedItems] | None

    @classmethod
    def of(
        cls, vectors: NDArray[np.float32], metric: Metric = "inner_product", *, engine: Kernel | bool = True
    ) -> Self:
        """Prepare finite vectors float32 [items, dims] in ordinal order.

        `engine`: True selects the kernel if it is usable, False selects FAISS; a kernel selects that kernel.
        """
        item_vectors = np.asarray(vectors)  # convert from memmap, which is slow to index
        _check_shape("items", item_vectors, None)
        _check_values("items", item_vectors)
        compared_items = ComparableItems.of(np.ascontiguousarray(item_vectors), metric)
        usable_kernel = find_kernel() if engine is True else engine
        packed_items = usable_kernel.pack(compared_items) if usable_kernel else None
        return cls(compared_items, (usable_kernel, packed_items) if usable_kernel and packed_items else None)

    def top(
        self,
        users: NDArray[np.float32],
        k: int,
        excluded: Histories | None = None,
        *,
        allowed: NDArray[np.bool_] | None = None,
        threads: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> TopLists:
        """Return (ordinals uint32 [n, k], scores float32 [n, k]) for finite users float32 [n, dims].

        `excluded` has ordinals per user (unknown ones are -1); `allowed` bool [items] restricts the items. Order: score
        descending, then ordinal ascending; if fewer than k items remain, the other slots are NO_ITEM and 0. `progress`
        is called with the number of users that each step finished. Memory besides the result does not depend on the
        number of users. Raises ConfigError for arguments of another shape.
        """
        users, exclusions = check_arguments(self.compared_items, users, k, excluded, allowed)
        report_progress = progress or (lambda _: None)
        thread_count = threads or usable_cores()
        if self.kernel_and_items is None:
            return self._flat(users, k, exclusions, allowed, thread_count, report_progress)
        fits_kernel_mask = scores_fit_mask(self.compared_items, users)
        if fits_kernel_mask.all():
            return self._by_kernel(users, k, exclusions, allowed, thread_count, report_progress)
        ordinals, scores = (np.empty((len(users), k), np.uint32), np.empty((len(users), k), "f4"))
        for method, user_mask in ((self._by_kernel, fits_kernel_mask), (self._flat, ~fits_kernel_mask)):
            rows = np.flatnonzero(user_mask)
            part_lists = method(users[rows], k, exclusions.select_rows(rows), allowed, thread_count, report_progress)
            ordinals[rows], scores[rows] = part_lists
        return ordinals, scores

    def _by_kernel(
        self,
        user_vectors: NDArray[np.float32],
        k: int,
        exclusions: Histories,
        allowed_mask: NDArray[np.bool_] | None,
        threads: int,
        report_progress: Callable[[int], None],
    ) -> TopLists:
        assert self.kernel_and_items is not None  # noqa: S101 - `top` asked
        kernel, packed_items = self.kernel_and_items
        allowed_bits = packed_items.allowed_bits(allowed_mask)
        top_lists = (np.empty((len(user_vectors), k), np.uint32), np.empty((len(user_vectors), k), np.float32))

        def run(rows: slice) -> int:
            kernel.top(packed_items, user_vectors, k, exclusions, allowed_bits, rows, top_lists)
            return int(rows.stop - rows.start)

        _run_all(run, user_slabs(len(user_vectors), threads), threads, report_progress)
        return top_lists

    def _flat(
        self,
        user_vectors: NDArray[np.float32],
        k: int,
        exclusions: Histories,
        allowed_mask: NDArray[np.bool_] | None,
        threads: int,
        report_progress: Callable[[int], None],
    ) -> TopLists:
        if allowed_mask is not None:
            return self._flat_among(user_vectors, k, exclusions, np.flatnonzero(allowed_mask), threads, report_progress)
        ordinals = np.full((len(user_vectors), k), NO_ITEM, np.uint32)
        scores = np.zeros((len(user_vectors), k), np.float32)
        if not len(self.compared_items.vectors):
            return ordinals, scores

        def run(part: tuple[NDArray[np.int64], int]) -> int:
            rows, fetch = part
            chunk = FlatChunk(self.compared_items, user_vectors[rows], exclusions.select_rows(rows), k, fetch)
            ordinals[rows], scores[rows] = chunk.run()
            return len(rows)

        chunks_to_run = user_chunks(np.diff(exclusions.indptr), k, threads, self.compared_items.vectors.shape)
        _run_all(run, chunks_to_run, threads, report_progress)
        return ordinals, scores

    def _flat_among(
        self,
        user_vectors: NDArray[np.float32],
        k: int,
        exclusions: Histories,
        allowed_ordinals: NDArray[np.int64],
        threads: int,
        report_progress: Callable[[int], None],
    ) -> TopLists:
        """Return the top K among `allowed_ordinals`, which ascend, so that ties are ordered as among all items."""
        allowed_scorer = Scorer.of(
            self.compared_items.vectors[allowed_ordinals], self.compared_items.metric, engine=False
        )
        new_ordinals = np.full(len(self.compared_items.vectors) + 1, -1)
        new_ordinals[allowed_ordinals] = np.arange(len(allowed_ordinals))
        is_item_ordinal = (exclusions.indices >= 0) & (exclusions.indices < len(new_ordinals) - 1)
        indices = new_ordinals[np.where(is_item_ordinal, exclusions.indices, -1)]
        ordinals, scores = allowed_scorer._flat(
            user_vectors, k, Histories(exclusions.indptr, indices), None, threads, report_progress
        )
        old_ordinals = np.append(allowed_ordinals, NO_ITEM).astype(np.uint32)
        return old_ordinals[np.minimum(ordinals, len(allowed_ordinals))], scores


def check_arguments(
    compared: ComparableItems,
    user_vectors: NDArray[np.float32],
    k: int,
    excluded: Histories | None,
    allowed: NDArray[np.bool_] | None,
    *,
    check_finite: bool = True,
) -> tuple[NDArray[np.float32], Histories]:
    """Return contiguous user vectors and each user's exclusions; raise ConfigError for arguments that do not fit.

    Checks for non-finite users only with `check_finite`.
    """
    if not 1 <= k <= K_MAX:
        raise ConfigError(f"k must be 1 to {K_MAX}, not {k}", k=k)
    items, dims = compared.vectors.shape
    user_vectors = np.ascontiguousarray(user_vectors)
    _check_shape("users", user_vectors, dims)
    if check_finite:
        _check_values("users", user_vectors)
    exclusions = Histories.of([()] * len(user_vectors)) if excluded is None else excluded
    _check_histories(exclusions, len(user_vectors))
    _check_allowed(allowed, items)
    return user_vectors, exclusions


def user_slabs(user_count: int, threads: int) -> Iterator[slice]:
    """Yield rows for one thread at a time, fewer towards the end, so that the threads end at about the same time.

    Guided self-scheduling (Polychronopoulos and Kuck, IEEE Trans. Computers 1987), with half its step size.
    """
    min_slab_users = min(_LEAST_USERS, -(-user_count // threads))
    start = 0
    while start < user_count:
        slab_users = max(min_slab_users, min(_SLAB_USERS, (user_count - start) // (2 * threads)))
        yield slice(start, min(start + slab_users, user_count))
        start += slab_users


def _run_all(
    run_part: Callable[[Part], int], parts: Iterable[Part], threads: int, report_progress: Callable[[int], None]
) -> None:
    if threads == 1:  # for a single lookup a thread would cost as much as the search
        for part in parts:
            report_progress(run_part(part))
        return
    with ThreadPoolExecutor(threads) as pool:
        for user_count in pool.map(run_part, parts):
            report_progress(user_count)


def _check_shape(argument_name: str, vectors: NDArray[np.float32], dims: int | None) -> None:
    if vectors.dtype != np.float32 or vectors.ndim != 2 or not vectors.shape[1]:
        raise ConfigError(
            f"{argument_name} must be a float32 matrix with a row for each, not {vectors.dtype} "
            f"{list(vectors.shape)}; convert with astype"
        )
    if dims is not None and vectors.shape[1] != dims:
        raise ConfigError(f"{argument_name} have {vectors.shape[1]} dimensions, the items {dims}")


def _check_values(argument_name: str, vectors: NDArray[np.float32]) -> None:
    # A sum of squares is finite only if all numbers are; if it overflows, check each number.
    flat_numbers = vectors.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        is_suspect = not np.isfinite(np.dot(flat_numbers, flat_numbers))
    if is_suspect:
        nonfinite_rows = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(nonfinite_rows):
            raise ConfigError(
                f"{argument_name} must be finite; row {nonfinite_rows[0]} is not ({len(nonfinite_rows)} rows): "
                "repair the model",
                row=int(nonfinite_rows[0]),
            )


def _check_histories(exclusions: Histories, user_count: int) -> None:
    has_shape = (
        len(exclusions) == user_count and exclusions.indptr[0] == 0 and exclusions.indptr[-1] == len(exclusions.indices)
    )
    if not has_shape or (exclusions.indptr[1:] < exclusions.indptr[:-1]).any():
        raise ConfigError(
            f"excluded must have one history for each of {user_count} users, not {len(exclusions)}, with "
            f"indptr ascending from 0 to {len(exclusions.indices)}"
        )
    if exclusions.indptr.dtype != np.int64 or exclusions.indices.dtype != np.int64:
        raise ConfigError(f"excluded must hold int64, not {exclusions.indptr.dtype}/{exclusions.indices.dtype}")


def _check_allowed(allowed_mask: NDArray[np.bool_] | None, item_count: int) -> None:
    if allowed_mask is not None and (allowed_mask.dtype != np.bool_ or allowed_mask.shape != (item_count,)):
        raise ConfigError(
            f"allowed must be bool [{item_count}], one per item, not {allowed_mask.dtype} {list(allowed_mask.shape)}"
        )

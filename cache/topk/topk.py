"""Exact top-K of all items for many users: by the compiled kernel, or by FAISS where it was not built.

Both give the same bits: candidates are certified against rounding, and `cache.model.ranking`'s scores decide.
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
from cache.topk.compiled import K_MAX, Kernel, PackedItems, fits, kernel
from cache.topk.flat import ComparableItems, FlatChunk, Top, chunks

_SLAB_USERS = 1024
_LEAST_USERS = 256

Part = TypeVar("Part")


class AnyScorer(Protocol):
    """Items ready to be searched exactly, wherever that is computed: the same lists with the same bits."""

    def top(
        self,
        users: NDArray[np.float32],
        k: int,
        excluded: Histories | None = None,
        *,
        allowed: NDArray[np.bool_] | None = None,
        threads: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Top:
        """Top K of each user: (ordinals uint32 [n, k], scores float32 [n, k]), as `Scorer.top` gives them."""


@dataclass(frozen=True, slots=True, eq=False)
class Scorer:
    """Items ready to be searched exactly: made once, used for every shard."""

    compared: ComparableItems
    compiled: tuple[Kernel, PackedItems] | None

    @classmethod
    def of(
        cls,
        vectors: NDArray[np.float32],
        metric: Metric = "inner_product",
        *,
        engine: Kernel | bool = True,
    ) -> Self:
        """Scorer of finite float32 [items, dims] in ordinal order.

        `engine` True takes the kernel where it is usable, False FAISS; a kernel, that one.
        """
        item_vectors = np.asarray(vectors)  # a memory map's own class is slow to index
        _check_shape("items", item_vectors, None)
        _check_values("items", item_vectors)
        compared = ComparableItems.of(np.ascontiguousarray(item_vectors), metric)
        usable_kernel = kernel() if engine is True else engine
        packed = usable_kernel.pack(compared) if usable_kernel else None
        return cls(compared, (usable_kernel, packed) if usable_kernel and packed else None)

    def top(
        self,
        users: NDArray[np.float32],
        k: int,
        excluded: Histories | None = None,
        *,
        allowed: NDArray[np.bool_] | None = None,
        threads: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Top:
        """(ordinals uint32 [n, k], scores float32 [n, k]) for finite users float32 [n, dims].

        `excluded` holds ordinals per user (unknown ones are -1), `allowed` bool [items] says which
        items may appear at all. Score descending, ties by ordinal; where fewer than k items remain,
        NO_ITEM and 0. `progress` is told how many users each step finished. Memory beside the result
        does not depend on the number of users. Raises ConfigError for anything of another shape.
        """
        users, exclusions = checked(self.compared, users, k, excluded, allowed)
        report_progress = progress or (lambda _: None)
        count = threads or usable_cores()
        if self.compiled is None:
            return self._flat(users, k, exclusions, allowed, count, report_progress)
        fit = fits(self.compared, users)
        if fit.all():
            return self._by_kernel(users, k, exclusions, allowed, count, report_progress)
        ordinals, scores = (
            np.empty((len(users), k), np.uint32),
            np.empty((len(users), k), "f4"),
        )
        for method, user_mask in ((self._by_kernel, fit), (self._flat, ~fit)):
            rows = np.flatnonzero(user_mask)
            part = method(
                users[rows], k, exclusions.select_rows(rows), allowed, count, report_progress
            )
            ordinals[rows], scores[rows] = part
        return ordinals, scores

    def _by_kernel(
        self,
        users: NDArray[np.float32],
        k: int,
        exclusions: Histories,
        allowed: NDArray[np.bool_] | None,
        threads: int,
        report_progress: Callable[[int], None],
    ) -> Top:
        assert self.compiled is not None  # noqa: S101 - `top` asked
        engine, packed = self.compiled
        bits = packed.allowed(allowed)
        top_lists = (
            np.empty((len(users), k), np.uint32),
            np.empty((len(users), k), np.float32),
        )

        def run(rows: slice) -> int:
            engine.top(packed, users, k, exclusions, bits, rows, top_lists)
            return int(rows.stop - rows.start)

        _run_all(run, slabs_of(len(users), threads), threads, report_progress)
        return top_lists

    def _flat(
        self,
        users: NDArray[np.float32],
        k: int,
        exclusions: Histories,
        allowed: NDArray[np.bool_] | None,
        threads: int,
        report_progress: Callable[[int], None],
    ) -> Top:
        if allowed is not None:
            return self._flat_among(
                users, k, exclusions, np.flatnonzero(allowed), threads, report_progress
            )
        ordinals = np.full((len(users), k), NO_ITEM, np.uint32)
        scores = np.zeros((len(users), k), np.float32)
        if not len(self.compared.vectors):
            return ordinals, scores

        def run(part: tuple[NDArray[np.int64], int]) -> int:
            rows, fetch = part
            chunk = FlatChunk(self.compared, users[rows], exclusions.select_rows(rows), k, fetch)
            ordinals[rows], scores[rows] = chunk.run()
            return len(rows)

        parts = chunks(np.diff(exclusions.indptr), k, threads, self.compared.vectors.shape)
        _run_all(run, parts, threads, report_progress)
        return ordinals, scores

    def _flat_among(
        self,
        users: NDArray[np.float32],
        k: int,
        exclusions: Histories,
        allowed_ordinals: NDArray[np.int64],
        threads: int,
        report_progress: Callable[[int], None],
    ) -> Top:
        """Top K among the ordinals `allowed_ordinals` (ascending, so ties fall as they would among all)."""
        allowed_scorer = Scorer.of(
            self.compared.vectors[allowed_ordinals], self.compared.metric, engine=False
        )
        renamed = np.full(len(self.compared.vectors) + 1, -1)
        renamed[allowed_ordinals] = np.arange(len(allowed_ordinals))
        is_item_ordinal = (exclusions.indices >= 0) & (exclusions.indices < len(renamed) - 1)
        indices = renamed[np.where(is_item_ordinal, exclusions.indices, -1)]
        ordinals, scores = allowed_scorer._flat(
            users, k, Histories(exclusions.indptr, indices), None, threads, report_progress
        )
        names = np.append(allowed_ordinals, NO_ITEM).astype(np.uint32)
        return names[np.minimum(ordinals, len(allowed_ordinals))], scores


def checked(
    compared: ComparableItems,
    users: NDArray[np.float32],
    k: int,
    excluded: Histories | None,
    allowed: NDArray[np.bool_] | None,
    *,
    values: bool = True,
) -> tuple[NDArray[np.float32], Histories]:
    """Return contiguous user vectors and each user's exclusions; raise ConfigError for arguments that do not fit.

    Whether users are finite is looked at only with `values`.
    """
    if not 1 <= k <= K_MAX:
        raise ConfigError(f"k must be 1 to {K_MAX}, not {k}", k=k)
    items, dims = compared.vectors.shape
    users = np.ascontiguousarray(users)
    _check_shape("users", users, dims)
    if values:
        _check_values("users", users)
    exclusions = Histories.of([()] * len(users)) if excluded is None else excluded
    _check_histories(exclusions, len(users))
    _check_allowed(allowed, items)
    return users, exclusions


def slabs_of(users: int, threads: int) -> Iterator[slice]:
    """Rows for one thread at a time, fewer towards the end, so that the threads end together.

    Guided self-scheduling (Polychronopoulos and Kuck, IEEE Trans. Computers 1987), in half its steps.
    """
    min_slab_users = min(_LEAST_USERS, -(-users // threads))
    start = 0
    while start < users:
        step = max(min_slab_users, min(_SLAB_USERS, (users - start) // (2 * threads)))
        yield slice(start, min(start + step, users))
        start += step


def _run_all(
    run: Callable[[Part], int],
    parts: Iterable[Part],
    threads: int,
    report_progress: Callable[[int], None],
) -> None:
    if threads == 1:  # a thread for one lookup would cost as much as its search
        for part in parts:
            report_progress(run(part))
        return
    with ThreadPoolExecutor(threads) as pool:
        for user_count in pool.map(run, parts):
            report_progress(user_count)


def _check_shape(name: str, vectors: NDArray[np.float32], dims: int | None) -> None:
    if vectors.dtype != np.float32 or vectors.ndim != 2 or not vectors.shape[1]:
        raise ConfigError(
            f"{name} must be a float32 matrix with a row each, not {vectors.dtype} "
            f"{list(vectors.shape)}; convert with astype"
        )
    if dims is not None and vectors.shape[1] != dims:
        raise ConfigError(f"{name} have {vectors.shape[1]} dimensions, the items {dims}")


def _check_values(name: str, vectors: NDArray[np.float32]) -> None:
    # A sum of squares is finite only if all are; the rare sum that overflows is looked at closely.
    flat = vectors.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        suspect = not np.isfinite(np.dot(flat, flat))
    if suspect:
        nonfinite_rows = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(nonfinite_rows):
            raise ConfigError(
                f"{name} must be finite; row {nonfinite_rows[0]} is not ({len(nonfinite_rows)} rows): repair the model",
                row=int(nonfinite_rows[0]),
            )


def _check_histories(exclusions: Histories, users: int) -> None:
    shaped = (
        len(exclusions) == users
        and exclusions.indptr[0] == 0
        and exclusions.indptr[-1] == len(exclusions.indices)
    )
    if not shaped or (exclusions.indptr[1:] < exclusions.indptr[:-1]).any():
        raise ConfigError(
            f"excluded must have one history for each of {users} users, not {len(exclusions)}, with "
            f"indptr rising from 0 to {len(exclusions.indices)}"
        )
    if exclusions.indptr.dtype != np.int64 or exclusions.indices.dtype != np.int64:
        raise ConfigError(
            f"excluded must hold int64, not {exclusions.indptr.dtype}/{exclusions.indices.dtype}"
        )


def _check_allowed(allowed: NDArray[np.bool_] | None, items: int) -> None:
    if allowed is not None and (allowed.dtype != np.bool_ or allowed.shape != (items,)):
        raise ConfigError(
            f"allowed must be bool [{items}], one per item, not {allowed.dtype} {list(allowed.shape)}"
        )

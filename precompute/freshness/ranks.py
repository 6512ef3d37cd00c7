"""Ranks of targets in the lists that each way gives their users: the night's towers, exact search and grouping."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from cache.errors import ConfigError
from cache.model.tower import Histories, Tower
from cache.process.host import usable_cores
from cache.topk.topk import Scorer
from precompute.bundles.bundle import Bundle
from precompute.config.progress import Progress, quiet
from precompute.freshness.targets import Targets
from precompute.freshness.timed_log import TimedLog
from precompute.freshness.ways import EVENTS, RefreshStrategy
from precompute.partitions.grouping import last_occurrence_mask

CHUNK_ROWS: Final = 1 << 20
"""Rows of histories that are grouped at once."""
CHUNK_LISTS: Final = 4_096
ALONE: Final = 200
"""Lists that are timed one at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class RankedTargets:
    """Ranks of each target in its way's list, -1 where it is not in it; lists made of a history, and seconds of all."""

    ranks: NDArray[np.int64]
    lists: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class ListModel:
    """A bundle that computes lists from histories alone; who has none gets the most popular, as nights' defaults do.

    `limit` is the number of newest items that the model is given.
    """

    tower: Tower
    scorer: Scorer
    popular: Scorer
    limit: int

    @classmethod
    def of(cls, bundle: Bundle, popularity: NDArray[np.int64], limit: int) -> Self:
        """Opens the towers; raises ConfigError for models that a log alone cannot fill, or that read no history."""
        user, item = bundle.user_tower, bundle.item_tower
        if features := [*user.spec.features, *item.spec.features]:
            raise ConfigError(
                f"the bundle {bundle.name} takes the feature {features[0].column!r}, which a log of interactions does "
                "not have: leave --configured-bundle out to replay with the reference model"
            )
        if user.spec.history is None:
            raise ConfigError(f"the bundle {bundle.name} reads no history: events change nothing")
        cores = usable_cores()
        items = Tower.open(item.path, item.spec, threads=cores)
        (index,) = item.spec.inputs
        vectors = items.run({index.name: np.arange(bundle.items.count)})
        return cls(
            Tower.open(user.path, user.spec, threads=cores),
            Scorer.of(vectors, bundle.metric),
            Scorer.of(popularity.astype(np.float32)[:, None]),
            limit,
        )

    def top(self, input_histories: Histories, excluded: Histories, k: int) -> NDArray[np.int64]:
        """int64 [n, k] of model indices, best first; the items of `excluded` are left out."""
        top_items = np.empty((len(input_histories), k), np.int64)
        has_history = np.diff(input_histories.indptr) > 0
        known_rows, strangers = np.flatnonzero(has_history), np.flatnonzero(~has_history)
        history = self.tower.spec.history
        assert history is not None  # noqa: S101 - `of` asked
        if len(known_rows):
            vectors = self.tower.run(
                {
                    history.name: keep_newest_items(
                        input_histories.select_rows(known_rows), self.limit
                    )
                }
            )
            top_items[known_rows] = self.scorer.top(vectors, k, excluded.select_rows(known_rows))[0]
        if len(strangers):
            constant_vectors = np.ones((len(strangers), 1), np.float32)
            top_items[strangers] = self.popular.top(
                constant_vectors, k, excluded.select_rows(strangers)
            )[0]
        return top_items


def rank_targets(
    model: ListModel,
    log: TimedLog,
    targets: Targets,
    refresh_policy: RefreshStrategy,
    k: int,
    progress: Progress = quiet,
) -> RankedTargets:
    """Each list once, however many targets it is answered for; the time is of towers and search."""
    ends = targets.ends[refresh_policy]
    outs = targets.ends[EVENTS] if refresh_policy.leaves_out else ends
    lists, list_indices = np.unique(
        np.stack([targets.starts, ends, outs]), axis=1, return_inverse=True
    )
    order = np.argsort(list_indices, kind="stable")
    firsts = np.searchsorted(list_indices[order], np.arange(lists.shape[1] + 1))
    ranks, seconds = np.full(len(targets), -1, np.int64), 0.0
    for part in _chunks(lists[2] - lists[0]):
        starts, ends, outs = lists[:, part]
        input_histories, excluded = histories(log, starts, ends), histories(log, starts, outs)
        started_at = time.perf_counter()
        top_items = model.top(input_histories, excluded, k)
        seconds += time.perf_counter() - started_at
        rows = order[firsts[part.start] : firsts[part.stop]]
        is_it = top_items[list_indices[rows] - part.start] == targets.items[rows, None]
        ranks[rows] = np.where(is_it.any(axis=1), is_it.argmax(axis=1), -1)
        progress(f"replay {refresh_policy.text}", part.stop, lists.shape[1])
    return RankedTargets(ranks, int((lists[1] > lists[0]).sum()), seconds)


def alone_s(
    model: ListModel, log: TimedLog, targets: Targets, k: int, rng: np.random.Generator
) -> float:
    """Median seconds of a list that is computed by itself from all events, its history grouped first; 0 without any."""
    rows = np.flatnonzero(targets.ends[EVENTS] > targets.starts)
    drawn = rng.choice(rows, min(ALONE, len(rows)), replace=False) if len(rows) else rows
    spent = []
    for row in drawn:
        starts, ends = targets.starts[[row]], targets.ends[EVENTS][[row]]
        started_at = time.perf_counter()
        input_histories = histories(log, starts, ends)
        model.top(input_histories, input_histories, k)
        spent.append(time.perf_counter() - started_at)
    return median(spent or [0.0])


def histories(log: TimedLog, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Histories:
    """Histories of these rows of a log as a night groups them: each item once, at its latest place."""
    lengths = ends - starts
    owners = np.repeat(np.arange(len(lengths)), lengths)
    offsets = np.cumsum(lengths) - lengths
    items = log.items[np.arange(len(owners)) + np.repeat(starts - offsets, lengths)]
    kept_rows = last_occurrence_mask(owners, items)
    indptr = np.searchsorted(owners[kept_rows], np.arange(len(lengths) + 1))
    return Histories(indptr.astype(np.int64), items[kept_rows])


def keep_newest_items(input_histories: Histories, limit: int) -> Histories:
    """The last `limit` items of each history."""
    lengths = np.diff(input_histories.indptr)
    from_end = np.repeat(input_histories.indptr[1:], lengths) - np.arange(
        len(input_histories.indices)
    )
    kept_lengths = np.minimum(lengths, limit)
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept_lengths)])
    return Histories(indptr, input_histories.indices[from_end <= limit])


def _chunks(rows: NDArray[np.int64]) -> Iterator[slice]:
    """Lists that are computed at once: of at most CHUNK_ROWS rows, one at least."""
    ends, start = np.cumsum(rows), 0
    while start < len(rows):
        preceding_rows = int(ends[start] - rows[start])
        stop = int(ends.searchsorted(preceding_rows + CHUNK_ROWS, "right"))
        stop = min(max(stop, start + 1), start + CHUNK_LISTS)
        yield slice(start, stop)
        start = stop

"""Freshness of lists, replayed from the end of a log: recall and cost of each refresh strategy."""

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from rich.markup import escape
from rich.table import Table

from cache.errors import ConfigError, SourceError
from cache.model.tower import Histories, Tower
from cache.process.host import usable_cores
from cache.topk.compiled import K_MAX
from cache.topk.topk import Scorer
from precompute.bundles.bundle import Bundle
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig
from precompute.evaluation.options import ReplayOptions
from precompute.partitions.grouping import last_occurrence_mask, order_by_user_and_time
from precompute.reference.matrix_factorisation import SpectralShape
from precompute.reference.train import ReferenceData, train
from precompute.sources.erasures import ErasedEntities, all_erasures
from precompute.sources.readers import read_interactions
from precompute.sources.times import MICROSECONDS_PER_SECOND
from precompute.sources.vocabulary import HashedIds, NumberedIds, to_string_chunks

HOUR_S: Final = 3_600

DAY_S: Final = 24 * HOUR_S

_DAY_US = DAY_S * MICROSECONDS_PER_SECOND

HOUR_BOUNDS: Final = (0, 1, 3, 6, 12, 24)
"""Bounds of the bins of hours since the night."""

CHUNK_ROWS: Final = 1 << 20
"""Rows of histories grouped in one chunk."""

CHUNK_LISTS: Final = 4_096

LISTS_TIMED_ALONE: Final = 200
"""Number of lists timed one at a time."""

BOOTSTRAP_ROUNDS: Final = 1_000

INTERVAL_COVERAGE: Final = 0.95

_ROUNDS_AT_ONCE: Final = 50


@dataclass(frozen=True, slots=True)
class RefreshStrategy:
    """Strategy of refreshing lists: every `period_s` they are computed from all earlier rows, 0: at once.

    With `leaves_out` a list is answered without the items that its user has had since.
    """

    name: str
    text: str
    period_s: int
    leaves_out: bool = False


NIGHT: Final = RefreshStrategy("night", "a night a day", DAY_S)

NIGHT_LESS_SEEN: Final = RefreshStrategy(
    "night_less", "a night a day, less newer items", DAY_S, leaves_out=True
)

HOURLY: Final = RefreshStrategy("hourly", "a night an hour", HOUR_S)

EVENTS: Final = RefreshStrategy("events", "events", 0)

STRATEGIES: Final = (NIGHT, NIGHT_LESS_SEEN, HOURLY, EVENTS)
"""Strategies to compare; the first is the baseline."""


@dataclass(frozen=True, slots=True, eq=False)
class TimedLog:
    """Rows ordered by user, then time (int64 microseconds since 1970), rows of one time as they came.

    Users are numbered from 0, of all rows; items are indexes into a list of ids.
    """

    users: NDArray[np.int64]
    items: NDArray[np.int64]
    times: NDArray[np.int64]

    @classmethod
    def of(
        cls, users: NDArray[np.int64], items: NDArray[np.int64], times: NDArray[np.int64]
    ) -> Self:
        """Order rows that came in any order."""
        order = order_by_user_and_time(users, times)
        return cls(users[order], items[order], times[order])

    def __len__(self) -> int:
        return len(self.users)

    def only(self, rows: NDArray[np.bool_]) -> Self:
        """Return some of the rows, in their order."""
        return type(self)(self.users[rows], self.items[rows], self.times[rows])

    def renamed(self, index_by_item: NDArray[np.int64]) -> Self:
        """Return the rows with items renumbered by `index_by_item` [ids]; -1 leaves a row out."""
        item_indices = index_by_item[self.items]
        return type(self)(self.users, item_indices, self.times).only(item_indices >= 0)


def read_log(config: NightConfig, progress: Progress = quiet) -> tuple[TimedLog, Any]:
    """Return (the configured interactions with a time, without erased ones; the item ids, as Arrow strings).

    Raises SourceError for a log without times.
    """
    if not config.sources.interactions:
        raise ConfigError("sources.interactions is empty: name the log there, or with --data")
    users, items, times, rows = HashedIds(), NumberedIds(), [], 0
    erased = ErasedEntities.of(all_erasures(config.store()))
    for batch in map(erased.leave_out, read_interactions(config.sources, Path(config.base))):
        users.add(batch.users)
        items.add(batch.items)
        times.append(batch.times)
        rows += len(batch.times)
        progress("read the log", rows, 0)
    when = np.concatenate([np.empty(0, np.int64), *times])
    if not (when != when[:1]).any():
        raise SourceError(
            f"the log has no times to replay it by: its {rows:,} rows have none, or all the same one; name the column "
            "in sources.timestamp_column"
        )
    timed = when != 0
    return TimedLog.of(users.codes()[0][timed], items.codes()[timed], when[timed]), items.names


def cut_before_days(log: TimedLog, days: int) -> int:
    """Return the start of the last `days` days (UTC) of the log, the last row's day included, in microseconds.

    Raises SourceError if no row is before that.
    """
    first, last = int(log.times.min()), int(log.times.max())
    cut = (last // _DAY_US - days + 1) * _DAY_US
    if first >= cut:
        raise SourceError(
            f"the log spans {(last - first) / _DAY_US:.1f} days: too short to replay its last {days} and to train on "
            "what is before; take fewer --days, or a longer log",
            days=days,
        )
    return cut


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """Targets: items to be found in the list that their user would get right before; int64 [targets] each.

    `users` are numbered anew from 0, `starts` is where the user's rows of the log start. By strategy, `ends` is the end
    of the rows that its lists are computed from.
    """

    users: NDArray[np.int64]
    items: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: Mapping[RefreshStrategy, NDArray[np.int64]]
    since_night_us: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        log: TimedLog,
        cut_us: int,
        ways: Sequence[RefreshStrategy],
        users_max: int,
        rng: np.random.Generator,
    ) -> Self:
        """Find the first interactions with an item after the cut; draw `users_max` users if there are more.

        Rows of the same moment do not know each other. Raises SourceError without any target.
        """
        pairs = log.users * (int(log.items.max(initial=0)) + 1) + log.items
        is_first = np.zeros(len(log), np.bool_)
        is_first[np.unique(pairs, return_index=True)[1]] = True
        rows = np.flatnonzero(is_first & (log.times >= cut_us))
        active_users = np.unique(log.users[rows])
        if not len(active_users):
            raise SourceError(
                "nobody in the log did anything new after the cut with an item that was known before: take more "
                "--days, or a longer log"
            )
        if len(active_users) > users_max:
            active_users = np.sort(rng.choice(active_users, users_max, replace=False))
            rows = rows[np.isin(log.users[rows], active_users)]
        users, times = log.users[rows], log.times[rows]
        distinct, ranks = np.unique(log.times, return_inverse=True)
        keys = log.users * (len(distinct) + 1) + ranks

        def end(refresh_policy: RefreshStrategy) -> NDArray[np.int64]:
            cutoff_times = computed_at(times, cut_us, refresh_policy)
            search_keys = users * (len(distinct) + 1) + distinct.searchsorted(cutoff_times)
            return np.asarray(keys.searchsorted(search_keys), np.int64)

        return cls(
            np.searchsorted(active_users, users),
            log.items[rows],
            log.users.searchsorted(users),
            {refresh_policy: end(refresh_policy) for refresh_policy in ways},
            times - computed_at(times, cut_us, NIGHT),
        )

    def __len__(self) -> int:
        return len(self.users)

    @property
    def is_known(self) -> NDArray[np.bool_]:
        """Mask of the targets whose user the last night knew."""
        return np.asarray(self.ends[NIGHT] > self.starts)

    @property
    def has_newer(self) -> NDArray[np.bool_]:
        """Mask of the targets whose user did something since the last night."""
        return np.asarray(self.ends[EVENTS] > self.ends[NIGHT])


def computed_at(
    times: NDArray[np.int64], cut_us: int, refresh_policy: RefreshStrategy
) -> NDArray[np.int64]:
    """Return the time before which all rows are included in the lists answered at `times`, microseconds each."""
    if not refresh_policy.period_s:
        return times
    period_us = refresh_policy.period_s * MICROSECONDS_PER_SECOND
    return cut_us + (times - cut_us) // period_us * period_us


def lists_per_day(
    log: TimedLog, cut_us: int, refresh_policy: RefreshStrategy
) -> tuple[float, float | None]:
    """Return lists a day after the cut: (of users with changes since their last, of all users, None by events)."""
    after = log.times >= cut_us
    days = (int(log.times.max()) + 1 - cut_us) / _DAY_US
    users, times = log.users[after], log.times[after]
    periods = (
        times
        if not refresh_policy.period_s
        else (times - cut_us) // (refresh_policy.period_s * MICROSECONDS_PER_SECOND)
    )
    order = np.lexsort((periods, users))
    users, periods = users[order], periods[order]
    is_new = (users[1:] != users[:-1]) | (periods[1:] != periods[:-1])
    changed_per_day = (len(users) and 1 + int(is_new.sum())) / days
    if not refresh_policy.period_s:
        return changed_per_day, None
    first_times = np.sort(log.times[np.flatnonzero(np.diff(log.users, prepend=-1))])
    nights = np.arange(
        cut_us, int(log.times.max()) + 1, refresh_policy.period_s * MICROSECONDS_PER_SECOND
    )
    return changed_per_day, float(first_times.searchsorted(nights).sum()) / days


@dataclass(frozen=True, slots=True, eq=False)
class RankedTargets:
    """Ranks of each target in its strategy's list, -1 if absent; the number of lists computed, and their seconds."""

    ranks: NDArray[np.int64]
    lists: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class ListModel:
    """Bundle that computes lists from histories alone; a user without one gets the most popular items, as in a night.

    `limit` is the number of newest items that the model is given.
    """

    tower: Tower
    scorer: Scorer
    popular: Scorer
    limit: int

    @classmethod
    def of(cls, bundle: Bundle, popularity: NDArray[np.int64], limit: int) -> Self:
        """Open the towers; raise ConfigError for models that need more than a log, or that read no history."""
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
        """Return int64 [n, k] of model indices, best first; the items of `excluded` are left out."""
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
    """Compute each list once, however many targets it has; the time is of towers and search."""
    ends = targets.ends[refresh_policy]
    outs = targets.ends[EVENTS] if refresh_policy.leaves_out else ends
    lists, list_indices = np.unique(
        np.stack([targets.starts, ends, outs]), axis=1, return_inverse=True
    )
    order = np.argsort(list_indices, kind="stable")
    firsts = np.searchsorted(list_indices[order], np.arange(lists.shape[1] + 1))
    ranks, seconds = np.full(len(targets), -1, np.int64), 0.0
    for part in _list_chunks(lists[2] - lists[0]):
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


def seconds_alone(
    model: ListModel, log: TimedLog, targets: Targets, k: int, rng: np.random.Generator
) -> float:
    """Return the median seconds of a list computed alone from all events, with grouping its history; 0 without any."""
    rows = np.flatnonzero(targets.ends[EVENTS] > targets.starts)
    drawn = (
        rng.choice(rows, min(LISTS_TIMED_ALONE, len(rows)), replace=False) if len(rows) else rows
    )
    spent = []
    for row in drawn:
        starts, ends = targets.starts[[row]], targets.ends[EVENTS][[row]]
        started_at = time.perf_counter()
        input_histories = histories(log, starts, ends)
        model.top(input_histories, input_histories, k)
        spent.append(time.perf_counter() - started_at)
    return median(spent or [0.0])


def histories(log: TimedLog, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Histories:
    """Return histories of these rows of a log, grouped as in a night: each item once, at its latest position."""
    lengths = ends - starts
    owners = np.repeat(np.arange(len(lengths)), lengths)
    offsets = np.cumsum(lengths) - lengths
    items = log.items[np.arange(len(owners)) + np.repeat(starts - offsets, lengths)]
    kept_rows = last_occurrence_mask(owners, items)
    indptr = np.searchsorted(owners[kept_rows], np.arange(len(lengths) + 1))
    return Histories(indptr.astype(np.int64), items[kept_rows])


def keep_newest_items(input_histories: Histories, limit: int) -> Histories:
    """Return the last `limit` items of each history."""
    lengths = np.diff(input_histories.indptr)
    from_end = np.repeat(input_histories.indptr[1:], lengths) - np.arange(
        len(input_histories.indices)
    )
    kept_lengths = np.minimum(lengths, limit)
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept_lengths)])
    return Histories(indptr, input_histories.indices[from_end <= limit])


def _list_chunks(rows: NDArray[np.int64]) -> Iterator[slice]:
    """Yield chunks of lists with at most CHUNK_ROWS rows, at least one list."""
    ends, start = np.cumsum(rows), 0
    while start < len(rows):
        preceding_rows = int(ends[start] - rows[start])
        stop = int(ends.searchsorted(preceding_rows + CHUNK_ROWS, "right"))
        stop = min(max(stop, start + 1), start + CHUNK_LISTS)
        yield slice(start, stop)
        start = stop


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean with its 95 % confidence interval over resampled users."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        """Return a JSON-able form, rounded to five decimals."""
        return {
            name: round(statistic, 5)
            for name, statistic in (("value", self.value), ("low", self.low), ("high", self.high))
        }


def bootstrap_means(
    users: NDArray[np.int64],
    values: NDArray[np.float64],
    groups: NDArray[np.bool_],
    rng: np.random.Generator,
    rounds: int = BOOTSTRAP_ROUNDS,
) -> list[list[Estimate]]:
    """Return by group and column the mean of `values` [n, columns] over the rows of `groups` [groups, n].

    A row belongs to one of `users`, numbered from 0; all rows of a user are drawn together, with the same draws for all
    groups and columns (Efron's bootstrap, by clusters). A group has a row at least.
    """
    count, columns = int(users.max()) + 1, values.shape[1]
    sums = np.zeros((count, len(groups), columns + 1))
    for group_index, rows in enumerate(groups):
        for column in range(columns):
            sums[:, group_index, column] = np.bincount(users[rows], values[rows, column], count)
        sums[:, group_index, columns] = np.bincount(users[rows], minlength=count)
    flat = sums.reshape(count, -1)
    drawn = np.empty((rounds, len(groups), columns + 1))
    for start in range(0, rounds, _ROUNDS_AT_ONCE):
        size = min(_ROUNDS_AT_ONCE, rounds - start)
        weights = rng.multinomial(count, np.full(count, 1 / count), size).astype(np.float64)
        drawn[start : start + size] = (weights @ flat).reshape(size, len(groups), -1)
    means = sums.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn_means = drawn[..., :columns] / drawn[..., columns:]
    bounds = np.nanquantile(
        drawn_means, [(1 - INTERVAL_COVERAGE) / 2, (1 + INTERVAL_COVERAGE) / 2], axis=0
    )
    value = means[:, :columns] / means[:, columns:]
    return [
        [
            Estimate(float(value[group_index, column]), *map(float, bounds[:, group_index, column]))
            for column in range(columns)
        ]
        for group_index in range(len(groups))
    ]


@dataclass(frozen=True, slots=True)
class StrategyCost:
    """Cost of a strategy: lists a day of users with changes and of all, and milliseconds per list."""

    strategy: RefreshStrategy
    changed_per_day: float
    all_per_day: float | None
    list_ms: float

    @property
    def seconds_per_day(self) -> float:
        """Seconds a day of lists of users with changes."""
        return self.changed_per_day * self.list_ms / 1e3


@dataclass(frozen=True, slots=True)
class TargetGroup:
    """Group of targets: recall and NDCG of each strategy's lists, and the difference in recall from nightly lists."""

    name: str
    targets: int
    with_newer: int
    recall: Mapping[RefreshStrategy, Estimate]
    ndcg: Mapping[RefreshStrategy, Estimate]
    gain: Mapping[RefreshStrategy, Estimate]


@dataclass(frozen=True, slots=True)
class FreshnessReport:
    """Report of a replay; the first group is of all targets."""

    facts: Mapping[str, Any]
    groups: tuple[TargetGroup, ...]
    costs: tuple[StrategyCost, ...]


def replay(
    config: NightConfig, options: ReplayOptions, progress: Progress = quiet
) -> FreshnessReport:
    """Replay the last days of the configured log; the same inputs and seed give the same results, except times."""
    named, names = read_log(config, progress)
    cut = cut_before_days(named, options.days)
    of_users, of_means, of_times = np.random.default_rng(options.seed).spawn(3)
    with _replayed_bundle(config, options, named, names, cut, progress) as bundle:
        log = named.renamed(
            bundle.vocabulary.find_positions(to_string_chunks(pa.chunked_array([names])))
        )
        if not len(log):
            raise SourceError(f"the bundle {bundle.name} knows no item of the log")
        targets = Targets.of(log, cut, STRATEGIES, options.users, of_users)
        earlier_items = log.items[log.times < cut]
        popularity = np.bincount(earlier_items, minlength=bundle.items.count)
        model = ListModel.of(bundle, popularity, config.history_limit)
        ranked = {
            refresh_policy: rank_targets(model, log, targets, refresh_policy, options.k, progress)
            for refresh_policy in STRATEGIES
        }
        alone = seconds_alone(model, log, targets, options.k, of_times)
    costs, of_events = [], ranked[EVENTS]
    batched = of_events.seconds / max(1, of_events.lists)
    for refresh_policy in (
        policy for policy in STRATEGIES if not policy.leaves_out
    ):  # else no list is computed
        changed_per_day, all_per_day = lists_per_day(log, cut, refresh_policy)
        costs.append(
            StrategyCost(
                refresh_policy,
                changed_per_day,
                all_per_day,
                1e3 * (alone if refresh_policy is EVENTS else batched),
            )
        )
    after = named.times >= cut
    facts = {
        "users": len(np.unique(named.users)),
        "items": len(names),
        "interactions": len(named),
        "from": _day(named.times.min()),
        "cut": _day(cut),
        "until": _day(named.times.max()),
        "replayed": int(after.sum()),
        "of_items_unknown_at_the_cut": int(after.sum() - (log.times >= cut).sum()),
        "users_evaluated": int(targets.users.max()) + 1,
        "model": bundle.name,
        "trained": "as configured" if options.configured_bundle else "on what is before the cut",
        "dims": bundle.dims,
        "days": options.days,
        "k": options.k,
        "seed": options.seed,
    }
    ranks = {
        refresh_policy: ranked_targets.ranks for refresh_policy, ranked_targets in ranked.items()
    }
    return FreshnessReport(facts, tuple(_groups(targets, ranks, of_means)), tuple(costs))


@contextmanager
def _replayed_bundle(
    config: NightConfig,
    options: ReplayOptions,
    log: TimedLog,
    names: Any,
    cut_us: int,
    progress: Progress,
) -> Iterator[Bundle]:
    """Yield the configured bundle, or a reference bundle trained before the cut."""
    if options.configured_bundle:
        yield Bundle.open(config.path(config.bundle))
        return
    earlier = log.only(log.times < cut_us)
    earlier_items, items = np.unique(earlier.items, return_inverse=True)
    _, users = np.unique(earlier.users, return_inverse=True)
    ids = names.take(pa.array(earlier_items))
    data = ReferenceData(users, items, ids, times=earlier.times)
    shape = None if config.reference.choose else SpectralShape()
    with tempfile.TemporaryDirectory(prefix="larder-freshness-") as folder:
        yield train(
            data, Path(folder) / "bundle", dims=config.reference.dims, seed=options.seed,
            shape=shape, progress=progress,
        )  # fmt: skip


def _groups(
    targets: Targets, ranks: Mapping[RefreshStrategy, NDArray[np.int64]], rng: np.random.Generator
) -> Iterator[TargetGroup]:
    """Yield all targets, those with newer events, known and new users', and those by hours since the night."""
    hours = targets.since_night_us / (HOUR_S * MICROSECONDS_PER_SECOND)
    masks = {
        "all": np.ones(len(targets), np.bool_),
        "with newer events": targets.has_newer,
        "user known to the night": targets.is_known,
        "user new since the night": ~targets.is_known,
    }
    for start, end in pairwise(HOUR_BOUNDS):
        masks[f"{start} to {end} h since the night"] = (hours >= start) & (hours < end)
    masks = {name: rows for name, rows in masks.items() if rows.any()}
    hits = np.stack([policy_ranks >= 0 for policy_ranks in ranks.values()], axis=1).astype(
        np.float64
    )
    discounts = 1 / np.log2(np.maximum(np.stack(list(ranks.values()), axis=1), 0) + 2.0)
    values = np.concatenate([hits, hits * discounts, hits - hits[:, :1]], axis=1)
    group_estimates = bootstrap_means(targets.users, values, np.stack(list(masks.values())), rng)
    for (name, rows), means in zip(masks.items(), group_estimates, strict=True):
        recall, ndcg, gain = (
            dict(zip(ranks, means[start : start + len(ranks)], strict=True))
            for start in range(0, 3 * len(ranks), len(ranks))
        )
        del gain[NIGHT]
        newer_count = int((rows & targets.has_newer).sum())
        yield TargetGroup(name, int(rows.sum()), newer_count, recall, ndcg, gain)


def _day(time_us: int) -> str:
    return str(np.datetime64(int(time_us), "us").astype("M8[s]"))


def command(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any] | list[Table | str]:
    """Run `larder freshness`."""
    for name, maximum in (("days", 3650), ("k", K_MAX), ("users", 10_000_000), ("seed", 2**32 - 1)):
        value = getattr(arguments, name)
        if not (name != "seed") <= value <= maximum:
            minimum = int(name != "seed")
            raise ConfigError(f"--{name} is {minimum} to {maximum}, not {value}", field=name)
    if arguments.data:
        data = tuple(
            source_path if "://" in source_path else str(Path.cwd() / source_path)
            for source_path in arguments.data
        )
        config = replace(config, sources=replace(config.sources, interactions=data))
    options = ReplayOptions(
        arguments.days, arguments.k, arguments.users, arguments.seed, arguments.configured_bundle
    )
    report = replay(config, options, progress)
    return report_to_json(report) if arguments.json else report_tables(report)


def report_to_json(report: FreshnessReport) -> dict[str, Any]:
    """Return a JSON-able form of a report."""
    return {
        **report.facts,
        "groups": [
            {
                "group": group.name,
                "targets": group.targets,
                "with_newer_events": group.with_newer,
                **{
                    measure: {refresh_policy.name: value.to_json() for refresh_policy, value in means.items()}
                    for measure, means in (
                        ("recall", group.recall), ("ndcg", group.ndcg), ("gain", group.gain),
                    )
                },
            }
            for group in report.groups
        ],
        "costs": [
            {
                "way": cost.strategy.name,
                "lists_a_day": round(cost.changed_per_day, 1),
                "lists_a_day_of_all": None if cost.all_per_day is None else round(cost.all_per_day, 1),
                "list_ms": round(cost.list_ms, 4),
                "seconds_a_day": round(cost.seconds_per_day, 3),
            }
            for cost in report.costs
        ],
    }  # fmt: skip


def report_tables(report: FreshnessReport) -> list[Table | str]:
    """Render a report: all targets by strategy, groups of targets, costs."""
    facts, everything = report.facts, report.groups[0]
    k = facts["k"]
    log = (
        f"{facts['users']:,} users, {facts['items']:,} items, {facts['interactions']:,} interactions from "
        f"{facts['from']} to {facts['until']} UTC; replayed from {facts['cut']} on: {facts['replayed']:,}, of which "
        f"{facts['of_items_unknown_at_the_cut']:,} with items that were not known yet."
    )
    model = (
        f"{escape(facts['model'])}, {facts['dims']} dimensions, trained {facts['trained']}. To be found are "
        f"{everything.targets:,} items that {facts['users_evaluated']:,} users took up, {everything.with_newer:,} of "
        "them after something else since the night."
    )
    by_way = _number_table(
        "lists by", f"recall@{k}", "95 %", f"NDCG@{k}", "95 %", "more than nights", "95 %"
    )
    for refresh_policy in STRATEGIES:
        gain = (everything.gain[refresh_policy],) if refresh_policy in everything.gain else ()
        means = (everything.recall[refresh_policy], everything.ndcg[refresh_policy], *gain)
        by_way.add_row(
            refresh_policy.text, *(text for estimate in means for text in _estimate_texts(estimate))
        )
    groups = _number_table(
        "items taken up", "number", "newer events", *(refresh_policy.text for refresh_policy in STRATEGIES),
        "events more than nights", "95 %",
    )  # fmt: skip
    for group in report.groups:
        recalls = (f"{group.recall[refresh_policy].value:.4f}" for refresh_policy in STRATEGIES)
        newer_percentage = f"{group.with_newer / group.targets:.0%}"
        groups.add_row(
            group.name,
            f"{group.targets:,}",
            newer_percentage,
            *recalls,
            *_estimate_texts(group.gain[EVENTS]),
        )
    costs = _number_table(
        "lists by", "lists a day, where inputs changed", "of all users", "ms a list", "s a day"
    )
    for cost in report.costs:
        all_lists_text = "" if cost.all_per_day is None else f"{cost.all_per_day:,.0f}"
        costs.add_row(
            cost.strategy.text, f"{cost.changed_per_day:,.0f}", all_lists_text, f"{cost.list_ms:.3f}",
            f"{cost.seconds_per_day:,.1f}",
        )  # fmt: skip
    return [log, model, by_way, f"Recall@{k} of parts:", groups, costs]


def _number_table(first: str, *numbers: str) -> Table:
    table = Table(first, *numbers)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _estimate_texts(estimate: Estimate) -> tuple[str, str]:
    return f"{estimate.value:.4f}", f"{estimate.low:.4f} to {estimate.high:.4f}"

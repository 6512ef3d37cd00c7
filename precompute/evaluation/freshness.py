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
from cache.store.erasures import all_erasures
from cache.topk.compiled import K_MAX
from cache.topk.topk import Scorer
from precompute.bundles.bundle import Bundle
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig
from precompute.evaluation.options import ReplayOptions
from precompute.partitions.grouping import last_occurrence_mask, order_by_user_and_time
from precompute.reference.matrix_factorisation import SpectralShape
from precompute.reference.train import ReferenceData, train
from precompute.sources.erasures import ErasedEntities
from precompute.sources.readers import read_interactions
from precompute.sources.times import MICROSECONDS_PER_SECOND
from precompute.sources.vocabulary import HashedIds, NumberedIds, to_string_chunks

HOUR_S: Final = 3_600

DAY_S: Final = 24 * HOUR_S

_DAY_US = DAY_S * MICROSECONDS_PER_SECOND

HOUR_BOUNDS: Final = (0, 1, 3, 6, 12, 24)
"""Bounds of the bins of hours since the last night."""

CHUNK_ROWS_MAX: Final = 1 << 20
"""Maximum number of rows of histories in one chunk."""

CHUNK_LISTS_MAX: Final = 4_096

LISTS_TIMED_ALONE_MAX: Final = 200
"""Maximum number of lists timed one at a time."""

BOOTSTRAP_ROUNDS: Final = 1_000

INTERVAL_COVERAGE: Final = 0.95

_BOOTSTRAP_ROUNDS_AT_ONCE: Final = 50


@dataclass(frozen=True, slots=True)
class RefreshStrategy:
    """Strategy of refreshing lists: they are recomputed every `period_s` from all earlier rows; 0: for each answer.

    With `leaves_out_newer_items` answers leave out items that the user has had since the list was computed.
    """

    strategy_name: str
    description: str
    period_s: int
    leaves_out_newer_items: bool = False


NIGHT: Final = RefreshStrategy("night", "a night a day", DAY_S)

NIGHT_LESS_SEEN: Final = RefreshStrategy(
    "night_less", "a night a day, less newer items", DAY_S, leaves_out_newer_items=True
)

HOURLY: Final = RefreshStrategy("hourly", "a night an hour", HOUR_S)

EVENTS: Final = RefreshStrategy("events", "events", 0)

STRATEGIES: Final = (NIGHT, NIGHT_LESS_SEEN, HOURLY, EVENTS)
"""Strategies to compare; the first is the baseline."""


@dataclass(frozen=True, slots=True, eq=False)
class TimedLog:
    """Rows ordered by user, then time (int64 microseconds since 1970); rows of the same time keep their order.

    Users are numbered from 0 over all rows; items are indexes into a list of ids.
    """

    user_numbers: NDArray[np.int64]
    item_indices: NDArray[np.int64]
    times_us: NDArray[np.int64]

    @classmethod
    def of(cls, user_numbers: NDArray[np.int64], item_indices: NDArray[np.int64], times_us: NDArray[np.int64]) -> Self:
        """Order rows by user and time."""
        order = order_by_user_and_time(user_numbers, times_us)
        return cls(user_numbers[order], item_indices[order], times_us[order])

    def __len__(self) -> int:
        return len(self.user_numbers)

    def only(self, row_mask: NDArray[np.bool_]) -> Self:
        """Return some of the rows, in their order."""
        return type(self)(self.user_numbers[row_mask], self.item_indices[row_mask], self.times_us[row_mask])

    def renumber_items(self, index_by_item: NDArray[np.int64]) -> Self:
        """Return the rows with items renumbered by `index_by_item` [ids]; -1 leaves a row out."""
        item_indices = index_by_item[self.item_indices]
        return type(self)(self.user_numbers, item_indices, self.times_us).only(item_indices >= 0)


def read_log(config: NightConfig, progress: Progress = quiet) -> tuple[TimedLog, Any]:
    """Return (the configured interactions with a time, without erased ones; the item ids, as Arrow strings).

    Raises SourceError for a log without times.
    """
    if not config.sources.interactions:
        raise ConfigError("sources.interactions is empty: name the log there, or with --data")
    user_ids, numbered_item_ids, time_batches, row_count = HashedIds(), NumberedIds(), [], 0
    erased = ErasedEntities.of(all_erasures(config.store()))
    for batch in map(erased.leave_out, read_interactions(config.sources, Path(config.base))):
        user_ids.add(batch.user_ids)
        numbered_item_ids.add(batch.item_ids)
        time_batches.append(batch.times_us)
        row_count += len(batch.times_us)
        progress("read the log", row_count, 0)
    interaction_times = np.concatenate([np.empty(0, np.int64), *time_batches])
    if not (interaction_times != interaction_times[:1]).any():
        raise SourceError(
            f"the log has no times to replay it by: its {row_count:,} rows have no times, or all the same time; name "
            "the column in sources.timestamp_column"
        )
    has_time = interaction_times != 0
    return TimedLog.of(
        user_ids.codes()[0][has_time], numbered_item_ids.codes()[has_time], interaction_times[has_time]
    ), numbered_item_ids.distinct_ids


def cut_before_days(log: TimedLog, day_count: int) -> int:
    """Return the start of the last `day_count` days (UTC) of the log, the last row's included, in microseconds.

    Raises SourceError if no row is before that.
    """
    first_time_us, last_time_us = int(log.times_us.min()), int(log.times_us.max())
    cut_us = (last_time_us // _DAY_US - day_count + 1) * _DAY_US
    if first_time_us >= cut_us:
        raise SourceError(
            f"the log spans {(last_time_us - first_time_us) / _DAY_US:.1f} days: too short to replay its last "
            f"{day_count} and to train on the rest; take fewer --days, or a longer log",
            days=day_count,
        )
    return cut_us


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """Items that users interact with, each to be found in the user's list just before; arrays are int64 [targets].

    `user_numbers` are renumbered from 0; `first_rows` are the first rows of the users in the log. By strategy,
    `end_rows_by_strategy` are the ends of the rows from which the lists are computed.
    """

    user_numbers: NDArray[np.int64]
    item_indices: NDArray[np.int64]
    first_rows: NDArray[np.int64]
    end_rows_by_strategy: Mapping[RefreshStrategy, NDArray[np.int64]]
    since_night_us: NDArray[np.int64]

    @classmethod
    def of(
        cls, log: TimedLog, cut_us: int, strategies: Sequence[RefreshStrategy], users_max: int, rng: np.random.Generator
    ) -> Self:
        """Find each user's first interactions with an item after the cut; draw `users_max` users if there are more.

        Rows of the same moment are not in each other's histories. Raises SourceError if there is no target.
        """
        user_item_codes = log.user_numbers * (int(log.item_indices.max(initial=0)) + 1) + log.item_indices
        is_first = np.zeros(len(log), np.bool_)
        is_first[np.unique(user_item_codes, return_index=True)[1]] = True
        target_rows = np.flatnonzero(is_first & (log.times_us >= cut_us))
        active_users = np.unique(log.user_numbers[target_rows])
        if not len(active_users):
            raise SourceError(
                "no user in the log interacted after the cut with an item that was new to the user but known before: "
                "take more --days, or a longer log"
            )
        if len(active_users) > users_max:
            active_users = np.sort(rng.choice(active_users, users_max, replace=False))
            target_rows = target_rows[np.isin(log.user_numbers[target_rows], active_users)]
        target_users, target_times = log.user_numbers[target_rows], log.times_us[target_rows]
        distinct_times, time_ranks = np.unique(log.times_us, return_inverse=True)
        row_keys = log.user_numbers * (len(distinct_times) + 1) + time_ranks

        def find_end_rows(refresh_policy: RefreshStrategy) -> NDArray[np.int64]:
            cutoff_times = find_computation_times(target_times, cut_us, refresh_policy)
            search_keys = target_users * (len(distinct_times) + 1) + distinct_times.searchsorted(cutoff_times)
            return np.asarray(row_keys.searchsorted(search_keys), np.int64)

        return cls(
            np.searchsorted(active_users, target_users),
            log.item_indices[target_rows],
            log.user_numbers.searchsorted(target_users),
            {refresh_policy: find_end_rows(refresh_policy) for refresh_policy in strategies},
            target_times - find_computation_times(target_times, cut_us, NIGHT),
        )

    def __len__(self) -> int:
        return len(self.user_numbers)

    @property
    def is_known_user(self) -> NDArray[np.bool_]:
        """Mask of the targets whose user the last night knew."""
        return np.asarray(self.end_rows_by_strategy[NIGHT] > self.first_rows)

    @property
    def has_newer_events(self) -> NDArray[np.bool_]:
        """Mask of the targets whose user had interactions since the last night."""
        return np.asarray(self.end_rows_by_strategy[EVENTS] > self.end_rows_by_strategy[NIGHT])


def find_computation_times(
    answer_times_us: NDArray[np.int64], cut_us: int, refresh_policy: RefreshStrategy
) -> NDArray[np.int64]:
    """Return the times before which the lists answered at `answer_times_us` include all rows, in microseconds."""
    if not refresh_policy.period_s:
        return answer_times_us
    period_us = refresh_policy.period_s * MICROSECONDS_PER_SECOND
    return cut_us + (answer_times_us - cut_us) // period_us * period_us


def count_lists_per_day(log: TimedLog, cut_us: int, refresh_policy: RefreshStrategy) -> tuple[float, float | None]:
    """Return (lists of users with changes, lists of all users) a day after the cut; the latter None with period 0."""
    is_after_cut = log.times_us >= cut_us
    day_count = (int(log.times_us.max()) + 1 - cut_us) / _DAY_US
    changed_users, times = log.user_numbers[is_after_cut], log.times_us[is_after_cut]
    periods = (
        times
        if not refresh_policy.period_s
        else (times - cut_us) // (refresh_policy.period_s * MICROSECONDS_PER_SECOND)
    )
    order = np.lexsort((periods, changed_users))
    changed_users, periods = changed_users[order], periods[order]
    is_new = (changed_users[1:] != changed_users[:-1]) | (periods[1:] != periods[:-1])
    changed_per_day = (len(changed_users) and 1 + int(is_new.sum())) / day_count
    if not refresh_policy.period_s:
        return changed_per_day, None
    first_times = np.sort(log.times_us[np.flatnonzero(np.diff(log.user_numbers, prepend=-1))])
    refresh_times = np.arange(cut_us, int(log.times_us.max()) + 1, refresh_policy.period_s * MICROSECONDS_PER_SECOND)
    return changed_per_day, float(first_times.searchsorted(refresh_times).sum()) / day_count


@dataclass(frozen=True, slots=True, eq=False)
class RankedTargets:
    """Rank of each target in its strategy's list, -1 if absent; the number of computed lists, and their seconds."""

    target_ranks: NDArray[np.int64]
    list_count: int
    computing_s: float


@dataclass(frozen=True, slots=True, eq=False)
class ListModel:
    """Bundle that computes lists from histories alone; users without one get the most popular items, as in a night.

    `history_limit` is the number of newest items that the model gets.
    """

    tower: Tower
    scorer: Scorer
    popularity_scorer: Scorer
    history_limit: int

    @classmethod
    def of(cls, bundle: Bundle, popularity: NDArray[np.int64], history_limit: int) -> Self:
        """Open the towers; raise ConfigError for models that need more than a log, or that read no history."""
        user_tower, item_tower = bundle.user_tower, bundle.item_tower
        if features := [*user_tower.spec.features, *item_tower.spec.features]:
            raise ConfigError(
                f"the bundle {bundle.name} takes the feature {features[0].column!r}, which a log of interactions does "
                "not have: omit --configured-bundle to replay with the reference model"
            )
        if user_tower.spec.history is None:
            raise ConfigError(f"the bundle {bundle.name} reads no history, so events change nothing")
        cores = usable_cores()
        open_item_tower = Tower.open(item_tower.path, item_tower.spec, threads=cores)
        (index_input,) = item_tower.spec.inputs
        item_vectors = open_item_tower.run({index_input.name: np.arange(bundle.items.item_count)})
        return cls(
            Tower.open(user_tower.path, user_tower.spec, threads=cores),
            Scorer.of(item_vectors, bundle.metric),
            Scorer.of(popularity.astype(np.float32)[:, None]),
            history_limit,
        )

    def top_items(self, input_histories: Histories, excluded_items: Histories, k: int) -> NDArray[np.int64]:
        """Return int64 [n, k] of model indices, best first, without the items of `excluded_items`."""
        top_items = np.empty((len(input_histories), k), np.int64)
        has_history = np.diff(input_histories.indptr) > 0
        known_rows, rows_without_history = np.flatnonzero(has_history), np.flatnonzero(~has_history)
        history = self.tower.spec.history
        assert history is not None  # noqa: S101 - `of` asked
        if len(known_rows):
            vectors = self.tower.run(
                {history.name: keep_newest_items(input_histories.select_rows(known_rows), self.history_limit)}
            )
            top_items[known_rows] = self.scorer.top(vectors, k, excluded_items.select_rows(known_rows))[0]
        if len(rows_without_history):
            constant_vectors = np.ones((len(rows_without_history), 1), np.float32)
            top_items[rows_without_history] = self.popularity_scorer.top(
                constant_vectors, k, excluded_items.select_rows(rows_without_history)
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
    """Compute each list once for all of its targets; time the towers and the search."""
    ends = targets.end_rows_by_strategy[refresh_policy]
    exclusion_ends = targets.end_rows_by_strategy[EVENTS] if refresh_policy.leaves_out_newer_items else ends
    list_bounds, list_indices = np.unique(
        np.stack([targets.first_rows, ends, exclusion_ends]), axis=1, return_inverse=True
    )
    targets_by_list = np.argsort(list_indices, kind="stable")
    first_targets = np.searchsorted(list_indices[targets_by_list], np.arange(list_bounds.shape[1] + 1))
    ranks, total_s = np.full(len(targets), -1, np.int64), 0.0
    for list_slice in _chunk_lists(list_bounds[2] - list_bounds[0]):
        starts, ends, exclusion_ends = list_bounds[:, list_slice]
        input_histories, excluded = (group_histories(log, starts, ends), group_histories(log, starts, exclusion_ends))
        started_at = time.perf_counter()
        top_items = model.top_items(input_histories, excluded, k)
        total_s += time.perf_counter() - started_at
        target_rows = targets_by_list[first_targets[list_slice.start] : first_targets[list_slice.stop]]
        is_target = top_items[list_indices[target_rows] - list_slice.start] == targets.item_indices[target_rows, None]
        ranks[target_rows] = np.where(is_target.any(axis=1), is_target.argmax(axis=1), -1)
        progress(f"replay {refresh_policy.description}", list_slice.stop, list_bounds.shape[1])
    return RankedTargets(ranks, int((list_bounds[1] > list_bounds[0]).sum()), total_s)


def measure_seconds_alone(model: ListModel, log: TimedLog, targets: Targets, k: int, rng: np.random.Generator) -> float:
    """Return the median seconds of a list computed alone from all events, grouping included; 0 without lists."""
    target_rows = np.flatnonzero(targets.end_rows_by_strategy[EVENTS] > targets.first_rows)
    sampled_rows = (
        rng.choice(target_rows, min(LISTS_TIMED_ALONE_MAX, len(target_rows)), replace=False)
        if len(target_rows)
        else target_rows
    )
    list_times_s = []
    for row in sampled_rows:
        starts, ends = targets.first_rows[[row]], targets.end_rows_by_strategy[EVENTS][[row]]
        started_at = time.perf_counter()
        input_histories = group_histories(log, starts, ends)
        model.top_items(input_histories, input_histories, k)
        list_times_s.append(time.perf_counter() - started_at)
    return median(list_times_s or [0.0])


def group_histories(log: TimedLog, first_rows: NDArray[np.int64], end_rows: NDArray[np.int64]) -> Histories:
    """Return histories of these rows of a log, grouped as in a night: each item once, at its latest position."""
    row_counts = end_rows - first_rows
    list_indices = np.repeat(np.arange(len(row_counts)), row_counts)
    offsets = np.cumsum(row_counts) - row_counts
    item_indices = log.item_indices[np.arange(len(list_indices)) + np.repeat(first_rows - offsets, row_counts)]
    kept_rows = last_occurrence_mask(list_indices, item_indices)
    indptr = np.searchsorted(list_indices[kept_rows], np.arange(len(row_counts) + 1))
    return Histories(indptr.astype(np.int64), item_indices[kept_rows])


def keep_newest_items(input_histories: Histories, items_max: int) -> Histories:
    """Return the last `items_max` items of each history."""
    history_lengths = np.diff(input_histories.indptr)
    places_from_end = np.repeat(input_histories.indptr[1:], history_lengths) - np.arange(len(input_histories.indices))
    kept_lengths = np.minimum(history_lengths, items_max)
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept_lengths)])
    return Histories(indptr, input_histories.indices[places_from_end <= items_max])


def _chunk_lists(row_counts: NDArray[np.int64]) -> Iterator[slice]:
    """Yield chunks of lists with at most CHUNK_ROWS_MAX rows, and at least one list each."""
    cumulative_rows, first_list = np.cumsum(row_counts), 0
    while first_list < len(row_counts):
        preceding_rows = int(cumulative_rows[first_list] - row_counts[first_list])
        end_list = int(cumulative_rows.searchsorted(preceding_rows + CHUNK_ROWS_MAX, "right"))
        end_list = min(max(end_list, first_list + 1), first_list + CHUNK_LISTS_MAX)
        yield slice(first_list, end_list)
        first_list = end_list


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean with its 95 % confidence interval over resampled users."""

    mean_value: float
    interval_low: float
    interval_high: float

    def to_json(self) -> dict[str, float]:
        """Return a JSON-able form, rounded to five decimals."""
        return {
            statistic_name: round(statistic, 5)
            for statistic_name, statistic in (
                ("value", self.mean_value),
                ("low", self.interval_low),
                ("high", self.interval_high),
            )
        }


def bootstrap_means(
    user_by_row: NDArray[np.int64],
    measured_values: NDArray[np.float64],
    group_masks: NDArray[np.bool_],
    rng: np.random.Generator,
    total_rounds: int = BOOTSTRAP_ROUNDS,
) -> list[list[Estimate]]:
    """Return by group and column the mean of `measured_values` [n, columns] over the rows of `group_masks` [groups, n].

    A row belongs to a user, numbered from 0. All rows of a user are drawn together, with the same draws for all
    groups and columns (Efron's bootstrap, by clusters). Each group has at least one row.
    """
    user_count, columns = int(user_by_row.max()) + 1, measured_values.shape[1]
    sums_by_user = np.zeros((user_count, len(group_masks), columns + 1))
    for group_index, group_mask in enumerate(group_masks):
        for column in range(columns):
            sums_by_user[:, group_index, column] = np.bincount(
                user_by_row[group_mask], measured_values[group_mask, column], user_count
            )
        sums_by_user[:, group_index, columns] = np.bincount(user_by_row[group_mask], minlength=user_count)
    flat_sums = sums_by_user.reshape(user_count, -1)
    resampled_sums = np.empty((total_rounds, len(group_masks), columns + 1))
    for first_round in range(0, total_rounds, _BOOTSTRAP_ROUNDS_AT_ONCE):
        round_count = min(_BOOTSTRAP_ROUNDS_AT_ONCE, total_rounds - first_round)
        weights = rng.multinomial(user_count, np.full(user_count, 1 / user_count), round_count).astype(np.float64)
        resampled_sums[first_round : first_round + round_count] = (weights @ flat_sums).reshape(
            round_count, len(group_masks), -1
        )
    total_sums = sums_by_user.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        resampled_means = resampled_sums[..., :columns] / resampled_sums[..., columns:]
    bounds = np.nanquantile(resampled_means, [(1 - INTERVAL_COVERAGE) / 2, (1 + INTERVAL_COVERAGE) / 2], axis=0)
    group_means = total_sums[:, :columns] / total_sums[:, columns:]
    return [
        [
            Estimate(float(group_means[group_index, column]), *map(float, bounds[:, group_index, column]))
            for column in range(columns)
        ]
        for group_index in range(len(group_masks))
    ]


@dataclass(frozen=True, slots=True)
class StrategyCost:
    """Cost of a strategy: lists per day (of users with changes, of all users), and milliseconds per list."""

    strategy: RefreshStrategy
    changed_lists_per_day: float
    all_lists_per_day: float | None
    ms_per_list: float

    @property
    def seconds_per_day(self) -> float:
        """Seconds per day for lists of users with changes."""
        return self.changed_lists_per_day * self.ms_per_list / 1e3


@dataclass(frozen=True, slots=True)
class TargetGroup:
    """Group of targets: recall and NDCG of each strategy's lists, and the difference in recall from nightly lists."""

    group_name: str
    target_count: int
    newer_event_count: int
    recall_by_strategy: Mapping[RefreshStrategy, Estimate]
    ndcg_by_strategy: Mapping[RefreshStrategy, Estimate]
    recall_gain_by_strategy: Mapping[RefreshStrategy, Estimate]


@dataclass(frozen=True, slots=True)
class FreshnessReport:
    """Report of a replay; its first group has all targets."""

    replay_facts: Mapping[str, Any]
    target_groups: tuple[TargetGroup, ...]
    strategy_costs: tuple[StrategyCost, ...]


def replay(config: NightConfig, options: ReplayOptions, progress: Progress = quiet) -> FreshnessReport:
    """Replay the last days of the configured log; the same inputs and seed give the same results, except times."""
    full_log, item_ids = read_log(config, progress)
    cut_us = cut_before_days(full_log, options.days)
    user_rng, bootstrap_rng, timing_rng = np.random.default_rng(options.seed).spawn(3)
    with _replayed_bundle(config, options, full_log, item_ids, cut_us, progress) as bundle:
        log = full_log.renumber_items(bundle.vocabulary.find_positions(to_string_chunks(pa.chunked_array([item_ids]))))
        if not len(log):
            raise SourceError(f"the bundle {bundle.name} has no item of the log")
        targets = Targets.of(log, cut_us, STRATEGIES, options.users, user_rng)
        earlier_items = log.item_indices[log.times_us < cut_us]
        popularity = np.bincount(earlier_items, minlength=bundle.items.item_count)
        model = ListModel.of(bundle, popularity, config.history_limit)
        ranked_by_strategy = {
            refresh_policy: rank_targets(model, log, targets, refresh_policy, options.k, progress)
            for refresh_policy in STRATEGIES
        }
        alone_s = measure_seconds_alone(model, log, targets, options.k, timing_rng)
    costs, ranked_by_events = [], ranked_by_strategy[EVENTS]
    batched_s = ranked_by_events.computing_s / max(1, ranked_by_events.list_count)
    for refresh_policy in (
        policy for policy in STRATEGIES if not policy.leaves_out_newer_items
    ):  # without targets no list is computed
        changed_per_day, all_per_day = count_lists_per_day(log, cut_us, refresh_policy)
        costs.append(
            StrategyCost(
                refresh_policy, changed_per_day, all_per_day, 1e3 * (alone_s if refresh_policy is EVENTS else batched_s)
            )
        )
    is_after_cut = full_log.times_us >= cut_us
    facts = {
        "users": len(np.unique(full_log.user_numbers)),
        "items": len(item_ids),
        "interactions": len(full_log),
        "from": _time_text(full_log.times_us.min()),
        "cut": _time_text(cut_us),
        "until": _time_text(full_log.times_us.max()),
        "replayed": int(is_after_cut.sum()),
        "of_items_unknown_at_the_cut": int(is_after_cut.sum() - (log.times_us >= cut_us).sum()),
        "users_evaluated": int(targets.user_numbers.max()) + 1,
        "model": bundle.name,
        "trained": "as configured" if options.configured_bundle else "on what is before the cut",
        "dims": bundle.dims,
        "days": options.days,
        "k": options.k,
        "seed": options.seed,
    }
    ranks_by_strategy = {
        refresh_policy: ranked_targets.target_ranks for refresh_policy, ranked_targets in ranked_by_strategy.items()
    }
    return FreshnessReport(facts, tuple(_estimate_groups(targets, ranks_by_strategy, bootstrap_rng)), tuple(costs))


@contextmanager
def _replayed_bundle(
    config: NightConfig, options: ReplayOptions, log: TimedLog, item_ids: Any, cut_us: int, progress: Progress
) -> Iterator[Bundle]:
    """Yield the configured bundle, or a reference bundle trained on the rows before the cut."""
    if options.configured_bundle:
        yield Bundle.open(config.path(config.bundle))
        return
    earlier_log = log.only(log.times_us < cut_us)
    earlier_items, item_rows = np.unique(earlier_log.item_indices, return_inverse=True)
    _, user_rows = np.unique(earlier_log.user_numbers, return_inverse=True)
    earlier_item_ids = item_ids.take(pa.array(earlier_items))
    data = ReferenceData(user_rows, item_rows, earlier_item_ids, interaction_times=earlier_log.times_us)
    shape = None if config.reference.choose else SpectralShape()
    with tempfile.TemporaryDirectory(prefix="larder-freshness-") as folder:
        yield train(
            data, Path(folder) / "bundle", dims=config.reference.dims, seed=options.seed,
            shape=shape, progress=progress,
        )  # fmt: skip


def _estimate_groups(
    targets: Targets, ranks_by_strategy: Mapping[RefreshStrategy, NDArray[np.int64]], rng: np.random.Generator
) -> Iterator[TargetGroup]:
    """Yield estimates for all targets, those with newer events, known and new users', and by hours since the night."""
    hours_since_night = targets.since_night_us / (HOUR_S * MICROSECONDS_PER_SECOND)
    mask_by_group = {
        "all": np.ones(len(targets), np.bool_),
        "with newer events": targets.has_newer_events,
        "user known to the night": targets.is_known_user,
        "user new since the night": ~targets.is_known_user,
    }
    for start_hour, end_hour in pairwise(HOUR_BOUNDS):
        mask_by_group[f"{start_hour} to {end_hour} h since the night"] = (hours_since_night >= start_hour) & (
            hours_since_night < end_hour
        )
    mask_by_group = {group_name: group_mask for group_name, group_mask in mask_by_group.items() if group_mask.any()}
    hits = np.stack([policy_ranks >= 0 for policy_ranks in ranks_by_strategy.values()], axis=1).astype(np.float64)
    discounts = 1 / np.log2(np.maximum(np.stack(list(ranks_by_strategy.values()), axis=1), 0) + 2.0)
    measures = np.concatenate([hits, hits * discounts, hits - hits[:, :1]], axis=1)
    group_estimates = bootstrap_means(targets.user_numbers, measures, np.stack(list(mask_by_group.values())), rng)
    for (group_name, group_mask), estimates in zip(mask_by_group.items(), group_estimates, strict=True):
        recall, ndcg, gain = (
            dict(zip(ranks_by_strategy, estimates[first_column : first_column + len(ranks_by_strategy)], strict=True))
            for first_column in range(0, 3 * len(ranks_by_strategy), len(ranks_by_strategy))
        )
        del gain[NIGHT]
        newer_count = int((group_mask & targets.has_newer_events).sum())
        yield TargetGroup(group_name, int(group_mask.sum()), newer_count, recall, ndcg, gain)


def _time_text(time_us: int) -> str:
    return str(np.datetime64(int(time_us), "us").astype("M8[s]"))


def command(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any] | list[Table | str]:
    """Run the command `larder freshness`."""
    for option_name, maximum in (("days", 3650), ("k", K_MAX), ("users", 10_000_000), ("seed", 2**32 - 1)):
        option_value = getattr(arguments, option_name)
        if not (option_name != "seed") <= option_value <= maximum:
            minimum = int(option_name != "seed")
            raise ConfigError(f"--{option_name} must be {minimum} to {maximum}, not {option_value}", field=option_name)
    if arguments.data:
        data = tuple(
            source_path if "://" in source_path else str(Path.cwd() / source_path) for source_path in arguments.data
        )
        config = replace(config, sources=replace(config.sources, interactions=data))
    options = ReplayOptions(arguments.days, arguments.k, arguments.users, arguments.seed, arguments.configured_bundle)
    report = replay(config, options, progress)
    return report_to_json(report) if arguments.json else report_tables(report)


def report_to_json(report: FreshnessReport) -> dict[str, Any]:
    """Return a JSON-able form of a report."""
    return {
        **report.replay_facts,
        "groups": [
            {
                "group": group.group_name,
                "targets": group.target_count,
                "with_newer_events": group.newer_event_count,
                **{
                    measure: {refresh_policy.strategy_name: estimate.to_json() for refresh_policy,
                    estimate in means.items()}
                    for measure, means in (
                        ("recall", group.recall_by_strategy), ("ndcg", group.ndcg_by_strategy), ("gain",
                        group.recall_gain_by_strategy),
                    )
                },
            }
            for group in report.target_groups
        ],
        "costs": [
            {
                "way": cost.strategy.strategy_name,
                "lists_a_day": round(cost.changed_lists_per_day, 1),
                "lists_a_day_of_all": None if cost.all_lists_per_day is None else round(cost.all_lists_per_day, 1),
                "list_ms": round(cost.ms_per_list, 4),
                "seconds_a_day": round(cost.seconds_per_day, 3),
            }
            for cost in report.strategy_costs
        ],
    }  # fmt: skip


def report_tables(report: FreshnessReport) -> list[Table | str]:
    """Render a report: all targets by strategy, groups of targets, costs."""
    facts, all_targets = report.replay_facts, report.target_groups[0]
    k = facts["k"]
    log_text = (
        f"{facts['users']:,} users, {facts['items']:,} items, {facts['interactions']:,} interactions from "
        f"{facts['from']} to {facts['until']} UTC; replayed from {facts['cut']} on: {facts['replayed']:,}, of which "
        f"{facts['of_items_unknown_at_the_cut']:,} with items that were not known yet."
    )
    model_text = (
        f"{escape(facts['model'])}, {facts['dims']} dimensions, trained {facts['trained']}. To be found are "
        f"{all_targets.target_count:,} items that {facts['users_evaluated']:,} users took up, "
        f"{all_targets.newer_event_count:,} of "
        "them after something else since the night."
    )
    strategy_table = _number_table("lists by", f"recall@{k}", "95 %", f"NDCG@{k}", "95 %", "more than nights", "95 %")
    for refresh_policy in STRATEGIES:
        gain = (
            (all_targets.recall_gain_by_strategy[refresh_policy],)
            if refresh_policy in all_targets.recall_gain_by_strategy
            else ()
        )
        means = (all_targets.recall_by_strategy[refresh_policy], all_targets.ndcg_by_strategy[refresh_policy], *gain)
        strategy_table.add_row(
            refresh_policy.description, *(text for estimate in means for text in _estimate_texts(estimate))
        )
    group_table = _number_table(
        "items taken up", "number", "newer events", *(refresh_policy.description for refresh_policy in STRATEGIES),
        "events more than nights", "95 %",
    )  # fmt: skip
    for group in report.target_groups:
        recalls = (f"{group.recall_by_strategy[refresh_policy].mean_value:.4f}" for refresh_policy in STRATEGIES)
        newer_percentage = f"{group.newer_event_count / group.target_count:.0%}"
        group_table.add_row(
            group.group_name,
            f"{group.target_count:,}",
            newer_percentage,
            *recalls,
            *_estimate_texts(group.recall_gain_by_strategy[EVENTS]),
        )
    cost_table = _number_table("lists by", "lists a day, where inputs changed", "of all users", "ms a list", "s a day")
    for cost in report.strategy_costs:
        all_lists_text = "" if cost.all_lists_per_day is None else f"{cost.all_lists_per_day:,.0f}"
        cost_table.add_row(
            cost.strategy.description, f"{cost.changed_lists_per_day:,.0f}", all_lists_text, f"{cost.ms_per_list:.3f}",
            f"{cost.seconds_per_day:,.1f}",
        )  # fmt: skip
    return [log_text, model_text, strategy_table, f"Recall@{k} of parts:", group_table, cost_table]


def _number_table(first_header: str, *number_headers: str) -> Table:
    table = Table(first_header, *number_headers)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _estimate_texts(estimate: Estimate) -> tuple[str, str]:
    return f"{estimate.mean_value:.4f}", f"{estimate.interval_low:.4f} to {estimate.interval_high:.4f}"

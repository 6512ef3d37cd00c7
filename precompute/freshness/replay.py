"""Replay of a log's end: what each way's lists find of what users did next, and what the lists cost."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.errors import SourceError
from precompute.bundles.bundle import Bundle
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig
from precompute.freshness.bootstrap import Estimate, estimates
from precompute.freshness.options import ReplayOptions
from precompute.freshness.ranks import ListModel, alone_s, rank_targets
from precompute.freshness.targets import Targets, cut_before_days, lists_per_day
from precompute.freshness.timed_log import TimedLog, read_log
from precompute.freshness.ways import EVENTS, HOUR_S, NIGHT, STRATEGIES, RefreshStrategy
from precompute.reference.spectral import SpectralShape
from precompute.reference.train import ReferenceData, train
from precompute.sources.moments import MICROSECONDS
from precompute.sources.vocabulary import as_strings

HOURS: Final = (0, 1, 3, 6, 12, 24)
"""Bounds of the bins of hours since the night."""


@dataclass(frozen=True, slots=True)
class StrategyCost:
    """Cost of a way: lists a day of users with changes and of all, and milliseconds of a list, by the clock."""

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
    """Part of the targets: recall and NDCG of each way's lists, and what the recall differs from that of nights."""

    name: str
    targets: int
    with_newer: int
    recall: Mapping[RefreshStrategy, Estimate]
    ndcg: Mapping[RefreshStrategy, Estimate]
    gain: Mapping[RefreshStrategy, Estimate]


@dataclass(frozen=True, slots=True)
class FreshnessReport:
    """Findings of a replay; the first group is of all targets."""

    facts: Mapping[str, Any]
    groups: tuple[TargetGroup, ...]
    costs: tuple[StrategyCost, ...]


def replay(
    config: NightConfig, options: ReplayOptions, progress: Progress = quiet
) -> FreshnessReport:
    """Replays the last days of the configured log; the same inputs and seed find the same, times apart."""
    named, names = read_log(config, progress)
    cut = cut_before_days(named, options.days)
    of_users, of_means, of_times = np.random.default_rng(options.seed).spawn(3)
    with _model(config, options, named, names, cut, progress) as bundle:
        log = named.renamed(bundle.vocabulary.find_positions(as_strings(pa.chunked_array([names]))))
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
        alone = alone_s(model, log, targets, options.k, of_times)
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
def _model(
    config: NightConfig,
    options: ReplayOptions,
    log: TimedLog,
    names: Any,
    cut_us: int,
    progress: Progress,
) -> Iterator[Bundle]:
    """The configured bundle, or a reference bundle of what is before the cut, while the block lasts."""
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
    """All targets, those with newer events, whose user the night knew or not, and those by hours since the night."""
    hours = targets.since_night_us / (HOUR_S * MICROSECONDS)
    masks = {
        "all": np.ones(len(targets), np.bool_),
        "with newer events": targets.has_newer,
        "user known to the night": targets.is_known,
        "user new since the night": ~targets.is_known,
    }
    for start, end in pairwise(HOURS):
        masks[f"{start} to {end} h since the night"] = (hours >= start) & (hours < end)
    masks = {name: rows for name, rows in masks.items() if rows.any()}
    hits = np.stack([policy_ranks >= 0 for policy_ranks in ranks.values()], axis=1).astype(
        np.float64
    )
    discounts = 1 / np.log2(np.maximum(np.stack(list(ranks.values()), axis=1), 0) + 2.0)
    values = np.concatenate([hits, hits * discounts, hits - hits[:, :1]], axis=1)
    group_estimates = estimates(targets.users, values, np.stack(list(masks.values())), rng)
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

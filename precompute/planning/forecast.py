"""Forecast of a night and its service from a sample of the inputs: bytes, minutes, copied users, L1 hit rates."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from math import exp, lgamma
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.l2.sync_clients import connect
from cache.process.host import usable_cores
from cache.process.redis_server import server
from cache.quality.probe import probe_bytes
from cache.tiers.l1 import OVERHEAD_BYTES, READY_BYTES, Entry, LocalKey, LocalTier, size_of
from precompute.adapters.vector_bundle import make_bundle
from precompute.builds.reports import EMBED_ITEMS
from precompute.builds.tables import (
    configured_tables,
    demand_values,
    entity_of,
    facet_layout,
    layout_of,
    metric_of,
    scored_tables,
)
from precompute.bulk.headroom import seconds_at_floor_rate, time_limit_remark
from precompute.bundles.bundle import Bundle
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig, parse_time, peak_generation_count
from precompute.partitions.catalogue import ITEM_FEATURES
from precompute.partitions.shard_files import USER_VECTORS
from precompute.planning.capacity import CapacityLimits, verdicts
from precompute.planning.filter_costs import FilterCost, filter_costs
from precompute.planning.options import PlanParameters
from precompute.planning.sampling import Sample, draw
from precompute.planning.sizes import NightShape, step_bytes
from precompute.planning.trial import (
    DeviceRate,
    TimeSpent,
    Timings,
    Trial,
    feature_columns,
    open_trial,
    page_costs,
    time_load,
    time_scoring,
)
from precompute.reuse.lists import ENTERING_MAX
from precompute.scoring.towers import demand_feature_types
from precompute.sources.times import MICROSECONDS

ITEMS_CHANGED: Final = (0.0, 0.001, 0.01)
"""Shares of changed items for which a plan shows a night, by default."""

USERS_CHANGED: Final = 0.1
"""Share of changed users that is assumed by default for sources without times."""

BUSY = 2.0
"""Ratio of wall time times cores to processor time above which a machine is busy: a quiet one has 1 to 1.5."""

COPIED_BYTES = 17
"""Bytes on disk for each user from whom a later night may copy: a hash, a digest, a reason."""

ANSWER_BYTES, ANSWER_ITEM_BYTES = 250, 14
"""Approximate bytes of an answer in JSON besides its item ids: in all; and a score, quotes and commas for each."""

DAY_S = 86_400.0

MIB = 1 << 20

_DAY_US = 86_400 * MICROSECONDS

EXACT_RANKS = 10_000

BIN_GROWTH = 1.002

_CHURNED_ENTRIES = (24_000, 28_000, 34_000, 40_000)
"""Entries of the small L1: over one octave, since tables double, and large enough for four-byte indexes."""


@dataclass(frozen=True, slots=True)
class CopyingNight:
    """Forecast of a night that copies from the one before; shares of the users by the reason for computing them.

    With a share of the items these are bounds: as if all of it had left the histories and lists it was in, and as many
    new items had come into others.
    """

    items_changed: float
    inputs: float
    lost: float
    entered: float
    scoring: TimeSpent

    @property
    def copied(self) -> float:
        """Least share of the users that is copied."""
        return max(0.0, 1 - self.inputs - self.lost - self.entered)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able form for `--json`."""
        fields = asdict(self)
        wall_s, cpu_s = fields.pop("scoring")
        return {**fields, "copied": self.copied, "scoring_s": wall_s, "scoring_cpu_s": cpu_s}


@dataclass(frozen=True, slots=True, eq=False)
class Popularity:
    """Popularity: `keys[i]` keys are requested with probability `shares[i]` each; all together 1."""

    probabilities: NDArray[np.float64]
    keys: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class HitRates:
    """Hit rates, 0 to 1: in the long run, and over the first `requests` of an empty L1; `entries` of a full one."""

    max_bytes: int
    entries: float
    steady: float
    from_cold: float | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast of one generation's bytes, a night's times, and the hit rates of L1s of several sizes."""

    sample_users: int
    source_users: int
    interactions: int
    shape: NightShape
    redis_bytes: int
    timings: Timings
    load: TimeSpent
    floor_s: float
    """Seconds that loading may take at most while readers are served."""
    gpu_s: float
    gpu_how: str
    hits: Sequence[HitRates]
    filters: Sequence[FilterCost] = ()
    copying: Sequence[CopyingNight] = ()
    copying_note: str = ""
    remarks: Sequence[str] = ()

    @property
    def is_busy(self) -> bool:
        """True if other programs used this machine's cores meanwhile, so that wall times are too long."""
        scoring = self.timings.all
        return scoring.wall_s * usable_cores() > BUSY * scoring.cpu_s

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able form for `--json`: bytes of one generation, seconds of a night."""
        shape, scoring = self.shape, self.timings.all
        return {
            "users": self.source_users,
            "users_with_records": shape.users,
            "items": shape.items,
            "dims": shape.dims,
            "interactions": self.interactions,
            "sample_users": self.sample_users,
            "record_bytes": {
                name: layout.size_bytes for name, (_, layout) in shape.layouts.items()
            },
            "pages": {name: table_pages.count for name, table_pages in shape.pages().items()},
            "payload_bytes": shape.payload_bytes,
            "redis_bytes": self.redis_bytes,
            "directory_bytes": shape.directory_bytes,
            "mapped_bytes": shape.mapped_bytes,
            "disk_bytes": shape.disk_bytes,
            "step_memory_bytes": dict(step_bytes(shape)),
            "scoring_s": scoring.wall_s,
            "scoring_cpu_s": scoring.cpu_s,
            "scoring_gpu_s": self.gpu_s,
            "scoring_gpu_how": self.gpu_how,
            "scoring_note": self.timings.note,
            "busy": self.is_busy,
            "load_s": self.load.wall_s,
            "load_cpu_s": self.load.cpu_s,
            "load_beside_readers_max_s": self.floor_s,
            "l1": [asdict(hit_rates) for hit_rates in self.hits],
            "filters": [filter_cost.to_json() for filter_cost in self.filters],
            "copying": [copying_night.to_json() for copying_night in self.copying],
            "copying_note": self.copying_note,
            "remarks": list(self.remarks),
        }


def forecast(
    config: NightConfig,
    parameters: PlanParameters,
    requests: NDArray[np.int64] | None = None,
    *,
    progress: Progress = quiet,
) -> Forecast:
    """Draw the sample, score it, load pages of that size into a Redis of our own, and add up.

    `requests`: how often a log has each user; None: by `parameters.zipf`. The namespace is neither read nor written.
    """
    data_until = parameters.data_until or config.data_until
    cutoff_at = parse_time(data_until) if data_until else None
    with TemporaryDirectory(prefix="larder-plan-") as temporary_path:
        folder = Path(temporary_path)
        bundle = _bundle(config, folder / "bundle", cutoff_at)
        demand_values(config, bundle)
        demand_feature_types(config, bundle)
        config = resized(config, bundle, parameters.k)
        sample = draw(
            config,
            parameters.sample,
            columns=feature_columns(bundle),
            lists=bundle.columns_of_lists,
            cutoff_at=cutoff_at,
            progress=progress,
        )
        source_users = parameters.users or sample.users
        with server(folder / "redis") as running:
            trial = open_trial(config, sample, folder, running.url)
            shape = _shape(config, trial, parameters, source_users)
            timings = time_scoring(
                trial,
                shape,
                source_users=source_users,
                seconds=parameters.seconds,
                progress=progress,
            )
            shape = replace(shape, users=round(source_users * timings.recorded_share))
            with connect(running.url, config.redis_timeout_s) as client:
                pages = shape.pages().values()
                sizes = {size for table_pages in pages for size in table_pages.sizes}
                costs = page_costs(client, config.keyspace(), sizes)
                redis_bytes = round(sum(table_pages.sum(costs) for table_pages in pages))
                filters = filter_costs(trial, shape, client, costs)
                progress("rehearse the load", 0, 1)
                loading = time_load(trial.build.config, shape, client)
            rate = _gpu_rate(config, trial, shape, parameters)
    popularity = (
        zipf_popularity(source_users, parameters.zipf)
        if requests is None
        else popularity_of(requests, source_users)
    )
    changed_share, note = users_changed(parameters.users_changed, sample, cutoff_at)
    return Forecast(
        len(sample.ids), source_users, sample.interactions, shape, redis_bytes, timings,
        timings.seal.and_(loading),
        seconds_at_floor_rate(config, shape.payload_bytes),
        gpu_seconds(timings, rate.users_per_s, shape), rate.how, _hit_rates_by_size(shape, parameters, popularity),
        filters,
        copying_nights(timings, shape, changed_share, parameters.items_changed, items_per_user(sample)), note,
        [remark] if (remark := time_limit_remark(config, shape.payload_bytes)) else [],
    )  # fmt: skip


def judged(config: NightConfig, night_forecast: Forecast, limits: CapacityLimits) -> list[Any]:
    """Return the verdicts on a forecast within these limits."""
    return verdicts(
        limits, config.gates, generations=peak_generation_count(config.keep), redis_bytes=night_forecast.redis_bytes,
        mapped_bytes=night_forecast.shape.mapped_bytes, disk_bytes=night_forecast.shape.disk_bytes,
    )  # fmt: skip


def resized(config: NightConfig, bundle: Bundle, k: int | None) -> NightConfig:
    """Return settings with users' lists of another length, for the tables that this bundle can fill."""
    if k is None:
        return config
    tables = {
        name: replace(table, k=k) if table.kind == "user_topk" else table
        for name, table in configured_tables(config, bundle).items()
    }
    return replace(config, tables=tables)


def _bundle(config: NightConfig, folder: Path, cutoff_at: datetime | None) -> Bundle:
    if config.sources.item_vectors:
        return make_bundle(config, folder, interactions_before=cutoff_at)
    return Bundle.open(config.path(config.bundle))


def _shape(config: NightConfig, trial: Trial, parameters: PlanParameters, users: int) -> NightShape:
    bundle, begin_report, root = trial.bundle, trial.begin_report, trial.build.root
    items, dims = begin_report["items"], parameters.dims or bundle.dims
    tables = scored_tables(config, bundle)
    sized = replace(bundle, dims=dims)
    per_user = min(config.history_limit, begin_report["interactions"] / len(trial.sample.ids))
    partition = sum(path.stat().st_size for path in (root / "work/partition").iterdir())
    facets = begin_report.get("facets") or trial.build.need(EMBED_ITEMS).get("facets") or {}
    list_tables = [
        table for table in tables.values() if table.kind in ("user_topk", "item_similar")
    ]
    return NightShape(
        users=users,
        items=parameters.items or items,
        dims=dims,
        shards=config.shards,
        page_bytes=config.page_bytes,
        layouts={
            name: (entity_of(bundle, name, table), layout_of(sized, table))
            for name, table in tables.items()
        },
        item_id_bytes=(root / "items/ids.bin").stat().st_size / items,
        model_bytes={
            model.name: sum(path.stat().st_size for path, _, _ in model.files)
            for model in bundle.models
        },
        model_items=items,
        model_dims=bundle.dims,
        facets={
            name: (facet["table"]["count"], facet_layout(config.facets[name].k))
            for name, facet in facets.items()
        },
        metrics=len({metric_of(bundle, table) for table in list_tables}),
        index=config.index,
        defaults_bytes=(root / "defaults.json").stat().st_size,
        has_seen=bool(config.sources.item_attributes),
        has_inputs=config.events.enabled,
        interactions=round(users * begin_report["interactions"] / len(trial.sample.ids)),
        feature_bytes=_bytes_of(
            path
            for kind in ("features", USER_VECTORS)
            for path in root.glob(f"work/partition/*.{kind}")
        )
        / len(trial.sample.ids),
        item_feature_bytes=_bytes_of(root.glob(ITEM_FEATURES)) / items,
        work_bytes=round(partition * users / len(trial.sample.ids))
        + probe_bytes(users, per_user)
        + COPIED_BYTES * users,
    )


def _bytes_of(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def gpu_seconds(timings: Timings, users_per_s: float, shape: NightShape) -> float:
    """Return the seconds of embedding plus those of lists at this rate, or of the slowest other stage if longer."""
    lists = {layout.kind for _, layout in shape.layouts.values()}
    entities = shape.users + (shape.items if "topk" in lists else 0)
    slowest_stage_s = max(value for name, value in timings.stages.items() if name != "topk")
    return timings.embed.wall_s + max(entities / users_per_s, slowest_stage_s)


def _gpu_rate(
    config: NightConfig, trial: Trial, shape: NightShape, parameters: PlanParameters
) -> DeviceRate:
    if parameters.gpu_users_per_s is not None:
        return DeviceRate(
            parameters.gpu_users_per_s, f"the stated {parameters.gpu_users_per_s:,.0f} users/s"
        )
    widths = [layout.width for _, layout in shape.layouts.values() if layout.kind == "topk"]
    return trial.on_devices(config.device, shape, max(widths, default=1))


def _hit_rates_by_size(
    shape: NightShape, parameters: PlanParameters, popularity: Popularity
) -> list[HitRates]:
    lists = [
        layout
        for entity, layout in shape.layouts.values()
        if entity == "user" and layout.kind == "topk"
    ]
    layout = (lists or [layout for _, layout in shape.layouts.values()])[0]
    answer = parameters.answer_bytes
    if answer is None:
        item_id_bytes = shape.item_id_bytes if layout.kind == "topk" else 0.0
        answer = round(ANSWER_BYTES + layout.width * (item_id_bytes + ANSWER_ITEM_BYTES))
    return [
        l1_hit_rates(
            popularity, mib * MIB, record_bytes=layout.size_bytes,
            answer_bytes=answer,
            requests=None if parameters.qps is None else parameters.qps / parameters.processes * DAY_S,
        )
        for mib in parameters.l1_mib
    ]  # fmt: skip


def users_changed(
    stated: float | None, sample: Sample, cutoff_at: datetime | None
) -> tuple[float, str]:
    """Return (share of the users that a night finds changed, its origin in words)."""
    if stated is not None:
        return stated, f"{stated:.1%} of the users changed, as stated"
    active_share = active_lately(sample, cutoff_at)
    if active_share is None:
        return (
            USERS_CHANGED,
            f"{USERS_CHANGED:.1%} of the users changed: assumed, nothing has a time",
        )
    return (
        active_share,
        f"{active_share:.1%} of the users did something in the last day before the cut",
    )


def active_lately(sample: Sample, cutoff_at: datetime | None) -> float | None:
    """Return the share of the sample's users with an interaction in the last day before the cut; None without times.

    Without a cut the day ends with the newest interaction.
    """
    if not (sample.times > 0).any():
        return None
    data_end_us = int(sample.times.max()) + 1
    end = data_end_us if cutoff_at is None else int(cutoff_at.timestamp() * MICROSECONDS)
    lately = sample.owners[sample.times >= end - _DAY_US]
    return len(np.unique(lately)) / len(sample.ids)


def touched_share(items: int, changed_share: float, width: int) -> float:
    """Return the share of the lists of `width` items that hold an item of any `changed_share` of all `items`.

    1 - C(items - changed, width) / C(items, width): 1 - (1 - changed) ** width for lists much shorter than the
    catalogue.
    """
    changed_count, width = changed_share * items, min(width, items)
    if changed_count + width > items:
        return 1.0 if changed_count and width else 0.0
    log_unchanged_ways = lgamma(items - changed_count + 1) - lgamma(
        items - changed_count - width + 1
    )
    return 1 - exp(log_unchanged_ways + lgamma(items - width + 1) - lgamma(items + 1))


def copying_night(
    timings: Timings,
    shape: NightShape,
    users_changed: float,
    items_changed: float,
    histories: NDArray[np.int64],
) -> CopyingNight:
    """Forecast the night after one that it copies from, in which these shares of the users and of the items changed.

    `histories` int64 are the numbers of different items of some users: with a removed item, inputs differ.
    """
    lost_share, entered = _lost_and_entered(shape, "user", items_changed)
    touched_history_share = _mean_touched(shape.items, items_changed, histories)
    stay = (1 - users_changed) * (1 - touched_history_share)
    inputs, lost_share, entered = 1 - stay, stay * lost_share, stay * entered
    computed = inputs + lost_share + entered
    # Who an item may enter is told by the vectors of all users.
    remaining_share_by_stage = {
        "tower": 1.0 if items_changed else inputs,
        "topk": min(1.0, computed + items_changed * (1 - computed)),
    }
    busy = timings.stages
    of_users = sum(remaining_share_by_stage.get(name, 1.0) * busy[name] for name in busy) / max(
        sum(busy.values()), 1e-9
    )
    of_items = min(1.0, items_changed + sum(_lost_and_entered(shape, "item", items_changed)))
    scoring = timings.prepare.and_(timings.shards).and_(timings.embed.times(items_changed))
    scoring = scoring.and_(timings.users.times(of_users)).and_(timings.items.times(of_items))
    return CopyingNight(items_changed, inputs, lost_share, entered, scoring)


def copying_nights(
    timings: Timings,
    shape: NightShape,
    users_changed: float,
    items_changed: float | None,
    histories: NDArray[np.int64],
) -> Sequence[CopyingNight]:
    """Forecast the night for the stated share of items, else one for each of ITEMS_CHANGED."""
    changed_shares = ITEMS_CHANGED if items_changed is None else (items_changed,)
    return [
        copying_night(timings, shape, users_changed, changed_share, histories)
        for changed_share in changed_shares
    ]


def items_per_user(sample: Sample) -> NDArray[np.int64]:
    """Return the number of different items of each user of the sample; int64 [users]."""
    if not len(sample.owners):
        return np.zeros(len(sample.ids), np.int64)
    items = np.asarray(pc.dictionary_encode(sample.items).indices, np.int64)
    pairs = np.unique(sample.owners * (int(items.max()) + 1) + items)
    return np.bincount(pairs // (int(items.max()) + 1), minlength=len(sample.ids))


def _mean_touched(items: int, changed_share: float, widths: NDArray[np.int64]) -> float:
    distinct_widths, counts = np.unique(widths, return_counts=True)
    touched_shares = [
        touched_share(items, changed_share, width) for width in distinct_widths.tolist()
    ]
    return float(np.dot(touched_shares, counts)) / max(1, len(widths))


def _lost_and_entered(shape: NightShape, entity: str, changed_share: float) -> tuple[float, float]:
    """Return (lists that lose an item, other lists that one may enter) as shares of the lists of users, or of items."""
    width = sum(
        layout.width
        for of, layout in shape.layouts.values()
        if of == entity and layout.kind == "topk"
    )
    lost_share = touched_share(shape.items, changed_share, width)
    # A new item is as likely in a list as any, so as many lists are entered as are left.
    entered = 1.0 if changed_share > ENTERING_MAX and width else lost_share
    return lost_share, (1 - lost_share) * entered


def zipf_popularity(users: int, exponent: float) -> Popularity:
    """Return the popularity by Zipf's law, rank r in proportion to r ** -exponent; far ranks share bins of 0.2 %."""
    exact = min(users, EXACT_RANKS)
    edges = [exact]
    while edges[-1] < users:
        edges.append(min(users, max(edges[-1] + 1, int(edges[-1] * BIN_GROWTH))))
    # The midpoint rule: the sum over ranks a+1..b is the integral from a+1/2 to b+1/2.
    low, high = np.array(edges[:-1], np.float64) + 0.5, np.array(edges[1:], np.float64) + 0.5
    power = 1 - exponent
    sums = np.log(high / low) if power == 0 else (high**power - low**power) / power
    keys = np.concatenate([np.ones(exact), high - low])
    mass = np.concatenate([np.arange(1, exact + 1, dtype=np.float64) ** -exponent, sums])
    return Popularity(mass / mass.sum() / keys, keys)


def popularity_of(counts: NDArray[np.int64], users: int) -> Popularity:
    """Estimate popularity from how often a log has each seen user, of `users` in all.

    Those never seen have together about the share of the log that users seen once have (Good, Biometrika 1953); each
    user seen gives up the same part of a request for it.
    """
    times, keys = np.unique(counts, return_counts=True)
    requests, seen_count = int(counts.sum()), len(counts)
    seen_once_count, unseen = int(keys[0]) if times[0] == 1 else 0, max(0, users - seen_count)
    if not seen_once_count or not unseen:
        return Popularity(times / requests, keys.astype(np.float64))
    discount = min(seen_once_count / seen_count, 0.9)
    request_shares = np.concatenate([times - discount, [discount * seen_count / unseen]]) / requests
    return Popularity(request_shares, np.concatenate([keys, [unseen]]).astype(np.float64))


def l1_hit_rates(
    popularity: Popularity,
    max_bytes: int,
    *,
    record_bytes: int,
    answer_bytes: int = 0,
    requests: float | None = None,
) -> HitRates:
    """Return the hit rates of an L1 of `max_bytes` for one table of records.

    `answer_bytes`: bytes of the ready answer of a single lookup, which is kept besides its record from the second
    request on (0: none is, as for batches).

    A least-recently-used cache behaves as if each entry stayed for one characteristic time T after its last use, T
    being such that the expected contents fill the cache (Che, Tung, Wang: Hierarchical Web Caching Systems, IEEE JSAC
    2002; why it is so exact: Fricker, Robert, Roberts, ITC 2012). Times are counted in requests, which are independent
    of each other.
    """
    table = l1_table_bytes()
    record = record_bytes + OVERHEAD_BYTES + table
    answer = answer_bytes + READY_BYTES + table if answer_bytes else 0.0

    def contents(time: float) -> tuple[float, float]:
        """Return the expected (entries, bytes)."""
        x = popularity.probabilities * time
        absent_probability = np.exp(-x)
        if not answer:
            entries = float(popularity.keys @ (1 - absent_probability))
            return entries, record * entries
        # The record is used when it comes and when the answer is made of it; then only the answer is.
        records = float(popularity.keys @ ((1 + x) * absent_probability * (1 - absent_probability)))
        answers = float(popularity.keys @ (1 - absent_probability) ** 2)
        return records + answers, record * records + answer * answers

    time = _characteristic_time(lambda time: contents(time)[1], max_bytes)
    everything = float(popularity.keys.sum()) * (2 if answer else 1)
    entries = everything if math.isinf(time) else contents(time)[0]
    return HitRates(
        max_bytes,
        entries,
        _steady_rate(popularity, time),
        _rate_from_cold(popularity, time, requests),
    )


def _characteristic_time(bytes_at: Callable[[float], float], max_bytes: int) -> float:
    low, high = 0.0, 60.0  # log2 of requests
    if bytes_at(2**high) <= max_bytes:
        return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if bytes_at(2**middle) <= max_bytes else (low, middle)
    return float(2**low)


def _steady_rate(popularity: Popularity, time: float) -> float:
    if math.isinf(time):
        return 1.0
    mass = popularity.probabilities * popularity.keys
    return float(mass @ -np.expm1(-popularity.probabilities * time))


def _rate_from_cold(popularity: Popularity, time: float, requests: float | None) -> float | None:
    """Return the mean rate over the first requests: until T the cache fills up, then it is full."""
    if requests is None or requests < 1:
        return None
    filling = min(time, requests)
    first = filling - float(popularity.keys @ -np.expm1(-popularity.probabilities * filling))
    return (first + (requests - filling) * _steady_rate(popularity, filling)) / requests


@functools.cache
def l1_table_bytes() -> float:
    """Measure the bytes of an L1's table per entry under churn, which `size_of` does not count, on small L1s."""
    return fmean(_measured_table_bytes(entries) for entries in _CHURNED_ENTRIES)


def _measured_table_bytes(entries: int) -> float:
    entry = Entry(b"", 0)
    tier = LocalTier(entries * (size_of(entry) + 150))
    for key in range(4 * entries):
        tier.put(LocalKey("", "", key), entry)
    return tier.size_bytes / len(tier) - size_of(entry)

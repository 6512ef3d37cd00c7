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
from cache.process.redis_server import join_or_start_server
from cache.quality.probe import estimate_probe_bytes
from cache.tiers.l1 import ENTRY_OVERHEAD_BYTES, READY_OVERHEAD_BYTES, Entry, LocalKey, LocalTier, entry_size_bytes
from precompute.adapters.vector_bundle import make_vector_bundle
from precompute.builds.reports import EMBED_ITEMS_REPORT
from precompute.builds.tables import (
    configured_tables,
    demand_table_values,
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
from precompute.partitions.catalogue import ITEM_FEATURES_FILE
from precompute.partitions.shard_files import USER_VECTORS_KIND
from precompute.planning.capacity import CapacityLimits, judge_capacity
from precompute.planning.filter_costs import FilterCost, measure_filter_costs
from precompute.planning.options import PlanParameters
from precompute.planning.sampling import Sample, draw_sample
from precompute.planning.sizes import NightShape, step_bytes
from precompute.planning.trial import (
    DeviceRate,
    TimeSpent,
    Timings,
    Trial,
    feature_columns,
    measure_page_costs,
    open_trial,
    time_load,
    time_scoring,
)
from precompute.reuse.lists import ENTERING_SHARE_MAX
from precompute.scoring.towers import demand_feature_types
from precompute.sources.times import MICROSECONDS_PER_SECOND

ITEMS_CHANGED_SHARES: Final = (0.0, 0.001, 0.01)
"""Shares of changed items for which a plan forecasts a night by default."""

USERS_CHANGED_SHARE: Final = 0.1
"""Share of changed users that a plan assumes for sources without times."""

BUSY_RATIO = 2.0
"""Ratio of (wall time x cores) to processor time above which a machine counts as busy; an idle one has 1 to 1.5."""

COPY_BYTES_PER_USER = 17
"""Bytes on disk of each user's hash, digest and reason, which let a later night copy the user."""

ANSWER_BYTES, ANSWER_ITEM_BYTES = 250, 14
"""Approximate bytes of a JSON answer without item ids: of the whole, and of each item's score, quotes and commas."""

DAY_S = 86_400.0

MIB = 1 << 20

_DAY_US = 86_400 * MICROSECONDS_PER_SECOND

EXACT_RANKS_MAX = 10_000

BIN_GROWTH = 1.002

_CHURNED_ENTRIES = (24_000, 28_000, 34_000, 40_000)
"""Entries of the small L1s that are measured: within one octave, as tables double; enough for four-byte indexes."""


@dataclass(frozen=True, slots=True)
class CopyingNight:
    """Forecast of a night that copies from the previous one; shares of users by the reason for computing them.

    `lost` and `entered` are upper bounds: every changed item counts as gone from all histories and lists that had it,
    and as many new items as entering other lists.
    """

    items_changed: float
    inputs: float
    lost: float
    entered: float
    scoring: TimeSpent

    @property
    def copied(self) -> float:
        """Lower bound on the share of the users that is copied."""
        return max(0.0, 1 - self.inputs - self.lost - self.entered)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able form for `--json`."""
        fields = asdict(self)
        wall_s, cpu_s = fields.pop("scoring")
        return {**fields, "copied": self.copied, "scoring_s": wall_s, "scoring_cpu_s": cpu_s}


@dataclass(frozen=True, slots=True, eq=False)
class Popularity:
    """Popularity: `key_counts[i]` keys have request probability `request_probabilities[i]` each; the total is 1."""

    request_probabilities: NDArray[np.float64]
    key_counts: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class HitRates:
    """Hit rates, 0 to 1: `steady` in the long run, `from_cold` over the first day of an L1; `entries` when full."""

    max_bytes: int
    entries: float
    steady: float
    from_cold: float | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast of one generation's bytes, a night's times, and the hit rates of L1s of several sizes."""

    sample_user_count: int
    source_user_count: int
    interaction_count: int
    shape: NightShape
    redis_bytes: int
    timings: Timings
    load_time: TimeSpent
    load_s_max: float
    """Upper bound on the seconds of loading while readers are served."""
    gpu_s: float
    gpu_rate_source: str
    hit_rates: Sequence[HitRates]
    filters: Sequence[FilterCost] = ()
    copying_nights: Sequence[CopyingNight] = ()
    copying_note: str = ""
    remarks: Sequence[str] = ()

    @property
    def is_busy(self) -> bool:
        """True if other programs used this machine's cores during the measurement, so that wall times are too long."""
        scoring = self.timings.total
        return scoring.wall_s * usable_cores() > BUSY_RATIO * scoring.cpu_s

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able form for `--json`: bytes of one generation, seconds of a night."""
        shape, scoring = self.shape, self.timings.total
        return {
            "users": self.source_user_count,
            "users_with_records": shape.user_count,
            "items": shape.item_count,
            "dims": shape.dims,
            "interactions": self.interaction_count,
            "sample_users": self.sample_user_count,
            "record_bytes": {
                table_name: layout.size_bytes for table_name, (_, layout) in shape.layout_by_table.items()
            },
            "pages": {table_name: table_pages.page_count for table_name, table_pages in shape.pages().items()},
            "payload_bytes": shape.payload_bytes,
            "redis_bytes": self.redis_bytes,
            "directory_bytes": shape.directory_bytes,
            "mapped_bytes": shape.mapped_bytes,
            "disk_bytes": shape.disk_bytes,
            "step_memory_bytes": dict(step_bytes(shape)),
            "scoring_s": scoring.wall_s,
            "scoring_cpu_s": scoring.cpu_s,
            "scoring_gpu_s": self.gpu_s,
            "scoring_gpu_how": self.gpu_rate_source,
            "scoring_note": self.timings.extrapolation_note,
            "busy": self.is_busy,
            "load_s": self.load_time.wall_s,
            "load_cpu_s": self.load_time.cpu_s,
            "load_beside_readers_max_s": self.load_s_max,
            "l1": [asdict(hit_rates) for hit_rates in self.hit_rates],
            "filters": [filter_cost.to_json() for filter_cost in self.filters],
            "copying": [copying_night.to_json() for copying_night in self.copying_nights],
            "copying_note": self.copying_note,
            "remarks": list(self.remarks),
        }


def forecast(
    config: NightConfig,
    parameters: PlanParameters,
    request_counts: NDArray[np.int64] | None = None,
    *,
    progress: Progress = quiet,
) -> Forecast:
    """Draw a sample, score it, load pages of its sizes into a temporary Redis, and extrapolate.

    `request_counts`: requests of each user in a log; None: popularity by `parameters.zipf`. The namespace in the
    configured Redis is neither read nor written.
    """
    data_until = parameters.data_until or config.data_until
    cutoff_at = parse_time(data_until) if data_until else None
    with TemporaryDirectory(prefix="larder-plan-") as temporary_path:
        folder = Path(temporary_path)
        bundle = _open_bundle(config, folder / "bundle", cutoff_at)
        demand_table_values(config, bundle)
        demand_feature_types(config, bundle)
        config = resize_lists(config, bundle, parameters.k)
        sample = draw_sample(
            config,
            parameters.sample,
            feature_columns=feature_columns(bundle),
            list_columns=bundle.columns_of_lists,
            cutoff_at=cutoff_at,
            progress=progress,
        )
        source_user_count = parameters.users or sample.source_user_count
        with join_or_start_server(folder / "redis") as redis_server:
            trial = open_trial(config, sample, folder, redis_server.url)
            shape = _shape_night(config, trial, parameters, source_user_count)
            timings = time_scoring(
                trial, shape, source_user_count=source_user_count, longest_run_s=parameters.seconds, progress=progress
            )
            shape = replace(shape, user_count=round(source_user_count * timings.recorded_share))
            with connect(redis_server.url, config.redis_timeout_s) as client:
                pages = shape.pages().values()
                page_sizes = {size for table_pages in pages for size in table_pages.page_sizes}
                cost_by_page_bytes = measure_page_costs(client, config.keyspace(), page_sizes)
                redis_bytes = round(sum(table_pages.sum_costs(cost_by_page_bytes) for table_pages in pages))
                filters = measure_filter_costs(trial, shape, client, cost_by_page_bytes)
                progress("rehearse the load", 0, 1)
                load_time = time_load(trial.build.config, shape, client)
            device_rate = _gpu_rate(config, trial, shape, parameters)
    popularity = (
        zipf_popularity(source_user_count, parameters.zipf)
        if request_counts is None
        else estimate_popularity(request_counts, source_user_count)
    )
    changed_share, changed_share_note = find_changed_share(parameters.users_changed, sample, cutoff_at)
    return Forecast(
        len(sample.user_ids), source_user_count, sample.source_interaction_count, shape, redis_bytes, timings,
        timings.seal.and_(load_time),
        seconds_at_floor_rate(config, shape.payload_bytes),
        gpu_seconds(timings, device_rate.users_per_s, shape), device_rate.rate_origin,
        _hit_rates_by_size(shape, parameters, popularity),
        filters,
        copying_nights(timings, shape, changed_share, parameters.items_changed, items_per_user(sample)),
        changed_share_note,
        [remark] if (remark := time_limit_remark(config, shape.payload_bytes)) else [],
    )  # fmt: skip


def judge_forecast(config: NightConfig, night_forecast: Forecast, limits: CapacityLimits) -> list[Any]:
    """Return the verdicts on a forecast within these limits."""
    return judge_capacity(
        limits, config.gates, generation_count=peak_generation_count(config.keep),
        redis_bytes=night_forecast.redis_bytes,
        mapped_bytes=night_forecast.shape.mapped_bytes, disk_bytes=night_forecast.shape.disk_bytes,
    )  # fmt: skip


def resize_lists(config: NightConfig, bundle: Bundle, list_length: int | None) -> NightConfig:
    """Return settings with users' lists of this length, in the tables that the bundle can fill."""
    if list_length is None:
        return config
    tables = {
        table_name: replace(table, k=list_length) if table.kind == "user_topk" else table
        for table_name, table in configured_tables(config, bundle).items()
    }
    return replace(config, tables=tables)


def _open_bundle(config: NightConfig, folder: Path, cutoff_at: datetime | None) -> Bundle:
    if config.sources.item_vectors:
        return make_vector_bundle(config, folder, interactions_before=cutoff_at)
    return Bundle.open(config.path(config.bundle))


def _shape_night(config: NightConfig, trial: Trial, parameters: PlanParameters, user_count: int) -> NightShape:
    bundle, begin_report, root = trial.bundle, trial.begin_report, trial.build.root
    item_count, dims = begin_report["items"], parameters.dims or bundle.dims
    tables = scored_tables(config, bundle)
    resized_bundle = replace(bundle, dims=dims)
    items_per_user = min(config.history_limit, begin_report["interactions"] / len(trial.sample.user_ids))
    partition_bytes = sum(path.stat().st_size for path in (root / "work/partition").iterdir())
    facets = begin_report.get("facets") or trial.build.need_report(EMBED_ITEMS_REPORT).get("facets") or {}
    list_tables = [table for table in tables.values() if table.kind in ("user_topk", "item_similar")]
    return NightShape(
        user_count=user_count,
        item_count=parameters.items or item_count,
        dims=dims,
        shard_count=config.shards,
        page_bytes=config.page_bytes,
        layout_by_table={
            table_name: (entity_of(bundle, table_name, table), layout_of(resized_bundle, table))
            for table_name, table in tables.items()
        },
        bytes_per_item_id=(root / "items/ids.bin").stat().st_size / item_count,
        bytes_by_model={model.name: sum(path.stat().st_size for path, _, _ in model.files) for model in bundle.models},
        model_item_count=item_count,
        model_dims=bundle.dims,
        facets={
            table_name: (facet["table"]["count"], facet_layout(config.facets[table_name].k))
            for table_name, facet in facets.items()
        },
        metric_count=len({metric_of(bundle, table) for table in list_tables}),
        index_kind=config.index,
        defaults_bytes=(root / "defaults.json").stat().st_size,
        publishes_seen_items=bool(config.sources.item_attributes),
        publishes_inputs=config.events.enabled,
        interaction_count=round(user_count * begin_report["interactions"] / len(trial.sample.user_ids)),
        feature_bytes_per_user=_sum_file_bytes(
            path for file_kind in ("features", USER_VECTORS_KIND) for path in root.glob(f"work/partition/*.{file_kind}")
        )
        / len(trial.sample.user_ids),
        feature_bytes_per_item=_sum_file_bytes(root.glob(ITEM_FEATURES_FILE)) / item_count,
        work_bytes=round(partition_bytes * user_count / len(trial.sample.user_ids))
        + estimate_probe_bytes(user_count, items_per_user)
        + COPY_BYTES_PER_USER * user_count,
    )


def _sum_file_bytes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def gpu_seconds(timings: Timings, users_per_s: float, shape: NightShape) -> float:
    """Return the seconds of embedding, plus those of lists at this rate or of the slowest other stage if longer."""
    table_kinds = {layout.kind for _, layout in shape.layout_by_table.values()}
    entity_count = shape.user_count + (shape.item_count if "topk" in table_kinds else 0)
    slowest_stage_s = max(stage_s for stage, stage_s in timings.seconds_by_stage.items() if stage != "topk")
    return timings.embed.wall_s + max(entity_count / users_per_s, slowest_stage_s)


def _gpu_rate(config: NightConfig, trial: Trial, shape: NightShape, parameters: PlanParameters) -> DeviceRate:
    if parameters.gpu_users_per_s is not None:
        return DeviceRate(parameters.gpu_users_per_s, f"the stated {parameters.gpu_users_per_s:,.0f} users/s")
    widths = [layout.width for _, layout in shape.layout_by_table.values() if layout.kind == "topk"]
    return trial.measure_device_rate(config.device, shape, max(widths, default=1))


def _hit_rates_by_size(shape: NightShape, parameters: PlanParameters, popularity: Popularity) -> list[HitRates]:
    list_layouts = [
        layout for entity, layout in shape.layout_by_table.values() if entity == "user" and layout.kind == "topk"
    ]
    layout = (list_layouts or [layout for _, layout in shape.layout_by_table.values()])[0]
    answer_bytes = parameters.answer_bytes
    if answer_bytes is None:
        item_id_bytes = shape.bytes_per_item_id if layout.kind == "topk" else 0.0
        answer_bytes = round(ANSWER_BYTES + layout.width * (item_id_bytes + ANSWER_ITEM_BYTES))
    return [
        l1_hit_rates(
            popularity, mib * MIB, record_bytes=layout.size_bytes,
            answer_bytes=answer_bytes,
            daily_requests_per_process=(
                None if parameters.qps is None else parameters.qps / parameters.processes * DAY_S
            ),
        )
        for mib in parameters.l1_mib
    ]  # fmt: skip


def find_changed_share(stated_share: float | None, sample: Sample, cutoff_at: datetime | None) -> tuple[float, str]:
    """Return (share of users whose inputs changed since the night before, the origin of that figure in words)."""
    if stated_share is not None:
        return stated_share, f"{stated_share:.1%} of the users changed, as stated"
    active_share = find_active_share(sample, cutoff_at)
    if active_share is None:
        return (USERS_CHANGED_SHARE, f"{USERS_CHANGED_SHARE:.1%} of the users changed: assumed, without times")
    return (active_share, f"{active_share:.1%} of the users have an interaction in the last day before the cut")


def find_active_share(sample: Sample, cutoff_at: datetime | None) -> float | None:
    """Return the share of sampled users with an interaction in the last day before the cut; None without times.

    Without a cut, the day ends at the newest interaction.
    """
    if not (sample.interaction_times > 0).any():
        return None
    data_end_us = int(sample.interaction_times.max()) + 1
    end_us = data_end_us if cutoff_at is None else int(cutoff_at.timestamp() * MICROSECONDS_PER_SECOND)
    active_owners = sample.owner_indices[sample.interaction_times >= end_us - _DAY_US]
    return len(np.unique(active_owners)) / len(sample.user_ids)


def touched_share(item_count: int, changed_share: float, list_length: int) -> float:
    """Return the share of lists of `list_length` items that hold at least one changed item.

    `changed_share` of all `item_count` items are changed. The share is 1 - C(items - changed, width) / C(items, width);
    for lists much shorter than the catalogue that is about 1 - (1 - changed) ** width.
    """
    changed_count, list_length = changed_share * item_count, min(list_length, item_count)
    if changed_count + list_length > item_count:
        return 1.0 if changed_count and list_length else 0.0
    log_unchanged_ways = lgamma(item_count - changed_count + 1) - lgamma(item_count - changed_count - list_length + 1)
    return 1 - exp(log_unchanged_ways + lgamma(item_count - list_length + 1) - lgamma(item_count + 1))


def copying_night(
    timings: Timings,
    shape: NightShape,
    changed_user_share: float,
    changed_item_share: float,
    history_lengths: NDArray[np.int64],
) -> CopyingNight:
    """Forecast a night that copies from the previous one, after these shares of users and items changed.

    `history_lengths` int64 are the numbers of distinct items of some users: a removed item changes its users' inputs.
    """
    lost_share, entered_share = _lost_and_entered_shares(shape, "user", changed_item_share)
    touched_history_share = _mean_touched_share(shape.item_count, changed_item_share, history_lengths)
    staying_share = (1 - changed_user_share) * (1 - touched_history_share)
    changed_input_share, lost_share, entered_share = (
        1 - staying_share,
        staying_share * lost_share,
        staying_share * entered_share,
    )
    computed_share = changed_input_share + lost_share + entered_share
    # Any changed item may enter any list: the check needs the vectors of all users.
    remaining_share_by_stage = {
        "tower": 1.0 if changed_item_share else changed_input_share,
        "topk": min(1.0, computed_share + changed_item_share * (1 - computed_share)),
    }
    seconds_by_stage = timings.seconds_by_stage
    user_time_share = sum(
        remaining_share_by_stage.get(stage, 1.0) * seconds_by_stage[stage] for stage in seconds_by_stage
    ) / max(sum(seconds_by_stage.values()), 1e-9)
    item_time_share = min(1.0, changed_item_share + sum(_lost_and_entered_shares(shape, "item", changed_item_share)))
    scoring = timings.prepare.and_(timings.shards).and_(timings.embed.times(changed_item_share))
    scoring = scoring.and_(timings.users.times(user_time_share)).and_(timings.items.times(item_time_share))
    return CopyingNight(changed_item_share, changed_input_share, lost_share, entered_share, scoring)


def copying_nights(
    timings: Timings,
    shape: NightShape,
    changed_user_share: float,
    changed_item_share: float | None,
    history_lengths: NDArray[np.int64],
) -> Sequence[CopyingNight]:
    """Forecast the night for the stated share of changed items, else one night per share in ITEMS_CHANGED_SHARES."""
    changed_shares = ITEMS_CHANGED_SHARES if changed_item_share is None else (changed_item_share,)
    return [
        copying_night(timings, shape, changed_user_share, changed_share, history_lengths)
        for changed_share in changed_shares
    ]


def items_per_user(sample: Sample) -> NDArray[np.int64]:
    """Return the number of distinct items of each sampled user, int64 [users]."""
    if not len(sample.owner_indices):
        return np.zeros(len(sample.user_ids), np.int64)
    item_codes = np.asarray(pc.dictionary_encode(sample.item_ids).indices, np.int64)
    user_item_codes = np.unique(sample.owner_indices * (int(item_codes.max()) + 1) + item_codes)
    return np.bincount(user_item_codes // (int(item_codes.max()) + 1), minlength=len(sample.user_ids))


def _mean_touched_share(item_count: int, changed_share: float, list_lengths: NDArray[np.int64]) -> float:
    distinct_widths, width_counts = np.unique(list_lengths, return_counts=True)
    touched_shares = [touched_share(item_count, changed_share, width) for width in distinct_widths.tolist()]
    return float(np.dot(touched_shares, width_counts)) / max(1, len(list_lengths))


def _lost_and_entered_shares(shape: NightShape, entity: str, changed_share: float) -> tuple[float, float]:
    """Return (lists that lose an item, other lists that an item may enter) as shares of users' or items' lists."""
    width = sum(
        layout.width
        for table_entity, layout in shape.layout_by_table.values()
        if table_entity == entity and layout.kind == "topk"
    )
    lost_share = touched_share(shape.item_count, changed_share, width)
    # A new item is as likely to be in a list as any other, so as many lists are entered as lose an item.
    entered_share = 1.0 if changed_share > ENTERING_SHARE_MAX and width else lost_share
    return lost_share, (1 - lost_share) * entered_share


def zipf_popularity(user_count: int, zipf_exponent: float) -> Popularity:
    """Return the popularity by Zipf's law: rank r is proportional to r ** -exponent; high ranks share bins of 0.2 %."""
    exact_count = min(user_count, EXACT_RANKS_MAX)
    bin_edges = [exact_count]
    while bin_edges[-1] < user_count:
        bin_edges.append(min(user_count, max(bin_edges[-1] + 1, int(bin_edges[-1] * BIN_GROWTH))))
    # Midpoint rule: the sum over ranks a+1..b is the integral from a+1/2 to b+1/2.
    low_edges, high_edges = (np.array(bin_edges[:-1], np.float64) + 0.5, np.array(bin_edges[1:], np.float64) + 0.5)
    power = 1 - zipf_exponent
    bin_mass = np.log(high_edges / low_edges) if power == 0 else (high_edges**power - low_edges**power) / power
    key_counts = np.concatenate([np.ones(exact_count), high_edges - low_edges])
    probability_mass = np.concatenate([np.arange(1, exact_count + 1, dtype=np.float64) ** -zipf_exponent, bin_mass])
    return Popularity(probability_mass / probability_mass.sum() / key_counts, key_counts)


def estimate_popularity(request_counts: NDArray[np.int64], user_count: int) -> Popularity:
    """Estimate the popularity of `user_count` users from the number of requests of each user in a log.

    The unseen users' total probability is about the share of requests by users seen once (Good, Biometrika 1953). Each
    seen user's count is reduced by the same amount to make room for it.
    """
    requests_per_user, key_counts = np.unique(request_counts, return_counts=True)
    request_count, seen_count = int(request_counts.sum()), len(request_counts)
    seen_once_count, unseen_count = (
        int(key_counts[0]) if requests_per_user[0] == 1 else 0,
        max(0, user_count - seen_count),
    )
    if not seen_once_count or not unseen_count:
        return Popularity(requests_per_user / request_count, key_counts.astype(np.float64))
    discount = min(seen_once_count / seen_count, 0.9)
    request_shares = (
        np.concatenate([requests_per_user - discount, [discount * seen_count / unseen_count]]) / request_count
    )
    return Popularity(request_shares, np.concatenate([key_counts, [unseen_count]]).astype(np.float64))


def l1_hit_rates(
    popularity: Popularity,
    l1_bytes_max: int,
    *,
    record_bytes: int,
    answer_bytes: int = 0,
    daily_requests_per_process: float | None = None,
) -> HitRates:
    """Return the hit rates of an L1 of `l1_bytes_max` for one table of records.

    `answer_bytes`: bytes of a single lookup's rendered answer, which is cached besides the record from the second
    request on; 0 if none is, as for batches.

    A least-recently-used cache behaves as if each entry stayed for one characteristic time T after its last use, T
    being such that the expected contents fill the cache (Che, Tung, Wang: Hierarchical Web Caching Systems, IEEE JSAC
    2002; on its accuracy: Fricker, Robert, Roberts, ITC 2012). Time is counted in requests, which are independent of
    each other.
    """
    table_entry_bytes = l1_table_bytes()
    record_entry_bytes = record_bytes + ENTRY_OVERHEAD_BYTES + table_entry_bytes
    answer_entry_bytes = answer_bytes + READY_OVERHEAD_BYTES + table_entry_bytes if answer_bytes else 0.0

    def expected_contents(characteristic_time: float) -> tuple[float, float]:
        """Return the expected (entries, bytes) at this characteristic time."""
        expected_requests = popularity.request_probabilities * characteristic_time
        absent_probability = np.exp(-expected_requests)
        if not answer_entry_bytes:
            entries = float(popularity.key_counts @ (1 - absent_probability))
            return entries, record_entry_bytes * entries
        # The record is used by the first two requests, the second of which renders the answer; later ones use the
        # answer.
        record_entries = float(
            popularity.key_counts @ ((1 + expected_requests) * absent_probability * (1 - absent_probability))
        )
        answer_entries = float(popularity.key_counts @ (1 - absent_probability) ** 2)
        return (
            record_entries + answer_entries,
            record_entry_bytes * record_entries + answer_entry_bytes * answer_entries,
        )

    time = _characteristic_time(lambda time: expected_contents(time)[1], l1_bytes_max)
    entries_max = float(popularity.key_counts.sum()) * (2 if answer_entry_bytes else 1)
    entries = entries_max if math.isinf(time) else expected_contents(time)[0]
    return HitRates(
        l1_bytes_max,
        entries,
        _steady_rate(popularity, time),
        _rate_from_cold(popularity, time, daily_requests_per_process),
    )


def _characteristic_time(bytes_at: Callable[[float], float], l1_bytes_max: int) -> float:
    low, high = 0.0, 60.0  # log2 of a number of requests
    if bytes_at(2**high) <= l1_bytes_max:
        return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if bytes_at(2**middle) <= l1_bytes_max else (low, middle)
    return float(2**low)


def _steady_rate(popularity: Popularity, characteristic_time: float) -> float:
    if math.isinf(characteristic_time):
        return 1.0
    key_mass = popularity.request_probabilities * popularity.key_counts
    return float(key_mass @ -np.expm1(-popularity.request_probabilities * characteristic_time))


def _rate_from_cold(
    popularity: Popularity, characteristic_time: float, daily_requests_per_process: float | None
) -> float | None:
    """Return the mean hit rate over the first requests: the cache fills up until T, then the rate is steady."""
    if daily_requests_per_process is None or daily_requests_per_process < 1:
        return None
    filling_requests = min(characteristic_time, daily_requests_per_process)
    filling_hits = filling_requests - float(
        popularity.key_counts @ -np.expm1(-popularity.request_probabilities * filling_requests)
    )
    return (
        filling_hits + (daily_requests_per_process - filling_requests) * _steady_rate(popularity, filling_requests)
    ) / daily_requests_per_process


@functools.cache
def l1_table_bytes() -> float:
    """Measure the bytes of an L1's table per entry under churn, which `entry_size_bytes` leaves out.

    Measured on small L1s.
    """
    return fmean(_measure_table_bytes(entries) for entries in _CHURNED_ENTRIES)


def _measure_table_bytes(entry_count: int) -> float:
    entry = Entry(b"", 0)
    tier = LocalTier(entry_count * (entry_size_bytes(entry) + 150))
    for key in range(4 * entry_count):
        tier.put(LocalKey("", "", key), entry)
    return tier.size_bytes / len(tier) - entry_size_bytes(entry)

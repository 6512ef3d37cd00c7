"""The forecast: from a configuration and a sample of its inputs to bytes, minutes and hit rates."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.model.input_sample import probe_bytes
from cache.process.host import usable_cores
from cache.process.redis_server import server
from precompute.builds.tables import (
    configured_tables,
    entity_of,
    facet_layout,
    layout_of,
    metric_of,
    scored_tables,
)
from precompute.builds.vector_bundle import make_bundle
from precompute.bulk.floor_time import floor_seconds, time_limit_remark
from precompute.bundles.bundle import Bundle
from precompute.config.generations_at_peak import generations_at_peak
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig, parse_time
from precompute.control.control_keys import connect
from precompute.device.rates import DeviceRate
from precompute.partitions.catalogue import ITEM_FEATURES
from precompute.partitions.shard_files import USER_VECTORS
from precompute.planning.capacity import CapacityLimits, verdicts
from precompute.planning.copies import CopyingNight, copying_nights, lengths, users_changed
from precompute.planning.filter_costs import FilterCost, filter_costs
from precompute.planning.hits import HitRates, Popularity, hits, popularity_of, zipf
from precompute.planning.memory import step_bytes
from precompute.planning.options import PlanParameters
from precompute.planning.rehearsal import page_costs, time_load
from precompute.planning.sampling import draw
from precompute.planning.sizes import NightShape
from precompute.planning.spent import TimeSpent
from precompute.planning.trial import Timings, Trial, feature_columns, open_trial, time_scoring
from precompute.scoring.inputs import demand_feature_types

DAY_S = 86_400.0
MIB = 1 << 20
BUSY = 2.0
"""Times the cores by the clock over processor time: a quiet machine has 1 to 1.5."""
COPIED_BYTES = 17
"""Bytes on disk for each user of which a later night may copy: a hash, a digest, a reason."""
ANSWER_BYTES, ANSWER_ITEM_BYTES = 250, 14
"""Approximate bytes of an answer in JSON besides its item ids: as a whole; a score, quotes and commas for each."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes of one generation, times of a night, and what L1s of several sizes would answer."""

    sample_users: int
    source_users: int
    interactions: int
    shape: NightShape
    redis_bytes: int
    timings: Timings
    load: TimeSpent
    floor_s: float
    """Seconds that loading may take at most beside readers."""
    gpu_s: float
    gpu_how: str
    hits: Sequence[HitRates]
    filters: Sequence[FilterCost] = ()
    copying: Sequence[CopyingNight] = ()
    copying_note: str = ""
    remarks: Sequence[str] = ()

    @property
    def is_busy(self) -> bool:
        """True if other programs held this machine's cores meanwhile: then times by the clock are too long."""
        scoring = self.timings.all
        return scoring.wall_s * usable_cores() > BUSY * scoring.cpu_s

    def to_json(self) -> dict[str, Any]:
        """JSON-able form for `--json`: bytes of one generation, seconds of a night."""
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
    """Draws the sample, scores it, loads pages of that size into a Redis of our own, and adds up.

    `requests`: how often each user in a log was asked for; None: `asked.zipf`. Nothing of the namespace is read or
    written.
    """
    data_until = parameters.data_until or config.data_until
    cutoff_at = parse_time(data_until) if data_until else None
    with TemporaryDirectory(prefix="larder-plan-") as temporary_path:
        folder = Path(temporary_path)
        bundle = _bundle(config, folder / "bundle", cutoff_at)
        demand_feature_types(config, bundle)
        config = resized(config, bundle, parameters.k)
        sample = draw(
            config,
            parameters.sample,
            columns=feature_columns(bundle),
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
        zipf(source_users, parameters.zipf)
        if requests is None
        else popularity_of(requests, source_users)
    )
    changed_share, note = users_changed(parameters.users_changed, sample, cutoff_at)
    return Forecast(
        len(sample.ids), source_users, sample.interactions, shape, redis_bytes, timings,
        timings.seal.and_(loading),
        floor_seconds(config, shape.payload_bytes),
        gpu_seconds(timings, rate.users_per_s, shape), rate.how, _hits(shape, parameters, popularity), filters,
        copying_nights(timings, shape, changed_share, parameters.items_changed, lengths(sample)), note,
        [remark] if (remark := time_limit_remark(config, shape.payload_bytes)) else [],
    )  # fmt: skip


def judged(config: NightConfig, night_forecast: Forecast, limits: CapacityLimits) -> list[Any]:
    """Verdicts on a forecast within these limits."""
    return verdicts(
        limits, config.gates, generations=generations_at_peak(config.keep), redis_bytes=night_forecast.redis_bytes,
        mapped_bytes=night_forecast.shape.mapped_bytes, disk_bytes=night_forecast.shape.disk_bytes,
    )  # fmt: skip


def resized(config: NightConfig, bundle: Bundle, k: int | None) -> NightConfig:
    """Settings with users' lists of another length; the tables are those that this bundle can fill, defaults or not."""
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
    items, dims = int(begin_report["items"]), parameters.dims or bundle.dims
    tables = scored_tables(config, bundle)
    sized = replace(bundle, dims=dims)
    per_user = min(config.history_limit, int(begin_report["interactions"]) / len(trial.sample.ids))
    partition = sum(path.stat().st_size for path in (root / "work/partition").iterdir())
    facets = begin_report.get("facets") or trial.build.need("embed_items").get("facets") or {}
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
        interactions=round(users * int(begin_report["interactions"]) / len(trial.sample.ids)),
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
    """Lists at this rate, items as users, beside the slowest of what the processor still does."""
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


def _hits(shape: NightShape, parameters: PlanParameters, popularity: Popularity) -> list[HitRates]:
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
        hits(
            popularity, mib * MIB, record_bytes=layout.size_bytes,
            answer_bytes=answer,
            requests=None if parameters.qps is None else parameters.qps / parameters.processes * DAY_S,
        )
        for mib in parameters.l1_mib
    ]  # fmt: skip

"""Trial night over the sample: the night's own steps and the load of its pages, timed and extrapolated."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Self, TypeVar, cast

import numpy as np
import redis
from numpy.typing import NDArray

from cache.errors import ConfigError
from cache.format.manifest import Artefact, ItemFiles, Manifest, Producer, Table, TablePart
from cache.format.redis_keys import Keyspace
from cache.model.ranking import Metric
from cache.store.artefacts import generation_path
from cache.topk.topk import Scorer
from precompute.builds.build import Build, fetch_catalogue, open_bundle
from precompute.builds.reports import BEGIN_REPORT, BeginReport
from precompute.builds.tables import configured_tables, metric_of, records_per_page
from precompute.bulk.load import total_bytes
from precompute.bulk.watch import main_thread_cpu_s
from precompute.bundles.bundle import Bundle
from precompute.config.devices import OFF, devices
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig
from precompute.features import scoring_hooks
from precompute.partitions.catalogue import (
    ITEM_IDS_FILE,
    ITEM_OFFSETS_FILE,
    ITEM_VECTORS_FILE,
    MODEL_INDEX_FILE,
    open_items,
)
from precompute.partitions.night_input import NightInput
from precompute.partitions.partition import PartitionJob
from precompute.partitions.shard_files import PARTITION_FOLDER
from precompute.partitions.shard_input import scratch_folder
from precompute.planning.cards import CARDS, DEFAULT_CARD
from precompute.planning.sampling import Sample
from precompute.planning.sizes import NightShape
from precompute.scoring.items import score_items
from precompute.scoring.scorers import Scorers
from precompute.scoring.shard_work import ShardWork
from precompute.scoring.user_reading import read_users
from precompute.scoring.users import score_users
from precompute.steps import begin, embed_items, load
from precompute.steps.score import SHARDS_PER_DEVICE

PROBE_COUNT = 256

REPEAT_COUNT = 3

SEARCHED_USERS = 1024

TIMED_USERS_MAX = 1 << 16

LOADED_BYTES_MAX = 256 << 20

_RATE_REPEAT_COUNT = 3

TRIAL_CUT = "2000-01-01T00:00:00Z"
"""Time that names the trial's generation; no data is left out by it."""

REHEARSED_GENERATION = "20000101T000000Z-000000000000"

Result = TypeVar("Result")


class TimeSpent(NamedTuple):
    """Wall-clock seconds, and processor seconds of all threads."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    def and_(self, other_spent: Self) -> "TimeSpent":
        """Return the time of both, one after the other."""
        return TimeSpent(self.wall_s + other_spent.wall_s, self.cpu_s + other_spent.cpu_s)

    def times(self, factor: float) -> "TimeSpent":
        """Return the time of `factor` times the work."""
        return TimeSpent(self.wall_s * factor, self.cpu_s * factor)

    def in_parallel(self, run_count: int, at_once: int) -> "TimeSpent":
        """Return the time of `run_count` times the work, `at_once` runs at a time."""
        return TimeSpent(self.wall_s * -(-run_count // at_once), self.cpu_s * run_count)


class TimedRun(NamedTuple):
    """Time that a run over `work_amount` entities or bytes took."""

    work_amount: float
    spent: TimeSpent


@dataclass(frozen=True, slots=True)
class DeviceRate:
    """Lists per second on the GPUs that a night uses, and the origin of that figure in words."""

    users_per_s: float
    rate_origin: str


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of a night's scoring; `seconds_by_stage` are busy seconds of its overlapping stages, for all users."""

    embed: TimeSpent
    prepare: TimeSpent
    shards: TimeSpent
    users: TimeSpent
    items: TimeSpent
    seconds_by_stage: Mapping[str, float]
    recorded_share: float
    """Share of the users that will have records."""
    extrapolation_note: str
    seal: TimeSpent
    """Time of the load before its first page."""

    @property
    def total(self) -> TimeSpent:
        """Time from the item vectors to the last page."""
        total_spent = self.embed
        for step_spent in (self.prepare, self.shards, self.users, self.items):
            total_spent = total_spent.and_(step_spent)
        return total_spent


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """Build of the sample in one shard, with its items embedded, which took `embed_time`."""

    build: Build
    bundle: Bundle
    sample: Sample
    folder: Path
    embed_time: TimeSpent
    shards_at_once: int = 1
    """Shards that the night's process scores at a time."""
    scorers: Scorers = field(default_factory=lambda: Scorers(hooks=scoring_hooks()))

    @property
    def begin_report(self) -> BeginReport:
        """Report of `begin`."""
        return self.build.need_report(BEGIN_REPORT)

    def measure_recorded_share(self) -> float:
        """Return the share of the sample's users that will have records; call before `time_users`."""
        work = ShardWork.of(self.build, self.bundle, 0, self.scorers)
        with scratch_folder(self.build.root / PARTITION_FOLDER) as scratch:
            kept_count = sum(len(chunk.user_ids) for chunk in read_users(work, scratch))
        return kept_count / max(1, work.count_by_name["entities"])

    def time_users(self, user_count: int) -> tuple[TimeSpent, Mapping[str, float]]:
        """Score `user_count` users into pages; return the time, and each stage's busy seconds.

        If the night scores several shards at once, so does the trial, and the time is divided by their number.
        """
        config = self.build.config
        sources = self.sample.write(self.folder / "sources", user_count, config.sources)
        items = open_items(self.build.root, self.begin_report)
        PartitionJob(
            NightInput(replace(config, sources=sources), items),
            self.build.root / PARTITION_FOLDER,
            feature_columns=feature_columns(self.bundle),
            vector_dims=self.bundle.dims,
        ).run(seed=self.begin_report["user_seed"])

        def score(_number: int) -> Mapping[str, float]:
            return score_users(self.build, self.bundle, 0, self.scorers, quiet)["seconds"]

        with ThreadPoolExecutor(self.shards_at_once) as pool:
            spent, seconds = measure_time(lambda: list(pool.map(score, range(self.shards_at_once))))
        return spent.times(1 / self.shards_at_once), seconds[0]

    def time_items(self, item_count: int) -> TimeSpent:
        """Score `item_count` items into pages; return the time."""
        return measure_time(lambda: score_items(self.build, self.bundle, 0, self.scorers, quiet, items_max=item_count))[
            0
        ]

    def time_preparation(self) -> TimeSpent:
        """Measure the preparation of the items for comparison, once for all shards of a process."""
        items = open_items(self.build.root, self.begin_report, dims=self.bundle.dims)
        tables = configured_tables(self.build.config, self.bundle).values()
        metrics = {metric_of(self.bundle, table) for table in tables if table.kind in ("user_topk", "item_similar")}
        return measure_time(lambda: [self.scorers.device_of_shard(0).of(items, metric) for metric in metrics])[0]

    def time_opening(self) -> TimeSpent:
        """Measure the time to open the bundle, which every shard does first."""
        fetch_catalogue(self.build)
        return measure_time(lambda: open_bundle(self.build))[0]

    def time_sealing(self) -> TimeSpent:
        """Measure the load's work before its first page: opening the bundle, describing the items' files."""
        files = (ITEM_IDS_FILE, ITEM_OFFSETS_FILE, MODEL_INDEX_FILE, ITEM_VECTORS_FILE)
        return self.time_opening().and_(measure_time(lambda: [self.build.describe(file) for file in files])[0])

    def encode_sample(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return (vectors of the first chunk of users, vectors of all items)."""
        work = ShardWork.of(self.build, self.bundle, 0, self.scorers)
        with scratch_folder(self.build.root / PARTITION_FOLDER) as scratch:
            chunk = work.add_tower_outputs(next(read_users(work, scratch)))
        user_vectors = chunk.outputs_by_model["user_tower"][chunk.is_answered_by_model["user_tower"]]
        return user_vectors, np.asarray(work.items.vectors)

    def measure_device_rate(self, device_setting: str, shape: NightShape, k: int) -> DeviceRate:
        """Return the rate of lists on this host's GPUs, measured on one of them; without a GPU, a rate from a table."""
        rate, table_rate = None, rate_from_table(shape.item_count, shape.dims, k)
        try:
            device_names = devices(device_setting)
        except ConfigError:  # the night's device is not on this host
            return replace(
                table_rate,
                rate_origin=f"{table_rate.rate_origin}; device {device_setting!r} cannot be used on this host",
            )
        if device_names:
            user_vectors, item_vectors = self.encode_sample()
            rate = rate_from_rehearsal(device_names[0], user_vectors, item_vectors, self.bundle.metric, k)
        if rate is None:
            return table_rate
        size_factor = shape.item_count * shape.dims / item_vectors.size
        origin = f"{len(device_names)} x {rate.rate_origin}" if len(device_names) > 1 else rate.rate_origin
        return DeviceRate(len(device_names) * rate.users_per_s / size_factor, origin)

    def measure_half_ratio(self, k: int) -> float:
        """Return the ratio of search times over all items and over a random half of them, for some users."""
        user_vectors, item_vectors = self.encode_sample()
        user_vectors = user_vectors[:SEARCHED_USERS]
        half_ordinals = np.random.default_rng(0).permutation(len(item_vectors))[: len(item_vectors) // 2]
        search_times_s = []
        for searched_vectors in (item_vectors, item_vectors[np.sort(half_ordinals)]):
            search = partial(
                Scorer.of(searched_vectors, self.bundle.metric).top, user_vectors, min(k, len(half_ordinals))
            )
            search()
            search_times_s.append(min(measure_time(search)[0].cpu_s for _ in range(REPEAT_COUNT)))
        return search_times_s[0] / search_times_s[1]


def open_trial(config: NightConfig, sample: Sample, folder: Path, redis_url: str) -> Trial:
    """Build the sample in a temporary store, in one shard, and embed the items."""
    sources = sample.write(folder / "sources", len(sample.user_ids), config.sources)
    trial_config = replace(
        config, sources=sources, artifacts=str(folder / "artifacts"), state=str(folder / "state"),
        redis_url=redis_url, shards=1, data_until=None, device=OFF,
    )  # fmt: skip
    begun_build = begin.run(trial_config, data_until=None, run_after=None, named=TRIAL_CUT)
    build = Build.of(trial_config, begun_build)
    embed_time, _ = measure_time(lambda: embed_items.run(trial_config, begun_build))
    shards_at_once = min(SHARDS_PER_DEVICE, config.shards)
    return Trial(build, open_bundle(build), sample, folder, embed_time, shards_at_once)


def time_scoring(
    trial: Trial, shape: NightShape, *, source_user_count: int, longest_run_s: float, progress: Progress = quiet
) -> Timings:
    """Time the scoring of two numbers of users and of items; the larger takes about `longest_run_s`, or a shard."""
    recorded_share, preparation_time, opening_time = (
        trial.measure_recorded_share(),
        trial.time_preparation(),
        trial.time_opening(),
    )
    users_per_shard, trial_item_count = (-(-source_user_count // shape.shard_count), trial.begin_report["items"])
    stage_seconds_by_count: list[tuple[int, Mapping[str, float]]] = []

    def score(user_count: int) -> TimeSpent:
        spent, seconds_by_stage = trial.time_users(user_count)
        stage_seconds_by_count.append((user_count, seconds_by_stage))
        return spent

    progress("time the scoring", 0, 2)
    score(min(PROBE_COUNT, users_per_shard))  # not counted: the first run opens models and files
    user_time = _time_one_shard(score, users_per_shard, longest_run_s, TIMED_USERS_MAX).times(shape.shard_count)
    progress("time the scoring", 1, 2)
    item_time = _time_one_shard(
        trial.time_items, -(-shape.item_count // shape.shard_count), longest_run_s, trial_item_count
    )
    item_time = item_time.times(shape.shard_count)
    progress("time the scoring", 2, 2)
    scored_count, seconds_by_stage = stage_seconds_by_count[-1]
    seconds_by_stage_of_all = {
        stage: stage_s / scored_count * source_user_count
        for stage, stage_s in seconds_by_stage.items()
        if stage != "all"
    }
    note = ""
    size_factor = shape.item_count * shape.dims / (trial_item_count * trial.bundle.dims)
    if shape.item_count != trial_item_count or shape.dims != trial.bundle.dims:
        exponent, growth = _growth(trial, shape, trial_item_count)
        topk_share = seconds_by_stage_of_all["topk"] / max(sum(seconds_by_stage_of_all.values()), 1e-9)
        longest_time = user_time.times(1 + topk_share * (size_factor - 1)).and_(item_time.times(size_factor))
        note = _extrapolation_note(shape, trial, trial_item_count, exponent, longest_time)
        user_time = user_time.times(1 + topk_share * (growth - 1))
        item_time = item_time.times(growth)
        seconds_by_stage_of_all["topk"] *= growth
    return Timings(
        trial.embed_time.times(size_factor), preparation_time.times(size_factor),
        opening_time.times(size_factor).in_parallel(shape.shard_count, trial.shards_at_once),
        user_time, item_time, seconds_by_stage_of_all, recorded_share, note,
        trial.time_sealing().times(size_factor),
    )  # fmt: skip


def _time_one_shard(
    time_count: Callable[[int], TimeSpent], entity_count: int, longest_run_s: float, count_max: int
) -> TimeSpent:
    probe_count = min(PROBE_COUNT, entity_count, count_max)
    small = large = TimedRun(probe_count, time_count(probe_count))
    rate = probe_count / max(small.spent.wall_s, 1e-6)
    if (larger_count := int(min(entity_count, count_max, rate * longest_run_s))) > probe_count:
        large = TimedRun(larger_count, time_count(larger_count))
    return extrapolate(small, large, entity_count)


def _growth(trial: Trial, shape: NightShape, trial_item_count: int) -> tuple[float, float]:
    """Return (exponent of the number of items, factor of a list's time) from the trial's to the night's shape."""
    list_lengths = [layout.width for _, layout in shape.layout_by_table.values() if layout.kind == "topk"]
    measured_exponent = float(np.log2(trial.measure_half_ratio(max(list_lengths, default=1))))
    exponent = min(1.0, max(0.0, measured_exponent))
    return exponent, (shape.item_count / trial_item_count) ** exponent * shape.dims / trial.bundle.dims


def _extrapolation_note(
    shape: NightShape, trial: Trial, trial_item_count: int, exponent: float, longest_time: TimeSpent
) -> str:
    unmeasured_note = "; dimensions count in proportion, which was not measured"
    dims_note = "" if shape.dims == trial.bundle.dims else unmeasured_note
    return (
        f"scoring is extrapolated from {trial_item_count // 2:,} and {trial_item_count:,} items: time grows with items "
        f"** {exponent:.2f}; if "
        f"it grew in proportion, {longest_time.wall_s / 60:.2f} minutes{dims_note}"
    )


def feature_columns(bundle: Bundle) -> list[str]:
    """Return the user feature columns that the models take."""
    models = [model for model in bundle.models if model.entity == "user"]
    return sorted({str(feature.column) for model in models for feature in model.spec.features})


def rate_from_table(item_count: int, dims: int, k: int) -> DeviceRate:
    """Return the measured rate of one GPU for lists of `dims` dimensions from `item_count` items.

    The cost of another K was not measured: it is ignored, and `rate_origin` says so.
    """
    card = CARDS[DEFAULT_CARD]
    return DeviceRate(1 / card.list_seconds(item_count, dims), f"a table: {card.rate_in_words(k)}")


def rate_from_rehearsal(
    device: str, user_vectors: NDArray[np.float32], item_vectors: NDArray[np.float32], metric: Metric, k: int
) -> DeviceRate | None:
    """Measure a torch device's rate for some users and all items; None without users or enough memory."""
    if not len(user_vectors):
        return None
    import torch

    from precompute.device.scorer import DeviceScorer

    scorer = DeviceScorer.of(item_vectors, metric, device)
    if scorer is None:
        return None
    measured_rates = []
    for _ in range(_RATE_REPEAT_COUNT):  # the first run is the warm-up
        start_s = time.perf_counter()
        scorer.top(user_vectors, min(k, len(item_vectors)))
        measured_rates.append(len(user_vectors) / (time.perf_counter() - start_s))
    device_name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    return DeviceRate(max(measured_rates), f"a measurement on this {device_name} with {len(user_vectors):,} users")


def measure_page_costs(client: "redis.Redis", keys: Keyspace, page_sizes: Iterable[int]) -> dict[int, int]:
    """Return the memory that Redis takes for a page of each size: key, entry, value and allocator rounding."""
    memory_by_page_size = {}
    for page_size in sorted(set(page_sizes)):
        # The key is as long as any page's, since allocators round up.
        page_key = keys.page(REHEARSED_GENERATION, "user_topk", 100)
        client.set(page_key, bytes(page_size))
        memory_bytes: Any = client.memory_usage(page_key)
        memory_by_page_size[page_size] = int(memory_bytes)
        client.delete(page_key)
    return memory_by_page_size


def time_load(config: NightConfig, shape: NightShape, client: "redis.Redis") -> TimeSpent:
    """Time the night's own load step at full speed over pages of zeros; `config` has its own store and Redis.

    The pages have as many parts as the night's, and at most LOADED_BYTES_MAX bytes; larger nights are extrapolated from
    runs of that size and a quarter of it.
    """
    payload_share = min(1.0, LOADED_BYTES_MAX / max(1, shape.payload_bytes))
    small, large = (_time_load_of(config, shape, run_share, client) for run_share in (payload_share / 4, payload_share))
    return extrapolate(small, large, shape.payload_bytes)


def _time_load_of(config: NightConfig, shape: NightShape, payload_share: float, client: "redis.Redis") -> TimedRun:
    build = Build.of(config, {"generation": REHEARSED_GENERATION})
    manifest = _manifest_of_zeros(config.namespace, shape, payload_share, build.root)
    build.store.write(generation_path(REHEARSED_GENERATION, "manifest.json"), manifest.to_bytes())
    run_times = []
    for _ in range(REPEAT_COUNT):
        client.flushall(asynchronous=False)
        spent, _ = measure_time(
            lambda: load.run(config, {"generation": REHEARSED_GENERATION}),
            lambda: main_thread_cpu_s(cast(Any, client.info("cpu"))),
        )
        run_times.append(spent)
    client.flushall(asynchronous=False)
    return TimedRun(total_bytes(manifest), median_spent(run_times))


def _manifest_of_zeros(namespace: str, shape: NightShape, payload_share: float, folder: Path) -> Manifest:
    """Build a manifest of all tables in all parts, each with this share of its records, in sparse files."""
    tables = {}
    folder.mkdir(parents=True, exist_ok=True)
    for table_name, (entity, layout) in shape.layout_by_table.items():
        record_count = shape.user_count if entity == "user" else shape.item_count
        part_records = round(record_count * payload_share / shape.shard_count)
        page_artefact = Artefact(f"{table_name}.pages", part_records * layout.size_bytes, "")
        with (folder / page_artefact.path).open("wb") as pages_file:
            pages_file.truncate(page_artefact.size_bytes)
        page_records = records_per_page(layout, shape.page_bytes)
        parts = tuple(
            TablePart(
                part * -(-part_records // page_records),
                -(-part_records // page_records),
                part_records,
                page_artefact,
                page_artefact,
            )
            for part in range(shape.shard_count)
        )
        tables[table_name] = Table(table_name, entity, Producer("none"), layout, page_records, parts, ())
    empty_artefact = Artefact("none", 0, "")
    item_files = ItemFiles(empty_artefact, empty_artefact, empty_artefact, empty_artefact, 0, 0)
    return Manifest(namespace, REHEARSED_GENERATION, 0, 0, "", "", {}, item_files, tables, {}, {}, empty_artefact, ())


def measure_time(
    timed_run: Callable[[], Result], other_cpu_s: Callable[[], float] = lambda: 0.0
) -> tuple[TimeSpent, Result]:
    """Return the time of a run, and its result.

    `other_cpu_s` returns the processor seconds of another process that works for the run.
    """
    wall_start_s, cpu_start_s = time.perf_counter(), time.process_time() + other_cpu_s()
    result = timed_run()
    ended_at = time.perf_counter()
    return TimeSpent(ended_at - wall_start_s, time.process_time() + other_cpu_s() - cpu_start_s), result


def median_spent(run_times: Sequence[TimeSpent]) -> TimeSpent:
    """Return the median of several equal runs, of each clock separately."""
    return TimeSpent(*(median(clock_seconds) for clock_seconds in zip(*run_times, strict=True)))


def extrapolate(small: TimedRun, large: TimedRun, target_amount: float) -> TimeSpent:
    """Extrapolate linearly through two runs, starting at the larger one; fixed costs are in both."""
    amount_step = large.work_amount - small.work_amount
    if amount_step <= 0:
        return large.spent.times(target_amount / large.work_amount)

    def on_line(small_run_s: float, large_run_s: float) -> float:
        slope = max(0.0, large_run_s - small_run_s) / amount_step
        return max(0.0, large_run_s + slope * (target_amount - large.work_amount))

    return TimeSpent(*map(on_line, small.spent, large.spent))

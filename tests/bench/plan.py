"""What `python -m precompute plan` foretells beside what a real night then takes, for five shapes.

The forecast is made from a sample of the users (1 %, at least 1,024). Then the night's own steps run: scoring (item
vectors, all shards, assembled) and loading are timed; several times in turn, and an error of time is the median of the
rounds. Bytes are taken from Redis (growth of its memory, and the sum of `MEMORY USAGE` of all pages) and from the
files of the generation. L1 hit rates are held against the service's own L1, driven by single lookups that are spread by
Zipf's law: from empty, and in the second half; one shape's popularity comes from a log. Errors are shares of what was
measured, the worst of all shapes; that of hit rates is in points (1 = 1 %). A/A is a night's time over that of the one
before, the median of the rounds, of the shape and step where it is furthest from 1. `worst_time_error` is by the clock,
`worst_cpu_error` by processor time, Redis' included, which other programs disturb less.
"""

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import redis
from numpy.typing import NDArray

from cache.format.manifest import Manifest
from cache.process.redis_server import RedisServer
from cache.store.artefacts import generation_path, read_manifest
from cache.tiers.l1 import Entry, LocalKey, LocalTier, ReadyAnswer
from infra.demo.synthetic import WorldSettings, synthesize
from precompute.bulk.load import page_keys
from precompute.bulk.watch import main_thread_cpu_s
from precompute.config.settings import NightConfig, ReferenceConfig, Sources, TableConfig
from precompute.planning.forecast import DAY_S, MIB, Forecast, forecast
from precompute.planning.options import PlanParameters
from precompute.planning.trial import TimeSpent, measure_time
from precompute.reference.train import train_reference
from precompute.steps import assemble, begin, embed_items, index, quantize
from precompute.steps import load as load_step
from precompute.steps import score as score_step
from tests.bench.tools.harness import Ratio, Report, parse
from tests.bench.tools.place import own_server
from tests.integration.nights import write_clicks

DATA_UNTIL = "2026-01-31T00:00:00Z"
REQUESTS = 400_000
ANSWER_BYTES = 700
REMADE = ("work/embed_items.json", "work/assemble.json", "manifest.json")
ROUNDS, ROUNDS_QUICK = 5, 3
AA_TOLERANCE = 0.25
"""What is off from itself by more cannot be foretold within that."""


@dataclass(frozen=True, slots=True)
class Case:
    """One shape; `id_bytes` are added to each item id, `zipf` is how requests are spread, `l1_mib` small and large."""

    users: int
    items: int
    k: int
    dims: int
    shards: int
    id_bytes: int
    zipf: float
    l1_mib: tuple[int, ...]
    has_log: bool = False


FULL = (
    Case(40_000, 2_000, 20, 32, 2, 0, 0.8, (1, 4)),
    Case(60_000, 10_000, 100, 128, 4, 10, 1.0, (4, 16)),
    Case(30_000, 5_000, 500, 64, 3, 0, 1.1, (4, 32)),
    Case(200_000, 3_000, 50, 16, 8, 30, 1.0, (8, 32), has_log=True),
    Case(40_000, 20_000, 100, 256, 4, 60, 1.2, (2, 16)),
)
QUICK = tuple(replace(case, users=case.users // 4, items=case.items // 2, dims=case.dims // 2) for case in FULL)


@dataclass(frozen=True, slots=True)
class NightTimes:
    """One real night."""

    score: TimeSpent
    load: TimeSpent

    def times_by_name(self) -> Mapping[str, float]:
        """Every time by its name."""
        return {
            "time: score": self.score.wall_s, "time: load": self.load.wall_s,
            "cpu: score": self.score.cpu_s, "cpu: load": self.load.cpu_s,
        }  # fmt: skip


def prepare(case: Case, folder: Path, redis_url: str) -> NightConfig:
    """Data and a trained bundle."""
    config = NightConfig(
        namespace="plan", artifacts="artifacts", state="state", bundle="bundle", base=str(folder),
        redis_url=redis_url, shards=case.shards, page_bytes=64 * 1024,
        sources=Sources(("interactions.parquet",), item_features="items.parquet"),
        tables={
            "user_topk": TableConfig("user_topk", k=case.k),
            "user_vector": TableConfig("user_vector", precision="f4"),
            "item_similar": TableConfig("item_similar", k=50, metric="cosine"),
        },
        reference=ReferenceConfig(dims=case.dims, choose=False),
    )  # fmt: skip
    folder.mkdir()
    clicks = synthesize(WorldSettings(user_count=case.users, item_count=case.items))
    write_clicks(folder, replace(clicks, item_ids=tuple(item_id + "x" * case.id_bytes for item_id in clicks.item_ids)))
    train_reference(config, data_until=DATA_UNTIL)
    return config


def foretell(config: NightConfig, case: Case, seconds: float) -> Forecast:
    """Predict as the command does, for the requests that `drive` will send."""
    plan_parameters = PlanParameters(
        qps=REQUESTS / DAY_S, l1_mib=case.l1_mib, zipf=case.zipf, answer_bytes=ANSWER_BYTES,
        seconds=seconds, data_until=DATA_UNTIL,
    )  # fmt: skip
    log = np.bincount(stream(case, case.users, seed=2)) if case.has_log else None
    return forecast(config, plan_parameters, None if log is None else log[log > 0])


class Night:
    """A real night whose scoring and loading can be repeated."""

    def __init__(self, config: NightConfig, running: RedisServer) -> None:
        self.config = config
        self._client = redis.Redis.from_url(running.url)
        self._build = begin.run(config, data_until=DATA_UNTIL, run_after=None)
        self._score()
        index.run(config, self._build)
        quantize.run(config, self._build)

    @property
    def manifest(self) -> Manifest:
        return read_manifest(self.config.store(), str(self._build["generation"]))

    def run(self) -> NightTimes:
        """Score and load once more."""
        root = self.config.store().local(generation_path(str(self._build["generation"])))
        shutil.rmtree(root / "tables")
        for path in [*(root / "work").glob("shard-*.json"), *map(root.joinpath, REMADE)]:
            path.unlink(missing_ok=True)
        score, _ = measure_time(self._score)
        self._client.flushall(asynchronous=False)
        begin.run(self.config, data_until=DATA_UNTIL, run_after=None)  # the registry knows it again
        self.bytes_before_load = self._used()
        load, _ = measure_time(lambda: load_step.run(self.config, self._build), self._cpu)
        return NightTimes(score, load)

    def redis_bytes(self) -> tuple[int, int]:
        """(growth of its memory with the last load, sum over its pages)."""
        grown = self._used() - self.bytes_before_load
        names = page_keys(self.config.keyspace(), self.manifest)
        return grown, sum(int(self._client.memory_usage(name) or 0) for name in names)

    def _score(self) -> None:
        embed_items.run(self.config, self._build)
        score_step.run(self.config, self._build, self._build["shards"])
        assemble.run(self.config, self._build)

    def _used(self) -> int:
        return int(self._client.info("memory")["used_memory"])

    def _cpu(self) -> float:
        return main_thread_cpu_s(self._client.info("cpu"))


def stream(case: Case, users: int, *, seed: int) -> NDArray[np.int64]:
    """Users asked for, by rank."""
    weights = np.arange(1, users + 1, dtype=np.float64) ** -case.zipf
    ends = np.cumsum(weights / weights.sum())
    drawn = np.searchsorted(ends, np.random.default_rng(seed).random(REQUESTS), "right")
    return np.minimum(drawn, users - 1).astype(np.int64)


def drive(case: Case, users: int, record_bytes: int, mib: int) -> tuple[float, float]:
    """(hit rate from empty, of the second half) of the service's L1, single lookups with their ready answers."""
    tier, record = LocalTier(mib * MIB), bytes(record_bytes)
    hits = np.zeros(REQUESTS, np.bool_)
    for at, user in enumerate(stream(case, users, seed=1).tolist()):
        request = b"%d" % user
        if tier.find_ready_answer(request) is not None:
            hits[at] = True
            continue
        key = LocalKey("g", "user_topk", user)
        if tier.get(key) is None:
            tier.put(key, Entry(record, user))
            continue
        hits[at] = True
        answer_body = bytes(ANSWER_BYTES - 2 * len(request))
        tier.keep_ready_answer(ReadyAnswer(0, answer_body, b"", 0, ("user_topk", request), request))
    return float(hits.mean()), float(hits[REQUESTS // 2 :].mean())


def errors(
    case: Case, forecasts: Sequence[Forecast], night: Night, nights: Sequence[NightTimes]
) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Shares by which each figure is off, and what was measured."""
    last_forecast, manifest, (grown, pages) = forecasts[-1], night.manifest, night.redis_bytes()
    mapped = sum(artefact.size_bytes for artefact in manifest.served_artefacts())
    directories = sum(part.file.size_bytes for entity_set in manifest.entity_sets.values() for part in entity_set.parts)
    root = night.config.store().local(generation_path(manifest.generation))
    disk = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    measured = {
        "bytes: Redis": float(grown), "bytes: Redis pages": float(pages),
        "bytes: directories": float(directories), "bytes: mapped": float(mapped), "bytes: disk": float(disk),
    }  # fmt: skip
    foretold = (
        last_forecast.redis_bytes, last_forecast.redis_bytes, last_forecast.shape.directory_bytes,
        last_forecast.shape.mapped_bytes,
        last_forecast.shape.disk_bytes,
    )  # fmt: skip
    off = {
        name: forecast_bytes / measured_bytes - 1
        for (name, measured_bytes), forecast_bytes in zip(measured.items(), foretold, strict=True)
    }
    forecast_times = [
        NightTimes(night_forecast.timings.total, night_forecast.load_time).times_by_name()
        for night_forecast in forecasts
    ]
    measured_times = [real_night.times_by_name() for real_night in nights]
    for name in forecast_times[0]:
        off[name] = (
            median(
                forecast_by_name[name] / two[name]
                for forecast_by_name, two in zip(forecast_times, measured_times, strict=True)
            )
            - 1
        )
        measured[name] = median(measured_by_name[name] for measured_by_name in measured_times)
    layout = last_forecast.shape.layout_by_table["user_topk"][1]
    for hit_forecast, mib in zip(last_forecast.hit_rates, case.l1_mib, strict=True):
        cold, steady = drive(case, case.users, layout.size_bytes, mib)
        off[f"points: {mib} MiB"] = 100 * (hit_forecast.steady - steady)
        off[f"points: {mib} MiB from empty"] = 100 * ((hit_forecast.from_cold or 0.0) - cold)
        measured[f"points: {mib} MiB"] = 100 * steady
        measured[f"points: {mib} MiB from empty"] = 100 * cold
    return off, measured


def main() -> None:
    """Predict, run, compare."""
    options = parse(__doc__.splitlines()[0])
    report = Report("plan", ("redis", "onnxruntime", "pyarrow", "faiss-cpu"))
    worst: dict[str, float] = {}
    aa: dict[str, list[float]] = {"time": [], "cpu": []}
    for number, case in enumerate(QUICK if options.quick else FULL, 1):
        started = time.perf_counter()
        with TemporaryDirectory(prefix="larder-plan-") as folder_name, own_server() as running:
            config = prepare(case, Path(folder_name) / "night", running.url)
            night = Night(config, running)
            forecasts, nights = [], []
            for _ in range(ROUNDS_QUICK if options.quick else ROUNDS):
                forecasts.append(foretell(config, case, seconds=2.0 if options.quick else 10.0))
                nights.append(night.run())
            off, measured = errors(case, forecasts, night, nights)
        name = f"{number}: {case.users:,} x {case.items:,}, K {case.k}, d {case.dims}"
        report.figures[name] = f"sample {forecasts[-1].sample_user_count:,} users"
        for figure_name, deviation in off.items():
            unit = "points" if figure_name.startswith("points") else "%"
            deviation_in_unit = deviation if unit == "points" else 100 * deviation
            report.figures[f"{number} {figure_name}"] = (
                f"{measured[figure_name]:,.4g}, off by {deviation_in_unit:+.2f} {unit}"
            )
            kind = figure_name.partition(":")[0]
            worst[kind] = max(worst.get(kind, 0.0), abs(deviation))
        for name in nights[0].times_by_name():
            times = [night.times_by_name()[name] for night in nights]
            ratio = median(later / earlier for earlier, later in pairwise(times))
            aa[name.partition(":")[0]].append(ratio)
        report.figures[f"{number} seconds in all"] = round(time.perf_counter() - started, 1)
    for name, kind, steady in (
        ("worst_bytes_error", "bytes", 1.0),
        ("worst_time_error", "time", _furthest(aa["time"])),
        ("worst_cpu_error", "cpu", _furthest(aa["cpu"])),
        ("worst_hit_points", "points", 1.0),
    ):
        report.ratios[name] = Ratio(worst[kind], steady, len(FULL), worst[kind], 1.0, AA_TOLERANCE)
    report.show(options)


def _furthest(ratios: Sequence[float]) -> float:
    return max(ratios, key=lambda ratio: abs(math.log(ratio)))


if __name__ == "__main__":
    main()

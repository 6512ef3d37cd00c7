"""A drawn night of any size: a bundle with programs, clicks, and its shards scored from partition to pages."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cache.model.tower_spec import InputSpec, TowerSpec
from cache.store.artefacts import generation_path
from precompute.builds.build import Build
from precompute.builds.reports import shard_report_name
from precompute.bundles import onnx_model
from precompute.bundles.bundle import ModelFile, write_bundle
from precompute.config.settings import NightConfig, Sources, TableConfig
from precompute.scoring.scorers import Scorers
from precompute.steps import begin, embed_items, score

K = 100
CLICKS = 16
SHARDS = 2
DATA_UNTIL = "2026-11-22T00:00:00Z"
STAGES = ("read", "tower", "topk", "records", "write")


@dataclass(frozen=True, slots=True)
class DrawnSize:
    """Number of users, of items, and of numbers in a vector."""

    users: int
    items: int
    dims: int = 128


def write_clicks(path: Path, size: DrawnSize) -> None:
    """Some 16 clicks of each user, more on items with low numbers, in no order of users."""
    rng = np.random.default_rng(0)
    rows = rng.permutation(np.repeat(np.arange(size.users), CLICKS))
    items = (size.items * rng.random(len(rows)) ** 2.5).astype(np.int64)
    times = np.arange(len(rows)) + 1_700_000_000
    columns = {"user": _texts(rows), "item": _texts(items), "timestamp": times}
    pq.write_table(pa.table(columns), path)


def write_models(folder: Path, size: DrawnSize, *, programs: bool) -> None:
    """A bundle of one vector for each item, and the sum of those that a user had, as ONNX and perhaps as programs."""
    history_program = item_program = None
    vectors = np.random.default_rng(1).standard_normal((size.items, size.dims), np.float32)
    padded = np.concatenate([vectors, np.zeros((1, size.dims), np.float32)])
    if programs:
        from precompute.reference import exports  # torch, for which nobody waits who has no device

        history_program, item_program = exports.history_tower(padded), exports.item_tower(vectors)
    history = InputSpec("history", "history", "int32", max_length=256, pad=size.items)
    index = InputSpec("item_index", "item_index", "int32")
    write_bundle(
        folder, name="drawn", version="1", dims=size.dims, item_ids=_texts(np.arange(size.items)),
        user_tower=ModelFile(
            onnx_model.history_tower(padded), TowerSpec((history,), "vector", size.dims),
            program=history_program,
        ),
        item_tower=ModelFile(
            onnx_model.item_tower(vectors), TowerSpec((index,), "vector", size.dims), entity="item",
            program=item_program,
        ),
    )  # fmt: skip


def drawn_config(folder: Path, size: DrawnSize, device: str, *, programs: bool = True, **more: Any) -> NightConfig:
    """Settings of a drawn night, its sources and bundle written."""
    folder.mkdir(parents=True, exist_ok=True)
    write_clicks(folder / "clicks.parquet", size)
    write_models(folder / "bundle", size, programs=programs)
    return NightConfig(
        artifacts=str(folder / "artifacts"), state=str(folder / "state"), bundle=str(folder / "bundle"),
        shards=SHARDS, device=device, sources=Sources((str(folder / "clicks.parquet"),)),
        tables={"user_topk": TableConfig("user_topk", k=K)}, **more,
    )  # fmt: skip


class DrawnShards:
    """The shards of a drawn night, scored repeatedly by one process, as a worker would."""

    def __init__(self, folder: Path, size: DrawnSize, device: str, redis_url: str, *, programs: bool = True) -> None:
        tasks = int(os.environ.get("LARDER_DEVICE_TASKS", "1"))
        self.config = drawn_config(folder, size, device, programs=programs, redis_url=redis_url, device_tasks=tasks)
        started = time.perf_counter()
        self.build = begin.run(self.config, data_until=DATA_UNTIL, run_after=None)
        self.begin_s = time.perf_counter() - started
        started = time.perf_counter()
        embed_items.run(self.config, self.build)
        self.embed_s = time.perf_counter() - started
        self.scorers = Scorers(device, tasks)
        self.busy_s = dict.fromkeys(STAGES, 0.0)
        """Seconds that each stage of the last run was busy, of all shards."""

    @property
    def generation(self) -> str:
        return str(self.build["generation"])

    def run(self) -> float:
        """Return users per second, from the partition to the pages."""
        root = self.config.store().local(generation_path(self.generation))
        for path in (root / "work").glob("shard-*.json"):
            path.unlink()
        started = time.perf_counter()
        with ThreadPoolExecutor(SHARDS) as pool:
            shard_results = list(pool.map(self._scored, range(SHARDS)))
        seconds = time.perf_counter() - started
        reports = [self._report(shard) for shard in range(SHARDS)]
        for stage in STAGES:
            self.busy_s[stage] = sum(report["users"]["seconds"][stage] for report in reports)
        return sum(int(shard_result["users"]) for shard_result in shard_results) / seconds

    @property
    def limiting_stage(self) -> str:
        """The stage that was busy longest."""
        return max(self.busy_s, key=self.busy_s.__getitem__)

    def _scored(self, shard: int) -> Any:
        return score.run_shard(self.config, self.build, shard, scorers=self.scorers)

    def _report(self, shard: int) -> Any:
        return Build.of(self.config, self.build).need_report(shard_report_name(shard))


def _texts(numbers: NDArray[np.int64]) -> pa.Array:
    return pa.array(numbers).cast(pa.string())

"""A night's lists end to end beside the kernel alone: Parquet in, pages on disk, loaded in Redis.

Timed are the night's own steps: `begin` (sources pinned, read and partitioned), `embed_items`, `score_shard` (history
excluded, best 100), `assemble` and `load`; index and quantized models, which a load wants to be there, are made once.
The baseline is the night's own scorer (LARDER_DEVICE chooses where it computes) for the same users, histories and
threads, in one piece, its items prepared. Rates are users per second by the clock, all cores for both;
`end_to_end_vs_kernel_cpu` is the same of processor time (Redis' own not counted), on which other programs have less
influence. Vectors are the reference model's (of its default size),
trained on real data where the environment variable LARDER_BENCH_DATA names its folder, else on drawn interactions;
each user comes several times, under several names: a night has costs that do not depend on how many there are.
"""

import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import redis

from cache.model.tower import Histories
from cache.process.host import usable_cores
from cache.process.redis_server import join_or_start_server
from cache.store.artefacts import generation_path
from precompute.builds.build import Build, open_bundle
from precompute.config.settings import NightConfig, ReferenceConfig, Sources, TableConfig
from precompute.reference.matrix_factorisation import SpectralShape
from precompute.reference.train import ReferenceData, train
from precompute.scoring.scorers import Scorers
from precompute.scoring.shard_work import ShardWork
from precompute.scoring.user_reading import read_users
from precompute.steps import assemble, begin, embed_items, index, load, quantize, score
from precompute.steps.assemble import AssembleResult
from tests.bench.tools.harness import Promise, Ratio, Report, alternate, parse
from tests.bench.tools.topk_cases import NO_DATA, Case, real_case, real_file

K = 100
DIMS = ReferenceConfig().dims
COPIES, COPIES_QUICK = 8, 3
DRAWN = (30_000, 40_000)
DATA_UNTIL = "2026-11-22T00:00:00Z"
REMADE = ("work/begin.json", "work/embed_items.json", "work/assemble.json", "manifest.json")


@dataclass(slots=True)
class Spent:
    """Processor seconds of every run, in order."""

    kernel: list[float] = field(default_factory=list)
    night: list[float] = field(default_factory=list)


def drawn_case(folder: Path) -> Case:
    """Popular and rare items, short and long histories."""
    users, items = DRAWN
    rng = np.random.default_rng(0)
    lengths = np.clip(10 * rng.pareto(1.6, users) + 8, 8, 800).astype(np.int64)
    histories = Histories.of([
        np.unique((items * rng.random(count) ** 2.5).astype(np.int64)) for count in lengths
    ])  # fmt: skip
    owners = np.repeat(np.arange(users), np.diff(histories.indptr))
    train(
        ReferenceData(owners, histories.indices, [str(item_number) for item_number in range(items)]),
        folder,
        dims=DIMS,
        shape=SpectralShape(),
    )
    return Case(np.empty((0, DIMS), np.float32), np.empty((0, DIMS), np.float32), histories)


def write_interactions(path: Path, histories: Histories, copies: int, first: int = 0) -> None:
    """One row per interaction, as they happened: users in no order; each comes under `copies` names from `first` on."""
    owners = np.repeat(np.arange(len(histories)), np.diff(histories.indptr))
    rows = np.random.default_rng(1).permutation(copies * len(owners))
    names = pa.array([
        f"{owner}-{first + copy}" for copy in range(copies) for owner in range(len(histories))
    ])  # fmt: skip
    users = names.take(pa.array(rows // len(owners) * len(histories) + owners[rows % len(owners)]))
    items = pa.array(histories.indices[rows % len(owners)]).cast(pa.string())
    times = np.arange(len(rows)) + 1_700_000_000
    pq.write_table(pa.table({"user": users, "item": items, "timestamp": times}), path)


@dataclass(slots=True)
class Night:
    """One configured night that can be repeated from its sources."""

    config: NightConfig
    spent: Spent
    generation: str = ""

    def prepare(self) -> None:
        """Run the night once, with what a load needs besides the lists."""
        build = self._scored()
        self.generation = str(build["generation"])
        index.run(self.config, build)
        quantize.run(self.config, build)

    def run(self) -> float:
        """Return users per second, from the sources to Redis."""
        root = self.config.store().local(generation_path(self.generation))
        for name in ("tables", "directory", "items", "work/partition"):
            shutil.rmtree(root / name)
        for path in [*(root / "work").glob("shard-*.json"), *map(root.joinpath, REMADE)]:
            path.unlink(missing_ok=True)
        with redis.Redis.from_url(str(self.config.redis_url)) as client:
            client.flushall(asynchronous=False)
        started, cpu = time.perf_counter(), time.process_time()
        build = self._scored()
        load.run(self.config, build)
        self.spent.night.append(time.process_time() - cpu)
        return float(build["users"] / (time.perf_counter() - started))

    def _scored(self) -> AssembleResult:
        build = begin.run(self.config, data_until=DATA_UNTIL, run_after=None)
        embed_items.run(self.config, build)
        score.run(self.config, build, build["shards"])
        return assemble.run(self.config, build)


def kernel_run(night: Night) -> tuple[int, Callable[[], float]]:
    """(users, the run): the inputs that the night's own stages gave the kernel."""
    build = Build.of(night.config, {"generation": night.generation})
    work = [ShardWork.of(build, open_bundle(build), shard, Scorers()) for shard in range(night.config.shards)]
    chunks = [
        shard_work.add_tower_outputs(chunk)
        for shard_work in work
        for chunk in read_users(shard_work, build.root / "scratch")
    ]
    users = np.concatenate([encoded_chunk.outputs_by_model["user_tower"] for encoded_chunk in chunks])
    lengths = np.concatenate([np.diff(encoded_chunk.seen_items.indptr) for encoded_chunk in chunks])
    seen_items = Histories(
        np.concatenate([[0], np.cumsum(lengths)]),
        np.concatenate([encoded_chunk.seen_items.indices for encoded_chunk in chunks]),
    )
    scorer = Scorers(night.config.device).device_of_shard(0).of(work[0].items, "inner_product")

    def run() -> float:
        started, cpu = time.perf_counter(), time.process_time()
        scorer.top(users, K, seen_items)
        night.spent.kernel.append(time.process_time() - cpu)
        return len(users) / (time.perf_counter() - started)

    return len(users), run


def cpu_ratio(spent: Spent, users: int) -> Ratio:
    """As `alternate` would find it from processor time: one warm run of each, then before, candidate, after."""
    kernel_before_s, after = np.array(spent.kernel[1::2]), np.array(spent.kernel[2::2])
    nights = np.array(spent.night[1:])
    return Ratio(
        value=statistics.median((kernel_before_s + after) / 2 / nights),
        aa=statistics.median(kernel_before_s / after),
        rounds=len(nights),
        candidate=users / statistics.median(nights),
        baseline=users / statistics.median((kernel_before_s + after) / 2),
    )


def main() -> None:
    """Measure and report."""
    options = parse(__doc__.splitlines()[0])
    copies = COPIES_QUICK if options.quick else COPIES
    file = real_file()
    report = Report("night", ("faiss-cpu", "onnxruntime", "pyarrow", "redis"))
    with TemporaryDirectory(prefix="larder-bench-") as folder_name:
        folder = Path(folder_name)
        bundle, sources = folder / "bundle", folder / "interactions.parquet"
        case = drawn_case(bundle) if file is None else real_case(file, bundle, 1 << 30, DIMS)
        write_interactions(sources, case.histories, copies)
        (folder / "redis").mkdir()
        with join_or_start_server(folder / "redis") as running:
            config = NightConfig(
                artifacts=str(folder / "artifacts"), state=str(folder / "state"),
                bundle=str(bundle), redis_url=running.url, shards=copies,
                device=os.environ.get("LARDER_DEVICE", "auto"),
                sources=Sources((str(sources),)), tables={"user_topk": TableConfig("user_topk", k=K)},
            )  # fmt: skip
            night = Night(config, Spent())
            night.prepare()
            users, kernel = kernel_run(night)
            report.figures |= {
                "vectors": "drawn" if file is None else "real",
                "users": users,
                "interactions": len(case.histories.indices) * copies,
                "dims": DIMS,
                "cores": usable_cores(),
            }
            ratio_by_name = alternate(
                kernel,
                {"night": night.run},
                rounds=options.rounds,
                rounds_max=options.rounds + (1 if options.quick else 2),
            )
            report.ratios["end_to_end_vs_kernel"] = ratio_by_name["night"]
            report.ratios["end_to_end_vs_kernel_cpu"] = cpu_ratio(night.spent, users)
    if file is None:
        report.absent.append(f"vectors trained on real data: {NO_DATA}; these are drawn")
    quick_reason = "fixed costs weigh more on so few users, and lists of drawn ones cost the kernel less"
    report.promises["end_to_end_vs_kernel"] = Promise(0.7, quick=quick_reason)
    report.show(options)


if __name__ == "__main__":
    main()

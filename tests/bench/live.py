"""Live inference without HTTP: what the micro-batcher adds to the work itself, and what int8 saves.

The unit is the whole of an answer from a history: tower, search, exclusion, exact re-score and encoding, over the
index of a real night.

- `lone_vs_direct`: seconds of one request at a time through the batcher, over the same work called in the same pool
  with one hop there and back (at most 1.05 is wanted).
- `vs_offline`: answers/s of the batcher at its best of 64 to 1024 in flight, over the unit called in a row at the
  best of the batch sizes 1 to 512 (at least 0.8 is wanted).
- `int8_vs_fp32`: answers/s of the unit in int8 over fp32 at that size; bytes of both models stand in the figures.

The same ratios by processor time, which hold on a machine that others use too, include the event loop.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from cache.model.input_preparation import LiveInput
from cache.model.predictor import ModelPrecision
from cache.store.blocklist import Blocklist
from serving.config.settings import ServingConfig
from serving.engine.batch_inference import compute
from serving.engine.micro_batcher import ComputedRecord, InferenceJob, MicroBatcher
from serving.generations.snapshot import Snapshot
from serving.process.resources import freeze_objects
from tests.bench.read_path import TABLE, Case, make_case
from tests.bench.tools.harness import Options, Report, alternate, parse
from tests.bench.tools.place import own_server
from tests.integration.serving_app import settings

SIZES = tuple(1 << power for power in range(10))
IN_FLIGHT = (64, 256, 1024)
Measured = Callable[[], tuple[float, float]]
"""(seconds, processor seconds) of one run."""


def open_snapshot(config: ServingConfig, precision: ModelPrecision) -> Snapshot:
    """The newest generation of the night's store, as a replica would hold it."""
    store = config.store()
    generation = max(store.names("generations"))
    return Snapshot.open(
        store, generation, epoch=1, published_at=0, blocklist=Blocklist(),
        precision=precision, thread_count=config.live_threads,
    )  # fmt: skip


def make_jobs(snapshot: Snapshot, case: Case, count: int) -> list[InferenceJob]:
    """Return jobs with different histories of 5 to 30 items."""
    rng = random.Random(0)
    drawn = [rng.sample(case.items, rng.randint(5, 30)) for _ in range(count)]
    return [
        InferenceJob(snapshot, TABLE, LiveInput(tuple(item_id.encode() for item_id in history)), 1, 1)
        for history in drawn
    ]


def offline(jobs: list[InferenceJob], size: int) -> Measured:
    """Run the unit repeatedly in batches of one size."""

    def run() -> tuple[float, float]:
        started_at, spent = time.perf_counter(), time.process_time()
        for at in range(0, len(jobs), size):
            for outcome in compute(jobs[at : at + size]):
                _check(outcome)
        return time.perf_counter() - started_at, time.process_time() - spent

    return run


class Through:
    """The micro-batcher in the service's configuration, and the bare pool."""

    def __init__(self, runner: asyncio.Runner, pool: ThreadPoolExecutor) -> None:
        config = ServingConfig()
        self._runner, self._pool = runner, pool
        self.sizes: list[int] = []
        self._batcher = MicroBatcher(
            pool,
            worker_count=config.live_workers,
            batch_size_max=config.live_batch,
            queued_jobs_max=config.live_queue,
            queued_bytes_max=config.live_queue_bytes,
            compute_batch=compute,
            observe_batch=lambda size, _: self.sizes.append(size),
        )

    def lone(self, jobs: list[InferenceJob]) -> Measured:
        """Send one request at a time."""
        return self.saturated(jobs, 1)

    def saturated(self, jobs: list[InferenceJob], in_flight: int) -> Measured:
        """Run so many callers, each sending again as soon as it is answered."""

        async def work() -> None:
            waiting = iter(jobs)

            async def caller() -> None:
                for job in waiting:
                    _check(await self._batcher.infer(job))

            await asyncio.gather(*(caller() for _ in range(in_flight)))

        return lambda: self._timed(work())

    def hop(self, jobs: list[InferenceJob]) -> Measured:
        """Run the unit for one job at a time in the pool."""

        async def work() -> None:
            loop = asyncio.get_running_loop()
            for job in jobs:
                _check((await loop.run_in_executor(self._pool, compute, [job]))[0])

        return lambda: self._timed(work())

    def _timed(self, work: Coroutine[Any, Any, None]) -> tuple[float, float]:
        started_at, spent = time.perf_counter(), time.process_time()
        self._runner.run(work)
        return time.perf_counter() - started_at, time.process_time() - spent


def _check(outcome: object) -> None:
    if not isinstance(outcome, ComputedRecord):
        raise RuntimeError(f"not an answer: {outcome}")


def compare(
    report: Report, name: str, base: Measured, candidate: Measured, options: Options, *, answers: int | None = None
) -> None:
    """As `answers` per second or, without them, as seconds; processor time as a figure beside it."""
    spent: dict[str, list[float]] = {"base": [], "candidate": []}

    def figure(role: str, run: Measured) -> Callable[[], float]:
        def run_timed() -> float:
            seconds, processor = run()
            spent[role].append(processor)
            return answers / seconds if answers else seconds

        return run_timed

    report.ratios[name] = alternate(
        figure("base", base),
        {"": figure("candidate", candidate)},
        rounds=options.rounds,
        rounds_max=7 if options.quick else None,
    )[""]
    over, under = (statistics.median(spent[role]) for role in ("candidate", "base"))
    ratio = under / over if answers else over / under
    report.figures[f"{name}, by processor time"] = round(ratio, 3)


def measure(report: Report, case: Case, options: Options) -> None:
    """All ratios over one night."""
    config = settings(case.night)
    snapshots = {precision: open_snapshot(config, precision) for precision in ("int8", "fp32")}
    count = 768 if options.quick else 8_192
    jobs = {name: make_jobs(snapshot, case, count) for name, snapshot in snapshots.items()}
    freeze_objects()
    rates = {size: count / min(offline(jobs["int8"], size)()[0] for _ in range(3)) for size in SIZES}
    best_batch_size = max(rates, key=lambda size: rates[size])
    for size, rate in rates.items():
        report.figures[f"offline, batches of {size}: answers/s"] = round(rate)
    report.figures["best batch"] = best_batch_size
    with ThreadPoolExecutor(1, "larder-live") as pool, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        through = Through(runner, pool)
        lone_jobs = jobs["int8"][: count // 4]
        compare(report, "lone_vs_direct", through.hop(lone_jobs), through.lone(lone_jobs), options)
        rate_by_callers = {
            in_flight: count / min(through.saturated(jobs["int8"], in_flight)()[0] for _ in range(2))
            for in_flight in IN_FLIGHT
        }
        callers = max(rate_by_callers, key=lambda in_flight: rate_by_callers[in_flight])
        report.figures["callers at saturation"] = callers
        through.sizes.clear()
        compare(
            report, "vs_offline", offline(jobs["int8"], best_batch_size),
            through.saturated(jobs["int8"], callers), options, answers=count,
        )  # fmt: skip
        report.figures["median batch at saturation"] = sorted(through.sizes)[len(through.sizes) // 2]
    compare(
        report, "int8_vs_fp32", offline(jobs["fp32"], best_batch_size), offline(jobs["int8"], best_batch_size),
        options, answers=count,
    )  # fmt: skip
    for name, model in snapshots["int8"].manifest.models.items():
        report.figures[f"{name}: fp32 bytes"] = model.fp32.size_bytes
        report.figures[f"{name}: int8 bytes"] = 0 if model.int8 is None else model.int8.size_bytes


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    report = Report("live", ("onnxruntime", "faiss-cpu", "uvloop"))
    with own_server() as server, TemporaryDirectory(prefix="larder-bench-") as folder:
        measure(report, make_case(Path(folder), server.url, options.quick), options)
    report.show(options)


if __name__ == "__main__":
    main()

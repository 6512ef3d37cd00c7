"""Near-match reuse beside live inference without it: answers/s through the micro-batcher, 256 callers.

The stream is of histories of 30 items and more that no tier knows, half of them a recent one and one more item, over
some 47,000 items x 128 (quick: 29,000) in a flat index. The policy has learned from the same stream before it is
measured, and goes on learning.

- `live_vs_off`: answers/s with reuse over those without (at least 1.5 is wanted); by processor time in the figures.

Figures: what became of the inputs, the share reused or proven, the error of what was reused by the policy's own audits
(with its interval) and by computing every answer again.
"""

import asyncio
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import uvloop

from cache.config.serving import NearConfig
from cache.records import decode_record
from precompute.config.settings import NightConfig, ReferenceConfig, TableConfig
from precompute.reference.train import train_reference
from serving.config.settings import ServingConfig
from serving.engine.batch_inference import compute
from serving.engine.micro_batcher import ComputeBatch, ComputedRecord, InferenceJob, MicroBatcher
from serving.generations.snapshot import Snapshot
from serving.near.near_matches import NearMatches
from serving.process.resources import freeze_objects
from tests.bench.live import Measured, compare, open_snapshot
from tests.bench.near.stream import HistoryStream
from tests.bench.tools.harness import Options, Report, parse
from tests.bench.tools.place import own_server
from tests.integration.nights import DATA_UNTIL, histories, prepare, publish_night
from tests.integration.serving_app import settings

TABLE, K, ITEMS, DIMS, CALLERS = "user_topk", 100, 80_000, 128, 256
LEARNED_MAX, ENOUGH = 20_000, 350
"""Inputs after which it is measured in any case, or of a thousand so many are reused."""


def make_night(folder: Path, redis_url: str, quick: bool) -> NightConfig:
    """A published night of one table of lists."""
    night = prepare(folder, redis_url, users=4_000 if quick else 10_000, items=ITEMS)
    night = replace(
        night, bundle="wide", reference=ReferenceConfig(dims=DIMS, choose=False),
        tables={TABLE: TableConfig("user_topk", k=K)}, index="flat",
    )  # fmt: skip
    train_reference(night, data_until=DATA_UNTIL)
    publish_night(night, DATA_UNTIL)
    return night


def learn(near: NearMatches, stream: HistoryStream) -> int:
    """Let the policy learn until it reuses enough of a thousand inputs; return the number of inputs needed."""
    learned = 0
    while learned < LEARNED_MAX:
        learned += 1_000
        reused_before = near.outcome_counts_by_table[TABLE]["reuse"]
        jobs = stream.jobs(1_000)
        for at in range(0, len(jobs), CALLERS):
            compute(jobs[at : at + CALLERS], reuse=near)
        if near.outcome_counts_by_table[TABLE]["reuse"] - reused_before > ENOUGH:
            break
    return learned


def through(
    runner: asyncio.Runner, pool: ThreadPoolExecutor, inference: ComputeBatch, stream: Callable[[], list[InferenceJob]]
) -> Measured:
    """Callers through the micro-batcher who each ask again as soon as they are answered."""
    config = ServingConfig()

    async def work(jobs: list[InferenceJob]) -> None:
        batcher = MicroBatcher(
            pool, worker_count=config.live_workers, batch_size_max=config.live_batch, queued_jobs_max=config.live_queue,
            queued_bytes_max=config.live_queue_bytes, compute_batch=inference,
        )  # fmt: skip
        pending_jobs = iter(jobs)

        async def caller() -> None:
            for job in pending_jobs:
                answer = await batcher.infer(job)
                if not isinstance(answer, ComputedRecord):
                    raise TypeError(f"not an answer: {answer}")

        await asyncio.gather(*(caller() for _ in range(CALLERS)))

    def run() -> tuple[float, float]:
        jobs = stream()
        started_at, spent = time.perf_counter(), time.process_time()
        runner.run(work(jobs))
        return time.perf_counter() - started_at, time.process_time() - spent

    return run


def true_error(near: NearMatches, snapshot: Snapshot, jobs: list[InferenceJob], overlap: float) -> tuple[int, int]:
    """Answers of these that were reused, and those of them that have too little of live's list."""
    reused = wrong = 0
    layout = snapshot.manifest.tables[TABLE].layout
    for at in range(0, len(jobs), CALLERS):
        part = jobs[at : at + CALLERS]
        for near_answer, live_answer in zip(compute(part, reuse=near), compute(part), strict=True):
            if (
                isinstance(near_answer, ComputedRecord)
                and isinstance(live_answer, ComputedRecord)
                and near_answer.near_distance is not None
            ):
                lists = [decode_record(layout, answer.record).item_ordinals for answer in (near_answer, live_answer)]
                reused += 1
                wrong += len(np.intersect1d(*lists)) < overlap * len(lists[1])  # type: ignore[call-overload, arg-type]
    return reused, wrong


def measure(report: Report, night: NightConfig, options: Options) -> None:
    """The ratio, and what became of the inputs."""
    snapshot = open_snapshot(settings(night), "int8")
    config = NearConfig()
    near = NearMatches({TABLE: config})
    known_histories = list(histories(night, DATA_UNTIL).values())
    stream = HistoryStream(snapshot, TABLE, known_histories)
    report.figures["inputs learned from before"] = learn(near, stream)
    report.figures["items"] = snapshot.items.count
    count = 1_024 if options.quick else 4_096
    freeze_objects()
    near.outcome_counts_by_table[TABLE].clear()
    with ThreadPoolExecutor(1, "larder-live") as pool, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        # Each service gets a stream of its own: the other one has not seen its inputs.
        baseline_stream = HistoryStream(snapshot, TABLE, known_histories, seed=1)
        reuse = functools.partial(compute, reuse=near)
        compare(
            report, "live_vs_off",
            through(runner, pool, compute, functools.partial(baseline_stream.jobs, count)),
            through(runner, pool, reuse, functools.partial(stream.jobs, count)),
            options, answers=count,
        )  # fmt: skip
    total = sum(near.outcome_counts_by_table[TABLE].values())
    for outcome, number in sorted(near.outcome_counts_by_table[TABLE].items()):
        report.figures[f"share of inputs: {outcome}"] = round(number / total, 4)
    for _, _, policy in near.policies():
        low, high = policy.error_interval
        report.figures["error by audits"] = f"{policy.wrong_audits}/{policy.audits}, {low:.4f} to {high:.4f}"
    reused, wrong = true_error(near, snapshot, stream.jobs(2 * count), config.overlap)
    report.figures["error of what was reused, computed again"] = f"{wrong}/{reused}"


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    report = Report("near", ("onnxruntime", "faiss-cpu", "uvloop"))
    with own_server() as server, TemporaryDirectory(prefix="larder-bench-") as folder:
        measure(report, make_night(Path(folder), server.url, options.quick), options)
    report.show(options)


if __name__ == "__main__":
    main()

"""Monitor of the quality of answers: computes sampled answers again, in a thread of lowest priority."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, NamedTuple

from cache.format.ids import hash_id
from cache.l2.control_plane import ControlPlane
from cache.process.background_loops import BackgroundLoops, cancel_and_wait
from cache.tiers.l1 import LocalKey, LocalTier
from cache.usage.hot_keys import COLD_WINDOW, SharedHotKeys
from serving.admission.controller import Admission
from serving.config.settings import ServingConfig
from serving.engine.answer_observer import AnswerObserver, AnswerSample, AnswerSampler, RecentNames
from serving.engine.micro_batcher import MicroBatcher
from serving.generations.heartbeat import RedisClock
from serving.generations.holder import GenerationHolder
from serving.generations.snapshot import Snapshot
from serving.metrics.registry import Metrics
from serving.process.resources import LOWEST_PRIORITY_NICE, lower_thread_priority
from serving.quality.comparison import AnswerComparison, NightInputProbe, SampleSkipped, compare, open_night_inputs
from serving.quality.results import QualityResults, SharedReport
from serving.usage.hot_keys import HotKeySketch
from serving.usage.table_usage import ReadHashes, TableUsage

IDLE_PAUSE_S = 0.2
"""Seconds between checks while the queue is empty or live inference is busy."""

HELP_BY_EVENT: Mapping[str, str] = {
    "cold_reported": "Ids added to the sketch of requested ids without a stored answer",
    "cold_reports_failed": "Failed reports to that sketch",
    "reads_left_out": "Reads not counted for the share of entities read",
}
"""Help text by event."""

Step = Callable[[], Coroutine[Any, Any, None]]


class QualityMonitor:
    """Quality monitor; `to_json` is for the dashboard, `periodic_steps` are run by the background loops."""

    def __init__(
        self,
        config: ServingConfig,
        answer_observer: AnswerObserver,
        metrics: Metrics,
        local: LocalTier,
        control: ControlPlane,
        holder: GenerationHolder,
        recent_names: RecentNames,
        batcher: MicroBatcher,
        admission: Admission,
        clock: RedisClock,
        replica_name: str,
        loops: BackgroundLoops | None = None,
    ) -> None:
        self._loops = BackgroundLoops() if loops is None else loops

        def get_live_snapshot() -> Any:
            return holder.live

        cold_names, self._read_hashes = RecentNames(), ReadHashes()
        answer_observer.on_unknown_id.append(cold_names.append)
        answer_observer.on_l2_read.append(self._read_hashes.add)
        answer_observer.sampler = AnswerSampler(config.sampled_answers_per_mille)
        self.cold_sketch = HotKeySketch(SharedHotKeys(control), cold_names, get_live_snapshot, clock, COLD_WINDOW)
        self._results = QualityResults()
        self._table_usage = TableUsage(control, self._read_hashes, metrics, recent_names.all_names, get_live_snapshot)
        self._shared_report = SharedReport(
            control, replica_name, self._results, self._table_usage, get_live_snapshot, clock, config.quality_s
        )
        self._executor = ThreadPoolExecutor(
            1, "larder-quality", initializer=lower_thread_priority, initargs=(LOWEST_PRIORITY_NICE,)
        )
        self._answer_judge = AnswerJudge(
            answer_observer.sampler,
            self._results,
            local,
            get_live_snapshot=get_live_snapshot,
            find_snapshot=holder.find_snapshot,
            open_night_inputs=partial(open_night_inputs, config.store()),
            is_model_busy=lambda: batcher.queued > 0 or admission.is_loop_behind or admission.live_admitted_share < 1,
            executor=self._executor,
            cpu_share=config.quality_cpu_share,
            inference_threads=config.live_threads,
        )
        self._is_sampling = config.sampled_answers_per_mille > 0
        self._judge_task: asyncio.Task[None] | None = None
        self._report_interval_s = config.quality_s
        for collector in (self._results, self._table_usage):
            metrics.registry.register(collector)
        self.to_json = self._shared_report.to_json

    def periodic_steps(self) -> list[tuple[str, float, Step]]:
        """Return the periodic steps: the name of the loop, the seconds between two runs (0: none), and the function."""
        return [
            ("quality_report", self._report_interval_s, self._shared_report.report),
            ("cold_ids", self._report_interval_s, self.cold_sketch.report),
        ]

    def internal_counters(self) -> dict[str, float]:
        """Return event counts by name."""
        return {
            "cold_reported": self.cold_sketch.reported_count,
            "cold_reports_failed": self.cold_sketch.failed_count,
            "reads_left_out": self._read_hashes.left_out_hash_count,
        }

    async def start(self) -> None:
        """Start sampling, unless the share of sampled answers is 0."""
        if self._is_sampling:
            self._judge_task = self._loops.start("quality_samples", self._answer_judge.judge_next)

    async def aclose(self) -> None:
        """Stop sampling, and withdraw this replica's part of the shared report."""
        await cancel_and_wait([self._judge_task])
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._report_interval_s:
            await self._shared_report.sign_off()


class JudgedSample(NamedTuple):
    """Comparison of a sample, or the reason why there is none, and its processor time."""

    outcome: AnswerComparison | SampleSkipped
    cpu_s: float


@dataclass(slots=True, eq=False)
class AnswerJudge:
    """Judges answers in at most `cpu_share` of one core, by the thread's CPU clock; idle while `is_model_busy()`.

    `inference_threads` is the number of threads of an inference; only the first is measured, and its time is
    multiplied.
    """

    sampler: AnswerSampler
    results: QualityResults
    local: LocalTier
    _: KW_ONLY
    get_live_snapshot: Callable[[], Snapshot | None]
    find_snapshot: Callable[[str], Snapshot | None]
    open_night_inputs: Callable[[Snapshot], NightInputProbe | None]
    is_model_busy: Callable[[], bool]
    executor: Executor
    cpu_share: float
    inference_threads: int
    _inputs_by_generation: dict[str, NightInputProbe | None] = field(init=False, default_factory=dict)

    async def judge_next(self) -> None:
        """Judge a waiting answer, if any, and pause; on an unexpected error count the answer and raise the error."""
        try:
            pause_s = await self.step()
        except Exception:
            self.results.skipped_by_reason["failed"] += 1
            raise
        await asyncio.sleep(pause_s)

    async def step(self) -> float:
        """Judge a waiting answer if the model is free; return the seconds to pause, to stay within the CPU budget."""
        self._inputs_by_generation = {
            generation: night_inputs
            for generation, night_inputs in self._inputs_by_generation.items()
            if self.find_snapshot(generation)
        }
        if (live_snapshot := self.get_live_snapshot()) is not None:
            self.results.begin_release(live_snapshot, time.time())
        if self.is_model_busy():
            self.results.skipped_by_reason["overload"] += len(self.sampler)
            self.sampler.clear()
        self.results.skipped_by_reason["queue_full"] = self.sampler.dropped_count
        sample = self.sampler.next()
        if sample is None:
            return IDLE_PAUSE_S
        snapshot = self.find_snapshot(sample.generation)
        if snapshot is None:
            self.results.skipped_by_reason["gone"] += 1
            return 0.0
        loop = asyncio.get_running_loop()
        judged_sample = await loop.run_in_executor(
            self.executor, self._judge, self._with_stored_record(sample, snapshot), snapshot
        )
        self.results.cpu_s += judged_sample.cpu_s
        if isinstance(judged_sample.outcome, SampleSkipped):
            self.results.skipped_by_reason[judged_sample.outcome.reason] += 1
        else:
            self.results.add(judged_sample.outcome, sample.generation)
        return judged_sample.cpu_s / self.cpu_share

    def _with_stored_record(self, sample: AnswerSample, snapshot: Snapshot) -> AnswerSample:
        """Add the stored record if it is still in L1, since the answer may have only a few of its items."""
        table = snapshot.manifest.tables.get(sample.table)
        if sample.stored_record or sample.producer != "batch" or table is None:
            return sample
        key = hash_id(sample.raw_id, snapshot.directories[table.entity].seed)
        entry = self.local.get(LocalKey(sample.generation, sample.table, key))
        if entry is None or entry.input_digest is not None:
            return sample
        return sample._replace(stored_record=entry.record)

    def _judge(self, sample: AnswerSample, snapshot: Snapshot) -> JudgedSample:
        cpu_start_s = time.thread_time()
        outcome: AnswerComparison | SampleSkipped
        try:
            if snapshot.generation not in self._inputs_by_generation:
                self._inputs_by_generation[snapshot.generation] = self.open_night_inputs(snapshot)
            outcome = compare(sample, snapshot, self._inputs_by_generation[snapshot.generation])
        except SampleSkipped as skipped:
            outcome = SampleSkipped(skipped.reason)  # without frames, which would keep the generation alive
        return JudgedSample(outcome, (time.thread_time() - cpu_start_s) * self.inference_threads)

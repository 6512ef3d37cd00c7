"""Computes picked answers once more, one after the other, in a thread that everything else comes before."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

from cache.format.ids import hash_id
from cache.tiers.l1 import LocalKey, LocalTier
from serving.generations.snapshot import Snapshot
from serving.quality.comparison import AnswerComparison, SampleSkipped, compare
from serving.quality.night_inputs import NightInputs
from serving.quality.results import QualityResults
from serving.usage.answer_sampling import AnswerSample, AnswerSampler

log = logging.getLogger(__name__)

IDLE_S = 0.2
"""Seconds between looks at an empty queue, and while live requests come first."""


class JudgedSample(NamedTuple):
    """A sample, or why there is none, and the processor time that it took."""

    outcome: AnswerComparison | SampleSkipped
    cpu_s: float


@dataclass(slots=True, eq=False)
class AnswerJudge:
    """Judges answers in at most `cpu_share` of one core, by the thread's own clock; idle while `is_busy` says so.

    `threads`: those of one inference, of which only the first is measured; all are counted like it.
    """

    sampler: AnswerSampler
    results: QualityResults
    local: LocalTier
    _: KW_ONLY
    live: Callable[[], Snapshot | None]
    find_snapshot: Callable[[str], Snapshot | None]
    open_inputs: Callable[[Snapshot], NightInputs | None]
    is_busy: Callable[[], bool]
    executor: Executor
    cpu_share: float
    threads: int
    _inputs: dict[str, NightInputs | None] = field(init=False, default_factory=dict)

    async def judge_next(self) -> None:
        """Judge an answer if one waits, and pause; an answer that cannot be judged is counted, and raises."""
        try:
            pause_s = await self.step()
        except Exception:
            self.results.skipped["failed"] += 1
            raise
        await asyncio.sleep(pause_s)

    async def step(self) -> float:
        """Judges an answer if one waits and the model is free; returns the seconds to pause, to keep the budget."""
        self._inputs = {
            name: night_inputs
            for name, night_inputs in self._inputs.items()
            if self.find_snapshot(name)
        }
        if (live := self.live()) is not None:
            self.results.begin(live, time.time())
        if self.is_busy():
            self.results.skipped["overload"] += len(self.sampler)
            self.sampler.clear()
        self.results.skipped["queue_full"] = self.sampler.dropped_count
        sample = self.sampler.next()
        if sample is None:
            return IDLE_S
        snapshot = self.find_snapshot(sample.generation)
        if snapshot is None:
            self.results.skipped["gone"] += 1
            return 0.0
        loop = asyncio.get_running_loop()
        judged = await loop.run_in_executor(
            self.executor, self._judge, self._completed(sample, snapshot), snapshot
        )
        self.results.cpu_s += judged.cpu_s
        if isinstance(judged.outcome, SampleSkipped):
            self.results.skipped[judged.outcome.reason] += 1
        else:
            self.results.add(judged.outcome, sample.generation)
        return judged.cpu_s / self.cpu_share

    def _completed(self, sample: AnswerSample, snapshot: Snapshot) -> AnswerSample:
        """Adds the stored record, if it is still in L1: a caller may have been sent only a few of its items."""
        table = snapshot.manifest.tables.get(sample.table)
        if sample.record or sample.producer != "batch" or table is None:
            return sample
        key = hash_id(sample.raw, snapshot.directories[table.entity].seed)
        entry = self.local.get(LocalKey(sample.generation, sample.table, key))
        if entry is None or entry.digest is not None:
            return sample
        return sample._replace(record=entry.record)

    def _judge(self, sample: AnswerSample, snapshot: Snapshot) -> JudgedSample:
        cpu_start_s = time.thread_time()
        outcome: AnswerComparison | SampleSkipped
        try:
            if snapshot.generation not in self._inputs:
                self._inputs[snapshot.generation] = self.open_inputs(snapshot)
            outcome = compare(sample, snapshot, self._inputs[snapshot.generation])
        except SampleSkipped as skipped:
            outcome = SampleSkipped(skipped.reason)  # without the frames, which hold the generation
        return JudgedSample(outcome, (time.thread_time() - cpu_start_s) * self.threads)

"""Micro-batches of live inference in threads: started without delay, as large as the measured cost allows."""

import asyncio
import contextlib
import math
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cache.model.input_preparation import LiveInput
from cache.model.new_items import NO_ELIGIBLE_NEW_ITEMS, EligibleNewItems
from serving.generations.snapshot import Snapshot
from serving.requests.reasons import LiveReason

_COST_DECAY = 0.95
"""Factor by which each batch reduces the weight of earlier ones, so that about the last twenty count."""


class BatchCost:
    """Estimate of a batch's seconds as `fixed + per_input * size`: least squares with decaying weights."""

    def __init__(self) -> None:
        self._batch_weight = self._size_sum = self._seconds_sum = self._size_square_sum = self._product_sum = 0.0
        self._fade_factor = 1.0

    def add(self, batch_size: int, batch_seconds: float) -> None:
        """Add a batch's size and seconds; reset a faded estimate that turns out to be far too high."""
        if self._fade_factor < 1 and batch_seconds < self.expected_batch_s(batch_size) / self._fade_factor / 2:
            self._batch_weight = self._size_sum = self._seconds_sum = self._size_square_sum = self._product_sum = 0.0
        self._fade_factor = 1.0
        self._batch_weight = self._batch_weight * _COST_DECAY + 1
        self._size_sum = self._size_sum * _COST_DECAY + batch_size
        self._seconds_sum = self._seconds_sum * _COST_DECAY + batch_seconds
        self._size_square_sum = self._size_square_sum * _COST_DECAY + batch_size * batch_size
        self._product_sum = self._product_sum * _COST_DECAY + batch_size * batch_seconds

    def fade(self) -> None:
        """Lower the estimate a little: an estimate that prevents all batches could never be corrected."""
        self._fade_factor *= 0.9

    def expected_batch_s(self, batch_size: int) -> float:
        """Return the expected seconds of a batch of this size; 0 without evidence."""
        fixed_s, per_input_s = self._fixed_and_per_input_s()
        return (fixed_s + per_input_s * batch_size) * self._fade_factor

    def batch_size_within(self, available_s: float, batch_size_max: int) -> int:
        """Return the largest batch size, up to `batch_size_max`, that is expected to end in time."""
        fixed_s, per_input_s = self._fixed_and_per_input_s()
        remaining_s = available_s / self._fade_factor - fixed_s
        if remaining_s < 0:
            return 0
        return batch_size_max if remaining_s >= per_input_s * batch_size_max else int(remaining_s / per_input_s)

    def _fixed_and_per_input_s(self) -> tuple[float, float]:
        if not self._batch_weight:
            return 0.0, 0.0
        mean_size, mean_seconds = (self._size_sum / self._batch_weight, self._seconds_sum / self._batch_weight)
        size_variance = self._size_square_sum / self._batch_weight - mean_size * mean_size
        if size_variance < 0.01 * mean_size:  # all sizes were equal: the two parts cannot be separated
            return mean_seconds, 0.0
        per_input_s = (self._product_sum / self._batch_weight - mean_size * mean_seconds) / size_variance
        per_input_s = min(max(per_input_s, 0.0), mean_seconds / mean_size)
        return mean_seconds - per_input_s * mean_size, per_input_s


class LiveUnavailable(Exception):
    """Live has no answer for this input now; `reason` is a `LiveReason`."""

    def __init__(self, live_failure_reason: str) -> None:
        super().__init__(live_failure_reason)
        self.reason = live_failure_reason


@dataclass(slots=True, eq=False)
class InferenceJob:
    """Queued input for a table of a snapshot; joining requests with a later one extend `deadline_at` (monotonic)."""

    snapshot: Snapshot
    table: str
    live_input: LiveInput
    id_fingerprint: int
    input_size_bytes: int
    deadline_at: float = math.inf
    queued_at: float = 0.0
    may_reuse_near_answer: bool = False
    """True if the answer to a near input will do."""
    newer_input: object = None
    """Newer input that replaces `live_input`, created by the feature that computes from it."""
    eligible_new_items: EligibleNewItems = NO_ELIGIBLE_NEW_ITEMS
    """New items that the list may name."""
    seen_item_ordinals: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Ordinals of the user's past items, which the list leaves out in addition to those of `live_input`."""

    @property
    def queue_name(self) -> str:
        """Name of the queue of jobs that share batches, and their cost estimate."""
        if self.newer_input is not None:
            return f"{self.table} with a newer input"
        return f"{self.table} with new items" if self.eligible_new_items.items else self.table


@dataclass(frozen=True, slots=True, eq=False)
class ComputedRecord:
    """Record computed by live; the model lacks `unknown_id_count` ids of the history (None: not counted).

    `near_distance` is the distance of the input whose answer is reused, None for a computed record.
    `record_without_new_items` is the same record without new items, if it has any.
    """

    record: bytes
    unknown_id_count: int | None = None
    near_distance: float | None = None
    record_without_new_items: bytes | None = None


InferenceOutcome = ComputedRecord | Exception
ComputeBatch = Callable[[Sequence[InferenceJob]], list[InferenceOutcome]]
QueuedJob = tuple[InferenceJob, asyncio.Future[ComputedRecord]]


class MicroBatcher:
    """Batcher of jobs of the same snapshot and table; a full queue refuses immediately, so that lower rungs answer.

    An idle worker takes all queued jobs; while all workers are busy, jobs gather for the next batch. A batch is limited
    to the size that, by the cost of recent batches, ends before the earliest deadline in it.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        worker_count: int,
        batch_size_max: int,
        queued_jobs_max: int,
        queued_bytes_max: int,
        compute_batch: ComputeBatch,
        observe_batch: Callable[[int, float], None] = lambda _size, _seconds: None,
        monotonic_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._idle_worker_count = worker_count
        self._batch_size_max = batch_size_max
        self._queued_jobs_max = queued_jobs_max
        self._queued_bytes_max = queued_bytes_max
        self._compute_batch = compute_batch
        self._observe_batch = observe_batch
        self._monotonic_clock = monotonic_clock
        self._queue_by_key: dict[tuple[int, str], deque[QueuedJob]] = {}
        self._cost_by_queue_name: defaultdict[str, BatchCost] = defaultdict(BatchCost)
        self._is_pump_scheduled = False
        self.queued = 0
        self.queued_bytes = 0
        self.hopeless_count = 0
        """Number of jobs that were not computed because they could not have ended in time."""

    def infer(self, job: InferenceJob) -> "asyncio.Future[ComputedRecord]":
        """Queue one job; return its future record, or LiveUnavailable (full queue, too little time, error)."""
        loop = asyncio.get_running_loop()
        computed_future: asyncio.Future[ComputedRecord] = loop.create_future()
        if self.queued >= self._queued_jobs_max or self.queued_bytes + job.input_size_bytes > self._queued_bytes_max:
            computed_future.set_exception(LiveUnavailable(LiveReason.BUSY))
            return computed_future
        job.queued_at = self._monotonic_clock()
        self._queue_by_key.setdefault((id(job.snapshot), job.queue_name), deque()).append((job, computed_future))
        self.queued += 1
        self.queued_bytes += job.input_size_bytes
        if self._idle_worker_count and not self._is_pump_scheduled:
            # At the end of this iteration of the event loop, so that its jobs share one batch.
            self._is_pump_scheduled = True
            loop.call_soon(self._start_batches)
        return computed_future

    def longest_wait_share(self) -> float:
        """Return the largest share of its time that a queue's oldest input has waited; 0 if all queues are empty."""
        now_s = self._monotonic_clock()
        oldest_jobs = [queued_jobs[0][0] for queued_jobs in self._queue_by_key.values() if queued_jobs]
        waits_and_limits = [(now_s - job.queued_at, job.deadline_at - job.queued_at) for job in oldest_jobs]
        return max((waited_s / max(available_s, 1e-6) for waited_s, available_s in waits_and_limits), default=0.0)

    def _start_batches(self) -> None:
        self._is_pump_scheduled = False
        while self._idle_worker_count and self._queue_by_key:
            queue_key = next(iter(self._queue_by_key))
            queued_jobs = self._queue_by_key.pop(queue_key)
            batch = self._pop_batch(queued_jobs, self._cost_by_queue_name[queue_key[1]])
            if queued_jobs:
                self._queue_by_key[queue_key] = queued_jobs  # behind the other queues
            if batch:
                self._start_batch(batch)

    def _pop_batch(self, queued_jobs: deque[QueuedJob], cost: BatchCost) -> list[QueuedJob]:
        """Take the next batch of a queue, oldest first; drop cancelled jobs, fail those that cannot end in time."""
        batch: list[QueuedJob] = []
        now_s, size_limit = self._monotonic_clock(), self._batch_size_max
        while queued_jobs and len(batch) < size_limit:
            job, computed_future = queued_jobs[0]
            if not computed_future.done():
                size_in_time = cost.batch_size_within(job.deadline_at - now_s, size_limit)
                if size_in_time < 1:
                    self.hopeless_count += 1
                    cost.fade()
                    computed_future.set_exception(LiveUnavailable(LiveReason.TIMEOUT))
                elif size_in_time <= len(batch):
                    break  # too little time for a batch this large, but enough for the next one
                else:
                    size_limit = size_in_time
                    batch.append((job, computed_future))
            queued_jobs.popleft()
            self.queued -= 1
            self.queued_bytes -= job.input_size_bytes
        return batch

    def _start_batch(self, batch: list[QueuedJob]) -> None:
        self._idle_worker_count -= 1
        loop = asyncio.get_running_loop()
        batch_started_at = self._monotonic_clock()

        def run_batch() -> None:
            batch_error: Exception | None = None
            outcomes: Sequence[InferenceOutcome] = ()
            try:
                outcomes = self._compute_batch([job for job, _ in batch])
            except Exception as failed:
                batch_error = without_frames(failed)
            # Directly to the loop: an asyncio future in between would cost a single request two more iterations.
            report_outcomes(outcomes, batch_error, self._monotonic_clock())

        def report_outcomes(
            outcomes: Sequence[InferenceOutcome], batch_error: Exception | None, batch_ended_at: float
        ) -> None:
            # If the loop is closed, no caller waits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(
                    self._finish_batch, batch, batch_started_at, outcomes, batch_error, batch_ended_at
                )

        def report_failure(run_future: "Future[None]") -> None:
            if run_future.cancelled() or run_future.exception() is not None:
                report_outcomes((), LiveUnavailable(LiveReason.FAILED), batch_started_at)

        try:
            self._executor.submit(run_batch).add_done_callback(report_failure)
        except RuntimeError:  # shut down
            self._idle_worker_count += 1
            _resolve(batch, [LiveUnavailable(LiveReason.FAILED)] * len(batch))

    def _finish_batch(
        self,
        batch: list[QueuedJob],
        batch_started_at: float,
        outcomes: Sequence[InferenceOutcome],
        batch_error: Exception | None,
        batch_ended_at: float,
    ) -> None:
        self._idle_worker_count += 1
        if batch_error is not None:
            outcomes = [batch_error] * len(batch)
        else:
            self._observe_batch(len(batch), batch_ended_at - batch_started_at)
            self._cost_by_queue_name[batch[0][0].queue_name].add(len(batch), batch_ended_at - batch_started_at)
        if self._queue_by_key:  # start the next batch first, so that the model works while answers are delivered
            self._start_batches()
        _resolve(batch, outcomes)


def _resolve(batch: Sequence[QueuedJob], outcomes: Sequence[InferenceOutcome]) -> None:
    for (_, computed_future), outcome in zip(batch, outcomes, strict=True):
        if computed_future.done():
            continue
        if isinstance(outcome, ComputedRecord):
            computed_future.set_result(outcome)
        else:
            computed_future.set_exception(outcome)


def without_frames(error: Exception) -> Exception:
    """Return the error with its traceback as text: frames would keep the jobs and their generation alive."""
    if not hasattr(error, "__notes__"):
        error.add_note("".join(traceback.format_tb(error.__traceback__)).rstrip())
    return error.with_traceback(None)

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

    def add(self, batch_size: int, seconds: float) -> None:
        """Add a batch's size and seconds; reset a faded estimate that turns out to be far too high."""
        if self._fade_factor < 1 and seconds < self.expected_s(batch_size) / self._fade_factor / 2:
            self._batch_weight = self._size_sum = self._seconds_sum = self._size_square_sum = self._product_sum = 0.0
        self._fade_factor = 1.0
        self._batch_weight = self._batch_weight * _COST_DECAY + 1
        self._size_sum = self._size_sum * _COST_DECAY + batch_size
        self._seconds_sum = self._seconds_sum * _COST_DECAY + seconds
        self._size_square_sum = self._size_square_sum * _COST_DECAY + batch_size * batch_size
        self._product_sum = self._product_sum * _COST_DECAY + batch_size * seconds

    def fade(self) -> None:
        """Lower the estimate a little: an estimate that prevents all batches could never be corrected."""
        self._fade_factor *= 0.9

    def expected_s(self, batch_size: int) -> float:
        """Return the expected seconds of a batch of this size; 0 without evidence."""
        fixed_s, per_input_s = self._fit_line()
        return (fixed_s + per_input_s * batch_size) * self._fade_factor

    def size_within(self, seconds: float, size_max: int) -> int:
        """Return the largest batch size, up to `size_max`, that is expected to end in time."""
        fixed_s, per_input_s = self._fit_line()
        remaining_s = seconds / self._fade_factor - fixed_s
        if remaining_s < 0:
            return 0
        return size_max if remaining_s >= per_input_s * size_max else int(remaining_s / per_input_s)

    def _fit_line(self) -> tuple[float, float]:
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

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True, eq=False)
class InferenceJob:
    """Queued input for a table of a snapshot; joining requests with a later deadline extend `deadline` (monotonic)."""

    snapshot: Snapshot
    table: str
    live_input: LiveInput
    fingerprint: int
    size_bytes: int
    deadline: float = math.inf
    queued_at: float = 0.0
    may_reuse: bool = False
    """True if the answer to a near input will do."""
    newer_input: object = None
    """Newer input that replaces `live_input`, created by the feature that computes from it."""
    eligible_new_items: EligibleNewItems = NO_ELIGIBLE_NEW_ITEMS
    """New items that the list may name."""
    seen_ordinals: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
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

    `near` is the distance of the input whose answer is reused, None for a computed record. `record_without_new_items`
    is the same record without new items, if it has any.
    """

    record: bytes
    unknown_id_count: int | None = None
    near: float | None = None
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
        max_batch: int,
        max_queue: int,
        max_queue_bytes: int,
        compute: ComputeBatch,
        observe: Callable[[int, float], None] = lambda _size, _seconds: None,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._idle_worker_count = worker_count
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._max_queue_bytes = max_queue_bytes
        self._compute = compute
        self._observe = observe
        self._timer = timer
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
        if self.queued >= self._max_queue or self.queued_bytes + job.size_bytes > self._max_queue_bytes:
            computed_future.set_exception(LiveUnavailable(LiveReason.BUSY))
            return computed_future
        job.queued_at = self._timer()
        self._queue_by_key.setdefault((id(job.snapshot), job.queue_name), deque()).append((job, computed_future))
        self.queued += 1
        self.queued_bytes += job.size_bytes
        if self._idle_worker_count and not self._is_pump_scheduled:
            # At the end of this iteration of the event loop, so that its jobs share one batch.
            self._is_pump_scheduled = True
            loop.call_soon(self._start_batches)
        return computed_future

    def longest_wait_share(self) -> float:
        """Return the largest share of its time that a queue's oldest input has waited; 0 if all queues are empty."""
        now_s = self._timer()
        oldest_jobs = [queued_jobs[0][0] for queued_jobs in self._queue_by_key.values() if queued_jobs]
        waits_and_limits = [(now_s - job.queued_at, job.deadline - job.queued_at) for job in oldest_jobs]
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
        now_s, size_limit = self._timer(), self._max_batch
        while queued_jobs and len(batch) < size_limit:
            job, computed_future = queued_jobs[0]
            if not computed_future.done():
                size_in_time = cost.size_within(job.deadline - now_s, size_limit)
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
            self.queued_bytes -= job.size_bytes
        return batch

    def _start_batch(self, batch: list[QueuedJob]) -> None:
        self._idle_worker_count -= 1
        loop = asyncio.get_running_loop()
        started = self._timer()

        def run_batch() -> None:
            error: Exception | None = None
            outcomes: Sequence[InferenceOutcome] = ()
            try:
                outcomes = self._compute([job for job, _ in batch])
            except Exception as failed:
                error = without_frames(failed)
            # Directly to the loop: an asyncio future in between would cost a single request two more iterations.
            report_outcomes(outcomes, error, self._timer())

        def report_outcomes(outcomes: Sequence[InferenceOutcome], error: Exception | None, ended_at: float) -> None:
            # If the loop is closed, no caller waits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._finish_batch, batch, started, outcomes, error, ended_at)

        def report_failure(run_future: "Future[None]") -> None:
            if run_future.cancelled() or run_future.exception() is not None:
                report_outcomes((), LiveUnavailable(LiveReason.FAILED), started)

        try:
            self._executor.submit(run_batch).add_done_callback(report_failure)
        except RuntimeError:  # shut down
            self._idle_worker_count += 1
            _resolve(batch, [LiveUnavailable(LiveReason.FAILED)] * len(batch))

    def _finish_batch(
        self,
        batch: list[QueuedJob],
        started: float,
        outcomes: Sequence[InferenceOutcome],
        error: Exception | None,
        ended_at: float,
    ) -> None:
        self._idle_worker_count += 1
        if error is not None:
            outcomes = [error] * len(batch)
        else:
            self._observe(len(batch), ended_at - started)
            self._cost_by_queue_name[batch[0][0].queue_name].add(len(batch), ended_at - started)
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

"""Micro-batches of live inference off the event loop: never delayed, as large as the measured cost allows."""

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
"""Weight of all earlier batches per further batch: about the last twenty count."""


class BatchCost:
    """Estimate of a batch's seconds as `fixed + per_input * size`: a least-squares line whose evidence fades."""

    def __init__(self) -> None:
        self._weight = self._sizes = self._seconds = self._squares = self._products = 0.0
        self._faded = 1.0

    def add(self, size: int, seconds: float) -> None:
        """Add a batch's size and seconds; drop a faded estimate that proves far too high."""
        if self._faded < 1 and seconds < self.of(size) / self._faded / 2:
            self._weight = self._sizes = self._seconds = self._squares = self._products = 0.0
        self._faded = 1.0
        self._weight = self._weight * _COST_DECAY + 1
        self._sizes = self._sizes * _COST_DECAY + size
        self._seconds = self._seconds * _COST_DECAY + seconds
        self._squares = self._squares * _COST_DECAY + size * size
        self._products = self._products * _COST_DECAY + size * seconds

    def fade(self) -> None:
        """Lower the estimate a little: it could never be corrected by batches that it keeps from running."""
        self._faded *= 0.9

    def of(self, size: int) -> float:
        """Return the expected seconds of a batch of this size; 0 without evidence."""
        fixed, per_input_s = self._line()
        return (fixed + per_input_s * size) * self._faded

    def size_within(self, seconds: float, size_max: int) -> int:
        """Return the largest batch size, up to `size_max`, that is expected to end in time."""
        fixed, per_input_s = self._line()
        remaining_s = seconds / self._faded - fixed
        if remaining_s < 0:
            return 0
        return size_max if remaining_s >= per_input_s * size_max else int(remaining_s / per_input_s)

    def _line(self) -> tuple[float, float]:
        if not self._weight:
            return 0.0, 0.0
        size, seconds = self._sizes / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - size * size
        if spread < 0.01 * size:  # sizes were all alike: nothing tells the two parts apart
            return seconds, 0.0
        per_input_s = (self._products / self._weight - size * seconds) / spread
        per_input_s = min(max(per_input_s, 0.0), seconds / size)
        return seconds - per_input_s * size, per_input_s


class LiveUnavailable(Exception):
    """Live has no answer for this input now; `reason` is a `LiveReason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True, eq=False)
class InferenceJob:
    """Input queued for a table of a snapshot; joining callers with more time extend `deadline`. Times are monotonic."""

    snapshot: Snapshot
    table: str
    source: LiveInput
    fingerprint: int
    size_bytes: int
    deadline: float = math.inf
    queued_at: float = 0.0
    may_reuse: bool = False
    """True if the answer to a near input will do."""
    newer_input: object = None
    """Input newer than the night, in place of `source`, as the feature made it that computes from it."""
    new: EligibleNewItems = NO_ELIGIBLE_NEW_ITEMS
    """New items that the list may name."""
    seen_ordinals: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Ordinals of the user's past items, which the list leaves out in addition to those of `source`."""

    @property
    def queue_name(self) -> str:
        """Name of the queue of jobs that share batches, and their cost estimate."""
        if self.newer_input is not None:
            return f"{self.table} with a newer input"
        return f"{self.table} with new items" if self.new.items else self.table


@dataclass(frozen=True, slots=True, eq=False)
class ComputedRecord:
    """Record that live computed of an input; the model lacks `unknown_id_count` ids of the history (None: not counted).

    `near` is the distance of the input whose answer is reused, None for a computed one. `record_without_new_items`
    is the same record without new items, if it has any.
    """

    record: bytes
    unknown_id_count: int | None = None
    near: float | None = None
    record_without_new_items: bytes | None = None


InferenceOutcome = ComputedRecord | Exception
Compute = Callable[[Sequence[InferenceJob]], list[InferenceOutcome]]
QueuedJob = tuple[InferenceJob, asyncio.Future[ComputedRecord]]


class MicroBatcher:
    """Batcher of jobs of the same snapshot and table; a full queue refuses at once, so overload sheds to the ladder.

    An idle worker takes what is there; while all are busy, jobs gather for the next batch. A batch holds
    no more than can end before the first deadline in it, by the cost of recent ones.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        workers: int,
        max_batch: int,
        max_queue: int,
        max_queue_bytes: int,
        compute: Compute,
        observe: Callable[[int, float], None] = lambda _size, _seconds: None,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._idle = workers
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._max_queue_bytes = max_queue_bytes
        self._compute = compute
        self._observe = observe
        self._timer = timer
        self._queues: dict[tuple[int, str], deque[QueuedJob]] = {}
        self._costs: defaultdict[str, BatchCost] = defaultdict(BatchCost)
        self._pump_due = False
        self.queued = 0
        self.queued_bytes = 0
        self.hopeless = 0
        """Number of jobs that were not computed because they could not have ended in time."""

    def infer(self, job: InferenceJob) -> "asyncio.Future[ComputedRecord]":
        """Queue one job; return its future outcome, LiveUnavailable for a full queue, too short a time or an error."""
        loop = asyncio.get_running_loop()
        computed_future: asyncio.Future[ComputedRecord] = loop.create_future()
        if (
            self.queued >= self._max_queue
            or self.queued_bytes + job.size_bytes > self._max_queue_bytes
        ):
            computed_future.set_exception(LiveUnavailable(LiveReason.BUSY))
            return computed_future
        job.queued_at = self._timer()
        self._queues.setdefault((id(job.snapshot), job.queue_name), deque()).append(
            (job, computed_future)
        )
        self.queued += 1
        self.queued_bytes += job.size_bytes
        if self._idle and not self._pump_due:
            # At the end of this turn of the loop: whatever the turn submits travels in one batch.
            self._pump_due = True
            loop.call_soon(self._pump)
        return computed_future

    def waited(self) -> float:
        """Return the largest share of its time that a queue's oldest input has waited; 0 if all queues are empty."""
        now_s = self._timer()
        heads = [waiting[0][0] for waiting in self._queues.values() if waiting]
        times = [(now_s - job.queued_at, job.deadline - job.queued_at) for job in heads]
        return max((waited / max(time_s, 1e-6) for waited, time_s in times), default=0.0)

    def _pump(self) -> None:
        self._pump_due = False
        while self._idle and self._queues:
            queue_key = next(iter(self._queues))
            waiting = self._queues.pop(queue_key)
            batch = self._pop_batch(waiting, self._costs[queue_key[1]])
            if waiting:
                self._queues[queue_key] = waiting  # behind the other lanes
            if batch:
                self._start(batch)

    def _pop_batch(self, waiting: deque[QueuedJob], cost: BatchCost) -> list[QueuedJob]:
        """Take the next batch of a queue, oldest first; drop cancelled jobs, fail those that cannot end in time."""
        batch: list[QueuedJob] = []
        now_s, limit = self._timer(), self._max_batch
        while waiting and len(batch) < limit:
            job, computed_future = waiting[0]
            if not computed_future.done():
                within = cost.size_within(job.deadline - now_s, limit)
                if within < 1:
                    self.hopeless += 1
                    cost.fade()
                    computed_future.set_exception(LiveUnavailable(LiveReason.TIMEOUT))
                elif within <= len(batch):
                    break  # its time is too short for this batch, not for the next
                else:
                    limit = within
                    batch.append((job, computed_future))
            waiting.popleft()
            self.queued -= 1
            self.queued_bytes -= job.size_bytes
        return batch

    def _start(self, batch: list[QueuedJob]) -> None:
        self._idle -= 1
        loop = asyncio.get_running_loop()
        started = self._timer()

        def run() -> None:
            error: Exception | None = None
            outcomes: Sequence[InferenceOutcome] = ()
            try:
                outcomes = self._compute([job for job, _ in batch])
            except Exception as failed:
                error = without_frames(failed)
            # One hop back: a future of the loop's own in between would cost a lone request two turns more.
            report_outcomes(outcomes, error, self._timer())

        def report_outcomes(
            outcomes: Sequence[InferenceOutcome], error: Exception | None, ended_at: float
        ) -> None:
            # Where the loop is closed every caller is gone.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._finish, batch, started, outcomes, error, ended_at)

        def report_failure(running: "Future[None]") -> None:
            if running.cancelled() or running.exception() is not None:
                report_outcomes((), LiveUnavailable(LiveReason.FAILED), started)

        try:
            self._executor.submit(run).add_done_callback(report_failure)
        except RuntimeError:  # shut down
            self._idle += 1
            _resolve(batch, [LiveUnavailable(LiveReason.FAILED)] * len(batch))

    def _finish(
        self,
        batch: list[QueuedJob],
        started: float,
        outcomes: Sequence[InferenceOutcome],
        error: Exception | None,
        ended_at: float,
    ) -> None:
        self._idle += 1
        if error is not None:
            outcomes = [error] * len(batch)
        else:
            self._observe(len(batch), ended_at - started)
            self._costs[batch[0][0].queue_name].add(len(batch), ended_at - started)
        if self._queues:  # the next batch first: the model works while answers are handed out
            self._pump()
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

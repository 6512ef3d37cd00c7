"""Live inference off the event loop: a micro-batch that waits for nobody while the model is idle."""

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

from cache.events.event_predictor import EventInput
from cache.events.new_items import NO_NEW, NewItemsOf
from cache.model.predictor import LiveInput
from serving.answers.reasons import LiveReason
from serving.generations.snapshot import Snapshot
from serving.lookup.batch_cost import Cost


class LiveUnavailable(Exception):
    """Live has no answer for this input now; `reason` is a `LiveReason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True, eq=False)
class Job:
    """Input queued for a table of a snapshot; who joins with more time moves `deadline` back. Times are monotonic."""

    snapshot: Snapshot
    table: str
    source: LiveInput
    fingerprint: int
    size_bytes: int
    deadline: float = math.inf
    queued_at: float = 0.0
    may_reuse: bool = False
    """True if the answer to an input close by will do."""
    newer: EventInput | None = None
    """Newer events to compute from, in place of `source`."""
    new: NewItemsOf = NO_NEW
    """New items that its list may name."""
    had: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Ordinals of items that its list leaves out beside those of `source`: the user had them by the night."""

    @property
    def lane(self) -> str:
        """Name of what shares its batches, and what these cost."""
        if self.newer is not None:
            return f"{self.table} with events"
        return f"{self.table} with new items" if self.new.items else self.table


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """Record that live made of an input; `dropped` counts the history's ids that the model lacks, None: not counted.

    `near` is the distance of the input whose answer it reuses, None where it was computed. `own` is the record without
    new items, where these are in it.
    """

    record: bytes
    dropped: int | None = None
    near: float | None = None
    own: bytes | None = None


Outcome = Computed | Exception
Compute = Callable[[Sequence[Job]], list[Outcome]]
Place = tuple[Job, asyncio.Future[Computed]]


class MicroBatcher:
    """Groups jobs of the same snapshot and table; full queues refuse at once, so overload sheds to the ladder.

    An idle worker takes what is there; while all are busy, what comes gathers and is the next batch. A batch holds
    no more than can end before the first deadline in it, as the recent ones tell.
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
        self._lanes: dict[tuple[int, str], deque[Place]] = {}
        self._costs: defaultdict[str, Cost] = defaultdict(Cost)
        self._pump_due = False
        self.queued = 0
        self.queued_bytes = 0
        self.hopeless = 0
        """Jobs that were not computed since they could not have ended in time."""

    def infer(self, job: Job) -> "asyncio.Future[Computed]":
        """The outcome for one job; LiveUnavailable when the queue is full, time too short or nothing came of it."""
        loop = asyncio.get_running_loop()
        computed_future: asyncio.Future[Computed] = loop.create_future()
        if (
            self.queued >= self._max_queue
            or self.queued_bytes + job.size_bytes > self._max_queue_bytes
        ):
            computed_future.set_exception(LiveUnavailable(LiveReason.BUSY))
            return computed_future
        job.queued_at = self._timer()
        self._lanes.setdefault((id(job.snapshot), job.lane), deque()).append((job, computed_future))
        self.queued += 1
        self.queued_bytes += job.size_bytes
        if self._idle and not self._pump_due:
            # At the end of this turn of the loop: whatever the turn submits travels in one batch.
            self._pump_due = True
            loop.call_soon(self._pump)
        return computed_future

    def waited(self) -> float:
        """Largest share of its time that the oldest input of a lane has waited; 0 while none waits."""
        now_s = self._timer()
        heads = [waiting[0][0] for waiting in self._lanes.values() if waiting]
        times = [(now_s - job.queued_at, job.deadline - job.queued_at) for job in heads]
        return max((waited / max(time_s, 1e-6) for waited, time_s in times), default=0.0)

    def _pump(self) -> None:
        self._pump_due = False
        while self._idle and self._lanes:
            queue_key = next(iter(self._lanes))
            waiting = self._lanes.pop(queue_key)
            batch = self._take(waiting, self._costs[queue_key[1]])
            if waiting:
                self._lanes[queue_key] = waiting  # behind the other lanes
            if batch:
                self._start(batch)

    def _take(self, waiting: deque[Place], cost: Cost) -> list[Place]:
        """The next batch of a lane, oldest first; who left is dropped, and who would get it too late is told."""
        batch: list[Place] = []
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

    def _start(self, batch: list[Place]) -> None:
        self._idle -= 1
        loop = asyncio.get_running_loop()
        started = self._timer()

        def run() -> None:
            error: Exception | None = None
            outcomes: Sequence[Outcome] = ()
            try:
                outcomes = self._compute([job for job, _ in batch])
            except Exception as failed:
                error = without_frames(failed)
            # One hop back: a future of the loop's own in between would cost a lone request two turns more.
            report_outcomes(outcomes, error, self._timer())

        def report_outcomes(
            outcomes: Sequence[Outcome], error: Exception | None, ended_at: float
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
        batch: list[Place],
        started: float,
        outcomes: Sequence[Outcome],
        error: Exception | None,
        ended_at: float,
    ) -> None:
        self._idle += 1
        if error is not None:
            outcomes = [error] * len(batch)
        else:
            self._observe(len(batch), ended_at - started)
            self._costs[batch[0][0].lane].add(len(batch), ended_at - started)
        if self._lanes:  # the next batch first: the model works while answers are handed out
            self._pump()
        _resolve(batch, outcomes)


def _resolve(batch: Sequence[Place], outcomes: Sequence[Outcome]) -> None:
    for (_, computed_future), outcome in zip(batch, outcomes, strict=True):
        if computed_future.done():
            continue
        if isinstance(outcome, Computed):
            computed_future.set_result(outcome)
        else:
            computed_future.set_exception(outcome)


def without_frames(error: Exception) -> Exception:
    """The error, its traceback as text: frames hold the jobs and the error itself, and so keep their generation."""
    if not hasattr(error, "__notes__"):
        error.add_note("".join(traceback.format_tb(error.__traceback__)).rstrip())
    return error.with_traceback(None)

"""Live inference off the event loop: a micro-batch that waits for nobody while the model is idle."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from cache.predictor import LiveInput, Predictor, Prepared
from serving.snapshot import Snapshot


class LiveUnavailable(Exception):
    """Live has no answer for this input now; `reason` is busy, no_model, no_usable_input or failed."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One input for one table of one snapshot."""

    snapshot: Snapshot
    table: str
    source: LiveInput
    fingerprint: int
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """What live made of an input."""

    record: bytes


Outcome = Computed | Exception
Compute = Callable[[Sequence[Job]], list[Outcome]]


class MicroBatcher:
    """Groups jobs of the same snapshot and table; full queues refuse at once, so overload sheds to the ladder."""

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
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._executor = executor
        self._idle = workers
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._max_queue_bytes = max_queue_bytes
        self._compute = compute
        self._observe = observe
        self._timer = timer
        self._lanes: dict[tuple[int, str], deque[tuple[Job, asyncio.Future[Computed]]]] = {}
        self._pump_due = False
        self.queued = 0
        self.queued_bytes = 0

    async def infer(self, job: Job) -> Computed:
        """The outcome for one job; raises LiveUnavailable when the queue is full or nothing came of it."""
        if (
            self.queued >= self._max_queue
            or self.queued_bytes + job.size_bytes > self._max_queue_bytes
        ):
            raise LiveUnavailable("busy")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Computed] = loop.create_future()
        self._lanes.setdefault((id(job.snapshot), job.table), deque()).append((job, done))
        self.queued += 1
        self.queued_bytes += job.size_bytes
        if not self._pump_due:
            # At the end of this turn of the loop: whatever the turn submits travels in one batch.
            self._pump_due = True
            loop.call_soon(self._pump)
        return await done

    def _pump(self) -> None:
        self._pump_due = False
        while self._idle and self._lanes:
            lane = next(iter(self._lanes))
            waiting = self._lanes.pop(lane)
            batch: list[tuple[Job, asyncio.Future[Computed]]] = []
            while waiting and len(batch) < self._max_batch:
                job, done = waiting.popleft()
                self.queued -= 1
                self.queued_bytes -= job.size_bytes
                if not done.done():  # its last caller may have left
                    batch.append((job, done))
            if waiting:
                self._lanes[lane] = waiting  # behind the other lanes
            if batch:
                self._start(batch)

    def _start(self, batch: list[tuple[Job, asyncio.Future[Computed]]]) -> None:
        self._idle -= 1
        started = self._timer()
        jobs = [job for job, _ in batch]
        running = asyncio.get_running_loop().run_in_executor(self._executor, self._compute, jobs)

        def finish(future: "asyncio.Future[list[Outcome]]") -> None:
            self._idle += 1
            self._observe(len(batch), self._timer() - started)
            outcomes: Sequence[Outcome]
            if future.cancelled():
                outcomes = [LiveUnavailable("failed")] * len(batch)
            elif (error := future.exception()) is not None:
                outcomes = [
                    error if isinstance(error, Exception) else LiveUnavailable("failed")
                ] * len(batch)
            else:
                outcomes = future.result()
            for (_, done), outcome in zip(batch, outcomes, strict=True):
                if done.done():
                    continue
                if isinstance(outcome, Computed):
                    done.set_result(outcome)
                else:
                    done.set_exception(outcome)
            self._pump()

        running.add_done_callback(finish)


def compute(jobs: Sequence[Job], *, clock: Callable[[], float] = time.time) -> list[Outcome]:
    """One inference for jobs of one snapshot and table; a job that fails costs the others nothing."""
    snapshot, table = jobs[0].snapshot, jobs[0].table
    predictor = snapshot.predictor
    if predictor is None:
        return [LiveUnavailable("no_model")] * len(jobs)
    outcomes: list[Outcome] = [LiveUnavailable("no_usable_input")] * len(jobs)
    ready: list[tuple[int, Prepared]] = []
    for place, job in enumerate(jobs):
        try:
            prepared = predictor.prepare(table, job.source)
            if prepared is not None:
                ready.append((place, prepared))
        except Exception as error:  # the model is a guest: whatever it raises, the ladder goes on
            outcomes[place] = error
    _predict(predictor, jobs, ready, outcomes, int(clock()))
    return outcomes


def _predict(
    predictor: Predictor,
    jobs: Sequence[Job],
    ready: Sequence[tuple[int, Prepared]],
    outcomes: list[Outcome],
    scored_at: int,
) -> None:
    if not ready:
        return
    try:
        records = predictor.predict(
            jobs[0].table,
            [prepared for _, prepared in ready],
            [jobs[place].fingerprint for place, _ in ready],
            scored_at,
            blocked=jobs[0].snapshot.blocked_ordinals,
        )
        for (place, _), record in zip(ready, records, strict=True):
            outcomes[place] = Computed(record)
    except Exception as error:
        if len(ready) == 1:
            outcomes[ready[0][0]] = error
            return
        for one in ready:
            _predict(predictor, jobs, [one], outcomes, scored_at)

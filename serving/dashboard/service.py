"""Dashboard of one worker: its counts for Redis, and the document for all viewers."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from cache.l2.control_plane import ControlPlane
from serving.dashboard.aggregator import FleetReading, FleetView
from serving.dashboard.counters import Counts, MetricsPublisher
from serving.dashboard.document import document
from serving.dashboard.generation_history import GenerationHistory
from serving.generations.nights import Nights
from serving.process.resources import StoreThreads
from serving.requests.errors import Problem
from serving.usage.l1_advisor import merge_curves

log = logging.getLogger(__name__)

READ_S = 1.0
"""Seconds between two readings of Redis at least, however many look."""
ARCHIVE_S = 10.0
DATA_S = 5.0
"""Seconds that a viewer waits at most: Redis has 2 s, the store one, the rest is computing."""
ARCHIVE_OLD_S = 2 * ARCHIVE_S
"""Age from which a viewer waits for the table of generations: the first one, and one after a pause."""
_ARCHIVE_WAIT_S = 1.0
"""Seconds that a slow store delays a viewer at most: then the last known table is shown, with its age."""

Provider = Callable[[], Mapping[str, Any] | None]
Archived = tuple[list[dict[str, Any]], list[dict[str, Any]]]


class Dashboard:
    """Dashboard of one worker: call `publish` every few seconds; `data` answers all viewers from one reading a second.

    `advisor`, `events` and `quality` return their part of the document, quickly and without waiting: the first two this
    worker's contribution, the last the whole. `arms` names the experiments that it holds.
    """

    def __init__(
        self,
        control: ControlPlane,
        history: GenerationHistory,
        *,
        name: str,
        is_on: bool = True,
        read_counts: Callable[[], Counts],
        about: Callable[[], Mapping[str, Any]],
        bounds: tuple[float, ...],
        nights: Nights,
        clock: Callable[[], float],
        advisor: Provider = lambda: None,
        quality: Provider = lambda: None,
        events: Provider = lambda: None,
        arms: Callable[[], Sequence[Mapping[str, Any]]] = tuple,
        in_thread: StoreThreads,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_on = is_on

        def advised() -> Mapping[str, Any]:
            return {**about(), "advisor": _call_provider(advisor), "events": _call_provider(events)}

        self.publisher = MetricsPublisher(control, name, clock, read_counts, advised)
        self.advisor, self.quality = advisor, quality
        self._arms = arms
        self._fleet = FleetView(control, self.publisher, bounds, clock, timer)
        self._history, self._in_thread = history, in_thread
        self._bounds, self._nights, self._timer = bounds, nights, timer
        self._archived: Archived = [], []
        self._archived_at, self._tried_at = float("-inf"), float("-inf")
        self._generations_at: float | None = None
        self._archiving: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._body, self._read_at = b"", float("-inf")

    async def publish(self) -> None:
        """Publish this worker's counts to Redis; if Redis is away, a later call publishes them."""
        await self.publisher.publish()

    async def data(self) -> bytes:
        """Return the document as JSON, at most a second old; raise Problem: 404 if switched off, 503 if too late."""
        if not self.is_on:
            raise Problem(404, "dashboard_off", "LARDER_DASHBOARD_S is 0 here: nothing is told")
        if self._timer() - self._read_at >= READ_S:
            # One reading for all who look, which nobody's leaving or time-out ends: two at once would mix their bins.
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._read())
            finished_tasks, _ = await asyncio.wait({reading := self._reading}, timeout=DATA_S)
            if not finished_tasks:
                raise Problem(503, "overloaded", f"the dashboard was not made within {DATA_S:g} s")
            reading.result()
        return self._body

    async def _read(self) -> None:
        reading = await self._fleet.read()
        await self._look_into_store(reading)
        served = self._nights.follower.served
        schedule = {
            "age_s": self._nights.age_s(), "due_at": self._nights.due_at(),
            "missing": self._nights.is_missing(),
        }  # fmt: skip
        quality = _call_provider(self.quality)
        roles = {} if served is None else served.generation_by_role
        arms = self._arms()

        def advice() -> Mapping[str, Any] | None:
            return merge_curves(worker["advisor"] for worker in reading.workers.values())

        def composed() -> bytes:
            dashboard_document = document(
                reading, schedule=schedule, archive=self._archived, roles=roles,
                generations_at=self._generations_at,
                bounds=self._bounds, advisor=_call_provider(advice), quality=quality, arms=arms,
            )  # fmt: skip
            return orjson.dumps(dashboard_document, option=orjson.OPT_SERIALIZE_NUMPY)

        self._body = await asyncio.to_thread(composed)
        self._read_at = self._timer()

    async def _look_into_store(self, reading: FleetReading) -> None:
        """Has generations and nights read when it is time; one reading at a time, however long the store takes."""
        at = self._timer()
        if self._archiving is None:
            if at - self._tried_at < ARCHIVE_S:
                return
            is_old = at - self._archived_at >= ARCHIVE_OLD_S
            self._archiving = asyncio.create_task(self._read_archive(reading))
            # A young table is shown as it is; the new one is there at the next look.
            await asyncio.wait({self._archiving}, timeout=_ARCHIVE_WAIT_S if is_old else 0.0)

    async def _read_archive(self, reading: FleetReading) -> None:
        try:
            self._archived = await self._in_thread(self._history.read, reading.registry)
            self._archived_at, self._generations_at = self._timer(), reading.read_at
        except Exception:  # a defect here must not cost the rest of the page
            log.exception("generations and nights cannot be read")
        finally:
            self._tried_at, self._archiving = self._timer(), None

    async def aclose(self) -> None:
        """Stop reading, and withdraw this worker's figures from the dashboards of the others."""
        pending = {task for task in (self._archiving, self._reading) if task is not None}
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
        if self.is_on:
            await self.publisher.sign_off()


def _call_provider(provider: Provider) -> Mapping[str, Any] | None:
    try:
        return provider()
    except Exception:
        log.exception("a part of the dashboard cannot be told")
        return None

"""Dashboard of one worker: publishes its counts to Redis, and serves the document to all viewers."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from cache.errors import traceback_of
from cache.l2.control_plane import ControlPlane
from serving.dashboard.aggregator import FleetReading, FleetView
from serving.dashboard.counters import Counts, MetricsPublisher
from serving.dashboard.document import build_document
from serving.dashboard.generation_history import GenerationHistory
from serving.generations.nights import Nights
from serving.process.resources import StoreThreads
from serving.requests.errors import Problem
from serving.usage.l1_advisor import merge_curves

log = logging.getLogger(__name__)

READ_INTERVAL_S = 1.0
"""Shortest time in seconds between two readings of Redis, for any number of viewers."""
ARCHIVE_INTERVAL_S = 10.0
DATA_WAIT_MAX_S = 5.0
"""Longest time in seconds that a viewer waits: 2 s for Redis, 1 s for the store, the rest for computing."""
ARCHIVE_OLD_S = 2 * ARCHIVE_INTERVAL_S
"""Age in seconds of the table of generations from which a viewer waits for a new one: at first, and after a pause."""
_ARCHIVE_WAIT_MAX_S = 1.0
"""Longest time in seconds that a slow store delays a viewer; then the last known table is shown, with its age."""

Provider = Callable[[], Mapping[str, Any] | None]
ArchiveRows = tuple[list[dict[str, Any]], list[dict[str, Any]]]


class Dashboard:
    """Dashboard of one worker: call `publish` every few seconds; all viewers share one `document_json` a second.

    `advisor`, `events` and `quality` return parts of the document without waiting: `advisor` and `events` for this
    worker, `quality` for all replicas. `list_experiments` returns the held experiments.
    """

    def __init__(
        self,
        control: ControlPlane,
        history: GenerationHistory,
        *,
        worker_name: str,
        is_dashboard_on: bool = True,
        read_counts: Callable[[], Counts],
        read_worker_state: Callable[[], Mapping[str, Any]],
        bucket_bounds: tuple[float, ...],
        nights: Nights,
        clock: Callable[[], float],
        advisor: Provider = lambda: None,
        quality: Provider = lambda: None,
        events: Provider = lambda: None,
        list_experiments: Callable[[], Sequence[Mapping[str, Any]]] = tuple,
        in_thread: StoreThreads,
        monotonic_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_on = is_dashboard_on

        def read_full_worker_state() -> Mapping[str, Any]:
            return {**read_worker_state(), "advisor": _call_provider(advisor), "events": _call_provider(events)}

        self.publisher = MetricsPublisher(control, worker_name, clock, read_counts, read_full_worker_state)
        self.advisor, self.quality = advisor, quality
        self._list_experiments = list_experiments
        self._fleet = FleetView(control, self.publisher, bucket_bounds, clock, monotonic_clock)
        self._history, self._in_thread = history, in_thread
        self._bounds, self._nights, self._monotonic_clock = bucket_bounds, nights, monotonic_clock
        self._archive_rows: ArchiveRows = [], []
        self._archive_read_at, self._archive_tried_at = float("-inf"), float("-inf")
        self._generations_read_at: float | None = None
        self._archive_task: asyncio.Task[None] | None = None
        self._read_task: asyncio.Task[None] | None = None
        self._document_body, self._read_at = b"", float("-inf")

    async def publish(self) -> None:
        """Publish this worker's counts to Redis; if Redis is unreachable, a later call publishes them."""
        await self.publisher.publish()

    async def document_json(self) -> bytes:
        """Return the document as JSON, at most a second old; raise Problem: 404 if switched off, 503 if too late."""
        if not self.is_on:
            raise Problem(404, "dashboard_off", "the dashboard is switched off: LARDER_DASHBOARD_S is 0")
        if self._monotonic_clock() - self._read_at >= READ_INTERVAL_S:
            # All viewers share one reading, which goes on if a viewer leaves: concurrent readings would mix their bins.
            if self._read_task is None or self._read_task.done():
                self._read_task = asyncio.create_task(self._read())
            finished_tasks, _ = await asyncio.wait({reading := self._read_task}, timeout=DATA_WAIT_MAX_S)
            if not finished_tasks:
                raise Problem(503, "overloaded", f"the dashboard was not ready within {DATA_WAIT_MAX_S:g} s")
            reading.result()
        return self._document_body

    async def _read(self) -> None:
        reading = await self._fleet.read()
        await self._refresh_archive(reading)
        served = self._nights.follower.served
        schedule = {
            "age_s": self._nights.generation_age_s(), "due_at": self._nights.due_at(),
            "missing": self._nights.is_missing(),
        }  # fmt: skip
        quality = _call_provider(self.quality)
        roles = {} if served is None else served.generation_by_role
        experiment_rows = self._list_experiments()

        def merge_advice() -> Mapping[str, Any] | None:
            return merge_curves(worker["advisor"] for worker in reading.worker_rows.values())

        def compose_body() -> bytes:
            dashboard_document = build_document(
                reading, schedule_fields=schedule, generation_and_night_rows=self._archive_rows,
                generation_by_role=roles,
                generations_read_at=self._generations_read_at,
                bucket_bounds=self._bounds, advisor_fields=_call_provider(merge_advice), quality_fields=quality,
                experiment_rows=experiment_rows,
            )  # fmt: skip
            return orjson.dumps(dashboard_document, option=orjson.OPT_SERIALIZE_NUMPY)

        self._document_body = await asyncio.to_thread(compose_body)
        self._read_at = self._monotonic_clock()

    async def _refresh_archive(self, reading: FleetReading) -> None:
        """Start a due reading of generations and nights, unless one is under way; wait if the known table is old."""
        now_s = self._monotonic_clock()
        if self._archive_task is None:
            if now_s - self._archive_tried_at < ARCHIVE_INTERVAL_S:
                return
            is_old = now_s - self._archive_read_at >= ARCHIVE_OLD_S
            self._archive_task = asyncio.create_task(self._read_archive(reading))
            # A recent table is shown meanwhile; a later request shows the new one.
            await asyncio.wait({self._archive_task}, timeout=_ARCHIVE_WAIT_MAX_S if is_old else 0.0)

    async def _read_archive(self, reading: FleetReading) -> None:
        try:
            self._archive_rows = await self._in_thread(
                self._history.read_generations_and_nights, reading.registry_row_by_generation
            )
            self._archive_read_at, self._generations_read_at = self._monotonic_clock(), reading.read_at
        except Exception as error:  # an error here must not break the rest of the page
            log.error("generations and nights cannot be read: %s", error, exc_info=traceback_of(error))
        finally:
            self._archive_tried_at, self._archive_task = self._monotonic_clock(), None

    async def aclose(self) -> None:
        """Stop reading, and withdraw this worker's figures from the dashboards of the others."""
        pending_tasks = {task for task in (self._archive_task, self._read_task) if task is not None}
        for pending_task in pending_tasks:
            pending_task.cancel()
        if pending_tasks:
            await asyncio.wait(pending_tasks)
        if self.is_on:
            await self.publisher.sign_off()


def _call_provider(provider: Provider) -> Mapping[str, Any] | None:
    try:
        return provider()
    except Exception:
        log.exception("a part of the dashboard cannot be shown")
        return None

"""Follows the pointer forwards only, and has what it may name next ready when it moves."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from cache.errors import CorruptArtefact, LarderError, TierUnavailable, UnknownFormat, masked
from cache.l2.control_plane import ControlPlane
from cache.store.artefacts import ArtefactStore
from cache.store.releases import Pointer
from serving.answers.reasons import StaleReason
from serving.generations.degraded_reopen import DegradedReopen
from serving.generations.health import About, Concerns, Health
from serving.generations.holder import GenerationHolder
from serving.generations.pointer_rules import PointerProgress, Verdict, judge
from serving.generations.release_history import newest_pointer
from serving.generations.served_set import ServedGenerations
from serving.generations.snapshot import Snapshot
from serving.generations.staging import StagedGeneration
from serving.generations.store_threads import InThread
from serving.metrics.registry import Metrics

log = logging.getLogger(__name__)

_RETRY_S = 10.0
"""Seconds between tries to load what could not be loaded: each reads and checks every file."""

_DISTRUSTED: Mapping[Verdict, StaleReason] = {
    "vanished": StaleReason.POINTER_VANISHED,
    "backwards": StaleReason.POINTER_BACKWARDS,
    "conflicting": StaleReason.POINTER_CONFLICTING,
}
"""Word for a pointer that is not followed."""

T = TypeVar("T")


class PointerFollower:
    """Decides what the shelf holds; nothing but a greater epoch changes what is served."""

    def __init__(
        self,
        store: ArtefactStore,
        control: ControlPlane,
        holder: GenerationHolder,
        metrics: Metrics,
        *,
        load_bound_s: float,
        poll_s: float,
        clock: Callable[[], float],
        in_thread: InThread,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_draining = False
        self.holder = holder
        self.progress = PointerProgress(load_bound_s, timer)
        self.staged = StagedGeneration(holder, clock, timer)
        self._store = store
        self._control = control
        self._metrics = metrics
        self._poll_s, self._load_bound_s = poll_s, load_bound_s
        self._in_thread = in_thread
        self._timer = timer
        self.concerns = Concerns("pointer", StaleReason.STARTING)
        self._retry_s, self._retry_at = min(_RETRY_S, load_bound_s / 3), 0.0
        self._degraded_reopen = DegradedReopen(holder, timer)
        self._looking = asyncio.Lock()
        self._fetching: asyncio.Task[None] | None = None

    @property
    def served(self) -> ServedGenerations | None:
        """Generations that answers come from, None before any is loaded."""
        return self.holder.served

    @property
    def failed(self) -> str | None:
        """Reason why the generation of the pointer seen last cannot be loaded, or None."""
        return self.progress.failed

    @property
    def epoch(self) -> int | None:
        """Epoch of the live generation, None before there is one."""
        return None if self.served is None else self.served.live.epoch

    @property
    def is_expecting(self) -> bool:
        """True while a publisher waits for its replicas: the pointer may move any moment."""
        served = self.served
        return self.staged.expected(None if served is None else served.live.generation) is not None

    @property
    def stale(self) -> str | None:
        """Reason why answers may lag behind, or None."""
        return self.concerns.text

    @property
    def health(self) -> Health:
        """Health: a replica without Redis stays ready.

        One that cannot load in time what it saw published does not, nor one that cannot obey the blocklist it read.
        """
        served, overdue = self.served, self.progress.overdue()
        if self.is_draining:
            overdue = "this replica is stopping"
        elif served is not None and overdue is None and not self.holder.is_blocklist_known:
            overdue = "no version of the blocklist could be read"
        elif served is not None and overdue is None and self.holder.enforcement_error is not None:
            overdue = f"version {self.holder.blocklist.version} of the blocklist is not in force"
        degraded = None if served is None else served.live.degraded
        ready = served is not None and overdue is None
        failed = overdue or self.failed
        outside = self.progress.outside() if failed == self.failed else overdue
        return Health(ready, self.stale, degraded, failed, outside)

    @property
    def failures(self) -> dict[str, str]:
        """Load failures: generation -> why it cannot be loaded here."""
        reason_by_generation = {}
        if self.staged.requested_generation is not None and self.staged.failed is not None:
            reason_by_generation[self.staged.requested_generation] = self.staged.failed
        if self.progress.newest_pointer is not None and self.failed is not None:
            reason_by_generation[self.progress.newest_pointer.generation] = self.failed
        return reason_by_generation

    def note(self, about: About, reason: str | None, remedy: str = "") -> None:
        """Sets a reason to trust this replica less, or None when it has passed; logged when it is news."""
        if self.concerns.note(about, reason) and reason is not None:
            log.warning("stale: %s%s", reason, remedy and f": {remedy}")

    async def poll_pointer(self) -> None:
        """Reads the pointer, follows a newer one, stages what may come next and reopens a degraded generation."""
        async with self._looking:
            await self._poll_pointer()
            self._stage()
            self._degraded_reopen.reopen_if_due(self.progress.followed)

    async def _poll_pointer(self) -> None:
        if (heard := await self._read_pointer_and_staging()) is None:
            await self._start_from_releases(None)
            return
        pointer, note = heard
        self.staged.update_note(note)
        # What the release records know and Redis does not was lost with an older Redis.
        await self._start_from_releases(pointer)
        verdict = judge(pointer, self.progress.newest_pointer)
        if verdict == "newer" and pointer is not None:
            await self._follow(pointer)
        elif verdict != "same":
            self._note_pointer_concern(_DISTRUSTED[verdict])
        elif not self.progress.is_behind:
            self._clear_pointer_concern()
        elif self.progress.newest_pointer is not None and self._timer() >= self._retry_at:
            await self._follow(self.progress.newest_pointer)
        else:
            self._note_pointer_concern(StaleReason.LOAD_FAILED)

    async def _read_pointer_and_staging(self) -> tuple[Pointer | None, bytes | None] | None:
        """Pointer and staging note as of now; None, and a concern, where they cannot be read."""
        try:
            raw, note = await self._control.watch()
            self.note("redis", None)
            return None if raw is None else Pointer.from_bytes(raw), note
        except TierUnavailable:
            self.note("redis", StaleReason.REDIS_UNREACHABLE)
            self.note("pointer", None)  # whatever was wrong with it may have passed
            self._metrics.refreshes.labels(StaleReason.REDIS_UNREACHABLE).inc()
        except CorruptArtefact as error:
            self._note_pointer_concern(StaleReason.POINTER_CORRUPT, str(error))
        return None

    def _stage(self) -> None:
        """Stages at most one generation beside live and previous: the one that the note asks for, else the canary's."""
        followed, wanted_generation = self.progress.followed, None
        if not self.progress.is_behind:  # what should be live already comes first
            wanted_generation = self.staged.expected(
                None if followed is None else followed.generation
            )
            if wanted_generation is None and followed is not None and followed.canary is not None:
                wanted_generation = followed.canary.generation
        self.staged.stage(wanted_generation)

    async def settled(self) -> None:
        """Returns once the previous generation, the next and what is being mended are here, or cannot be."""
        await self.staged.settled()
        await self._degraded_reopen.settled()
        if self._fetching is not None:
            await asyncio.wait({self._fetching})

    async def aclose(self) -> None:
        """Stops loading."""
        tasks = self.staged.drop(), self._degraded_reopen.drop(), self._fetching
        pending = {task for task in tasks if task is not None}
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)

    async def _start_from_releases(self, pointer: Pointer | None) -> None:
        if self.progress.followed is not None or (self.failed and self._timer() < self._retry_at):
            return
        try:
            recorded_pointer = await self._in_thread(newest_pointer, self._store)
        except (LarderError, OSError, ValueError):
            log.exception("the release records cannot be read")
            return
        if recorded_pointer is not None and (
            pointer is None or pointer.epoch < recorded_pointer.epoch
        ):
            await self._follow(recorded_pointer, trusted=False)

    async def _follow(self, pointer: Pointer, *, trusted: bool = True) -> None:
        self.progress.note_newer(pointer)
        if self._fetching is not None:
            self._fetching.cancel()
        try:
            live = await self._get_or_load(pointer)
            if not isinstance(live, Pointer):
                self.holder.serve(live, pointer)
        except Exception as error:  # whatever is wrong with it, the old one goes on
            is_known = isinstance(error, UnknownFormat)
            log.error(
                "generation %s cannot be loaded: %s",
                pointer.generation,
                error,
                exc_info=not is_known,
            )
            await self._give_up(pointer, str(error))
            return
        if isinstance(live, Pointer):
            # Rolled back, or published over, while it was loading: not one answer may come from it.
            await self._follow(live)
            return
        self.progress.note_served(pointer)
        self._degraded_reopen.begin()
        if trusted:
            self._clear_pointer_concern()
        log.info("serving generation %s of epoch %d", pointer.generation, pointer.epoch)
        if pointer.previous is not None and self.served and self.served.previous is None:
            self._fetching = asyncio.create_task(self._fetch(pointer, pointer.previous))

    async def _give_up(self, pointer: Pointer, reason: str) -> None:
        reason = masked(reason)
        self.progress.failed = f"generation {pointer.generation} cannot be loaded: {reason}"
        self._retry_at = self._timer() + self._retry_s
        self._note_pointer_concern(StaleReason.LOAD_FAILED)
        await self._unless_overtaken(pointer, self._fall_back(pointer))

    async def _unless_overtaken(
        self, pointer: Pointer, work: Coroutine[Any, Any, T]
    ) -> T | Pointer:
        """Result of `work`, or the newer pointer that was found meanwhile: a roll-back waits for no slow store."""
        task = asyncio.create_task(work)
        try:
            while True:
                finished_tasks, _ = await asyncio.wait({task}, timeout=self._poll_s)
                if (newer_pointer := await self._overtaken(pointer)) is not None:
                    return newer_pointer
                if finished_tasks:
                    return await task
        finally:
            if not task.cancel():  # else its thread goes on to its end, for nothing
                task.exception()

    async def _get_or_load(self, pointer: Pointer) -> Snapshot | Pointer:
        if (snapshot := self.holder.find_snapshot(pointer.generation)) is not None:
            return snapshot
        return await self._unless_overtaken(pointer, self._load(pointer))

    async def _load(self, pointer: Pointer) -> Snapshot:
        if self.staged.is_loading(pointer.generation):
            # Not for ever: its one thread may hang, or stand behind one that does.
            await self.staged.settled(self._load_bound_s)
            if (staged := self.holder.find_snapshot(pointer.generation)) is not None:
                return staged
        self.staged.drop()  # never more than previous, live and one more
        live = await self.holder.load(pointer)
        await self.holder.warm(live)
        return live

    async def _fall_back(self, pointer: Pointer) -> None:
        """Serves the previous generation if nothing is held yet: better than no answers; the replica stays drained."""
        if self.served is not None or pointer.previous is None:
            return
        previous = await self.holder.published(self._store, pointer.previous)
        if previous is not None:
            self.holder.put(ServedGenerations(previous))
            log.warning("answering from the previous generation %s", pointer.previous)

    async def _overtaken(self, pointer: Pointer) -> Pointer | None:
        if (heard := await self._read_pointer_and_staging()) is None:
            return None
        current_pointer, _ = heard
        return current_pointer if judge(current_pointer, pointer) == "newer" else None

    async def _fetch(self, pointer: Pointer, generation: str) -> None:
        previous = await self.holder.published(self._store, generation)
        if previous is not None and self.served is not None and self.progress.followed is pointer:
            self.holder.put(dataclasses.replace(self.served, previous=previous))

    def _note_pointer_concern(self, reason: str, remedy: str = "") -> None:
        self.note("pointer", reason, remedy)
        self._metrics.refreshes.labels(reason).inc()

    def _clear_pointer_concern(self) -> None:
        self.note("pointer", None)
        self._metrics.refreshes.labels("in_step").inc()

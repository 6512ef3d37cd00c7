"""Holder of this replica's generations: opens a new generation while others serve, and swaps all as one value."""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from cache.errors import traceback_of
from cache.store.artefacts import ArtefactStore
from cache.store.blocklist import Blocklist
from cache.store.releases import MOVE_ACTIONS, Canary, Pointer, Release, all_releases, newest_move, publication_time
from serving.generations.served_set import ServedGenerations
from serving.generations.snapshot import Snapshot
from serving.metrics.registry import Metrics
from serving.process.resources import StoreThreads

log = logging.getLogger(__name__)

OpenSnapshot = Callable[[Pointer, Blocklist], Snapshot]
"""Opens the pointer's generation; slow and blocking, raises if it cannot be loaded."""

WarmSnapshot = Callable[[Snapshot, Snapshot | None], Coroutine[Any, Any, None]]
"""Reads popular ids ahead for the coming snapshot (coming, current); current is None at the start."""

UpdateSnapshot = Callable[[Snapshot], Coroutine[Any, Any, Snapshot]]
"""Returns a newly opened snapshot with the changes since its night."""


@dataclass(frozen=True, slots=True)
class LiveSwap:
    """Last change of the live generation, at a monotonic time; `is_flip` unless it was the first generation."""

    generation: str
    swapped_at: float
    published_at: float
    is_flip: bool


class GenerationHolder:
    """Owner of `served`, which is replaced as one object; a request keeps the object that it captured."""

    def __init__(
        self,
        open_snapshot: OpenSnapshot,
        metrics: Metrics,
        *,
        warm: WarmSnapshot,
        on_flip: Callable[[str], None] = lambda _before: None,
        staging_executor: Executor | None = None,
        in_thread: StoreThreads,
        monotonic_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.served: ServedGenerations | None = None
        self.blocklist = Blocklist()
        """Newest blocklist for all held generations; each snapshot has the blocklist that it enforces."""
        self.is_blocklist_known = False
        self.enforcement_error: str | None = None
        """Error of the last attempt to enforce `blocklist`; None after a success."""
        self.update_snapshot: UpdateSnapshot | None = None
        """Update of each newly opened snapshot; set by a feature that also changes held snapshots."""
        self.pass_on_blocklist: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Callback that passes a changed `blocklist` on to other holders."""
        self._own_blocklist, self.other_blocklist = Blocklist(), Blocklist()
        self.on_change: Callable[[], None] = lambda: None
        self.last_swap: LiveSwap | None = None
        self.canary: Canary | None = None
        self.is_divided = False
        """True while some requests may be answered from another generation or namespace than the live one."""
        self._has_experiments = False
        self._open_snapshot = open_snapshot
        self._metrics = metrics
        self._warm_snapshot = warm
        self._on_flip = on_flip
        self._staging_executor = staging_executor
        self._in_thread = in_thread
        self._monotonic_clock = monotonic_clock
        self._first_snapshot: Snapshot | None = None

    @property
    def live(self) -> Snapshot | None:
        """Live snapshot, None before there is one."""
        return None if self.served is None else self.served.live

    @property
    def generations(self) -> tuple[str, ...]:
        """Ids of all held generations, also before there is a live one."""
        if self.served is not None:
            return self.served.generations
        return () if self._first_snapshot is None else (self._first_snapshot.generation,)

    def find_snapshot(self, generation: str | None) -> Snapshot | None:
        """Return the snapshot of a held generation, None if it is not held."""
        if self._first_snapshot is not None and self._first_snapshot.generation == generation:
            return self._first_snapshot
        return None if self.served is None else self.served.find(generation)

    async def load(self, pointer: Pointer) -> Snapshot:
        """Open a generation that should be live already; raise if it cannot be loaded."""
        return await self._update_opened(await self._in_thread(self._open_snapshot, pointer, self.blocklist))

    async def open_superseded(self, store: ArtefactStore, generation: str) -> Snapshot | None:
        """Open a superseded generation as it was last released; None if that fails."""
        snapshot = await self._in_thread(open_published, store, self._open_snapshot, generation, self.blocklist)
        return None if snapshot is None else await self._update_opened(snapshot)

    async def open_staged(self, generation: str) -> Snapshot:
        """Open a staged generation without delaying other loads; raise if it cannot be loaded."""
        staged_pointer = Pointer(generation, 0, None, "", time.time())
        loop = asyncio.get_running_loop()
        return await self._update_opened(
            await loop.run_in_executor(self._staging_executor, self._open_snapshot, staged_pointer, self.blocklist)
        )

    async def warm(self, coming_snapshot: Snapshot) -> None:
        """Read popular ids ahead for a coming snapshot; ignore errors, after which answers are slower but correct."""
        with contextlib.suppress(Exception):
            await self._warm_snapshot(coming_snapshot, self.live)

    def refusal_reason(self, staged_snapshot: Snapshot) -> str | None:
        """Return a reason to refuse a generation whose models do not open although the live one's do, else None."""
        served = self.served
        if staged_snapshot.degraded_reason is None or served is None or served.live.degraded_reason is not None:
            return None
        return f"its models do not open: {staged_snapshot.degraded_reason}"

    def hold_staged(self, staged_snapshot: Snapshot | None) -> None:
        """Hold the staged snapshot, or release it (None)."""
        self._first_snapshot = staged_snapshot if self.served is None else None
        if self.served is not None and self.served.next is not staged_snapshot:
            self.replace_served(dataclasses.replace(self.served, next=staged_snapshot))
        self.on_change()

    def serve(self, live: Snapshot, pointer: Pointer) -> None:
        """Make a snapshot live; the former live snapshot stays held if the pointer names it as previous."""
        served, released_snapshot = (self.served, live.released_as(pointer.epoch, pointer.published_at))
        self._first_snapshot, self.canary = None, pointer.canary
        self.set_experiments_running(are_running=self._has_experiments)
        previous_snapshot = next_snapshot = None
        if served is not None:
            previous_snapshot = served.find(pointer.previous)
            next_snapshot = (
                None if served.next is None else self._next_unless_served(served.next, live, previous_snapshot)
            )
        if served is None or served.live.generation != live.generation:
            self.last_swap = LiveSwap(
                live.generation, self._monotonic_clock(), pointer.published_at, is_flip=served is not None
            )
        if served is not None and served.live.generation != live.generation:
            self._on_flip(served.live.generation)
        self.replace_served(ServedGenerations(released_snapshot, previous_snapshot, next_snapshot))
        if served is not None and served.live.generation != live.generation:
            self._metrics.flipped()
        self.on_change()

    @staticmethod
    def _next_unless_served(next_snapshot: Snapshot, live: Snapshot, previous: Snapshot | None) -> Snapshot | None:
        role_generations = (live.generation, None if previous is None else previous.generation)
        return None if next_snapshot.generation in role_generations else next_snapshot

    def set_experiments_running(self, *, are_running: bool) -> None:
        """Set whether experiments run, which send some requests to other namespaces."""
        self._has_experiments = are_running
        self.is_divided = are_running or self.canary is not None

    def replace_served(self, served: ServedGenerations) -> None:
        """Replace `served`; the only method that changes the held generations, apart from their blocklist."""
        if not self._is_enforced(served):
            # The blocklist changed while this snapshot was loading.
            served = served.with_blocklist(self.blocklist)
        canary, held_canary = self.canary, None
        if canary is not None and served.next and served.next.generation == canary.generation:
            held_canary = canary
            next_snapshot = served.next.released_as(served.live.epoch, canary.since)
            served = dataclasses.replace(served, next=next_snapshot)
        self.served = dataclasses.replace(served, canary=held_canary)
        live = self.served.live
        self._metrics.set_generations(self.served.generation_by_role, is_degraded=live.degraded_reason is not None)
        self._metrics.fallback.set(live.fallback_reason is not None)

    async def put_own_blocklist_in_force(self, blocklist: Blocklist) -> bool:
        """Put a version of the namespace's own blocklist in force, and pass it on; return the result of `enforce()`."""
        self._own_blocklist, self.is_blocklist_known = blocklist, True
        self._combine_blocklists()
        is_enforced = await self.enforce()
        if self.pass_on_blocklist is not None:
            await self.pass_on_blocklist()
        return is_enforced

    async def set_other_blocklist(self, foreign_blocklist: Blocklist) -> bool:
        """Put another namespace's blocklist in force in addition; return the result of `enforce()`."""
        if foreign_blocklist is not self.other_blocklist:
            self.other_blocklist = foreign_blocklist
            self._combine_blocklists()
        return await self.enforce()

    async def enforce(self) -> bool:
        """Apply `blocklist` to all held generations; costs nothing if it is already applied.

        Return False on an error: then answers obey the former blocklist, `enforcement_error` says why, and the
        blocklist's follower calls this method again.
        """
        try:
            # Read again in each pass: if both lists change at the same time, both calls end with the same blocklist.
            while (served := self.served) is not None and not self._is_enforced(served):
                enforced_served = await asyncio.to_thread(served.with_blocklist, self.blocklist)
                if self.served is served:
                    self.served = enforced_served
        except Exception as error:  # lack of threads or memory, which may be temporary
            self.enforcement_error = str(error)
            log.exception("version %d of the blocklist cannot be put in force", self.blocklist.version)
            return False
        self.enforcement_error = None
        self._metrics.blocklist_version.set(self.blocklist.version)
        return True

    def _combine_blocklists(self) -> None:
        has_no_other_list = self.other_blocklist == Blocklist()
        self.blocklist = (
            self._own_blocklist if has_no_other_list else self._own_blocklist.with_all_of(self.other_blocklist)
        )

    def _is_enforced(self, served: ServedGenerations) -> bool:
        return all(snapshot.blocklist is self.blocklist for snapshot in served.snapshots)

    async def change_snapshots(
        self, served: ServedGenerations, change_snapshot: Callable[[Snapshot], Snapshot]
    ) -> bool:
        """Replace the held snapshots by copies changed in a thread; return False if they are no longer `served`."""
        changed_served = await asyncio.to_thread(served.map_snapshots, change_snapshot)
        if self.served is not served:
            return False
        self.served = changed_served
        return True

    async def _update_opened(self, snapshot: Snapshot) -> Snapshot:
        return snapshot if self.update_snapshot is None else await self.update_snapshot(snapshot)


def newest_pointer(store: ArtefactStore) -> Pointer | None:
    """Return the pointer of the newest completed move; raise LarderError, OSError or ValueError if unreadable."""
    releases = all_releases(store)
    release = newest_move(releases)
    return None if release is None else pointer_of_release(release, releases)


def open_published(
    store: ArtefactStore, open_snapshot: OpenSnapshot, generation: str, blocklist: Blocklist
) -> Snapshot | None:
    """Open a generation as it was last released; None, with a log line, if it never was or cannot be opened."""
    try:
        releases = all_releases(store)
        live_moves = [
            release
            for release in releases
            if release.is_done and release.generation == generation and release.action in MOVE_ACTIONS
        ]
        if live_moves:
            return open_snapshot(pointer_of_release(live_moves[-1], releases), blocklist)
    except Exception as error:
        log.warning("the previous generation %s cannot be opened: %s", generation, error, exc_info=traceback_of(error))
        return None
    log.warning("no release made %s live, so it is not held as previous", generation)
    return None


def pointer_of_release(release: Release, releases: Sequence[Release] = ()) -> Pointer:
    """Return the pointer that a completed move wrote; `releases` have the publication time of a restored generation."""
    published_at = publication_time(releases, release.generation) or release.at
    return Pointer(release.generation, release.epoch, release.previous, release.attempt, published_at)

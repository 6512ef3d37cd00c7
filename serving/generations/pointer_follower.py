"""Follower of the pointer, to greater epochs only: stages the next generation, reopens degraded ones."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from cache.control.control_keys import Staging
from cache.errors import CorruptArtefact, LarderError, TierUnavailable, mask_secrets, traceback_of
from cache.l2.control_plane import ControlPlane
from cache.store.artefacts import ArtefactStore
from cache.store.releases import Pointer
from serving.generations.holder import GenerationHolder, newest_pointer
from serving.generations.served_set import ServedGenerations
from serving.generations.snapshot import Snapshot
from serving.metrics.registry import Metrics
from serving.process.resources import StoreThreads
from serving.requests.reasons import StaleReason

log = logging.getLogger(__name__)

T = TypeVar("T")
ConcernSubject = Literal["background", "blocklist", "events", "eviction", "experiments", "pointer", "redis"]
PointerVerdict = Literal["same", "newer", "vanished", "backwards", "conflicting"]

_STALE_REASON_BY_VERDICT: Mapping[PointerVerdict, StaleReason] = {
    "vanished": StaleReason.POINTER_VANISHED,
    "backwards": StaleReason.POINTER_BACKWARDS,
    "conflicting": StaleReason.POINTER_CONFLICTING,
}
"""Stale reason for each verdict on a pointer that is not followed."""

_LOAD_RETRY_S = 10.0
"""Seconds between attempts to load the live generation: each reads and checks every file."""

_STAGE_RETRY_S = 5.0
"""Seconds between attempts to load the staged generation: each reads and checks every file."""

_STAGE_TOP_UP_S = 1.0
"""Seconds between top-ups of the staged generation: until the flip they read newly popular ids ahead."""

_REOPEN_FIRST_S = 10.0

_REOPEN_MAX_S = 640.0
"""Longest wait in seconds before a degraded generation is reopened; doubles per attempt. Its pages answer meanwhile."""


@dataclass(frozen=True, slots=True)
class Health:
    """Readiness of a replica; the other fields are reasons for limitations, or None.

    `degraded_reason` and `failure_reason` contain error texts with files, hosts and checksums: only for callers with a
    token.
    """

    is_ready: bool
    stale_reason: str | None
    degraded_reason: str | None
    failure_reason: str | None
    public_failure: str | None = None
    """Public text for `failure_reason`."""

    def to_public_json(self) -> dict[str, bool | str | None]:
        """Return the fields of health without the details of errors."""
        degraded = None if self.degraded_reason is None else "no_model"
        return {"ready": self.is_ready, "stale": self.stale_reason, "degraded": degraded, "failed": self.public_failure}


class PointerFollower:
    """Controller of the held generations; only a greater epoch changes the live one."""

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
        in_thread: StoreThreads,
        monotonic_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_draining = False
        self.holder = holder
        self.progress = PointerProgress(load_bound_s, monotonic_clock)
        self.staged = StagedGeneration(holder, clock, monotonic_clock)
        self._store = store
        self._control = control
        self._metrics = metrics
        self._poll_s, self._load_bound_s = poll_s, load_bound_s
        self._in_thread = in_thread
        self._monotonic_clock = monotonic_clock
        self.concerns = Concerns("pointer", StaleReason.STARTING)
        self._retry_s, self._retry_at = min(_LOAD_RETRY_S, load_bound_s / 3), 0.0
        self._degraded_reopen = DegradedReopen(holder, monotonic_clock)
        self._poll_lock = asyncio.Lock()
        self._previous_load_task: asyncio.Task[None] | None = None

    @property
    def served(self) -> ServedGenerations | None:
        """Generations that answers come from, None before any is loaded."""
        return self.holder.served

    @property
    def load_failure(self) -> str | None:
        """Reason why the newest known pointer's generation cannot be loaded, or None."""
        return self.progress.load_failure

    @property
    def epoch(self) -> int | None:
        """Epoch of the live generation, None before there is one."""
        return None if self.served is None else self.served.live.epoch

    @property
    def is_publisher_waiting(self) -> bool:
        """True while a publisher waits for its replicas: the pointer may move any moment."""
        served = self.served
        return self.staged.unexpired_generation(None if served is None else served.live.generation) is not None

    @property
    def stale_reason(self) -> str | None:
        """Reason why answers may lag behind, or None."""
        return self.concerns.reasons_text

    @property
    def health(self) -> Health:
        """Health of the replica; without Redis it stays ready.

        A replica is not ready if it cannot load a published generation in time, or cannot enforce the blocklist that it
        read.
        """
        served, unready_reason = self.served, self.progress.unready_reason()
        if self.is_draining:
            unready_reason = "this replica is stopping"
        elif served is not None and unready_reason is None and not self.holder.is_blocklist_known:
            unready_reason = "no version of the blocklist could be read"
        elif served is not None and unready_reason is None and self.holder.enforcement_error is not None:
            unready_reason = f"version {self.holder.blocklist.version} of the blocklist is not in force"
        degraded = None if served is None else served.live.degraded_reason
        ready = served is not None and unready_reason is None
        failed = unready_reason or self.load_failure
        public_failure = self.progress.public_failure() if failed == self.load_failure else unready_reason
        return Health(ready, self.stale_reason, degraded, failed, public_failure)

    @property
    def failure_by_generation(self) -> dict[str, str]:
        """Reason by generation why it cannot be loaded here."""
        reason_by_generation = {}
        if self.staged.requested_generation is not None and self.staged.load_failure is not None:
            reason_by_generation[self.staged.requested_generation] = self.staged.load_failure
        if self.progress.newest_pointer is not None and self.load_failure is not None:
            reason_by_generation[self.progress.newest_pointer.generation] = self.load_failure
        return reason_by_generation

    @property
    def canary_problem(self) -> str | None:
        """Why this replica does not hold the canary that runs, or None."""
        canary, served = self.holder.canary, self.served
        if canary is None or served is None or served.canary is not None:
            return None
        failure_reason = self.failure_by_generation.get(canary.generation)
        return f"{canary.generation} {f'cannot be loaded: {failure_reason}' if failure_reason else 'is not loaded yet'}"

    def note_concern(self, subject: ConcernSubject, stale_reason: str | None, remedy: str = "") -> None:
        """Set a reason why answers may lag behind, or clear it (None); log a change."""
        if self.concerns.note(subject, stale_reason) and stale_reason is not None:
            log.warning("stale: %s%s", stale_reason, remedy and f": {remedy}")

    async def poll_pointer(self) -> None:
        """Read the pointer, follow a newer one, stage the next generation and reopen a degraded one."""
        async with self._poll_lock:
            await self._poll_pointer()
            self._stage_wanted()
            self._degraded_reopen.reopen_if_due(self.progress.followed_pointer)

    async def _poll_pointer(self) -> None:
        if (pointer_and_note := await self._read_pointer_and_staging()) is None:
            await self._start_from_releases(None)
            return
        pointer, staging_note = pointer_and_note
        self.staged.update_note(staging_note)
        # Releases in the records that Redis does not know were lost with an earlier Redis.
        await self._start_from_releases(pointer)
        verdict = judge_pointer(pointer, self.progress.newest_pointer)
        if verdict == "newer" and pointer is not None:
            await self._follow(pointer)
        elif verdict != "same":
            self._note_pointer_concern(_STALE_REASON_BY_VERDICT[verdict])
        elif not self.progress.is_behind:
            self._clear_pointer_concern()
        elif self.progress.newest_pointer is not None and self._monotonic_clock() >= self._retry_at:
            await self._follow(self.progress.newest_pointer)
        else:
            self._note_pointer_concern(StaleReason.LOAD_FAILED)

    async def _read_pointer_and_staging(self) -> tuple[Pointer | None, bytes | None] | None:
        """Read pointer and staging note; on an error return None and set a concern."""
        try:
            pointer_bytes, staging_note = await self._control.watch()
            self.note_concern("redis", None)
            return None if pointer_bytes is None else Pointer.from_bytes(pointer_bytes), staging_note
        except TierUnavailable:
            self.note_concern("redis", StaleReason.REDIS_UNREACHABLE)
            self.note_concern("pointer", None)  # its state is unknown now
            self._metrics.refreshes.labels(StaleReason.REDIS_UNREACHABLE).inc()
        except CorruptArtefact as error:
            self._note_pointer_concern(StaleReason.POINTER_CORRUPT, str(error))
        return None

    def _stage_wanted(self) -> None:
        """Stage at most one generation besides live and previous: the staging note's, else the canary's."""
        followed, wanted_generation = self.progress.followed_pointer, None
        if not self.progress.is_behind:  # a newer live generation is loaded first
            wanted_generation = self.staged.unexpired_generation(None if followed is None else followed.generation)
            if wanted_generation is None and followed is not None and followed.canary is not None:
                wanted_generation = followed.canary.generation
        self.staged.stage(wanted_generation)

    async def wait_until_settled(self) -> None:
        """Wait until loads of the previous, the staged and a degraded generation have ended."""
        await self.staged.wait_until_settled()
        await self._degraded_reopen.wait_until_settled()
        if self._previous_load_task is not None:
            await asyncio.wait({self._previous_load_task})

    async def aclose(self) -> None:
        """Stop loading."""
        tasks = self.staged.drop(), self._degraded_reopen.drop(), self._previous_load_task
        pending = {task for task in tasks if task is not None}
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)

    async def _start_from_releases(self, pointer: Pointer | None) -> None:
        if self.progress.followed_pointer is not None or (
            self.load_failure and self._monotonic_clock() < self._retry_at
        ):
            return
        try:
            recorded_pointer = await self._in_thread(newest_pointer, self._store)
        except (LarderError, OSError, ValueError) as error:
            log.error("the release records cannot be read: %s", error, exc_info=traceback_of(error))
            return
        if recorded_pointer is not None and (pointer is None or pointer.epoch < recorded_pointer.epoch):
            await self._follow(recorded_pointer, is_from_redis=False)

    async def _follow(self, pointer: Pointer, *, is_from_redis: bool = True) -> None:
        self.progress.note_newer(pointer)
        if self._previous_load_task is not None:
            self._previous_load_task.cancel()
        try:
            live_snapshot = await self._get_or_load(pointer)
            if not isinstance(live_snapshot, Pointer):
                self.holder.serve(live_snapshot, pointer)
        except Exception as error:  # the old generation stays live after any error
            log.error("generation %s cannot be loaded: %s", pointer.generation, error, exc_info=traceback_of(error))
            await self._note_load_failure(pointer, str(error))
            return
        if isinstance(live_snapshot, Pointer):
            # Rolled back or superseded while it was loading: it must not answer any request.
            await self._follow(live_snapshot)
            return
        self.progress.note_served(pointer)
        self._degraded_reopen.begin()
        if is_from_redis:
            self._clear_pointer_concern()
        log.info("serving generation %s of epoch %d", pointer.generation, pointer.epoch)
        if pointer.previous is not None and self.served and self.served.previous is None:
            self._previous_load_task = asyncio.create_task(self._load_previous(pointer, pointer.previous))

    async def _note_load_failure(self, pointer: Pointer, failure_reason: str) -> None:
        failure_reason = mask_secrets(failure_reason)
        self.progress.load_failure = f"generation {pointer.generation} cannot be loaded: {failure_reason}"
        self._retry_at = self._monotonic_clock() + self._retry_s
        self._note_pointer_concern(StaleReason.LOAD_FAILED)
        await self._unless_overtaken(pointer, self._fall_back(pointer))

    async def _unless_overtaken(self, pointer: Pointer, load_work: Coroutine[Any, Any, T]) -> T | Pointer:
        """Return the result of `load_work`, or a newer pointer if one appears: a rollback does not wait for a load."""
        task = asyncio.create_task(load_work)
        try:
            while True:
                finished_tasks, _ = await asyncio.wait({task}, timeout=self._poll_s)
                if (newer_pointer := await self._read_newer_pointer(pointer)) is not None:
                    return newer_pointer
                if finished_tasks:
                    return await task
        finally:
            if not task.cancel():  # already finished: retrieve its error
                task.exception()

    async def _get_or_load(self, pointer: Pointer) -> Snapshot | Pointer:
        if (snapshot := self.holder.find_snapshot(pointer.generation)) is not None:
            return snapshot
        return await self._unless_overtaken(pointer, self._load(pointer))

    async def _load(self, pointer: Pointer) -> Snapshot:
        if self.staged.is_loading(pointer.generation):
            # Bounded: the staging thread may hang, or wait for one that hangs.
            await self.staged.wait_until_settled(self._load_bound_s)
            if (staged_snapshot := self.holder.find_snapshot(pointer.generation)) is not None:
                return staged_snapshot
        self.staged.drop()  # at most one generation besides live and previous is held
        live_snapshot = await self.holder.load(pointer)
        await self.holder.warm(live_snapshot)
        return live_snapshot

    async def _fall_back(self, pointer: Pointer) -> None:
        """If no generation is held yet, serve the previous one rather than nothing; the replica stays unready."""
        if self.served is not None or pointer.previous is None:
            return
        previous = await self.holder.open_superseded(self._store, pointer.previous)
        if previous is not None:
            self.holder.replace_served(ServedGenerations(previous))
            log.warning("answering from the previous generation %s", pointer.previous)

    async def _read_newer_pointer(self, pointer: Pointer) -> Pointer | None:
        if (pointer_and_note := await self._read_pointer_and_staging()) is None:
            return None
        current_pointer, _ = pointer_and_note
        return current_pointer if judge_pointer(current_pointer, pointer) == "newer" else None

    async def _load_previous(self, pointer: Pointer, generation: str) -> None:
        previous = await self.holder.open_superseded(self._store, generation)
        if previous is not None and self.served is not None and self.progress.followed_pointer is pointer:
            self.holder.replace_served(dataclasses.replace(self.served, previous=previous))

    def _note_pointer_concern(self, stale_reason: str, remedy: str = "") -> None:
        self.note_concern("pointer", stale_reason, remedy)
        self._metrics.refreshes.labels(stale_reason).inc()

    def _clear_pointer_concern(self) -> None:
        self.note_concern("pointer", None)
        self._metrics.refreshes.labels("in_step").inc()


class PointerProgress:
    """Lag of a replica; it becomes unready `load_bound_s` seconds after a new pointer, retries included."""

    def __init__(self, load_bound_s: float, monotonic_clock: Callable[[], float]) -> None:
        self.newest_pointer: Pointer | None = None
        self.followed_pointer: Pointer | None = None
        self.load_failure: str | None = None
        self._load_bound_s = load_bound_s
        self._monotonic_clock = monotonic_clock
        self._behind_since = 0.0

    @property
    def is_behind(self) -> bool:
        """True if the newest known pointer is not the served one."""
        return self.newest_pointer is not self.followed_pointer

    def note_newer(self, pointer: Pointer) -> None:
        """Record a newer pointer; while the replica is behind, further pointers do not restart the bound."""
        if not self.is_behind:
            self._behind_since = self._monotonic_clock()
        self.newest_pointer = pointer

    def note_served(self, pointer: Pointer) -> None:
        """Record that the pointer's generation is served now."""
        self.followed_pointer, self.load_failure = pointer, None

    def unready_reason(self) -> str | None:
        """Return the reason why this replica is unready, or None; a failed first load counts immediately."""
        if self.newest_pointer is None or not self.is_behind:
            return None
        is_first = self.followed_pointer is None and self.load_failure is not None
        if not is_first and self._monotonic_clock() - self._behind_since < self._load_bound_s:
            return None
        return self.load_failure or f"generation {self.newest_pointer.generation} is still loading"

    def public_failure(self) -> str | None:
        """Return `load_failure` without the error's text, for the public."""
        if self.load_failure is None or self.newest_pointer is None:
            return None
        return f"generation {self.newest_pointer.generation} cannot be loaded"


def judge_pointer(pointer: Pointer | None, seen_pointer: Pointer | None) -> PointerVerdict:
    """Compare the pointer with the newest one that the replica has seen."""
    if pointer is None:
        return "vanished"
    if seen_pointer is None or pointer.epoch > seen_pointer.epoch:
        return "newer"
    if pointer.epoch < seen_pointer.epoch:
        return "backwards"
    return "same" if pointer.generation == seen_pointer.generation else "conflicting"


class Concerns:
    """Reasons why answers may lag behind: at most one per followed subject."""

    def __init__(self, subject: ConcernSubject, stale_reason: str) -> None:
        self.reasons_text: str | None = stale_reason
        """All reasons, separated by commas, or None; for callers and probes."""
        self._reason_by_subject: dict[ConcernSubject, str] = {subject: stale_reason}

    def note(self, subject: ConcernSubject, stale_reason: str | None) -> bool:
        """Set a concern, or clear it (None); return whether that changed it."""
        if self._reason_by_subject.get(subject) == stale_reason:
            return False
        if stale_reason is None:
            del self._reason_by_subject[subject]
        else:
            self._reason_by_subject[subject] = stale_reason
        self.reasons_text = (
            ",".join(stale_reason for _, stale_reason in sorted(self._reason_by_subject.items())) or None
        )
        return True


class StagedGeneration:
    """Staged generation, at most one at a time; staging another one, or none, releases it."""

    def __init__(
        self, holder: GenerationHolder, clock: Callable[[], float], monotonic_clock: Callable[[], float]
    ) -> None:
        self.requested_generation: str | None = None
        self.is_ready = False
        self.load_failure: str | None = None
        self.warm_s: float | None = None
        self._staging_note: Staging | None = None
        self._holder = holder
        self._clock = clock
        self._monotonic_clock = monotonic_clock
        self._load_task: asyncio.Task[None] | None = None
        self._next_load_at = 0.0

    def update_note(self, staging_note_bytes: bytes | None) -> None:
        """Store the staging note from Redis; an unreadable note counts as none."""
        try:
            self._staging_note = None if staging_note_bytes is None else Staging.from_bytes(staging_note_bytes)
        except CorruptArtefact as error:
            log.warning("the staging note cannot be read, no generation is staged: %s", error)
            self._staging_note = None

    def unexpired_generation(self, live_generation: str | None) -> str | None:
        """Return the staging note's generation, unless the note has expired (by Redis' clock) or names the live one."""
        staging_note = self._staging_note
        if staging_note is None or staging_note.generation == live_generation or self._clock() >= staging_note.until:
            return None
        return staging_note.generation

    def stage(self, generation: str | None) -> None:
        """Set the generation to hold, without waiting. Called at every poll, so it also retries and tops up."""
        if generation != self.requested_generation:
            self.drop()
            self.requested_generation = generation
            self._start_if_idle(self._load)
        elif generation is not None and self._monotonic_clock() >= self._next_load_at:
            self._start_if_idle(self._top_up if self.is_ready else self._load)

    def drop(self) -> asyncio.Task[None] | None:
        """Release the held or loading generation; return the cancelled task of the load."""
        task = self._load_task
        if task is not None:
            task.cancel()
        if self.is_ready:
            self._holder.hold_staged(None)
        self._load_task, self.requested_generation, self.load_failure, self.is_ready = (None, None, None, False)
        return task

    async def wait_until_settled(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is loading, or for `timeout_s`."""
        if self._load_task is not None:
            await asyncio.wait({self._load_task}, timeout=timeout_s)

    def is_loading(self, generation: str) -> bool:
        """True if a load or a top-up of this generation is under way."""
        return generation == self.requested_generation and self._load_task is not None and not self._load_task.done()

    def _start_if_idle(self, load_or_top_up: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        if self.requested_generation is None or (self._load_task is not None and not self._load_task.done()):
            return
        self._load_task = asyncio.create_task(load_or_top_up(self.requested_generation))

    async def _load(self, generation: str) -> None:
        started_at = self._monotonic_clock()
        try:
            snapshot = self._holder.find_snapshot(generation) or await self._holder.open_staged(generation)
            if (reason := self._holder.refusal_reason(snapshot)) is not None:
                self._note_failure(generation, reason)
                return
            await self._holder.warm(snapshot)
        except Exception as error:  # the live generation goes on after any error
            if traceback_of(error):  # else the line of `_note_failure` is enough
                log.exception("generation %s cannot be staged", generation)
            self._note_failure(generation, mask_secrets(str(error)) or type(error).__name__)
            return
        self.load_failure, self.is_ready = None, True
        self.warm_s = self._monotonic_clock() - started_at
        self._next_load_at = self._monotonic_clock() + _STAGE_TOP_UP_S
        self._holder.hold_staged(snapshot)
        log.info("generation %s is ready after %.3f s", generation, self.warm_s)

    def _note_failure(self, generation: str, failure_reason: str) -> None:
        log.warning("generation %s is not ready: %s", generation, failure_reason)
        self.load_failure, self._next_load_at = failure_reason, self._monotonic_clock() + _STAGE_RETRY_S

    async def _top_up(self, generation: str) -> None:
        if (snapshot := self._holder.find_snapshot(generation)) is not None:
            await self._holder.warm(snapshot)
        self._next_load_at = self._monotonic_clock() + _STAGE_TOP_UP_S


class DegradedReopen:
    """Reopening of a degraded live generation in the background, while polls and rollbacks go on."""

    def __init__(self, holder: GenerationHolder, monotonic_clock: Callable[[], float]) -> None:
        self._holder = holder
        self._monotonic_clock = monotonic_clock
        self._reopen_at, self._wait_s = 0.0, _REOPEN_FIRST_S
        self._load_task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Restart for another live generation; cancel a load for the former one."""
        self.drop()
        self._reopen_at, self._wait_s = self._monotonic_clock() + _REOPEN_FIRST_S, _REOPEN_FIRST_S

    def reopen_if_due(self, pointer: Pointer | None) -> None:
        """Start to reopen the pointer's generation if it is degraded and the wait has ended; does not wait."""
        served = self._holder.served
        if served is None or pointer is None or served.live.degraded_reason is None:
            return
        if self._monotonic_clock() < self._reopen_at or (self._load_task is not None and not self._load_task.done()):
            return
        self._wait_s = min(2 * self._wait_s, _REOPEN_MAX_S)
        self._reopen_at = self._monotonic_clock() + self._wait_s
        self._load_task = asyncio.create_task(self._reopen(pointer))

    def drop(self) -> asyncio.Task[None] | None:
        """Cancel the load; return its task."""
        if self._load_task is not None:
            self._load_task.cancel()
        return self._load_task

    async def wait_until_settled(self) -> None:
        """Wait until nothing is loading."""
        if self._load_task is not None:
            await asyncio.wait({self._load_task})

    async def _reopen(self, pointer: Pointer) -> None:
        try:
            reopened_snapshot = await self._holder.load(pointer)
        except Exception as error:
            log.warning("generation %s cannot be reopened: %s", pointer.generation, error, exc_info=traceback_of(error))
            return
        served = self._holder.served
        # Meanwhile another release may have become live, also of this generation; it has another epoch.
        if reopened_snapshot.degraded_reason is None and served is not None and served.live.epoch == pointer.epoch:
            self._holder.replace_served(dataclasses.replace(served, live=reopened_snapshot))

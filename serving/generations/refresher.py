"""Background tasks of a replica: poll pointer and blocklist, listen for announcements, send heartbeats."""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from redis.exceptions import ResponseError

from cache.errors import LarderError, TierUnavailable
from cache.l2.control_plane import ControlPlane
from cache.l2.resp import WrongReply
from cache.process.background_loops import BackgroundLoops, cancel_and_wait
from cache.store.artefacts import COPY_IDLE_S, ArtefactStore
from cache.store.blocklist import Blocklist
from serving.generations.blocklist_source import BlocklistSource
from serving.generations.heartbeat import Heartbeat
from serving.generations.pointer_follower import PointerFollower
from serving.process.resources import StoreThreads
from serving.requests.reasons import StaleReason

log = logging.getLogger(__name__)

_EXPECTING_POLL_S = 0.1
"""Seconds between polls of the pointer while a generation is staged."""

_EVICTION_CHECK_S = 30.0
"""Seconds between looks at Redis' eviction policy, which a provider may change."""

_COPIES_SWEEP_S = 600.0
BackgroundStep = Callable[[], Coroutine[Any, Any, None]]


class Refresher:
    """Runs the background tasks of a replica; announcements only make polls happen earlier."""

    def __init__(
        self,
        follower: PointerFollower,
        store: ArtefactStore,
        control: ControlPlane,
        heartbeat: Heartbeat,
        *,
        poll_s: float,
        blocklist_poll_s: float,
        heartbeat_s: float,
        in_thread: StoreThreads,
        monotonic_clock: Callable[[], float] = time.monotonic,
        loops: BackgroundLoops | None = None,
    ) -> None:
        self.follower = follower
        self._loops = BackgroundLoops() if loops is None else loops
        self.blocklist_read_at = monotonic_clock()
        self._blocklist_source = BlocklistSource(store, monotonic_clock)
        self._last_blocklist: Blocklist | None = None
        self._store = store
        self._control = control
        self._heartbeat = heartbeat
        self._last_heartbeat: bytes | None = None
        self._in_thread = in_thread
        self._monotonic_clock = monotonic_clock
        self._poll_s = poll_s
        self._pointer_event, self._blocklist_event, self._heartbeat_event = (
            asyncio.Event(), asyncio.Event(), asyncio.Event(),
        )  # fmt: skip
        self._event_by_announcement = {b"blocklist": self._blocklist_event}
        self._periodic_steps: list[tuple[str, Callable[[], float], BackgroundStep, asyncio.Event]] = [
            ("pointer", self.pointer_poll_s, follower.poll_pointer, self._pointer_event),
            ("blocklist", lambda: blocklist_poll_s, self.refresh_blocklist, self._blocklist_event),
            ("heartbeat", lambda: heartbeat_s, self.send_heartbeat, self._heartbeat_event),
            ("host_copies", lambda: _COPIES_SWEEP_S, self.sweep_copies, asyncio.Event()),
        ]
        self._background_tasks: list[asyncio.Task[None]] = []
        self._named_loops: list[tuple[str, BackgroundStep]] = []
        self._heartbeat_lock = asyncio.Lock()
        self._is_eviction_safe = self._is_eviction_policy_unknown = False
        self._eviction_checked_at = 0.0

    def add_periodic(
        self, loop_name: str, step_interval_s: float, step: BackgroundStep, announcement: bytes | None = None
    ) -> None:
        """Add a step that runs every `step_interval_s` seconds from the start on, and when `announcement` is announced.

        `loop_name` is the name of its loop in the log and in metrics.
        """
        self._periodic_steps.append((loop_name, lambda: step_interval_s, step, wake_event := asyncio.Event()))
        if announcement is not None:
            self._event_by_announcement[announcement] = wake_event

    def add_loop(self, loop_name: str, run_loop: BackgroundStep) -> None:
        """Add a function that runs in a background loop with this name, from `start` until `aclose`."""
        self._named_loops.append((loop_name, run_loop))

    async def start(self) -> None:
        """Run every step once, then keep running them in the background."""
        await self.refresh_blocklist()
        await self.follower.poll_pointer()
        await self.refresh_blocklist()  # again: loading takes minutes, in which the blocklist may have changed
        await self.send_heartbeat()
        self.follower.holder.on_change = self._heartbeat_event.set  # publishers wait for it
        for name, pause_s, step, wake_event in self._periodic_steps:
            wait = functools.partial(_wait_for_wake, pause_s, wake_event)
            self._background_tasks.append(self._loops.start(name, step, wait=wait))
        for name, run_loop in (("announcements", self.listen), *self._named_loops):
            self._background_tasks.append(self._loops.start(name, run_loop))

    async def aclose(self) -> None:
        """Stop the background tasks, and sign off."""
        await cancel_and_wait(self._background_tasks)
        await self.follower.aclose()
        await self._sign_off()

    async def drain(self) -> None:
        """Make the replica unready and sign it off, while it still answers."""
        self.follower.is_draining = True
        await self._sign_off()

    def pointer_poll_s(self) -> float:
        """Return the seconds until the next poll, which are fewer while a publisher waits for its replicas."""
        return min(self._poll_s, _EXPECTING_POLL_S) if self.follower.is_publisher_waiting else self._poll_s

    async def refresh_blocklist(self) -> None:
        """Put the newest readable blocklist in force; if it may not be all that is blocked, note a concern.

        A version that could not be put in force is tried again at each poll, before the store is read.
        """
        follower, holder = self.follower, self.follower.holder
        is_enforced = await holder.enforce()
        try:
            blocklist, read_error = await self._in_thread(self._blocklist_source.read)
        except (LarderError, OSError, ValueError) as error:
            blocklist, read_error = None, str(error)
        if blocklist is not None and blocklist is not self._last_blocklist:
            is_enforced = await holder.put_own_blocklist_in_force(blocklist)
            self._last_blocklist = blocklist
        if not is_enforced:
            remedy = f"it is tried again at each poll; the error was {holder.enforcement_error}"
            follower.note_concern("blocklist", StaleReason.BLOCKLIST_NOT_ENFORCED, remedy)
            return
        follower.note_concern("blocklist", read_error and StaleReason.BLOCKLIST_UNREADABLE, read_error or "")
        if read_error is None:
            self.blocklist_read_at = self._monotonic_clock()

    async def sweep_copies(self) -> None:
        """Remove this host's copies of generations that the store no longer has, except held ones."""
        generations, idle_cutoff_at = self.follower.holder.generations, time.time() - COPY_IDLE_S
        await self._in_thread(self._store.sweep_host_copies, generations, cutoff_at=idle_cutoff_at)

    async def send_heartbeat(self) -> None:
        """Send one heartbeat with the served generation and those that must not be retired."""
        async with self._heartbeat_lock:
            if self.follower.is_draining:
                return
            try:
                requested_at_s = self._monotonic_clock()
                self._heartbeat.clock.set(await self._control.time(), requested_at_s)
                payload = orjson.dumps(self._heartbeat.payload())
                await self._control.heartbeat(payload, self._heartbeat.clock(), self._last_heartbeat)
                self._last_heartbeat = payload
            except TierUnavailable:
                self._is_eviction_safe = False  # after an outage it may be another Redis
                return
        if not self._is_eviction_safe or self._monotonic_clock() - self._eviction_checked_at >= _EVICTION_CHECK_S:
            await self._check_eviction_policy()

    async def _check_eviction_policy(self) -> None:
        try:
            policy = await self._control.eviction_policy()
        except TierUnavailable as error:
            cause = error.__cause__
            if not isinstance(cause, ResponseError) or isinstance(cause, WrongReply):
                return  # Redis is unreachable again; a later heartbeat checks
            policy = ""  # this user has no permission for INFO
        if not policy and not self._is_eviction_policy_unknown:
            log.warning("Redis' maxmemory-policy is unknown: make sure that it is volatile-lru")
        self._is_eviction_policy_unknown = self._is_eviction_policy_unknown or not policy
        self._is_eviction_safe = not policy.startswith("allkeys")
        self._eviction_checked_at = self._monotonic_clock()
        self.follower.note_concern(
            "eviction",
            None if self._is_eviction_safe else StaleReason.EVICTION_POLICY,
            f"Redis has maxmemory-policy {policy}, which may evict published pages; set volatile-lru",
        )

    async def _sign_off(self) -> None:
        async with self._heartbeat_lock:
            last_heartbeat, self._last_heartbeat = self._last_heartbeat, None
            if last_heartbeat is not None:
                with contextlib.suppress(TierUnavailable):
                    await self._control.sign_off(last_heartbeat)

    async def listen(self) -> None:
        """Receive announcements over one connection, until it ends."""
        try:
            with contextlib.suppress(TierUnavailable):
                # Closed explicitly: otherwise the generator would live until the event loop's hook closes it.
                async with contextlib.aclosing(self._control.subscribe()) as messages:
                    async for message in messages:
                        self._event_by_announcement.get(message, self._pointer_event).set()
        finally:
            self._is_eviction_safe = False  # after an outage it may be another Redis
        await asyncio.sleep(self._poll_s)


async def _wait_for_wake(pause_s: Callable[[], float], wake_event: asyncio.Event) -> None:
    """Return after a pause, or as soon as `wake_event` is set."""
    # Not `wait_for`: in Python 3.11 it can lose a cancellation that coincides with the event.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(pause_s()):
            await wake_event.wait()
    wake_event.clear()

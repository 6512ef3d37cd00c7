"""Background of a replica: polls pointer and blocklist, listens for announcements, and sends heartbeats."""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from redis.exceptions import ResponseError

from cache.errors import CorruptArtefact, LarderError, StoreError, TierUnavailable
from cache.l2.control_plane import ControlPlane
from cache.l2.resp import WrongReply
from cache.process.background_loops import BackgroundLoops, cancel_and_wait
from cache.store.artefacts import COPY_IDLE_S, ArtefactStore
from cache.store.blocklist import Blocklist
from serving.generations.heartbeat import Heartbeat
from serving.generations.pointer_follower import PointerFollower
from serving.process.resources import StoreThreads
from serving.requests.reasons import StaleReason

log = logging.getLogger(__name__)

_EXPECTING_POLL_S = 0.1
"""Seconds between polls of the pointer while a generation is staged."""

_COPIES_SWEEP_S = 600.0
BackgroundStep = Callable[[], Coroutine[Any, Any, None]]


class Refresher:
    """Runs the background of a replica; announcements only shorten what polling finds anyway."""

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
        timer: Callable[[], float] = time.monotonic,
        loops: BackgroundLoops | None = None,
    ) -> None:
        self.follower = follower
        self._loops = BackgroundLoops() if loops is None else loops
        self.blocklist_read_at = timer()
        self._store = store
        self._control = control
        self._heartbeat = heartbeat
        self._beaten: bytes | None = None
        self._in_thread = in_thread
        self._timer = timer
        self._poll_s = poll_s
        self._wake_pointer, self._wake_blocklist, self._wake_beat = (
            asyncio.Event(), asyncio.Event(), asyncio.Event(),
        )  # fmt: skip
        self._wakes = {b"blocklist": self._wake_blocklist}
        self._steps: list[tuple[str, Callable[[], float], BackgroundStep, asyncio.Event]] = [
            ("pointer", self.look_s, follower.poll_pointer, self._wake_pointer),
            ("blocklist", lambda: blocklist_poll_s, self.look_at_blocklist, self._wake_blocklist),
            ("heartbeat", lambda: heartbeat_s, self.beat, self._wake_beat),
            ("host_copies", lambda: _COPIES_SWEEP_S, self.sweep_copies, asyncio.Event()),
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self._runs: list[tuple[str, BackgroundStep]] = []
        self._beating = asyncio.Lock()
        self._is_policy_fine = self._is_policy_unknown = False

    def add_periodic(
        self, name: str, pause_s: float, step: BackgroundStep, wake: bytes | None = None
    ) -> None:
        """Takes another step, every `pause_s` seconds from the start on, and when `wake` is announced.

        `name` is that of its loop, in the log and in metrics.
        """
        self._steps.append((name, lambda: pause_s, step, event := asyncio.Event()))
        if wake is not None:
            self._wakes[wake] = event

    def add_loop(self, name: str, run: BackgroundStep) -> None:
        """Take a run along, in a background loop with this name, from the start until this is closed."""
        self._runs.append((name, run))

    async def start(self) -> None:
        """Takes every step once, then keeps taking them in the background."""
        await self.look_at_blocklist()
        await self.follower.poll_pointer()
        await self.look_at_blocklist()  # loading takes minutes, in which more may have been blocked
        await self.beat()
        self.follower.holder.on_change = (
            self._wake_beat.set
        )  # whoever waits for a swap hears of it at once
        for name, pause_s, step, wake in self._steps:
            wait = functools.partial(_wait_for_wake, pause_s, wake)
            self._tasks.append(self._loops.start(name, step, wait=wait))
        for name, run in (("announcements", self.listen), *self._runs):
            self._tasks.append(self._loops.start(name, run))

    async def aclose(self) -> None:
        """Stops the background, and signs off."""
        await cancel_and_wait(self._tasks)
        await self.follower.aclose()
        await self._sign_off()

    async def drain(self) -> None:
        """Makes the replica not ready and signed off from now on, while answers go on."""
        self.follower.is_draining = True
        await self._sign_off()

    def look_s(self) -> float:
        """Seconds to the next look: a replica that a publisher waits for must not be the one that flips late."""
        return min(self._poll_s, _EXPECTING_POLL_S) if self.follower.is_expecting else self._poll_s

    async def look_at_blocklist(self) -> None:
        """Take over the newest blocklist that can be read; what cannot be read leaves the last in force, marked.

        A version that could not be put in force is tried again at each look, before the store is asked.
        """
        follower, holder = self.follower, self.follower.holder
        is_enforced = await holder.enforce()
        current = holder.blocklist.version if holder.is_blocklist_known else -1
        try:
            blocklist, trouble = await self._in_thread(newest_blocklist, self._store, current)
        except (LarderError, OSError, ValueError) as error:
            blocklist, trouble = None, str(error)
        if blocklist is not None:
            is_enforced = await holder.block(blocklist)
        if not is_enforced:
            remedy = f"it is tried again at each look; the error was {holder.enforcement_error}"
            follower.note("blocklist", StaleReason.BLOCKLIST_NOT_ENFORCED, remedy)
            return
        follower.note("blocklist", trouble and StaleReason.BLOCKLIST_UNREADABLE, trouble or "")
        if trouble is None:
            self.blocklist_read_at = self._timer()

    async def sweep_copies(self) -> None:
        """Remove this host's copies of generations that the store no longer has, never of one held here."""
        generations, idle_cutoff_at = self.follower.holder.generations, time.time() - COPY_IDLE_S
        await self._in_thread(self._store.sweep_host_copies, generations, cutoff_at=idle_cutoff_at)

    async def beat(self) -> None:
        """Send one heartbeat with the served generation and those that must not be retired."""
        async with self._beating:
            if self.follower.is_draining:
                return
            try:
                asked_at = self._timer()
                self._heartbeat.clock.set(await self._control.time(), asked_at)
                payload = orjson.dumps(self._heartbeat.payload())
                await self._control.heartbeat(payload, self._heartbeat.clock(), self._beaten)
                self._beaten = payload
            except TierUnavailable:
                self._is_policy_fine = False  # what comes back may be another Redis
                return
        if not self._is_policy_fine:
            await self._look_at_policy()

    async def _look_at_policy(self) -> None:
        try:
            policy = await self._control.eviction_policy()
        except TierUnavailable as error:
            cause = error.__cause__
            if not isinstance(cause, ResponseError) or isinstance(cause, WrongReply):
                return  # gone again; a later beat asks
            policy = ""  # there, but this user may not ask
        if not policy and not self._is_policy_unknown:
            log.warning("Redis does not tell its maxmemory-policy: make sure it is volatile-lru")
        self._is_policy_unknown = self._is_policy_unknown or not policy
        self._is_policy_fine = not policy.startswith("allkeys")
        self.follower.note(
            "eviction",
            None if self._is_policy_fine else StaleReason.EVICTION_POLICY,
            f"Redis has maxmemory-policy {policy}, which may evict published pages; set volatile-lru",
        )

    async def _sign_off(self) -> None:
        async with self._beating:
            beaten, self._beaten = self._beaten, None
            if beaten is not None:
                with contextlib.suppress(TierUnavailable):
                    await self._control.sign_off(beaten)

    async def listen(self) -> None:
        """Hear announcements over one connection, until it ends."""
        try:
            with contextlib.suppress(TierUnavailable):
                # Closed here: a generator left to the loop's own hook would outlive this replica.
                async with contextlib.aclosing(self._control.subscribe()) as messages:
                    async for message in messages:
                        self._wakes.get(message, self._wake_pointer).set()
        finally:
            self._is_policy_fine = False  # what comes back may be another Redis
        await asyncio.sleep(self._poll_s)


async def _wait_for_wake(pause_s: Callable[[], float], wake: asyncio.Event) -> None:
    """Return after a pause, or as soon as `wake` is set."""
    # Not wait_for: in Python 3.11 it loses a cancellation that meets the event.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(pause_s()):
            await wake.wait()
    wake.clear()


def newest_blocklist(store: ArtefactStore, current: int) -> tuple[Blocklist | None, str | None]:
    """The newest readable version above `current` (-1: none yet), and why it is not the newest of all."""
    names = store.names("blocklist")
    stems = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    versions = sorted(
        {int(stem): stem for stem in stems if len(stem) == 12 and stem.isdecimal()}.items(),
        reverse=True,
    )
    newest_version = versions[0][0] if versions else 0
    if newest_version < current:
        raise StoreError(
            f"version {newest_version} is the newest in the store, {current} is in force"
        )
    if not versions and not store.names(""):
        # A volume that is not mounted looks like a store in which nothing was ever blocked.
        raise StoreError(f"there is nothing at all in {store.url}")
    trouble = None
    for version, stem in versions:
        if version <= current:
            return None, trouble
        try:
            return _read_blocklist(store, version, stem), trouble
        except (LarderError, OSError, ValueError) as error:
            trouble = trouble or f"version {version}: {error}"
    return (Blocklist() if not versions and current < 0 else None), trouble


def _read_blocklist(store: ArtefactStore, version: int, stem: str) -> Blocklist:
    raw = store.read(f"blocklist/{stem}.json")
    blocklist = None if raw is None else Blocklist.from_bytes(raw)
    if blocklist is None or blocklist.version != version:
        raise CorruptArtefact(
            "is not there" if blocklist is None else f"calls itself {blocklist.version}"
        )
    return blocklist

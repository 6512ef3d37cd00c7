"""Keeping up: looks at pointer and blocklist, listens for announcements, and says what is held."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol

import orjson

from cache.artefacts import ArtefactStore
from cache.blocklist import latest_blocklist, newest_version
from cache.errors import LarderError, TierUnavailable
from serving.follower import Follower

log = logging.getLogger(__name__)

_CANCEL_AGAIN_S = 0.1

Step = Callable[[], Coroutine[Any, Any, None]]


class Redis(Protocol):
    """What keeping up needs of L2; everything here raises TierUnavailable."""

    def subscribe(self) -> AsyncIterator[bytes]:
        """Announcements: b"pointer" or b"blocklist"."""

    async def heartbeat(self, replica_id: str, payload: bytes, at: float) -> None:
        """Says what this replica holds."""

    async def sign_off(self, replica_id: str) -> None:
        """Takes it back."""


class Refresher:
    """Runs the background of a replica; announcements only shorten what polling finds anyway."""

    def __init__(
        self,
        follower: Follower,
        store: ArtefactStore,
        redis: Redis,
        *,
        replica_id: str,
        poll_s: float,
        blocklist_poll_s: float,
        heartbeat_s: float,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self.follower = follower
        self.blocklist_read_at = timer()
        self._store = store
        self._redis = redis
        self._replica_id = replica_id
        self._clock = clock
        self._timer = timer
        self._poll_s = poll_s
        self._wake_pointer, self._wake_blocklist, self._wake_beat = (
            asyncio.Event(), asyncio.Event(), asyncio.Event(),
        )  # fmt: skip
        self._steps: tuple[tuple[float, Step, asyncio.Event], ...] = (
            (poll_s, follower.look, self._wake_pointer),
            (blocklist_poll_s, self.look_at_blocklist, self._wake_blocklist),
            (heartbeat_s, self.beat, self._wake_beat),
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Takes every step once, then keeps taking them in the background."""
        await self.look_at_blocklist()
        await self.follower.look()
        await self.beat()
        self.follower.changed = self._wake_beat.set  # whoever waits for a swap hears of it at once
        self._tasks = [asyncio.create_task(self._every(*each)) for each in self._steps]
        self._tasks.append(asyncio.create_task(self._listen()))

    async def aclose(self) -> None:
        """Stops, and signs off."""
        pending = set(self._tasks)
        while pending:
            # Again and again: a client library may lose a cancellation that meets its reply.
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=_CANCEL_AGAIN_S)
        await self.follower.aclose()
        with contextlib.suppress(TierUnavailable):
            await self._redis.sign_off(self._replica_id)

    async def look_at_blocklist(self) -> None:
        """Takes over a newer blocklist; one that cannot be read leaves the last in force."""
        current = self.follower.blocklist.version
        try:
            if await asyncio.to_thread(newest_version, self._store) > current:
                blocklist = await asyncio.to_thread(latest_blocklist, self._store)
                await self.follower.block(blocklist)
        except (LarderError, OSError, ValueError):
            log.exception("the blocklist cannot be read; version %d stays", current)
            return
        self.blocklist_read_at = self._timer()

    async def beat(self) -> None:
        """One heartbeat: what is served, and what must not be retired."""
        held = self.follower.holding
        payload = {
            "replica": self._replica_id,
            "serving": None if held is None else held.live.generation,
            "holds": [] if held is None else list(held.generations),
            "epoch": self.follower.epoch,
        }
        with contextlib.suppress(TierUnavailable):
            await self._redis.heartbeat(self._replica_id, orjson.dumps(payload), self._clock())

    async def _listen(self) -> None:
        while True:
            with contextlib.suppress(TierUnavailable):
                async for message in self._redis.subscribe():
                    (self._wake_blocklist if message == b"blocklist" else self._wake_pointer).set()
            await asyncio.sleep(self._poll_s)

    async def _every(self, seconds: float, step: Step, wake: asyncio.Event) -> None:
        while True:
            # Not wait_for: in Python 3.11 it loses a cancellation that meets the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await wake.wait()
            wake.clear()
            try:
                await step()
            except Exception:  # a loop that ended silently would leave this replica behind for ever
                log.exception("keeping up failed; trying again in %s s", seconds)

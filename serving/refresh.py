"""Following the pointer: looking, loading off the event loop, swapping one object for another, never backwards."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import orjson

from cache.artefacts import ArtefactStore
from cache.blocklist import Blocklist, latest_blocklist, newest_version
from cache.errors import CorruptArtefact, LarderError, TierUnavailable
from cache.releases import Pointer, newest_release
from serving.config import ServingConfig
from serving.metrics import Metrics
from serving.snapshot import Holding, Snapshot

log = logging.getLogger(__name__)

_RETRY_S = 10.0
"""Between tries to load what could not be loaded: each reads and checks every file."""

Verdict = Literal["same", "newer", "vanished", "backwards", "conflicting"]


class Redis(Protocol):
    """What refreshing needs of L2."""

    async def pointer(self) -> bytes | None:
        """The live pointer."""

    def subscribe(self) -> AsyncIterator[bytes]:
        """Announcements."""

    async def heartbeat(self, replica_id: str, payload: bytes, at: float) -> None:
        """Says what this replica holds."""

    async def sign_off(self, replica_id: str) -> None:
        """Takes it back."""


class Open(Protocol):
    """Opens and warms a snapshot; slow and blocking."""

    def __call__(self, pointer: Pointer, generation: str, blocklist: Blocklist) -> Snapshot:
        """Raises LarderError or OSError when the generation cannot be loaded."""


Warm = Callable[[Snapshot, Snapshot], Coroutine[Any, Any, None]]
"""(next, current): pre-reads for the next what callers asked of the current."""


@dataclass(frozen=True, slots=True)
class Health:
    """How far this replica can be trusted; the others say why not, or None."""

    ready: bool
    stale: str | None
    degraded: str | None
    failed: str | None


def judge(pointer: Pointer | None, seen: Pointer | None) -> Verdict:
    """What a look at the pointer means for a reader that follows `seen`: only a greater epoch is followed."""
    if pointer is None:
        return "vanished"
    if seen is None or pointer.epoch > seen.epoch:
        return "newer"
    if pointer.epoch < seen.epoch:
        return "backwards"
    return "same" if pointer.generation == seen.generation else "conflicting"


class Refresher:
    """Owns what is served: `holding` is replaced as one object, and a request keeps the one it captured."""

    def __init__(
        self,
        config: ServingConfig,
        store: ArtefactStore,
        redis: Redis,
        open_snapshot: Open,
        metrics: Metrics,
        *,
        replica_id: str,
        warm: Warm | None = None,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self.holding: Holding | None = None
        self.stale: str | None = "starting"
        self.failed: str | None = None
        self.blocklist = Blocklist()
        self.blocklist_read_at = timer()
        self._config = config
        self._store = store
        self._redis = redis
        self._open = open_snapshot
        self._metrics = metrics
        self._replica_id = replica_id
        self._warm = warm
        self._clock = clock
        self._timer = timer
        self._followed: Pointer | None = None
        self._seen: Pointer | None = None
        self._retry_at = 0.0
        self._looking = asyncio.Lock()
        self._wake_pointer = asyncio.Event()
        self._wake_blocklist = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def health(self) -> Health:
        """A replica that lost Redis stays ready; one that cannot load what it saw published does not."""
        held = self.holding
        degraded = None if held is None else held.live.degraded
        return Health(held is not None and self.failed is None, self.stale, degraded, self.failed)

    async def start(self) -> None:
        """Reads blocklist and pointer once, then keeps looking in the background."""
        await self.look_at_blocklist()
        await self.look()
        await self.beat()
        self._tasks = [
            asyncio.create_task(self._every(self._config.poll_s, self.look, self._wake_pointer)),
            asyncio.create_task(
                self._every(
                    self._config.blocklist_poll_s, self.look_at_blocklist, self._wake_blocklist
                )
            ),
            asyncio.create_task(self._every(self._config.heartbeat_s, self.beat, asyncio.Event())),
            asyncio.create_task(self._listen()),
        ]

    async def aclose(self) -> None:
        """Stops looking and signs off."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(TierUnavailable):
            await self._redis.sign_off(self._replica_id)

    async def look(self) -> None:
        """One look at the pointer, following it when it is newer."""
        async with self._looking:
            try:
                raw = await self._redis.pointer()
                pointer = None if raw is None else Pointer.from_bytes(raw)
            except TierUnavailable:
                self._mark("redis_unreachable")
                await self._start_from_releases()
                return
            except CorruptArtefact:
                log.exception("the pointer cannot be read")
                self._mark("pointer_corrupt")
                await self._start_from_releases()
                return
            if self._followed is None:
                # What the release records know and Redis does not was lost with an older Redis.
                await self._start_from_releases(unless_before=pointer)
            verdict = judge(pointer, self._seen)
            if verdict == "newer" and pointer is not None:
                self._seen = pointer
                await self._follow(pointer)
            elif verdict != "same":
                self._mark(f"pointer_{verdict}")
            elif self._followed is self._seen:
                self._unmark()
            elif self._seen is not None and self._timer() >= self._retry_at:
                await self._follow(self._seen)

    async def _start_from_releases(self, unless_before: Pointer | None = None) -> None:
        if self._followed is not None:
            return
        try:
            release = await asyncio.to_thread(newest_release, self._store)
        except (LarderError, OSError):
            log.exception("the release records cannot be read")
            return
        if release is None or (unless_before is not None and unless_before.epoch >= release.epoch):
            return
        self._seen = Pointer(
            release.generation, release.epoch, release.previous, release.attempt, release.at
        )
        await self._follow(self._seen, trusted=False)

    async def _follow(self, pointer: Pointer, *, trusted: bool = True) -> None:
        try:
            live = await self._obtain(pointer, pointer.generation)
            if self._warm is not None and self.holding is not None:
                with contextlib.suppress(Exception):  # a cold start is slower, never wrong
                    await self._warm(live, self.holding.live)
        except Exception as error:  # whatever is wrong with it, the old one goes on
            log.exception("generation %s cannot be loaded", pointer.generation)
            self.failed = f"generation {pointer.generation} cannot be loaded: {error}"
            self._mark("load_failed")
            self._retry_at = self._timer() + _RETRY_S
            return
        held = self.holding
        previous = None if held is None else held.find(pointer.previous)
        self._swap(Holding(live, previous))
        self._followed, self.failed = pointer, None
        if trusted:
            self._unmark()
        log.info("serving generation %s of epoch %d", pointer.generation, pointer.epoch)
        await self._beat_quietly()
        if pointer.previous is not None and previous is None:
            await self._fetch_previous(pointer, pointer.previous, live)

    async def _fetch_previous(self, pointer: Pointer, generation: str, live: Snapshot) -> None:
        try:
            previous = await self._obtain(pointer, generation)
        except Exception:
            log.warning("the previous generation %s is not here", generation, exc_info=True)
            return
        self._swap(Holding(live, previous))
        await self._beat_quietly()

    async def _obtain(self, pointer: Pointer, generation: str) -> Snapshot:
        held = None if self.holding is None else self.holding.find(generation)
        if held is None:
            return await asyncio.to_thread(self._open, pointer, generation, self.blocklist)
        if generation != pointer.generation:
            return held
        return held.released_as(pointer.epoch, pointer.published_at)

    def _swap(self, holding: Holding) -> None:
        if any(each.blocklist is not self.blocklist for each in holding.snapshots):
            holding = holding.with_blocklist(
                self.blocklist
            )  # it changed while this one was loading
        self.holding = holding
        previous = holding.previous
        self._metrics.hold(
            holding.live.generation, None if previous is None else previous.generation
        )
        self._metrics.degraded.set(holding.live.degraded is not None)

    async def look_at_blocklist(self) -> None:
        """Takes over a newer blocklist for everything that is held."""
        try:
            version = await asyncio.to_thread(newest_version, self._store)
            if version != self.blocklist.version:
                blocklist = await asyncio.to_thread(latest_blocklist, self._store)
                if blocklist.version > self.blocklist.version:
                    await self._block(blocklist)
        except (LarderError, OSError, ValueError):
            log.exception("the blocklist cannot be read; version %d stays", self.blocklist.version)
            return
        self.blocklist_read_at = self._timer()

    async def _block(self, blocklist: Blocklist) -> None:
        self.blocklist = blocklist
        while (held := self.holding) is not None and held.live.blocklist is not blocklist:
            blocked = await asyncio.to_thread(held.with_blocklist, blocklist)
            if self.holding is held:
                self.holding = blocked
        self._metrics.blocklist_version.set(blocklist.version)

    async def beat(self) -> None:
        """One heartbeat: what is served, and what must not be retired."""
        held = self.holding
        payload = {
            "replica": self._replica_id,
            "serving": None if held is None else held.live.generation,
            "holds": [] if held is None else list(held.generations),
            "epoch": None if self._followed is None else self._followed.epoch,
        }
        with contextlib.suppress(TierUnavailable):
            await self._redis.heartbeat(self._replica_id, orjson.dumps(payload), self._clock())

    async def _beat_quietly(self) -> None:
        with contextlib.suppress(Exception):
            await self.beat()

    async def _listen(self) -> None:
        while True:
            with contextlib.suppress(TierUnavailable):
                async for message in self._redis.subscribe():
                    (self._wake_blocklist if message == b"blocklist" else self._wake_pointer).set()
            await asyncio.sleep(self._config.poll_s)

    async def _every(
        self, seconds: float, step: Callable[[], Coroutine[Any, Any, None]], wake: asyncio.Event
    ) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(wake.wait(), seconds)
            wake.clear()
            try:
                await step()
            except Exception:  # a loop that ends silently would leave this replica behind for ever
                log.exception("refreshing failed; trying again in %s s", seconds)

    def _mark(self, why: str) -> None:
        if self.stale != why:
            log.warning("stale: %s", why)
        self.stale = why
        self._metrics.refreshes.labels(why).inc()

    def _unmark(self) -> None:
        self.stale = None
        self._metrics.refreshes.labels("in_step").inc()

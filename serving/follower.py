"""What is served: follows the pointer forwards only, loads beside, and swaps one object for another."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from cache.artefacts import ArtefactStore
from cache.blocklist import Blocklist
from cache.errors import CorruptArtefact, LarderError, TierUnavailable
from cache.releases import MOVES, Pointer, Release, all_releases, newest_move
from serving.metrics import Metrics
from serving.snapshot import Holding, Snapshot

log = logging.getLogger(__name__)

_RETRY_S = 10.0
"""Between tries to load what could not be loaded: each reads and checks every file."""

Verdict = Literal["same", "newer", "vanished", "backwards", "conflicting"]

Open = Callable[[Pointer, Blocklist], Snapshot]
"""Opens and warms the pointer's generation; slow and blocking, raises when it cannot be loaded."""

Warm = Callable[[Snapshot, Snapshot], Coroutine[Any, Any, None]]
"""(coming, current): reads ahead for the coming one what callers asked of the current."""


class Redis(Protocol):
    """What following needs of L2."""

    async def pointer(self) -> bytes | None:
        """The live pointer; raises TierUnavailable."""


@dataclass(frozen=True, slots=True)
class Health:
    """How far this replica can be trusted; the others say why not, or None."""

    ready: bool
    stale: str | None
    degraded: str | None
    failed: str | None


def judge(pointer: Pointer | None, seen: Pointer | None) -> Verdict:
    """What a look at the pointer means to a reader that has seen `seen`: only a greater epoch is followed."""
    if pointer is None:
        return "vanished"
    if seen is None or pointer.epoch > seen.epoch:
        return "newer"
    if pointer.epoch < seen.epoch:
        return "backwards"
    return "same" if pointer.generation == seen.generation else "conflicting"


class Follower:
    """Owns `holding`, which is replaced as one object; a request keeps the one it captured."""

    def __init__(
        self,
        store: ArtefactStore,
        redis: Redis,
        open_snapshot: Open,
        metrics: Metrics,
        *,
        warm: Warm | None = None,
        changed: Callable[[], None] = lambda: None,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self.holding: Holding | None = None
        self.stale: str | None = "starting"
        self.failed: str | None = None
        self.blocklist = Blocklist()
        self.changed = changed
        self._store = store
        self._redis = redis
        self._open = open_snapshot
        self._metrics = metrics
        self._warm = warm
        self._timer = timer
        self._seen: Pointer | None = None
        self._followed: Pointer | None = None
        self._retry_at = 0.0
        self._looking = asyncio.Lock()
        self._fetching: asyncio.Task[None] | None = None

    @property
    def epoch(self) -> int | None:
        """Of what is served."""
        return None if self._followed is None else self._followed.epoch

    @property
    def health(self) -> Health:
        """A replica that lost Redis stays ready; one that cannot load what it saw published does not."""
        held = self.holding
        degraded = None if held is None else held.live.degraded
        return Health(held is not None and self.failed is None, self.stale, degraded, self.failed)

    async def look(self) -> None:
        """One look at the pointer, following it when it is newer."""
        async with self._looking:
            try:
                raw = await self._redis.pointer()
                pointer = None if raw is None else Pointer.from_bytes(raw)
            except (TierUnavailable, CorruptArtefact) as error:
                unreachable = isinstance(error, TierUnavailable)
                self._mark("redis_unreachable" if unreachable else "pointer_corrupt")
                await self._start_from_releases(None)
                return
            # What the release records know and Redis does not was lost with an older Redis.
            await self._start_from_releases(pointer)
            verdict = judge(pointer, self._seen)
            if verdict == "newer" and pointer is not None:
                await self._follow(pointer)
            elif verdict != "same":
                self._mark(f"pointer_{verdict}")
            elif self._followed is self._seen:
                self._unmark()
            elif self._seen is not None and self._timer() >= self._retry_at:
                await self._follow(self._seen)

    async def block(self, blocklist: Blocklist) -> None:
        """Puts a blocklist in force for all that is held and all that is loading."""
        self.blocklist = blocklist
        while (held := self.holding) is not None and held.live.blocklist is not blocklist:
            blocked = await asyncio.to_thread(held.with_blocklist, blocklist)
            if self.holding is held:
                self.holding = blocked
        self._metrics.blocklist_version.set(blocklist.version)

    async def settled(self) -> None:
        """Returns once the previous generation is here, or cannot be."""
        if self._fetching is not None:
            await asyncio.wait({self._fetching})

    async def aclose(self) -> None:
        """Stops loading."""
        if self._fetching is not None:
            self._fetching.cancel()
            await self.settled()

    async def _start_from_releases(self, pointer: Pointer | None) -> None:
        if self._followed is not None:
            return
        try:
            release = newest_move(await asyncio.to_thread(all_releases, self._store))
        except (LarderError, OSError, ValueError):
            log.exception("the release records cannot be read")
            return
        if release is not None and (pointer is None or pointer.epoch < release.epoch):
            await self._follow(_as_pointer(release), trusted=False)

    async def _follow(self, pointer: Pointer, *, trusted: bool = True) -> None:
        self._seen = pointer
        if self._fetching is not None:
            self._fetching.cancel()
        try:
            live = await self._obtain(pointer)
            if self._warm is not None and self.holding is not None:
                with contextlib.suppress(Exception):  # a cold start is slower, never wrong
                    await self._warm(live, self.holding.live)
        except Exception as error:  # whatever is wrong with it, the old one goes on
            log.exception("generation %s cannot be loaded", pointer.generation)
            self.failed = f"generation {pointer.generation} cannot be loaded: {error}"
            self._retry_at = self._timer() + _RETRY_S
            self._mark("load_failed")
            return
        if (newer := await self._overtaken(pointer)) is not None:
            # Rolled back, or published over, while it was loading: not one answer may come from it.
            await self._follow(newer)
            return
        held = self.holding
        self._swap(Holding(live, None if held is None else held.find(pointer.previous)))
        self._followed, self.failed = pointer, None
        if trusted:
            self._unmark()
        log.info("serving generation %s of epoch %d", pointer.generation, pointer.epoch)
        if pointer.previous is not None and self.holding and self.holding.previous is None:
            self._fetching = asyncio.create_task(self._fetch(pointer, pointer.previous))

    async def _overtaken(self, pointer: Pointer) -> Pointer | None:
        try:
            raw = await self._redis.pointer()
            now = None if raw is None else Pointer.from_bytes(raw)
        except (TierUnavailable, CorruptArtefact):
            return None
        return now if judge(now, pointer) == "newer" else None

    async def _fetch(self, pointer: Pointer, generation: str) -> None:
        try:
            releases = await asyncio.to_thread(all_releases, self._store)
            published = [each for each in releases if each.done and each.generation == generation]
            release = next((each for each in reversed(published) if each.action in MOVES), None)
            if release is None:
                log.warning("no release made %s live: it is not held as previous", generation)
                return
            previous = await asyncio.to_thread(self._open, _as_pointer(release), self.blocklist)
        except Exception:
            log.warning("the previous generation %s is not here", generation, exc_info=True)
            return
        if self.holding is not None and self._followed is pointer:
            self._swap(Holding(self.holding.live, previous))

    async def _obtain(self, pointer: Pointer) -> Snapshot:
        held = None if self.holding is None else self.holding.find(pointer.generation)
        if held is not None:
            return held.released_as(pointer.epoch, pointer.published_at)
        return await asyncio.to_thread(self._open, pointer, self.blocklist)

    def _swap(self, holding: Holding) -> None:
        if any(each.blocklist is not self.blocklist for each in holding.snapshots):
            # It changed while this one was loading.
            holding = holding.with_blocklist(self.blocklist)
        self.holding = holding
        previous = holding.previous
        self._metrics.hold(
            holding.live.generation, None if previous is None else previous.generation
        )
        self._metrics.degraded.set(holding.live.degraded is not None)
        self.changed()

    def _mark(self, why: str) -> None:
        if self.stale != why:
            log.warning("stale: %s", why)
        self.stale = why
        self._metrics.refreshes.labels(why).inc()

    def _unmark(self) -> None:
        self.stale = None
        self._metrics.refreshes.labels("in_step").inc()


def _as_pointer(release: Release) -> Pointer:
    return Pointer(release.generation, release.epoch, release.previous, release.attempt, release.at)

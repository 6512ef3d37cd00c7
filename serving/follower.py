"""What is served: follows the pointer forwards only, loads beside, and swaps one object for another."""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Literal, Protocol

from cache.artefacts import ArtefactStore
from cache.blocklist import Blocklist
from cache.errors import CorruptArtefact, LarderError, TierUnavailable
from cache.releases import MOVES, Pointer, Release, all_releases, newest_move
from serving.health import About, Concerns, Health
from serving.metrics import Metrics
from serving.snapshot import Holding, Snapshot

log = logging.getLogger(__name__)

_RETRY_S = 10.0
"""Between tries to load what could not be loaded: each reads and checks every file."""
_MEND_MAX_S = 640.0
"""The longest wait between tries to mend a degraded generation, which answers meanwhile."""

Verdict = Literal["same", "newer", "vanished", "backwards", "conflicting"]

Open = Callable[[Pointer, Blocklist], Snapshot]
"""Opens and warms the pointer's generation; slow and blocking, raises when it cannot be loaded."""

Warm = Callable[[Snapshot, Snapshot], Coroutine[Any, Any, None]]
"""(coming, current): reads ahead for the coming one what callers asked of the current."""


class Redis(Protocol):
    """What following needs of L2."""

    async def pointer(self) -> bytes | None:
        """The live pointer; raises TierUnavailable."""


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
        self.failed: str | None = None
        self.is_draining = False
        self.blocklist = Blocklist()
        self.is_blocklist_known = False
        self.changed = changed
        self._store = store
        self._redis = redis
        self._open = open_snapshot
        self._metrics = metrics
        self._warm = warm
        self._timer = timer
        self._seen: Pointer | None = None
        self._followed: Pointer | None = None
        self._concerns = Concerns("pointer", "starting")
        self._retry_at = 0.0
        self._mend_at, self._mend_wait_s = 0.0, _RETRY_S
        self._looking = asyncio.Lock()
        self._fetching: asyncio.Task[None] | None = None

    @property
    def epoch(self) -> int | None:
        """Of what is served."""
        return None if self.holding is None else self.holding.live.epoch

    @property
    def stale(self) -> str | None:
        """Why answers may lag behind, or None."""
        return self._concerns.text

    @property
    def health(self) -> Health:
        """A replica that lost Redis stays ready; one that cannot load what it saw published does not."""
        held, failed = self.holding, self.failed
        if self.is_draining:
            failed = "this replica is stopping"
        elif held is not None and failed is None and not self.is_blocklist_known:
            failed = "no version of the blocklist could be read"
        degraded = None if held is None else held.live.degraded
        return Health(held is not None and failed is None, self.stale, degraded, failed)

    def note(self, about: About, why: str | None, remedy: str = "") -> None:
        """A reason to trust this replica less, or None when it has passed; logged when it is news."""
        if self._concerns.note(about, why) and why is not None:
            log.warning("stale: %s%s", why, remedy and f": {remedy}")

    async def look(self) -> None:
        """One look at the pointer, following it when it is newer."""
        async with self._looking:
            await self._look()
            await self._mend()

    async def _look(self) -> None:
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
        else:
            self._mark("load_failed")

    async def block(self, blocklist: Blocklist) -> None:
        """Puts a blocklist in force for all that is held and all that is loading."""
        self.blocklist = blocklist
        self.is_blocklist_known = True
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
        if self._followed is not None or (self.failed and self._timer() < self._retry_at):
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
            await self._fall_back(pointer)
            return
        if (newer := await self._overtaken(pointer)) is not None:
            # Rolled back, or published over, while it was loading: not one answer may come from it.
            await self._follow(newer)
            return
        held = self.holding
        self._swap(Holding(live, None if held is None else held.find(pointer.previous)))
        self._followed, self.failed = pointer, None
        self._mend_at, self._mend_wait_s = self._timer() + _RETRY_S, _RETRY_S
        if trusted:
            self._unmark()
        log.info("serving generation %s of epoch %d", pointer.generation, pointer.epoch)
        if pointer.previous is not None and self.holding and self.holding.previous is None:
            self._fetching = asyncio.create_task(self._fetch(pointer, pointer.previous))

    async def _fall_back(self, pointer: Pointer) -> None:
        """To a replica that has nothing yet, the previous generation is better than no answers; it stays drained."""
        if self.holding is not None or pointer.previous is None:
            return
        previous = await self._published(pointer.previous)
        if previous is not None:
            self._swap(Holding(previous))
            log.warning("answering from the previous generation %s", pointer.previous)

    async def _mend(self) -> None:
        """Opens a degraded generation again, ever more rarely: its models may only have been out of reach."""
        held, pointer = self.holding, self._followed
        if held is None or pointer is None or held.live.degraded is None:
            return
        if self._timer() < self._mend_at:
            return
        self._mend_wait_s = min(2 * self._mend_wait_s, _MEND_MAX_S)
        self._mend_at = self._timer() + self._mend_wait_s
        try:
            whole = await asyncio.to_thread(self._open, pointer, self.blocklist)
        except Exception:
            log.warning("generation %s cannot be mended", pointer.generation, exc_info=True)
            return
        if whole.degraded is None and self.holding is not None:
            self._swap(dataclasses.replace(self.holding, live=whole))

    async def _overtaken(self, pointer: Pointer) -> Pointer | None:
        try:
            raw = await self._redis.pointer()
            now = None if raw is None else Pointer.from_bytes(raw)
        except (TierUnavailable, CorruptArtefact):
            return None
        return now if judge(now, pointer) == "newer" else None

    async def _fetch(self, pointer: Pointer, generation: str) -> None:
        previous = await self._published(generation)
        if previous is not None and self.holding is not None and self._followed is pointer:
            self._swap(Holding(self.holding.live, previous))

    async def _published(self, generation: str) -> Snapshot | None:
        """A superseded generation as it was last released."""
        try:
            releases = await asyncio.to_thread(all_releases, self._store)
            published = [each for each in releases if each.done and each.generation == generation]
            release = next((each for each in reversed(published) if each.action in MOVES), None)
            if release is None:
                log.warning("no release made %s live: it is not held as previous", generation)
                return None
            return await asyncio.to_thread(self._open, _as_pointer(release), self.blocklist)
        except Exception:
            log.warning("the previous generation %s is not here", generation, exc_info=True)
            return None

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
        self.note("pointer", why)
        self._metrics.refreshes.labels(why).inc()

    def _unmark(self) -> None:
        self.note("pointer", None)
        self._metrics.refreshes.labels("in_step").inc()


def _as_pointer(release: Release) -> Pointer:
    return Pointer(release.generation, release.epoch, release.previous, release.attempt, release.at)

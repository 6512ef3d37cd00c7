"""The generation to come: fetched, opened and warmed in the background, while nobody has to wait for it."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from cache.control.staging_note import Staging
from cache.errors import CorruptArtefact, masked
from serving.generations.holder import GenerationHolder

log = logging.getLogger(__name__)

_RETRY_S = 5.0
"""Seconds between tries to load it: each reads and checks every file."""
_TOP_UP_S = 1.0
"""Seconds between top-ups: what has been asked since is read ahead too, until the flip comes."""


class StagedGeneration:
    """Staged generation, at most one at a time; asking for another, or for none, lets go of the one before."""

    def __init__(
        self, holder: GenerationHolder, clock: Callable[[], float], timer: Callable[[], float]
    ) -> None:
        self.requested_generation: str | None = None
        self.is_ready = False
        self.failed: str | None = None
        self.warm_s: float | None = None
        self._note: Staging | None = None
        self._holder = holder
        self._clock = clock
        self._timer = timer
        self._task: asyncio.Task[None] | None = None
        self._next_at = 0.0

    def update_note(self, raw: bytes | None) -> None:
        """Takes in the staging note as it stands in Redis; one that cannot be read asks for nothing."""
        try:
            self._note = None if raw is None else Staging.from_bytes(raw)
        except CorruptArtefact as error:
            log.warning("the staging note cannot be read, nothing is held ready: %s", error)
            self._note = None

    def expected(self, live: str | None) -> str | None:
        """The generation that the note asks for, until its time (by Redis' clock) is over or it is live."""
        note = self._note
        if note is None or note.generation == live or self._clock() >= note.until:
            return None
        return note.generation

    def stage(self, generation: str | None) -> None:
        """Sets what to hold from now on; returns at once. Called at every look, so it also tries again and tops up."""
        if generation != self.requested_generation:
            self.drop()
            self.requested_generation = generation
            self._begin(self._load)
        elif generation is not None and self._timer() >= self._next_at:
            self._begin(self._top_up if self.is_ready else self._load)

    def drop(self) -> asyncio.Task[None] | None:
        """Lets go of what is held or loading; returns the task of the load, on its way to an end."""
        task = self._task
        if task is not None:
            task.cancel()
        if self.is_ready:
            self._holder.hold_staged(None)
        self._task, self.requested_generation, self.failed, self.is_ready = None, None, None, False
        return task

    async def settled(self, within_s: float | None = None) -> None:
        """Returns once nothing is loading, or when that takes too long."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=within_s)

    def is_loading(self, generation: str) -> bool:
        """True if a load or a top-up of this very generation is under way."""
        return (
            generation == self.requested_generation
            and self._task is not None
            and not self._task.done()
        )

    def _begin(self, work: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        if self.requested_generation is None or (self._task is not None and not self._task.done()):
            return
        self._task = asyncio.create_task(work(self.requested_generation))

    async def _load(self, generation: str) -> None:
        started_at = self._timer()
        try:
            snapshot = self._holder.find_snapshot(generation) or await self._holder.open(generation)
            if (reason := self._holder.is_worse(snapshot)) is not None:
                self._fail(generation, reason)
                return
            await self._holder.warm(snapshot)
        except Exception as error:  # whatever is wrong with it, the live one goes on
            log.exception("generation %s cannot be made ready", generation)
            self._fail(generation, masked(str(error)) or type(error).__name__)
            return
        self.failed, self.is_ready = None, True
        self.warm_s = self._timer() - started_at
        self._next_at = self._timer() + _TOP_UP_S
        self._holder.hold_staged(snapshot)
        log.info("generation %s is ready after %.3f s", generation, self.warm_s)

    def _fail(self, generation: str, reason: str) -> None:
        log.warning("generation %s is not ready: %s", generation, reason)
        self.failed, self._next_at = reason, self._timer() + _RETRY_S

    async def _top_up(self, generation: str) -> None:
        if (snapshot := self._holder.find_snapshot(generation)) is not None:
            await self._holder.warm(snapshot)
        self._next_at = self._timer() + _TOP_UP_S

"""Reopening of a degraded generation: its models may only have been out of reach."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable

from cache.store.releases import Pointer
from serving.generations.holder import GenerationHolder

log = logging.getLogger(__name__)

_FIRST_S = 10.0
_LONGEST_S = 640.0
"""Longest wait in seconds, doubled up to here from try to try; it answers from its pages meanwhile."""


class DegradedReopen:
    """Reopens the live generation beside the follower's looks: a roll-back of a degraded one waits for no load."""

    def __init__(self, holder: GenerationHolder, timer: Callable[[], float]) -> None:
        self._holder = holder
        self._timer = timer
        self._at, self._wait_s = 0.0, _FIRST_S
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Starts over for another live generation: what was loading is not waited for."""
        self.drop()
        self._at, self._wait_s = self._timer() + _FIRST_S, _FIRST_S

    def reopen_if_due(self, pointer: Pointer | None) -> None:
        """Opens the pointer's generation once more if it is degraded and the time has come; returns at once."""
        served = self._holder.served
        if served is None or pointer is None or served.live.degraded is None:
            return
        if self._timer() < self._at or (self._task is not None and not self._task.done()):
            return
        self._wait_s = min(2 * self._wait_s, _LONGEST_S)
        self._at = self._timer() + self._wait_s
        self._task = asyncio.create_task(self._open(pointer))

    def drop(self) -> asyncio.Task[None] | None:
        """Cancels what is loading; returns its task, on its way to an end."""
        if self._task is not None:
            self._task.cancel()
        return self._task

    async def settled(self) -> None:
        """Returns once nothing is loading."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _open(self, pointer: Pointer) -> None:
        try:
            reopened_snapshot = await self._holder.load(pointer)
        except Exception:
            log.warning("generation %s cannot be mended", pointer.generation, exc_info=True)
            return
        served = self._holder.served
        # Another release may have become live meanwhile, also of this very generation: it has another epoch.
        if (
            reopened_snapshot.degraded is None
            and served is not None
            and served.live.epoch == pointer.epoch
        ):
            self._holder.put(dataclasses.replace(served, live=reopened_snapshot))

"""Reading ahead: what callers ask of the live generation is in L1 of the next before it takes over."""

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from cache.tiered import View, Want
from serving.case import want_in
from serving.snapshot import Snapshot

_SLICE = 16
_PAUSE_S = 0.002
"""Between slices: readers go first, also on the wire and in Redis."""
_LONGEST_S = 5.0
_MANY = 256


class Reads(Protocol):
    """What reading ahead needs of the tiers."""

    async def warm(self, view: View, wants: Sequence[Want], deadline: float) -> int:
        """Reads into L1, uncounted; `deadline` is monotonic."""


class Warming:
    """What was read ahead for a generation is not read again, so that topping up costs only what is new."""

    def __init__(
        self,
        tiers: Reads,
        recent: Callable[[], Sequence[tuple[str, bytes]]],
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tiers = tiers
        self._recent = recent
        self._timer = timer
        self._generation: str | None = None
        self._done: set[tuple[str, bytes]] = set()

    async def __call__(self, coming: Snapshot, current: Snapshot) -> None:
        """Reads what is hot, most recent last, for the coming generation; bounded in time."""
        if coming.generation == current.generation:
            return
        if coming.generation != self._generation:
            self._generation, self._done = coming.generation, set()
        hot = dict.fromkeys(self._recent())
        new = [each for each in hot if each not in self._done]
        self._done = {each for each in hot if each in self._done}
        tables, give_up = coming.manifest.tables, self._timer() + _LONGEST_S
        for start in range(0, len(new), _SLICE):
            if self._timer() >= give_up:
                break
            part = new[start : start + _SLICE]
            wants = [want_in(coming, tables[name], raw) for name, raw in part if name in tables]
            wants = [want for want in wants if want.position >= 0]
            if wants:
                await self._tiers.warm(coming.view, wants, give_up)
            self._done.update(part)
            await asyncio.sleep(_PAUSE_S)
        if len(new) >= _MANY:
            # It stays for the life of the generation; a full collection that walked it would hold every request.
            gc.collect(1)
            gc.freeze()

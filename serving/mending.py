"""When to open a degraded generation again: its models may only have been out of reach."""

import dataclasses
import logging
import time
from collections.abc import Callable

from cache.releases import Pointer
from serving.shelf import Shelf

log = logging.getLogger(__name__)

_FIRST_S = 10.0
_LONGEST_S = 640.0
"""Ever more rarely; it answers from its pages meanwhile."""


class Mending:
    """Takes turns with the follower's looks, so that nothing is swapped underneath it."""

    def __init__(self, shelf: Shelf, timer: Callable[[], float] = time.monotonic) -> None:
        self._shelf = shelf
        self._timer = timer
        self._at, self._wait_s = 0.0, _FIRST_S

    def begin(self) -> None:
        """Another generation is live."""
        self._at, self._wait_s = self._timer() + _FIRST_S, _FIRST_S

    async def mend(self, pointer: Pointer | None) -> None:
        """Opens the pointer's generation once more if it is degraded and the time has come."""
        held = self._shelf.holding
        if held is None or pointer is None or held.live.degraded is None:
            return
        if self._timer() < self._at:
            return
        self._wait_s = min(2 * self._wait_s, _LONGEST_S)
        self._at = self._timer() + self._wait_s
        try:
            whole = await self._shelf.load(pointer)
        except Exception:
            log.warning("generation %s cannot be mended", pointer.generation, exc_info=True)
            return
        if whole.degraded is None and self._shelf.holding is not None:
            self._shelf.put(dataclasses.replace(self._shelf.holding, live=whole))

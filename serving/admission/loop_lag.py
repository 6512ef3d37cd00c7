"""Periodic samples of a process's queues, whatever it is asked: a whole turn of the event loop, and the model's."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

Observe = Callable[[float, float, float], None]


@dataclass(slots=True, eq=False)
class Pulse:
    """Periodic sampler: calls `observe` with the seconds of one turn of the event loop, `model_wait()` and the time.

    A turn is from one callback to the next that it leaves for the turn after: everything that was ready in between is
    read and begun, so it is what a request waits that comes at the worst moment. Nothing runs between the looks; after
    a turn that took longer than their distance the next one is looked at as well, or a queue would slow its own judge.
    """

    observe: Observe
    model_wait: Callable[[], float]
    _: KW_ONLY
    every_s: float
    timer: Callable[[], float] = time.monotonic
    _handle: asyncio.Handle | None = field(init=False, default=None)
    _began: float = field(init=False, default=0.0)

    def start(self) -> None:
        """Starts sampling, on the running event loop."""
        self._handle = asyncio.get_running_loop().call_later(self.every_s, self._wake)

    def stop(self) -> None:
        """Stops sampling."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _wake(self) -> None:
        # A timer runs before the loop looks at its sockets: the turn begins with the callbacks after that.
        self._handle = asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._began = self.timer()
        self._handle = asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        now = self.timer()
        turn_s = now - self._began
        self.observe(turn_s, self.model_wait(), now)
        if turn_s > self.every_s:
            self._begin()
        else:
            self.start()

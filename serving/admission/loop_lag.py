"""Periodic samples of a process's queues, whatever it is asked: a whole turn of the event loop, and the model's."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from cache.process.background_loops import BackgroundLoops

Observe = Callable[[float, float, float], None]


@dataclass(slots=True, eq=False)
class LoopLagSampler:
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
    loops: BackgroundLoops = field(default_factory=BackgroundLoops)
    _task: asyncio.Task[None] | None = field(init=False, default=None)

    def start(self) -> None:
        """Start sampling, on the running event loop."""
        self._task = self.loops.start("loop_lag", self._sample)

    def stop(self) -> None:
        """Stop sampling."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _sample(self) -> None:
        """Observe the turn after a pause, and each turn after that until one is short."""
        await asyncio.sleep(self.every_s)
        # A timer runs before the loop looks at its sockets: the turn begins here, with the callbacks after that.
        loop, turn_began_at = asyncio.get_running_loop(), self.timer()
        done_future: asyncio.Future[None] = loop.create_future()

        def end() -> None:
            nonlocal turn_began_at
            if done_future.done():  # the task was cancelled meanwhile
                return
            now_s = self.timer()
            turn_s, turn_began_at = now_s - turn_began_at, now_s
            try:
                self.observe(turn_s, self.model_wait(), now_s)
            except Exception as error:
                done_future.set_exception(error)
                return
            if turn_s > self.every_s:
                loop.call_soon(end)
            else:
                done_future.set_result(None)

        loop.call_soon(end)
        await done_future

"""Overlay writes in the background: bounded, merged, counted."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from cache.errors import TierUnavailable
from cache.l2.commands import OverlayWrite
from cache.process.background_loops import BackgroundLoops, stop

_AT_ONCE = 256
_AT_ONCE_S = 0.001
"""Seconds up to which a write that waited is written as it is."""

Write = Callable[[Sequence[OverlayWrite]], Awaitable[list[TierUnavailable | None]]]


class WriteBehind:
    """A queue whose writes each end as stored, failed or dropped; none is retried, for each can be recomputed.

    Waiting shortens the life of what is written, so that it ends when the answer's does.
    """

    def __init__(
        self,
        write: Write,
        max_bytes: int,
        timer: Callable[[], float] = time.monotonic,
        loops: BackgroundLoops | None = None,
    ) -> None:
        self.stored_count = 0
        self.failed_count = 0
        self.dropped_count = 0
        self._write = write
        self._max_bytes = max_bytes
        self._bytes = 0
        self._timer = timer
        self._loops = BackgroundLoops() if loops is None else loops
        self._queue: deque[tuple[OverlayWrite, float]] = deque()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, write: OverlayWrite) -> None:
        """Queues the write, or drops it when `max_bytes` of payload are already waiting."""
        if self._bytes + len(write.payload) > self._max_bytes:
            self.dropped_count += 1
            return
        self._bytes += len(write.payload)
        self._queue.append((write, self._timer() + write.ttl_s))
        if self._task is None or self._task.done():
            self._task = self._loops.start(
                "write_behind", self._write_some, is_due=lambda: bool(self._queue)
            )

    async def aclose(self, timeout_s: float) -> None:
        """Stores what is queued as far as `timeout_s` allows and drops the rest."""
        task = self._task
        if task is not None:
            await asyncio.wait({task}, timeout=timeout_s)
            await stop([task])
        self.dropped_count += len(self._queue)
        self._queue.clear()
        self._bytes = 0

    async def _write_some(self) -> None:
        """Write what waits longest; whatever is raised, these writes have ended as failed."""
        writes = self._next()
        if not writes:
            return
        stored_count = 0
        try:
            stored_count = (await self._write(writes)).count(None)
        finally:
            self.stored_count += stored_count
            self.failed_count += len(writes) - stored_count

    def _next(self) -> list[OverlayWrite]:
        """Takes some of the queue's writes, with what is left of their lives; what has none left is dropped."""
        writes: list[OverlayWrite] = []
        now_s = self._timer()
        for _ in range(min(_AT_ONCE, len(self._queue))):
            write, ends_at = self._queue.popleft()
            self._bytes -= len(write.payload)
            left_s = ends_at - now_s
            if left_s <= 0:
                self.dropped_count += 1
            elif left_s >= write.ttl_s - _AT_ONCE_S:
                writes.append(write)
            else:
                writes.append(write._replace(ttl_s=left_s))
        return writes

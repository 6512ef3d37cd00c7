"""Overlay writes in the background: bounded, merged, counted."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from cache.commands import OverlayWrite
from cache.errors import TierUnavailable

_AT_ONCE = 256

Write = Callable[[Sequence[OverlayWrite]], Awaitable[list[TierUnavailable | None]]]


class WriteBehind:
    """Every write handed over ends as stored, failed or dropped; none is retried, for each can be recomputed."""

    def __init__(self, write: Write, max_bytes: int) -> None:
        self.stored = 0
        self.failed = 0
        self.dropped = 0
        self._write = write
        self._max_bytes = max_bytes
        self._bytes = 0
        self._queue: deque[OverlayWrite] = deque()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, write: OverlayWrite) -> None:
        """Queues the write, or drops it when `max_bytes` of payload are already waiting."""
        if self._bytes + len(write.payload) > self._max_bytes:
            self.dropped += 1
            return
        self._bytes += len(write.payload)
        self._queue.append(write)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._drain())

    async def aclose(self, timeout_s: float) -> None:
        """Stores what is queued as far as `timeout_s` allows and drops the rest."""
        task = self._task
        if task is not None:
            await asyncio.wait({task}, timeout=timeout_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self.dropped += len(self._queue)
        self._queue.clear()
        self._bytes = 0

    async def _drain(self) -> None:
        under_way = 0
        try:
            while self._queue:
                writes = [self._queue.popleft() for _ in range(min(_AT_ONCE, len(self._queue)))]
                self._bytes -= sum(len(write.payload) for write in writes)
                under_way = len(writes)
                errors = await self._write(writes)
                under_way = 0
                failed = sum(error is not None for error in errors)
                self.failed += failed
                self.stored += len(errors) - failed
        finally:
            self.failed += under_way
            self._task = None

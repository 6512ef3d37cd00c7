"""Rejected events, kept in Redis with their reasons for whoever looks for what became of theirs."""

import asyncio
from collections import deque
from typing import Any, Final, NamedTuple

import orjson

from cache.format.redis_keys import Keyspace
from serving.events.body import UnreadableEvent
from serving.events.connection import EventsFull, EventsRedis, EventsUnavailable
from serving.events.counts import ERASED, EventCounts

FLUSH_S: Final = 1.0
"""Seconds between writes of what came over HTTP; a process that is killed loses as much of it."""
WAITING_MAX: Final = 1_000
SHOWN_BYTES: Final = 1_024
"""Bytes of a rejected event that are kept."""


class _Rejection(NamedTuple):
    reason: str
    detail: str
    event: bytes


class Rejections:
    """Rejected events of one process on their way into Redis; beyond a bound they are counted, not kept."""

    def __init__(
        self, redis: EventsRedis, keyspace: Keyspace, counts: EventCounts, kept_max: int
    ) -> None:
        """`kept_max`: number of them that Redis keeps, the newest."""
        self._redis, self._key, self._counts, self._entries_max = (
            redis, keyspace.rejected_events, counts, kept_max,
        )  # fmt: skip
        self._waiting: deque[_Rejection] = deque()
        self._writing = asyncio.Lock()

    def add(self, reason: str, detail: str, event: Any) -> None:
        """Counts a rejected event, and takes it in; `event` is what was sent."""
        self._counts.results[reason] += 1
        if len(self._waiting) >= WAITING_MAX:
            self._counts.dropped_count += 1
            return
        event_excerpt = b"" if reason == ERASED else _event_excerpt(event)
        self._waiting.append(_Rejection(reason, detail, event_excerpt))

    async def flush(self) -> None:
        """Writes what waits; at Redis' maxmemory it is dropped. Raises EventsUnavailable, and then it waits on."""
        async with self._writing:
            count = len(self._waiting)
            if not count:
                return
            try:
                await self._redis.execute_all([
                    ("XADD", self._key, "MAXLEN", "~", self._entries_max, "*",
                     "reason", rejection.reason, "detail", rejection.detail, "event", rejection.event)
                    for rejection in self._waiting
                ])  # fmt: skip
            except EventsFull:  # the inbox would wait for its rejected ones, and fill Redis further
                self._counts.dropped_count += count
            for _ in range(count):
                self._waiting.popleft()

    async def step(self) -> None:
        """Writes what waits, if Redis takes it."""
        try:
            await self.flush()
        except EventsUnavailable:
            return  # the next step tries again


def _event_excerpt(event: Any) -> bytes:
    if isinstance(event, UnreadableEvent):
        return b""
    if isinstance(event, dict) and all(isinstance(field_name, bytes) for field_name in event):
        event = {
            name.decode(errors="replace"): field_value.decode(errors="replace")
            for name, field_value in event.items()
        }
    try:
        return orjson.dumps(event)[:SHOWN_BYTES]
    except orjson.JSONEncodeError:  # it reads JSON that is nested deeper than what it writes
        return b""

"""Acceptance of events: those that wait together travel in one call, one call at a time, so in the order they came."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from cache.errors import InvalidInput, LarderError
from cache.events.accept import SCRIPT, Accepted, PackedEvent, StreamBounds, call_of, outcomes
from cache.events.position import Position
from cache.format.redis_keys import Keyspace
from cache.process.background_loops import BackgroundLoops
from serving.events.connection import EventsRedis, EventsUnavailable

PIECE: Final = 250
"""Events in one call, about 2 ms of a Redis that others may wait for."""
WAITING_BYTES_MAX: Final = 16 << 20
"""Bytes of events that wait for their call; more are refused."""


class _Piece(NamedTuple):
    events: Sequence[PackedEvent]
    size_bytes: int
    outcome: asyncio.Future[list[Accepted]]


class EventsBusy(LarderError):
    """More events wait than may; nothing of these was sent."""

    code = "overloaded"


class Acceptor:
    """Acceptor of one process. While a call is under way the events of all requests gather for the next one."""

    def __init__(
        self,
        redis: EventsRedis,
        keyspace: Keyspace,
        bounds: StreamBounds,
        newest_position: Callable[[], Position],
        script: str = SCRIPT,
        loops: BackgroundLoops | None = None,
    ) -> None:
        """`newest_position` tells the newest position that is known, whatever has become of the stream since."""
        self._redis, self._keyspace, self._bounds, self._script = redis, keyspace, bounds, script
        self._get_newest_position = newest_position
        self._loops = BackgroundLoops() if loops is None else loops
        self._waiting: deque[_Piece] = deque()
        self._waiting_bytes = 0
        self._sending: asyncio.Task[None] | None = None

    async def accept(self, events: Sequence[PackedEvent]) -> list[Accepted]:
        """Outcome of each event, once they are as durable as demanded.

        Raises EventsFull, EventsUnavailable and EventsBusy. After an error some may have been accepted: sent again
        under their ids they are `repeated`.
        """
        if not events:
            return []
        sizes = [len(event.body) for event in events]
        if self._waiting_bytes + sum(sizes) > WAITING_BYTES_MAX and self._waiting:
            raise EventsBusy(f"{self._waiting_bytes} bytes of events wait already")
        loop = asyncio.get_running_loop()
        pieces = [
            _Piece(events[at : at + PIECE], sum(sizes[at : at + PIECE]), loop.create_future())
            for at in range(0, len(events), PIECE)
        ]
        self._waiting.extend(pieces)
        self._waiting_bytes += sum(sizes)
        if self._sending is None or self._sending.done():
            # A task begins in the next turn: all requests of this one go along.
            self._sending = self._loops.start(
                "event_acceptor", self._send, is_due=lambda: bool(self._waiting)
            )
        # Each is awaited, whatever came of the others: an error that nobody took would be logged as lost.
        piece_outcomes = await asyncio.gather(
            *(piece.outcome for piece in pieces), return_exceptions=True
        )
        accepted: list[Accepted] = []
        for outcome in piece_outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            accepted += outcome
        return accepted

    async def aclose(self) -> None:
        """Waits for the call under way; what waits behind it is refused."""
        self._refuse(self._take_all(), EventsUnavailable("this service stops"))
        if self._sending is not None:
            await asyncio.wait([self._sending])

    async def _send(self) -> None:
        if pieces := self._next():
            await self._call(pieces)

    async def _call(self, pieces: list[_Piece]) -> None:
        events = [event for piece in pieces for event in piece.events]
        try:
            keys, arguments = call_of(
                self._keyspace, self._bounds, events, self._get_newest_position()
            )
            replies = await self._redis.accept(keys, arguments, self._script)
            found = _outcomes(replies, len(events))
        except Exception as error:
            # What waits behind an outage would wait as long in vain.
            behind = self._take_all() if isinstance(error, EventsUnavailable) else []
            self._refuse(pieces + behind, error)
        else:
            at = 0
            for piece in pieces:
                if not piece.outcome.done():
                    piece.outcome.set_result(found[at : at + len(piece.events)])
                at += len(piece.events)

    def _next(self) -> list[_Piece]:
        pieces, room = [], PIECE
        while self._waiting and len(self._waiting[0].events) <= room:
            piece = self._waiting.popleft()
            self._waiting_bytes -= piece.size_bytes
            room -= len(piece.events)
            if not piece.outcome.cancelled():
                pieces.append(piece)
        return pieces

    def _take_all(self) -> list[_Piece]:
        pieces = list(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        return pieces

    def _refuse(self, pieces: Sequence[_Piece], error: Exception) -> None:
        for piece in pieces:
            if not piece.outcome.done():
                piece.outcome.set_exception(error)


def _outcomes(replies: Sequence[bytes], count: int) -> list[Accepted]:
    """Outcomes of so many events; raises EventsUnavailable for replies that are none, or not as many."""
    try:
        found = outcomes(replies)
    except InvalidInput as error:
        raise EventsUnavailable(f"the Redis of events: {error.message}") from error
    if len(found) != count:
        raise EventsUnavailable(
            f"the Redis of events told the outcome of {len(found)} events, not of {count}"
        )
    return found

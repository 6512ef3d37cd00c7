"""A Redis connection that belongs to no caller: replies meet their commands in order."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import hiredis
from redis.asyncio.connection import AbstractConnection

from cache.errors import TierUnavailable
from cache.l2.replies import Frames, could_be, stride

Replies = Sequence[Any]
_MORE = object()


@dataclass(slots=True, eq=False)
class Batch:
    """Commands that travel together; `landed` runs exactly once, with all replies or with why there are none."""

    packed: bytes
    count: int
    landed: Callable[[Replies | TierUnavailable], None]
    length: int = 0
    """Bytes of every reply's payload, if nothing is missing; 0 where it is not known."""
    timer: asyncio.TimerHandle | None = None
    wire: "Wire | None" = None

    def land(self, outcome: Replies | TierUnavailable) -> None:
        """Ends the batch: cancels its timer and hands the outcome to `landed`."""
        if self.timer is not None:
            self.timer.cancel()
        self.landed(outcome)


class Wire(asyncio.Protocol):
    """Takes over the transport of a connection that redis-py opened, with its TLS, ACL and database settings.

    No caller ever reads from it, so none can leave it one reply behind: a reply nobody waits for any more is read
    and dropped, and what cannot be trusted (time-out, protocol error) is closed with everything on it.
    """

    def __init__(self, connection: AbstractConnection, lost: Callable[["Wire"], None]) -> None:
        writer = connection._writer
        if writer is None:
            raise TierUnavailable("the connection is not open", reason="connection")
        # Held for its life: redis-py closes the socket when the connection object goes.
        self.connection = connection
        self._lost = lost
        self._reader = hiredis.Reader(notEnoughData=_MORE)
        self._replies: list[Any] = []
        self._held = b""
        self._batches: deque[Batch] = deque()
        self._why: TierUnavailable | None = None
        self._transport = cast(asyncio.Transport, writer.transport)
        self._transport.set_protocol(self)

    @property
    def in_flight(self) -> int:
        """Batches sent and not yet answered."""
        return len(self._batches)

    @property
    def commands(self) -> int:
        """Commands sent and not yet answered."""
        return sum(batch.count for batch in self._batches)

    @property
    def closing(self) -> bool:
        """True if the connection takes no more batches."""
        return self._transport.is_closing()

    def send(self, batch: Batch) -> None:
        """Writes the batch behind those already under way."""
        batch.wire = self
        self._batches.append(batch)
        self._transport.write(batch.packed)

    def abort(self, why: TierUnavailable) -> None:
        """Closes at once; every batch under way lands with `why`."""
        self._why = self._why or why
        self._transport.abort()
        self._fail_all()

    def data_received(self, data: bytes) -> None:
        """Feeds the parser and lands every batch whose last reply has come."""
        gets = self._reader.gets
        if self._held or (self._batches and self._batches[0].length):
            data = self._take_frames(data)
            if not data:
                return
        try:
            self._reader.feed(data)
            while self._batches:
                replies = self._replies
                missing = self._batches[0].count - len(replies)
                while missing:
                    reply = gets()
                    if reply is _MORE:
                        return
                    if type(reply) is not hiredis.PushNotification:
                        replies.append(reply)
                        missing -= 1
                self._replies = []
                self._batches.popleft().land(replies)
            if self._reader.has_data() and type(gets()) is not hiredis.PushNotification:
                self.abort(TierUnavailable("a reply that nobody asked for", reason="connection"))
        except Exception as error:  # HiredisError; TypeError for a map whose key is a list
            self.abort(TierUnavailable(f"not the Redis protocol: {error}", reason="connection"))

    def _take_frames(self, data: bytes) -> bytes:
        """Lands batches whose replies are all of the length that was foretold; what is left is for the parser."""
        data, self._held = self._held + data, b""
        while data and self._batches and not self._replies and not self._reader.has_data():
            batch = self._batches[0]
            if not batch.length or not could_be(data, batch.count, batch.length):
                return data
            size = batch.count * stride(batch.length)
            if len(data) < size:
                self._held = data
                return b""
            self._batches.popleft().land(Frames(data, batch.count, batch.length))
            data = data[size:]
        return data

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends every batch under way and reports the wire as lost: the socket is gone, whoever closed it."""
        self._why = self._why or TierUnavailable(
            f"connection lost: {exc or 'closed by the server'}", reason="connection"
        )
        self._fail_all()
        self._lost(self)

    def _fail_all(self) -> None:
        why = self._why or TierUnavailable("connection closed", reason="connection")
        self._replies, self._held = [], b""
        while self._batches:
            self._batches.popleft().land(why)

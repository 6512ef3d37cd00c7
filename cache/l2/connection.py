"""A Redis connection that belongs to no caller: replies meet their commands in order."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import hiredis
from redis.asyncio.connection import AbstractConnection

from cache.errors import TierUnavailable
from cache.l2.replies import Frames, stride
from cache.native import loader
from cache.resp.bounded_reader import RECORD_REPLIES, refusal, scanner_of

Replies = Sequence[Any]
_MORE = object()


@dataclass(slots=True, eq=False)
class Pipeline:
    """Commands that travel together; `landed` runs exactly once, with all replies or with why there are none."""

    packed: bytes
    count: int
    landed: Callable[[Replies | TierUnavailable], None]
    length: int = 0
    """Bytes of every reply's payload, if nothing is missing; 0 where it is not known."""
    timer: asyncio.TimerHandle | None = None
    connection: "PipelineConnection | None" = None

    def land(self, outcome: Replies | TierUnavailable) -> None:
        """Ends the pipeline: cancels its timer and hands the outcome to `landed`."""
        if self.timer is not None:
            self.timer.cancel()
        self.landed(outcome)


class PipelineConnection(asyncio.Protocol):
    """Takes over the transport of a connection that redis-py opened, with its TLS, ACL and database settings.

    No caller ever reads from it, so none can leave it one reply behind: a reply nobody waits for any more is read
    and dropped, and what cannot be trusted (time-out, protocol error) is closed with everything on it.
    """

    def __init__(
        self, opened: AbstractConnection, on_lost: Callable[["PipelineConnection"], None]
    ) -> None:
        writer = opened._writer
        if writer is None:
            raise TierUnavailable("the connection is not open", reason="connection")
        # Held for its life: redis-py closes the socket when the connection object goes.
        self.redis_connection = opened
        self._on_lost = on_lost
        self._reader = hiredis.Reader(notEnoughData=_MORE)
        self._scanner = scanner_of(RECORD_REPLIES)
        self._replies: list[Any] = []
        self._buffer = b""
        self._pipelines: deque[Pipeline] = deque()
        self._close_error: TierUnavailable | None = None
        self._transport = cast(asyncio.Transport, writer.transport)
        self._transport.set_protocol(self)

    @property
    def in_flight(self) -> int:
        """Pipelines sent and not yet answered."""
        return len(self._pipelines)

    @property
    def commands(self) -> int:
        """Commands sent and not yet answered."""
        return sum(pipeline.count for pipeline in self._pipelines)

    @property
    def closing(self) -> bool:
        """True if the connection takes no more pipelines."""
        return self._transport.is_closing()

    def send(self, pipeline: Pipeline) -> None:
        """Writes the pipeline behind those already under way."""
        pipeline.connection = self
        self._pipelines.append(pipeline)
        self._transport.write(pipeline.packed)

    def abort(self, error: TierUnavailable) -> None:
        """Closes at once; every pipeline under way lands with `error`."""
        self._close_error = self._close_error or error
        self._transport.abort()
        self._fail_all()

    def data_received(self, data: bytes) -> None:
        """Feeds the parser and lands every pipeline whose last reply has come."""
        gets = self._reader.gets
        if self._buffer or (self._pipelines and self._pipelines[0].length):
            data = self._take_frames(data)
            if not data:
                return
        if not self._scanner.admits(data):
            self.abort(TierUnavailable(refusal(RECORD_REPLIES), reason="connection"))
            return
        try:
            self._reader.feed(data)
            while self._pipelines:
                replies = self._replies
                missing = self._pipelines[0].count - len(replies)
                while missing:
                    reply = gets()
                    if reply is _MORE:
                        return
                    if type(reply) is not hiredis.PushNotification:
                        replies.append(reply)
                        missing -= 1
                self._replies = []
                self._pipelines.popleft().land(replies)
            if self._reader.has_data() and type(gets()) is not hiredis.PushNotification:
                self.abort(TierUnavailable("a reply that nobody asked for", reason="connection"))
        except Exception as error:  # HiredisError; TypeError for a map whose key is a list
            self.abort(TierUnavailable(f"not the Redis protocol: {error}", reason="connection"))

    def _take_frames(self, data: bytes) -> bytes:
        """Lands pipelines whose replies are all of the length that was foretold; what is left is for the parser."""
        data, self._buffer = self._buffer + data, b""
        while data and self._pipelines and not self._replies and not self._reader.has_data():
            pipeline = self._pipelines[0]
            if not pipeline.length or not loader.kernels.could_be(
                data, pipeline.count, pipeline.length
            ):
                return data
            size = pipeline.count * stride(pipeline.length)
            if len(data) < size:
                self._buffer = data
                return b""
            self._pipelines.popleft().land(Frames(data, pipeline.count, pipeline.length))
            data = data[size:]
        return data

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends every pipeline under way and reports the connection as lost: the socket is gone, whoever closed it."""
        self._close_error = self._close_error or TierUnavailable(
            f"connection lost: {exc or 'closed by the server'}", reason="connection"
        )
        self._fail_all()
        self._on_lost(self)

    def _fail_all(self) -> None:
        error = self._close_error or TierUnavailable("connection closed", reason="connection")
        self._replies, self._buffer = [], b""
        while self._pipelines:
            self._pipelines.popleft().land(error)

"""Connections to one Redis server, shared by all callers, and the bounded pool that sends pipelines on them."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import hiredis
from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection

from cache.errors import TierUnavailable
from cache.l2.commands import Frames, deadline_s_for, frame_stride_bytes
from cache.l2.resp import RECORD_REPLY_BOUNDS, bounds_refusal, create_reply_scanner
from cache.native import loader

Replies = Sequence[Any]
SECOND_LOOK_S = 0.001

_RECONNECT_PAUSE_S = 1.0
"""Seconds from a refused connection to the next attempt, while other connections are open."""

_RENEWAL_PAUSE_S = 5.0
"""Seconds between two renewals of all connections, if the server accepts no writes."""

_NOT_ENOUGH_DATA = object()


@dataclass(slots=True, eq=False)
class Pipeline:
    """Commands sent together; `on_landed` is called exactly once, with all replies or with the error."""

    packed_commands: bytes
    reply_count: int
    on_landed: Callable[[Replies | TierUnavailable], None]
    reply_payload_bytes: int = 0
    """Payload size in bytes that every reply has if no record is missing; 0 if unknown."""
    deadline_timer: asyncio.TimerHandle | None = None
    connection: "PipelineConnection | None" = None

    def land(self, outcome: Replies | TierUnavailable) -> None:
        """End the pipeline: cancel its timer and call `on_landed` with the outcome."""
        if self.deadline_timer is not None:
            self.deadline_timer.cancel()
        self.on_landed(outcome)


class PipelineConnection(asyncio.Protocol):
    """Protocol on the transport of a connection that redis-py opened, with its TLS, ACL and database settings.

    Callers do not read from the connection, so a cancelled caller cannot leave replies out of step: its reply is read
    and dropped. After a time-out or a protocol error the connection is closed, and all its pipelines fail.
    """

    def __init__(self, redis_connection: AbstractConnection, on_lost: Callable[["PipelineConnection"], None]) -> None:
        writer = redis_connection._writer
        if writer is None:
            raise TierUnavailable("the connection is not open", reason="connection")
        # Keep a reference: redis-py closes the socket when its connection object is collected.
        self.redis_connection = redis_connection
        self._on_lost = on_lost
        self._reader = hiredis.Reader(notEnoughData=_NOT_ENOUGH_DATA)
        self._scanner = create_reply_scanner(RECORD_REPLY_BOUNDS)
        self._replies: list[Any] = []
        self._incomplete_frames = b""
        self._pipelines: deque[Pipeline] = deque()
        self._close_error: TierUnavailable | None = None
        self._transport = cast(asyncio.Transport, writer.transport)
        self._transport.set_protocol(self)

    @property
    def pipelines_in_flight(self) -> int:
        """Number of pipelines sent but not yet answered."""
        return len(self._pipelines)

    @property
    def commands_in_flight(self) -> int:
        """Number of commands sent but not yet answered."""
        return sum(pipeline.reply_count for pipeline in self._pipelines)

    @property
    def is_closing(self) -> bool:
        """True if the connection accepts no more pipelines."""
        return self._transport.is_closing()

    def send(self, pipeline: Pipeline) -> None:
        """Send the pipeline; its replies follow those of the pipelines already sent."""
        pipeline.connection = self
        self._pipelines.append(pipeline)
        self._transport.write(pipeline.packed_commands)

    def abort(self, error: TierUnavailable) -> None:
        """Close the connection at once; every pending pipeline ends with `error`."""
        self._close_error = self._close_error or error
        self._transport.abort()
        self._fail_all()

    def data_received(self, data: bytes) -> None:
        """Feed the parser and end every pipeline whose last reply has arrived."""
        gets = self._reader.gets
        if self._incomplete_frames or (self._pipelines and self._pipelines[0].reply_payload_bytes):
            data = self._feed_frames(data)
            if not data:
                return
        if not self._scanner.admits(data):
            self.abort(TierUnavailable(bounds_refusal(RECORD_REPLY_BOUNDS), reason="connection"))
            return
        try:
            self._reader.feed(data)
            while self._pipelines:
                replies = self._replies
                missing_count = self._pipelines[0].reply_count - len(replies)
                while missing_count:
                    reply = gets()
                    if reply is _NOT_ENOUGH_DATA:
                        return
                    if type(reply) is not hiredis.PushNotification:
                        replies.append(reply)
                        missing_count -= 1
                self._replies = []
                self._pipelines.popleft().land(replies)
            if self._reader.has_data() and type(gets()) is not hiredis.PushNotification:
                self.abort(TierUnavailable("an unexpected reply", reason="connection"))
        except Exception as error:  # HiredisError; TypeError for a map whose key is a list
            self.abort(TierUnavailable(f"not the Redis protocol: {error}", reason="connection"))

    def _feed_frames(self, received: bytes) -> bytes:
        """End the pipelines whose replies all have the expected length; return the remaining bytes for the parser."""
        received, self._incomplete_frames = self._incomplete_frames + received, b""
        while received and self._pipelines and not self._replies and not self._reader.has_data():
            pipeline = self._pipelines[0]
            if not pipeline.reply_payload_bytes or not loader.kernels.could_be(
                received, pipeline.reply_count, pipeline.reply_payload_bytes
            ):
                return received
            frames_bytes = pipeline.reply_count * frame_stride_bytes(pipeline.reply_payload_bytes)
            if len(received) < frames_bytes:
                self._incomplete_frames = received
                return b""
            self._pipelines.popleft().land(Frames(received, pipeline.reply_count, pipeline.reply_payload_bytes))
            received = received[frames_bytes:]
        return received

    def connection_lost(self, exc: Exception | None) -> None:
        """End every pending pipeline and report the connection as lost; called when the socket has been closed."""
        self._close_error = self._close_error or TierUnavailable(
            f"connection lost: {exc or 'closed by the server'}", reason="connection"
        )
        self._fail_all()
        self._on_lost(self)

    def _fail_all(self) -> None:
        error = self._close_error or TierUnavailable("connection closed", reason="connection")
        self._replies, self._incomplete_frames = [], b""
        while self._pipelines:
            self._pipelines.popleft().land(error)


class PipelinePool:
    """Pool that sends each pipeline on an idle connection, else on the one with the fewest pending pipelines.

    It opens up to `max_connections` connections.

    A pipeline ends within `deadline_s` and about a millisecond, or later if it is large or others precede it. A Redis
    Cluster has one pool per node.
    """

    def __init__(self, pool: ConnectionPool, deadline_s: float, max_connections: int) -> None:
        self.opened = 0
        self.timed_out = 0
        self._pool = pool
        self._deadline_s = deadline_s
        self._max_connections = max_connections
        self._connections: list[PipelineConnection] = []
        # By order of insertion: pipelines that were sent before the first connection was open.
        self._waiting_pipelines: dict[Pipeline, None] = {}
        self._connect_task: asyncio.Task[None] | None = None
        self._refused_until_s = 0.0
        self._renewed_at_s = -_RENEWAL_PAUSE_S
        self._closing_tasks: set[asyncio.Task[None]] = set()

    def send(self, pipeline: Pipeline) -> None:
        """Send the pipeline now, or as soon as a connection is open."""
        loop = asyncio.get_running_loop()
        connection = min(
            (connection for connection in self._connections if not connection.is_closing),
            key=lambda connection: connection.pipelines_in_flight,
            default=None,
        )
        command_count = pipeline.reply_count + (0 if connection is None else connection.commands_in_flight)
        deadline_s = deadline_s_for(self._deadline_s, command_count)
        pipeline.deadline_timer = loop.call_later(deadline_s, self._expire, pipeline, deadline_s, False)
        if connection is None:
            self._waiting_pipelines[pipeline] = None
            self._start_connecting()
            return
        if (
            connection.pipelines_in_flight
            and len(self._connections) < self._max_connections
            and loop.time() >= self._refused_until_s
        ):
            self._start_connecting()
        connection.send(pipeline)

    async def connect_ahead(self) -> None:
        """Open a connection if there is none, and wait for the outcome without a time limit; raises nothing."""
        if not self._connections:
            self._start_connecting()
        if (connect_task := self._connect_task) is not None:
            await asyncio.wait({connect_task})

    def renew(self) -> None:
        """Close all connections to a server that accepts no writes: its name may resolve to another server by now.

        Pending pipelines end with TierUnavailable. Does nothing within `_RENEWAL_PAUSE_S` of the last renewal, since
        there may be no other server.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s < self._renewed_at_s + _RENEWAL_PAUSE_S:
            return
        self._renewed_at_s = now_s
        for connection in tuple(self._connections):
            connection.abort(TierUnavailable("Redis accepts no writes any more", reason="connection"))

    async def aclose(self) -> None:
        """Close every connection; pending pipelines end with TierUnavailable."""
        if self._connect_task is not None:
            self._connect_task.cancel()
            await asyncio.gather(self._connect_task, return_exceptions=True)
        closed_error = TierUnavailable("this client was closed", reason="connection")
        self._fail_waiting(closed_error)
        for connection in tuple(self._connections):
            connection.abort(closed_error)
            self._drop_connection(connection)
        await asyncio.gather(*self._closing_tasks, return_exceptions=True)

    def _start_connecting(self) -> None:
        if self._connect_task is None:
            self._connect_task = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        redis_connection: AbstractConnection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            await redis_connection.connect()  # type: ignore[no-untyped-call]
            connection = PipelineConnection(redis_connection, self._drop_connection)
        except Exception as error:  # RedisError, OSError, or any error that an unexpected greeting causes in redis-py
            await redis_connection.disconnect(nowait=True)
            self._refused_until_s = asyncio.get_running_loop().time() + _RECONNECT_PAUSE_S
            self._fail_waiting(TierUnavailable(f"cannot connect: {error}", reason="connection"))
        except BaseException:
            await redis_connection.disconnect(nowait=True)
            raise
        else:
            self.opened += 1
            self._connections.append(connection)
            for pipeline in self._waiting_pipelines:
                connection.send(pipeline)
            self._waiting_pipelines.clear()
        finally:
            self._connect_task = None

    def _fail_waiting(self, error: TierUnavailable) -> None:
        waiting_pipelines, self._waiting_pipelines = self._waiting_pipelines, {}
        for pipeline in waiting_pipelines:
            pipeline.land(error)

    def _expire(self, pipeline: Pipeline, deadline_s: float, is_second_look: bool) -> None:
        loop = asyncio.get_running_loop()
        if not is_second_look:
            # After a blocking call (garbage collection, a long callback) the loop runs its timers before it polls its
            # sockets: the reply may already have arrived, and a large one takes several reads.
            second_look_s = deadline_s_for(SECOND_LOOK_S, pipeline.reply_count)
            pipeline.deadline_timer = loop.call_later(second_look_s, self._expire, pipeline, deadline_s, True)
            return
        self.timed_out += 1
        timeout_error = TierUnavailable(f"no reply within {deadline_s} s", reason="timeout")
        if pipeline.connection is not None:
            pipeline.connection.abort(timeout_error)
        elif pipeline in self._waiting_pipelines:
            del self._waiting_pipelines[pipeline]
            pipeline.land(timeout_error)

    def _drop_connection(self, connection: PipelineConnection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            disconnect_task = asyncio.get_running_loop().create_task(
                connection.redis_connection.disconnect(nowait=True)
            )
            self._closing_tasks.add(disconnect_task)
            disconnect_task.add_done_callback(self._closing_tasks.discard)

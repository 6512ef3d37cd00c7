"""A bounded connection pool: the connections to one Redis server."""

import asyncio

from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection

from cache.errors import TierUnavailable
from cache.l2.connection import Pipeline, PipelineConnection

SECOND_LOOK_S = 0.001
_COMMANDS_PER_DEADLINE = 500
_PAUSE_S = 1.0
"""Seconds after a refused connection before another one is tried beside those that are open."""
_RENEWED_S = 5.0
"""Seconds in which connections are left once at most because their server takes no writes."""


def deadline_for(base_s: float, commands: int) -> float:
    """Deadline in s for `commands` when one may take `base_s`: sending, answering and reading many is work."""
    return base_s * (1 + commands / _COMMANDS_PER_DEADLINE)


class PipelinePool:
    """Sends each pipeline on an idle connection if there is one, else behind the fewest others.

    It opens connections up to `max_connections`.

    A pipeline lands within `deadline_s`, more if it is large or behind others, and about a millisecond.
    In a Redis Cluster there is one pool per node.
    """

    def __init__(self, pool: ConnectionPool, deadline_s: float, max_connections: int) -> None:
        self.opened = 0
        self.timed_out = 0
        self._pool = pool
        self._deadline_s = deadline_s
        self._max_connections = max_connections
        self._connections: list[PipelineConnection] = []
        # Insertion order: pipelines that came before the first connection was open.
        self._waiting: dict[Pipeline, None] = {}
        self._opening: asyncio.Task[None] | None = None
        self._refused_until = 0.0
        self._renewed_at = -_RENEWED_S
        self._closing: set[asyncio.Task[None]] = set()

    def send(self, pipeline: Pipeline) -> None:
        """Sends now, or as soon as a connection is open."""
        loop = asyncio.get_running_loop()
        connection = min(
            (connection for connection in self._connections if not connection.closing),
            key=lambda connection: connection.in_flight,
            default=None,
        )
        commands = pipeline.count + (0 if connection is None else connection.commands)
        deadline_s = deadline_for(self._deadline_s, commands)
        pipeline.timer = loop.call_later(deadline_s, self._expire, pipeline, deadline_s, False)
        if connection is None:
            self._waiting[pipeline] = None
            self._open()
            return
        if (
            connection.in_flight
            and len(self._connections) < self._max_connections
            and loop.time() >= self._refused_until
        ):
            self._open()
        connection.send(pipeline)

    async def connect_ahead(self) -> None:
        """Open a connection if there is none, and wait for the outcome, however long it takes; raises nothing."""
        if not self._connections:
            self._open()
        if (opening := self._opening) is not None:
            await asyncio.wait({opening})

    def renew(self) -> None:
        """Leaves the server, which takes no writes any more: by the same name another may be there by now.

        What is under way lands as unavailable. Not again within seconds: there may be no other.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s < self._renewed_at + _RENEWED_S:
            return
        self._renewed_at = now_s
        for connection in tuple(self._connections):
            connection.abort(TierUnavailable("Redis takes no writes any more", reason="connection"))

    async def aclose(self) -> None:
        """Closes every connection; what is under way lands as unavailable."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        closed_error = TierUnavailable("this client was closed", reason="connection")
        self._fail_waiting(closed_error)
        for connection in tuple(self._connections):
            connection.abort(closed_error)
            self._drop_connection(connection)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _open(self) -> None:
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        opened: AbstractConnection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            await opened.connect()  # type: ignore[no-untyped-call]
            connection = PipelineConnection(opened, self._drop_connection)
        except (
            Exception
        ) as error:  # RedisError, OSError, or whatever a strange greeting makes of redis-py
            await opened.disconnect(nowait=True)
            self._refused_until = asyncio.get_running_loop().time() + _PAUSE_S
            self._fail_waiting(TierUnavailable(f"cannot connect: {error}", reason="connection"))
        except BaseException:
            await opened.disconnect(nowait=True)
            raise
        else:
            self.opened += 1
            self._connections.append(connection)
            for pipeline in self._waiting:
                connection.send(pipeline)
            self._waiting.clear()
        finally:
            self._opening = None

    def _fail_waiting(self, error: TierUnavailable) -> None:
        waiting, self._waiting = self._waiting, {}
        for pipeline in waiting:
            pipeline.land(error)

    def _expire(self, pipeline: Pipeline, deadline_s: float, is_second_look: bool) -> None:
        loop = asyncio.get_running_loop()
        if not is_second_look:
            # A loop that was blocked (garbage collection, a long callback) fires its timers before it has looked
            # at its sockets: the reply may have been lying there all along, and a large one takes several reads.
            look_s = deadline_for(SECOND_LOOK_S, pipeline.count)
            pipeline.timer = loop.call_later(look_s, self._expire, pipeline, deadline_s, True)
            return
        self.timed_out += 1
        late = TierUnavailable(f"no reply within {deadline_s} s", reason="timeout")
        if pipeline.connection is not None:
            pipeline.connection.abort(late)
        elif pipeline in self._waiting:
            del self._waiting[pipeline]
            pipeline.land(late)

    def _drop_connection(self, connection: PipelineConnection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            task = asyncio.get_running_loop().create_task(
                connection.redis_connection.disconnect(nowait=True)
            )
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

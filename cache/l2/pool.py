"""A bounded connection pool: the wires to one Redis server."""

import asyncio

from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection

from cache.errors import TierUnavailable
from cache.l2.connection import Batch, Wire

SECOND_LOOK_S = 0.001
_COMMANDS_PER_DEADLINE = 500
_PAUSE_S = 1.0
"""Seconds after a refused connection before another one is tried beside those that are open."""


def deadline_for(base_s: float, commands: int) -> float:
    """Deadline in s for `commands` when one may take `base_s`: sending, answering and reading a large batch is work."""
    return base_s * (1 + commands / _COMMANDS_PER_DEADLINE)


class Lane:
    """Sends each batch on an idle wire if there is one, else behind the fewest others; opens wires up to `max_wires`.

    A batch lands within `deadline_s`, more if it is large or behind others, and about a millisecond.
    In a Redis Cluster there is one lane per node.
    """

    def __init__(self, pool: ConnectionPool, deadline_s: float, max_wires: int) -> None:
        self.opened = 0
        self.timed_out = 0
        self._pool = pool
        self._deadline_s = deadline_s
        self._max_wires = max_wires
        self._wires: list[Wire] = []
        # Insertion order: batches that came before the first wire was open.
        self._waiting: dict[Batch, None] = {}
        self._opening: asyncio.Task[None] | None = None
        self._refused_until = 0.0
        self._closing: set[asyncio.Task[None]] = set()

    def send(self, batch: Batch) -> None:
        """Sends now, or as soon as a wire is open."""
        loop = asyncio.get_running_loop()
        wire = min(
            (wire for wire in self._wires if not wire.closing),
            key=lambda wire: wire.in_flight,
            default=None,
        )
        commands = batch.count + (0 if wire is None else wire.commands)
        deadline_s = deadline_for(self._deadline_s, commands)
        batch.timer = loop.call_later(deadline_s, self._expire, batch, deadline_s, False)
        if wire is None:
            self._waiting[batch] = None
            self._open()
            return
        if (
            wire.in_flight
            and len(self._wires) < self._max_wires
            and loop.time() >= self._refused_until
        ):
            self._open()
        wire.send(batch)

    async def aclose(self) -> None:
        """Closes every wire; what is under way lands as unavailable."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        gone = TierUnavailable("this client was closed", reason="connection")
        self._fail_waiting(gone)
        for wire in tuple(self._wires):
            wire.abort(gone)
            self._lost(wire)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _open(self) -> None:
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        connection: AbstractConnection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
            wire = Wire(connection, self._lost)
        except (
            Exception
        ) as error:  # RedisError, OSError, or whatever a strange greeting makes of redis-py
            await connection.disconnect(nowait=True)
            self._refused_until = asyncio.get_running_loop().time() + _PAUSE_S
            self._fail_waiting(TierUnavailable(f"cannot connect: {error}", reason="connection"))
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        else:
            self.opened += 1
            self._wires.append(wire)
            for batch in self._waiting:
                wire.send(batch)
            self._waiting.clear()
        finally:
            self._opening = None

    def _fail_waiting(self, why: TierUnavailable) -> None:
        waiting, self._waiting = self._waiting, {}
        for batch in waiting:
            batch.land(why)

    def _expire(self, batch: Batch, deadline_s: float, seen: bool) -> None:
        loop = asyncio.get_running_loop()
        if not seen:
            # A loop that was blocked (garbage collection, a long callback) fires its timers before it has looked
            # at its sockets: the reply may have been lying there all along, and a large one takes several reads.
            look_s = deadline_for(SECOND_LOOK_S, batch.count)
            batch.timer = loop.call_later(look_s, self._expire, batch, deadline_s, True)
            return
        self.timed_out += 1
        late = TierUnavailable(f"no reply within {deadline_s} s", reason="timeout")
        if batch.wire is not None:
            batch.wire.abort(late)
        elif batch in self._waiting:
            del self._waiting[batch]
            batch.land(late)

    def _lost(self, wire: Wire) -> None:
        if wire in self._wires:
            self._wires.remove(wire)
            task = asyncio.get_running_loop().create_task(wire.connection.disconnect(nowait=True))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

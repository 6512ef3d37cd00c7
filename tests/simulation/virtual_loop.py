"""An event loop whose time jumps to the next timer, and whose sockets are wires in memory."""

import asyncio
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from typing import Any, Protocol

HOST: ContextVar["Host | None"] = ContextVar("host", default=None)
"""The host whose code runs; None: the network, Redis, callers."""


_TIMERS, _CANCELLED_SHARE = 100, 0.5
"""Timers, and the share of them that is cancelled, above which asyncio cleans up: it changes the order of ties."""


class Host:
    """A machine of the simulation: everything that began on it ends with it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.up_since = 0.0
        self.clock_ahead_s = 0.0
        """Seconds by which its wall clock is ahead of the others'."""

    def __repr__(self) -> str:
        return self.name  # an address would make each report of one failure a different text


class Network(Protocol):
    """Protocol of connecting and listening."""

    async def connect(self, protocol: asyncio.BaseProtocol, port: int) -> asyncio.Transport:
        """Connect to the listener of that port; raise OSError without one."""
        ...

    def listen(self, protocol_factory: Callable[[], asyncio.BaseProtocol], port: int) -> asyncio.AbstractServer:
        """Listen on that port."""
        ...


class Stuck(AssertionError):
    """Nothing is ready, and no timer is set."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks in asyncio's order; timers run at once, in order of time.

    A callback belongs to the host in whose context it was made, and never runs once that host is dead.
    """

    # Attributes of asyncio's own loop that its type stubs do not declare.
    _ready: deque[asyncio.Handle]
    _scheduled: list[tuple[float, Any]]
    _stopping: bool
    _timer_cancelled_count: int

    def __init__(self, network: Network, start: float) -> None:
        super().__init__()
        self._network = network
        self._now_s = start
        self._clock_resolution = 1e-9
        self.stalled_s = 0.0
        """Seconds in which nothing ran, in all."""

    def time(self) -> float:
        """Return virtual seconds."""
        return self._now_s

    def _run_once(self) -> None:
        """Run what is ready, as asyncio's own method does.

        The heap holds (time, timer) where that one holds timers, whose comparison is a call, and there are 54,000 in a
        simulation. Their order is the same, ties included.
        """
        ready, timers = self._ready, self._scheduled
        cancelled = self._timer_cancelled_count
        if len(timers) > _TIMERS and cancelled / len(timers) > _CANCELLED_SHARE:
            for _, timer in timers:
                timer._scheduled = not timer._cancelled
            timers[:] = [timed_handle for timed_handle in timers if timed_handle[1]._scheduled]
            heapq.heapify(timers)
            self._timer_cancelled_count = 0
        else:
            while timers and timers[0][1]._cancelled:
                self._timer_cancelled_count -= 1
                heapq.heappop(timers)[1]._scheduled = False
        if not ready and not self._stopping:
            if not timers:
                raise Stuck("every task waits, and no timer is set")
            self._now_s = max(self._now_s, timers[0][0])
        end = self._now_s + self._clock_resolution
        while timers and timers[0][0] < end:
            timer = heapq.heappop(timers)[1]
            timer._scheduled = False
            ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _process_events(self, _event_list: tuple[()]) -> None:
        """Do nothing: there is no selector."""

    def _write_to_self(self) -> None:
        """Do nothing: the loop never sleeps."""

    def _call_soon(self, callback: Callable[..., Any], args: Any, context: Context | None) -> asyncio.Handle:
        handle = events.Handle(callback, args, self, context)
        if not _is_of_the_dead(handle):
            self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run the callback at a time, unless its host is dead by then."""
        timer = events.TimerHandle(when, callback, args, self, context)
        if not _is_of_the_dead(timer):
            heapq.heappush(self._scheduled, (when, timer))
            timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def stall(self, seconds: float) -> None:
        """Let time pass in which nothing runs: a garbage collection, a long callback, a process without a core."""
        self._now_s += seconds
        self.stalled_s += seconds

    def kill(self, host: Host) -> None:
        """End everything on a host at once, including any clean-up."""
        host.is_dead = True
        timers = (timer for _, timer in self._scheduled)
        for handle in (*self._ready, *timers):
            if _is_of_the_dead(handle):
                handle.cancel()

    async def create_connection(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str | None = None,
        port: int | None = None,
        **_options: Any,
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Connect a wire to the listener of the port."""
        protocol = protocol_factory()
        return await self._network.connect(protocol, port or 0), protocol

    async def create_server(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str | None = None,
        port: int | None = None,
        *,
        sock: Any = None,
        **_options: Any,
    ) -> asyncio.AbstractServer:
        """Listen on the port of the given listener."""
        return self._network.listen(protocol_factory, sock.port)


def _is_of_the_dead(handle: asyncio.Handle) -> bool:
    host = handle._context.get(HOST)  # type: ignore[attr-defined]
    return host is not None and host.is_dead


def context_of(host: Host | None) -> Context:
    """Return a context in which code of that host runs."""
    context = copy_context()
    context.run(HOST.set, host)
    return context

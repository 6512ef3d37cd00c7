"""Connections in memory: bytes arrive in order, after a delay, perhaps in pieces, late, or never."""

import asyncio
import random
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.virtual_loop import HOST, Host, VirtualLoop

NEAR_S, FAR_S = 0.00005, 0.002
"""Seconds that bytes take at least, and mostly at most."""


@dataclass(slots=True)
class Link:
    """The link of a host to the rest of the world; bytes wait while anything holds it."""

    hold_count: int = 0
    slow_s: float = 0.0
    waiting: list[Callable[[], None]] = field(default_factory=list)


class Wire(asyncio.Transport):
    """One end of a connection; the other end's protocol hears what is written here."""

    def __init__(self, wires: "Wires", protocol: asyncio.BaseProtocol, link: Link) -> None:
        super().__init__()
        self._wires = wires
        self._protocol = protocol
        self._link = link
        self._context = copy_context()
        self._is_closing = False
        self._is_aborted = False
        self._arrives_at = 0.0
        self.peer: Wire

    @property
    def host(self) -> Host | None:
        """The host of this end."""
        return self._context.get(HOST)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Give the connection another protocol."""
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol that gets what arrives."""
        return self._protocol

    def is_closing(self) -> bool:
        """Return whether either end closed the connection."""
        return self._is_closing

    def write(self, data: Any) -> None:
        """Send bytes."""
        if data and not self._is_closing:
            for piece in self._wires.pieces(bytes(data)):
                self._send(self.peer._hear, piece)

    def writelines(self, list_of_data: Any) -> None:
        """Send all the pieces."""
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        """Close the connection after what was written."""
        if not self._is_closing:
            self._is_closing = True
            self._send(self.peer._lose)
            self._wires.loop.call_soon(self._call_connection_lost, context=self._context)

    def abort(self) -> None:
        """Close the connection; discard what waits on this side of a held link."""
        self._is_aborted = True
        self.close()

    def pause_reading(self) -> None:
        """Do nothing: data is delivered all the same, since no peer sends without end."""

    def resume_reading(self) -> None:
        """Do nothing; see `pause_reading`."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing: nothing is buffered."""

    def get_write_buffer_size(self) -> int:
        """Return 0: nothing is buffered."""
        return 0

    def can_write_eof(self) -> bool:
        """Return False: no end closes half of a connection."""
        return False

    def cut(self) -> None:
        """Break the connection at both ends, losing what is under way."""
        for wire in (self, self.peer):
            self._wires.ends.pop(wire, None)
            if not wire._is_closing:
                wire._is_closing = True
                self._wires.loop.call_soon(wire._call_connection_lost, context=wire._context)

    def _send(self, hear: Callable[..., None], *arguments: Any) -> None:
        loop = self._wires.loop
        when = loop.time() + self._wires.delay_s(self._link)

        def go() -> None:
            if self._is_aborted and arguments:
                return
            # No two arrivals at the same time: timers with equal times run in no defined order.
            self._arrives_at = max(when, loop.time(), self._arrives_at + 1e-6)
            loop.call_at(self._arrives_at, hear, *arguments, context=self.peer._context)

        if self._link.hold_count:
            self._link.waiting.append(go)
        else:
            go()

    def _hear(self, data: bytes) -> None:
        if not self._is_closing:
            self._protocol.data_received(data)  # type: ignore[attr-defined]

    def _lose(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._call_connection_lost()

    def _call_connection_lost(self) -> None:
        self._protocol.connection_lost(None)
        self._wires.ends.pop(self, None)


class Server(asyncio.AbstractServer):
    """A listener."""

    def __init__(self, wires: "Wires", port: int) -> None:
        self._wires = wires
        self._port = port

    def close(self) -> None:
        """Stop listening."""
        self._wires.listening.pop(self._port, None)

    async def wait_closed(self) -> None:
        """Do nothing: closing takes no time."""

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the only loop."""
        return self._wires.loop

    def is_serving(self) -> bool:
        """Return True until the server is closed."""
        return self._port in self._wires.listening

    async def start_serving(self) -> None:
        """Do nothing: the server serves from the start."""

    async def serve_forever(self) -> None:
        """Do nothing: nothing waits for this."""

    @property
    def sockets(self) -> tuple[()]:
        """No sockets."""
        return ()


class Wires:
    """All connections and listeners; delays come from one seeded source."""

    def __init__(self, rng: random.Random) -> None:
        self.loop: VirtualLoop
        self.listening: dict[int, tuple[Callable[[], asyncio.BaseProtocol], Context]] = {}
        self.ends: dict[Wire, None] = {}
        self.torn = 0.0
        """Chance that bytes arrive in two pieces."""
        self._rng = rng
        self._links: dict[tuple[str, int], Link] = {}

    def link(self, name: str, port: int) -> Link:
        """Return the link between a host and the listener of a port, or a caller of the host on it."""
        return self._links.setdefault((name, port), Link())

    def delay_s(self, link: Link) -> float:
        """Return the seconds that bytes are under way: usually few, sometimes many."""
        slow = self._rng.random() < 0.02
        return NEAR_S + self._rng.random() * (FAR_S * (4 if slow else 1)) + link.slow_s

    def pieces(self, data: bytes) -> list[bytes]:
        """Return the bytes in the pieces in which they arrive."""
        if self.torn and len(data) > 1 and self._rng.random() < self.torn:
            at = self._rng.randrange(1, len(data))
            return [data[:at], data[at:]]
        return [data]

    async def connect(self, protocol: asyncio.BaseProtocol, port: int) -> asyncio.Transport:
        """Connect; raise ConnectionRefusedError without a listener."""
        link = self._link_of(port)
        await asyncio.sleep(self.delay_s(link))
        if link.hold_count:  # who connects across a broken link hears nothing until it is mended
            mended = asyncio.Event()
            link.waiting.append(mended.set)
            await mended.wait()
        listener = self.listening.get(port)
        if listener is None:
            raise ConnectionRefusedError(f"nobody listens on {port}")
        protocol_factory, context = listener
        client_wire = Wire(self, protocol, link)
        server_wire = context.run(lambda: Wire(self, protocol_factory(), link))
        server_wire._context = context
        client_wire.peer, server_wire.peer = server_wire, client_wire
        self.ends |= {client_wire: None, server_wire: None}
        self.loop.call_soon(server_wire._protocol.connection_made, server_wire, context=context)
        protocol.connection_made(client_wire)
        return client_wire

    def listen(self, protocol_factory: Callable[[], asyncio.BaseProtocol], port: int) -> asyncio.AbstractServer:
        """Listen, in the context of the caller."""
        self.listening[port] = protocol_factory, copy_context()
        return Server(self, port)

    def _link_of(self, port: int) -> Link:
        host = HOST.get()
        if host is None and port in self.listening:  # a caller, who is on no host
            host = self.listening[port][1].get(HOST)
        return self.link("" if host is None else host.name, port)

    def release(self, link: Link) -> None:
        """Remove one hold of the link; bytes that waited for the last one arrive."""
        link.hold_count -= 1
        if link.hold_count:
            return
        waiting, link.waiting = link.waiting, []
        for go in waiting:
            go()

    def cut(self, of: Callable[[Wire], bool]) -> None:
        """Break connections."""
        for wire in [wire for wire in self.ends if of(wire)]:
            wire.cut()

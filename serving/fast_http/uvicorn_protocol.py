"""A connection of uvicorn's that can be answered past it.

What each request touches lies together, in slots: with thousands of connections each of them is out of the processor's
caches when its turn comes, and every object of its own costs more than the lookup.
"""

import asyncio
import contextlib
import socket
import struct
from typing import Any

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from serving.fast_http.connections import Connections
from serving.fast_http.inbound import BoundViolation, ConnectionStage, InboundMeter
from serving.http.http1_protocol import PIECE, Http1Protocol, ProtocolViolation

_AT_ONCE = struct.pack("ii", 1, 0)
_ENDING_MAX = 128
"""Connections beyond `connections_max` that may read why they are refused; the others are closed at once."""


class Connection(Http1Protocol):
    """A uvicorn connection that counts open requests, and winds the idle clock for those answered past uvicorn.

    What comes is parsed within bounds (`InboundMeter`): beyond them the connection takes no more, and ends.
    """

    __slots__ = (
        "_connections", "_inbound", "_is_ending", "_is_full", "_is_waited_for", "_open", "_was_asked",
        # Uvicorn's own: those that every request looks at.
        "server_state", "timeout_keep_alive_task", "transport",
    )  # fmt: skip

    def __init__(self, connections: Connections, *arguments: Any, **named: Any) -> None:
        self._open = 0  # of uvicorn's requests: one for each that is not read, one for each that is not answered
        self._was_asked = self._is_ending = self._is_full = False
        self._is_waited_for = False
        self._connections = connections
        self._inbound = InboundMeter(connections.bounds)
        super().__init__(*arguments, **named)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Opens the connection as uvicorn does; one too many is refused with 503."""
        super().connection_made(transport)
        count = len(self.connections)
        if not self._connections.admit(self, count):
            self.refuse(BoundViolation(503))
            if count > self._connections.bounds.connections_max + _ENDING_MAX:
                self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection as uvicorn does, and with it its requests that were never begun."""
        self._connections.discard_unasked(self)
        self._connections.unread.remove(self)
        super().connection_lost(exc)
        if self.pipeline:
            # Never begun, they and the connection hold each other: the garbage collector would look for thousands of
            # them, tens of milliseconds at a time.
            self.pipeline.clear()
            self.cycle = None  # type: ignore[assignment]  # the newest of them

    def data_received(self, data: bytes) -> None:
        """Refuses what is seen to be too much before any of it is read."""
        if not (self.is_deaf or self._unread) and (status := self._inbound.excess(data)):
            self.refuse(BoundViolation(status))
        super().data_received(data)

    def read_piece(self, data: bytes) -> None:
        """Reads a piece, then looks whether more has come of a head than it may have."""
        super().read_piece(data)
        if not self.is_deaf and not self._inbound.fed(len(data)):
            self.refuse(BoundViolation(431))

    def on_message_begin(self) -> None:
        """Counts a new request, bounded by the pipeline's length, then begins it as uvicorn does."""
        self._open += 2
        is_awaited = self.cycle is not None and not self.cycle.response_complete
        self._inbound.begin(len(self.pipeline) + is_awaited)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Counts a piece of the request target within the head's bound, then hands it to uvicorn."""
        self._inbound.url(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts a header field within the head's bounds, then hands it to uvicorn."""
        self._inbound.field(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Notes that the head is complete and the connection has asked, then goes on as uvicorn does."""
        self._inbound.is_head = False
        self._connections.discard_unasked(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Counts a piece of a body within the bound on what waits, then hands it to uvicorn.

        The application reads bodies as a whole: it is not woken for a small piece before the last.
        """
        self._inbound.body(len(body), is_behind=bool(self.pipeline) or self._is_full)
        cycle = self.cycle
        if cycle is None or cycle.response_complete or len(cycle.body) + len(body) > PIECE:
            super().on_body(body)
        else:
            cycle.body += body

    def on_message_complete(self) -> None:
        """Notes that the request is read as a whole, then goes on as uvicorn does."""
        if self.has_body:
            return  # the parser is done with the head of a request that asks for an upgrade
        self._open -= 1
        self._inbound.is_whole = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Counts an answer, then goes on as uvicorn does."""
        self._open -= 1
        self._inbound.answered()
        super().on_response_complete()
        if self._inbound.is_whole and not self._open:
            # An idle connection keeps nothing of its last request: it was half of what the garbage collector saw of it.
            self.cycle = self.scope = self.headers = None  # type: ignore[assignment]

    def pause_writing(self) -> None:
        """Notes that the write buffer is full, then pauses as uvicorn does."""
        self._is_full = True
        self._connections.unread.add(self, self.loop.time())
        super().pause_writing()

    def resume_writing(self) -> None:
        """Notes that the write buffer has room again, then resumes as uvicorn does."""
        self._is_full = False
        self._connections.unread.remove(self)
        super().resume_writing()

    def drop(self) -> None:
        """Makes room for another connection, unless a request is under way."""
        if not self._is_waited_for:
            self.transport.abort()

    def close_if_stalled(self, now_s: float) -> None:
        """Ends the connection if it has stood where it stands for longer than it may."""
        kind = self._inbound.late(self._stage(), now_s)
        if kind is None:
            return
        if kind == "head":
            self.refuse(BoundViolation(408))
            return
        self._connections.ended_by_reason[kind] += 1
        if kind in ("write", "close"):
            self._reset()
        else:
            self.transport.close()

    def unread_bytes(self) -> int:
        """Bytes of answers that are not sent yet."""
        return self.transport.get_write_buffer_size()

    def cut_off(self) -> None:
        """End the connection at once: others need the room of its unread answers."""
        self._connections.ended_by_reason["unread"] += 1
        self._reset()

    def _reset(self) -> None:
        """Cuts the peer off at once: the kernel would hold what it did not take for minutes."""
        raw = self.transport.get_extra_info("socket")
        with contextlib.suppress(OSError):  # a descriptor is needed for it
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self.transport.abort()

    def _stage(self) -> ConnectionStage | None:
        """The stage in which the peer is to move next; None while that is up to the application or the idle clock."""
        is_closing = self.transport.is_closing()
        if is_closing or self._is_full:
            unsent_bytes = self.transport.get_write_buffer_size()
            return ConnectionStage("close" if is_closing else "write", (unsent_bytes >> 16,))
        if self._is_waited_for or self.is_discarding:
            return None
        if not self._open:
            return ConnectionStage("silent") if self.timeout_keep_alive_task is None else None
        if self.is_awaited or self._inbound.is_whole:
            return None
        return ConnectionStage(
            "head" if self._inbound.is_head else "body", (self._inbound.message_count,)
        )

    @property
    def is_awaited(self) -> bool:
        """Return True if a request is not answered yet."""
        return self._is_waited_for or super().is_awaited

    def refuse(self, violation: ProtocolViolation) -> None:
        """Count the end of a connection that passes a bound, then refuse its next request."""
        if isinstance(violation, BoundViolation) and not (
            self.is_deaf or self.transport.is_closing()
        ):
            self._connections.ended_by_reason[violation.kind] += 1
        super().refuse(violation)

    def timeout_keep_alive_handler(self) -> None:
        """Closes an idle connection. Answers from here do not restart the clock: that would cost as much as they do."""
        if self._was_asked or self._is_waited_for:
            self._wait()
        else:
            super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        """Shuts down as uvicorn does; while a request is answered past uvicorn, only once that is done."""
        if self._is_waited_for:
            self._is_ending = True
        else:
            super().shutdown()

    def _respond(self, start: Message, body: bytes) -> None:
        headers = [*self.server_state.default_headers, *start["headers"]]
        closes = any(name == b"connection" for name, _ in headers)
        if self._is_ending and not closes:
            headers.append((b"connection", b"close"))
        lines = [b"%b: %b\r\n" % header for header in headers]
        self.transport.write(b"".join((STATUS_LINE[start["status"]], *lines, b"\r\n", body)))
        self._finish_request()
        if closes or self._is_ending:
            self.close_in_stages()

    def _finish_request(self) -> None:
        self.server_state.total_requests += 1
        if self.timeout_keep_alive_task is None:
            self._wait()
        self._was_asked = True

    def _wait(self) -> None:
        self._was_asked = False
        self._connections.discard_unasked(self)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

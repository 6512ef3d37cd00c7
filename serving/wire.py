"""What is ready is sent from where its request arrives: without a scope, a task or a parser.

A keep-alive client sends the same headers with every request. Once it has, and they allow a ready answer, the next
request of that connection is nothing but a request line to look up. Everything else goes to uvicorn as it came.
"""

import functools
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serving.front import Front
from serving.media import JSON_TYPE

_HEADERS_BYTES_MAX = 8_192
_BODILESS = frozenset({b"content-length", b"transfer-encoding", b"expect", b"upgrade"})
_STATUS = b"HTTP/1.1 200 OK\r\n"
_TYPE = b"\r\ncontent-type: " + JSON_TYPE.encode() + b"\r\n\r\n"


class _Headers:
    """What a parser tells of one request."""

    def __init__(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.found: list[tuple[bytes, bytes]] = []
        self.keeps_alive = False
        self.messages = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of them."""
        self.found.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The end of its headers: behind that the parser thinks of the next request."""
        self.keeps_alive = self.parser.should_keep_alive()

    def on_message_complete(self) -> None:
        """Its end, body included."""
        self.messages += 1


def plain(block: bytes) -> list[tuple[bytes, bytes]] | None:
    """The headers of a GET (all behind its first line, line break included), names in lower case.

    None unless this is all of one request without a body that leaves its connection open.
    """
    told = _Headers()
    try:
        told.parser.feed_data(b"GET / HTTP/1.1" + block)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    if told.messages != 1 or not block.endswith(b"\r\n\r\n") or not told.keeps_alive:
        return None
    return None if any(name in _BODILESS for name, _ in told.found) else told.found


class Heads:
    """What stands before the length of every answer; told anew when uvicorn's own headers change, once per second."""

    def __init__(self) -> None:
        self._of: list[tuple[bytes, bytes]] | None = None
        self._count = 0
        self._found: bytes | None = None

    def of(self, headers: list[tuple[bytes, bytes]]) -> bytes | None:
        """Status line and headers; None while they close connections, which is uvicorn's to do."""
        if headers is not self._of or len(headers) != self._count:
            self._of, self._count = headers, len(headers)
            lines = b"".join(b"%b: %b\r\n" % each for each in headers)
            closes = any(name == b"connection" for name, _ in headers)
            self._found = None if closes else _STATUS + lines + b"content-length: "
        return self._found


class Wire(HttpToolsProtocol):
    """One connection."""

    def __init__(self, front: Front, heads: Heads, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._front, self._heads = front, heads
        self._is_between = True
        self._block = b""
        self._is_plain: bool | None = None
        self._was_asked = False

    def data_received(self, data: bytes) -> None:
        """What is one whole request for something ready is answered at once."""
        if not self._is_between or data[:4] != b"GET " or not self._answered(data):
            super().data_received(data)

    def on_message_begin(self) -> None:
        """See uvicorn."""
        self._is_between = False
        super().on_message_begin()

    def on_message_complete(self) -> None:
        """See uvicorn."""
        self._is_between = True
        super().on_message_complete()

    def timeout_keep_alive_handler(self) -> None:
        """See uvicorn. Answers from here do not wind the clock up again: that would cost as much as they do."""
        if self._was_asked:
            self._wait()
        else:
            super().timeout_keep_alive_handler()

    def _answered(self, data: bytes) -> bool:
        end = data.find(b"\r\n")
        block = data[end:]
        if block != self._block:
            self._block, self._is_plain = block[:_HEADERS_BYTES_MAX], None
            return False
        hot, cycle = self._front.wire, self.cycle
        if hot is None or (cycle is not None and not cycle.response_complete):
            return False
        if self._is_plain is None:
            headers = plain(block)
            self._is_plain = headers is not None and hot.takes(headers)
        if not self._is_plain or data[end - 9 : end] != b" HTTP/1.1":
            return False
        state, transport = self.server_state, self.transport
        if self.flow.write_paused or transport.is_closing():
            return False
        if (head := self._heads.of(state.default_headers)) is None:
            return False
        if (body := hot.answer(data[4 : end - 9])) is None:
            return False
        transport.write(b"".join((head, b"%d" % len(body), _TYPE, body)))
        state.total_requests += 1
        if self.timeout_keep_alive_task is None:
            self._wait()
        self._was_asked = True
        return True

    def _wait(self) -> None:
        self._was_asked = False
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )


def protocol(front: Front) -> Callable[..., Wire]:
    """What uvicorn makes a connection of."""
    return functools.partial(Wire, front, Heads())

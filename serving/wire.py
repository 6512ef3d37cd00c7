"""Lookups of one id are answered from where they arrive: what is ready without a task, what is stored without a parser.

A keep-alive client sends the same headers with every request. Once it has, and they ask for nothing special, the next
request of that connection is nothing but a request line to look up. Everything else goes to uvicorn as it came.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from serving.front import Front
from serving.hot import Hot, Message, Messages
from serving.media import JSON_TYPE
from serving.plan import PREFIX

_HEADERS_BYTES_MAX = 8_192
_BODILESS = frozenset({b"content-length", b"transfer-encoding", b"expect", b"upgrade"})
_STATUS = b"HTTP/1.1 200 OK\r\n"
_TYPE = b"\r\ncontent-type: " + JSON_TYPE.encode() + b"\r\n\r\n"
Headers = list[tuple[bytes, bytes]]

log = logging.getLogger(__name__)


class _Headers:
    """What a parser tells of one request."""

    def __init__(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.found: Headers = []
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


def plain(block: bytes) -> Headers | None:
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
        self._of: Headers | None = None
        self._count = 0
        self._found: bytes | None = None

    def of(self, headers: Headers) -> bytes | None:
        """Status line and headers; None while they close connections, which is uvicorn's to do."""
        if headers is not self._of or len(headers) != self._count:
            self._of, self._count = headers, len(headers)
            lines = b"".join(b"%b: %b\r\n" % each for each in headers)
            closes = any(name == b"connection" for name, _ in headers)
            self._found = None if closes else _STATUS + lines + b"content-length: "
        return self._found


class Wire(HttpToolsProtocol):
    """One connection. While a lookup of it is under way what arrives behind that has to wait."""

    def __init__(self, front: Front, heads: Heads, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._front, self._heads = front, heads
        self._is_between = True
        self._block = b""
        self._sent: Headers | None = None
        self._is_known = self._is_plain = self._is_unwatched = False
        self._was_asked = self._is_ending = False
        self._is_waited_for = False
        self._later = bytearray()

    def data_received(self, data: bytes) -> None:
        """What is one whole request for something stored is answered past uvicorn."""
        if self._is_waited_for:
            self._later += data
            if len(self._later) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
        elif not self._is_between or data[:4] != b"GET " or not self._is_taken(data):
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
        if self._was_asked or self._is_waited_for:
            self._wait()
        else:
            super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        """See uvicorn."""
        if self._is_waited_for:
            self._is_ending = True
        else:
            super().shutdown()

    def _is_taken(self, data: bytes) -> bool:
        end = data.find(b"\r\n")
        block = data[end:]
        if block != self._block:
            self._block, self._is_known = block[:_HEADERS_BYTES_MAX], False
            return False
        hot, cycle = self._front.wire, self.cycle
        if hot is None or (cycle is not None and not cycle.response_complete):
            return False
        if not self._is_known:
            self._judge(hot)
        if not self._is_plain or data[end - 9 : end] != b" HTTP/1.1":
            return False
        if self.flow.write_paused or self.transport.is_closing():
            return False
        if (head := self._heads.of(self.server_state.default_headers)) is None:
            return False
        target = data[4 : end - 9]
        if (body := hot.answer(target)) is None:
            return self._is_looked_up(hot, target, data)
        self.transport.write(b"".join((head, b"%d" % len(body), _TYPE, body)))
        self._done()
        return True

    def _judge(self, hot: Hot) -> None:
        """Whether headers like these allow answers from here, and lookups that nobody watches."""
        self._is_known, self._sent, watch = True, plain(self._block), self._front.watch
        self._is_plain = self._sent is not None and hot.takes(self._sent)
        self._is_unwatched = watch is None or watch.leaves({"headers": self._sent or ()})

    def _is_looked_up(self, hot: Hot, target: bytes, data: bytes) -> bool:
        if not (self._is_unwatched and target.startswith(PREFIX) and target.isascii()):
            return False
        path, _, query = target.partition(b"?")
        if b"#" in target:
            return False
        scope = {"method": "GET", "raw_path": path, "query_string": query, "headers": self._sent}
        self._is_waited_for = True
        if not self._is_joined(hot, scope, data):
            tasks = self.server_state.tasks
            task = self.loop.create_task(self._look_up(hot, scope, data))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return True

    def _is_joined(self, hot: Hot, scope: dict[str, Any], data: bytes) -> bool:
        try:
            return self._front.joins(hot, scope, functools.partial(self._answered, data))
        except Exception:  # as below
            log.exception("a lookup failed")
            return False

    async def _look_up(self, hot: Hot, scope: dict[str, Any], data: bytes) -> None:
        try:
            answer = await self._front.stored(hot, scope)
        except Exception:  # whoever comes next says what is wrong
            log.exception("a lookup failed")
            answer = None
        self._answered(data, answer)

    def _answered(self, data: bytes, answer: Messages | None) -> None:
        """A lookup has ended; without an answer its request goes to uvicorn."""
        self._is_waited_for = False
        if self.transport.is_closing():
            return
        if answer is None:
            super().data_received(data)
            if self._is_ending:
                super().shutdown()
        else:
            self._send(*answer)
        later, self._later = bytes(self._later), bytearray()
        self.flow.resume_reading()
        if later and not self.transport.is_closing():
            self.data_received(later)

    def _send(self, start: Message, end: Message) -> None:
        head, body = self._heads.of(self.server_state.default_headers), end["body"]
        if head is not None and start["status"] == 200 and not self._is_ending:
            self.transport.write(b"".join((head, b"%d" % len(body), _TYPE, body)))
            self._done()
            return
        headers = [*self.server_state.default_headers, *start["headers"]]
        closes = any(name == b"connection" for name, _ in headers)
        if self._is_ending and not closes:
            headers.append((b"connection", b"close"))
        lines = [b"%b: %b\r\n" % each for each in headers]
        self.transport.write(b"".join((STATUS_LINE[start["status"]], *lines, b"\r\n", body)))
        self._done()
        if closes or self._is_ending:
            self.transport.close()

    def _done(self) -> None:
        self.server_state.total_requests += 1
        if self.timeout_keep_alive_task is None:
            self._wait()
        self._was_asked = True

    def _wait(self) -> None:
        self._was_asked = False
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )


def protocol(front: Front) -> Callable[..., Wire]:
    """What uvicorn makes a connection of."""
    return functools.partial(Wire, front, Heads())

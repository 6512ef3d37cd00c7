"""Lookups of one table are answered from where they arrive: what is ready without a task, what is stored without a
parser, what brings a body without uvicorn's cycle.

A keep-alive client sends the same headers with every request. Once it has, and they ask for nothing special, the next
request of that connection is nothing but a request line to look up. Everything else goes to uvicorn as it came.

What one request touches lies together, in slots: with thousands of connections each of them is out of the processor's
caches when its turn comes, and every object of its own costs more than the lookup.
"""

import asyncio
import functools
import logging
import re
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from serving.blocks import BLOCK_BYTES_MAX, Allowed, Blocks, Headers, without_length
from serving.cycle import Cycle
from serving.front import ADMITTED, Front
from serving.hot import Hot, Message, Messages
from serving.media import JSON_TYPE
from serving.plan import PREFIX

_STATUS = b"HTTP/1.1 200 OK\r\n"
_TYPE = b"\r\ncontent-type: " + JSON_TYPE.encode() + b"\r\n\r\n"
_TARGET = re.compile(rb'[!"$-~]+')
"""Path and query in visible ASCII: everything else the parser cuts, or refuses."""

_FAILED: tuple[Message, bytes] = (
    {"status": 500, "headers": [
        (b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"21"), (b"connection", b"close"),
    ]},
    b"Internal Server Error",
)  # fmt: skip

log = logging.getLogger(__name__)


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


class Shared:
    """What all connections of a server have in common."""

    def __init__(self, front: Front) -> None:
        self.front = front
        self.blocks = Blocks(front)
        self.heads = Heads()


class Wire(HttpToolsProtocol):
    """One connection. While a lookup of it is under way what arrives behind that has to wait."""

    __slots__ = (
        "_block", "_cycle", "_is_ending", "_is_full", "_is_waited_for", "_later", "_open", "_shared", "_was_asked",
        # Uvicorn's own: those that every request looks at.
        "server_state", "timeout_keep_alive_task", "transport",
    )  # fmt: skip

    def __init__(self, shared: Shared, *given: Any, **named: Any) -> None:
        self._shared = shared
        self._open = 0  # of uvicorn's requests: one for each that is not read, one for each that is not answered
        self._block = b""
        self._was_asked = self._is_ending = self._is_full = False
        self._is_waited_for = False
        self._later = b""
        self._cycle: Cycle | None = None
        super().__init__(*given, **named)

    def data_received(self, data: bytes) -> None:
        """What is one whole request for something stored is answered past uvicorn."""
        if self._is_waited_for:
            self._later += data
            if len(self._later) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
        elif self._open or not self._is_taken(data):
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """See uvicorn."""
        if self._cycle is not None:
            self._cycle.lose()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """See uvicorn."""
        self._open += 2
        super().on_message_begin()

    def on_message_complete(self) -> None:
        """See uvicorn."""
        self._open -= 1
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """See uvicorn."""
        self._open -= 1
        super().on_response_complete()

    def pause_writing(self) -> None:
        """See uvicorn."""
        self._is_full = True
        super().pause_writing()

    def resume_writing(self) -> None:
        """See uvicorn."""
        self._is_full = False
        super().resume_writing()

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
        hot = self._shared.front.wire
        if hot is None:
            return False
        is_get = data[:4] == b"GET "
        if not is_get and data[:16] != b"POST " + PREFIX:
            return False
        end = data.find(b"\r\n")
        if is_get:
            block = data[end:]
        else:
            stop = data.find(b"\r\n\r\n", end) + 4
            block, digits = without_length(data[end:stop])
            if not digits or len(data) - stop != int(digits):
                return False
        if (allowed := self._shared.blocks.of(hot, block) or self._seen(hot, block)) is None:
            return False
        if data[end - 9 : end] != b" HTTP/1.1" or self._is_full or self.transport.is_closing():
            return False
        head = self._shared.heads.of(self.server_state.default_headers)
        if head is None:
            return False
        if not is_get:
            return self._is_run(data[5 : end - 9], allowed.with_length(digits), data[stop:])
        target = data[4 : end - 9]
        if (body := hot.answer(target)) is None:
            return self._is_looked_up(hot, target, allowed, data)
        self.transport.write(b"".join((head, b"%d" % len(body), _TYPE, body)))
        self._done()
        return True

    def _seen(self, hot: Hot, block: bytes) -> Allowed | None:
        """What headers allow that are not known, or not allowed, once they have come twice in a row."""
        if block != self._block:
            self._block = block[:BLOCK_BYTES_MAX]
            return None
        return self._shared.blocks.judged(hot, block)

    def _is_looked_up(self, hot: Hot, target: bytes, allowed: Allowed, data: bytes) -> bool:
        if not (allowed.is_unwatched and target.startswith(PREFIX) and _TARGET.fullmatch(target)):
            return False
        path, _, query = target.partition(b"?")
        scope = {
            "method": "GET", "raw_path": path, "query_string": query, "headers": allowed.headers
        }  # fmt: skip
        self._is_waited_for = True
        if not self._is_joined(hot, scope, data):
            self._begin(self._look_up(hot, scope, data))
        return True

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self.server_state.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.server_state.tasks.discard(task)
        if task.cancelled():
            self.transport.close()

    def _is_joined(self, hot: Hot, scope: dict[str, Any], data: bytes) -> bool:
        try:
            return self._shared.front.joins(hot, scope, functools.partial(self._answered, data))
        except Exception:  # as below
            log.exception("a lookup failed")
            return False

    async def _look_up(self, hot: Hot, scope: dict[str, Any], data: bytes) -> None:
        try:
            answer = await self._shared.front.stored(hot, scope)
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
        self._go_on()

    def _go_on(self) -> None:
        later, self._later = self._later, b""
        self.flow.resume_reading()
        if later and not self.transport.is_closing():
            self.data_received(later)

    def _is_run(self, target: bytes, headers: Headers, body: bytes) -> bool:
        path, _, query = target.partition(b"?")
        if b"%" in path or not _TARGET.fullmatch(target):
            return False
        front = self._shared.front
        if (refusal := front.refusal()) is not None:
            self._respond(refusal[0], refusal[1]["body"])
            return True
        scope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": "1.1",
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": self.root_path,
            "headers": headers,
            "state": self.app_state.copy(),
            "method": "POST",
            "path": self.root_path + path.decode(),
            "raw_path": self.root_path.encode() + path,
            "query_string": query,
            ADMITTED: True,
        }
        self._is_waited_for, self._cycle = True, Cycle(body)
        self._begin(self._run(scope, self._cycle))
        return True

    async def _run(self, scope: Scope, cycle: Cycle) -> None:
        try:
            await self._shared.front(scope, cycle.receive, cycle.send)
        except Exception:
            log.exception("a request failed")
        self._is_waited_for, self._cycle = False, None
        if not self.transport.is_closing():
            self._respond(*(cycle.answer() or _FAILED))
            self._go_on()

    def _send(self, start: Message, end: Message) -> None:
        head, body = self._shared.heads.of(self.server_state.default_headers), end["body"]
        if head is not None and start["status"] == 200 and not self._is_ending:
            self.transport.write(b"".join((head, b"%d" % len(body), _TYPE, body)))
            self._done()
        else:
            self._respond(start, body)

    def _respond(self, start: Message, body: bytes) -> None:
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
    return functools.partial(Wire, Shared(front))

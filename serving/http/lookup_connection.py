"""Connections that answer lookups of one table themselves, past uvicorn's parser, cycle and tasks.

A ready answer needs no task, a stored one no parser, a request with a body no uvicorn cycle.

A keep-alive client sends the same headers with every request. Once it has, and they ask for nothing special, the next
request of that connection is only a request line to look up. All other input goes to uvicorn unchanged.
"""

import asyncio
import functools
import logging
import re
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import httptools
from starlette.types import Message, Scope

from cache.config.serving import PeerBounds
from serving.access.callers import STRANGER, Caller, Callers
from serving.access.quota import Quota
from serving.admission.work_pacer import IS_GONE
from serving.http.asgi_app import ADMITTED, AsgiApp, FastPath, ParsedGet
from serving.http.connections import BEHIND_BYTES_MAX, Connection, Connections
from serving.http.http1_protocol import ProtocolViolation, body_length
from serving.requests.bodies import Messages
from serving.requests.context import CALLER_KEY
from serving.requests.negotiation import JSON_TYPE
from serving.requests.parsing import LOOKUP_PREFIX

log = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]
HEADER_BLOCK_BYTES_MAX = 8_192
_HEADER_BLOCKS_MAX = 256
_CONTENT_LENGTH = b"content-length"
_UNUSUAL_HEADERS = frozenset({b"transfer-encoding", b"content-encoding", b"expect", b"upgrade"})
_LENGTH_LINE = re.compile(rb"\r\ncontent-length: (\d{1,9})\r\n", re.IGNORECASE)
_OK_STATUS_LINE = b"HTTP/1.1 200 OK\r\n"
_JSON_HEAD_END = b"\r\ncontent-type: " + JSON_TYPE.encode() + b"\r\n\r\n"

_OWN_HEADER_COUNT = 2
"""Number of headers of an unobserved answer: its length and its type."""

_TARGET = re.compile(rb'[!"$-~]{1,8192}')
"""Path and query in visible ASCII: the parser cuts or refuses other bytes. Uvicorn bounds longer ones."""

_FAILED_RESPONSE: tuple[Message, bytes] = (
    {"status": 500, "headers": [
        (b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"21"), (b"connection", b"close"),
    ]},
    b"Internal Server Error",
)  # fmt: skip

_CLOSE_WAIT = 8
"""State of a TCP connection, in the kernel's numbers, whose peer has closed its side."""


class AllowedHeaders(NamedTuple):
    """Judged headers of a keep-alive request; `is_unwatched` if lookups with them are not observed."""

    headers: Headers
    is_unwatched: bool
    caller: Caller
    length_at: int = -1
    """Index of the content-length among the headers; -1 if there is none."""

    def with_length(self, digits: bytes) -> Headers:
        """Return the headers of the same request with another body length."""
        headers = self.headers.copy()
        headers[self.length_at] = _CONTENT_LENGTH, digits
        return headers


class HeaderCache:
    """Cache of judged header blocks, keyed by the bytes of all headers after the request line, line break included.

    A client that sends the same block twice in a row will do so again: only such blocks are judged, and a bounded
    number is kept.
    """

    def __init__(self, front: AsgiApp) -> None:
        self._front = front
        self._fast: FastPath | None = None
        self._callers: Callers | None = (
            None  # whoever has no token any more is not known by an old judgement
        )
        self._allowed_by_block: dict[bytes, AllowedHeaders | None] = {}

    def of(self, fast: FastPath, block: bytes) -> AllowedHeaders | None:
        """Return the cached judgement of these headers for `fast`; None without one, or if they are not allowed."""
        is_current = fast is self._fast and self._front.callers is self._callers
        return self._allowed_by_block.get(block) if is_current else None

    def judged(self, fast: FastPath, block: bytes) -> AllowedHeaders | None:
        """Judge headers that have come twice, and cache the result; None if very long or not allowed."""
        if len(block) > HEADER_BLOCK_BYTES_MAX:
            return None
        callers = self._front.callers
        is_current = fast is self._fast and callers is self._callers
        if not is_current or len(self._allowed_by_block) >= _HEADER_BLOCKS_MAX:
            self._fast, self._callers, self._allowed_by_block = fast, callers, {}
        if block not in self._allowed_by_block:
            self._allowed_by_block[block] = self._judge(fast, block)
        return self._allowed_by_block[block]

    def _judge(self, fast: FastPath, block: bytes) -> AllowedHeaders | None:
        headers, watch = parse_plain_headers(block), self._front.watch
        if headers is None or not fast.can_use_fast_path(headers):
            return None
        caller = self._front.callers.identify(headers)
        if not caller.may("read"):
            return None
        names = [name for name, _ in headers]
        is_unwatched = watch is None or watch.leaves({"headers": headers})
        length_at = names.index(_CONTENT_LENGTH) if _CONTENT_LENGTH in names else -1
        return AllowedHeaders(headers, is_unwatched, caller, length_at)


def without_length(block: bytes) -> tuple[bytes, bytes]:
    """Return the headers with their content-length set to 0, the key in `HeaderCache`, and its digits, if any."""
    length_match = _LENGTH_LINE.search(block)
    if length_match is None:
        return block, b""
    start, end = length_match.span(1)
    return b"".join((block[:start], b"0", block[end:])), length_match[1]


class _HeaderParser:
    """Parser callbacks for one request: its headers, whether it keeps its connection open, how many messages ended."""

    def __init__(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.headers: Headers = []
        self.keeps_alive = False
        self.messages = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header, its name in lower case."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Read keep-alive at the end of the headers: after that the parser's state is of the next request."""
        self.keeps_alive = self.parser.should_keep_alive()

    def on_message_complete(self) -> None:
        """Count a message that has ended, body included."""
        self.messages += 1


def parse_plain_headers(block: bytes) -> Headers | None:
    """Parse `block` (all after the request line, line break included) to headers with names in lower case.

    None unless this is exactly one valid request that leaves its connection open and whose body, if it has one, has a
    content-length. A length of 0 stands for any.
    """
    parsed_request = _HeaderParser()
    try:
        parsed_request.parser.feed_data(b"POST / HTTP/1.1" + block)
        body_length(b"1.1", parsed_request.headers)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade, ProtocolViolation):
        return None
    if (
        parsed_request.messages != 1
        or not block.endswith(b"\r\n\r\n")
        or not parsed_request.keeps_alive
    ):
        return None
    return (
        None
        if any(name in _UNUSUAL_HEADERS for name, _ in parsed_request.headers)
        else parsed_request.headers
    )


class ResponseHeads:
    """Cache of the response head up to the length; rebuilt when uvicorn's own headers change, once per second."""

    def __init__(self) -> None:
        self._of: Headers | None = None
        self._count = 0
        self._head: bytes | None = None

    def of(self, headers: Headers) -> bytes | None:
        """Return status line and headers up to the length; None while they close connections, which uvicorn does."""
        if headers is not self._of or len(headers) != self._count:
            self._of, self._count = headers, len(headers)
            lines = b"".join(b"%b: %b\r\n" % header for header in headers)
            closes = any(name == b"connection" for name, _ in headers)
            self._head = None if closes else _OK_STATUS_LINE + lines + b"content-length: "
        return self._head


class AsgiCycle:
    """ASGI callables `receive` and `send` of one request."""

    __slots__ = ("_body", "_is_lost", "_is_whole", "_pieces", "_start")

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._is_lost: asyncio.Event | None = None
        self._start: Message | None = None
        self._pieces: list[bytes] = []
        self._is_whole = False

    async def receive(self) -> Message:
        """Return the body first; then wait for the end of the connection and return `http.disconnect`."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if self._is_lost is None:
            self._is_lost = asyncio.Event()
        await self._is_lost.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Store the start of the response, or a piece of its body."""
        if message["type"] == "http.response.start":
            self._start = message
        else:
            self._pieces.append(message.get("body", b""))
            self._is_whole = not message.get("more_body", False)

    def lose(self) -> None:
        """Mark the connection as lost, for which `receive` waits."""
        if self._is_lost is None:
            self._is_lost = asyncio.Event()
        self._is_lost.set()

    def answer(self) -> tuple[Message, bytes] | None:
        """Return the response's start, with its length, and its body; None if the application left it unfinished."""
        if self._start is None or not self._is_whole:
            return None
        body, headers = b"".join(self._pieces), self._start["headers"]
        if not any(name == b"content-length" for name, _ in headers):
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        return {**self._start, "headers": headers}, body


class SharedState:
    """State that all connections of a server share: application, bounds, judged header blocks, response heads."""

    def __init__(self, front: AsgiApp, bounds: PeerBounds | None = None) -> None:
        self.app = front
        self.connections = Connections(bounds or PeerBounds())
        self.blocks = HeaderCache(front)
        self.heads = ResponseHeads()
        front.has_room = self._has_room

    def _has_room(self) -> bool:
        """True if one more large answer may be begun."""
        return not self.connections.unread.is_full(time.monotonic())


class LookupConnection(Connection):
    """Connection that answers lookups itself. While one is under way, later input waits."""

    __slots__ = ("_block", "_caller", "_cycle", "_later", "_shared")

    def __init__(self, shared: SharedState, *arguments: Any, **named: Any) -> None:
        self._shared = shared
        self._block = b""
        self._later = b""
        self._cycle: AsgiCycle | None = None
        self._caller: Caller = STRANGER
        super().__init__(shared.connections, *arguments, **named)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Open the connection; under a backlog, drop one whose peer has closed its side already."""
        gate = self._shared.app.gate
        if gate is not None and gate.admission.work.is_backlogged and has_closed(transport):
            gate.admission.shed["gone"] += 1
            gate.admission.work.note_dropped()
            self.transport = transport
            transport.abort()
            return
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Answer a piece that is exactly one lookup past uvicorn; input after it waits, other input goes to uvicorn."""
        if self._is_waited_for:
            self._later += data
            if len(self._later) > BEHIND_BYTES_MAX:
                self.flow.pause_reading()
        elif self._open or self._unread or not self._try_fast(data):
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify a request under way that its caller has gone, then clean up as uvicorn does."""
        if self._cycle is not None:
            self._cycle.lose()
        super().connection_lost(exc)

    def _try_fast(self, data: bytes) -> bool:
        fast = self._shared.app.untraced_fast
        if fast is None:
            return False
        is_get = data[:4] == b"GET "
        if not is_get and data[:16] != b"POST " + LOOKUP_PREFIX:
            return False
        end = data.find(b"\r\n")
        if is_get:
            block = data[end:]
        else:
            stop = data.find(b"\r\n\r\n", end) + 4
            block, digits = without_length(data[end:stop])
            if not digits or len(data) - stop != int(digits):
                return False
        if (
            allowed := self._shared.blocks.of(fast, block) or self._judge_repeated(fast, block)
        ) is None:
            return False
        if data[end - 9 : end] != b" HTTP/1.1" or self._is_full or self.transport.is_closing():
            return False
        if self._line is not None or self.is_discarding:
            return False
        head = self._shared.heads.of(self.server_state.default_headers)
        if head is None:
            return False
        if not is_get:
            return self._try_post(data[5 : end - 9], allowed, digits, data[stop:])
        target, caller = data[4 : end - 9], allowed.caller
        if caller.is_bounded:
            if caller.is_expired:
                return False
            if caller.quota is not None and target.startswith(LOOKUP_PREFIX):
                return self._try_quota(fast, caller, caller.quota, target, head)
        if (body := fast.answer(target)) is None:
            return self._try_lookup(fast, target, allowed, data)
        caller.counts.requests += 1
        self._write(head, body)
        return True

    def _try_quota(
        self, fast: FastPath, caller: Caller, quota: Quota, target: bytes, head: bytes
    ) -> bool:
        """Send a ready answer within the caller's quota, or refuse; return False if the application must answer."""
        if (short := quota.enter(1)) is not None:
            caller.counts.requests += 1
            start, end = self._shared.app.refused(caller.refused(short))
            self._respond(start, end["body"])
            return True
        if (body := fast.answer(target)) is None:
            quota.give_back(1)
            return False
        quota.close()
        caller.counts.requests += 1
        self._write(head, body)
        return True

    def _judge_repeated(self, fast: FastPath, block: bytes) -> AllowedHeaders | None:
        """Return the judgement of unknown or refused headers once they came twice in a row; None before."""
        if block != self._block:
            self._block = block[:HEADER_BLOCK_BYTES_MAX]
            return None
        return self._shared.blocks.judged(fast, block)

    def _try_lookup(
        self, fast: FastPath, target: bytes, allowed: AllowedHeaders, data: bytes
    ) -> bool:
        if not (
            allowed.is_unwatched and target.startswith(LOOKUP_PREFIX) and _TARGET.fullmatch(target)
        ):
            return False
        path, _, query = target.partition(b"?")
        scope = {
            "method": "GET", "raw_path": path, "query_string": query, "headers": allowed.headers,
            CALLER_KEY: allowed.caller, IS_GONE: self.transport.is_closing,
        }  # fmt: skip
        front = self._shared.app
        parsed_get = group_future = None
        try:
            if (parsed_get := fast.parse_get(scope)) is not None:
                group_future = front.try_join(parsed_get)
        except Exception:  # whoever comes next says what is wrong
            log.exception("a lookup failed")
        if parsed_get is None:
            return False
        self._is_waited_for, self._caller = True, allowed.caller
        if group_future is None:
            self._begin(self._look_up(front.answer_get(parsed_get, scope), data))
        else:
            group_future.add_done_callback(functools.partial(self._send_joined, parsed_get, data))
        return True

    def _send_joined(
        self, parsed_get: ParsedGet, data: bytes, group_future: asyncio.Future[Any]
    ) -> None:
        """Send the answer of a grouped read; without one, continue alone in a task."""
        front = self._shared.app
        if (body := front.finish_joined(group_future)) is None:
            self._begin(self._look_up(front.answer_after_join(parsed_get, group_future), data))
            return
        self._is_waited_for = False
        self._caller.counts.requests += 1
        if self.transport.is_closing():
            return
        head = self._shared.heads.of(self.server_state.default_headers)
        if head is None or self._is_ending:
            self._respond(*json_response(body))
        else:
            self._write(head, body)
        self._go_on()

    def _write(self, head: bytes, body: bytes) -> None:
        self.transport.write(b"".join((head, b"%d" % len(body), _JSON_HEAD_END, body)))
        self._finish_request()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self.server_state.tasks.add(task)
        task.add_done_callback(self._finish_task)

    def _finish_task(self, task: asyncio.Task[None]) -> None:
        self.server_state.tasks.discard(task)
        if task.cancelled():
            self.transport.close()

    async def _look_up(self, looking: Coroutine[Any, Any, Messages | None], data: bytes) -> None:
        try:
            answer = await looking
        except Exception:  # as above
            log.exception("a lookup failed")
            answer = None
        self._answered(data, answer)

    def _answered(self, data: bytes, answer: Messages | None) -> None:
        """Send the answer of a lookup that has ended; without one pass its request to uvicorn."""
        self._is_waited_for = False
        if self.transport.is_closing():
            return
        if answer is None:
            super().data_received(data)
            if self._is_ending:
                super().shutdown()
        else:
            self._caller.counts.requests += 1
            self._send(*answer)
        self._go_on()

    def _go_on(self) -> None:
        later, self._later = self._later, b""
        self.flow.resume_reading()
        if later and not self.transport.is_closing():
            self.data_received(later)
        if self._peer_closed:
            self.end_if_peer_has()

    def _try_post(self, target: bytes, allowed: AllowedHeaders, digits: bytes, body: bytes) -> bool:
        """Run a request with a body past uvicorn's parser and cycle: a refusal then costs 14 to 24 us, not 50 to 78."""
        path, _, query = target.partition(b"?")
        if b"%" in path or not _TARGET.fullmatch(target):
            return False
        is_judged = allowed.is_unwatched  # who is watched is told of a refusal by whoever watches
        if is_judged and (refusal := self._shared.app.refusal()) is not None:
            self._respond(refusal[0], refusal[1]["body"])
            return True
        scope: Scope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": "1.1",
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": self.root_path,
            "headers": allowed.with_length(digits),
            "state": self.app_state.copy(),
            "method": "POST",
            "path": self.root_path + path.decode(),
            "raw_path": self.root_path.encode() + path,
            "query_string": query,
            CALLER_KEY: allowed.caller,
            IS_GONE: self.transport.is_closing,
        }
        if is_judged:
            scope[ADMITTED] = True
        self._is_waited_for, self._cycle = True, AsgiCycle(body)
        self._begin(self._run(scope, self._cycle))
        return True

    async def _run(self, scope: Scope, cycle: AsgiCycle) -> None:
        try:
            await self._shared.app(scope, cycle.receive, cycle.send)
        except Exception:
            log.exception("a request failed")
        self._is_waited_for, self._cycle = False, None
        if not self.transport.is_closing():
            self._respond(*(cycle.answer() or _FAILED_RESPONSE))
            self._go_on()

    def _send(self, start: Message, end: Message) -> None:
        head, body = self._shared.heads.of(self.server_state.default_headers), end["body"]
        is_plain = start["status"] == 200 and len(start["headers"]) == _OWN_HEADER_COUNT
        if head is not None and is_plain and not self._is_ending:
            self._write(head, body)
        else:
            self._respond(start, body)


def has_closed(transport: asyncio.Transport) -> bool:
    """True if the peer has closed its side, even with unread bytes before that; False if the system cannot say."""
    opened = transport.get_extra_info("socket")
    try:
        state: int = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except (AttributeError, OSError):
        return False
    return state == _CLOSE_WAIT


def json_response(body: bytes) -> tuple[Message, bytes]:
    """Return start and body of a JSON response."""
    headers = [(b"content-length", b"%d" % len(body)), (b"content-type", JSON_TYPE.encode())]
    return {"status": 200, "headers": headers}, body


def connection_factory(shared: SharedState) -> Callable[..., LookupConnection]:
    """Return the factory for uvicorn's connections."""
    return functools.partial(LookupConnection, shared)

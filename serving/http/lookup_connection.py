"""Connections that answer lookups of one table directly, without uvicorn's parser, request cycle and tasks.

Ready answers need no task, stored answers no parser, and requests with a body no uvicorn cycle.

A keep-alive client sends the same headers with every request. Once they have come twice and are plain, only the request
line of further requests on this connection is parsed. All other input goes to uvicorn unchanged.
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
from serving.admission.work_pacer import IS_GONE_KEY
from serving.http.asgi_app import ADMITTED_KEY, AsgiApp, FastPath, ParsedGet
from serving.http.connections import BEHIND_BYTES_MAX, Connection, Connections
from serving.http.http1_protocol import ProtocolViolation, body_length
from serving.requests.bodies import ResponseMessages
from serving.requests.negotiation import JSON_MEDIA_TYPE
from serving.requests.parsing import LOOKUP_PATH_PREFIX
from serving.requests.request_record import CALLER_KEY

log = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]
HEADER_BLOCK_BYTES_MAX = 8_192
_CACHED_HEADER_BLOCKS_MAX = 256
_CONTENT_LENGTH = b"content-length"
_UNUSUAL_HEADERS = frozenset({b"transfer-encoding", b"content-encoding", b"expect", b"upgrade"})
_CONTENT_LENGTH_PATTERN = re.compile(rb"\r\ncontent-length: (\d{1,9})\r\n", re.IGNORECASE)
_OK_STATUS_LINE = b"HTTP/1.1 200 OK\r\n"
_JSON_HEAD_END = b"\r\ncontent-type: " + JSON_MEDIA_TYPE.encode() + b"\r\n\r\n"

_PLAIN_HEADER_COUNT = 2
"""Number of headers of an unobserved answer: content-length and content-type."""

_TARGET_PATTERN = re.compile(rb'[!"$-~]{1,8192}')
"""Path and query in visible ASCII; targets with other bytes, or longer ones, are left to uvicorn."""

_FAILED_RESPONSE: tuple[Message, bytes] = (
    {"status": 500, "headers": [
        (b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"21"), (b"connection", b"close"),
    ]},
    b"Internal Server Error",
)  # fmt: skip

_CLOSE_WAIT_STATE = 8
"""Linux' number of the TCP state CLOSE_WAIT: the peer has closed its sending side."""


class AllowedHeaders(NamedTuple):
    """Headers that allow the fast path; `is_unwatched` if lookups with them are not observed."""

    headers: Headers
    is_unwatched: bool
    caller: Caller
    content_length_index: int = -1
    """Index of content-length among the headers; -1 without one."""

    def with_length(self, length_digits: bytes) -> Headers:
        """Return the headers of the same request with another body length."""
        headers = self.headers.copy()
        headers[self.content_length_index] = _CONTENT_LENGTH, length_digits
        return headers


class HeaderCache:
    """Cache of checked header blocks, keyed by the bytes of all headers after the request line, line break included.

    A client that sends the same block twice in a row will probably do so again: only such blocks are checked, and a
    bounded number is kept.
    """

    def __init__(self, front: AsgiApp) -> None:
        self._app = front
        self._fast_path: FastPath | None = None
        self._callers: Callers | None = None  # results for earlier tokens are not used
        self._allowed_by_block: dict[bytes, AllowedHeaders | None] = {}

    def find_judged(self, fast_path: FastPath, header_block: bytes) -> AllowedHeaders | None:
        """Return the cached result for these headers and `fast_path`; None without one, or if not allowed."""
        is_current = fast_path is self._fast_path and self._app.callers is self._callers
        return self._allowed_by_block.get(header_block) if is_current else None

    def judge_and_cache(self, fast_path: FastPath, header_block: bytes) -> AllowedHeaders | None:
        """Check headers that came twice in a row, and cache the result; None if they are too long or not allowed."""
        if len(header_block) > HEADER_BLOCK_BYTES_MAX:
            return None
        callers = self._app.callers
        is_current = fast_path is self._fast_path and callers is self._callers
        if not is_current or len(self._allowed_by_block) >= _CACHED_HEADER_BLOCKS_MAX:
            self._fast_path, self._callers, self._allowed_by_block = fast_path, callers, {}
        if header_block not in self._allowed_by_block:
            self._allowed_by_block[header_block] = self._judge_headers(fast_path, header_block)
        return self._allowed_by_block[header_block]

    def _judge_headers(self, fast_path: FastPath, header_block: bytes) -> AllowedHeaders | None:
        headers, request_watch = parse_plain_headers(header_block), self._app.request_watch
        if headers is None or not fast_path.can_use_fast_path(headers):
            return None
        caller = self._app.callers.identify(headers)
        if not caller.may_use_scope("read"):
            return None
        header_names = [header_name for header_name, _ in headers]
        is_unwatched = request_watch is None or request_watch.leaves_unobserved({"headers": headers})
        content_length_index = header_names.index(_CONTENT_LENGTH) if _CONTENT_LENGTH in header_names else -1
        return AllowedHeaders(headers, is_unwatched, caller, content_length_index)


def split_content_length(header_block: bytes) -> tuple[bytes, bytes]:
    """Return the headers with content-length set to 0, as key of `HeaderCache`, and the original digits, if any."""
    length_match = _CONTENT_LENGTH_PATTERN.search(header_block)
    if length_match is None:
        return header_block, b""
    digits_start, digits_end = length_match.span(1)
    return b"".join((header_block[:digits_start], b"0", header_block[digits_end:])), length_match[1]


class _HeaderParser:
    """Parser callbacks for one request: collects its headers, keep-alive, and the number of complete messages."""

    def __init__(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.headers: Headers = []
        self.keeps_alive = False
        self.message_count = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header, its name in lower case."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Read keep-alive at the end of the headers, since later the parser's state is that of the next request."""
        self.keeps_alive = self.parser.should_keep_alive()

    def on_message_complete(self) -> None:
        """Count a message that has ended, body included."""
        self.message_count += 1


def parse_plain_headers(header_block: bytes) -> Headers | None:
    """Parse `header_block` (all after the request line, line break included) to headers with names in lower case.

    None unless this is exactly one valid request that leaves its connection open and whose body, if it has one, has a
    content-length. A length of 0 stands for any.
    """
    parsed_request = _HeaderParser()
    try:
        parsed_request.parser.feed_data(b"POST / HTTP/1.1" + header_block)
        body_length(b"1.1", parsed_request.headers)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade, ProtocolViolation):
        return None
    if parsed_request.message_count != 1 or not header_block.endswith(b"\r\n\r\n") or not parsed_request.keeps_alive:
        return None
    return (
        None
        if any(header_name in _UNUSUAL_HEADERS for header_name, _ in parsed_request.headers)
        else parsed_request.headers
    )


class ResponseHeads:
    """Cache of the response head up to the length; rebuilt when uvicorn's own headers change, once per second."""

    def __init__(self) -> None:
        self._cached_headers: Headers | None = None
        self._cached_header_count = 0
        self._cached_response_head: bytes | None = None

    def head_for(self, headers: Headers) -> bytes | None:
        """Return status line and headers up to the length; None while responses must close their connection."""
        if headers is not self._cached_headers or len(headers) != self._cached_header_count:
            self._cached_headers, self._cached_header_count = headers, len(headers)
            header_lines = b"".join(b"%b: %b\r\n" % header for header in headers)
            closes_connection = any(header_name == b"connection" for header_name, _ in headers)
            self._cached_response_head = (
                None if closes_connection else _OK_STATUS_LINE + header_lines + b"content-length: "
            )
        return self._cached_response_head


class AsgiCycle:
    """ASGI callables `receive` and `send` of one request."""

    __slots__ = ("_is_complete", "_lost_event", "_request_body", "_response_body_pieces", "_start_message")

    def __init__(self, request_body: bytes) -> None:
        self._request_body: bytes | None = request_body
        self._lost_event: asyncio.Event | None = None
        self._start_message: Message | None = None
        self._response_body_pieces: list[bytes] = []
        self._is_complete = False

    async def receive(self) -> Message:
        """Return the body first; then wait for the end of the connection and return `http.disconnect`."""
        if self._request_body is not None:
            body, self._request_body = self._request_body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if self._lost_event is None:
            self._lost_event = asyncio.Event()
        await self._lost_event.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Store the start of the response, or a piece of its body."""
        if message["type"] == "http.response.start":
            self._start_message = message
        else:
            self._response_body_pieces.append(message.get("body", b""))
            self._is_complete = not message.get("more_body", False)

    def mark_lost(self) -> None:
        """Mark the connection as lost, for which `receive` waits."""
        if self._lost_event is None:
            self._lost_event = asyncio.Event()
        self._lost_event.set()

    def complete_response(self) -> tuple[Message, bytes] | None:
        """Return the response's start, with content-length, and its body; None if the application did not finish it."""
        if self._start_message is None or not self._is_complete:
            return None
        body, headers = b"".join(self._response_body_pieces), self._start_message["headers"]
        if not any(name == b"content-length" for name, _ in headers):
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        return {**self._start_message, "headers": headers}, body


class SharedState:
    """State shared by all connections of a server: application, bounds, header cache, response heads."""

    def __init__(self, front: AsgiApp, bounds: PeerBounds | None = None) -> None:
        self.app = front
        self.connections = Connections(bounds or PeerBounds())
        self.header_cache = HeaderCache(front)
        self.response_heads = ResponseHeads()
        front.has_room_for_answer = self._has_room

    def _has_room(self) -> bool:
        """True if one more large answer may be started."""
        return not self.connections.unread_answers.is_full(time.monotonic())


class LookupConnection(Connection):
    """Connection that answers lookups itself. While a lookup is under way, later input waits."""

    __slots__ = ("_asgi_cycle", "_caller", "_last_block", "_shared", "_waiting_input")

    def __init__(self, shared: SharedState, *arguments: Any, **keyword_arguments: Any) -> None:
        self._shared = shared
        self._last_block = b""
        self._waiting_input = b""
        self._asgi_cycle: AsgiCycle | None = None
        self._caller: Caller = STRANGER
        super().__init__(shared.connections, *arguments, **keyword_arguments)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Open the connection; under a backlog, drop it if its peer has already closed its sending side."""
        gate = self._shared.app.gate
        if gate is not None and gate.admission.work_pacer.is_backlogged and has_peer_closed(transport):
            gate.admission.shed_counts["gone"] += 1
            gate.admission.work_pacer.note_dropped_connection()
            self.transport = transport
            transport.abort()
            return
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Answer input that is exactly one lookup past uvicorn; later input waits, other input goes to uvicorn."""
        if self._is_answering_fast:
            self._waiting_input += data
            if len(self._waiting_input) > BEHIND_BYTES_MAX:
                self.flow.pause_reading()
        elif self._open_count or self._unread_input or not self._try_answer_fast(data):
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify a request under way that its client has left, then clean up as uvicorn does."""
        if self._asgi_cycle is not None:
            self._asgi_cycle.mark_lost()
        super().connection_lost(exc)

    def _try_answer_fast(self, received_data: bytes) -> bool:
        fast_path = self._shared.app.untraced_fast
        if fast_path is None:
            return False
        is_get = received_data[:4] == b"GET "
        if not is_get and received_data[:16] != b"POST " + LOOKUP_PATH_PREFIX:
            return False
        line_end = received_data.find(b"\r\n")
        if is_get:
            header_block = received_data[line_end:]
        else:
            head_end = received_data.find(b"\r\n\r\n", line_end) + 4
            header_block, length_digits = split_content_length(received_data[line_end:head_end])
            if not length_digits or len(received_data) - head_end != int(length_digits):
                return False
        if (
            allowed_headers := self._shared.header_cache.find_judged(fast_path, header_block)
            or self._judge_repeated(fast_path, header_block)
        ) is None:
            return False
        if (
            received_data[line_end - 9 : line_end] != b" HTTP/1.1"
            or self._is_write_buffer_full
            or self.transport.is_closing()
        ):
            return False
        if self._partial_request_line is not None or self.is_discarding:
            return False
        response_head = self._shared.response_heads.head_for(self.server_state.default_headers)
        if response_head is None:
            return False
        if not is_get:
            return self._try_post(
                received_data[5 : line_end - 9], allowed_headers, length_digits, received_data[head_end:]
            )
        target, caller = received_data[4 : line_end - 9], allowed_headers.caller
        if caller.has_quota_or_expiry:
            if caller.is_expired:
                return False
            if caller.quota is not None and target.startswith(LOOKUP_PATH_PREFIX):
                return self._try_quota(fast_path, caller, caller.quota, target, response_head)
        if (body := fast_path.answer(target)) is None:
            return self._try_lookup(fast_path, target, allowed_headers, received_data)
        caller.counts.request_count += 1
        self._write_json_answer(response_head, body)
        return True

    def _try_quota(
        self, fast_path: FastPath, caller: Caller, quota: Quota, request_target: bytes, response_head: bytes
    ) -> bool:
        """Send a ready answer within the caller's quota, or refuse; return False if the application must answer."""
        if (shortage := quota.enter_request(1)) is not None:
            caller.counts.request_count += 1
            start_message, body_message = self._shared.app.refuse_for_problem(caller.count_quota_refusal(shortage))
            self._respond(start_message, body_message["body"])
            return True
        if (body := fast_path.answer(request_target)) is None:
            quota.give_back(1)
            return False
        quota.close()
        caller.counts.request_count += 1
        self._write_json_answer(response_head, body)
        return True

    def _judge_repeated(self, fast_path: FastPath, header_block: bytes) -> AllowedHeaders | None:
        """Check unknown or refused headers once they came twice in a row; None before."""
        if header_block != self._last_block:
            self._last_block = header_block[:HEADER_BLOCK_BYTES_MAX]
            return None
        return self._shared.header_cache.judge_and_cache(fast_path, header_block)

    def _try_lookup(
        self, fast_path: FastPath, request_target: bytes, allowed_headers: AllowedHeaders, received_data: bytes
    ) -> bool:
        if not (
            allowed_headers.is_unwatched
            and request_target.startswith(LOOKUP_PATH_PREFIX)
            and _TARGET_PATTERN.fullmatch(request_target)
        ):
            return False
        path, _, query = request_target.partition(b"?")
        scope = {
            "method": "GET", "raw_path": path, "query_string": query, "headers": allowed_headers.headers,
            CALLER_KEY: allowed_headers.caller, IS_GONE_KEY: self.transport.is_closing,
        }  # fmt: skip
        front = self._shared.app
        parsed_get = group_future = None
        try:
            if (parsed_get := fast_path.parse_get(scope)) is not None:
                group_future = front.try_join(parsed_get)
        except Exception:  # uvicorn's path handles the request and reports the error
            log.exception("a lookup failed")
        if parsed_get is None:
            return False
        self._is_answering_fast, self._caller = True, allowed_headers.caller
        if group_future is None:
            self._start_task(self._look_up(front.answer_get(parsed_get, scope), received_data))
        else:
            group_future.add_done_callback(functools.partial(self._send_joined, parsed_get, received_data))
        return True

    def _send_joined(self, parsed_get: ParsedGet, received_data: bytes, group_future: asyncio.Future[Any]) -> None:
        """Send the answer of a grouped read; without one, continue alone in a task."""
        front = self._shared.app
        if (body := front.finish_joined(group_future)) is None:
            self._start_task(self._look_up(front.answer_after_join(parsed_get, group_future), received_data))
            return
        self._is_answering_fast = False
        self._caller.counts.request_count += 1
        if self.transport.is_closing():
            return
        response_head = self._shared.response_heads.head_for(self.server_state.default_headers)
        if response_head is None or self._ends_after_answer:
            self._respond(*json_response(body))
        else:
            self._write_json_answer(response_head, body)
        self._read_waiting_input()

    def _write_json_answer(self, response_head: bytes, body: bytes) -> None:
        self.transport.write(b"".join((response_head, b"%d" % len(body), _JSON_HEAD_END, body)))
        self._finish_request()

    def _start_task(self, request_work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(request_work)
        self.server_state.tasks.add(task)
        task.add_done_callback(self._finish_task)

    def _finish_task(self, task: asyncio.Task[None]) -> None:
        self.server_state.tasks.discard(task)
        if task.cancelled():
            self.transport.close()

    async def _look_up(self, lookup_work: Coroutine[Any, Any, ResponseMessages | None], received_data: bytes) -> None:
        try:
            answer = await lookup_work
        except Exception:  # uvicorn's path handles the request and reports the error
            log.exception("a lookup failed")
            answer = None
        self._send_or_pass_on(received_data, answer)

    def _send_or_pass_on(self, received_data: bytes, answer: ResponseMessages | None) -> None:
        """Send the answer of a finished lookup; without one pass its request to uvicorn."""
        self._is_answering_fast = False
        if self.transport.is_closing():
            return
        if answer is None:
            super().data_received(received_data)
            if self._ends_after_answer:
                super().shutdown()
        else:
            self._caller.counts.request_count += 1
            self._send_messages(*answer)
        self._read_waiting_input()

    def _read_waiting_input(self) -> None:
        waiting_input, self._waiting_input = self._waiting_input, b""
        self.flow.resume_reading()
        if waiting_input and not self.transport.is_closing():
            self.data_received(waiting_input)
        if self._has_peer_closed:
            self.end_if_peer_closed()

    def _try_post(
        self, request_target: bytes, allowed_headers: AllowedHeaders, length_digits: bytes, body: bytes
    ) -> bool:
        """Run a request with a body without uvicorn's parser and cycle: a refusal costs 14 to 24 us, not 50 to 78."""
        path, _, query = request_target.partition(b"?")
        if b"%" in path or not _TARGET_PATTERN.fullmatch(request_target):
            return False
        is_unwatched = allowed_headers.is_unwatched  # for an observed request the observer reports the refusal
        if is_unwatched and (refusal := self._shared.app.refuse_if_overloaded()) is not None:
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
            "headers": allowed_headers.with_length(length_digits),
            "state": self.app_state.copy(),
            "method": "POST",
            "path": self.root_path + path.decode(),
            "raw_path": self.root_path.encode() + path,
            "query_string": query,
            CALLER_KEY: allowed_headers.caller,
            IS_GONE_KEY: self.transport.is_closing,
        }
        if is_unwatched:
            scope[ADMITTED_KEY] = True
        self._is_answering_fast, self._asgi_cycle = True, AsgiCycle(body)
        self._start_task(self._run_application(scope, self._asgi_cycle))
        return True

    async def _run_application(self, scope: Scope, cycle: AsgiCycle) -> None:
        try:
            await self._shared.app(scope, cycle.receive, cycle.send)
        except Exception:
            log.exception("a request failed")
        self._is_answering_fast, self._asgi_cycle = False, None
        if not self.transport.is_closing():
            self._respond(*(cycle.complete_response() or _FAILED_RESPONSE))
            self._read_waiting_input()

    def _send_messages(self, start_message: Message, body_message: Message) -> None:
        response_head, body = (
            self._shared.response_heads.head_for(self.server_state.default_headers),
            body_message["body"],
        )
        is_plain = start_message["status"] == 200 and len(start_message["headers"]) == _PLAIN_HEADER_COUNT
        if response_head is not None and is_plain and not self._ends_after_answer:
            self._write_json_answer(response_head, body)
        else:
            self._respond(start_message, body)


def has_peer_closed(transport: asyncio.Transport) -> bool:
    """True if the peer has closed its sending side, even with unread bytes left; False if the system cannot tell."""
    peer_socket = transport.get_extra_info("socket")
    try:
        tcp_state: int = peer_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except (AttributeError, OSError):
        return False
    return tcp_state == _CLOSE_WAIT_STATE


def json_response(body: bytes) -> tuple[Message, bytes]:
    """Return start and body of a JSON response."""
    headers = [(b"content-length", b"%d" % len(body)), (b"content-type", JSON_MEDIA_TYPE.encode())]
    return {"status": 200, "headers": headers}, body


def connection_factory(shared: SharedState) -> Callable[..., LookupConnection]:
    """Return the factory for uvicorn's connections."""
    return functools.partial(LookupConnection, shared)

"""Uvicorn's HTTP/1.1 protocol, made strict by the rules of RFC 9110 and RFC 9112; base of all connections.

httptools only parses heads: its input ends where a head ends. Bodies are read here, by the length in their head. So
nothing in a body can be parsed as a request, whatever the head contains (httptools skips the body of a request with
`Upgrade`), no trailer changes the parser's state, and all bytes before a request line are checked.
"""

import contextlib
import re
import time
from asyncio import TimerHandle
from collections.abc import Sequence
from typing import Any, Literal
from weakref import WeakSet

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from serving.admission.work_pacer import IS_GONE_KEY

Headers = Sequence[tuple[bytes, bytes]]

CHUNKED_LENGTH = -1
"""Length of a chunked body, whose end is marked by a chunk."""

_REQUEST_LINE_PATTERN = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+) [^\x00-\x20\x7f]+ HTTP/(\d\.\d)\r\n")
_SERVED_VERSIONS = (b"1.1", b"1.0")
_CHECKED_HEADERS = frozenset({b"host", b"content-length", b"transfer-encoding"})
_HOST_PATTERN = re.compile(
    # RFC 3986 allows a comma in a name. It is refused here, since it may come from two joined Host fields.
    rb"(?:\[[0-9A-Fa-f:.]{2,}\]|(?:[0-9A-Za-z\-._~!$&'()*+;=]|%[0-9A-Fa-f]{2})*)(?::[0-9]{0,5})?"
)
_CHUNK_SIZE_PATTERN = re.compile(
    # An extension is a name, with or without a value. Blanks in between are refused: RFC 9112 forbids senders to write
    # them.
    rb"([0-9A-Fa-f]+)(?:;[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
    rb"(?:=(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
    rb'|"(?:[\t\x20\x21\x23-\x5b\x5d-\x7e\x80-\xff]|\\[\t\x20-\x7e\x80-\xff])*"))?)*\r\n'
)
_SIZE_BY_TINY_CHUNK_LINE = {b"%x\r\n" % size: size for size in range(1, 16)}
_TRAILER_PATTERN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\r\n")
_LINE_BYTES_MAX = 8 << 10
_TRAILERS_BYTES_MAX = 64 << 10
_SIZE_DIGITS_MAX = 15

PIECE_BYTES = 16 << 10
"""Bytes that are parsed before a bound or the clock is checked."""
READ_TURN_S = 0.001
"""Seconds for which one connection is read without a pause: a body in tiny chunks costs ten times as much as a plain
one."""

_HEAD_END = b"\r\n\r\n"
_EMPTY_LINES_PATTERN = re.compile(rb"(?:\r\n)*")
DISCARD_S = 5.0
"""Seconds for which an ending connection is still read, so that its peer can read the last answer."""
DISCARD_BYTES_MAX = 12 << 20
HALF_CLOSED_PEERS_MAX = 4
"""Number of peers answered at the same time although they have closed their sending side. Nearly all such peers have
left, and the service must not work for them."""

_half_closed_connections: WeakSet["Http1Protocol"] = WeakSet()


class ProtocolViolation(Exception):
    """A request violates a rule; its sender gets the status and the message."""

    def __init__(self, http_status: int, message: str) -> None:
        super().__init__(http_status, message)
        self.status, self.message = http_status, message


def request_version(request_line: bytes) -> bytes:
    """Return the HTTP version, `1.0` or `1.1`, of a request line with its line break; raise ProtocolViolation."""
    line_match = _REQUEST_LINE_PATTERN.fullmatch(request_line)
    if line_match is None:
        raise ProtocolViolation(400, "the request line is not METHOD, TARGET and HTTP/1.1 with one space between them")
    method, http_version = line_match.groups()
    if http_version not in _SERVED_VERSIONS:
        raise ProtocolViolation(505, "only HTTP/1.0 and HTTP/1.1 are supported")
    if method == b"CONNECT":
        raise ProtocolViolation(501, "CONNECT is not supported: this is not a proxy")
    return http_version


def body_length(http_version: bytes, headers: Headers) -> int:
    """Return the bytes of the body that follows a head, CHUNKED for chunks; header names in lower case.

    Raises ProtocolViolation for fields that are not allowed in a request of this version.
    """
    content_length, host_count = 0, 0
    codings = b""
    for header_name, header_value in headers:
        if header_name not in _CHECKED_HEADERS:
            continue
        if header_name == b"host":
            host_count += 1
            if not _HOST_PATTERN.fullmatch(header_value.strip(b" \t")):
                raise ProtocolViolation(400, "the Host field is not a host with or without a port")
        elif header_name == b"content-length":
            content_length = int(header_value)
        else:
            codings += b"," + header_value
    if host_count != 1 and (host_count or http_version != b"1.0"):
        raise ProtocolViolation(400, f"a request must have exactly one Host field, not {host_count}")
    if not codings:
        return content_length
    if http_version == b"1.0":
        raise ProtocolViolation(400, "HTTP/1.0 has no Transfer-Encoding: send Content-Length")
    coding_names = [coding.strip(b" \t").lower() for coding in codings[1:].split(b",")]
    if b"" in coding_names:
        raise ProtocolViolation(400, "a Transfer-Encoding names no coding")
    if coding_names[-1] != b"chunked":
        raise ProtocolViolation(400, "the length of the body is unknown: its last Transfer-Encoding is not chunked")
    if len(coding_names) > 1:
        raise ProtocolViolation(501, "no Transfer-Encoding except chunked is supported")
    return CHUNKED_LENGTH


class ChunkedBody:
    """Decoder of one chunked body. Trailers are read and dropped."""

    __slots__ = ("_chunk_bytes_left", "_expected_part", "_partial_line", "_trailers_bytes", "is_complete")

    def __init__(self) -> None:
        self.is_complete = False
        self._expected_part: Literal["size", "end of chunk", "trailer"] = "size"
        self._chunk_bytes_left = self._trailers_bytes = 0
        self._partial_line = b""

    def feed(self, received_data: bytes) -> tuple[bytes, int]:
        """Return the part of the body that is in `received_data`, and how many of its bytes belong to the message.

        Raises ProtocolViolation for invalid chunks.
        """
        body_pieces: list[bytes] = []
        offset, data_bytes = 0, len(received_data)
        while offset < data_bytes and not self.is_complete:
            if self._chunk_bytes_left:
                body_pieces.append(received_data[offset : offset + self._chunk_bytes_left])
                offset += len(body_pieces[-1])
                self._chunk_bytes_left -= len(body_pieces[-1])
                continue
            if self._expected_part == "size" and not self._partial_line:
                offset = _append_tiny_chunks(received_data, offset, body_pieces)
            line_end = received_data.find(b"\n", offset) + 1
            self._partial_line += received_data[offset : line_end or data_bytes]
            offset = line_end or data_bytes
            if len(self._partial_line) > _LINE_BYTES_MAX:
                raise ProtocolViolation(400, "a line between the chunks of the body is too long")
            if line_end:
                chunk_line, self._partial_line = self._partial_line, b""
                self._parse_line(chunk_line)
        return b"".join(body_pieces), offset

    def _parse_line(self, chunk_line: bytes) -> None:
        if self._expected_part == "size":
            size_match = _CHUNK_SIZE_PATTERN.fullmatch(chunk_line)
            if size_match is None or len(digits := size_match[1].lstrip(b"0")) > _SIZE_DIGITS_MAX:
                raise ProtocolViolation(400, "the size of a chunk is not a hexadecimal number")
            self._chunk_bytes_left = int(digits or b"0", 16)
            self._expected_part = "end of chunk" if self._chunk_bytes_left else "trailer"
        elif self._expected_part == "end of chunk":
            if chunk_line != b"\r\n":
                raise ProtocolViolation(400, "a chunk is longer than its size")
            self._expected_part = "size"
        elif chunk_line == b"\r\n":
            self.is_complete = True
        else:
            self._trailers_bytes += len(chunk_line)
            if not _TRAILER_PATTERN.fullmatch(chunk_line):
                raise ProtocolViolation(400, "a trailer of the body is not NAME: VALUE")
            if self._trailers_bytes > _TRAILERS_BYTES_MAX:
                raise ProtocolViolation(431, "the trailers of the body are too large")


def _append_tiny_chunks(received_data: bytes, chunk_offset: int, body_pieces: list[bytes]) -> int:
    """Append the chunks from `chunk_offset` on that have at most 15 bytes; return the offset of the first other chunk.

    Costs a quarter of parsing lines, for bodies that arrive in chunks of a few bytes.
    """
    while (chunk_bytes := _SIZE_BY_TINY_CHUNK_LINE.get(received_data[chunk_offset : chunk_offset + 3])) is not None:
        chunk_end = chunk_offset + 3 + chunk_bytes
        if received_data[chunk_end : chunk_end + 2] != b"\r\n":
            break
        body_pieces.append(received_data[chunk_offset + 3 : chunk_end])
        chunk_offset = chunk_end + 2
    return chunk_offset


class _CycleTransport:
    """Transport for uvicorn's request cycle, whose `close` ends the connection in stages."""

    __slots__ = ("_protocol",)

    def __init__(self, protocol: "Http1Protocol") -> None:
        self._protocol = protocol

    def write(self, data: bytes) -> None:
        """Write to the peer, unless this side is closed."""
        protocol = self._protocol
        if not (protocol.is_discarding or protocol.transport.is_closing()):
            protocol.transport.write(data)

    def is_closing(self) -> bool:
        """True once nothing can be written any more."""
        return self._protocol.is_discarding or self._protocol.transport.is_closing()

    def close(self) -> None:
        """End the connection so that its peer can still read the written bytes."""
        self._protocol.close_in_stages()


class Http1Protocol(HttpToolsProtocol):
    """Uvicorn connection that refuses ambiguous requests, answers in order, and lets its peer read the last answer.

    Subclasses may raise ProtocolViolation in the parser's callbacks.
    """

    __slots__ = (
        "_body_bytes_left",
        "_chunked_body",
        "_discard_timer",
        "_discarded_bytes",
        "_has_peer_closed",
        "_head_tail",
        "_http_version",
        "_is_head_fed",
        "_is_line_read",
        "_partial_request_line",
        "_refusal_reason",
        "_unread_input",
        "is_discarding",
        "is_reading_body",
        "reads_no_more",
    )  # fmt: skip

    def __init__(self, *arguments: Any, **keyword_arguments: Any) -> None:
        self.reads_no_more = False
        """True if no more requests are read."""
        self.is_discarding = False
        """True if this side is closed, and arriving bytes are dropped."""
        self.is_reading_body = False
        """True while a body is being read."""
        self._partial_request_line: bytearray | None = None  # of the next request, until it is complete
        self._http_version = b""
        self._is_line_read = self._is_head_fed = False
        self._head_tail = b""  # last bytes of the head that were already parsed
        self._body_bytes_left = 0
        self._chunked_body: ChunkedBody | None = None
        self._refusal_reason: ProtocolViolation | None = None
        self._unread_input = b""  # received bytes that wait for the next turn
        self._has_peer_closed = False
        self._discarded_bytes = 0
        self._discard_timer: TimerHandle | None = None
        super().__init__(*arguments, **keyword_arguments)

    def data_received(self, data: bytes) -> None:
        """Parse requests for at most `READ_TURN_S`; the remaining bytes wait until other connections were read."""
        if self._unread_input:
            self._unread_input += data
            self.flow.pause_reading()
        elif len(data) <= PIECE_BYTES:
            self.read_piece(data)
        else:
            self._read_for_a_turn(data)

    def _read_for_a_turn(self, data: bytes) -> None:
        ends_at = time.perf_counter() + READ_TURN_S
        for piece_offset in range(0, len(data), PIECE_BYTES):
            if piece_offset and time.perf_counter() >= ends_at:
                self._unread_input = data[piece_offset:]
                self.flow.pause_reading()
                self.loop.call_soon(self._read_unread_input)
                return
            self.read_piece(data[piece_offset : piece_offset + PIECE_BYTES])

    def _read_unread_input(self) -> None:
        data, self._unread_input = self._unread_input, b""
        if self.parser is None or self.transport.is_closing():
            return
        cycle = self.cycle
        is_body_held = cycle is not None and len(cycle.body) > HIGH_WATER_LIMIT
        if not (is_body_held or self.pipeline or self.reads_no_more) or self.is_discarding:
            self.flow.resume_reading()
        self._read_for_a_turn(data)
        if self._has_peer_closed and not self._unread_input and not self.eof_received():
            self.transport.close()

    def read_piece(self, data: bytes) -> None:
        """Parse requests; drop the bytes after the last one of the connection."""
        self._unset_keepalive_if_required()
        try:
            while data and not self.reads_no_more and not self.transport.is_closing():
                data = self._feed_body(data) if self.is_reading_body else self._feed_head(data)
        except ProtocolViolation as violation:
            self.refuse(violation)
        except httptools.HttpParserError as error:
            cause = error.__context__  # the parser wraps errors of its callbacks
            if not isinstance(cause, ProtocolViolation):
                self.logger.debug("a request cannot be parsed: %s", error)
                cause = ProtocolViolation(400, "the request is not HTTP/1.1")
            self.refuse(cause)
        if data and self.reads_no_more:
            self._discard(len(data))

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep answering a peer that has closed its sending side, for a few such peers at the same time."""
        if self.is_discarding or self.transport.is_closing():
            return False
        self._has_peer_closed = True
        if self._unread_input:
            return not self._closes_with_peer  # handled once the input is read
        if self._is_within_request:
            self.refuse(ProtocolViolation(400, "the request ended early"))
        has_too_many_peers = len(_half_closed_connections) >= HALF_CLOSED_PEERS_MAX
        if self._closes_with_peer or not self.is_awaited or has_too_many_peers:
            return False
        _half_closed_connections.add(self)
        return True

    @property
    def _closes_with_peer(self) -> bool:
        """True under TLS, where asyncio closes the connection in any case, and logs a warning if it is to stay open."""
        return self.scheme == "https"

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        _half_closed_connections.discard(self)
        self._unread_input = b""
        if self._discard_timer is not None:
            self._discard_timer.cancel()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        """Check the fields of the request, then start the application."""
        if not self._is_head_fed:
            raise ProtocolViolation(400, "the head of the request contains an incomplete line")
        content_length = body_length(self._http_version, self.headers)
        if self._http_version == b"1.0":
            self.expect_100_continue = False
        self.scope[IS_GONE_KEY] = self.transport.is_closing  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        self.cycle.transport = _CycleTransport(self)  # type: ignore[assignment]  # all that a cycle calls
        if content_length:
            self.is_reading_body = True
            self._body_bytes_left = content_length
            self._chunked_body = ChunkedBody() if content_length == CHUNKED_LENGTH else None

    def on_message_complete(self) -> None:
        """Record that the request has been read, and whether another may follow."""
        if self.is_reading_body:
            return  # the parser is done with the head of a request that asks for an upgrade
        self._is_line_read = self._is_head_fed = False
        if not self.cycle.keep_alive:
            self.reads_no_more = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the next request; after the last answer send the reason why no more are read."""
        if self.is_discarding:
            self.server_state.total_requests += 1
            return
        is_newest = not self.pipeline
        super().on_response_complete()
        if is_newest and not self.transport.is_closing():
            if self._refusal_reason is not None:
                self._send_refusal(self._refusal_reason)
            else:
                self.end_if_peer_closed()

    def shutdown(self) -> None:
        """Stop as uvicorn does; a connection that is ending ends at once."""
        if self.is_discarding:
            self.transport.close()
        else:
            super().shutdown()

    @property
    def is_awaited(self) -> bool:
        """True if a request is not answered yet."""
        return bool(self.pipeline) or (self.cycle is not None and not self.cycle.response_complete)

    def refuse(self, violation: ProtocolViolation) -> None:
        """Read no more requests, answer the earlier ones, send the reason to the peer, end the connection."""
        if self._refusal_reason is not None or self.is_discarding or self.transport.is_closing():
            return
        self._refusal_reason, self.reads_no_more = (
            violation.with_traceback(None),
            True,
        )  # its frames know this connection
        if self.is_reading_body and not self.pipeline:
            cycle = self.cycle
            is_answered, is_begun = cycle.response_complete, cycle.response_started
            cycle.disconnected = True
            cycle.message_event.set()
            if is_answered:
                self.close_in_stages()
            elif is_begun:
                self.transport.close()
            else:
                self._send_refusal(violation)
            return
        if self.is_reading_body:
            self.pipeline.popleft()  # the refused request: it has not started, an earlier one has
        elif not self.is_awaited:
            self._send_refusal(violation)
            return
        if not self._has_peer_closed:
            self.flow.pause_reading()

    def close_in_stages(self) -> None:
        """End the connection so that its peer can read the last answer although it still sends.

        A connection that is closed while bytes arrive is reset, and its peer loses unread answers. So only the sending
        side is closed first, and arriving bytes are dropped for a while (RFC 9112, section 9.6).
        """
        if self.is_discarding or self.transport.is_closing():
            return
        may_get_more_input = self._is_within_request or self._refusal_reason is not None or self._discarded_bytes
        if self._has_peer_closed or not may_get_more_input:
            self.transport.close()
            return
        self._unset_keepalive_if_required()
        self.reads_no_more = self.is_discarding = True
        self._discard_timer = self.loop.call_later(DISCARD_S, self.transport.close)
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # TLS connections cannot be half-closed
            self.transport.write_eof()

    def end_if_peer_closed(self) -> None:
        """End the connection if its peer has closed its side and all requests are answered."""
        if self._has_peer_closed and not self.is_awaited and not self.transport.is_closing():
            if self._is_within_request:
                self.refuse(ProtocolViolation(400, "the request ended early"))
            else:
                self.transport.close()

    @property
    def _is_within_request(self) -> bool:
        return self._partial_request_line is not None or self._is_line_read

    def _feed_head(self, received_data: bytes) -> bytes:
        """Feed the parser up to the end of the head; return the bytes after it."""
        if not self._is_line_read and not (received_data := self._check_request_line(received_data)):
            return b""
        head_window = self._head_tail + received_data
        head_end = head_window.find(_HEAD_END)
        if head_end < 0:
            fed_bytes, self._head_tail = len(received_data), head_window[1 - len(_HEAD_END) :]
        else:
            fed_bytes, self._head_tail = head_end + len(_HEAD_END) - len(self._head_tail), b""
            self._is_head_fed = True
        # An upgrade may be ignored (RFC 9110, section 7.8). The body is read here, and then a new parser is used.
        with contextlib.suppress(httptools.HttpParserUpgrade):
            self.parser.feed_data(received_data[:fed_bytes])
        return received_data[fed_bytes:]

    def _check_request_line(self, received_data: bytes) -> bytes:
        """Check the request line as soon as it is complete; return the bytes without empty lines before it."""
        if self._partial_request_line is not None and self._partial_request_line == bytearray(b"\r"):
            received_data, self._partial_request_line = b"\r" + received_data, None
        if self._partial_request_line is None and received_data[0] in b"\r\n":
            received_data = received_data[_EMPTY_LINES_PATTERN.match(received_data).end() :]  # type: ignore[union-attr]  # it matches nothing as well
            if received_data == b"\r":
                self._partial_request_line = bytearray(received_data)  # it may begin an empty line
                return b""
            if received_data[:1] in (b"\r", b"\n"):
                raise ProtocolViolation(400, "only empty lines that end with CR LF may precede a request")
        line_end = received_data.find(b"\n") + 1
        if line_end:
            self._http_version = request_version(bytes(self._partial_request_line or b"") + received_data[:line_end])
            self._is_line_read, self._partial_request_line = True, None
        elif received_data:
            self._partial_request_line = (self._partial_request_line or bytearray()) + received_data
        return received_data

    def _feed_body(self, received_data: bytes) -> bytes:
        """Pass on the part of the body that is in `received_data`; return the bytes after it."""
        chunked_body = self._chunked_body
        if chunked_body is None:
            body = received_data[: self._body_bytes_left]
            consumed_bytes = len(body)
            self._body_bytes_left -= consumed_bytes
            is_complete = not self._body_bytes_left
        else:
            body, consumed_bytes = chunked_body.feed(received_data)
            is_complete = chunked_body.is_complete
        if body:
            self.on_body(body)
        if is_complete:
            self.is_reading_body, self._chunked_body = False, None
            self.parser = httptools.HttpRequestParser(self)  # the previous parser waits for a body
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.on_message_complete()
        return received_data[consumed_bytes:]

    def _discard(self, discarded_bytes: int) -> None:
        self._discarded_bytes += discarded_bytes
        if not self.is_discarding:
            self.flow.pause_reading()  # until the earlier requests are answered
        elif self._discarded_bytes > DISCARD_BYTES_MAX:
            self.transport.close()

    def _send_refusal(self, violation: ProtocolViolation) -> None:
        headers = [field for field in self.server_state.default_headers if field[0] != b"connection"]
        body = violation.message.encode()
        headers += [
            (b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]  # fmt: skip
        lines = [b"%b: %b\r\n" % field for field in headers]
        self.transport.write(b"".join((STATUS_LINE[violation.status], *lines, b"\r\n", body)))
        self.close_in_stages()

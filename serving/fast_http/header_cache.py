"""Cache of header blocks: what each allows, judged once for all connections whose requests repeat it."""

import re
from typing import NamedTuple

import httptools

from serving.access.callers import Caller, Callers
from serving.http.asgi_app import AsgiApp, FastPath
from serving.http.http1_protocol import ProtocolViolation, body_length

Headers = list[tuple[bytes, bytes]]

BLOCK_BYTES_MAX = 8_192
_BLOCKS_MAX = 256
_LENGTH = b"content-length"
_UNUSUAL = frozenset({b"transfer-encoding", b"content-encoding", b"expect", b"upgrade"})
_LENGTH_LINE = re.compile(rb"\r\ncontent-length: (\d{1,9})\r\n", re.IGNORECASE)


class AllowedHeaders(NamedTuple):
    """A request that leaves its connection open; `is_unwatched` where nobody wants to be told of a lookup like this."""

    headers: Headers
    is_unwatched: bool
    caller: Caller
    length_at: int = -1
    """Index of the content-length among the headers; -1 if there is none."""

    def with_length(self, digits: bytes) -> Headers:
        """The headers of the same request with a body of another length."""
        headers = self.headers.copy()
        headers[self.length_at] = _LENGTH, digits
        return headers


class HeaderCache:
    """Cache whose keys are all headers of a request behind its first line, line break included, by their very bytes.

    Whoever sends the same ones twice in a row will do so again: only those are judged, and a bounded number is kept.
    """

    def __init__(self, front: AsgiApp) -> None:
        self._front = front
        self._fast: FastPath | None = None
        self._callers: Callers | None = (
            None  # whoever has no token any more is not known by an old judgement
        )
        self._allowed_by_block: dict[bytes, AllowedHeaders | None] = {}

    def of(self, fast: FastPath, block: bytes) -> AllowedHeaders | None:
        """The known judgement of these headers for `fast`; None if there is none, or if they are not allowed."""
        is_current = fast is self._fast and self._front.callers is self._callers
        return self._allowed_by_block.get(block) if is_current else None

    def judged(self, fast: FastPath, block: bytes) -> AllowedHeaders | None:
        """Judges headers that have come twice, and keeps the result; None if very long or not allowed."""
        if len(block) > BLOCK_BYTES_MAX:
            return None
        callers = self._front.callers
        is_current = fast is self._fast and callers is self._callers
        if not is_current or len(self._allowed_by_block) >= _BLOCKS_MAX:
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
        length_at = names.index(_LENGTH) if _LENGTH in names else -1
        return AllowedHeaders(headers, is_unwatched, caller, length_at)


def without_length(block: bytes) -> tuple[bytes, bytes]:
    """Headers of a request with a body as `HeaderCache` knows them, and the digits of its length, if it says one."""
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
        """Keeps a header, its name in lower case."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Reads keep-alive at the end of the headers: behind that the parser thinks of the next request."""
        self.keeps_alive = self.parser.should_keep_alive()

    def on_message_complete(self) -> None:
        """Counts a message that has ended, body included."""
        self.messages += 1


def parse_plain_headers(block: bytes) -> Headers | None:
    """The headers of `block` (all behind the first line, line break included), names in lower case.

    None unless this is all of one request whose body, if it has one, is of a told length, and that leaves its
    connection open, and that breaks no rule. A length of 0 stands for any.
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
        if any(name in _UNUSUAL for name, _ in parsed_request.headers)
        else parsed_request.headers
    )

"""Uvicorn's HTTP/1.1 protocol, made safe for requests that ask to leave HTTP. Both transports are built on it.

httptools tells its parser to skip the body of every request with `Upgrade` (or CONNECT). Uvicorn then keeps the
connection, so bytes that Content-Length calls a body would run as the next request. Here an upgrade is ignored, as
RFC 9110, section 7.8, allows: the body is read by its length (RFC 9112, section 6.3), and so is what follows it.
CONNECT is refused with 400.
"""

from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_FRAMING = (b"content-length", b"transfer-encoding")


class Http1Protocol(HttpToolsProtocol):
    """A uvicorn connection that answers a request with `Upgrade` as if the field were not there."""

    def data_received(self, data: bytes) -> None:
        """Parse `data` as uvicorn does; an upgrade ends neither the message nor the connection."""
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._parse(data)
        except httptools.HttpParserError:
            message = "Invalid HTTP request received."
            self.logger.warning(message)
            self.send_400_response(message)

    def on_headers_complete(self) -> None:
        """Refuse CONNECT, start the application for all else."""
        if self.parser.get_method() == b"CONNECT":
            raise httptools.HttpParserError("CONNECT is not served")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Note that the request has been read, unless the parser stopped before the body of an ignored upgrade."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _parse(self, data: bytes) -> bytes:
        """Feed the parser; return what it left behind the head of a request that asks for an upgrade."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            self._read_body_by_its_length()
            return data[stop.args[0] :]
        return b""

    def _read_body_by_its_length(self) -> None:
        """Replace the parser by one that has read a head with the same framing and no upgrade."""
        lines = [b"%b: %b\r\n" % field for field in self.headers if field[0] in _FRAMING]
        if not self.cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        version = self.parser.get_http_version().encode()
        callbacks = _MutedCallbacks(self)
        self.parser = httptools.HttpRequestParser(callbacks)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"POST / HTTP/%b\r\n%b\r\n" % (version, b"".join(lines)))
        callbacks.is_muted = False


class _MutedCallbacks:
    """Parser callbacks of a protocol, of which those of a head are passed on only once `is_muted` is False."""

    def __init__(self, protocol: Http1Protocol) -> None:
        self.is_muted = True
        self._protocol: Any = protocol
        self.on_body = protocol.on_body
        self.on_message_complete = protocol.on_message_complete

    def on_message_begin(self) -> None:
        """Pass on that a request begins."""
        if not self.is_muted:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Pass on a piece of the request target."""
        if not self.is_muted:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Pass on a header field or trailer."""
        if not self.is_muted:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        """Pass on that the head of a request is complete."""
        if not self.is_muted:
            self._protocol.on_headers_complete()

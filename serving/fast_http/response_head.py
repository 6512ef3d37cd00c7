"""Response heads of the answers that are sent past uvicorn's cycle."""

from serving.fast_http.header_cache import Headers

_STATUS = b"HTTP/1.1 200 OK\r\n"


class ResponseHeads:
    """Cache of the response head up to the length; made anew when uvicorn's own headers change, once per second."""

    def __init__(self) -> None:
        self._of: Headers | None = None
        self._count = 0
        self._head: bytes | None = None

    def of(self, headers: Headers) -> bytes | None:
        """Status line and headers up to the length; None while they close connections, which is uvicorn's to do."""
        if headers is not self._of or len(headers) != self._count:
            self._of, self._count = headers, len(headers)
            lines = b"".join(b"%b: %b\r\n" % header for header in headers)
            closes = any(name == b"connection" for name, _ in headers)
            self._head = None if closes else _STATUS + lines + b"content-length: "
        return self._head

"""A small HTTP/1.1 client on asyncio streams: kept-alive connections, nothing between it and the clock."""

import asyncio
from typing import Self
from urllib.parse import urlsplit


class HttpConnection:
    """Connection for one request at a time; opened at the first one, and again after an error."""

    def __init__(self, url: str, timeout_s: float = 30.0) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._timeout_s = timeout_s
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """(status, body); OSError or TimeoutError when there is no answer. Never retried here."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._exchange(method, path, body)
        except BaseException:
            self.close()  # a half-read answer must not be taken for the next one
            raise

    async def _exchange(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=1 << 22)
        reader, writer = self._streams
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"\r\n" + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        status, length, closing = _head(answer)
        response_body = await reader.readexactly(length)
        if closing:
            self.close()
        return status, response_body


def _head(answer: bytes) -> tuple[int, int, bool]:
    first, *lines = answer.decode("latin-1").split("\r\n")
    headers = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(":") for line in lines)
    }
    if "content-length" not in headers:
        raise ConnectionError(f"an answer without Content-Length: {first}")
    closing = headers.get("connection", "").lower() == "close"
    return int(first.split()[1]), int(headers["content-length"]), closing


async def get(url: str, path: str) -> tuple[int, bytes]:
    """Send a GET request on a connection of its own; (status, body)."""
    async with HttpConnection(url) as connection:
        return await connection.request("GET", path)

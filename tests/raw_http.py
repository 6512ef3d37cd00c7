"""One connection to a running service, byte by byte: for requests that no HTTP client would send."""

import fcntl
import socket
import termios
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from tests.polling import poll_until

TIMEOUT_S = 8.0


@dataclass(frozen=True)
class RawResponse:
    """One response as received: final or interim."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def closes(self) -> bool:
        """Whether the response says that the connection ends."""
        return "close" in self.headers.get("connection", "").lower()


class RawConnection:
    """A connection to the service at `url`; `reset` is True once the service has reset it."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        assert where.hostname is not None
        assert where.port is not None
        self._socket = socket.create_connection((where.hostname, where.port), TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        """Send all of `data`; raise OSError if the service reset the connection."""
        self._socket.sendall(data)

    def wait_until_taken(self) -> None:
        """Wait until the peer's kernel has what was sent, so that the next piece is read separately."""

        def is_taken() -> bool:
            unsent = fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
            return int.from_bytes(unsent, "little") == 0

        assert poll_until(is_taken, 5)

    def close_own_side(self) -> None:
        """Close the sending side, and go on reading."""
        self._socket.shutdown(socket.SHUT_WR)

    def response(self, *, is_head: bool = False) -> RawResponse | None:
        """Return the next response, None if the service closed the connection; raise OSError after a reset."""
        head = self._read_until(b"\r\n\r\n")
        if head is None:
            return None
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        size = int(headers.get("content-length", "0"))
        has_body = not is_head and int(status.split()[1]) >= 200
        assert "transfer-encoding" not in headers
        body = self._exactly(size) if has_body else b""
        return RawResponse(int(status.split()[1]), headers, body)

    def responses(self) -> list[RawResponse]:
        """Return all responses until the service closes the connection."""
        responses = []
        while (response := self.response()) is not None:
            responses.append(response)
        return responses

    def read_to_end(self) -> bytes:
        """Return all bytes until the service closes the connection."""
        while piece := self._socket.recv(1 << 16):
            self._read += piece
        remaining_bytes, self._read = self._read, b""
        return remaining_bytes

    def _read_until(self, end: bytes) -> bytes | None:
        while end not in self._read:
            piece = self._socket.recv(1 << 16)
            if not piece:
                assert not self._read, self._read
                return None
            self._read += piece
        prefix, _, self._read = self._read.partition(end)
        return prefix

    def _exactly(self, size: int) -> bytes:
        while len(self._read) < size:
            piece = self._socket.recv(1 << 16)
            assert piece, "the connection ended within a body"
            self._read += piece
        body_bytes, self._read = self._read[:size], self._read[size:]
        return body_bytes


def exchange(url: str, data: bytes, *, is_half_closed: bool = False) -> list[RawResponse]:
    """Send `data` on a connection of its own; return all responses until the service closes it."""
    with RawConnection(url) as connection:
        connection.send(data)
        if is_half_closed:
            connection.close_own_side()
        return connection.responses()

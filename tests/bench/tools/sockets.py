"""HTTP load from raw sockets, and what a server spends on it: processor time tells even where cores are shared.

A server that is the limit answers one request per processor time that it spends on one, so the ratio of rates is the
ratio of these times; wall clocks on a machine with other work would tell of that work.
"""

import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from tests.bench.tools.http_load import Program

CONNECTIONS = 32
_PATIENCE_S = 30.0


def request(path: str, body: bytes | None = None, type_: str = "application/json") -> bytes:
    """The bytes of a keep-alive request, its body and the answer to it of one media type."""
    if body is None:
        return f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: {type_}\r\n"
        f"Accept: {type_}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass(frozen=True, slots=True)
class Driven:
    """One run: requests answered, seconds by the clock and of the server's processor time."""

    count: int
    wall_s: float
    cpu_s: float

    @property
    def per_cpu_s(self) -> float:
        """Requests per second of the server's processor time."""
        return self.count / max(self.cpu_s, 1e-9)

    @property
    def per_s(self) -> float:
        """Requests per second by the clock."""
        return self.count / max(self.wall_s, 1e-9)

    @property
    def busy(self) -> float:
        """Share of a core that the server used."""
        return self.cpu_s / max(self.wall_s, 1e-9)


def per_cpu_s(target: Program, requests: Sequence[bytes], count: int, connections: int = CONNECTIONS) -> float:
    """Requests answered per second of the server's processor time; see `drive`."""
    return drive(target, requests, count, connections).per_cpu_s


def drive(target: Program, requests: Sequence[bytes], count: int, connections: int = CONNECTIONS) -> Driven:
    """Send `count` requests in turn, one under way on each connection.

    Raises RuntimeError for an answer other than 200 and 202.
    """
    where = urlsplit(target.url)
    sockets = [socket.create_connection((where.hostname, where.port)) for _ in range(connections)]
    try:
        with selectors.DefaultSelector() as selector:
            for connection in sockets:
                selector.register(connection, selectors.EVENT_READ, bytearray())
            started_at, cpu_s_before = time.monotonic(), target.cpu_s()
            _drive(selector, sockets, requests, count)
            return Driven(count, time.monotonic() - started_at, target.cpu_s() - cpu_s_before)
    finally:
        for connection in sockets:
            connection.close()


def _drive(
    selector: selectors.BaseSelector, sockets: Sequence[socket.socket], requests: Sequence[bytes], count: int
) -> None:
    sent_count = answered_count = 0
    for client_socket in sockets[:count]:
        client_socket.sendall(requests[sent_count % len(requests)])
        sent_count += 1
    give_up = time.monotonic() + _PATIENCE_S + count / 50
    while answered_count < count:
        if time.monotonic() > give_up:
            raise RuntimeError(f"{count - answered_count} of {count} requests were not answered")
        for key, _ in selector.select(1.0):
            connection: socket.socket = key.fileobj  # type: ignore[assignment]
            key.data.extend(connection.recv(1 << 20))
            if not _is_whole(key.data):
                continue
            key.data.clear()
            answered_count += 1
            if sent_count < count:
                connection.sendall(requests[sent_count % len(requests)])
                sent_count += 1


def _is_whole(data: bytearray) -> bool:
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return False
    if not data.startswith((b"HTTP/1.1 200", b"HTTP/1.1 202")):
        raise RuntimeError(f"not answered: {bytes(data[:300])!r}")
    head = bytes(data[:end]).lower()
    length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
    return len(data) >= end + 4 + length

"""One connection to a server, byte by byte, and the answers that it gives."""

import contextlib
import fcntl
import json
import socket
import termios
from collections.abc import Sequence
from dataclasses import dataclass

from tests.polling import poll_until

_TIMEOUT_S = 20.0
_NO_BODY = (204, 304)


@dataclass(frozen=True)
class Answer:
    """One final answer."""

    status: int
    fields: dict[str, str]
    body: bytes

    @property
    def is_last(self) -> bool:
        """Whether the answer says that the connection ends."""
        return "close" in self.fields.get("connection", "").lower()

    @property
    def ids(self) -> list[str]:
        """The ids that the answer contains; none unless it answers a lookup."""
        if self.status != 200 or not self.body.startswith(b"{"):
            return []
        document = json.loads(self.body)
        answers = document.get("answers", [document])
        return [answer["id"] for answer in answers if "id" in answer]


@dataclass(frozen=True)
class Exchange:
    """All final answers of a connection until the server closed it."""

    answers: list[Answer]
    leftover: bytes
    """Bytes at the end that are no answer."""


class Malformed(Exception):
    """The server sent bytes that are not an answer."""


def exchange(
    address: tuple[str, int], pieces: Sequence[bytes], methods: Sequence[str] = (), *, apart: Sequence[bytes] = ()
) -> Exchange:
    """Send pieces, close the own side, and read until the server closes the connection.

    `methods` are those of the requests, as far as they are known: an answer to HEAD has no body. `apart` are whole
    requests that are sent before, each once the one before it is answered.
    """
    with socket.create_connection(address, _TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answers: list[Answer] = []
        received = b""
        for request in apart:
            connection.sendall(request)
            answer = None
            while answer is None:
                received += (data := connection.recv(1 << 16))
                assert data, "the connection ended behind a request that keeps it open"
                answer, received = _next_answer(received, is_head=False)
            answers.append(answer)
        try:
            for piece in pieces:
                connection.sendall(piece)
                if len(pieces) > 1:
                    _wait_until_taken(connection)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the server has ended the connection, and what it said before can be read
        received += _read_all(connection)
    while received:
        position = len(answers)
        is_head = position < len(methods) and methods[position] == "HEAD"
        answer, received = _next_answer(received, is_head=is_head)
        if answer is None:
            break
        answers.append(answer)
    return Exchange(answers, received)


def all_bytes(address: tuple[str, int], stream: bytes) -> bytes:
    """Return all bytes that a server sends after a stream whose sender closes its side."""
    with socket.create_connection(address, _TIMEOUT_S) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(stream)
            connection.shutdown(socket.SHUT_WR)
        return _read_all(connection)


def _wait_until_taken(connection: socket.socket) -> None:
    """Wait until the peer's kernel has what was sent, so that the next piece can be read apart from it."""

    def is_taken() -> bool:
        unsent = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
        return int.from_bytes(unsent, "little") == 0

    assert poll_until(is_taken, 10, every_s=0)


def _read_all(connection: socket.socket) -> bytes:
    received = bytearray()
    try:
        while data := connection.recv(1 << 16):
            received += data
    except ConnectionError:
        pass
    return bytes(received)


def _next_answer(received: bytes, *, is_head: bool) -> tuple[Answer | None, bytes]:
    """Return the first final answer of these bytes and the rest; None if it is incomplete."""
    while True:
        head, end, behind = received.partition(b"\r\n\r\n")
        if not end:
            return None, received
        status_line, *lines = head.decode("latin-1").split("\r\n")
        status_parts = status_line.split(" ")
        if status_parts[0] not in ("HTTP/1.1", "HTTP/1.0") or not status_parts[1].isdigit():
            raise Malformed(repr(received[:200]))
        status = int(status_parts[1])
        if status >= 200:
            break
        received = behind
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    # The service refuses some requests before it knows their method, so a refusal of HEAD may have a body.
    is_without_body = is_head and (not behind or behind.startswith(b"HTTP/1."))
    if is_without_body or status in _NO_BODY:
        return Answer(status, fields, b""), behind
    if "chunked" in fields.get("transfer-encoding", ""):
        return _chunked_answer(status, fields, behind, received)
    size = int(fields.get("content-length", len(behind)))
    if len(behind) < size:
        return None, received
    return Answer(status, fields, behind[:size]), behind[size:]


def _chunked_answer(status: int, fields: dict[str, str], behind: bytes, received: bytes) -> tuple[Answer | None, bytes]:
    body = b""
    while True:
        line, end, behind = behind.partition(b"\r\n")
        size = int(line, 16) if end else -1
        if size < 0 or len(behind) < size + 2:
            return None, received
        body, behind = body + behind[:size], behind[size + 2 :]
        if not size:
            return Answer(status, fields, body), behind

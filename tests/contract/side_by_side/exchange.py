"""Requests as bytes, and a connection that sends them unchanged, also those that no HTTP library would send."""

import re
import shlex
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import urlsplit

HOST: Final = "larder.test"
AS_OF: Final = "0000000000000-9"
"""Stands in a request for the position of the newest event that both services accepted; each gets its own."""
_TIMEOUT_S: Final = 60.0
_CHUNK: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Request:
    """Request of a run: `kind` says what it is about; its `number` and the run's seed reproduce it."""

    kind: str
    method: str
    target: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    number: int = -1
    options: tuple[str, ...] = ()
    """Names of the options that are sent, for the counts."""
    settles: bool = False
    """True if what it shows may lag behind for a moment, and asking changes nothing: it is asked again then."""
    wire: bytes = field(default=b"", repr=False)
    """What is sent in place of a request, where that is no valid one."""

    @property
    def has_other_type(self) -> bool:
        """Whether the request says that its body is not JSON."""
        media_types = [value.partition(";")[0] for name, value in self.headers if name.lower() == "content-type"]
        return any(not media_type.endswith("json") for media_type in media_types)

    def numbered(self, number: int, headers: tuple[tuple[str, str], ...] = ()) -> "Request":
        """Return the request with this number, and with these headers before its own."""
        return replace(self, number=number, headers=headers + self.headers)

    def raw(self) -> bytes:
        """Return the bytes of the request."""
        if self.wire:
            return self.wire
        lines = [f"{self.method} {self.target} HTTP/1.1", f"Host: {HOST}"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        if self.body or self.method == "POST":
            lines.append(f"Content-Length: {len(self.body)}")
        return "\r\n".join([*lines, "", ""]).encode() + self.body

    def curl(self, base: str = "http://127.0.0.1:8000") -> str:
        """Return a curl command that sends the request."""
        if self.wire:
            return f"printf %b {shlex.quote(repr(self.wire)[2:-1])} | nc 127.0.0.1 8000"
        command = ["curl", "-i", "--path-as-is", "-X", self.method, f"{base}{self.target}"]
        for name, value in self.headers:
            command += ["-H", f"{name}: {value}"]
        if self.body:
            text = self.body.decode(errors="backslashreplace")
            text = text if text.isprintable() else repr(self.body)[2:-1]
            command += ["--data-binary", text if len(text) < 4_000 else f"{text[:4_000]}..."]
        return shlex.join(command)


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer as received; names of `headers` are in lower case, in the order received."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str:
        """Value of a header, "" without one."""
        return next((value for header_name, value in self.headers if header_name == name), "")


class Line:
    """Connection to one service, opened again if the service has closed it."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._address = (str(address.hostname), int(address.port or 80))
        self._socket: socket.socket | None = None
        self._buffer = bytearray()

    def send(self, raw: bytes) -> None:
        """Send a request; read its answer before sending the next one."""
        if self._socket is None:
            self._socket = socket.create_connection(self._address, _TIMEOUT_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._buffer.clear()
        self._socket.sendall(raw)

    def receive(self, *, is_head: bool = False, ends: bool = False) -> Answer:
        """Return the answer to the last request; with `ends`, close the connection after it."""
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            self._fill()
        head = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        status = int(head[0].split(" ", 2)[1])
        headers = tuple(_parsed(head[1:]))
        answer = Answer(status, headers, b"")
        body = b"" if is_head else self._body(answer)
        if ends or answer.header("connection").lower() == "close":
            self.close()
        return Answer(status, headers, body)

    def _body(self, answer: Answer) -> bytes:
        if length := answer.header("content-length"):
            return self._read_bytes(int(length))
        if answer.header("transfer-encoding").lower() == "chunked":
            return b"".join(self._chunks())
        assert answer.header("connection").lower() == "close", answer
        while self._socket is not None and (part := self._socket.recv(_CHUNK)):
            self._buffer += part
        return bytes(self._buffer)

    def _chunks(self) -> Iterable[bytes]:
        while True:
            while (end := self._buffer.find(b"\r\n")) < 0:
                self._fill()
            size = int(self._read_bytes(end + 2).split(b";")[0], 16)
            chunk = self._read_bytes(size + 2)[:-2]
            if not size:
                return
            yield chunk

    def _read_bytes(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._fill()
        piece = bytes(self._buffer[:size])
        del self._buffer[:size]
        return piece

    def _fill(self) -> None:
        assert self._socket is not None
        part = self._socket.recv(_CHUNK)
        if not part:
            raise ConnectionError(f"the service closed the connection after {bytes(self._buffer)!r}")
        self._buffer += part

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _parsed(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    for line in lines:
        name, _, value = line.partition(":")
        yield re.sub(r"\s", "", name).lower(), value.strip()

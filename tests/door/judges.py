"""Two independent parsers of HTTP/1.1, h11 and Node's llhttp, which say where the messages of a stream end."""

import base64
import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import h11

NODE = shutil.which("node")
_NODE_JUDGE = Path(__file__).with_name("node_judge.js")
_EMPTY_LINES = re.compile(rb"\A(?:\r\n)+")
_DECIDING_TRAILER = re.compile(
    rb"(?i)(\r\n0+[ \t]*(?:;[^\r\n]*)?\r\n(?:[^\r\n:]+:[^\r\n]*\r\n)*)"
    rb"(?:(Content-Lengt)h|(Transfer-Encodin)g|(Connectio)n|(Expec)t|(Upgrad)e|(Hos)t):"
)
_ROOMY = 1 << 24
"""Bytes of a head that a judge reads: bounds are the product's own affair."""

End = Literal["clean", "closed", "refused", "silent"]
"""How a stream ends for a judge: behind a whole message, behind one that closes the connection, in bytes that are no
message, or in a message behind which it reads no more HTTP."""


@dataclass(frozen=True)
class Message:
    """One request as a judge reads it."""

    method: str
    target: str
    version: str
    fields: tuple[tuple[str, str], ...]
    """Names in lower case, with their values."""
    body: bytes

    @property
    def framing(self) -> tuple[str, str, bytes]:
        """The parts that determine where the message begins and ends."""
        return self.method, self.target, self.body


@dataclass(frozen=True)
class Reading:
    """A stream as a judge reads it; `first_bytes` is the length of the first message, if the judge gives it."""

    messages: tuple[Message, ...]
    end: End
    heads: tuple[tuple[str, str], ...]
    """Method and target of each head that was read: one more than `messages` where the stream breaks off, or is wrong,
    within a body."""
    error_message: str = ""
    first_bytes: int | None = None


class Judge(Protocol):
    """A reader of streams."""

    name: str

    def read(self, stream: bytes) -> Reading:
        """Read a stream after which the sender closes its side."""


def without_deciding_trailers(stream: bytes) -> bytes:
    """The stream as long as it was, with other names for trailers whose names would decide something in a head.

    RFC 9110, section 6.5.1: a trailer decides nothing. Both judges take some for fields of the head: llhttp refuses a
    `Content-Length`, h11 a `Transfer-Encoding` that it does not know.
    """
    while True:
        renamed = _DECIDING_TRAILER.sub(lambda match: match[1] + b"".join(match.groups(b"")[1:]) + b"-:", stream)
        if renamed == stream:
            return stream
        stream = renamed


class H11Judge:
    """h11 as a server that refuses upgrades and ignores empty lines before a request (RFC 9112, section 2.2)."""

    name = "h11"

    def read(self, stream: bytes) -> Reading:
        """Read a stream after which the sender closes its side."""
        stream = without_deciding_trailers(stream)
        messages: list[Message] = []
        first_bytes: int | None = None
        heads: list[tuple[str, str]] = []
        waiting = _EMPTY_LINES.sub(b"", stream)
        while waiting:
            connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_ROOMY)
            connection.receive_data(waiting)
            connection.receive_data(b"")
            body = b""
            try:
                request = connection.next_event()
                if not isinstance(request, h11.Request):
                    break
                heads.append((request.method.decode("latin-1"), request.target.decode("latin-1")))
                while isinstance(event := connection.next_event(), h11.Data):
                    body += bytes(event.data)
            except h11.RemoteProtocolError as error:
                return Reading(tuple(messages), "refused", tuple(heads), str(error), first_bytes)
            assert isinstance(event, h11.EndOfMessage), event
            messages.append(_message(request, body))
            waiting = connection.trailing_data[0]
            first_bytes = len(stream) - len(waiting) if first_bytes is None else first_bytes
            connection.send(h11.Response(status_code=404, headers=[("Content-Length", "0")]))
            connection.send(h11.EndOfMessage())
            if connection.our_state is not h11.DONE:
                return Reading(tuple(messages), "closed", tuple(heads), first_bytes=first_bytes)
            waiting = _EMPTY_LINES.sub(b"", waiting)
        return Reading(tuple(messages), "clean", tuple(heads), first_bytes=first_bytes)


def _message(request: h11.Request, body: bytes) -> Message:
    return Message(
        request.method.decode("latin-1"), request.target.decode("latin-1"), request.http_version.decode("latin-1"),
        tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers), body,
    )  # fmt: skip


class NodeJudge:
    """Node's HTTP server, whose parser is llhttp; one process reads many streams."""

    name = "llhttp"

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.version = self._reply()["version"]

    def read(self, stream: bytes) -> Reading:
        """Read a stream after which the sender closes its side."""
        assert self._process.stdin is not None
        self._process.stdin.write(base64.b64encode(without_deciding_trailers(stream)) + b"\n")
        self._process.stdin.flush()
        reply = self._reply()
        messages = tuple(
            Message(
                message["method"], message["target"], message["version"],
                tuple((name.lower(), value) for name, value in message["fields"]), base64.b64decode(message["body"]),
            )
            for message in reply["messages"]
        )  # fmt: skip
        heads = tuple((method, target) for method, target in reply["heads"])
        return Reading(messages, reply["end"], heads, reply["why"])

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "Node ended"
        reply: dict[str, Any] = json.loads(line)
        return reply


@contextlib.contextmanager
def node_judge() -> Iterator[NodeJudge]:
    """Run Node's judge."""
    assert NODE is not None
    process = subprocess.Popen(
        [NODE, f"--max-http-header-size={_ROOMY}", str(_NODE_JUDGE)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield NodeJudge(process)
    finally:
        process.kill()
        process.wait(10)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

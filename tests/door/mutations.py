"""Random streams: those of the corpus, cut, joined and damaged at the delicate points of HTTP/1.1."""

import random
from collections.abc import Sequence

TOKENS = (
    b"\r", b"\n", b"\r\n", b"\r\n\r\n", b" ", b"\t", b"\0", b"\x0b", b"\x7f", b"\x80", b",", b";", b":", b"0", b"+",
    b"-", b"_", b'"', b"x", b"chunked", b"identity", b", chunked", b"HTTP/1.0", b"HTTP/1.1", b"HTTP/1.2",
    b"100-continue", b"0\r\n\r\n", b"19\r\n", b"1\r\nx\r\n", b"ffffffffffffffff\r\n", b";a=b",
    b"Content-Length: 25\r\n", b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n", b"Connection: close\r\n", b"Connection: keep-alive\r\n",
    b"Connection: Upgrade\r\nUpgrade: h2c\r\n", b"Expect: 100-continue\r\n", b"Host: a\r\n", b"X: y\r\n",
    b" folded\r\n", b"GET ", b"POST ", b"HEAD ", b"CONNECT ",
)  # fmt: skip
"""What is put into a stream: bytes and words that decide where a message ends."""
_BYTES_MAX = 4_000


def mutated(rng: random.Random, streams: Sequence[bytes]) -> bytes:
    """A stream made of one or two others, with one to four changes."""
    short = [stream for stream in streams if len(stream) <= _BYTES_MAX]
    stream = rng.choice(short)
    if rng.random() < 0.4:
        second_stream = rng.choice(short)
        stream += second_stream if rng.random() < 0.7 else second_stream[rng.randrange(len(second_stream)) :]
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        stream = rng.choice(_CHANGES)(rng, stream)
    return stream[:_BYTES_MAX]


def _insert(rng: random.Random, stream: bytes) -> bytes:
    at = _spot(rng, stream)
    return stream[:at] + rng.choice(TOKENS) + stream[at:]


def _replace(rng: random.Random, stream: bytes) -> bytes:
    at = _spot(rng, stream)
    return stream[:at] + rng.choice(TOKENS) + stream[at + rng.randrange(1, 4) :]


def _remove(rng: random.Random, stream: bytes) -> bytes:
    at = _spot(rng, stream)
    return stream[:at] + stream[at + rng.randrange(1, 4) :]


def _flip(rng: random.Random, stream: bytes) -> bytes:
    at = rng.randrange(len(stream) or 1)
    return stream[:at] + bytes([rng.randrange(256)]) + stream[at + 1 :]


def _repeat_line(rng: random.Random, stream: bytes) -> bytes:
    lines = stream.splitlines(keepends=True)
    if not lines:
        return stream
    at = rng.randrange(len(lines))
    return b"".join([*lines[:at], lines[at], *lines[at:]])


def _move_line(rng: random.Random, stream: bytes) -> bytes:
    lines = stream.splitlines(keepends=True)
    if not lines:
        return stream
    line = lines.pop(rng.randrange(len(lines)))
    lines.insert(rng.randrange(len(lines) + 1), line)
    return b"".join(lines)


def _swap_case(rng: random.Random, stream: bytes) -> bytes:
    at = rng.randrange(len(stream) or 1)
    end = at + rng.randrange(1, 12)
    return stream[:at] + stream[at:end].swapcase() + stream[end:]


def _cut(rng: random.Random, stream: bytes) -> bytes:
    return stream[: rng.randrange(len(stream) + 1)]


_CHANGES = (
    *(_insert,) * 4, *(_replace,) * 3, _remove, _remove, _flip, _repeat_line, _move_line, _swap_case, _cut,
)  # fmt: skip


def _spot(rng: random.Random, stream: bytes) -> int:
    """Return a position, usually next to a separator."""
    spots = [at for at, byte in enumerate(stream) if byte in b"\r\n:;, "]
    if spots and rng.random() < 0.7:
        return rng.choice(spots) + rng.randrange(2)
    return rng.randrange(len(stream) + 1)

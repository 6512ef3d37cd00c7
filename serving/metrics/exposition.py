"""The answer of `/metrics`: all workers of a host in one text, made at a bounded rate."""

import asyncio
import contextlib
import socket
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

BURST = 20.0

PER_S = 5.0
"""Expositions per second at most, a few milliseconds of the event loop each; a scraper needs one a second at most."""

_PEER_TIMEOUT_S = 1.0

_PEER_TEXT_MAX = 8 << 20


class Exposition:
    """Rate limit: `make` is asked `BURST` times at once and `PER_S` times a second from then on, however many ask."""

    def __init__(
        self, make: Callable[[], Awaitable[bytes]], timer: Callable[[], float] = time.monotonic
    ) -> None:
        self._make = make
        self._timer = timer
        self._tokens, self._at = BURST, timer()
        self._body = b""

    async def __call__(self) -> bytes:
        """The text, at most a moment old."""
        now_s = self._timer()
        self._tokens = min(BURST, self._tokens + (now_s - self._at) * PER_S)
        self._at = now_s
        if self._tokens >= 1 or not self._body:
            self._tokens -= 1
            self._body = await self._make()
        return self._body


class WorkerPeers:
    """Unix sockets of the workers, in a folder that only they may enter; on each, a worker sends its own counts."""

    def __init__(self, folder: Path, slot: int) -> None:
        self._folder = folder
        self._slot = slot
        self._server: asyncio.Server | None = None
        self._expose: Callable[[], bytes] = bytes

    @property
    def slot(self) -> int:
        """Number of this worker, which no other has that lives."""
        return self._slot

    def path(self, name: str) -> Path:
        """File that all workers of the same parent share."""
        return self._folder / name

    @property
    def replica(self) -> str:
        """Name that all workers of the same parent share."""
        return f"{socket.gethostname()}-{self._folder.name.removeprefix('larder-')}"

    async def open(self, expose: Callable[[], bytes]) -> None:
        """Answers peers from now on."""
        self._expose = expose
        path = self._folder / f"{self._slot}.sock"
        self._server = await asyncio.start_unix_server(self._serve_counts, path)

    async def aclose(self) -> None:
        """Stops answering peers, and removes the socket's file."""
        if self._server is not None:
            self._server.close()
            (self._folder / f"{self._slot}.sock").unlink(missing_ok=True)

    async def exposition(self) -> bytes:
        """The counts of every worker that answers in time, each series with the label `worker`."""
        peer_paths = [
            peer_path
            for peer_path in self._folder.glob("*.sock")
            if peer_path.stem != str(self._slot)
        ]
        peer_texts = await asyncio.gather(*map(_read_counts, peer_paths))
        texts = {
            peer_path.stem: text
            for peer_path, text in zip(peer_paths, peer_texts, strict=True)
            if text
        }
        texts[str(self._slot)] = self._expose()
        return merge_expositions(
            dict(sorted(texts.items(), key=lambda slot_and_text: int(slot_and_text[0])))
        )

    async def _serve_counts(self, _reader: StreamReader, writer: StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            writer.write(self._expose())
            async with asyncio.timeout(_PEER_TIMEOUT_S):
                await writer.drain()
        writer.close()


async def _read_counts(path: Path) -> bytes:
    """The counts of a peer; empty for one that died or hangs."""
    writer: StreamWriter | None = None
    try:
        async with asyncio.timeout(_PEER_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(path)
            text = bytearray()
            while len(text) <= _PEER_TEXT_MAX and (part := await reader.read(1 << 16)):
                text += part
    except (OSError, TimeoutError):
        return b""
    finally:
        if writer is not None:
            writer.close()
    # One that died while it told has told half a line.
    return bytes(text) if len(text) <= _PEER_TEXT_MAX and text.endswith(b"\n") else b""


def merge_expositions(texts: Mapping[str, bytes]) -> bytes:
    """Merges expositions (text format 0.0.4) by worker into one: each family once, with the series of all."""
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for worker, text in texts.items():
        label = b'worker="%s"' % worker.encode()
        family = b""
        head: list[bytes] = []
        for line in text.splitlines():
            if line.startswith(b"# HELP "):
                family, head = line.split(b" ", 3)[2], []
                heads.setdefault(family, head)
            if line.startswith(b"#"):
                head.append(line)
            else:
                samples.setdefault(family, []).append(_labelled(line, label))
    lines = [line for family, head in heads.items() for line in head + samples.get(family, [])]
    return b"".join(line + b"\n" for line in lines)


def _labelled(sample: bytes, label: bytes) -> bytes:
    name, brace, labels_and_value = sample.partition(b"{")
    if brace and b" " not in name:
        return b"%s{%s%s%s" % (
            name,
            label,
            b"" if labels_and_value.startswith(b"}") else b",",
            labels_and_value,
        )
    name, _, value = sample.partition(b" ")
    return b"%s{%s} %s" % (name, label, value)

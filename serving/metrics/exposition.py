"""The response of `/metrics`: all workers of a host in one text, rendered at a bounded rate."""

import asyncio
import contextlib
import socket
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

BURST_EXPOSITIONS = 20.0

EXPOSITIONS_PER_S = 5.0
"""Largest number of expositions per second, each of which takes the event loop a few milliseconds."""

_PEER_TIMEOUT_S = 1.0

_PEER_TEXT_BYTES_MAX = 8 << 20


class Exposition:
    """Rate limit on `make_exposition` for any number of scrapers: a burst of `BURST_EXPOSITIONS`, then a fixed rate."""

    def __init__(
        self, make_exposition: Callable[[], Awaitable[bytes]], monotonic_clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._make_exposition = make_exposition
        self._monotonic_clock = monotonic_clock
        self._tokens, self._refilled_at = BURST_EXPOSITIONS, monotonic_clock()
        self._exposition_body = b""

    async def __call__(self) -> bytes:
        """Return the text, rendered now or a moment ago."""
        now_s = self._monotonic_clock()
        self._tokens = min(BURST_EXPOSITIONS, self._tokens + (now_s - self._refilled_at) * EXPOSITIONS_PER_S)
        self._refilled_at = now_s
        if self._tokens >= 1 or not self._exposition_body:
            self._tokens -= 1
            self._exposition_body = await self._make_exposition()
        return self._exposition_body


class WorkerPeers:
    """Unix sockets of the workers, in a folder that only they can access; on each, a worker sends its own counts."""

    def __init__(self, workers_folder: Path, worker_slot: int) -> None:
        self._workers_folder = workers_folder
        self._worker_slot = worker_slot
        self._server: asyncio.Server | None = None
        self._render_metrics: Callable[[], bytes] = bytes

    @property
    def worker_slot(self) -> int:
        """Number of this worker, unique among living workers."""
        return self._worker_slot

    def path(self, file_name: str) -> Path:
        """Return the path of a file shared by all workers of the same parent."""
        return self._workers_folder / file_name

    @property
    def replica_name(self) -> str:
        """Name shared by all workers of the same parent."""
        return f"{socket.gethostname()}-{self._workers_folder.name.removeprefix('larder-')}"

    async def open(self, render_metrics: Callable[[], bytes]) -> None:
        """Start answering peers."""
        self._render_metrics = render_metrics
        socket_path = self._workers_folder / f"{self._worker_slot}.sock"
        self._server = await asyncio.start_unix_server(self._serve_counts, socket_path)

    async def aclose(self) -> None:
        """Stop answering peers, and remove the socket's file."""
        if self._server is not None:
            self._server.close()
            (self._workers_folder / f"{self._worker_slot}.sock").unlink(missing_ok=True)

    async def exposition(self) -> bytes:
        """Return the metrics of every worker that answers in time, each series with the label `worker`."""
        peer_paths = [
            peer_path for peer_path in self._workers_folder.glob("*.sock") if peer_path.stem != str(self._worker_slot)
        ]
        peer_texts = await asyncio.gather(*map(_read_counts, peer_paths))
        text_by_slot = {peer_path.stem: text for peer_path, text in zip(peer_paths, peer_texts, strict=True) if text}
        text_by_slot[str(self._worker_slot)] = self._render_metrics()
        return merge_expositions(dict(sorted(text_by_slot.items(), key=lambda slot_and_text: int(slot_and_text[0]))))

    async def _serve_counts(self, _reader: StreamReader, writer: StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            writer.write(self._render_metrics())
            async with asyncio.timeout(_PEER_TIMEOUT_S):
                await writer.drain()
        writer.close()


async def _read_counts(socket_path: Path) -> bytes:
    """Return the metrics of a peer; empty if it died or hangs."""
    writer: StreamWriter | None = None
    try:
        async with asyncio.timeout(_PEER_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(socket_path)
            exposition_text = bytearray()
            while len(exposition_text) <= _PEER_TEXT_BYTES_MAX and (text_chunk := await reader.read(1 << 16)):
                exposition_text += text_chunk
    except (OSError, TimeoutError):
        return b""
    finally:
        if writer is not None:
            writer.close()
    # A worker that died while sending may have sent half a line.
    return (
        bytes(exposition_text)
        if len(exposition_text) <= _PEER_TEXT_BYTES_MAX and exposition_text.endswith(b"\n")
        else b""
    )


def merge_expositions(text_by_worker: Mapping[str, bytes]) -> bytes:
    """Merge expositions (text format 0.0.4) by worker into one: each family once, with the series of all workers."""
    head_lines_by_family: dict[bytes, list[bytes]] = {}
    sample_lines_by_family: dict[bytes, list[bytes]] = {}
    for worker, text in text_by_worker.items():
        worker_label = b'worker="%s"' % worker.encode()
        family_name = b""
        head_lines: list[bytes] = []
        for worker_line in text.splitlines():
            if worker_line.startswith(b"# HELP "):
                family_name, head_lines = worker_line.split(b" ", 3)[2], []
                head_lines_by_family.setdefault(family_name, head_lines)
            if worker_line.startswith(b"#"):
                head_lines.append(worker_line)
            else:
                sample_lines_by_family.setdefault(family_name, []).append(_with_label(worker_line, worker_label))
    merged_lines = [
        line for family, head in head_lines_by_family.items() for line in head + sample_lines_by_family.get(family, [])
    ]
    return b"".join(line + b"\n" for line in merged_lines)


def _with_label(sample_line: bytes, worker_label: bytes) -> bytes:
    metric_name, opening_brace, labels_and_value = sample_line.partition(b"{")
    if opening_brace and b" " not in metric_name:
        return b"%s{%s%s%s" % (
            metric_name,
            worker_label,
            b"" if labels_and_value.startswith(b"}") else b",",
            labels_and_value,
        )
    metric_name, _, sample_value = sample_line.partition(b" ")
    return b"%s{%s} %s" % (metric_name, worker_label, sample_value)

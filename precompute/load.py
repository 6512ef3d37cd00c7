"""Bulk load: stream page files into Redis, a bounded pipeline at a time, resumable per part."""

import mmap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import redis
import xxhash

from cache.errors import CorruptArtefact
from cache.keys import Keyspace
from cache.manifest import Manifest, Table, TablePart

Progress = Callable[[int], None]
RETIRE_BATCH = 64
UNANSWERED = 2


@dataclass(frozen=True, slots=True)
class Part:
    """One shard of one table: the unit of loading, verifying and resuming."""

    table: Table
    number: int

    @property
    def pages(self) -> TablePart:
        """Its entry in the manifest."""
        return self.table.parts[self.number]

    @property
    def name(self) -> str:
        """Its field in the generation's `loaded` hash."""
        return f"{self.table.name}/{self.number}"


def parts_of(manifest: Manifest) -> list[Part]:
    """All parts of all tables."""
    return [
        Part(table, number)
        for table in manifest.tables.values()
        for number in range(len(table.parts))
    ]


def page_keys(keys: Keyspace, manifest: Manifest) -> Iterator[str]:
    """Every page key of a generation, from the manifest alone: no SCAN."""
    for table in manifest.tables.values():
        for page in range(table.pages):
            yield keys.page(manifest.generation, table.name, page)


def load_part(
    client: "redis.Redis",
    keys: Keyspace,
    manifest: Manifest,
    root: Path,
    part: Part,
    *,
    chunk_bytes: int = 1 << 20,
    progress: Progress = lambda _bytes: None,
) -> bool:
    """Stream a part's pages, then mark it loaded; False when it was wholly there. `root` is the generation's folder.

    A page is one `SET`, so re-doing a page after a crash is harmless; the mark is written last.
    """
    mark = f"{keys.loaded(manifest.generation)}"
    if client.hget(mark, part.name) == part.pages.sums.sha256.encode():
        return False
    entry = part.pages
    if not entry.count:
        client.hset(mark, part.name, part.pages.sums.sha256)
        return True
    with (
        (root / entry.file.path).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages,
    ):
        if len(pages) != entry.count * part.table.layout.size_bytes:
            raise CorruptArtefact(
                f"{entry.file.path} has {len(pages)} bytes for {entry.count} records"
            )
        at_once = max(1, chunk_bytes // part.table.page_bytes)
        names = [
            keys.page(manifest.generation, part.table.name, entry.first_page + page).encode()
            for page in range(entry.pages)
        ]
        with memoryview(pages) as view:
            _stream(client, names, view, part.table.page_bytes, at_once, progress)
    client.hset(mark, part.name, part.pages.sums.sha256)
    return True


def _stream(
    client: "redis.Redis",
    names: Sequence[bytes],
    pages: memoryview,
    size: int,
    at_once: int,
    progress: Progress,
) -> None:
    """Send each page from where it is mapped: redis-py's own packing would copy every one of them twice.

    At most `UNANSWERED` chunks wait for their replies, so Redis always has the next one and memory is bounded.
    """
    pool = client.connection_pool
    connection: Any = pool.get_connection()
    try:
        waiting: deque[tuple[int, int]] = deque()
        for first in range(0, len(names), at_once):
            chunk = names[first : first + at_once]
            values = [
                pages[page * size : (page + 1) * size] for page in range(first, first + len(chunk))
            ]
            pieces: list[bytes | memoryview] = []
            for name, value in zip(chunk, values, strict=True):
                head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(value))
                pieces += (head, value, b"\r\n")
            connection.send_packed_command(pieces, check_health=False)
            waiting.append((len(chunk), sum(len(value) for value in values)))
            for value in values:
                value.release()
            if len(waiting) == UNANSWERED:
                _await_one(connection, waiting, progress)
        while waiting:
            _await_one(connection, waiting, progress)
    except BaseException:
        # Replies may still be on their way: this connection must never serve another command.
        connection.disconnect()
        raise
    finally:
        pool.release(connection)


def _await_one(connection: Any, waiting: deque[tuple[int, int]], progress: Progress) -> None:
    replies, size_bytes = waiting.popleft()
    for _ in range(replies):
        connection.read_response()
    progress(size_bytes)


class BadPage(CorruptArtefact):
    """A page that is missing from Redis or differs from its checksum; loading again repairs it."""


def verify_part(
    client: "redis.Redis",
    keys: Keyspace,
    manifest: Manifest,
    root: Path,
    part: Part,
    *,
    chunk_bytes: int = 1 << 20,
    progress: Progress = lambda _bytes: None,
) -> int:
    """Read every page back from Redis and compare checksums; pages checked. Raises CorruptArtefact naming the page.

    A bad page takes its part's `loaded` mark along, so that the next `load` sends the part again.
    """
    try:
        return _verify(
            client, keys, manifest, root, part, chunk_bytes=chunk_bytes, progress=progress
        )
    except BadPage:
        client.hdel(keys.loaded(manifest.generation), part.name)
        raise


def _verify(
    client: "redis.Redis",
    keys: Keyspace,
    manifest: Manifest,
    root: Path,
    part: Part,
    *,
    chunk_bytes: int,
    progress: Progress,
) -> int:
    entry = part.pages
    sums = np.fromfile(root / entry.sums.path, "<u8")
    if len(sums) != entry.pages:
        raise CorruptArtefact(
            f"{entry.sums.path} holds {len(sums)} checksums for {entry.pages} pages"
        )
    at_once = max(1, chunk_bytes // part.table.page_bytes)
    for first in range(0, entry.pages, at_once):
        numbers = range(first, min(first + at_once, entry.pages))
        names = [
            keys.page(manifest.generation, part.table.name, entry.first_page + page)
            for page in numbers
        ]
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.get(name)
        found: list[Any] = pipeline.execute()
        for page, name, value in zip(numbers, names, found, strict=True):
            if value is None:
                raise BadPage(f"page {name} is not in Redis; run load again", page=name)
            if xxhash.xxh3_64_intdigest(value) != int(sums[page]):
                raise BadPage(f"page {name} differs from its checksum; run load again", page=name)
            progress(len(value))
    return entry.pages


def unlink_pages(client: "redis.Redis", keys: Keyspace, manifest: Manifest) -> int:
    """Remove a generation's pages in small batches, so that no reader waits long; keys removed."""
    removed = 0
    batch: list[str] = []
    for name in page_keys(keys, manifest):
        batch.append(name)
        if len(batch) == RETIRE_BATCH:
            removed += int(client.unlink(*batch))
            batch.clear()
    removed += int(client.unlink(*batch, keys.loaded(manifest.generation)))
    return removed


def total_bytes(manifest: Manifest) -> int:
    """Payload of all pages."""
    return sum(part.pages.file.size_bytes for part in parts_of(manifest))

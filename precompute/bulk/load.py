"""Bulk load: page files streamed into Redis, resumable by part and page; and the removal, page by page."""

import mmap
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import redis
from numpy.typing import NDArray

from cache.errors import CorruptArtefact
from cache.format.manifest import Manifest, Table, TablePart
from cache.format.redis_keys import Keyspace
from cache.l2.resp import checked_reply, refusing_unreadable
from cache.l2.sync_clients import BulkConnections, group_keys_by_server
from precompute.bulk.governor import Governor

UNANSWERED_CHUNKS = 2
"""Pages (or chunks of them) that may wait for their replies: Redis stays busy, memory is bounded."""

BytesProgress = Callable[[int], None]
"""Callback with the bytes of pages loaded or read since its last call."""

RETIRE_BATCH = 64
NOTED_BYTES = 16 << 20
"""Bytes loaded between two notes of progress: at most these, and the bytes in flight, are lost in a crash."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a generation's pages, one shard of one table: the unit of loading, verifying and resuming."""

    table: Table
    number: int

    @property
    def pages(self) -> TablePart:
        """Manifest entry of the part."""
        return self.table.parts[self.number]

    @property
    def name(self) -> str:
        """Field of the part in the generation's `loaded` hash."""
        return f"{self.table.name}/{self.number}"

    @property
    def progress(self) -> str:
        """Field with the number of pages loaded so far, during a load."""
        return f"{self.name}/pages"

    @property
    def read(self) -> str:
        """Field with the servers from which the whole part was read back, during a verification."""
        return f"{self.name}/read"

    @property
    def loaded_digest(self) -> bytes:
        """Value of the part's field once it is completely loaded."""
        return self.pages.sums.sha256.encode()

    def size_of(self, page: int) -> int:
        """Return the bytes of the page with this number (from 0)."""
        part_bytes = self.pages.count * self.table.layout.size_bytes
        return min(self.table.page_bytes, part_bytes - page * self.table.page_bytes)

    def key(self, keys: Keyspace, generation: str, page: int) -> str:
        """Return the Redis key of the page with this number (from 0)."""
        return keys.page(generation, self.table.name, self.pages.first_page + page)

    def read_sums(self, root: Path) -> NDArray[np.uint64]:
        """Read uint64[pages], each page's checksum; raise CorruptArtefact if the file does not fit the manifest."""
        sums = np.fromfile(root / self.pages.sums.path, "<u8")
        if len(sums) != self.pages.pages:
            raise CorruptArtefact(
                f"{self.pages.sums.path} holds {len(sums)} checksums for {self.pages.pages} pages"
            )
        return sums


def parts_of(manifest: Manifest) -> list[Part]:
    """Return all parts of all tables."""
    return [
        Part(table, number)
        for table in manifest.stored_tables.values()
        for number in range(len(table.parts))
    ]


def page_keys(keys: Keyspace, manifest: Manifest) -> Iterator[str]:
    """Yield every page key of a generation, from the manifest alone: no SCAN."""
    for table in manifest.stored_tables.values():
        for page in range(table.pages):
            yield keys.page(manifest.generation, table.name, page)


def total_bytes(manifest: Manifest) -> int:
    """Return the payload of all pages in bytes."""
    return sum(part.pages.file.size_bytes for part in parts_of(manifest))


def total_pages(manifest: Manifest) -> int:
    """Return the number of pages of all tables."""
    return sum(table.pages for table in manifest.stored_tables.values())


def load_part(
    client: "redis.Redis",
    keys: Keyspace,
    manifest: Manifest,
    root: Path,
    part: Part,
    *,
    chunk_bytes: int = 1 << 20,
    progress: BytesProgress = lambda _bytes: None,
    governor: Governor | None = None,
) -> bool:
    """Stream a part's pages, then mark it loaded; False if it was complete. `root` is the generation's folder.

    Whole or in pieces, a page can be written again without harm, since the generation is not live. The mark is written
    last; pages in an earlier attempt's note are not sent again.
    """
    loaded_key = keys.loaded(manifest.generation)
    if client.hget(loaded_key, part.name) == part.loaded_digest:
        return False
    client.hdel(loaded_key, part.read)
    entry = part.pages
    if not entry.count:
        client.hset(loaded_key, part.name, part.loaded_digest.decode())
        return True
    loaded_count = loaded_pages(client, keys, manifest, part)
    noted_at, unnoted = loaded_count, 0
    progress(sum(part.size_of(page) for page in range(loaded_count)))

    def landed(pages: int, size_bytes: int) -> None:
        nonlocal loaded_count, noted_at, unnoted
        loaded_count, unnoted = loaded_count + pages, unnoted + size_bytes
        progress(size_bytes)
        if unnoted >= NOTED_BYTES and loaded_count > noted_at:
            client.hset(loaded_key, part.progress, f"{part.loaded_digest.decode()} {loaded_count}")
            noted_at, unnoted = loaded_count, 0

    with (
        (root / entry.file.path).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages,
    ):
        if len(pages) != entry.count * part.table.layout.size_bytes:
            raise CorruptArtefact(
                f"{entry.file.path} has {len(pages)} bytes for {entry.count} records"
            )
        names = [part.key(keys, manifest.generation, page).encode() for page in range(entry.pages)]
        with (
            memoryview(pages) as view,
            PageStream(client, governor, chunk_bytes=chunk_bytes, landed=landed) as stream,
        ):
            stream.send(names, view, loaded_count, part.table.page_bytes)
    mark_loaded(client, loaded_key, part)
    return True


def mark_loaded(client: "redis.Redis", noted: str, part: Part) -> None:
    """Mark a part loaded in place of the note of its progress."""
    with client.pipeline(transaction=True) as pipeline:
        pipeline.hset(noted, part.name, part.loaded_digest.decode())
        pipeline.hdel(noted, part.progress)
        with refusing_unreadable("EXEC", "a list of replies"):
            pipeline.execute()


def loaded_pages(client: "redis.Redis", keys: Keyspace, manifest: Manifest, part: Part) -> int:
    """Return the number of an unfinished part's first pages that are known to be in Redis."""
    progress_note = client.hget(keys.loaded(manifest.generation), part.progress)
    if not isinstance(progress_note, bytes):
        return 0
    part_mark, _, count = progress_note.partition(b" ")
    return (
        min(int(count), part.pages.pages)
        if part_mark == part.loaded_digest and count.isdigit()
        else 0
    )


def unlink_pages(
    client: "redis.Redis", keys: Keyspace, manifest: Manifest, *, governor: Governor | None = None
) -> int:
    """Remove a generation's pages in small batches, so that no reader waits long; return the number of keys.

    Redis frees a string at once, however big, so with readers around the pages go one at a time, each at the
    price of a piece: about as long does it take Redis.
    """
    removed = 0
    batch: list[str] = []
    for part in parts_of(manifest):
        for page in range(part.pages.pages):
            batch.append(part.key(keys, manifest.generation, page))
            piece = None if governor is None else governor.piece_bytes
            if governor is not None:
                size = part.size_of(page)
                governor.pace(size if piece is None else min(size, piece))
            if piece is not None or len(batch) == RETIRE_BATCH:
                removed += int(client.unlink(*batch))
                batch.clear()
    removed += int(client.unlink(*batch, keys.loaded(manifest.generation)))
    return removed


class _Chunk(NamedTuple):
    """Pages that were sent and wait for their replies, by connection."""

    pages_by_connection: list[tuple[Any, list[int]]]
    pages: int
    size_bytes: int


class PageStream(BulkConnections):
    """Sender of pages in order; calls `landed(pages, bytes)` as Redis confirms them."""

    def __init__(
        self,
        client: "redis.Redis",
        governor: Governor | None,
        *,
        chunk_bytes: int,
        landed: Callable[[int, int], None],
    ) -> None:
        super().__init__()
        self._client, self._governor, self._chunk_bytes = client, governor, chunk_bytes
        self._landed = landed
        self._waiting: deque[_Chunk] = deque()

    def send(self, names: list[bytes], pages: memoryview, first: int, size: int) -> None:
        """Send the pages from number `first` on; page n is `pages[n * size:]`, the last one may be shorter."""

        def resend_page(page: int) -> None:
            with pages[page * size : (page + 1) * size] as resent_page:
                self._client.set(names[page], resent_page)

        page = first
        while page < len(names):
            piece = None if self._governor is None else self._governor.piece_bytes
            if self._governor is None or piece is None:
                page += self._send_whole(names, pages, page, size)
            else:
                with pages[page * size : (page + 1) * size] as page_view:
                    self._send_paced(self._governor, names[page], page, page_view, piece)
                page += 1
            if len(self._waiting) >= UNANSWERED_CHUNKS:
                self._await_chunk(resend_page)
        while self._waiting:
            self._await_chunk(resend_page)

    def _send_whole(self, names: list[bytes], pages: memoryview, page: int, size: int) -> int:
        """Send a chunk of `SET`s directly from the mapped pages: packing would copy each of them twice."""
        chunk = names[page : page + max(1, self._chunk_bytes // size)]
        with ExitStack() as views:  # an error must not leave the mapped file in use
            values = [
                views.enter_context(pages[page_number * size : (page_number + 1) * size])
                for page_number in range(page, page + len(chunk))
            ]
            sent_bytes = sum(len(value) for value in values)
            if self._governor is not None:
                self._governor.pace(sent_bytes)
            sent_pages = []
            for server, positions in group_keys_by_server(self._client, chunk):
                packed: list[bytes | memoryview] = []
                for position in positions:
                    value = values[position]
                    packed += (_head_of_set(chunk[position], len(value)), value, b"\r\n")
                connection = self.connection_to(server)
                connection.send_packed_command(packed, check_health=False)
                sent_pages.append((connection, [page + position for position in positions]))
        self._track_chunk(_Chunk(sent_pages, len(chunk), sent_bytes))
        return len(chunk)

    def _send_paced(
        self, governor: Governor, name: bytes, number: int, page: memoryview, piece: int
    ) -> None:
        """Send a page as one `SET` in paced pieces.

        Redis takes in what has come, serves others, and keeps the finished buffer as the value: it neither waits for
        the rest nor copies it. A `SETRANGE` per piece costs a round trip each, and zeroes the whole value first.
        """
        size = len(page)
        ((server, _),) = group_keys_by_server(self._client, [name])
        connection = self.connection_to(server)
        for at in range(0, size, piece):
            with page[at : at + piece] as value:
                governor.pace(len(value))
                head = _head_of_set(name, size) if at == 0 else b""
                end = b"\r\n" if at + piece >= size else b""
                # One buffer, one packet: at this size a copy costs less than three system calls.
                packet = b"".join((head, value, end))
            connection.send_packed_command([packet], check_health=False)
        self._track_chunk(_Chunk([(connection, [number])], 1, size))

    def _track_chunk(self, chunk: _Chunk) -> None:
        self._waiting.append(chunk)

    def _await_chunk(self, resend_page: Callable[[int], None]) -> None:
        """Wait for every reply to the oldest chunk; send a redirected page again."""
        chunk = self._waiting.popleft()
        for connection, pages in chunk.pages_by_connection:
            for page in pages:
                try:
                    checked_reply("SET", connection.read_response())
                except redis.exceptions.AskError:  # MOVED is one, too
                    resend_page(page)
        self._landed(chunk.pages, chunk.size_bytes)


def _head_of_set(name: bytes, size: int) -> bytes:
    return b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, size)

"""Bulk load: page files streamed into Redis, resumable by part and page; and their removal, page by page."""

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

UNANSWERED_CHUNKS_MAX = 2
"""Pages (or chunks of them) that may wait for their replies, which keeps Redis busy and bounds memory."""

BytesProgress = Callable[[int], None]
"""Callback with the bytes of pages that were loaded or read since its last call."""

UNLINK_BATCH_KEYS = 64
PROGRESS_NOTE_BYTES = 16 << 20
"""Bytes loaded between two notes of progress: a crash loses at most these, and the bytes in flight."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a generation's pages, one shard of one table: the unit of loading, verifying and resuming."""

    table: Table
    shard: int

    @property
    def pages(self) -> TablePart:
        """Manifest entry of the part."""
        return self.table.parts[self.shard]

    @property
    def loaded_field(self) -> str:
        """Name of the part's field in the generation's `loaded` hash."""
        return f"{self.table.name}/{self.shard}"

    @property
    def progress_field(self) -> str:
        """Name of the field with the number of pages loaded so far, during a load."""
        return f"{self.loaded_field}/pages"

    @property
    def read_back_field(self) -> str:
        """Name of the field with the servers from which the whole part was read back, during a verification."""
        return f"{self.loaded_field}/read"

    @property
    def loaded_digest(self) -> bytes:
        """Value of the part's field after a complete load."""
        return self.pages.sums.sha256.encode()

    def page_size_bytes(self, page_number: int) -> int:
        """Return the bytes of the page with this number (from 0)."""
        part_bytes = self.pages.count * self.table.layout.size_bytes
        return min(self.table.page_bytes, part_bytes - page_number * self.table.page_bytes)

    def page_key(self, keys: Keyspace, generation: str, page_number: int) -> str:
        """Return the Redis key of the page with this number (from 0)."""
        return keys.page(generation, self.table.name, self.pages.first_page + page_number)

    def read_page_checksums(self, root: Path) -> NDArray[np.uint64]:
        """Read uint64[pages], each page's checksum; raise CorruptArtefact if the file does not fit the manifest."""
        sums = np.fromfile(root / self.pages.sums.path, "<u8")
        if len(sums) != self.pages.pages:
            raise CorruptArtefact(f"{self.pages.sums.path} holds {len(sums)} checksums for {self.pages.pages} pages")
        return sums


def parts_of(manifest: Manifest) -> list[Part]:
    """Return all parts of all tables."""
    return [
        Part(table, part_number) for table in manifest.stored_tables.values() for part_number in range(len(table.parts))
    ]


def page_keys(keys: Keyspace, manifest: Manifest) -> Iterator[str]:
    """Yield every page key of a generation, from the manifest alone: no SCAN."""
    for table in manifest.stored_tables.values():
        for page_number in range(table.page_count):
            yield keys.page(manifest.generation, table.name, page_number)


def total_bytes(manifest: Manifest) -> int:
    """Return the payload of all pages in bytes."""
    return sum(part.pages.file.size_bytes for part in parts_of(manifest))


def total_pages(manifest: Manifest) -> int:
    """Return the number of pages of all tables."""
    return sum(table.page_count for table in manifest.stored_tables.values())


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
    """Stream a part's pages, then mark it loaded; return False if it was already. `root` is the generation's folder.

    Writing a page again is harmless, since the generation is not live. The mark is written last; pages that an earlier
    attempt noted as loaded are not sent again.
    """
    loaded_key = keys.loaded_parts(manifest.generation)
    if client.hget(loaded_key, part.loaded_field) == part.loaded_digest:
        return False
    client.hdel(loaded_key, part.read_back_field)
    part_entry = part.pages
    if not part_entry.count:
        client.hset(loaded_key, part.loaded_field, part.loaded_digest.decode())
        return True
    loaded_count = count_loaded_pages(client, keys, manifest, part)
    noted_count, unnoted_bytes = loaded_count, 0
    progress(sum(part.page_size_bytes(page) for page in range(loaded_count)))

    def note_landed_pages(landed_count: int, size_bytes: int) -> None:
        nonlocal loaded_count, noted_count, unnoted_bytes
        loaded_count, unnoted_bytes = loaded_count + landed_count, unnoted_bytes + size_bytes
        progress(size_bytes)
        if unnoted_bytes >= PROGRESS_NOTE_BYTES and loaded_count > noted_count:
            client.hset(loaded_key, part.progress_field, f"{part.loaded_digest.decode()} {loaded_count}")
            noted_count, unnoted_bytes = loaded_count, 0

    with (
        (root / part_entry.file.path).open("rb") as pages_file,
        mmap.mmap(pages_file.fileno(), 0, access=mmap.ACCESS_READ) as mapped_pages,
    ):
        if len(mapped_pages) != part_entry.count * part.table.layout.size_bytes:
            raise CorruptArtefact(
                f"{part_entry.file.path} has {len(mapped_pages)} bytes for {part_entry.count} records"
            )
        key_names = [part.page_key(keys, manifest.generation, page).encode() for page in range(part_entry.pages)]
        with (
            memoryview(mapped_pages) as pages_view,
            PageStream(client, governor, chunk_bytes=chunk_bytes, note_landed_pages=note_landed_pages) as page_stream,
        ):
            page_stream.send(key_names, pages_view, loaded_count, part.table.page_bytes)
    mark_loaded(client, loaded_key, part)
    return True


def mark_loaded(client: "redis.Redis", loaded_key: str, part: Part) -> None:
    """Replace the note of a part's progress by the mark that it is loaded."""
    with client.pipeline(transaction=True) as pipeline:
        pipeline.hset(loaded_key, part.loaded_field, part.loaded_digest.decode())
        pipeline.hdel(loaded_key, part.progress_field)
        with refusing_unreadable("EXEC", "a list of replies"):
            pipeline.execute()


def count_loaded_pages(client: "redis.Redis", keys: Keyspace, manifest: Manifest, part: Part) -> int:
    """Return the number of an unfinished part's first pages that are known to be in Redis."""
    progress_note = client.hget(keys.loaded_parts(manifest.generation), part.progress_field)
    if not isinstance(progress_note, bytes):
        return 0
    part_mark, _, count = progress_note.partition(b" ")
    return min(int(count), part.pages.pages) if part_mark == part.loaded_digest and count.isdigit() else 0


def unlink_pages(client: "redis.Redis", keys: Keyspace, manifest: Manifest, *, governor: Governor | None = None) -> int:
    """Remove a generation's pages in small batches, so that no reader waits long; return the number of keys.

    Redis frees a string at once, whatever its size. With readers, pages are removed one at a time, each paced like a
    piece, since freeing a page takes Redis about as long.
    """
    removed_key_count = 0
    key_batch: list[str] = []
    for part in parts_of(manifest):
        for page_number in range(part.pages.pages):
            key_batch.append(part.page_key(keys, manifest.generation, page_number))
            piece_bytes = None if governor is None else governor.piece_bytes
            if governor is not None:
                page_size_bytes = part.page_size_bytes(page_number)
                governor.pace(page_size_bytes if piece_bytes is None else min(page_size_bytes, piece_bytes))
            if piece_bytes is not None or len(key_batch) == UNLINK_BATCH_KEYS:
                removed_key_count += int(client.unlink(*key_batch))
                key_batch.clear()
    removed_key_count += int(client.unlink(*key_batch, keys.loaded_parts(manifest.generation)))
    return removed_key_count


class _SentChunk(NamedTuple):
    """Pages that were sent and wait for their replies, with their connection."""

    page_numbers_by_connection: list[tuple[Any, list[int]]]
    page_count: int
    size_bytes: int


class PageStream(BulkConnections):
    """Sender of pages in order; calls `note_landed_pages(pages, bytes)` as Redis confirms them."""

    def __init__(
        self,
        client: "redis.Redis",
        governor: Governor | None,
        *,
        chunk_bytes: int,
        note_landed_pages: Callable[[int, int], None],
    ) -> None:
        super().__init__()
        self._client, self._governor, self._chunk_bytes = client, governor, chunk_bytes
        self._note_landed_pages = note_landed_pages
        self._unanswered_chunks: deque[_SentChunk] = deque()

    def send(self, key_names: list[bytes], all_pages: memoryview, first_page_number: int, page_size_bytes: int) -> None:
        """Send pages from `first_page_number` on; page n starts at n * `page_size_bytes`; the last may be shorter."""

        def resend_page(page_number: int) -> None:
            with all_pages[page_number * page_size_bytes : (page_number + 1) * page_size_bytes] as resent_page:
                self._client.set(key_names[page_number], resent_page)

        page_number = first_page_number
        while page_number < len(key_names):
            piece_bytes = None if self._governor is None else self._governor.piece_bytes
            if self._governor is None or piece_bytes is None:
                page_number += self._send_whole(key_names, all_pages, page_number, page_size_bytes)
            else:
                with all_pages[page_number * page_size_bytes : (page_number + 1) * page_size_bytes] as page_view:
                    self._send_paced(self._governor, key_names[page_number], page_number, page_view, piece_bytes)
                page_number += 1
            if len(self._unanswered_chunks) >= UNANSWERED_CHUNKS_MAX:
                self._await_chunk(resend_page)
        while self._unanswered_chunks:
            self._await_chunk(resend_page)

    def _send_whole(
        self, key_names: list[bytes], all_pages: memoryview, first_page_number: int, page_size_bytes: int
    ) -> int:
        """Send a chunk of `SET`s directly from the mapped pages: packing commands would copy each page twice."""
        chunk_keys = key_names[first_page_number : first_page_number + max(1, self._chunk_bytes // page_size_bytes)]
        with ExitStack() as view_stack:  # an error must not leave the mapped file open
            page_views = [
                view_stack.enter_context(all_pages[page_number * page_size_bytes : (page_number + 1) * page_size_bytes])
                for page_number in range(first_page_number, first_page_number + len(chunk_keys))
            ]
            sent_bytes = sum(len(page_view) for page_view in page_views)
            if self._governor is not None:
                self._governor.pace(sent_bytes)
            sent_pages = []
            for server, positions in group_keys_by_server(self._client, chunk_keys):
                command_parts: list[bytes | memoryview] = []
                for position in positions:
                    page_view = page_views[position]
                    command_parts += (_set_command_head(chunk_keys[position], len(page_view)), page_view, b"\r\n")
                connection = self.connection_to(server)
                connection.send_packed_command(command_parts, check_health=False)
                sent_pages.append((connection, [first_page_number + position for position in positions]))
        self._track_chunk(_SentChunk(sent_pages, len(chunk_keys), sent_bytes))
        return len(chunk_keys)

    def _send_paced(
        self, governor: Governor, page_key: bytes, page_number: int, page_view: memoryview, piece_bytes: int
    ) -> None:
        """Send a page as one `SET` in paced pieces.

        Redis reads what has arrived, serves other clients, and keeps the complete buffer as the value: it neither waits
        for the rest nor copies the value. A `SETRANGE` per piece would cost a round trip each, and zero the whole value
        first.
        """
        page_size_bytes = len(page_view)
        ((server, _),) = group_keys_by_server(self._client, [page_key])
        connection = self.connection_to(server)
        for piece_start in range(0, page_size_bytes, piece_bytes):
            with page_view[piece_start : piece_start + piece_bytes] as piece_view:
                governor.pace(len(piece_view))
                command_head = _set_command_head(page_key, page_size_bytes) if piece_start == 0 else b""
                command_end = b"\r\n" if piece_start + piece_bytes >= page_size_bytes else b""
                # One buffer and one packet: at this size a copy costs less than three system calls.
                packet = b"".join((command_head, piece_view, command_end))
            connection.send_packed_command([packet], check_health=False)
        self._track_chunk(_SentChunk([(connection, [page_number])], 1, page_size_bytes))

    def _track_chunk(self, chunk: _SentChunk) -> None:
        self._unanswered_chunks.append(chunk)

    def _await_chunk(self, resend_page: Callable[[int], None]) -> None:
        """Wait for every reply to the oldest chunk; send a redirected page again."""
        chunk = self._unanswered_chunks.popleft()
        for connection, page_numbers in chunk.page_numbers_by_connection:
            for page_number in page_numbers:
                try:
                    checked_reply("SET", connection.read_response())
                except redis.exceptions.AskError:  # MovedError is a subclass
                    resend_page(page_number)
        self._note_landed_pages(chunk.page_count, chunk.size_bytes)


def _set_command_head(page_key: bytes, value_size_bytes: int) -> bytes:
    return b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(page_key), page_key, value_size_bytes)

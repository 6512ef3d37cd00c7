"""Readback: pages read from Redis in paced pieces and held against their checksums."""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, cast

import redis
import xxhash

from cache.errors import CorruptArtefact
from cache.format.manifest import Manifest
from cache.format.redis_keys import Keyspace
from cache.l2.resp import checked_reply
from cache.l2.sync_clients import BulkConnections, group_keys_by_server
from precompute.bulk.governor import Governor
from precompute.bulk.load import BytesProgress, Part

UNANSWERED_PIECES = 8
"""Pieces that may wait for their replies: without, the rate ends at a piece per round trip (16 KiB at 2 ms: 8 MB/s)."""

LENGTHS_AT_ONCE = 500


class PageDigest(NamedTuple):
    """A page as it was read: its number, digest (None: it is not there) and length."""

    page: int
    digest: int | None
    size_bytes: int


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
    progress: BytesProgress = lambda _bytes: None,
    governor: Governor | None = None,
) -> int:
    """Read every page back from Redis and compare checksums; pages checked. Raises CorruptArtefact naming the page.

    A bad page takes its part's `loaded` mark along, so that the next `load` sends the part again.
    """
    damaged_pages = bad_pages(
        client, keys, manifest, root, part,
        chunk_bytes=chunk_bytes, progress=progress, governor=governor,
    )  # fmt: skip
    with closing(damaged_pages):
        damaged_page = next(damaged_pages, None)
    if damaged_page is not None:
        client.hdel(keys.loaded(manifest.generation), part.name, part.progress)
        name = part.key(keys, manifest.generation, damaged_page[0])
        raise BadPage(f"page {name} {damaged_page[1]}; run load again", page=name)
    return part.pages.pages


def bad_pages(
    client: "redis.Redis",
    keys: Keyspace,
    manifest: Manifest,
    root: Path,
    part: Part,
    *,
    chunk_bytes: int = 1 << 20,
    progress: BytesProgress = lambda _bytes: None,
    governor: Governor | None = None,
) -> Generator[tuple[int, str]]:
    """(number within the part, complaint) of each page that is not as its checksum says."""
    sums = part.read_sums(root)
    pages = _read_pages(client, keys, manifest, part, chunk_bytes=chunk_bytes, governor=governor)
    with closing(pages):
        for page, digest, size_bytes in pages:
            if digest is None:
                yield page, "is not in Redis"
            elif digest != int(sums[page]):
                yield page, "differs from its checksum"
            progress(size_bytes)


def _read_pages(
    client: "redis.Redis",
    keys: Keyspace,
    manifest: Manifest,
    part: Part,
    *,
    chunk_bytes: int,
    governor: Governor | None,
) -> Generator[PageDigest]:
    """Every page of a part: in pieces while there are readers, some pages at once else."""
    names = [part.key(keys, manifest.generation, page).encode() for page in range(part.pages.pages)]
    at_once, page = max(1, chunk_bytes // part.table.page_bytes), 0
    while page < len(names):
        if governor is not None and governor.piece_bytes is not None:
            with PieceReader(client, governor) as reader:
                while page < len(names) and (piece := governor.piece_bytes) is not None:
                    yield from reader.request_page(page, names[page], part.size_of(page), piece)
                    page += 1
                yield from reader.read_remaining()
        else:
            chunk = names[page : page + at_once]
            if governor is not None:
                governor.pace(len(chunk) * part.table.page_bytes)
                governor.own_reads(len(chunk))
            for number, value in enumerate(_values(client, chunk), page):
                digest = None if value is None else xxhash.xxh3_64_intdigest(value)
                yield PageDigest(number, digest, len(value or b""))
            page += len(chunk)


def _values(client: "redis.Redis", names: list[bytes]) -> list[bytes | None]:
    with client.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.get(name)
        values: list[bytes | None] = pipeline.execute()
    return values


def lengths(
    client: "redis.Redis", keys: Keyspace, manifest: Manifest, part: Part
) -> Iterator[tuple[int, int]]:
    """(number within the part, bytes in Redis) of every page; 0 for one that is not there."""
    for first in range(0, part.pages.pages, LENGTHS_AT_ONCE):
        numbers = range(first, min(first + LENGTHS_AT_ONCE, part.pages.pages))
        names = [
            part.key(keys, manifest.generation, page_number).encode() for page_number in numbers
        ]
        yield from zip(numbers, sizes(client, names), strict=True)


def sizes(client: "redis.Redis", names: Sequence[bytes]) -> list[int]:
    """Bytes of each of these values, 0 for one that is not there; one round trip to each server."""
    sizes_bytes = [0] * len(names)
    for server, positions in group_keys_by_server(client, names):
        strlens = _strlens(client, server, [names[position] for position in positions])
        for position, size_bytes in zip(positions, strlens, strict=True):
            sizes_bytes[position] = size_bytes
    return sizes_bytes


def _strlens(client: "redis.Redis", server: "redis.Redis", names: list[bytes]) -> list[int]:
    """Return the bytes of each value, by one packet: redis-py's pipeline would take seconds for a large generation."""
    packed = b"".join(b"*2\r\n$6\r\nSTRLEN\r\n$%d\r\n%b\r\n" % (len(name), name) for name in names)
    with BulkConnections() as connections:
        connection = connections.connection_to(server)
        connection.send_packed_command([packed], check_health=False)
        replies = [_reply(connection) for _ in names]
    return [
        int(cast(Any, client.strlen(name))) if reply is None else reply
        for name, reply in zip(names, replies, strict=True)
    ]


def _reply(connection: Any) -> int | None:
    """Reads an integer reply, None where another node of the cluster has to be asked."""
    try:
        return int(checked_reply("STRLEN", connection.read_response()))
    except redis.exceptions.AskError:  # MOVED is one, too
        return None


class _PieceRequest(NamedTuple):
    connection: Any
    page: int
    name: bytes
    start: int
    end: int
    ends_page: bool


class PieceReader(BulkConnections):
    """Pages in order of asking; a page comes back once its last piece is there."""

    def __init__(self, client: "redis.Redis", governor: Governor) -> None:
        super().__init__()
        self._client, self._governor = client, governor
        self._waiting: deque[_PieceRequest] = deque()
        self._digest, self._size_bytes = xxhash.xxh3_64(), 0

    def request_page(
        self, page: int, name: bytes, size_bytes: int, piece: int
    ) -> Iterator[PageDigest]:
        """Request a page of `size_bytes`; yield pages that came back meanwhile."""
        ((server, _),) = group_keys_by_server(self._client, [name])
        connection = self.connection_to(server)
        for start in range(0, size_bytes, piece):
            is_last = start + piece >= size_bytes
            # One byte too many of the last piece: a page that is longer than it should be is seen by it.
            end = size_bytes if is_last else start + piece - 1
            self._governor.pace(min(piece, size_bytes - start))
            self._governor.own_reads(1)
            connection.send_packed_command([_getrange(name, start, end)], check_health=False)
            self._waiting.append(_PieceRequest(connection, page, name, start, end, is_last))
            if len(self._waiting) > UNANSWERED_PIECES:
                yield from self._receive_piece()

    def read_remaining(self) -> Iterator[PageDigest]:
        """Yield the requested pages that have not come back yet."""
        while self._waiting:
            yield from self._receive_piece()

    def _receive_piece(self) -> Iterator[PageDigest]:
        piece_request = self._waiting.popleft()
        try:
            value: Any = checked_reply("GETRANGE", piece_request.connection.read_response())
        except redis.exceptions.AskError:  # MOVED is one, too
            value = self._client.getrange(
                piece_request.name.decode(), piece_request.start, piece_request.end
            )
        self._digest.update(value)
        self._size_bytes += len(value)
        if piece_request.ends_page:
            digest, size_bytes = self._digest.intdigest(), self._size_bytes
            self._digest, self._size_bytes = xxhash.xxh3_64(), 0
            yield PageDigest(piece_request.page, digest if size_bytes else None, size_bytes)


def _getrange(name: bytes, start: int, end: int) -> bytes:
    first, last = b"%d" % start, b"%d" % end
    return b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (
        len(name), name, len(first), first, len(last), last,
    )  # fmt: skip

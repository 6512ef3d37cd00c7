"""Readback: pages read from Redis in paced pieces and compared with their checksums."""

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

UNANSWERED_PIECES_MAX = 8
"""Pieces that may wait for replies: with one at a time the rate is a piece per round trip (16 KiB at 2 ms: 8 MB/s)."""

LENGTHS_PER_ROUND_TRIP = 500


class PageDigest(NamedTuple):
    """Page as read from Redis: its number, digest (None: missing) and length."""

    page_number: int
    page_digest: int | None
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
    """Read every page back from Redis and compare checksums; return the number of pages.

    Raises CorruptArtefact naming the first bad page. Its part's `loaded` mark is removed, so that the next `load` sends
    the part again.
    """
    damaged_pages = find_bad_pages(
        client, keys, manifest, root, part,
        chunk_bytes=chunk_bytes, progress=progress, governor=governor,
    )  # fmt: skip
    with closing(damaged_pages):
        damaged_page = next(damaged_pages, None)
    if damaged_page is not None:
        client.hdel(keys.loaded_parts(manifest.generation), part.loaded_field, part.progress_field)
        page_key = part.page_key(keys, manifest.generation, damaged_page[0])
        raise BadPage(f"page {page_key} {damaged_page[1]}; run load again", page=page_key)
    return part.pages.pages


def find_bad_pages(
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
    """Yield (number within the part, complaint) for each page that is missing or differs from its checksum."""
    checksums = part.read_page_checksums(root)
    page_digests = _read_pages(client, keys, manifest, part, chunk_bytes=chunk_bytes, governor=governor)
    with closing(page_digests):
        for page_number, digest, size_bytes in page_digests:
            if digest is None:
                yield page_number, "is not in Redis"
            elif digest != int(checksums[page_number]):
                yield page_number, "differs from its checksum"
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
    """Yield the digest of every page of a part: read in pieces if there are readers, else several pages at once."""
    key_names = [
        part.page_key(keys, manifest.generation, page_number).encode() for page_number in range(part.pages.pages)
    ]
    pages_per_chunk, page_number = max(1, chunk_bytes // part.table.page_bytes), 0
    while page_number < len(key_names):
        if governor is not None and governor.piece_bytes is not None:
            with PieceReader(client, governor) as reader:
                while page_number < len(key_names) and (piece_bytes := governor.piece_bytes) is not None:
                    yield from reader.request_page(
                        page_number, key_names[page_number], part.page_size_bytes(page_number), piece_bytes
                    )
                    page_number += 1
                yield from reader.read_remaining()
        else:
            chunk_keys = key_names[page_number : page_number + pages_per_chunk]
            if governor is not None:
                governor.pace(len(chunk_keys) * part.table.page_bytes)
                governor.own_reads(len(chunk_keys))
            for read_page_number, page_bytes in enumerate(_fetch_values(client, chunk_keys), page_number):
                digest = None if page_bytes is None else xxhash.xxh3_64_intdigest(page_bytes)
                yield PageDigest(read_page_number, digest, len(page_bytes or b""))
            page_number += len(chunk_keys)


def _fetch_values(client: "redis.Redis", key_names: list[bytes]) -> list[bytes | None]:
    with client.pipeline(transaction=False) as pipeline:
        for key_name in key_names:
            pipeline.get(key_name)
        page_values: list[bytes | None] = pipeline.execute()
    return page_values


def read_page_lengths(
    client: "redis.Redis", keys: Keyspace, manifest: Manifest, part: Part
) -> Iterator[tuple[int, int]]:
    """Yield (number within the part, bytes in Redis) for every page; 0 bytes for a missing page."""
    for first_page_number in range(0, part.pages.pages, LENGTHS_PER_ROUND_TRIP):
        page_numbers = range(first_page_number, min(first_page_number + LENGTHS_PER_ROUND_TRIP, part.pages.pages))
        key_names = [part.page_key(keys, manifest.generation, page_number).encode() for page_number in page_numbers]
        yield from zip(page_numbers, value_sizes(client, key_names), strict=True)


def value_sizes(client: "redis.Redis", key_names: Sequence[bytes]) -> list[int]:
    """Return the length in bytes of each value, 0 for a missing one; one round trip to each server."""
    sizes_bytes = [0] * len(key_names)
    for server, positions in group_keys_by_server(client, key_names):
        strlens = _strlens(client, server, [key_names[position] for position in positions])
        for position, size_bytes in zip(positions, strlens, strict=True):
            sizes_bytes[position] = size_bytes
    return sizes_bytes


def _strlens(client: "redis.Redis", server: "redis.Redis", key_names: list[bytes]) -> list[int]:
    """Return the bytes of each value, by one packet: redis-py's pipeline would take seconds for a large generation."""
    packed_commands = b"".join(
        b"*2\r\n$6\r\nSTRLEN\r\n$%d\r\n%b\r\n" % (len(key_name), key_name) for key_name in key_names
    )
    with BulkConnections() as connections:
        connection = connections.connection_to(server)
        connection.send_packed_command([packed_commands], check_health=False)
        replies = [_length_reply(connection) for _ in key_names]
    return [
        int(cast(Any, client.strlen(key_name))) if length_or_redirect is None else length_or_redirect
        for key_name, length_or_redirect in zip(key_names, replies, strict=True)
    ]


def _length_reply(connection: Any) -> int | None:
    """Read an integer reply; None if another node of the cluster has the key."""
    try:
        return int(checked_reply("STRLEN", connection.read_response()))
    except redis.exceptions.AskError:  # MovedError is a subclass
        return None


class _PieceRequest(NamedTuple):
    connection: Any
    page_number: int
    page_key: bytes
    first_index: int
    last_index: int
    ends_page: bool


class PieceReader(BulkConnections):
    """Reader of pages in pieces, in the order of the requests; a page is complete with its last piece."""

    def __init__(self, client: "redis.Redis", governor: Governor) -> None:
        super().__init__()
        self._client, self._governor = client, governor
        self._unanswered_requests: deque[_PieceRequest] = deque()
        self._page_hasher, self._page_size_bytes = xxhash.xxh3_64(), 0

    def request_page(
        self, page_number: int, page_key: bytes, size_bytes: int, piece_bytes: int
    ) -> Iterator[PageDigest]:
        """Request a page of `size_bytes`; yield pages that are complete meanwhile."""
        ((server, _),) = group_keys_by_server(self._client, [page_key])
        connection = self.connection_to(server)
        for piece_start in range(0, size_bytes, piece_bytes):
            is_last = piece_start + piece_bytes >= size_bytes
            # The last piece has one more byte, which detects a page that is too long.
            piece_end = size_bytes if is_last else piece_start + piece_bytes - 1
            self._governor.pace(min(piece_bytes, size_bytes - piece_start))
            self._governor.own_reads(1)
            connection.send_packed_command([_getrange_command(page_key, piece_start, piece_end)], check_health=False)
            self._unanswered_requests.append(
                _PieceRequest(connection, page_number, page_key, piece_start, piece_end, is_last)
            )
            if len(self._unanswered_requests) > UNANSWERED_PIECES_MAX:
                yield from self._receive_piece()

    def read_remaining(self) -> Iterator[PageDigest]:
        """Yield the requested pages that are still incomplete."""
        while self._unanswered_requests:
            yield from self._receive_piece()

    def _receive_piece(self) -> Iterator[PageDigest]:
        piece_request = self._unanswered_requests.popleft()
        try:
            piece: Any = checked_reply("GETRANGE", piece_request.connection.read_response())
        except redis.exceptions.AskError:  # MovedError is a subclass
            piece = self._client.getrange(
                piece_request.page_key.decode(), piece_request.first_index, piece_request.last_index
            )
        self._page_hasher.update(piece)
        self._page_size_bytes += len(piece)
        if piece_request.ends_page:
            digest, size_bytes = self._page_hasher.intdigest(), self._page_size_bytes
            self._page_hasher, self._page_size_bytes = xxhash.xxh3_64(), 0
            yield PageDigest(piece_request.page_number, digest if size_bytes else None, size_bytes)


def _getrange_command(page_key: bytes, first_index: int, last_index: int) -> bytes:
    first_text, last_text = b"%d" % first_index, b"%d" % last_index
    return b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (
        len(page_key), page_key, len(first_text), first_text, len(last_text), last_text,
    )  # fmt: skip

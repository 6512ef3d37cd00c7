"""Pages read in paced pieces over one connection to each server, some pieces ahead of their replies."""

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import redis
import xxhash

from cache.l2.sync_clients import by_server
from cache.resp.reply_shapes import checked
from precompute.bulk.governor import Governor
from precompute.bulk.own_connections import OwnConnections

UNANSWERED = 8
"""Pieces that may wait for their replies: without, the rate ends at a piece per round trip (16 KiB at 2 ms: 8 MB/s)."""


class PageDigest(NamedTuple):
    """A page as it was read: its number, digest (None: it is not there) and length."""

    page: int
    digest: int | None
    size_bytes: int


class _PieceRequest(NamedTuple):
    connection: Any
    page: int
    name: bytes
    start: int
    end: int
    ends_page: bool


class PieceReader(OwnConnections):
    """Pages in order of asking; a page comes back once its last piece is there."""

    def __init__(self, client: "redis.Redis", governor: Governor) -> None:
        super().__init__()
        self._client, self._governor = client, governor
        self._waiting: deque[_PieceRequest] = deque()
        self._digest, self._size_bytes = xxhash.xxh3_64(), 0

    def request_page(
        self, page: int, name: bytes, size_bytes: int, piece: int
    ) -> Iterator[PageDigest]:
        """Ask for a page of that many bytes; yields what came back meanwhile."""
        ((server, _),) = by_server(self._client, [name])
        connection = self.to(server)
        for start in range(0, size_bytes, piece):
            is_last = start + piece >= size_bytes
            # One byte too many of the last piece: a page that is longer than it should be is seen by it.
            end = size_bytes if is_last else start + piece - 1
            self._governor.pace(min(piece, size_bytes - start))
            self._governor.own_reads(1)
            connection.send_packed_command([_getrange(name, start, end)], check_health=False)
            self._waiting.append(_PieceRequest(connection, page, name, start, end, is_last))
            if len(self._waiting) > UNANSWERED:
                yield from self._receive_piece()

    def read_remaining(self) -> Iterator[PageDigest]:
        """Yields the pages that have been asked for and are not back yet."""
        while self._waiting:
            yield from self._receive_piece()

    def _receive_piece(self) -> Iterator[PageDigest]:
        piece_request = self._waiting.popleft()
        try:
            value: Any = checked("GETRANGE", piece_request.connection.read_response())
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

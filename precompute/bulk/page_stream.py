"""A stream of pages into Redis, over one connection to each server: whole when nobody reads, in paced pieces else."""

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import redis

from cache.l2.sync_clients import by_server
from cache.resp.reply_shapes import checked
from precompute.bulk.governor import Governor
from precompute.bulk.own_connections import OwnConnections

UNANSWERED = 2
"""Pages (or chunks of them) that may wait for their replies: Redis has the next, memory is bounded."""


class _Chunk(NamedTuple):
    """Pages that were sent and wait for their replies, by the connection that each went over."""

    pages_by_connection: list[tuple[Any, list[int]]]
    pages: int
    size_bytes: int


class PageStream(OwnConnections):
    """Pages in order; `landed(pages, bytes)` is called as Redis confirms them."""

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
        """Send the pages from number `first` on; page n lies at `pages[n * size:]`, the last one may be shorter."""

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
            if len(self._waiting) >= UNANSWERED:
                self._await_chunk(resend_page)
        while self._waiting:
            self._await_chunk(resend_page)

    def _send_whole(self, names: list[bytes], pages: memoryview, page: int, size: int) -> int:
        """Sends a chunk of `SET`s, from where the pages are mapped: packing would copy each of them twice."""
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
            for server, positions in by_server(self._client, chunk):
                packed: list[bytes | memoryview] = []
                for position in positions:
                    value = values[position]
                    packed += (_head_of_set(chunk[position], len(value)), value, b"\r\n")
                connection = self.to(server)
                connection.send_packed_command(packed, check_health=False)
                sent_pages.append((connection, [page + position for position in positions]))
        self._track_chunk(_Chunk(sent_pages, len(chunk), sent_bytes))
        return len(chunk)

    def _send_paced(
        self, governor: Governor, name: bytes, number: int, page: memoryview, piece: int
    ) -> None:
        """Sends a page as one `SET`, whose bytes trickle in.

        Redis takes in what has come, serves others, and keeps the finished buffer as the value: it neither waits for
        the rest nor copies it. A `SETRANGE` per piece costs a round trip each, and zeroes the whole value first.
        """
        size = len(page)
        ((server, _),) = by_server(self._client, [name])
        connection = self.to(server)
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
        """Wait for every reply to the oldest chunk; a page whose slot is on its way goes where it is sent on to."""
        chunk = self._waiting.popleft()
        for connection, pages in chunk.pages_by_connection:
            for page in pages:
                try:
                    checked("SET", connection.read_response())
                except redis.exceptions.AskError:  # MOVED is one, too
                    resend_page(page)
        self._landed(chunk.pages, chunk.size_bytes)


def _head_of_set(name: bytes, size: int) -> bytes:
    return b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, size)

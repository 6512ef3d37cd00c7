"""A stream of pages into Redis over one connection: whole when nobody reads, in paced pieces when somebody does."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import redis

from precompute.governor import Governor

UNANSWERED = 2
"""Commands (or chunks of whole pages) that may wait for their replies: Redis has the next, memory is bounded."""


class PageStream:
    """Pages in order; `landed(pages, bytes)` is called as Redis confirms them."""

    def __init__(
        self,
        connection: Any,
        governor: Governor | None,
        *,
        chunk_bytes: int,
        landed: Callable[[int, int], None],
    ) -> None:
        self._connection, self._governor, self._chunk_bytes = connection, governor, chunk_bytes
        self._landed = landed
        # Of each command sent: replies to come, pages and bytes that are then there, and the length that is due.
        self._waiting: deque[tuple[int, int, int, int | None]] = deque()
        self._odd = False

    def send(self, names: list[bytes], pages: memoryview, first: int, size: int) -> None:
        """Send the pages from number `first` on; page n lies at `pages[n * size:]`, the last one may be shorter."""
        page = first
        while page < len(names):
            piece = None if self._governor is None else self._governor.piece_bytes
            if piece is None:
                page += self._send_whole(names, pages, page, size)
            else:
                with pages[page * size : (page + 1) * size] as whole:
                    self._send_pieces(names[page], whole, piece)
                page += 1
        self.finish()

    def finish(self) -> None:
        """Wait for every reply."""
        while self._waiting:
            self._await_one()

    def _send_whole(self, names: list[bytes], pages: memoryview, page: int, size: int) -> int:
        """One chunk of `SET`s, from where the pages are mapped: packing would copy each of them twice."""
        chunk = names[page : page + max(1, self._chunk_bytes // size)]
        with ExitStack() as views:  # an error must not leave the mapped file in use
            values = [
                views.enter_context(pages[each * size : (each + 1) * size])
                for each in range(page, page + len(chunk))
            ]
            packed: list[bytes | memoryview] = []
            for name, value in zip(chunk, values, strict=True):
                packed += (_head_of_set(name, len(value)), value, b"\r\n")
            sent_bytes = sum(len(value) for value in values)
            if self._governor is not None:
                self._governor.pace(sent_bytes)
            self._connection.send_packed_command(packed, check_health=False)
            self._sent(len(chunk), len(chunk), sent_bytes, None)
        return len(chunk)

    def _send_pieces(self, name: bytes, page: memoryview, piece: int) -> None:
        """One page. Its last piece goes first: Redis then allocates the whole value once instead of growing it."""
        size = len(page)
        if size <= piece:
            self._send_one(_head_of_set(name, size), page, pages=1, length=None)
        else:
            starts = range(0, size, piece)
            for at in (starts[-1], *starts[:-1]):
                offset, length = b"%d" % at, min(piece, size - at)
                head = b"*4\r\n$8\r\nSETRANGE\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n" % (
                    len(name), name, len(offset), offset, length,
                )  # fmt: skip
                with page[at : at + piece] as value:
                    self._send_one(head, value, pages=int(at == starts[-2]), length=size)
            if (
                self._odd
            ):  # something longer lay under this name; only a whole write makes it shorter
                self.finish()
                self._odd = False
                self._send_one(_head_of_set(name, size), page, pages=0, length=None)

    def _send_one(self, head: bytes, value: memoryview, *, pages: int, length: int | None) -> None:
        if self._governor is not None:
            self._governor.pace(len(value))
        # One buffer, one packet: at this size a copy costs less than three system calls.
        self._connection.send_packed_command([b"".join((head, value, b"\r\n"))], check_health=False)
        self._sent(1, pages, len(value), length)

    def _sent(self, replies: int, pages: int, size_bytes: int, length: int | None) -> None:
        self._waiting.append((replies, pages, size_bytes, length))
        if len(self._waiting) >= UNANSWERED:
            self._await_one()

    def _await_one(self) -> None:
        replies, pages, size_bytes, length = self._waiting.popleft()
        for _ in range(replies):
            reply = self._connection.read_response()
        if length is not None and reply != length:
            self._odd = True
        self._landed(pages, size_bytes)


def _head_of_set(name: bytes, size: int) -> bytes:
    return b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, size)


@contextmanager
def page_stream(
    client: "redis.Redis",
    governor: Governor | None,
    *,
    chunk_bytes: int,
    landed: Callable[[int, int], None],
) -> Iterator[PageStream]:
    """A stream over a connection of the client's pool, which is dropped if anything goes wrong."""
    pool = client.connection_pool
    connection: Any = pool.get_connection()
    try:
        yield PageStream(connection, governor, chunk_bytes=chunk_bytes, landed=landed)
    except BaseException:
        # Replies may still be on their way: this connection must never serve another command.
        connection.disconnect()
        raise
    finally:
        pool.release(connection)

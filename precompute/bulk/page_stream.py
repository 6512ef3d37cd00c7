"""A stream of pages into Redis over one connection: whole when nobody reads, in paced pieces when somebody does."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import redis

from precompute.bulk.governor import Governor

UNANSWERED = 2
"""Pages (or chunks of them) that may wait for their replies: Redis has the next, memory is bounded."""


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
        # Of each chunk sent: replies to come, pages and bytes that are then there.
        self._waiting: deque[tuple[int, int, int]] = deque()

    def send(self, names: list[bytes], pages: memoryview, first: int, size: int) -> None:
        """Send the pages from number `first` on; page n lies at `pages[n * size:]`, the last one may be shorter."""
        page = first
        while page < len(names):
            piece = None if self._governor is None else self._governor.piece_bytes
            if self._governor is None or piece is None:
                page += self._send_whole(names, pages, page, size)
            else:
                with pages[page * size : (page + 1) * size] as whole:
                    self._send_paced(self._governor, names[page], whole, piece)
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
            self._sent(len(chunk), len(chunk), sent_bytes)
        return len(chunk)

    def _send_paced(self, governor: Governor, name: bytes, page: memoryview, piece: int) -> None:
        """One page as one `SET`, whose bytes trickle in.

        Redis takes in what has come, serves others, and keeps the finished buffer as the value: it neither waits for
        the rest nor copies it. A `SETRANGE` per piece costs a round trip each, and zeroes the whole value first.
        """
        size = len(page)
        for at in range(0, size, piece):
            with page[at : at + piece] as value:
                governor.pace(len(value))
                head = _head_of_set(name, size) if at == 0 else b""
                end = b"\r\n" if at + piece >= size else b""
                # One buffer, one packet: at this size a copy costs less than three system calls.
                packet = b"".join((head, value, end))
            self._connection.send_packed_command([packet], check_health=False)
        self._sent(1, 1, size)

    def _sent(self, replies: int, pages: int, size_bytes: int) -> None:
        self._waiting.append((replies, pages, size_bytes))
        if len(self._waiting) >= UNANSWERED:
            self._await_one()

    def _await_one(self) -> None:
        replies, pages, size_bytes = self._waiting.popleft()
        for _ in range(replies):
            self._connection.read_response()
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

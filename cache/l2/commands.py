"""The Redis commands of the read path as bytes, and their replies as values. Pure."""

from collections.abc import Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import hiredis
import numpy as np
from numpy.typing import ArrayLike, NDArray

from cache.errors import TierUnavailable
from cache.format.redis_keys import Keyspace
from cache.l2.errors import refused
from cache.l2.lease_commands import (
    Lease,
    LeaseMark,
    LeaseSwap,
    LeaseTake,
    pack_lease,
    pack_lease_mark,
)
from cache.l2.replies import Frames
from cache.native import loader

_ASKING = b"*1\r\n$6\r\nASKING\r\n"

_HEADS_MAX = 1 << 16
_TAILS_MAX = 1 << 14
_WRITES_MAX = 16


class PageRead(NamedTuple):
    """A read of one record: `length` bytes at `offset` of a page."""

    generation: str
    table: str
    page: int
    offset: int
    length: int


class PageReads(Sequence[PageRead]):
    """A batch of reads of one table: a `PageRead` of each, made only for who looks at them one by one.

    `pages` and `offsets` are int64[n].
    """

    __slots__ = ("generation", "length", "offsets", "pages", "table")

    def __init__(
        self,
        generation: str,
        table: str,
        pages: ArrayLike,
        offsets: ArrayLike,
        length: int,
    ) -> None:
        self.generation = generation
        self.table = table
        self.pages: NDArray[np.int64] = np.asarray(pages, np.int64)
        self.offsets: NDArray[np.int64] = np.asarray(offsets, np.int64)
        self.length = length

    def __len__(self) -> int:
        return len(self.pages)

    def __getitem__(self, index: int) -> PageRead:  # type: ignore[override]  # nobody slices reads
        page, offset = self.pages.item(index), self.offsets.item(index)
        return PageRead(self.generation, self.table, page, offset, self.length)


class OverlayRead(NamedTuple):
    """A read of an overlay record with its remaining life."""

    generation: str
    table: str
    hash_hex: str


class OverlayWrite(NamedTuple):
    """An overlay record to store for `ttl_s` seconds; replaces one computed from an older input.

    `lease_mark` is the lease under which it was computed, if any.
    """

    generation: str
    table: str
    hash_hex: str
    payload: bytes
    ttl_s: float
    lease_mark: LeaseMark | None = None


class Overlay(NamedTuple):
    """An overlay record as it was read, with its remaining life; 0 seconds are left when it is about to go."""

    payload: bytes
    ttl_s: float


Read = PageRead | OverlayRead


class AskingCommand(NamedTuple):
    """A command to a node that is about to take over the key's slot; each of its parts is preceded by `ASKING`."""

    command: "Command"


OVERLAY_COMMANDS: Final = 2
"""Commands sent, and replies expected, for one `OverlayRead`: its life and its value."""
Command = PageRead | OverlayRead | OverlayWrite | Lease | LeaseMark | AskingCommand
_LEASES = (LeaseTake, LeaseSwap)
L2Result = bytes | Overlay | TierUnavailable | None


class Packer:
    """Formats commands as RESP; keeps the parts that repeat, which beats redis-py's packing by a factor of three."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._heads: dict[tuple[str, str, int], bytes] = {}
        self._tails: dict[tuple[int, int], bytes] = {}
        self._writes: dict[tuple[str, str, int, int], tuple[bytes, bytes]] = {}

    def pack(self, commands: Sequence[Command]) -> tuple[bytes, int]:
        """The bytes to send and the number of replies to expect."""
        pieces: list[bytes] = []
        count = 0
        heads, tails = self._heads, self._tails
        for command in commands:
            if type(command) is PageRead:
                generation, table, page, offset, length = command
                head = heads.get((generation, table, page))
                pieces.append(head or self._head(generation, table, page))
                tail = tails.get((offset, length))
                pieces.append(tail or self._tail(offset, length))
                count += 1
            elif type(command) is OverlayWrite:
                self._write(pieces, command)
                count += 1 if command.lease_mark is None else 2
            elif type(command) is OverlayRead:
                pieces += self._overlay_read(command)
                count += OVERLAY_COMMANDS
            elif type(command) is LeaseTake or type(command) is LeaseSwap:
                pieces.append(pack_lease(command))
                count += 1
            elif type(command) is LeaseMark:
                pieces.append(pack_lease_mark(command))
                count += 1
            elif type(command) is AskingCommand:
                count += self._pack_asking(pieces, command.command)
        return b"".join(pieces), count

    def pages(self, reads: PageReads) -> bytes:
        """The bytes to send for many records of one table."""
        prefix = self._keyspace.pages(reads.generation, reads.table)
        return loader.kernels.getranges(prefix, reads.pages, reads.offsets, reads.length)

    def _overlay_read(self, read: OverlayRead) -> tuple[bytes, bytes]:
        key = self._keyspace.overlay(read.generation, read.table, read.hash_hex).encode()
        key = b"$%d\r\n%b\r\n" % (len(key), key)
        # Life first: if the value is replaced in between, the life read is the shorter one.
        return b"*2\r\n$4\r\nPTTL\r\n" + key, b"*2\r\n$3\r\nGET\r\n" + key

    def _pack_asking(self, pieces: list[bytes], command: Command) -> int:
        """Adds a command whose parts are each preceded by `ASKING`; returns the number of replies to expect."""
        parts = (
            self._overlay_read(command)
            if isinstance(command, OverlayRead)
            else (self.pack((command,))[0],)
        )
        for part in parts:
            pieces += _ASKING, part
        return 2 * len(parts)

    def _write(self, pieces: list[bytes], write: OverlayWrite) -> None:
        named, payload = write.hash_hex.encode(), write.payload
        of = write.generation, write.table, len(named), len(payload)
        bytes_before_hash, after = self._writes.get(of) or self._begin_writes(*of)
        life_ms = b"%d" % max(1, round(write.ttl_s * 1000))
        tail = b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(life_ms), life_ms)
        pieces += bytes_before_hash, named, after, payload, tail
        if write.lease_mark is not None:
            pieces.append(pack_lease_mark(write.lease_mark))

    def _begin_writes(
        self, generation: str, table: str, digits: int, size_bytes: int
    ) -> tuple[bytes, bytes]:
        """Formats and keeps the bytes before the hash in each such write, and those between it and the payload."""
        if len(self._writes) >= _WRITES_MAX:
            self._writes.clear()
        prefix = self._keyspace.overlay(generation, table, "").encode()
        bytes_before_hash = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b" % (len(prefix) + digits, prefix)
        fragments = bytes_before_hash, b"\r\n$%d\r\n" % size_bytes
        self._writes[generation, table, digits, size_bytes] = fragments
        return fragments

    def _head(self, generation: str, table: str, page: int) -> bytes:
        if len(self._heads) >= _HEADS_MAX:
            self._heads.clear()
        key = self._keyspace.page(generation, table, page).encode()
        head = b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%b\r\n" % (len(key), key)
        self._heads[generation, table, page] = head
        return head

    def _tail(self, offset: int, length: int) -> bytes:
        if len(self._tails) >= _TAILS_MAX:
            self._tails.clear()
        start, end = b"%d" % offset, b"%d" % (offset + length - 1)
        tail = b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(start), start, len(end), end)
        self._tails[offset, length] = tail
        return tail


def unpack(commands: Sequence[Command], replies: Sequence[Any]) -> Sequence[L2Result]:
    """Answers, one per command, from the replies to what `Packer.pack` made of the commands."""
    if type(replies) is Frames:  # every one of them is a record
        return replies
    answers: list[L2Result] = []
    remaining_replies = iter(replies)
    for command in commands:
        reply = next(remaining_replies)
        if type(command) is OverlayRead:
            value = next(remaining_replies)
            if isinstance(value, bytes) and isinstance(reply, int):
                answers.append(Overlay(value, max(0, reply) / 1000))
                continue
            reply = reply if isinstance(reply, hiredis.ReplyError) else value
        elif type(command) is PageRead and type(reply) is bytes and len(reply) == command.length:
            answers.append(reply)
            continue
        elif type(command) is OverlayWrite and command.lease_mark is not None:
            next(remaining_replies)  # the mark's: without it the lease ends by itself
        elif type(command) in _LEASES and not isinstance(reply, hiredis.ReplyError):
            # None would mean that it was taken.
            is_sound = reply is None or type(reply) is bytes
            answers.append(reply if is_sound else refused(f"{type(reply)} for a lease"))
            continue
        elif type(command) is AskingCommand:
            parts = OVERLAY_COMMANDS if isinstance(command.command, OverlayRead) else 1
            command_replies = [
                next(remaining_replies),
                *(list(islice(remaining_replies, 2))[1] for _ in range(parts - 1)),
            ]
            answers.extend(unpack((command.command,), command_replies))
            continue
        # An absent page answers GETRANGE with an empty string, so a wrong length means that it is not there.
        answers.append(refused(reply) if isinstance(reply, hiredis.ReplyError) else None)
    return answers

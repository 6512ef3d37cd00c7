"""Redis commands of the read path as bytes, leases included, and their replies as values. Pure."""

from collections.abc import Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import hiredis
import numpy as np
from numpy.typing import ArrayLike, NDArray

from cache.errors import TierUnavailable
from cache.format.redis_keys import Keyspace
from cache.l2.errors import refused
from cache.native import loader

OVERLAY_COMMANDS: Final = 2
"""Commands sent, and replies expected, for one `OverlayRead`: remaining life, and value."""

LEASE_DONE_PREFIX = b"done:"
"""Prefix of the value of a lease whose answer is stored."""

LEASE_GIVEN_BACK = b""
"""Value of a lease whose leader gave up; it stays for one millisecond."""

LEASE_DONE_MS = 2_000
"""Milliseconds that a lease says "done": longer than the gap between a process's overlay miss and its lease request."""

# Any value is only ever replaced by who has seen it. Removing would need a right (DEL) that would reach overlays too.
_LEASE_SWAP_SCRIPT = b"""if redis.call('GET', KEYS[1]) == ARGV[1] then
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return ARGV[2]
end"""

_LEASE_SWAP_HEAD = b"*7\r\n$4\r\nEVAL\r\n$%d\r\n%b\r\n$1\r\n1\r\n" % (
    len(_LEASE_SWAP_SCRIPT),
    _LEASE_SWAP_SCRIPT,
)

_LEASE_TAKE_HEAD = b"*7\r\n$3\r\nSET\r\n"
_LEASE_TAKE_OPTIONS = b"$2\r\nNX\r\n$3\r\nGET\r\n$2\r\nPX\r\n"
_LEASE_DONE_LIFE = b"$2\r\nPX\r\n$%d\r\n%d\r\n" % (len(str(LEASE_DONE_MS)), LEASE_DONE_MS)
_ASKING = b"*1\r\n$6\r\nASKING\r\n"
_LINE_END = b"\r\n"
_HEADS_MAX = 1 << 16
_TAILS_MAX = 1 << 14
_WRITES_MAX = 16
_COMMANDS_PER_DEADLINE = 500


def deadline_for(base_s: float, commands: int) -> float:
    """Return the deadline in s for `commands`, given that of one: sending and answering many takes longer."""
    return base_s * (1 + commands / _COMMANDS_PER_DEADLINE)


class PageRead(NamedTuple):
    """Read of one record: `length` bytes at `offset` of a page."""

    generation: str
    table: str
    page: int
    offset: int
    length: int


class PageReads(Sequence[PageRead]):
    """Batch of reads of one table: a sequence that creates each `PageRead` only when it is accessed.

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
    """Read of an overlay record and its remaining life."""

    generation: str
    table: str
    hash_hex: str


Read = PageRead | OverlayRead


class LeaseTake(NamedTuple):
    """Request for a lease of `life_ms`; the answer is None if it was taken, else the current value.

    A lease says which process computes a cold answer: one key per entity and input. It is taken with `SET NX GET PX`,
    renewed and given back by compare-and-set, and marked done in the same pipeline that stores the answer. Values are
    the leader's token, LEASE_DONE_PREFIX and its token, or empty (given back).
    """

    key: str
    token: bytes
    life_ms: int


class LeaseSwap(NamedTuple):
    """Compare-and-set of a lease from `expected_value`; the answer is the new value, None if it has another one."""

    key: str
    expected_value: bytes
    value: bytes
    life_ms: int


Lease = LeaseTake | LeaseSwap


class LeaseMark(NamedTuple):
    """Lease to mark as done in the pipeline that stores the answer."""

    key: str
    token: bytes


_LEASES = (LeaseTake, LeaseSwap)


class OverlayWrite(NamedTuple):
    """Overlay record to store for `ttl_s` seconds; replaces one computed from an older input.

    `lease_mark` is the lease under which it was computed, if any.
    """

    generation: str
    table: str
    hash_hex: str
    payload: bytes
    ttl_s: float
    lease_mark: LeaseMark | None = None


class Overlay(NamedTuple):
    """Overlay record as read, with its remaining life in seconds; 0 if it is about to expire."""

    payload: bytes
    ttl_s: float


class AskingCommand(NamedTuple):
    """Command for a node that is about to take over the key's slot; each part is preceded by `ASKING`."""

    command: "Command"


Command = PageRead | OverlayRead | OverlayWrite | Lease | LeaseMark | AskingCommand
L2Result = bytes | Overlay | TierUnavailable | None


class Packer:
    """Formatter of commands as RESP; caches repeated parts, which beats redis-py's packing by a factor of three."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._heads: dict[tuple[str, str, int], bytes] = {}
        self._tails: dict[tuple[int, int], bytes] = {}
        self._writes: dict[tuple[str, str, int, int], tuple[bytes, bytes]] = {}

    def pack(self, commands: Sequence[Command]) -> tuple[bytes, int]:
        """Return the bytes to send and the number of replies to expect."""
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
        """Return the bytes to send for many records of one table."""
        prefix = self._keyspace.pages(reads.generation, reads.table)
        return loader.kernels.getranges(prefix, reads.pages, reads.offsets, reads.length)

    def _overlay_read(self, read: OverlayRead) -> tuple[bytes, bytes]:
        key = self._keyspace.overlay(read.generation, read.table, read.hash_hex).encode()
        key = b"$%d\r\n%b\r\n" % (len(key), key)
        # Life first: if the value is replaced in between, the life read is the shorter one.
        return b"*2\r\n$4\r\nPTTL\r\n" + key, b"*2\r\n$3\r\nGET\r\n" + key

    def _pack_asking(self, pieces: list[bytes], command: Command) -> int:
        """Add a command whose parts are each preceded by `ASKING`; return the number of replies to expect."""
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
        """Format and cache the bytes before the hash, and between hash and payload, of writes of this size."""
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
    """Convert replies to answers, one per command; the replies must be those to `Packer.pack(commands)`."""
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


def pack_lease(command: Lease) -> bytes:
    """Format a lease command: `SET NX GET PX` for a new lease, or a script that swaps its value."""
    key, life = command.key.encode(), b"%d" % command.life_ms
    if isinstance(command, LeaseTake):
        token = command.token
        return b"%b$%d\r\n%b\r\n$%d\r\n%b\r\n%b$%d\r\n%b\r\n" % (
            _LEASE_TAKE_HEAD, len(key), key, len(token), token, _LEASE_TAKE_OPTIONS, len(life), life,
        )  # fmt: skip
    expected_value, value = command.expected_value, command.value
    return b"%b$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (
        _LEASE_SWAP_HEAD, len(key), key, len(expected_value), expected_value, len(value), value, len(life), life,
    )  # fmt: skip


def pack_lease_mark(lease_mark: LeaseMark) -> bytes:
    """Format the command that marks a lease as done, even if another process leads by now: the answer is stored."""
    key, value = lease_mark.key.encode(), LEASE_DONE_PREFIX + lease_mark.token
    return b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n%b" % (
        len(key), key, len(value), value, _LEASE_DONE_LIFE,
    )  # fmt: skip


class Frames(Sequence[bytes]):
    """Replies of equal length, kept in the receive buffer without an object for each.

    They are `count` RESP bulk strings of `length` bytes, one behind the other in `data`.
    """

    __slots__ = ("_at", "_count", "_data", "_length", "_stride")

    def __init__(self, data: bytes, count: int, length: int, first: int = 0) -> None:
        self._data = data
        self._count = count
        self._length = length
        self._stride = frame_stride(length)
        self._at = len(_bulk_head(length)) + first * self._stride

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> bytes:  # type: ignore[override]  # nobody slices replies
        if not 0 <= index < self._count:
            raise IndexError(index)
        start = self._at + index * self._stride
        return self._data[start : start + self._length]

    def payloads(self) -> list[bytes]:
        """Return the payloads of all replies in order, each a copy."""
        data, length, last = self._data, self._length, self._at + self._count * self._stride
        return [data[at : at + length] for at in range(self._at, last, self._stride)]

    def part(self, first: int, count: int) -> "Frames":
        """Return `count` replies from `first` on as a view of the same buffer; raise IndexError beyond the last."""
        if first + count > self._count:
            raise IndexError(first + count)
        at = first + (self._at - len(_bulk_head(self._length))) // self._stride
        return Frames(self._data, count, self._length, at)

    @classmethod
    def merged(cls, parts: Sequence[tuple[Sequence[int], "Frames"]]) -> "Frames":
        """Merge runs of replies of equal length into one, by the index of each reply in the result."""
        count, length = sum(len(indexes) for indexes, _ in parts), parts[0][1]._length
        merged_rows = np.empty(count, f"V{frame_stride(length)}")
        for indexes, frames in parts:
            first = frames._at - len(_bulk_head(length))
            merged_rows[np.asarray(indexes)] = np.ndarray(
                frames._count, merged_rows.dtype, frames._data, first, (frames._stride,)
            )
        return cls(merged_rows.tobytes(), count, length)

    def rows(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return all replies as records of `dtype`: one aligned copy; raise ValueError for another size."""
        if dtype.itemsize != self._length:
            raise ValueError(f"a reply has {self._length} bytes, a record {dtype.itemsize}")
        return np.ndarray((self._count,), dtype, self._data, self._at, (self._stride,)).copy()

    def sound(
        self, dtype: np.dtype[Any], fingerprints: NDArray[np.uint64], record_format: int
    ) -> NDArray[Any] | None:
        """Return all replies as records; None unless all have `record_format` and their expected fingerprints."""
        if dtype.itemsize != self._length:
            return None
        copy, count = loader.kernels.records_of(
            self._data, self._at, self._stride, self._count, self._length, fingerprints,
            record_format,
        )  # fmt: skip
        return np.frombuffer(copy, dtype) if count == self._count else None


def frame_stride(length: int) -> int:
    """Return the size in bytes of a RESP bulk string of `length` bytes, with header and line end."""
    return len(_bulk_head(length)) + length + len(_LINE_END)


def _bulk_head(length: int) -> bytes:
    return b"$%d\r\n" % length

"""Redis commands of the read path as bytes, leases included, and the conversion of replies to values. Pure."""

from collections.abc import Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import hiredis
import numpy as np
from numpy.typing import ArrayLike, NDArray

from cache.errors import TierUnavailable
from cache.format.redis_keys import Keyspace
from cache.l2.errors import error_from_reply
from cache.native import loader

COMMANDS_PER_OVERLAY_READ: Final = 2
"""Number of commands and replies for one `OverlayRead`: remaining life, and value."""

LEASE_DONE_PREFIX = b"done:"
"""Prefix of a lease's value after its answer has been stored."""

GIVEN_BACK_LEASE_VALUE = b""
"""Value of a lease whose holder gave up; it expires after one millisecond."""

LEASE_DONE_LIFE_MS = 2_000
"""Milliseconds for which a lease says "done": longer than the time from a process's overlay miss to its lease
request."""

# A value is only replaced by a process that knows it. Deleting would need the right DEL, which would also allow
# deleting overlays.
_LEASE_SWAP_SCRIPT = b"""if redis.call('GET', KEYS[1]) == ARGV[1] then
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return ARGV[2]
end"""

_LEASE_SWAP_HEAD = b"*7\r\n$4\r\nEVAL\r\n$%d\r\n%b\r\n$1\r\n1\r\n" % (len(_LEASE_SWAP_SCRIPT), _LEASE_SWAP_SCRIPT)

_LEASE_TAKE_HEAD = b"*7\r\n$3\r\nSET\r\n"
_LEASE_TAKE_OPTIONS = b"$2\r\nNX\r\n$3\r\nGET\r\n$2\r\nPX\r\n"
_LEASE_DONE_EXPIRY = b"$2\r\nPX\r\n$%d\r\n%d\r\n" % (len(str(LEASE_DONE_LIFE_MS)), LEASE_DONE_LIFE_MS)
_ASKING = b"*1\r\n$6\r\nASKING\r\n"
_LINE_END = b"\r\n"
_CACHED_HEADS_MAX = 1 << 16
_CACHED_TAILS_MAX = 1 << 14
_CACHED_WRITE_FORMATS_MAX = 16
_COMMANDS_PER_DEADLINE = 500


def deadline_s_for(single_command_deadline_s: float, command_count: int) -> float:
    """Return the deadline in seconds for `command_count` commands; `single_command_deadline_s` is that of one.

    Many commands take longer.
    """
    return single_command_deadline_s * (1 + command_count / _COMMANDS_PER_DEADLINE)


class PageRead(NamedTuple):
    """Read of one record: `length_bytes` bytes at `page_offset` of a page."""

    generation: str
    table: str
    page_number: int
    page_offset: int
    length_bytes: int


class PageReads(Sequence[PageRead]):
    """Batch of reads of one table: a sequence that creates a `PageRead` only when it is accessed.

    `page_numbers` and `page_offsets` are int64[n].
    """

    __slots__ = ("generation", "length_bytes", "page_numbers", "page_offsets", "table")

    def __init__(
        self, generation: str, table: str, page_numbers: ArrayLike, page_offsets: ArrayLike, length_bytes: int
    ) -> None:
        self.generation = generation
        self.table = table
        self.page_numbers: NDArray[np.int64] = np.asarray(page_numbers, np.int64)
        self.page_offsets: NDArray[np.int64] = np.asarray(page_offsets, np.int64)
        self.length_bytes = length_bytes

    def __len__(self) -> int:
        return len(self.page_numbers)

    def __getitem__(self, index: int) -> PageRead:  # type: ignore[override]  # callers use no slices
        page, offset = self.page_numbers.item(index), self.page_offsets.item(index)
        return PageRead(self.generation, self.table, page, offset, self.length_bytes)


class OverlayRead(NamedTuple):
    """Read of an overlay record and its remaining life."""

    generation: str
    table: str
    hash_hex: str


Read = PageRead | OverlayRead


class LeaseTake(NamedTuple):
    """Request for a lease of `lease_life_ms`; the answer is None if it was granted, else the current value.

    A lease determines which process computes a cold answer; there is one key per entity and input. It is taken with
    `SET NX GET PX`, renewed and given back by compare-and-set, and marked done in the pipeline that stores the answer.
    Its value is the holder's token, LEASE_DONE_PREFIX with that token, or empty (given back).
    """

    lease_key: str
    holder_token: bytes
    lease_life_ms: int


class LeaseSwap(NamedTuple):
    """Compare-and-set of a lease's value from `expected_lease_value`.

    The answer is the new value, or None if the value differs.
    """

    lease_key: str
    expected_lease_value: bytes
    new_lease_value: bytes
    lease_life_ms: int


Lease = LeaseTake | LeaseSwap


class LeaseMark(NamedTuple):
    """Lease to mark as done in the pipeline that stores the answer."""

    lease_key: str
    holder_token: bytes


_LEASE_TYPES = (LeaseTake, LeaseSwap)


class OverlayWrite(NamedTuple):
    """Overlay record to store for `overlay_ttl_s` seconds; replaces an overlay of an older input.

    `lease_mark` is the lease under which it was computed, if there was one.
    """

    generation: str
    table: str
    hash_hex: str
    overlay_value: bytes
    overlay_ttl_s: float
    lease_mark: LeaseMark | None = None


class Overlay(NamedTuple):
    """Overlay record and its remaining life in seconds; 0 if it is about to expire."""

    overlay_value: bytes
    remaining_ttl_s: float


class AskingCommand(NamedTuple):
    """Command for a node that is taking over the key's slot; each part is preceded by `ASKING`."""

    command: "Command"


Command = PageRead | OverlayRead | OverlayWrite | Lease | LeaseMark | AskingCommand
L2Result = bytes | Overlay | TierUnavailable | None


class Packer:
    """Formatter of commands as RESP; caches repeated parts, which makes it three times as fast as redis-py."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._getrange_heads: dict[tuple[str, str, int], bytes] = {}
        self._getrange_tails: dict[tuple[int, int], bytes] = {}
        self._write_fragments: dict[tuple[str, str, int, int], tuple[bytes, bytes]] = {}

    def pack(self, commands: Sequence[Command]) -> tuple[bytes, int]:
        """Return the bytes to send and the number of replies to expect."""
        packed_pieces: list[bytes] = []
        reply_count = 0
        getrange_heads, getrange_tails = self._getrange_heads, self._getrange_tails
        for command in commands:
            if type(command) is PageRead:
                generation, table, page_number, offset, length = command
                getrange_head = getrange_heads.get((generation, table, page_number))
                packed_pieces.append(getrange_head or self._getrange_head(generation, table, page_number))
                getrange_tail = getrange_tails.get((offset, length))
                packed_pieces.append(getrange_tail or self._getrange_tail(offset, length))
                reply_count += 1
            elif type(command) is OverlayWrite:
                self._pack_overlay_write(packed_pieces, command)
                reply_count += 1 if command.lease_mark is None else 2
            elif type(command) is OverlayRead:
                packed_pieces += self._pack_overlay_read(command)
                reply_count += COMMANDS_PER_OVERLAY_READ
            elif type(command) is LeaseTake or type(command) is LeaseSwap:
                packed_pieces.append(pack_lease(command))
                reply_count += 1
            elif type(command) is LeaseMark:
                packed_pieces.append(pack_lease_mark(command))
                reply_count += 1
            elif type(command) is AskingCommand:
                reply_count += self._pack_asking(packed_pieces, command.command)
        return b"".join(packed_pieces), reply_count

    def pack_page_reads(self, reads: PageReads) -> bytes:
        """Return the bytes to send for many records of one table."""
        prefix = self._keyspace.pages(reads.generation, reads.table)
        return loader.kernels.getranges(prefix, reads.page_numbers, reads.page_offsets, reads.length_bytes)

    def _pack_overlay_read(self, read: OverlayRead) -> tuple[bytes, bytes]:
        key = self._keyspace.overlay(read.generation, read.table, read.hash_hex).encode()
        key = b"$%d\r\n%b\r\n" % (len(key), key)
        # Read the life first: if the value is replaced in between, the shorter of the two lives is returned.
        return b"*2\r\n$4\r\nPTTL\r\n" + key, b"*2\r\n$3\r\nGET\r\n" + key

    def _pack_asking(self, packed_pieces: list[bytes], command: Command) -> int:
        """Append a command whose parts are each preceded by `ASKING`; return the number of replies to expect."""
        packed_parts = (
            self._pack_overlay_read(command) if isinstance(command, OverlayRead) else (self.pack((command,))[0],)
        )
        for packed_part in packed_parts:
            packed_pieces += _ASKING, packed_part
        return 2 * len(packed_parts)

    def _pack_overlay_write(self, packed_pieces: list[bytes], write: OverlayWrite) -> None:
        hash_bytes, payload = write.hash_hex.encode(), write.overlay_value
        format_key = write.generation, write.table, len(hash_bytes), len(payload)
        bytes_before_hash, bytes_after_hash = self._write_fragments.get(format_key) or self._cache_write_fragments(
            *format_key
        )
        life_ms = b"%d" % max(1, round(write.overlay_ttl_s * 1000))
        expiry_option = b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(life_ms), life_ms)
        packed_pieces += bytes_before_hash, hash_bytes, bytes_after_hash, payload, expiry_option
        if write.lease_mark is not None:
            packed_pieces.append(pack_lease_mark(write.lease_mark))

    def _cache_write_fragments(
        self, generation: str, table: str, hash_digits: int, payload_bytes: int
    ) -> tuple[bytes, bytes]:
        """Format and cache the bytes before the hash, and those between hash and payload, for writes of this size."""
        if len(self._write_fragments) >= _CACHED_WRITE_FORMATS_MAX:
            self._write_fragments.clear()
        overlay_key_prefix = self._keyspace.overlay(generation, table, "").encode()
        bytes_before_hash = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b" % (
            len(overlay_key_prefix) + hash_digits,
            overlay_key_prefix,
        )
        fragments = bytes_before_hash, b"\r\n$%d\r\n" % payload_bytes
        self._write_fragments[generation, table, hash_digits, payload_bytes] = fragments
        return fragments

    def _getrange_head(self, generation: str, table: str, page_number: int) -> bytes:
        if len(self._getrange_heads) >= _CACHED_HEADS_MAX:
            self._getrange_heads.clear()
        key = self._keyspace.page(generation, table, page_number).encode()
        getrange_head = b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%b\r\n" % (len(key), key)
        self._getrange_heads[generation, table, page_number] = getrange_head
        return getrange_head

    def _getrange_tail(self, page_offset: int, length_bytes: int) -> bytes:
        if len(self._getrange_tails) >= _CACHED_TAILS_MAX:
            self._getrange_tails.clear()
        first_byte, last_byte = b"%d" % page_offset, b"%d" % (page_offset + length_bytes - 1)
        getrange_tail = b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(first_byte), first_byte, len(last_byte), last_byte)
        self._getrange_tails[page_offset, length_bytes] = getrange_tail
        return getrange_tail


def unpack(commands: Sequence[Command], replies: Sequence[Any]) -> Sequence[L2Result]:
    """Convert replies to answers, one per command; the replies must belong to `Packer.pack(commands)`."""
    if type(replies) is Frames:  # all replies are records
        return replies
    answers: list[L2Result] = []
    remaining_replies = iter(replies)
    for command in commands:
        reply = next(remaining_replies)
        if type(command) is OverlayRead:
            overlay_reply = next(remaining_replies)
            if isinstance(overlay_reply, bytes) and isinstance(reply, int):
                answers.append(Overlay(overlay_reply, max(0, reply) / 1000))
                continue
            reply = reply if isinstance(reply, hiredis.ReplyError) else overlay_reply
        elif type(command) is PageRead and type(reply) is bytes and len(reply) == command.length_bytes:
            answers.append(reply)
            continue
        elif type(command) is OverlayWrite and command.lease_mark is not None:
            next(remaining_replies)  # the lease mark's reply; if the mark fails, the lease expires
        elif type(command) in _LEASE_TYPES and not isinstance(reply, hiredis.ReplyError):
            # None would mean that the lease was granted.
            is_sound = reply is None or type(reply) is bytes
            answers.append(reply if is_sound else error_from_reply(f"{type(reply)} as the reply to a lease command"))
            continue
        elif type(command) is AskingCommand:
            parts_count = COMMANDS_PER_OVERLAY_READ if isinstance(command.command, OverlayRead) else 1
            command_replies = [
                next(remaining_replies),
                *(list(islice(remaining_replies, 2))[1] for _ in range(parts_count - 1)),
            ]
            answers.extend(unpack((command.command,), command_replies))
            continue
        # GETRANGE returns an empty string for an absent page: any other length than that of the record means a miss.
        answers.append(error_from_reply(reply) if isinstance(reply, hiredis.ReplyError) else None)
    return answers


def pack_lease(command: Lease) -> bytes:
    """Format a lease command: `SET NX GET PX` for a new lease, or the script that swaps its value."""
    key, life_ms = command.lease_key.encode(), b"%d" % command.lease_life_ms
    if isinstance(command, LeaseTake):
        token = command.holder_token
        return b"%b$%d\r\n%b\r\n$%d\r\n%b\r\n%b$%d\r\n%b\r\n" % (
            _LEASE_TAKE_HEAD, len(key), key, len(token), token, _LEASE_TAKE_OPTIONS, len(life_ms), life_ms,
        )  # fmt: skip
    expected_value, value = command.expected_lease_value, command.new_lease_value
    return b"%b$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (
        _LEASE_SWAP_HEAD, len(key), key, len(expected_value), expected_value, len(value), value, len(life_ms), life_ms,
    )  # fmt: skip


def pack_lease_mark(lease_mark: LeaseMark) -> bytes:
    """Format the command that marks a lease as done for every holder, since the answer is stored."""
    key, value = lease_mark.lease_key.encode(), LEASE_DONE_PREFIX + lease_mark.holder_token
    return b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n%b" % (
        len(key), key, len(value), value, _LEASE_DONE_EXPIRY,
    )  # fmt: skip


class Frames(Sequence[bytes]):
    """Replies of equal length, kept as one buffer, without an object for each reply.

    `reply_buffer` has `reply_count` consecutive RESP bulk strings of `payload_bytes` bytes.
    """

    __slots__ = ("_payload_bytes", "_payload_offset", "_reply_buffer", "_reply_count", "_stride_bytes")

    def __init__(self, reply_buffer: bytes, reply_count: int, payload_bytes: int, first_reply_index: int = 0) -> None:
        self._reply_buffer = reply_buffer
        self._reply_count = reply_count
        self._payload_bytes = payload_bytes
        self._stride_bytes = frame_stride_bytes(payload_bytes)
        self._payload_offset = len(_bulk_head(payload_bytes)) + first_reply_index * self._stride_bytes

    def __len__(self) -> int:
        return self._reply_count

    def __getitem__(self, index: int) -> bytes:  # type: ignore[override]  # callers use no slices
        if not 0 <= index < self._reply_count:
            raise IndexError(index)
        payload_start = self._payload_offset + index * self._stride_bytes
        return self._reply_buffer[payload_start : payload_start + self._payload_bytes]

    def payloads(self) -> list[bytes]:
        """Return copies of all payloads in order."""
        data, payload_bytes, end_offset = (
            self._reply_buffer,
            self._payload_bytes,
            self._payload_offset + self._reply_count * self._stride_bytes,
        )
        return [
            data[payload_start : payload_start + payload_bytes]
            for payload_start in range(self._payload_offset, end_offset, self._stride_bytes)
        ]

    def select_range(self, first_reply_index: int, reply_count: int) -> "Frames":
        """Return `count` replies from index `first` on, sharing the buffer; raise IndexError beyond the last reply."""
        if first_reply_index + reply_count > self._reply_count:
            raise IndexError(first_reply_index + reply_count)
        buffer_reply_index = (
            first_reply_index + (self._payload_offset - len(_bulk_head(self._payload_bytes))) // self._stride_bytes
        )
        return Frames(self._reply_buffer, reply_count, self._payload_bytes, buffer_reply_index)

    @classmethod
    def merge(cls, indexes_and_frames: Sequence[tuple[Sequence[int], "Frames"]]) -> "Frames":
        """Merge several runs of replies of equal length into one.

        Each run comes with its replies' indexes in the result.
        """
        reply_count, payload_bytes = (
            sum(len(indexes) for indexes, _ in indexes_and_frames),
            indexes_and_frames[0][1]._payload_bytes,
        )
        merged_rows = np.empty(reply_count, f"V{frame_stride_bytes(payload_bytes)}")
        for indexes, frames in indexes_and_frames:
            frames_offset = frames._payload_offset - len(_bulk_head(payload_bytes))
            merged_rows[np.asarray(indexes)] = np.ndarray(
                frames._reply_count, merged_rows.dtype, frames._reply_buffer, frames_offset, (frames._stride_bytes,)
            )
        return cls(merged_rows.tobytes(), reply_count, payload_bytes)

    def to_records(self, record_dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return all replies as records of `record_dtype`: one aligned copy; raise ValueError for another size."""
        if record_dtype.itemsize != self._payload_bytes:
            raise ValueError(f"a reply has {self._payload_bytes} bytes, a record {record_dtype.itemsize}")
        return np.ndarray(
            (self._reply_count,), record_dtype, self._reply_buffer, self._payload_offset, (self._stride_bytes,)
        ).copy()

    def checked_records(
        self, record_dtype: np.dtype[Any], fingerprints: NDArray[np.uint64], record_format: int
    ) -> NDArray[Any] | None:
        """Return all replies as records, or None unless all have `record_format` and the expected fingerprints."""
        if record_dtype.itemsize != self._payload_bytes:
            return None
        record_buffer, sound_count = loader.kernels.records_of(
            self._reply_buffer, self._payload_offset, self._stride_bytes, self._reply_count, self._payload_bytes,
            fingerprints,
            record_format,
        )  # fmt: skip
        return np.frombuffer(record_buffer, record_dtype) if sound_count == self._reply_count else None


def frame_stride_bytes(payload_bytes: int) -> int:
    """Return the size in bytes of a RESP bulk string of `payload_bytes` bytes, with header and line end."""
    return len(_bulk_head(payload_bytes)) + payload_bytes + len(_LINE_END)


def _bulk_head(payload_bytes: int) -> bytes:
    return b"$%d\r\n" % payload_bytes

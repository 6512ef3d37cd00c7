"""Pure-Python counterparts of the compiled functions: the same results with numpy, but slower.

The result None means that the caller must use its general implementation, as it also must when the compiled function
returns None. For functions that always return None here, the docstring describes the compiled function. `is_half`:
records of float16, else of float32.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from cache.records import FORMAT_SHIFT, HEADER_DTYPE, Layout, dequantize

Buffer = Any
"""Object that exports its bytes as one contiguous buffer for the duration of a call."""
_INT32_MAX = 2**31 - 1
_BULK_PREFIXES, _PAIR_PREFIXES = (b"$", b"="), (b"%", b"|")
_SIZED_PREFIXES = (*_BULK_PREFIXES, *_PAIR_PREFIXES, b"*", b"~", b">")
"""First bytes of replies whose header has a number: of bytes, of pairs, or of elements."""
_DIGITS_MAX = 19
"""Largest number of digits that are read from a header; a longer number exceeds every bound."""
_BOUND_MAX = 1 << 48
_HEADER_BYTES = 64
"""Number of digits from which the parser rejects a header."""
_INT64_MAX = 2**63 - 1
DENSE_ROWS_RATIO = 2
"""If fewer than one in this many rows is not chosen, all rows are multiplied, since gathering costs more than reading
on."""


class HashParts:
    """Sorted hashes of an entity set: each part's first hash, and its uint64 hashes, whose buffers stay exported."""

    def __init__(self, first_hashes: tuple[int, ...], hash_parts: tuple[Buffer, ...], /) -> None:
        # With a Python int numpy would compare in float64, which is wrong above 2**53: use uint64 throughout.
        self._first_hashes = np.array(first_hashes, np.uint64)
        self._hash_parts = [np.frombuffer(hash_part, np.uint64) for hash_part in hash_parts]
        self._part_starts = np.cumsum([0, *map(len, self._hash_parts)], dtype=np.int64)

    def find(self, hashes: Buffer, /) -> Buffer:
        """Return int64 positions of uint64 hashes, -1 for an absent one."""
        hashes = np.frombuffer(hashes, np.uint64)
        if len(self._hash_parts) == 1:
            return _search_part(self._hash_parts[0], hashes)
        hash_order = hashes.argsort()
        sorted_hashes = hashes[hash_order]
        part_ends = [*sorted_hashes.searchsorted(self._first_hashes[1:]).tolist(), len(sorted_hashes)]
        positions = np.full(len(hashes), -1, np.int64)
        start = 0
        for hash_part, part_start, part_end in zip(
            self._hash_parts, self._part_starts.tolist(), part_ends, strict=False
        ):
            part_positions = _search_part(hash_part, sorted_hashes[start:part_end])
            part_positions[part_positions >= 0] += part_start
            positions[hash_order[start:part_end]] = part_positions
            start = part_end
        return positions

    def locate(
        self, positions: Buffer, first_pages: Buffer, records_per_page: int, record_bytes: int, /
    ) -> tuple[Buffer, Buffer]:
        """Return (int64 pages, int64 offsets) of int64 positions.

        Raises ValueError for a position outside all parts, and for a result that does not fit 64 bits.
        """
        position_array = np.frombuffer(positions, np.int64)
        if position_array.size and not 0 <= position_array.min() <= position_array.max() < self._part_starts[-1]:
            raise ValueError("a position that no part has")
        part_indexes = self._part_starts.searchsorted(position_array, "right") - 1
        page_numbers, page_slots = np.divmod(position_array - self._part_starts[part_indexes], records_per_page)
        part_first_pages = np.frombuffer(first_pages, np.int64)[part_indexes]
        if (part_first_pages > _INT64_MAX - page_numbers).any() or (page_slots > _INT64_MAX // record_bytes).any():
            raise ValueError("a page number or an offset does not fit 64 bits")
        return page_numbers + part_first_pages, page_slots * record_bytes


class ReplyScanner:
    """Scanner that checks the sizes announced in replies before a parser allocates memory; chunks may end anywhere.

    `elements` bounds the elements that one reply may announce, nested ones included; `payload` bounds one string's
    bytes.
    """

    def __init__(self, elements_max: int, payload_bytes_max: int, /) -> None:
        if not (0 <= elements_max <= _BOUND_MAX and 0 <= payload_bytes_max <= _BOUND_MAX):
            raise ValueError("no such bounds")
        self._elements_max, self._payload_bytes_max = elements_max, payload_bytes_max
        self._bytes_to_skip = self._open_elements = self._announced_elements = 0
        self._incomplete_header = b""
        self._is_refused = False

    def admits(self, received: Buffer, /) -> bool:
        """Scan the next bytes.

        Returns False from the first byte on with which a reply announces more than the bounds.
        """
        received = self._incomplete_header + bytes(received)
        offset, received_bytes, self._incomplete_header = 0, len(received), b""
        while offset < received_bytes and not self._is_refused:
            skipped_bytes = min(self._bytes_to_skip, received_bytes - offset)
            self._bytes_to_skip -= skipped_bytes
            offset += skipped_bytes
            if offset == received_bytes:
                break
            if (line_end := received.find(b"\r\n", offset)) < 0:
                # A long line announces nothing: only check whether the next byte ends it.
                is_long = received_bytes - offset > _HEADER_BYTES + len(b"\r\n")
                self._incomplete_header = b"+" + received[-1:] if is_long else received[offset:]
                break
            self._is_refused = not self._judge(received[offset : offset + 1], received[offset + 1 : line_end])
            offset = line_end + 2
        return not self._is_refused

    def _judge(self, type_byte: bytes, header_text: bytes) -> bool:
        """Count the elements that a complete header announces; return True if they are within the bounds."""
        if not self._open_elements:
            self._open_elements, self._announced_elements = 1, 0
        self._open_elements -= 1
        if type_byte not in _SIZED_PREFIXES or not header_text.isdigit() or len(header_text) >= _HEADER_BYTES:
            return True
        announced = int(header_text.lstrip(b"0")[:_DIGITS_MAX] or b"0")
        if type_byte in _BULK_PREFIXES:
            self._bytes_to_skip = announced + 2
            return announced <= self._payload_bytes_max
        self._announced_elements += announced
        self._open_elements += 2 * announced if type_byte in _PAIR_PREFIXES else announced
        return self._announced_elements <= self._elements_max


def _search_part(hash_part: NDArray[np.uint64], hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    if not len(hash_part):
        return np.full(len(hashes), -1, np.int64)
    positions = hash_part.searchsorted(hashes)
    part_hashes: NDArray[np.uint64] = hash_part.take(positions, mode="clip")
    positions[part_hashes != hashes] = -1
    return positions


def hashes(ids: Sequence[bytes], seed: int, /) -> Buffer:
    """Return the 64-bit xxh3 of each id. The compiled function returns None if an id is longer than 128 bytes."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, ids, repeat(seed)), np.uint64, len(ids))


def text_hashes(_joined_texts: Buffer, _text_cuts: Buffer, _hash_seed: int, /) -> Buffer | None:
    """Hash the texts between int32 cuts (64-bit xxh3).

    Returns None unless cuts ascend within the data and no text is too long.
    """
    return None


def dots(vector: Buffer, matrix: Buffer, ordinals: Buffer, /) -> Buffer:
    """Multiply `vector` [dims] with the rows `ordinals` (int64) of `matrix` [rows, dims]; float32 with rounding errors.

    Raises ValueError for a row that does not exist.
    """
    query_vector, row_indexes = np.frombuffer(vector, np.float32), np.frombuffer(ordinals, np.int64)
    rows = np.frombuffer(matrix, np.float32).reshape(-1, len(query_vector))
    if row_indexes.size and not 0 <= row_indexes.min() <= row_indexes.max() < len(rows):
        raise ValueError("a row that the matrix does not have")
    if len(row_indexes) * DENSE_ROWS_RATIO > len(rows):
        return (rows @ query_vector)[row_indexes]
    return rows[row_indexes] @ query_vector


def are_ids(ids: list[bytes], id_bytes_max: int, /) -> bool:
    """Return whether every element is bytes with a length from 1 to `id_bytes_max`."""
    return all(isinstance(raw, bytes) and 0 < len(raw) <= id_bytes_max for raw in ids)


def could_be(received: bytes, string_count: int, payload_bytes: int, /) -> bool:
    """Return whether `received` starts with, or is a prefix of, `string_count` strings of `payload_bytes` bytes."""
    string_head, line_end = b"$%d\r\n" % payload_bytes, b"\r\n"
    stride_bytes = len(string_head) + payload_bytes + len(line_end)
    full_count = min(string_count, len(received) // stride_bytes)
    if full_count and not (
        _bytes_at_steps(received, 0, full_count, len(string_head), stride_bytes) == string_head * full_count
        and _bytes_at_steps(received, stride_bytes - len(line_end), full_count, len(line_end), stride_bytes)
        == line_end * full_count
    ):
        return False
    # A reply of another length is detected by its first bytes, without waiting for more.
    partial_head = (
        received[full_count * stride_bytes : full_count * stride_bytes + len(string_head)]
        if full_count < string_count
        else b""
    )
    return string_head.startswith(partial_head)


def _bytes_at_steps(
    reply_buffer: bytes, first_offset: int, piece_count: int, piece_bytes: int, stride_bytes: int
) -> bytes:
    """Return `piece_bytes` bytes at `first_offset` and at each following multiple of `stride_bytes`."""
    return np.ndarray((piece_count,), f"V{piece_bytes}", reply_buffer, first_offset, (stride_bytes,)).tobytes()


def records_of(
    reply_buffer: bytes,
    first_offset: int,
    stride_bytes: int,
    record_count: int,
    record_bytes: int,
    fingerprints: Buffer,
    record_format: int,
    /,
) -> tuple[Buffer, int]:
    """Copy `record_count` records, one every `stride_bytes`.

    Also returns how many have the format and the expected fingerprint.
    """
    headers = np.ndarray((record_count,), HEADER_DTYPE, reply_buffer, first_offset, (stride_bytes,))
    sound_mask = headers["flags"] >> FORMAT_SHIFT == record_format
    sound_mask &= headers["fingerprint"] == np.frombuffer(fingerprints, np.uint64)
    return np.ndarray((record_count,), f"V{record_bytes}", reply_buffer, first_offset, (stride_bytes,)).copy(), int(
        sound_mask.sum()
    )


def spread(
    record_count: int,
    record_bytes: int,
    placed_records: Buffer,
    placed_indexes: list[int],
    record_by_index: dict[int, bytes],
    /,
) -> Buffer:
    """Build records: `placed_records` at `placed_indexes`, `record_by_index` at its keys, zeros elsewhere."""
    records = np.zeros(record_count, f"V{record_bytes}")
    records[placed_indexes] = np.frombuffer(placed_records, records.dtype)
    records[list(record_by_index)] = np.frombuffer(b"".join(record_by_index.values()), records.dtype)
    return records


def board(flight_by_key: dict[Any, Any], keys: list[Any], flight: object, /) -> list[int]:
    """Insert `flight` under each key that is absent; return the indexes of the other keys."""
    joined_indexes: list[int] = []
    for index, key in enumerate(keys):
        if key in flight_by_key:
            joined_indexes.append(index)
        else:
            flight_by_key[key] = flight
    return joined_indexes


def leave(flight_by_key: dict[Any, Any], keys: list[Any], /) -> None:
    """Remove each key that is present."""
    deque(map(flight_by_key.pop, keys, repeat(None)), maxlen=0)


def getranges(key_prefix: bytes, page_numbers: Buffer, page_offsets: Buffer, record_bytes: int, /) -> bytes:
    """Format RESP commands that read `record_bytes` per int64 page and offset; keys: `key_prefix` and page number."""
    keys = map(_getrange_head, repeat(key_prefix), np.frombuffer(page_numbers, np.int64).tolist())
    ranges = map(_getrange_tail, np.frombuffer(page_offsets, np.int64).tolist(), repeat(record_bytes))
    return b"".join(map(bytes.__add__, keys, ranges))


@lru_cache(maxsize=1 << 14)
def _getrange_head(key_prefix: bytes, page_number: int) -> bytes:
    key = b"%b%d" % (key_prefix, page_number)
    return b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%b\r\n" % (len(key), key)


@lru_cache(maxsize=1 << 14)
def _getrange_tail(page_offset: int, record_bytes: int) -> bytes:
    first_byte, last_byte = b"%d" % page_offset, b"%d" % (page_offset + record_bytes - 1)
    return b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(first_byte), first_byte, len(last_byte), last_byte)


def cut_texts(_joined_texts: Buffer, _text_cuts: Buffer, /) -> list[bytes] | None:
    """Return the texts between int32 cuts; None unless these ascend within the data and each text is UTF-8."""
    return None


def joined(_texts: Any, /) -> tuple[bytes, bytes] | None:
    """Concatenate a list of bytes to (int32 cuts, bytes); None if the list contains anything else."""
    return None


def stream(
    _leading_bytes: bytes,
    _metadata: bytes,
    _body_size_offset: int,
    _row_count_offset: int,
    _nodes_offset: int,
    _buffers_offset: int,
    _row_count: int,
    _node_numbers: list[int],
    _buffers: list[bytes],
    _trailing_bytes: bytes,
    /,
) -> bytes | None:
    """Format an Arrow IPC stream: leading bytes, metadata with its numbers, 8-byte aligned buffers, `after`."""
    return None


def plain_record_mask(
    record_rows: Buffer,
    record_width: int,
    is_list: bool,
    is_half: bool,
    flag_mask: int,
    expected_flags: int,
    count_min: int,
    safe_exponent: int,
    item_count: int,
    /,
) -> Buffer:
    """Return a byte per record: 1 for `expected_flags`, `count_min` or more numbers, all finite, and known items."""
    records, _ = _records_and_layout(record_rows, record_width, is_list, is_half)
    counts = records["count"]
    usable_mask = (records["flags"] & flag_mask == expected_flags) & (counts >= count_min) & (counts <= record_width)
    usable_mask &= np.isfinite(records["numbers"]).all(axis=1)
    if is_half:
        usable_mask &= records["exponent"] <= safe_exponent
    if is_list:
        # Slots beyond a record's count hold no item: check only the used slots against the catalogue.
        used_mask = np.arange(record_width) < counts[:, None]
        usable_mask &= ~((records["items"] >= item_count) & used_mask).any(axis=1)
    return usable_mask


def numbers(record_rows: Buffer, record_width: int, is_list: bool, is_half: bool, k: int, /) -> Buffer:
    """Return the first `k` numbers of each record as float32."""
    records, layout = _records_and_layout(record_rows, record_width, is_list, is_half)
    return np.ascontiguousarray(dequantize(layout, records, np.float32)[:, :k])


def names(
    record_rows: Buffer, record_width: int, is_half: bool, k: int, joined_ids: Buffer, id_offsets_buffer: Buffer, /
) -> tuple[bytes, bytes]:
    """Return (concatenated ids of the first `k` items of each record, int32 cuts: one more than ids)."""
    ordinals = _records_and_layout(record_rows, record_width, True, is_half)[0]["items"][:, :k].ravel().astype(np.int64)
    id_offsets, id_bytes = np.frombuffer(id_offsets_buffer, np.int64), np.frombuffer(joined_ids, np.uint8)
    if ordinals.max(initial=0) >= len(id_offsets) - 1:
        raise ValueError("an item that the catalogue does not have")
    starts, ends = id_offsets[ordinals], id_offsets[ordinals + 1]
    result_cuts = np.zeros(len(ordinals) + 1, np.int64)
    np.cumsum(sizes := ends - starts, out=result_cuts[1:])
    valid_mask = (starts >= 0) & (starts <= ends) & (ends <= len(id_bytes))
    if not valid_mask.all() or result_cuts[-1] > _INT32_MAX:
        raise ValueError("an item that the catalogue does not have")
    byte_indexes = np.arange(result_cuts[-1]) + np.repeat(starts - result_cuts[:-1], sizes)
    return id_bytes[byte_indexes].tobytes(), result_cuts.astype(np.int32).tobytes()


def answers(
    _record_rows: Buffer,
    _record_width: int,
    _is_half: bool,
    _k: int,
    _joined_ids: Buffer,
    _id_offsets: Buffer,
    _numerals: Buffer,
    _head: bytes,
    _names: list[bytes],
    _middle: bytes,
    _after: bytes,
    _last: bytes,
    _ends: list[bytes],
    /,
) -> list[bytes] | tuple[int, ...] | None:
    """Format each record as JSON: head, name, middle, items, after, scores, last, end.

    A tuple has the keys of missing numerals. None: the caller must format an id or a number itself.
    """
    return None


def _records_and_layout(
    record_rows: Buffer, record_width: int, is_list: bool, is_half: bool
) -> tuple[NDArray[Any], Layout]:
    layout = Layout("topk" if is_list else "value", record_width, "f2" if is_half else "f4")
    return np.frombuffer(record_rows, layout.dtype), layout

"""Pure-Python twins of the compiled functions: the same results with numpy, slower.

None as a result means that the caller has to compute in its own general way, as it does where the compiled function
returns None. If only None is returned here, the docstring says what the compiled function returns. `is_half`: records
of float16, else of float32.
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
"""Object that exports its bytes as one contiguous buffer for the length of a call."""
_INT32_MAX = 2**31 - 1
_BULK, _PAIRS = (b"$", b"="), (b"%", b"|")
_SIZED = (*_BULK, *_PAIRS, b"*", b"~", b">")
"""First bytes of replies with a number in the header: of bytes, of pairs, or of elements."""
_DIGITS_MAX = 19
"""Digits of a header's number that are read: a longer number exceeds every bound already."""
_BOUND_MAX = 1 << 48
_HEADER_BYTES = 64
"""Number of digits from which on the parser, too, rejects a header."""
_INT64_MAX = 2**63 - 1
DENSE = 2
"""Rows per chosen row below which all rows are multiplied: gathering costs more than reading on."""


class HashParts:
    """Sorted hashes of an entity set: the first hash of each part, and its uint64 hashes, which stay exported."""

    def __init__(self, firsts: tuple[int, ...], parts: tuple[Buffer, ...], /) -> None:
        # A Python int makes numpy compare in float64 (wrong above 2**53): uint64 throughout.
        self._firsts = np.array(firsts, np.uint64)
        self._parts = [np.frombuffer(part, np.uint64) for part in parts]
        self._starts = np.cumsum([0, *map(len, self._parts)], dtype=np.int64)

    def find(self, hashes: Buffer, /) -> Buffer:
        """Return int64 positions of uint64 hashes, -1 for an absent one."""
        hashes = np.frombuffer(hashes, np.uint64)
        if len(self._parts) == 1:
            return _search_part(self._parts[0], hashes)
        order = hashes.argsort()
        sorted_hashes = hashes[order]
        ends = [*sorted_hashes.searchsorted(self._firsts[1:]).tolist(), len(sorted_hashes)]
        positions = np.full(len(hashes), -1, np.int64)
        start = 0
        for part, part_start, end in zip(self._parts, self._starts.tolist(), ends, strict=False):
            part_positions = _search_part(part, sorted_hashes[start:end])
            part_positions[part_positions >= 0] += part_start
            positions[order[start:end]] = part_positions
            start = end
        return positions

    def locate(
        self, positions: Buffer, first_pages: Buffer, per_page: int, size_bytes: int, /
    ) -> tuple[Buffer, Buffer]:
        """Return (int64 pages, int64 offsets) of int64 positions.

        Raises ValueError for a position that no part has, and for a result that does not fit 64 bits.
        """
        at = np.frombuffer(positions, np.int64)
        if at.size and not 0 <= at.min() <= at.max() < self._starts[-1]:
            raise ValueError("a position that no part has")
        parts = self._starts.searchsorted(at, "right") - 1
        pages, slots = np.divmod(at - self._starts[parts], per_page)
        firsts = np.frombuffer(first_pages, np.int64)[parts]
        if (firsts > _INT64_MAX - pages).any() or (slots > _INT64_MAX // size_bytes).any():
            raise ValueError("a page number or an offset does not fit 64 bits")
        return pages + firsts, slots * size_bytes


class ReplyScanner:
    """Scanner of a server's replies for announced sizes, before a parser allocates memory; chunks may be cut anywhere.

    `elements` bounds the elements that one reply may announce, nested ones included, `payload` the bytes of one string.
    """

    def __init__(self, elements: int, payload: int, /) -> None:
        if not (0 <= elements <= _BOUND_MAX and 0 <= payload <= _BOUND_MAX):
            raise ValueError("no such bounds")
        self._elements, self._payload = elements, payload
        self._skip = self._open = self._announced = 0
        self._header = b""
        self._is_refused = False

    def admits(self, data: Buffer, /) -> bool:
        """Scan the next bytes; return False from the first one on with which a reply announces more than the bounds."""
        data = self._header + bytes(data)
        at, end, self._header = 0, len(data), b""
        while at < end and not self._is_refused:
            passed = min(self._skip, end - at)
            self._skip -= passed
            at += passed
            if at == end:
                break
            if (stop := data.find(b"\r\n", at)) < 0:
                # Of a long line, which announces nothing, it only matters whether the next byte ends it.
                is_long = end - at > _HEADER_BYTES + len(b"\r\n")
                self._header = b"+" + data[-1:] if is_long else data[at:]
                break
            self._is_refused = not self._judge(data[at : at + 1], data[at + 1 : stop])
            at = stop + 2
        return not self._is_refused

    def _judge(self, kind: bytes, text: bytes) -> bool:
        """Count the elements that a complete header announces; return True if they are within the bounds."""
        if not self._open:
            self._open, self._announced = 1, 0
        self._open -= 1
        if kind not in _SIZED or not text.isdigit() or len(text) >= _HEADER_BYTES:
            return True
        number = int(text.lstrip(b"0")[:_DIGITS_MAX] or b"0")
        if kind in _BULK:
            self._skip = number + 2
            return number <= self._payload
        self._announced += number
        self._open += 2 * number if kind in _PAIRS else number
        return self._announced <= self._elements


def _search_part(part: NDArray[np.uint64], hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    if not len(part):
        return np.full(len(hashes), -1, np.int64)
    positions = part.searchsorted(hashes)
    part_hashes: NDArray[np.uint64] = part.take(positions, mode="clip")
    positions[part_hashes != hashes] = -1
    return positions


def hashes(ids: Sequence[bytes], seed: int, /) -> Buffer:
    """Return the 64-bit xxh3 of each id, however long; compiled, None if one is longer than 128 bytes."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, ids, repeat(seed)), np.uint64, len(ids))


def text_hashes(_data: Buffer, _cuts: Buffer, _seed: int, /) -> Buffer | None:
    """Hash the texts between int32 cuts (64-bit xxh3); None unless cuts rise within the data, or if one is too long."""
    return None


def dots(vector: Buffer, matrix: Buffer, ordinals: Buffer, /) -> Buffer:
    """Multiply `vector` [dims] with rows of `matrix` [rows, dims], by int64 ordinals; float32, up to rounding.

    Raises ValueError for a row that is not there.
    """
    query, row_indexes = np.frombuffer(vector, np.float32), np.frombuffer(ordinals, np.int64)
    rows = np.frombuffer(matrix, np.float32).reshape(-1, len(query))
    if row_indexes.size and not 0 <= row_indexes.min() <= row_indexes.max() < len(rows):
        raise ValueError("a row that the matrix does not have")
    if len(row_indexes) * DENSE > len(rows):
        return (rows @ query)[row_indexes]
    return rows[row_indexes] @ query


def are_ids(ids: list[bytes], length_max: int, /) -> bool:
    """True if every element is bytes of a length that an id may have: 1 to `length_max`."""
    return all(isinstance(raw, bytes) and 0 < len(raw) <= length_max for raw in ids)


def could_be(data: bytes, count: int, length: int, /) -> bool:
    """True if `data` is a prefix of, or starts with, `count` bulk strings of `length` bytes."""
    head, end = b"$%d\r\n" % length, b"\r\n"
    step = len(head) + length + len(end)
    full_count = min(count, len(data) // step)
    if full_count and not (
        _every(data, 0, full_count, len(head), step) == head * full_count
        and _every(data, step - len(end), full_count, len(end), step) == end * full_count
    ):
        return False
    # A reply of another length shows in its first bytes: none is waited for in vain.
    partial_head = (
        data[full_count * step : full_count * step + len(head)] if full_count < count else b""
    )
    return head.startswith(partial_head)


def _every(data: bytes, at: int, count: int, size: int, step: int) -> bytes:
    """Return `size` bytes at `at` and at each `step` from there."""
    return np.ndarray((count,), f"V{size}", data, at, (step,)).tobytes()


def records_of(
    data: bytes,
    first: int,
    step: int,
    count: int,
    size: int,
    fingerprints: Buffer,
    record_format: int,
    /,
) -> tuple[Buffer, int]:
    """Copy `count` records at intervals of `step` bytes; return also how many have the format and their fingerprint."""
    heads = np.ndarray((count,), HEADER_DTYPE, data, first, (step,))
    sound = heads["flags"] >> FORMAT_SHIFT == record_format
    sound &= heads["fingerprint"] == np.frombuffer(fingerprints, np.uint64)
    return np.ndarray((count,), f"V{size}", data, first, (step,)).copy(), int(sound.sum())


def spread(
    count: int, size: int, rows: Buffer, indexes: list[int], record_by_index: dict[int, bytes], /
) -> Buffer:
    """Build `count` records: `rows` at `indexes`, `record_by_index` at its keys, zeros elsewhere."""
    records = np.zeros(count, f"V{size}")
    records[indexes] = np.frombuffer(rows, records.dtype)
    records[list(record_by_index)] = np.frombuffer(
        b"".join(record_by_index.values()), records.dtype
    )
    return records


def board(flights: dict[Any, Any], keys: list[Any], flight: object, /) -> list[int]:
    """Insert `flight` under each key that is absent; return the positions of the other keys."""
    joined_indexes: list[int] = []
    for index, key in enumerate(keys):
        if key in flights:
            joined_indexes.append(index)
        else:
            flights[key] = flight
    return joined_indexes


def leave(flights: dict[Any, Any], keys: list[Any], /) -> None:
    """Remove each key that is present."""
    deque(map(flights.pop, keys, repeat(None)), maxlen=0)


def getranges(prefix: bytes, pages: Buffer, offsets: Buffer, length: int, /) -> bytes:
    """Format RESP commands that read `length` bytes per int64 page and offset; keys are `prefix` and page number."""
    keys = map(_key, repeat(prefix), np.frombuffer(pages, np.int64).tolist())
    ranges = map(_range, np.frombuffer(offsets, np.int64).tolist(), repeat(length))
    return b"".join(map(bytes.__add__, keys, ranges))


@lru_cache(maxsize=1 << 14)
def _key(prefix: bytes, page: int) -> bytes:
    key = b"%b%d" % (prefix, page)
    return b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%b\r\n" % (len(key), key)


@lru_cache(maxsize=1 << 14)
def _range(offset: int, length: int) -> bytes:
    first, last = b"%d" % offset, b"%d" % (offset + length - 1)
    return b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(first), first, len(last), last)


def cut_texts(_data: Buffer, _cuts: Buffer, /) -> list[bytes] | None:
    """Return the texts between int32 cuts; None unless these rise within the data, and each is UTF-8."""
    return None


def joined(_texts: Any, /) -> tuple[bytes, bytes] | None:
    """Concatenate a list of bytes to (int32 cuts, bytes); None if the list holds anything else."""
    return None


def stream(
    _leading_bytes: bytes,
    _metadata: bytes,
    _body_at: int,
    _rows_at: int,
    _nodes_at: int,
    _buffers_at: int,
    _rows: int,
    _nodes: list[int],
    _buffers: list[bytes],
    _after: bytes,
    /,
) -> bytes | None:
    """Format an Arrow IPC stream: leading bytes, metadata with its numbers, each buffer 8-byte aligned, `after`."""
    return None


def plain_record_mask(
    rows: Buffer,
    width: int,
    is_list: bool,
    is_half: bool,
    mask: int,
    flags: int,
    count_min: int,
    safe_exponent: int,
    items: int,
    /,
) -> Buffer:
    """Return a byte per record: 1 if complete, `flags` in bits `mask`, `count_min` numbers, ordinals below `items`."""
    records, _ = _records(rows, width, is_list, is_half)
    counts = records["count"]
    usable = (records["flags"] & mask == flags) & (counts >= count_min) & (counts <= width)
    usable &= np.isfinite(records["numbers"]).all(axis=1)
    if is_half:
        usable &= records["exponent"] <= safe_exponent
    if is_list:
        # Beyond a record's count its slots are no item: only what is used must be of the catalogue.
        used = np.arange(width) < counts[:, None]
        usable &= ~((records["items"] >= items) & used).any(axis=1)
    return usable


def numbers(rows: Buffer, width: int, is_list: bool, is_half: bool, k: int, /) -> Buffer:
    """Return the first `k` numbers of each record as float32."""
    records, layout = _records(rows, width, is_list, is_half)
    return np.ascontiguousarray(dequantize(layout, records, np.float32)[:, :k])


def names(
    rows: Buffer, width: int, is_half: bool, k: int, ids: Buffer, offsets: Buffer, /
) -> tuple[bytes, bytes]:
    """Return (concatenated ids of the first `k` items of each record, int32 cuts, one more than ids)."""
    ordinals = _records(rows, width, True, is_half)[0]["items"][:, :k].ravel().astype(np.int64)
    bounds, texts = np.frombuffer(offsets, np.int64), np.frombuffer(ids, np.uint8)
    if ordinals.max(initial=0) >= len(bounds) - 1:
        raise ValueError("an item that the catalogue does not have")
    starts, ends = bounds[ordinals], bounds[ordinals + 1]
    cuts = np.zeros(len(ordinals) + 1, np.int64)
    np.cumsum(sizes := ends - starts, out=cuts[1:])
    is_there = (starts >= 0) & (starts <= ends) & (ends <= len(texts))
    if not is_there.all() or cuts[-1] > _INT32_MAX:
        raise ValueError("an item that the catalogue does not have")
    byte_indexes = np.arange(cuts[-1]) + np.repeat(starts - cuts[:-1], sizes)
    return texts[byte_indexes].tobytes(), cuts.astype(np.int32).tobytes()


def answers(
    _rows: Buffer,
    _width: int,
    _is_half: bool,
    _k: int,
    _ids: Buffer,
    _offsets: Buffer,
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

    A tuple: keys of numerals that are missing. None: an id or a number that the caller has to format.
    """
    return None


def _records(rows: Buffer, width: int, is_list: bool, is_half: bool) -> tuple[NDArray[Any], Layout]:
    layout = Layout("topk" if is_list else "value", width, "f2" if is_half else "f4")
    return np.frombuffer(rows, layout.dtype), layout

"""Reader of untrusted Arrow IPC streams, with only numpy. Pure.

Reads plain columns of the kinds that this service writes or takes. It decompresses nothing and allocates no memory that
the stream does not itself fill; an invalid stream raises Malformed, a valid but unsupported one Unsupported.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.arrow import schema as arrow
from serving.arrow.schema import ColumnKind, Field, FlatTable, Malformed, read_root

Cutter = Callable[[memoryview, memoryview], list[bytes] | None]

CACHED_METADATA_BYTES_MAX = 4_096
"""Bytes of the longest metadata (schema, message) whose parsed form is cached for the next stream."""

BATCHES_MAX = 64
"""Greatest number of record batches: each costs as much as dozens of rows, an empty one costs its sender nothing."""

_FIELDS_MAX = 64
_LIST_DEPTH_MAX = 2

_BATCH_PARTS_MAX = 512
"""Greatest number of nodes, and of buffers, in a record batch: enough for so many columns."""

_METADATA_PAIRS_MAX = 64

_DTYPES: dict[str, np.dtype[Any]] = {
    "i4": np.dtype("<i4"),
    "f4": np.dtype("<f4"),
    "f8": np.dtype("<f8"),
}


class Unsupported(ValueError):
    """A stream that others could read; the text says what to send instead."""


@dataclass(frozen=True, slots=True)
class Frame:
    """All record batches of a stream, one list or array per column."""

    metadata: dict[str, str]
    fields: dict[str, Field]
    columns: dict[str, list[Any]]
    rows: int


def read_frame(
    raw: bytes,
    rows_max: int,
    *,
    as_bytes: bool = False,
    cutter: Cutter | None = None,
    check: Callable[[tuple[Field, ...]], None] = lambda _fields: None,
) -> Frame:
    """Return the columns: utf8 as str (or its bytes), lists as tuples or read-only float32 arrays, None for null.

    `cutter` cuts bytes at int32 offsets, or gives None if it cannot. `check` raises for unwanted columns before any of
    their rows is read.
    """
    first = first_message(raw)
    metadata, fields = (
        read_schema(first)
        if len(first) <= CACHED_METADATA_BYTES_MAX
        else read_schema.__wrapped__(first)
    )
    check(fields)
    columns: dict[str, list[Any]] = {field.name: [] for field in fields}
    rows = 0
    for batch_index, (message, body) in enumerate(read_messages(memoryview(raw)[len(first) :])):
        if batch_index == BATCHES_MAX:
            raise Unsupported(
                f"the stream has more than {BATCHES_MAX} record batches: send larger ones"
            )
        if message.kind != arrow.RECORD_BATCH:
            raise Unsupported("only record batches are read: send no dictionaries")
        described = batch_layout(message)
        count = described.rows
        if count < 0 or rows + count > rows_max:
            raise Malformed(f"the stream has more than {rows_max} rows")
        rows += count
        batch = _Batch(described, body, as_bytes, cutter)
        for field in fields:
            columns[field.name] += batch.column(field, count)
        batch.check_end()
    return Frame(dict(metadata), {field.name: field for field in fields}, columns, rows)


def first_message(raw: bytes) -> bytes:
    """The metadata of the first message, if it is one."""
    return raw[: 8 + int.from_bytes(raw[4:8], "little")]


@functools.lru_cache(maxsize=64)
def read_schema(first: bytes) -> tuple[tuple[tuple[str, str], ...], tuple[Field, ...]]:
    """Metadata and columns from the message that begins a stream, cached: a caller's streams often share it."""
    message, body = next(read_messages(memoryview(first)), (None, b""))
    if message is None or message.kind != arrow.SCHEMA or body:
        raise Malformed("the stream does not begin with a schema")
    header = read_root(message.metadata).table(2)
    if header.number(0, "<h") != 0:
        raise Unsupported("the stream is big-endian: send it little-endian")
    metadata = {pair.text(0): pair.text(1) for pair in header.tables(2, _METADATA_PAIRS_MAX)}
    fields = tuple([_field(flat, 0) for flat in header.tables(1, _FIELDS_MAX)])
    if len({field.name for field in fields}) != len(fields):
        raise Malformed("two columns have the same name")
    return tuple(metadata.items()), fields


class Message(NamedTuple):
    """Metadata of a message, its kind and the bytes of its body."""

    metadata: bytes
    kind: int
    body_bytes: int


class BatchLayout(NamedTuple):
    """A record batch without its body: (length, nulls) of columns, (position, size) of buffers."""

    rows: int
    nodes: list[tuple[int, int]]
    buffers: list[tuple[int, int]]


def batch_layout(message: Message) -> BatchLayout:
    """Layout of a record batch, cached: batches of as many rows and bytes have an equal one."""
    read = (
        _cached_layout
        if len(message.metadata) <= CACHED_METADATA_BYTES_MAX
        else _cached_layout.__wrapped__
    )
    return read(message.metadata)


@functools.lru_cache(maxsize=256)
def _cached_layout(metadata: bytes) -> BatchLayout:
    header = read_root(metadata).table(2)
    if header.has(3):
        raise Unsupported("the stream is compressed: send it without compression")
    return BatchLayout(
        header.number(0, "<q"), header.pairs(1, _BATCH_PARTS_MAX), header.pairs(2, _BATCH_PARTS_MAX)
    )


def read_messages(raw: memoryview) -> Iterator[tuple[Message, memoryview]]:
    """Messages of a stream, each with its body."""
    at = 0
    while at < len(raw):
        if raw[at : at + 4] != arrow.CONTINUATION:
            raise Malformed("this is no Arrow IPC stream (format of Arrow 0.15 or newer)")
        size = int.from_bytes(raw[at + 4 : at + 8], "little")
        if size == 0:
            if len(raw) < at + 8:
                raise Malformed("the stream ends within a message")
            return
        start = at + 8 + size
        if start > len(raw):
            raise Malformed("the stream ends within a message")
        metadata = bytes(raw[at + 8 : start])
        message = (
            _cached_message if size <= CACHED_METADATA_BYTES_MAX else _cached_message.__wrapped__
        )(metadata)
        at = start + message.body_bytes
        if at > len(raw):
            raise Malformed("the stream ends within a message's body")
        yield message, raw[start:at]


@functools.lru_cache(maxsize=256)
def _cached_message(metadata: bytes) -> Message:
    root_table = read_root(metadata)
    body_bytes = root_table.number(3, "<q")
    if body_bytes < 0:
        raise Malformed("a message's body has a negative size")
    root_table.table(2)
    return Message(metadata, root_table.number(1, "<B"), body_bytes)


def _field(flat: FlatTable, depth: int) -> Field:
    name, nullable, type_ = flat.text(0), bool(flat.number(1, "<B")), flat.number(2, "<B")
    if flat.has(4):
        raise Unsupported(f"column {name!r} is dictionary-encoded: send it plain")
    children = flat.tables(5, _FIELDS_MAX)
    if type_ in (arrow.LIST, arrow.FIXED_LIST) and len(children) == 1 and depth < _LIST_DEPTH_MAX:
        inner = _field(children[0], depth + 1)
        if type_ == arrow.LIST:
            return Field(name, "list", nullable, inner)
        width = flat.table(3).number(0, "<i")
        if width < 0:
            raise Malformed(f"column {name!r} has lists of a negative size")
        return Field(name, "fixed", nullable, inner, width)
    kind = _kind(flat, type_)
    if kind is None or children:
        raise Unsupported(f"column {name!r} is of a type that is not read here")
    return Field(name, kind, nullable)


def _kind(flat: FlatTable, type_: int) -> ColumnKind | None:
    match type_:
        case arrow.UTF8:
            return "utf8"
        case arrow.LARGE_UTF8:
            return "large_utf8"
        case arrow.BOOL:
            return "bool"
        case arrow.INT:
            int_type = flat.table(3)
            is_i4 = int_type.number(0, "<i") == 32 and int_type.number(1, "<B") == 1
            return "i4" if is_i4 else None
        case arrow.FLOAT:
            return arrow.FLOAT_KINDS.get(flat.table(3).number(0, "<h"))
    return None


class _Batch:
    """Hands out a record batch's nodes and buffers in the order of its columns."""

    def __init__(
        self, described: BatchLayout, body: memoryview, as_bytes: bool, cutter: Cutter | None
    ) -> None:
        self._nodes = iter(described.nodes)
        self._buffers = iter(described.buffers)
        self._body = body
        self._as_bytes = as_bytes
        self._cutter = cutter

    def column(self, field: Field, rows: int) -> list[Any]:
        """The values of the next column, which has `rows` of them."""
        valid = self._valid(rows)
        values = self._values(field, rows)
        if valid is None:
            return values
        return [value if is_valid else None for value, is_valid in zip(values, valid, strict=True)]

    def check_end(self) -> None:
        """Raises Malformed if there is more than the columns have."""
        if next(self._nodes, None) is not None or next(self._buffers, None) is not None:
            raise Malformed("a record batch has more than the schema's columns")

    def _values(self, field: Field, rows: int) -> list[Any]:
        match field.kind:
            case "utf8":
                return self._utf8(rows)
            case "large_utf8":
                return self._texts(self._offsets(rows, "<i8"))
            case "bool":
                return self._bits(rows)
            case "list":
                return self._lists(field, self._offsets(rows, "<i4"))
            case "fixed":
                step = field.width
                return self._lists(field, np.arange(rows + 1, dtype=np.int64) * step)
        numbers: list[Any] = self._array(rows, _DTYPES[field.kind]).tolist()
        return numbers

    def _lists(self, field: Field, ends: NDArray[Any]) -> list[Any]:
        inner = field.child
        cuts: list[int] = ends.tolist()
        if inner is None or inner.kind not in ("f4", "utf8"):
            raise Unsupported(f"column {field.name!r} has lists of a type that is not read here")
        length, _ = node = self._node()
        if length < cuts[-1]:
            raise Malformed("a list reaches beyond its values")
        if inner.kind == "utf8":
            self._no_nulls(node)
            texts = self._texts(self._offsets(length, "<i4"))
            return [tuple(texts[a:b]) for a, b in pairwise(cuts)]
        self._no_nulls(node)
        numbers = self._array(length, _DTYPES["f4"])
        return [numbers[a:b] for a, b in pairwise(cuts)]

    def _utf8(self, rows: int) -> list[Any]:
        ends = self._buffer()
        if self._cutter is None or not self._as_bytes or len(ends) < 4 * (rows + 1):
            return self._texts(_offsets(ends, rows, "<i4"))
        try:
            data = self._buffer()
        except Malformed:
            _offsets(ends, rows, "<i4")  # what is wrong with them comes first
            raise
        pieces = self._cutter(data, ends[: 4 * (rows + 1)])
        return self._cut(_offsets(ends, rows, "<i4"), data) if pieces is None else pieces

    def _no_nulls(self, node: tuple[int, int]) -> None:
        if node[1]:
            raise Unsupported("a list holds nulls")
        self._buffer()

    def _texts(self, ends: NDArray[Any]) -> list[Any]:
        return self._cut(ends, self._buffer())

    def _cut(self, ends: NDArray[Any], data: memoryview) -> list[Any]:
        cuts = ends.tolist()
        if cuts[-1] > len(data):
            raise Malformed("a text reaches beyond its bytes")
        try:
            text_bytes = bytes(data[: cuts[-1]])
            if text_bytes.isascii() and not self._as_bytes:  # cut the text, not the bytes
                text = text_bytes.decode()
                return [text[a:b] for a, b in pairwise(cuts)]
            pieces = [text_bytes[a:b] for a, b in pairwise(cuts)]
            if text_bytes.isascii():
                return pieces
            decoded = list(map(bytes.decode, pieces))
            return pieces if self._as_bytes else decoded
        except UnicodeDecodeError as error:
            raise Malformed("a text is not UTF-8") from error

    def _offsets(self, rows: int, layout: str) -> NDArray[Any]:
        return _offsets(self._buffer(), rows, layout)

    def _array(self, rows: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        data = self._buffer()
        if len(data) < rows * dtype.itemsize:
            raise Malformed("a column lacks values")
        return np.frombuffer(data, dtype, rows)

    def _valid(self, rows: int) -> list[bool] | None:
        """Return the validity of each row, True if it is not null; None = all are valid."""
        length, nulls = self._node()
        if length != rows or not 0 <= nulls <= rows:
            raise Malformed(f"a column has {length} of {rows} rows, {nulls} of them null")
        if nulls == 0:
            self._buffer()
            return None
        return self._bits(rows)

    def _bits(self, rows: int) -> list[bool]:
        packed_bits = self._array((rows + 7) // 8, np.dtype(np.uint8))
        bits = np.unpackbits(packed_bits, count=rows, bitorder="little")
        flags: list[bool] = bits.astype(np.bool_).tolist()
        return flags

    def _node(self) -> tuple[int, int]:
        node = next(self._nodes, None)
        if node is None:
            raise Malformed("a record batch lacks columns of the schema")
        return node

    def _buffer(self) -> memoryview:
        extent = next(self._buffers, None)
        if extent is None:
            raise Malformed("a record batch lacks buffers")
        at, size = extent
        if at < 0 or size < 0 or at + size > len(self._body):
            raise Malformed("a buffer reaches beyond its body")
        return self._body[at : at + size]


def _offsets(data: memoryview, rows: int, layout: str) -> NDArray[Any]:
    """Offsets [rows + 1], checked to be non-negative and never falling; a column without rows may have none."""
    dtype = np.dtype(layout)
    if rows == 0:
        return np.zeros(1, dtype)
    if len(data) < (rows + 1) * dtype.itemsize:
        raise Malformed("a column lacks offsets")
    offsets = np.frombuffer(data, dtype, rows + 1)
    if offsets[0] < 0 or (offsets[1:] < offsets[:-1]).any():
        raise Malformed("offsets fall")
    return offsets

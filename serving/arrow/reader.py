"""Reader of untrusted Arrow IPC streams that needs only numpy. Pure.

It reads the kinds of columns that this service writes or accepts. It decompresses nothing and allocates memory only in
proportion to the stream's size. An invalid stream raises MalformedStream, a valid but unsupported one
UnsupportedStream.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.arrow import schema as arrow
from serving.arrow.schema import ColumnKind, Field, FlatTable, MalformedStream, read_root

TextCutter = Callable[[memoryview, memoryview], list[bytes] | None]

CACHED_METADATA_BYTES_MAX = 4_096
"""Bytes of the longest metadata (schema, message) whose parsed form is cached for the next stream."""

BATCHES_MAX = 64
"""Greatest number of record batches: parsing one costs as much as dozens of rows, even if it is empty."""

_FIELDS_MAX = 64
_LIST_DEPTH_MAX = 2

_BATCH_PARTS_MAX = 512
"""Greatest number of nodes, and of buffers, in a record batch: enough for `_FIELDS_MAX` columns."""

_METADATA_PAIRS_MAX = 64

_DTYPE_BY_KIND: dict[str, np.dtype[Any]] = {"i4": np.dtype("<i4"), "f4": np.dtype("<f4"), "f8": np.dtype("<f8")}


class UnsupportedStream(ValueError):
    """Valid stream with a feature that is not supported here; the message says what to send instead."""


class TooManyBatches(UnsupportedStream):
    """Stream with more than `BATCHES_MAX` record batches."""


@dataclass(frozen=True, slots=True)
class Frame:
    """All record batches of a stream, one list or array per column."""

    schema_metadata: dict[str, str]
    field_by_column: dict[str, Field]
    values_by_column: dict[str, list[Any]]
    row_count: int


def read_frame(
    stream_bytes: bytes,
    rows_max: int,
    *,
    texts_as_bytes: bool = False,
    text_cutter: TextCutter | None = None,
    check_fields: Callable[[tuple[Field, ...]], None] = lambda _fields: None,
) -> Frame:
    """Return the columns: utf8 as str (or its bytes), lists as tuples or read-only float32 arrays, None for null.

    `text_cutter` cuts bytes at int32 offsets, or returns None if it cannot. `check_fields` raises an error for unwanted
    columns, before any row is read.
    """
    schema_message = first_message_bytes(stream_bytes)
    metadata, fields = (
        read_schema(schema_message)
        if len(schema_message) <= CACHED_METADATA_BYTES_MAX
        else read_schema.__wrapped__(schema_message)
    )
    check_fields(fields)
    columns: dict[str, list[Any]] = {field.name: [] for field in fields}
    row_count = 0
    for batch_index, (batch_message, body) in enumerate(read_messages(memoryview(stream_bytes)[len(schema_message) :])):
        if batch_index == BATCHES_MAX:
            raise TooManyBatches(f"the stream has more than {BATCHES_MAX} record batches: send larger ones")
        if batch_message.message_kind != arrow.RECORD_BATCH_MESSAGE_KIND:
            raise UnsupportedStream("only record batches are supported: send no dictionaries")
        layout = batch_layout(batch_message)
        batch_row_count = layout.row_count
        if batch_row_count < 0 or row_count + batch_row_count > rows_max:
            raise MalformedStream(f"the stream has more than {rows_max} rows")
        row_count += batch_row_count
        batch = _BatchReader(layout, body, texts_as_bytes, text_cutter)
        for field in fields:
            columns[field.name] += batch.read_column(field, batch_row_count)
        batch.check_end()
    return Frame(dict(metadata), {field.name: field for field in fields}, columns, row_count)


def first_message_bytes(stream_bytes: bytes) -> bytes:
    """Return the metadata of the first message; raise MalformedStream if there is none."""
    return stream_bytes[: 8 + int.from_bytes(stream_bytes[4:8], "little")]


@functools.lru_cache(maxsize=64)
def read_schema(schema_message: bytes) -> tuple[tuple[tuple[str, str], ...], tuple[Field, ...]]:
    """Return metadata and columns from a stream's first message; cached, since a caller's streams often share it."""
    message, body = next(read_messages(memoryview(schema_message)), (None, b""))
    if message is None or message.message_kind != arrow.SCHEMA_MESSAGE_KIND or body:
        raise MalformedStream("the stream does not begin with a schema")
    header = read_root(message.message_metadata).table(2)
    if header.read_scalar(0, "<h") != 0:
        raise UnsupportedStream("the stream is big-endian: send it little-endian")
    metadata = {pair.read_text(0): pair.read_text(1) for pair in header.read_tables(2, _METADATA_PAIRS_MAX)}
    fields = tuple([_read_field(flat_field, 0) for flat_field in header.read_tables(1, _FIELDS_MAX)])
    if len({field.name for field in fields}) != len(fields):
        raise MalformedStream("two columns have the same name")
    return tuple(metadata.items()), fields


class Message(NamedTuple):
    """Metadata of a message, its kind and the bytes of its body."""

    message_metadata: bytes
    message_kind: int
    body_bytes: int


class BatchLayout(NamedTuple):
    """Layout of a record batch: (length, null count) of each node, (position, size) of each buffer."""

    row_count: int
    lengths_and_null_counts: list[tuple[int, int]]
    buffer_offsets_and_sizes: list[tuple[int, int]]


def batch_layout(message: Message) -> BatchLayout:
    """Return the layout of a record batch; cached, since batches with equal numbers of rows and bytes share it."""
    read_layout = (
        _cached_layout if len(message.message_metadata) <= CACHED_METADATA_BYTES_MAX else _cached_layout.__wrapped__
    )
    return read_layout(message.message_metadata)


@functools.lru_cache(maxsize=256)
def _cached_layout(message_metadata: bytes) -> BatchLayout:
    header = read_root(message_metadata).table(2)
    if header.has_field(3):
        raise UnsupportedStream("the stream is compressed: send it without compression")
    return BatchLayout(
        header.read_scalar(0, "<q"),
        header.read_int64_pairs(1, _BATCH_PARTS_MAX),
        header.read_int64_pairs(2, _BATCH_PARTS_MAX),
    )


def read_messages(stream_bytes: memoryview) -> Iterator[tuple[Message, memoryview]]:
    """Yield the messages of a stream, each with its body."""
    message_offset = 0
    while message_offset < len(stream_bytes):
        if stream_bytes[message_offset : message_offset + 4] != arrow.CONTINUATION:
            raise MalformedStream("this is not an Arrow IPC stream (format of Arrow 0.15 or newer)")
        metadata_bytes = int.from_bytes(stream_bytes[message_offset + 4 : message_offset + 8], "little")
        if metadata_bytes == 0:
            if len(stream_bytes) < message_offset + 8:
                raise MalformedStream("the stream ends within a message")
            return
        body_offset = message_offset + 8 + metadata_bytes
        if body_offset > len(stream_bytes):
            raise MalformedStream("the stream ends within a message")
        metadata = bytes(stream_bytes[message_offset + 8 : body_offset])
        message = (_cached_message if metadata_bytes <= CACHED_METADATA_BYTES_MAX else _cached_message.__wrapped__)(
            metadata
        )
        message_offset = body_offset + message.body_bytes
        if message_offset > len(stream_bytes):
            raise MalformedStream("the stream ends within a message's body")
        yield message, stream_bytes[body_offset:message_offset]


@functools.lru_cache(maxsize=256)
def _cached_message(message_metadata: bytes) -> Message:
    root_table = read_root(message_metadata)
    body_bytes = root_table.read_scalar(3, "<q")
    if body_bytes < 0:
        raise MalformedStream("a message's body has a negative size")
    root_table.table(2)
    return Message(message_metadata, root_table.read_scalar(1, "<B"), body_bytes)


def _read_field(flat_field: FlatTable, list_depth: int) -> Field:
    name, nullable, type_id = (
        flat_field.read_text(0),
        bool(flat_field.read_scalar(1, "<B")),
        flat_field.read_scalar(2, "<B"),
    )
    if flat_field.has_field(4):
        raise UnsupportedStream(f"column {name!r} is dictionary-encoded: send it plain")
    children = flat_field.read_tables(5, _FIELDS_MAX)
    if (
        type_id in (arrow.LIST_TYPE_ID, arrow.FIXED_LIST_TYPE_ID)
        and len(children) == 1
        and list_depth < _LIST_DEPTH_MAX
    ):
        child_field = _read_field(children[0], list_depth + 1)
        if type_id == arrow.LIST_TYPE_ID:
            return Field(name, "list", nullable, child_field)
        width = flat_field.table(3).read_scalar(0, "<i")
        if width < 0:
            raise MalformedStream(f"column {name!r} has lists of a negative size")
        return Field(name, "fixed", nullable, child_field, width)
    kind = _column_kind(flat_field, type_id)
    if kind is None or children:
        raise UnsupportedStream(f"column {name!r} has an unsupported type")
    return Field(name, kind, nullable)


def _column_kind(flat_field: FlatTable, type_id: int) -> ColumnKind | None:
    match type_id:
        case arrow.UTF8_TYPE_ID:
            return "utf8"
        case arrow.LARGE_UTF8_TYPE_ID:
            return "large_utf8"
        case arrow.BOOL_TYPE_ID:
            return "bool"
        case arrow.INT_TYPE_ID:
            int_type = flat_field.table(3)
            is_i4 = int_type.read_scalar(0, "<i") == 32 and int_type.read_scalar(1, "<B") == 1
            return "i4" if is_i4 else None
        case arrow.FLOAT_TYPE_ID:
            return arrow.FLOAT_KIND_BY_PRECISION.get(flat_field.table(3).read_scalar(0, "<h"))
    return None


class _BatchReader:
    """Reader of one record batch: takes its nodes and buffers in the order of the columns."""

    def __init__(
        self, layout: BatchLayout, batch_body: memoryview, texts_as_bytes: bool, text_cutter: TextCutter | None
    ) -> None:
        self._remaining_lengths_and_nulls = iter(layout.lengths_and_null_counts)
        self._remaining_buffers = iter(layout.buffer_offsets_and_sizes)
        self._batch_body = batch_body
        self._texts_as_bytes = texts_as_bytes
        self._text_cutter = text_cutter

    def read_column(self, field: Field, row_count: int) -> list[Any]:
        """Return the `row_count` values of the next column."""
        validity = self._read_validity(row_count)
        column_values = self._read_values(field, row_count)
        if validity is None:
            return column_values
        return [
            column_value if is_valid else None for column_value, is_valid in zip(column_values, validity, strict=True)
        ]

    def check_end(self) -> None:
        """Raise MalformedStream if nodes or buffers are left over."""
        if next(self._remaining_lengths_and_nulls, None) is not None or next(self._remaining_buffers, None) is not None:
            raise MalformedStream("a record batch has more nodes or buffers than the schema's columns need")

    def _read_values(self, field: Field, row_count: int) -> list[Any]:
        match field.kind:
            case "utf8":
                return self._read_utf8(row_count)
            case "large_utf8":
                return self._read_texts(self._read_offsets(row_count, "<i8"))
            case "bool":
                return self._read_bits(row_count)
            case "list":
                return self._read_lists(field, self._read_offsets(row_count, "<i4"))
            case "fixed":
                list_size = field.fixed_list_size
                return self._read_lists(field, np.arange(row_count + 1, dtype=np.int64) * list_size)
        column_numbers: list[Any] = self._read_array(row_count, _DTYPE_BY_KIND[field.kind]).tolist()
        return column_numbers

    def _read_lists(self, field: Field, list_ends: NDArray[Any]) -> list[Any]:
        child_field = field.child
        cut_positions: list[int] = list_ends.tolist()
        if child_field is None or child_field.kind not in ("f4", "utf8"):
            raise UnsupportedStream(f"column {field.name!r} has lists of an unsupported type")
        value_count, _ = length_and_null_count = self._next_length_and_nulls()
        if value_count < cut_positions[-1]:
            raise MalformedStream("a list extends beyond its values")
        if child_field.kind == "utf8":
            self._check_no_nulls(length_and_null_count)
            list_texts = self._read_texts(self._read_offsets(value_count, "<i4"))
            return [tuple(list_texts[begin:end]) for begin, end in pairwise(cut_positions)]
        self._check_no_nulls(length_and_null_count)
        list_numbers = self._read_array(value_count, _DTYPE_BY_KIND["f4"])
        return [list_numbers[begin:end] for begin, end in pairwise(cut_positions)]

    def _read_utf8(self, row_count: int) -> list[Any]:
        text_ends = self._next_buffer()
        if self._text_cutter is None or not self._texts_as_bytes or len(text_ends) < 4 * (row_count + 1):
            return self._read_texts(_checked_offsets(text_ends, row_count, "<i4"))
        try:
            text_data = self._next_buffer()
        except MalformedStream:
            _checked_offsets(text_ends, row_count, "<i4")  # an error in the offsets takes precedence
            raise
        text_pieces = self._text_cutter(text_data, text_ends[: 4 * (row_count + 1)])
        return (
            self._cut_texts(_checked_offsets(text_ends, row_count, "<i4"), text_data)
            if text_pieces is None
            else text_pieces
        )

    def _check_no_nulls(self, length_and_null_count: tuple[int, int]) -> None:
        if length_and_null_count[1]:
            raise UnsupportedStream("a list holds nulls")
        self._next_buffer()

    def _read_texts(self, text_ends: NDArray[Any]) -> list[Any]:
        return self._cut_texts(text_ends, self._next_buffer())

    def _cut_texts(self, text_ends: NDArray[Any], text_data: memoryview) -> list[Any]:
        cut_positions = text_ends.tolist()
        if cut_positions[-1] > len(text_data):
            raise MalformedStream("a text extends beyond its bytes")
        try:
            text_bytes = bytes(text_data[: cut_positions[-1]])
            if text_bytes.isascii() and not self._texts_as_bytes:  # cut the text, not the bytes
                text = text_bytes.decode()
                return [text[begin:end] for begin, end in pairwise(cut_positions)]
            text_pieces = [text_bytes[begin:end] for begin, end in pairwise(cut_positions)]
            if text_bytes.isascii():
                return text_pieces
            decoded = list(map(bytes.decode, text_pieces))
            return text_pieces if self._texts_as_bytes else decoded
        except UnicodeDecodeError as error:
            raise MalformedStream("a text is not UTF-8") from error

    def _read_offsets(self, row_count: int, offset_dtype_name: str) -> NDArray[Any]:
        return _checked_offsets(self._next_buffer(), row_count, offset_dtype_name)

    def _read_array(self, number_count: int, number_dtype: np.dtype[Any]) -> NDArray[Any]:
        array_bytes = self._next_buffer()
        if len(array_bytes) < number_count * number_dtype.itemsize:
            raise MalformedStream("a column has too few values")
        return np.frombuffer(array_bytes, number_dtype, number_count)

    def _read_validity(self, row_count: int) -> list[bool] | None:
        """Return the validity of each row, True if it is not null; None if all are valid."""
        node_row_count, null_count = self._next_length_and_nulls()
        if node_row_count != row_count or not 0 <= null_count <= row_count:
            raise MalformedStream(f"a column has {node_row_count} of {row_count} rows, {null_count} of them null")
        if null_count == 0:
            self._next_buffer()
            return None
        return self._read_bits(row_count)

    def _read_bits(self, row_count: int) -> list[bool]:
        packed_bits = self._read_array((row_count + 7) // 8, np.dtype(np.uint8))
        bits = np.unpackbits(packed_bits, count=row_count, bitorder="little")
        column_flags: list[bool] = bits.astype(np.bool_).tolist()
        return column_flags

    def _next_length_and_nulls(self) -> tuple[int, int]:
        length_and_null_count = next(self._remaining_lengths_and_nulls, None)
        if length_and_null_count is None:
            raise MalformedStream("a record batch lacks columns of the schema")
        return length_and_null_count

    def _next_buffer(self) -> memoryview:
        buffer_extent = next(self._remaining_buffers, None)
        if buffer_extent is None:
            raise MalformedStream("a record batch lacks buffers")
        buffer_offset, buffer_bytes = buffer_extent
        if buffer_offset < 0 or buffer_bytes < 0 or buffer_offset + buffer_bytes > len(self._batch_body):
            raise MalformedStream("a buffer extends beyond its body")
        return self._batch_body[buffer_offset : buffer_offset + buffer_bytes]


def _checked_offsets(offset_bytes: memoryview, row_count: int, offset_dtype_name: str) -> NDArray[Any]:
    """Return offsets [row_count + 1], checked to be non-negative and non-decreasing; an empty column may have none."""
    dtype = np.dtype(offset_dtype_name)
    if row_count == 0:
        return np.zeros(1, dtype)
    if len(offset_bytes) < (row_count + 1) * dtype.itemsize:
        raise MalformedStream("a column lacks offsets")
    offsets = np.frombuffer(offset_bytes, dtype, row_count + 1)
    if offsets[0] < 0 or (offsets[1:] < offsets[:-1]).any():
        raise MalformedStream("offsets fall")
    return offsets

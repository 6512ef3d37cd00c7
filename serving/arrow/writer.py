"""Writer of columns as an Arrow IPC stream: one schema, one record batch, no compression. Pure.

The layout of the record batch's metadata depends only on the columns, not on their values: it is built once, and for
each answer only the numbers in it are written.
"""

import functools
import itertools
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import flatbuffers
import numpy as np
from numpy.typing import NDArray

from serving.arrow.schema import (
    END_OF_STREAM,
    RECORD_BATCH_MESSAGE_KIND,
    Field,
    encapsulate,
    finish_message,
    read_root,
    schema_message,
)

_PADDING_BY_SIZE = tuple(bytes(size) for size in range(8))
_MESSAGE_PREFIX_BYTES = 8


class Column(NamedTuple):
    """One column in a record batch: nodes (length, null count) of the column and its children, and their buffers."""

    lengths_and_null_counts: tuple[tuple[int, int], ...]
    column_buffers: tuple[bytes, ...]


AssembleStream = Callable[[bytes, bytes, int, int, int, int, int, list[int], list[bytes], bytes], bytes | None]


class _BatchTemplate(NamedTuple):
    batch_metadata: bytes
    body_length_offset: int
    row_count_offset: int
    nodes_offset: int
    buffers_offset: int


def write_stream(
    fields: tuple[Field, ...],
    columns: Sequence[Column],
    row_count: int,
    schema_metadata: tuple[tuple[str, str], ...] = (),
    assemble: AssembleStream | None = None,
) -> bytes:
    """Return the whole stream; `columns` are those of `fields`, in their order, `row_count` long.

    `assemble`: a faster equivalent of `assemble_stream`, which returns None for input that it does not support.
    """
    node_numbers = [number for column in columns for node in column.lengths_and_null_counts for number in node]
    column_buffers = [buffer for column in columns for buffer in column.column_buffers]
    template = _batch_template(len(node_numbers) // 2, len(column_buffers))
    assemble_arguments = (
        schema_message(fields, schema_metadata),
        *template,
        row_count,
        node_numbers,
        column_buffers,
        END_OF_STREAM,
    )
    fast_stream = None if assemble is None else assemble(*assemble_arguments)
    return assemble_stream(*assemble_arguments) if fast_stream is None else fast_stream


def assemble_stream(
    stream_head: bytes,
    batch_metadata: bytes,
    body_length_offset: int,
    row_count_offset: int,
    nodes_offset: int,
    buffers_offset: int,
    row_count: int,
    lengths_and_null_counts: list[int],
    column_buffers: list[bytes],
    end_marker: bytes,
) -> bytes:
    """Return the stream: `stream_head`, metadata with its numbers, buffers at multiples of 8 bytes, `end_marker`."""
    body_pieces: list[bytes] = []
    buffer_extents: list[int] = []
    body_bytes = 0
    for column_buffer in column_buffers:
        buffer_extents += body_bytes, (buffer_bytes := len(column_buffer))
        if buffer_bytes:
            body_pieces.append(column_buffer)
            if padding_bytes := -buffer_bytes & 7:
                body_pieces.append(_PADDING_BY_SIZE[padding_bytes])
                buffer_bytes += padding_bytes
            body_bytes += buffer_bytes
    batch_head = bytearray(batch_metadata)
    struct.pack_into("<q", batch_head, body_length_offset, body_bytes)
    struct.pack_into("<q", batch_head, row_count_offset, row_count)
    struct.pack_into(f"<{len(lengths_and_null_counts)}q", batch_head, nodes_offset, *lengths_and_null_counts)
    struct.pack_into(f"<{len(buffer_extents)}q", batch_head, buffers_offset, *buffer_extents)
    return b"".join((stream_head, batch_head, *body_pieces, end_marker))


@functools.lru_cache(maxsize=64)
def _batch_template(node_count: int, buffer_count: int) -> _BatchTemplate:
    builder = flatbuffers.Builder(1024)
    vector_offsets = [_write_zero_pairs(builder, count) for count in (node_count, buffer_count)]
    builder.StartObject(5)
    builder.PrependInt64Slot(0, 1, 0)  # not 0: flatbuffers omit default values
    builder.PrependUOffsetTRelativeSlot(1, vector_offsets[0], 0)
    builder.PrependUOffsetTRelativeSlot(2, vector_offsets[1], 0)
    message_bytes = finish_message(builder, RECORD_BATCH_MESSAGE_KIND, builder.EndObject(), 1)
    root_table = read_root(message_bytes)
    batch_table = root_table.table(2)
    return _BatchTemplate(
        encapsulate(message_bytes),
        *(
            _MESSAGE_PREFIX_BYTES + offset
            for offset in (
                root_table.field_offset(3),
                batch_table.field_offset(0),
                batch_table.vector_extent(1, 16)[0],
                batch_table.vector_extent(2, 16)[0],
            )
        ),
    )


def _write_zero_pairs(builder: flatbuffers.Builder, pair_count: int) -> int:
    """Write a vector of `count` structs of two int64 zeros; return its offset."""
    builder.StartVector(16, pair_count, 8)
    for _ in range(2 * pair_count):
        builder.PrependInt64(0)
    vector_offset: int = builder.EndVector()
    return vector_offset


def text_column(text_values: Sequence[bytes | None]) -> Column:
    """Return a column of utf8; None becomes null."""
    try:
        return whole_text_column(text_values)  # type: ignore[arg-type]
    except TypeError:  # `len(None)` fails: cheaper than a search for None beforehand
        pass
    is_valid = [text_value is not None for text_value in text_values]
    column = whole_text_column([text_value or b"" for text_value in text_values])
    return Column(((len(text_values), is_valid.count(False)),), (pack_bits(is_valid), *column.column_buffers[1:]))


def whole_text_column(text_values: Sequence[bytes]) -> Column:
    """Return a column of utf8 without nulls."""
    text_ends = itertools.accumulate(map(len, text_values), initial=0)
    offsets = np.fromiter(text_ends, np.int32, len(text_values) + 1)
    return Column(((len(text_values), 0),), (b"", offsets.tobytes(), b"".join(text_values)))


@functools.lru_cache(maxsize=64)
def repeated_text_column(text_value: bytes, row_count: int) -> Column:
    """Return a column of utf8 with the same text in every row."""
    text_bytes = len(text_value)
    offsets = np.arange(row_count + 1, dtype=np.int32) * np.int32(text_bytes)
    return Column(((row_count, 0),), (b"", offsets.tobytes(), text_value * row_count))


@functools.lru_cache(maxsize=64)
def null_text_column(row_count: int) -> Column:
    """Return a column of utf8 with only nulls."""
    return Column(((row_count, row_count),), (bytes((row_count + 7) // 8), bytes(4 * row_count + 4), b""))


def number_column(number_values: NDArray[np.generic], row_is_valid: Sequence[bool] | None = None) -> Column:
    """Return a column of the array's dtype; null where `row_is_valid` is False."""
    null_count = 0 if row_is_valid is None else len(row_is_valid) - sum(row_is_valid)
    validity_bits = pack_bits(row_is_valid) if null_count and row_is_valid is not None else b""
    return Column(((len(number_values), null_count),), (validity_bits, number_values.tobytes()))


@functools.lru_cache(maxsize=64)
def null_number_column(row_count: int) -> Column:
    """Return a column of int32 with only nulls."""
    return number_column(np.zeros(row_count, np.int32), [False] * row_count)


@functools.lru_cache(maxsize=64)
def false_flag_column(row_count: int) -> Column:
    """Return a column of bool with only False."""
    return flag_column([False] * row_count)


def flag_column(flag_values: Sequence[bool], row_is_valid: Sequence[bool] | None = None) -> Column:
    """Return a column of bool; null where `row_is_valid` is False."""
    null_count = 0 if row_is_valid is None else len(row_is_valid) - sum(row_is_valid)
    validity_bits = pack_bits(row_is_valid) if null_count and row_is_valid is not None else b""
    return Column(((len(flag_values), null_count),), (validity_bits, pack_bits(flag_values)))


def list_column(
    list_ends: NDArray[np.int32], child_column: Column, row_is_valid: Sequence[bool] | None = None
) -> Column:
    """Return a column of lists of `child_column`, cut at `list_ends` int32[row_count + 1], which begin with 0."""
    null_count = 0 if row_is_valid is None else len(row_is_valid) - sum(row_is_valid)
    validity_bits = pack_bits(row_is_valid) if null_count and row_is_valid is not None else b""
    return Column(
        ((len(list_ends) - 1, null_count), *child_column.lengths_and_null_counts),
        (validity_bits, list_ends.tobytes(), *child_column.column_buffers),
    )


def fixed_list_column(row_count: int, child_column: Column, row_is_valid: Sequence[bool] | None = None) -> Column:
    """Return a column of fixed-size lists; `child_column` has the numbers of every list, including null lists."""
    null_count = 0 if row_is_valid is None else len(row_is_valid) - sum(row_is_valid)
    validity_bits = pack_bits(row_is_valid) if null_count and row_is_valid is not None else b""
    return Column(
        ((row_count, null_count), *child_column.lengths_and_null_counts), (validity_bits, *child_column.column_buffers)
    )


def pack_bits(flag_values: Sequence[bool]) -> bytes:
    """Return a bitmap, least significant bit first."""
    return np.packbits(np.asarray(flag_values, np.bool_), bitorder="little").tobytes()

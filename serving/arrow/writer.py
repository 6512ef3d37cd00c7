"""Columns as an Arrow IPC stream: one schema, one record batch, no compression. Pure.

The record batch's metadata has the same shape for the same columns, independent of their values: it is built once, and
per answer only its numbers are written.
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
    END,
    RECORD_BATCH,
    Field,
    encapsulated,
    message,
    read_root,
    schema_message,
)

_PADDING = tuple(bytes(size) for size in range(8))
_PREFIX_BYTES = 8


class Column(NamedTuple):
    """Nodes and buffers of one column in a record batch: (length, nulls) of it and its children, and their buffers."""

    nodes: tuple[tuple[int, int], ...]
    buffers: tuple[bytes, ...]


Assemble = Callable[
    [bytes, bytes, int, int, int, int, int, list[int], list[bytes], bytes], bytes | None
]


class _Template(NamedTuple):
    metadata: bytes
    body_at: int
    rows_at: int
    nodes_at: int
    buffers_at: int


def stream(
    fields: tuple[Field, ...],
    columns: Sequence[Column],
    rows: int,
    metadata: tuple[tuple[str, str], ...] = (),
    assemble: Assemble | None = None,
) -> bytes:
    """Return the whole stream; `columns` are those of `fields`, in their order, `rows` long.

    `assemble`: a faster function with the result of `assembled`, or None if it cannot give it.
    """
    nodes = [number for column in columns for node in column.nodes for number in node]
    buffers = [buffer for column in columns for buffer in column.buffers]
    template = _template(len(nodes) // 2, len(buffers))
    assemble_arguments = schema_message(fields, metadata), *template, rows, nodes, buffers, END
    fast_stream = None if assemble is None else assemble(*assemble_arguments)
    return assembled(*assemble_arguments) if fast_stream is None else fast_stream


def assembled(
    stream_head: bytes,
    metadata: bytes,
    body_at: int,
    rows_at: int,
    nodes_at: int,
    buffers_at: int,
    rows: int,
    nodes: list[int],
    buffers: list[bytes],
    after: bytes,
) -> bytes:
    """The metadata with its numbers, then each buffer on a multiple of 8 bytes; `stream_head` and `after` unchanged."""
    pieces: list[bytes] = []
    extents: list[int] = []
    at = 0
    for buffer in buffers:
        extents += at, (size := len(buffer))
        if size:
            pieces.append(buffer)
            if pad := -size & 7:
                pieces.append(_PADDING[pad])
                size += pad
            at += size
    head = bytearray(metadata)
    struct.pack_into("<q", head, body_at, at)
    struct.pack_into("<q", head, rows_at, rows)
    struct.pack_into(f"<{len(nodes)}q", head, nodes_at, *nodes)
    struct.pack_into(f"<{len(extents)}q", head, buffers_at, *extents)
    return b"".join((stream_head, head, *pieces, after))


@functools.lru_cache(maxsize=64)
def _template(nodes: int, buffers: int) -> _Template:
    builder = flatbuffers.Builder(1024)
    vector_offsets = [_pairs(builder, count) for count in (nodes, buffers)]
    builder.StartObject(5)
    builder.PrependInt64Slot(0, 1, 0)  # any number but the default, which would have no place
    builder.PrependUOffsetTRelativeSlot(1, vector_offsets[0], 0)
    builder.PrependUOffsetTRelativeSlot(2, vector_offsets[1], 0)
    raw = message(builder, RECORD_BATCH, builder.EndObject(), 1)
    root_table = read_root(raw)
    batch = root_table.table(2)
    return _Template(
        encapsulated(raw),
        *(
            _PREFIX_BYTES + at
            for at in (
                root_table.at(3),
                batch.at(0),
                batch.vector(1, 16)[0],
                batch.vector(2, 16)[0],
            )
        ),
    )


def _pairs(builder: flatbuffers.Builder, count: int) -> int:
    """A vector of structs of two int64."""
    builder.StartVector(16, count, 8)
    for _ in range(2 * count):
        builder.PrependInt64(0)
    end: int = builder.EndVector()
    return end


def texts(values: Sequence[bytes | None]) -> Column:
    """Column of utf8; None is null."""
    try:
        return whole_texts(values)  # type: ignore[arg-type]
    except TypeError:  # None has no length: that is cheaper than to look for one first
        pass
    is_valid = [value is not None for value in values]
    column = whole_texts([value or b"" for value in values])
    return Column(((len(values), is_valid.count(False)),), (bits(is_valid), *column.buffers[1:]))


def whole_texts(values: Sequence[bytes]) -> Column:
    """Column of utf8 without nulls."""
    ends = itertools.accumulate(map(len, values), initial=0)
    offsets = np.fromiter(ends, np.int32, len(values) + 1)
    return Column(((len(values), 0),), (b"", offsets.tobytes(), b"".join(values)))


@functools.lru_cache(maxsize=64)
def same_text(value: bytes, rows: int) -> Column:
    """Column of utf8 with one text in every row."""
    size = len(value)
    offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(size)
    return Column(((rows, 0),), (b"", offsets.tobytes(), value * rows))


@functools.lru_cache(maxsize=64)
def no_text(rows: int) -> Column:
    """Column of utf8, null in each row."""
    return Column(((rows, rows),), (bytes((rows + 7) // 8), bytes(4 * rows + 4), b""))


def numbers(values: NDArray[np.generic], is_valid: Sequence[bool] | None = None) -> Column:
    """Column of the array's own dtype; null where `is_valid` is False."""
    nulls = 0 if is_valid is None else len(is_valid) - sum(is_valid)
    valid = bits(is_valid) if nulls and is_valid is not None else b""
    return Column(((len(values), nulls),), (valid, values.tobytes()))


@functools.lru_cache(maxsize=64)
def no_numbers(rows: int) -> Column:
    """Column of int32, null in each row."""
    return numbers(np.zeros(rows, np.int32), [False] * rows)


@functools.lru_cache(maxsize=64)
def no_flags(rows: int) -> Column:
    """Column of bool, False in each row."""
    return flags([False] * rows)


def flags(values: Sequence[bool], is_valid: Sequence[bool] | None = None) -> Column:
    """Column of bool; null where `is_valid` is False."""
    nulls = 0 if is_valid is None else len(is_valid) - sum(is_valid)
    valid = bits(is_valid) if nulls and is_valid is not None else b""
    return Column(((len(values), nulls),), (valid, bits(values)))


def lists(ends: NDArray[np.int32], inner: Column, is_valid: Sequence[bool] | None = None) -> Column:
    """Column of lists of `inner`, cut at `ends` int32[rows + 1], which begin with 0."""
    nulls = 0 if is_valid is None else len(is_valid) - sum(is_valid)
    valid = bits(is_valid) if nulls and is_valid is not None else b""
    return Column(((len(ends) - 1, nulls), *inner.nodes), (valid, ends.tobytes(), *inner.buffers))


def fixed_lists(rows: int, inner: Column, is_valid: Sequence[bool] | None = None) -> Column:
    """Column of lists of one size, each of which has its numbers in `inner`, also a null one."""
    nulls = 0 if is_valid is None else len(is_valid) - sum(is_valid)
    valid = bits(is_valid) if nulls and is_valid is not None else b""
    return Column(((rows, nulls), *inner.nodes), (valid, *inner.buffers))


def bits(values: Sequence[bool]) -> bytes:
    """A bitmap, least significant bit first."""
    return np.packbits(np.asarray(values, np.bool_), bitorder="little").tobytes()

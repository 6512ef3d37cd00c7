"""The messages of an Arrow IPC stream and the schema that begins it, as anybody may send them. Pure."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

from serving.arrow_ipc import schema as arrow
from serving.arrow_ipc.flatbuffers import FlatTable, Malformed, root
from serving.arrow_ipc.schema import Field, Kind

KEPT_MAX = 4_096
"""Bytes of the longest metadata (schema, message) whose parsed form is cached for the next stream."""

_FIELDS_MAX = 64
_DEPTH_MAX = 2
_PARTS_MAX = 512
"""Greatest number of nodes, and of buffers, in a record batch: enough for so many columns."""
_METADATA_MAX = 64


class Unsupported(ValueError):
    """A stream that others could read; the text says what to send instead."""


def first_message(raw: bytes) -> bytes:
    """The metadata of the first message, if it is one."""
    return raw[: 8 + int.from_bytes(raw[4:8], "little")]


@functools.lru_cache(maxsize=64)
def schema(first: bytes) -> tuple[tuple[tuple[str, str], ...], tuple[Field, ...]]:
    """Metadata and columns from the message that begins a stream, cached: a caller's streams often share it."""
    message, body = next(messages(memoryview(first)), (None, b""))
    if message is None or message.kind != arrow.SCHEMA or body:
        raise Malformed("the stream does not begin with a schema")
    header = root(message.metadata).table(2)
    if header.number(0, "<h") != 0:
        raise Unsupported("the stream is big-endian: send it little-endian")
    metadata = {pair.text(0): pair.text(1) for pair in header.tables(2, _METADATA_MAX)}
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


def layout(message: Message) -> BatchLayout:
    """Layout of a record batch, cached: batches of as many rows and bytes have an equal one."""
    read = _layout if len(message.metadata) <= KEPT_MAX else _layout.__wrapped__
    return read(message.metadata)


def messages(raw: memoryview) -> Iterator[tuple[Message, memoryview]]:
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
        message = (_message if size <= KEPT_MAX else _message.__wrapped__)(metadata)
        at = start + message.body_bytes
        if at > len(raw):
            raise Malformed("the stream ends within a message's body")
        yield message, raw[start:at]


@functools.lru_cache(maxsize=256)
def _message(metadata: bytes) -> Message:
    root_table = root(metadata)
    body_bytes = root_table.number(3, "<q")
    if body_bytes < 0:
        raise Malformed("a message's body has a negative size")
    root_table.table(2)
    return Message(metadata, root_table.number(1, "<B"), body_bytes)


@functools.lru_cache(maxsize=256)
def _layout(metadata: bytes) -> BatchLayout:
    header = root(metadata).table(2)
    if header.has(3):
        raise Unsupported("the stream is compressed: send it without compression")
    return BatchLayout(
        header.number(0, "<q"), header.pairs(1, _PARTS_MAX), header.pairs(2, _PARTS_MAX)
    )


def _field(flat: FlatTable, depth: int) -> Field:
    name, nullable, type_ = flat.text(0), bool(flat.number(1, "<B")), flat.number(2, "<B")
    if flat.has(4):
        raise Unsupported(f"column {name!r} is dictionary-encoded: send it plain")
    children = flat.tables(5, _FIELDS_MAX)
    if type_ in (arrow.LIST, arrow.FIXED_LIST) and len(children) == 1 and depth < _DEPTH_MAX:
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


def _kind(flat: FlatTable, type_: int) -> Kind | None:
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

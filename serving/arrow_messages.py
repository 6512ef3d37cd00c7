"""The messages of an Arrow IPC stream and the schema that begins it, as anybody may send them. Pure."""

import functools
from collections.abc import Iterator

from serving import arrow_schema as arrow
from serving.arrow_flat import Flat, Malformed, root
from serving.arrow_schema import Field, Kind

KEPT_MAX = 4_096
"""Bytes of a schema that is kept for the next stream."""

_FIELDS_MAX = 64
_DEPTH_MAX = 2
_METADATA_MAX = 64


class Unsupported(ValueError):
    """A stream that others could read; the text says what to send instead."""


def first_message(raw: bytes) -> bytes:
    """The metadata of the first message, if it is one."""
    return raw[: 8 + int.from_bytes(raw[4:8], "little")]


@functools.lru_cache(maxsize=64)
def schema(first: bytes) -> tuple[tuple[tuple[str, str], ...], tuple[Field, ...]]:
    """Metadata and columns, from the message that begins a stream; who asks often asks with the same one."""
    kind, header, body = next(messages(memoryview(first)), (0, None, b""))
    if kind != arrow.SCHEMA or header is None or body:
        raise Malformed("the stream does not begin with a schema")
    if header.number(0, "<h") != 0:
        raise Unsupported("the stream is big-endian: send it little-endian")
    metadata = {each.text(0): each.text(1) for each in header.tables(2, _METADATA_MAX)}
    fields = tuple([_field(each, 0) for each in header.tables(1, _FIELDS_MAX)])
    if len({each.name for each in fields}) != len(fields):
        raise Malformed("two columns have the same name")
    return tuple(metadata.items()), fields


def messages(raw: memoryview) -> Iterator[tuple[int, Flat, memoryview]]:
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
        found = root(raw[at + 8 : start])
        body_bytes = found.number(3, "<q")
        if body_bytes < 0 or start + body_bytes > len(raw):
            raise Malformed("the stream ends within a message's body")
        yield found.number(1, "<B"), found.table(2), raw[start : start + body_bytes]
        at = start + body_bytes


def _field(flat: Flat, depth: int) -> Field:
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


def _kind(flat: Flat, type_: int) -> Kind | None:
    match type_:
        case arrow.UTF8:
            return "utf8"
        case arrow.LARGE_UTF8:
            return "large_utf8"
        case arrow.BOOL:
            return "bool"
        case arrow.INT:
            found = flat.table(3)
            is_i4 = found.number(0, "<i") == 32 and found.number(1, "<B") == 1
            return "i4" if is_i4 else None
        case arrow.FLOAT:
            return arrow.FLOAT_KINDS.get(flat.table(3).number(0, "<h"))
    return None

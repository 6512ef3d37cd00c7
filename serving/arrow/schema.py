"""Arrow's schema and messages as flatbuffers: written, and read with every position checked. Pure.

Tables and slots follow `Schema.fbs` and `Message.fbs` of the Arrow columnar format, version V5, little-endian.
"""

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import flatbuffers

ARROW_MEDIA_TYPE = "application/vnd.apache.arrow.stream"
ColumnKind = Literal["utf8", "large_utf8", "bool", "i4", "f4", "f8", "list", "fixed"]
VERSION_V5 = 4
SCHEMA, RECORD_BATCH = 1, 3
CONTINUATION = b"\xff\xff\xff\xff"

END = CONTINUATION + bytes(4)
"""End-of-stream marker."""

INT, FLOAT, UTF8, BOOL, LIST, FIXED_LIST, LARGE_UTF8 = 2, 3, 5, 6, 12, 16, 20

_TYPES = {
    "utf8": UTF8, "large_utf8": LARGE_UTF8, "bool": BOOL, "i4": INT, "f4": FLOAT, "f8": FLOAT,
    "list": LIST, "fixed": FIXED_LIST,
}  # fmt: skip

FLOAT_KINDS: dict[int, ColumnKind] = {1: "f4", 2: "f8"}
"""Kinds of float columns by the format's `Precision`."""

_U16 = struct.Struct("<H")
_I32 = struct.Struct("<i")
_U32 = struct.Struct("<I")


class Field(NamedTuple):
    """Column of a schema; a list has a `child`, one of fixed size also its `width`."""

    name: str
    kind: ColumnKind
    nullable: bool = False
    child: "Field | None" = None
    width: int = 0


@functools.lru_cache(maxsize=256)
def schema_message(fields: tuple[Field, ...], metadata: tuple[tuple[str, str], ...] = ()) -> bytes:
    """Return the encapsulated message that begins a stream."""
    builder = flatbuffers.Builder(1024)
    fields_at = _offsets(builder, [_field(builder, field) for field in fields])
    pairs = _offsets(builder, [_pair(builder, *key_value) for key_value in metadata])
    builder.StartObject(4)
    builder.PrependUOffsetTRelativeSlot(1, fields_at, 0)
    builder.PrependUOffsetTRelativeSlot(2, pairs, 0)
    return encapsulated(message(builder, SCHEMA, builder.EndObject(), 0))


def message(builder: flatbuffers.Builder, kind: int, header: int, body_bytes: int) -> bytes:
    """Finish a flatbuffer `Message` around its header."""
    builder.StartObject(5)
    builder.PrependInt64Slot(3, body_bytes, 0)
    builder.PrependUOffsetTRelativeSlot(2, header, 0)
    builder.PrependUint8Slot(1, kind, 0)
    builder.PrependInt16Slot(0, VERSION_V5, 0)
    builder.Finish(builder.EndObject())
    return bytes(builder.Output())


def encapsulated(metadata: bytes) -> bytes:
    """Prefix a message's metadata with its length and pad it, so that the body begins at a multiple of 8."""
    padded = len(metadata) + -len(metadata) % 8
    return CONTINUATION + padded.to_bytes(4, "little") + metadata.ljust(padded, b"\0")


def _field(builder: flatbuffers.Builder, field: Field) -> int:
    inner = [] if field.child is None else [_field(builder, field.child)]
    children = _offsets(builder, inner)
    name = builder.CreateString(field.name)
    builder.StartObject(2)
    _put_type(builder, field)
    type_ = builder.EndObject()
    builder.StartObject(7)
    builder.PrependUOffsetTRelativeSlot(0, name, 0)
    builder.PrependBoolSlot(1, field.nullable, False)
    builder.PrependUint8Slot(2, _TYPES[field.kind], 0)
    builder.PrependUOffsetTRelativeSlot(3, type_, 0)
    builder.PrependUOffsetTRelativeSlot(5, children, 0)
    end: int = builder.EndObject()
    return end


def _put_type(builder: flatbuffers.Builder, field: Field) -> None:
    put: dict[str, Callable[[], None]] = {
        "i4": lambda: (builder.PrependInt32Slot(0, 32, 0), builder.PrependBoolSlot(1, True, False))[
            0
        ],
        "f4": lambda: builder.PrependInt16Slot(0, 1, 0),
        "f8": lambda: builder.PrependInt16Slot(0, 2, 0),
        "fixed": lambda: builder.PrependInt32Slot(0, field.width, 0),
    }
    if field.kind in put:
        put[field.kind]()


def _pair(builder: flatbuffers.Builder, key: str, value: str) -> int:
    key_at, value_at = builder.CreateString(key), builder.CreateString(value)
    builder.StartObject(2)
    builder.PrependUOffsetTRelativeSlot(0, key_at, 0)
    builder.PrependUOffsetTRelativeSlot(1, value_at, 0)
    end: int = builder.EndObject()
    return end


def _offsets(builder: flatbuffers.Builder, offsets: Sequence[int]) -> int:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    end: int = builder.EndVector()
    return end


class Malformed(ValueError):
    """Bytes are no valid message; the text says why."""


class FlatTable:
    """Table of a flatbuffer; raises Malformed for an offset outside the message."""

    def __init__(self, raw: bytes | memoryview, at: int) -> None:
        self._raw, self._at = raw, at
        self._vtable = at - self._read(_I32, at)
        self._size = self._read(_U16, self._vtable)
        if self._size < 4 or self._vtable + self._size > len(raw):
            raise Malformed("a vtable reaches beyond its message")

    def at(self, slot: int) -> int:
        """Return the position of a field's value in the message; 0 if it has none."""
        entry = 4 + 2 * slot
        if entry + 2 > self._size:
            return 0
        offset = self._read(_U16, self._vtable + entry)
        return self._at + offset if offset else 0

    def number(self, slot: int, layout: str) -> int:
        """Return a scalar by its struct layout; 0 if the field is absent."""
        at = self.at(slot)
        return self._read(struct.Struct(layout), at) if at else 0

    def table(self, slot: int) -> "FlatTable":
        """Return the table that a field points at."""
        at = self.at(slot)
        if not at:
            raise Malformed(f"a message lacks what belongs into its slot {slot}")
        return FlatTable(self._raw, at + self._read(_U32, at))

    def has(self, slot: int) -> bool:
        """True if the field is present."""
        return self.at(slot) != 0

    def vector(self, slot: int, size: int) -> tuple[int, int]:
        """Return (position of the first element, count) of a vector of `size`-byte elements; (0, 0) without one."""
        at = self.at(slot)
        if not at:
            return 0, 0
        start = at + self._read(_U32, at)
        count = self._read(_U32, start)
        if start + 4 + count * size > len(self._raw):
            raise Malformed("a vector reaches beyond its message")
        return start + 4, count

    def tables(self, slot: int, count_max: int) -> list["FlatTable"]:
        """Return a vector of tables."""
        first, count = self.vector(slot, 4)
        if count > count_max:
            raise Malformed(f"{count} where at most {count_max} are read")
        offset_positions = range(first, first + 4 * count, 4)
        return [FlatTable(self._raw, at + self._read(_U32, at)) for at in offset_positions]

    def pairs(self, slot: int, count_max: int) -> list[tuple[int, int]]:
        """Return a vector of structs of two int64."""
        first, count = self.vector(slot, 16)
        if count > count_max:
            raise Malformed(f"{count} where at most {count_max} are read")
        numbers = struct.unpack_from(f"<{2 * count}q", self._raw, first)
        return list(zip(numbers[::2], numbers[1::2], strict=True))

    def text(self, slot: int) -> str:
        """Return a string; empty if the field is absent."""
        start, size = self.vector(slot, 1)
        try:
            return str(self._raw[start : start + size], "utf-8")
        except UnicodeDecodeError as error:
            raise Malformed("a name is not UTF-8") from error

    def _read(self, layout: struct.Struct, at: int) -> int:
        if not 0 <= at <= len(self._raw) - layout.size:
            raise Malformed("an offset points beyond its message")
        number: int = layout.unpack_from(self._raw, at)[0]
        return number


def read_root(raw: bytes | memoryview) -> FlatTable:
    """Return the outermost table."""
    if len(raw) < _U32.size:
        raise Malformed("a message is too short for what it says it is")
    return FlatTable(raw, _U32.unpack_from(raw)[0])

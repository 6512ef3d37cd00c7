"""Writer and reader of Arrow's schema and messages (flatbuffers); the reader checks every position. Pure.

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
SCHEMA_MESSAGE_KIND, RECORD_BATCH_MESSAGE_KIND = 1, 3
CONTINUATION = b"\xff\xff\xff\xff"

END_OF_STREAM = CONTINUATION + bytes(4)
"""End-of-stream marker."""

(INT_TYPE_ID, FLOAT_TYPE_ID, UTF8_TYPE_ID, BOOL_TYPE_ID, LIST_TYPE_ID, FIXED_LIST_TYPE_ID, LARGE_UTF8_TYPE_ID) = (
    2,
    3,
    5,
    6,
    12,
    16,
    20,
)

_TYPE_ID_BY_KIND = {
    "utf8": UTF8_TYPE_ID, "large_utf8": LARGE_UTF8_TYPE_ID, "bool": BOOL_TYPE_ID, "i4": INT_TYPE_ID,
    "f4": FLOAT_TYPE_ID, "f8": FLOAT_TYPE_ID,
    "list": LIST_TYPE_ID, "fixed": FIXED_LIST_TYPE_ID,
}  # fmt: skip

FLOAT_KIND_BY_PRECISION: dict[int, ColumnKind] = {1: "f4", 2: "f8"}
"""Kinds of float columns by the format's `Precision`."""

_UINT16 = struct.Struct("<H")
_INT32 = struct.Struct("<i")
_UINT32 = struct.Struct("<I")


class Field(NamedTuple):
    """Column of a schema; a list has a `child`, and a fixed-size list also a `fixed_list_size`."""

    name: str
    kind: ColumnKind
    nullable: bool = False
    child: "Field | None" = None
    fixed_list_size: int = 0


@functools.lru_cache(maxsize=256)
def schema_message(fields: tuple[Field, ...], schema_metadata: tuple[tuple[str, str], ...] = ()) -> bytes:
    """Return the encapsulated message that begins a stream."""
    builder = flatbuffers.Builder(1024)
    fields_offset = _write_offsets(builder, [_write_field(builder, field) for field in fields])
    metadata_offset = _write_offsets(builder, [_write_pair(builder, *key_value) for key_value in schema_metadata])
    builder.StartObject(4)
    builder.PrependUOffsetTRelativeSlot(1, fields_offset, 0)
    builder.PrependUOffsetTRelativeSlot(2, metadata_offset, 0)
    return encapsulate(finish_message(builder, SCHEMA_MESSAGE_KIND, builder.EndObject(), 0))


def finish_message(builder: flatbuffers.Builder, message_kind: int, header_offset: int, body_bytes: int) -> bytes:
    """Finish a flatbuffer `Message` around its header."""
    builder.StartObject(5)
    builder.PrependInt64Slot(3, body_bytes, 0)
    builder.PrependUOffsetTRelativeSlot(2, header_offset, 0)
    builder.PrependUint8Slot(1, message_kind, 0)
    builder.PrependInt16Slot(0, VERSION_V5, 0)
    builder.Finish(builder.EndObject())
    return bytes(builder.Output())


def encapsulate(message_metadata: bytes) -> bytes:
    """Prefix a message's metadata with its length and pad it, so that the body begins at a multiple of 8."""
    padded_bytes = len(message_metadata) + -len(message_metadata) % 8
    return CONTINUATION + padded_bytes.to_bytes(4, "little") + message_metadata.ljust(padded_bytes, b"\0")


def _write_field(builder: flatbuffers.Builder, field: Field) -> int:
    child_offsets = [] if field.child is None else [_write_field(builder, field.child)]
    children_offset = _write_offsets(builder, child_offsets)
    name_offset = builder.CreateString(field.name)
    builder.StartObject(2)
    _put_type(builder, field)
    type_offset = builder.EndObject()
    builder.StartObject(7)
    builder.PrependUOffsetTRelativeSlot(0, name_offset, 0)
    builder.PrependBoolSlot(1, field.nullable, False)
    builder.PrependUint8Slot(2, _TYPE_ID_BY_KIND[field.kind], 0)
    builder.PrependUOffsetTRelativeSlot(3, type_offset, 0)
    builder.PrependUOffsetTRelativeSlot(5, children_offset, 0)
    field_offset: int = builder.EndObject()
    return field_offset


def _put_type(builder: flatbuffers.Builder, field: Field) -> None:
    put_by_kind: dict[str, Callable[[], None]] = {
        "i4": lambda: (builder.PrependInt32Slot(0, 32, 0), builder.PrependBoolSlot(1, True, False))[0],
        "f4": lambda: builder.PrependInt16Slot(0, 1, 0),
        "f8": lambda: builder.PrependInt16Slot(0, 2, 0),
        "fixed": lambda: builder.PrependInt32Slot(0, field.fixed_list_size, 0),
    }
    if field.kind in put_by_kind:
        put_by_kind[field.kind]()


def _write_pair(builder: flatbuffers.Builder, metadata_key: str, metadata_value: str) -> int:
    key_offset, value_offset = builder.CreateString(metadata_key), builder.CreateString(metadata_value)
    builder.StartObject(2)
    builder.PrependUOffsetTRelativeSlot(0, key_offset, 0)
    builder.PrependUOffsetTRelativeSlot(1, value_offset, 0)
    pair_offset: int = builder.EndObject()
    return pair_offset


def _write_offsets(builder: flatbuffers.Builder, element_offsets: Sequence[int]) -> int:
    builder.StartVector(4, len(element_offsets), 4)
    for offset in reversed(element_offsets):
        builder.PrependUOffsetTRelative(offset)
    vector_offset: int = builder.EndVector()
    return vector_offset


class MalformedStream(ValueError):
    """Invalid stream or message; the message of the error says why."""


class FlatTable:
    """Table of a flatbuffer; raises MalformedStream for an offset outside the message."""

    def __init__(self, message_bytes: bytes | memoryview, table_offset: int) -> None:
        self._message_bytes, self._table_offset = message_bytes, table_offset
        self._vtable_offset = table_offset - self._unpack_at(_INT32, table_offset)
        self._vtable_bytes = self._unpack_at(_UINT16, self._vtable_offset)
        if self._vtable_bytes < 4 or self._vtable_offset + self._vtable_bytes > len(message_bytes):
            raise MalformedStream("a vtable extends beyond its message")

    def field_offset(self, field_slot: int) -> int:
        """Return the position of a field's value in the message; 0 if it has none."""
        slot_offset = 4 + 2 * field_slot
        if slot_offset + 2 > self._vtable_bytes:
            return 0
        relative_offset = self._unpack_at(_UINT16, self._vtable_offset + slot_offset)
        return self._table_offset + relative_offset if relative_offset else 0

    def read_scalar(self, field_slot: int, scalar_layout: str) -> int:
        """Return a scalar by its struct layout; 0 if the field is absent."""
        value_offset = self.field_offset(field_slot)
        return self._unpack_at(struct.Struct(scalar_layout), value_offset) if value_offset else 0

    def table(self, field_slot: int) -> "FlatTable":
        """Return the table that a field points at."""
        pointer_offset = self.field_offset(field_slot)
        if not pointer_offset:
            raise MalformedStream(f"a message lacks the field in slot {field_slot}")
        return FlatTable(self._message_bytes, pointer_offset + self._unpack_at(_UINT32, pointer_offset))

    def has_field(self, field_slot: int) -> bool:
        """True if the field is present."""
        return self.field_offset(field_slot) != 0

    def vector_extent(self, field_slot: int, element_bytes: int) -> tuple[int, int]:
        """Return (position of the first element, count) of a vector with elements of `element_bytes`; else (0, 0)."""
        pointer_offset = self.field_offset(field_slot)
        if not pointer_offset:
            return 0, 0
        vector_offset = pointer_offset + self._unpack_at(_UINT32, pointer_offset)
        element_count = self._unpack_at(_UINT32, vector_offset)
        if vector_offset + 4 + element_count * element_bytes > len(self._message_bytes):
            raise MalformedStream("a vector extends beyond its message")
        return vector_offset + 4, element_count

    def read_tables(self, field_slot: int, table_count_max: int) -> list["FlatTable"]:
        """Return a vector of tables."""
        first_offset, table_count = self.vector_extent(field_slot, 4)
        if table_count > table_count_max:
            raise MalformedStream(f"{table_count} elements where at most {table_count_max} are allowed")
        offset_positions = range(first_offset, first_offset + 4 * table_count, 4)
        return [
            FlatTable(self._message_bytes, pointer_offset + self._unpack_at(_UINT32, pointer_offset))
            for pointer_offset in offset_positions
        ]

    def read_int64_pairs(self, field_slot: int, pair_count_max: int) -> list[tuple[int, int]]:
        """Return a vector of structs of two int64."""
        first_offset, pair_count = self.vector_extent(field_slot, 16)
        if pair_count > pair_count_max:
            raise MalformedStream(f"{pair_count} elements where at most {pair_count_max} are allowed")
        numbers = struct.unpack_from(f"<{2 * pair_count}q", self._message_bytes, first_offset)
        return list(zip(numbers[::2], numbers[1::2], strict=True))

    def read_text(self, field_slot: int) -> str:
        """Return a string; empty if the field is absent."""
        text_offset, text_bytes = self.vector_extent(field_slot, 1)
        try:
            return str(self._message_bytes[text_offset : text_offset + text_bytes], "utf-8")
        except UnicodeDecodeError as error:
            raise MalformedStream("a name is not UTF-8") from error

    def _unpack_at(self, scalar_layout: struct.Struct, scalar_offset: int) -> int:
        if not 0 <= scalar_offset <= len(self._message_bytes) - scalar_layout.size:
            raise MalformedStream("an offset points beyond its message")
        scalar: int = scalar_layout.unpack_from(self._message_bytes, scalar_offset)[0]
        return scalar


def read_root(message_bytes: bytes | memoryview) -> FlatTable:
    """Return the outermost table."""
    if len(message_bytes) < _UINT32.size:
        raise MalformedStream("a message is shorter than its declared content")
    return FlatTable(message_bytes, _UINT32.unpack_from(message_bytes)[0])

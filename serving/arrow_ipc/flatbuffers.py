"""Reading flatbuffers that anybody may have sent: every position is checked before it is read. Pure."""

import struct

_U16 = struct.Struct("<H")
_I32 = struct.Struct("<i")
_U32 = struct.Struct("<I")


class Malformed(ValueError):
    """Bytes that are no valid message; the text says why."""


class FlatTable:
    """Table of a flatbuffer; raises Malformed for whatever points outside."""

    def __init__(self, raw: bytes | memoryview, at: int) -> None:
        self._raw, self._at = raw, at
        self._vtable = at - self._read(_I32, at)
        self._size = self._read(_U16, self._vtable)
        if self._size < 4 or self._vtable + self._size > len(raw):
            raise Malformed("a vtable reaches beyond its message")

    def at(self, slot: int) -> int:
        """Position of a field's value in the message; 0 if it has none."""
        entry = 4 + 2 * slot
        if entry + 2 > self._size:
            return 0
        offset = self._read(_U16, self._vtable + entry)
        return self._at + offset if offset else 0

    def number(self, slot: int, layout: str) -> int:
        """A scalar by its struct layout; 0 where it is not there."""
        at = self.at(slot)
        return self._read(struct.Struct(layout), at) if at else 0

    def table(self, slot: int) -> "FlatTable":
        """The table that a field points at."""
        at = self.at(slot)
        if not at:
            raise Malformed(f"a message lacks what belongs into its slot {slot}")
        return FlatTable(self._raw, at + self._read(_U32, at))

    def has(self, slot: int) -> bool:
        """True if the field is present."""
        return self.at(slot) != 0

    def vector(self, slot: int, size: int) -> tuple[int, int]:
        """Position of the first element and count of a vector of `size`-byte elements; (0, 0) without one."""
        at = self.at(slot)
        if not at:
            return 0, 0
        start = at + self._read(_U32, at)
        count = self._read(_U32, start)
        if start + 4 + count * size > len(self._raw):
            raise Malformed("a vector reaches beyond its message")
        return start + 4, count

    def tables(self, slot: int, count_max: int) -> list["FlatTable"]:
        """A vector of tables."""
        first, count = self.vector(slot, 4)
        if count > count_max:
            raise Malformed(f"{count} where at most {count_max} are read")
        offset_positions = range(first, first + 4 * count, 4)
        return [FlatTable(self._raw, at + self._read(_U32, at)) for at in offset_positions]

    def pairs(self, slot: int, count_max: int) -> list[tuple[int, int]]:
        """A vector of structs of two int64."""
        first, count = self.vector(slot, 16)
        if count > count_max:
            raise Malformed(f"{count} where at most {count_max} are read")
        numbers = struct.unpack_from(f"<{2 * count}q", self._raw, first)
        return list(zip(numbers[::2], numbers[1::2], strict=True))

    def text(self, slot: int) -> str:
        """A string; nothing there is empty."""
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


def root(raw: bytes | memoryview) -> FlatTable:
    """The outermost table."""
    if len(raw) < _U32.size:
        raise Malformed("a message is too short for what it says it is")
    return FlatTable(raw, _U32.unpack_from(raw)[0])

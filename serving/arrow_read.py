"""Arrow IPC streams as anybody may send them, with nothing but numpy. Pure.

Reads plain columns of the kinds that this service writes or takes. Nothing is decompressed and no memory is taken that
the stream does not itself fill; whatever is wrong raises Malformed, whatever is right but not read here Unsupported.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving import arrow_schema as arrow
from serving.arrow_flat import Flat, Malformed, root
from serving.arrow_schema import Field, Kind

_FIELDS_MAX = 64
_DEPTH_MAX = 2
_METADATA_MAX = 64
_NUMBERS: dict[str, np.dtype[Any]] = {
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


def read(raw: bytes, rows_max: int) -> Frame:
    """The columns: utf8 as str, lists as tuples or read-only float32 arrays, None for null."""
    messages = _messages(memoryview(raw))
    kind, header, _ = next(messages, (0, None, None))
    if kind != arrow.SCHEMA or header is None:
        raise Malformed("the stream does not begin with a schema")
    if header.number(0, "<h") != 0:
        raise Unsupported("the stream is big-endian: send it little-endian")
    metadata = {each.text(0): each.text(1) for each in header.tables(2, _METADATA_MAX)}
    fields = [_field(each, 0) for each in header.tables(1, _FIELDS_MAX)]
    columns: dict[str, list[Any]] = {each.name: [] for each in fields}
    if len(columns) != len(fields):
        raise Malformed("two columns have the same name")
    rows = 0
    for kind, header, body in messages:
        if kind != arrow.RECORD_BATCH:
            raise Unsupported("only record batches are read: send no dictionaries")
        count = header.number(0, "<q")
        if count < 0 or rows + count > rows_max:
            raise Malformed(f"the stream has more than {rows_max} rows")
        rows += count
        batch = _Batch(header, body)
        for each in fields:
            columns[each.name] += batch.column(each, count)
        batch.check_end()
    return Frame(metadata, {each.name: each for each in fields}, columns, rows)


def _messages(raw: memoryview) -> Iterator[tuple[int, Flat, memoryview]]:
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


class _Batch:
    """Hands out a record batch's nodes and buffers in the order of its columns."""

    def __init__(self, header: Flat, body: memoryview) -> None:
        if header.has(3):
            raise Unsupported("the stream is compressed: send it without compression")
        self._nodes = iter(header.pairs(1))
        self._buffers = iter(header.pairs(2))
        self._body = body

    def column(self, field: Field, rows: int) -> list[Any]:
        """The values of the next column, which has `rows` of them."""
        valid = self._valid(rows)
        values = self._values(field, rows)
        if valid is None:
            return values
        return [each if there else None for each, there in zip(values, valid, strict=True)]

    def check_end(self) -> None:
        """Raises Malformed if there is more than the columns have."""
        if next(self._nodes, None) is not None or next(self._buffers, None) is not None:
            raise Malformed("a record batch has more than the schema's columns")

    def _values(self, field: Field, rows: int) -> list[Any]:
        match field.kind:
            case "utf8":
                return self._texts(self._offsets(rows, "<i4"))
            case "large_utf8":
                return self._texts(self._offsets(rows, "<i8"))
            case "bool":
                return self._bits(rows)
            case "list":
                return self._lists(field, self._offsets(rows, "<i4"))
            case "fixed":
                step = field.width
                return self._lists(field, np.arange(rows + 1, dtype=np.int64) * step)
        found: list[Any] = self._array(rows, _NUMBERS[field.kind]).tolist()
        return found

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
        numbers = self._array(length, _NUMBERS["f4"])
        return [numbers[a:b] for a, b in pairwise(cuts)]

    def _no_nulls(self, node: tuple[int, int]) -> None:
        if node[1]:
            raise Unsupported("a list holds nulls")
        self._buffer()

    def _texts(self, ends: NDArray[Any]) -> list[str]:
        cuts, data = ends.tolist(), self._buffer()
        if cuts[-1] > len(data):
            raise Malformed("a text reaches beyond its bytes")
        try:
            whole = str(data[cuts[0] : cuts[-1]], "utf-8")
            if len(whole) == cuts[-1] - cuts[0]:  # one byte each: cut the text, not the bytes
                first = cuts[0]
                return [whole[a - first : b - first] for a, b in pairwise(cuts)]
            return [str(data[a:b], "utf-8") for a, b in pairwise(cuts)]
        except UnicodeDecodeError as error:
            raise Malformed("a text is not UTF-8") from error

    def _offsets(self, rows: int, layout: str) -> NDArray[Any]:
        """Not negative and rising; a column without rows may have none."""
        dtype, data = np.dtype(layout), self._buffer()
        if rows == 0:
            return np.zeros(1, dtype)
        if len(data) < (rows + 1) * dtype.itemsize:
            raise Malformed("a column lacks offsets")
        found = np.frombuffer(data, dtype, rows + 1)
        if found[0] < 0 or (found[1:] < found[:-1]).any():
            raise Malformed("offsets fall")
        return found

    def _array(self, rows: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        data = self._buffer()
        if len(data) < rows * dtype.itemsize:
            raise Malformed("a column lacks values")
        return np.frombuffer(data, dtype, rows)

    def _valid(self, rows: int) -> list[bool] | None:
        """Which rows are there; None = all."""
        length, nulls = self._node()
        if length != rows or not 0 <= nulls <= rows:
            raise Malformed(f"a column has {length} of {rows} rows, {nulls} of them null")
        if nulls == 0:
            self._buffer()
            return None
        return self._bits(rows)

    def _bits(self, rows: int) -> list[bool]:
        found = self._array((rows + 7) // 8, np.dtype(np.uint8))
        bits = np.unpackbits(found, count=rows, bitorder="little")
        there: list[bool] = bits.astype(np.bool_).tolist()
        return there

    def _node(self) -> tuple[int, int]:
        found = next(self._nodes, None)
        if found is None:
            raise Malformed("a record batch lacks columns of the schema")
        return found

    def _buffer(self) -> memoryview:
        found = next(self._buffers, None)
        if found is None:
            raise Malformed("a record batch lacks buffers")
        at, size = found
        if at < 0 or size < 0 or at + size > len(self._body):
            raise Malformed("a buffer reaches beyond its body")
        return self._body[at : at + size]

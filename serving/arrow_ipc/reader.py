"""Arrow IPC streams as anybody may send them, with nothing but numpy. Pure.

Reads plain columns of the kinds that this service writes or takes. Nothing is decompressed and no memory is taken that
the stream does not itself fill; whatever is wrong raises Malformed, whatever is right but not read here Unsupported.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.arrow_ipc import schema as arrow
from serving.arrow_ipc.flatbuffers import Malformed
from serving.arrow_ipc.messages import (
    KEPT_MAX,
    BatchLayout,
    Unsupported,
    first_message,
    layout,
    messages,
    schema,
)
from serving.arrow_ipc.schema import Field

_NUMBERS: dict[str, np.dtype[Any]] = {
    "i4": np.dtype("<i4"),
    "f4": np.dtype("<f4"),
    "f8": np.dtype("<f8"),
}

BATCHES_MAX = 64
"""Greatest number of record batches: each costs as much as dozens of rows, an empty one costs its sender nothing."""

Cutter = Callable[[memoryview, memoryview], list[bytes] | None]


@dataclass(frozen=True, slots=True)
class Frame:
    """All record batches of a stream, one list or array per column."""

    metadata: dict[str, str]
    fields: dict[str, Field]
    columns: dict[str, list[Any]]
    rows: int


def read(
    raw: bytes,
    rows_max: int,
    *,
    as_bytes: bool = False,
    cutter: Cutter | None = None,
    check: Callable[[tuple[Field, ...]], None] = lambda _fields: None,
) -> Frame:
    """The columns: utf8 as str (or its bytes), lists as tuples or read-only float32 arrays, None for null.

    `cutter` cuts bytes at int32 places, or gives None for what it leaves to others. `check` raises for columns that are
    not wanted before any of their rows is read.
    """
    first = first_message(raw)
    metadata, fields = schema(first) if len(first) <= KEPT_MAX else schema.__wrapped__(first)
    check(fields)
    columns: dict[str, list[Any]] = {field.name: [] for field in fields}
    rows = 0
    for batch_index, (message, body) in enumerate(messages(memoryview(raw)[len(first) :])):
        if batch_index == BATCHES_MAX:
            raise Unsupported(
                f"the stream has more than {BATCHES_MAX} record batches: send larger ones"
            )
        if message.kind != arrow.RECORD_BATCH:
            raise Unsupported("only record batches are read: send no dictionaries")
        described = layout(message)
        count = described.rows
        if count < 0 or rows + count > rows_max:
            raise Malformed(f"the stream has more than {rows_max} rows")
        rows += count
        batch = _Batch(described, body, as_bytes, cutter)
        for field in fields:
            columns[field.name] += batch.column(field, count)
        batch.check_end()
    return Frame(dict(metadata), {field.name: field for field in fields}, columns, rows)


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
        numbers: list[Any] = self._array(rows, _NUMBERS[field.kind]).tolist()
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
        numbers = self._array(length, _NUMBERS["f4"])
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
        """Validity of each row, True where it is not null; None = all are valid."""
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

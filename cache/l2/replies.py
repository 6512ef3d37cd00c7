"""Replies of one length, as they lie in what came from the socket: no object for each."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.native import loader

_END = b"\r\n"


class Frames(Sequence[bytes]):
    """`count` RESP bulk strings of `length` bytes each, one behind the other in `data`."""

    __slots__ = ("_at", "_count", "_data", "_length", "_stride")

    def __init__(self, data: bytes, count: int, length: int, first: int = 0) -> None:
        self._data = data
        self._count = count
        self._length = length
        self._stride = stride(length)
        self._at = len(_head(length)) + first * self._stride

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> bytes:  # type: ignore[override]  # nobody slices replies
        if not 0 <= index < self._count:
            raise IndexError(index)
        start = self._at + index * self._stride
        return self._data[start : start + self._length]

    def payloads(self) -> list[bytes]:
        """Payloads of all replies in order, each a copy."""
        data, length, last = self._data, self._length, self._at + self._count * self._stride
        return [data[at : at + length] for at in range(self._at, last, self._stride)]

    def part(self, first: int, count: int) -> "Frames":
        """The `count` replies from `first` on, in the same buffer; raises IndexError beyond the last."""
        if first + count > self._count:
            raise IndexError(first + count)
        at = first + (self._at - len(_head(self._length))) // self._stride
        return Frames(self._data, count, self._length, at)

    @classmethod
    def merged(cls, parts: Sequence[tuple[Sequence[int], "Frames"]]) -> "Frames":
        """Merges runs of replies, all of one length, into one, by the place of each of their replies in the whole."""
        count, length = sum(len(indexes) for indexes, _ in parts), parts[0][1]._length
        merged_rows = np.empty(count, f"V{stride(length)}")
        for indexes, frames in parts:
            first = frames._at - len(_head(length))
            merged_rows[np.asarray(indexes)] = np.ndarray(
                frames._count, merged_rows.dtype, frames._data, first, (frames._stride,)
            )
        return cls(merged_rows.tobytes(), count, length)

    def rows(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        """All replies as records of `dtype`: one copy, aligned as numpy likes it; ValueError for another size."""
        if dtype.itemsize != self._length:
            raise ValueError(f"a reply has {self._length} bytes, a record {dtype.itemsize}")
        return np.ndarray((self._count,), dtype, self._data, self._at, (self._stride,)).copy()

    def sound(
        self, dtype: np.dtype[Any], fingerprints: NDArray[np.uint64], record_format: int
    ) -> NDArray[Any] | None:
        """All replies as records; None unless each has that format and its place's fingerprint."""
        if dtype.itemsize != self._length:
            return None
        copy, count = loader.kernels.records_of(
            self._data, self._at, self._stride, self._count, self._length, fingerprints,
            record_format,
        )  # fmt: skip
        return np.frombuffer(copy, dtype) if count == self._count else None


def stride(length: int) -> int:
    """Bytes of a RESP bulk string of `length` bytes with its header and line end."""
    return len(_head(length)) + length + len(_END)


def _head(length: int) -> bytes:
    return b"$%d\r\n" % length

"""Arguments of functions, read from a fuzzer's bytes."""

import numpy as np
from numpy.typing import NDArray

_DELICATE = (
    0, 1, -1, 7, 8, 15, 16, 17, 63, 64, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**48,
    2**62, 2**63 - 1, -(2**31), -(2**63),
)  # fmt: skip


class FuzzInput:
    """A reader of bytes, with zeros after their end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def raw(self, size: int) -> bytes:
        """Return the next bytes, at most so many."""
        next_bytes = self._data[self._at : self._at + size]
        self._at += size
        return next_bytes

    def remaining_bytes(self) -> bytes:
        """Return all remaining bytes."""
        return self.raw(len(self._data))

    def number(self, low: int, high: int) -> int:
        """Return an integer within bounds, both included."""
        span = high - low + 1
        size = (span.bit_length() + 7) // 8
        return low + int.from_bytes(self.raw(size), "little") % span

    def delicate(self, high: int | None = None) -> int:
        """Return an integer at which arithmetic may overflow, or a small one."""
        choice = self.number(0, 255)
        value = _DELICATE[choice % len(_DELICATE)] if choice & 1 else choice >> 1
        return value if high is None else min(value, high)

    def is_true(self) -> bool:
        """Return a truth value."""
        return bool(self.number(0, 1))

    def text(self, high: int) -> bytes:
        """Return bytes of any length up to a bound."""
        return self.raw(self.number(0, high))

    def texts(self, count: int, high: int) -> list[bytes]:
        """Return a list of bytes, at most `count` of them."""
        return [self.text(high) for _ in range(self.number(0, count))]

    def array(self, dtype: str, count: int) -> NDArray[np.generic]:
        """Return an array of so many values from the next bytes, with zeros after their end."""
        size = np.dtype(dtype).itemsize * count
        return np.frombuffer(self.raw(size).ljust(size, b"\0"), dtype).copy()

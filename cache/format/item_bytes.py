"""Item ids as they are, many at once: their bytes one behind the other, and how many each has."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from cache.format.text_table import LONGEST, Kept

_PAD = b"\xff"
"""Padding byte, which no UTF-8 text holds."""


class Named(NamedTuple):
    """The ids of uint32[n, k] ordinals, and where each begins and the last one ends, int32[n * k + 1] as bytes."""

    data: bytes
    cuts: bytes
    k: int

    @classmethod
    def of(cls, data: bytes, sizes: NDArray[np.int32]) -> Self:
        """Ids from their joined bytes `data` and the size of each in bytes, int32[n, k]."""
        cuts = np.zeros(sizes.size + 1, np.int32)
        np.add.accumulate(sizes.ravel(), dtype=np.int32, out=cuts[1:])
        return cls(data, cuts.tobytes(), sizes.shape[-1])

    @property
    def sizes(self) -> NDArray[np.int32]:
        """Bytes of each id, int32[n, k]."""
        cuts = np.frombuffer(self.cuts, np.int32)
        sizes: NDArray[np.int32] = cuts[1:] - cuts[:-1]
        return sizes.reshape(-1, self.k) if self.k else sizes.reshape(0, 0)


class Names:
    """The ids of a catalogue whose longest has `longest` bytes; `ids_of` reads them."""

    def __init__(
        self, count: int, longest: int, ids_of: Callable[[NDArray[np.uint32]], Sequence[str]]
    ) -> None:
        self._ids_of = ids_of
        self._kept = Kept(count, longest, _PAD, str.encode, ids_of) if longest <= LONGEST else None

    def of(self, ordinals: NDArray[np.uint32]) -> Named:
        """Ids of the ordinals uint32[n, k], in their order."""
        slots = None if self._kept is None else self._kept.slots(ordinals)
        if self._kept is not None and slots is not None:
            sizes = self._kept.sizes(slots)
            return Named.of(self._kept.texts(slots).translate(None, _PAD), sizes)
        found = [each.encode() for each in self._ids_of(ordinals.ravel())]
        sizes = np.fromiter(map(len, found), np.int32, len(found))
        return Named.of(b"".join(found), sizes.reshape(ordinals.shape))

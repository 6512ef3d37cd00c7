"""Item ids as they are, many at once: their bytes one behind the other, and how many each has."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.kept import LONGEST, Kept

_PAD = b"\xff"
"""A byte that no UTF-8 text holds."""


class Named(NamedTuple):
    """The ids of uint32[n, k] ordinals, and the bytes of each, int32[n, k]."""

    data: bytes
    sizes: NDArray[np.int32]


class Names:
    """The ids of a catalogue whose longest has `longest` bytes; `ids_of` reads them."""

    def __init__(
        self, count: int, longest: int, ids_of: Callable[[NDArray[np.uint32]], Sequence[str]]
    ) -> None:
        self._ids_of = ids_of
        self._kept = Kept(count, longest, _PAD, str.encode, ids_of) if longest <= LONGEST else None

    def of(self, ordinals: NDArray[np.uint32]) -> Named:
        """Those of uint32[n, k]."""
        slots = None if self._kept is None else self._kept.slots(ordinals)
        if self._kept is not None and slots is not None:
            sizes = self._kept.sizes(slots)
            return Named(self._kept.texts(slots).translate(None, _PAD), sizes)
        found = [each.encode() for each in self._ids_of(ordinals.ravel())]
        sizes = np.fromiter(map(len, found), np.int32, len(found))
        return Named(b"".join(found), sizes.reshape(ordinals.shape))

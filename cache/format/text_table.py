"""Cache of the text written for each item id, kept at one width, so that many are gathered like numbers."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

LONGEST = 61
"""Bytes of the longest id kept at one width: beyond it, too much of what is gathered would be padding."""

KEPT_MAX = 1 << 18
"""Number of ids kept, at most 16 MB; when it is exceeded, the cache is emptied and starts again."""


class TextTable:
    """Texts of at most `width` bytes, filled up with `pad`, which no text holds; `ids_of` reads those that are new."""

    def __init__(
        self,
        count: int,
        width: int,
        pad: bytes,
        write: Callable[[str], bytes],
        ids_of: Callable[[NDArray[np.uint32]], Sequence[str]],
    ) -> None:
        self.width = width
        self._pad = pad
        self._write = write
        self._ids_of = ids_of
        self._room = min(count, KEPT_MAX)
        self._slots = np.zeros(count, np.int32)
        """Slot of each ordinal in `_texts`; 0: not there."""
        self._texts = np.zeros(self._room + 1, f"V{width}")
        self._filled_count = 0

    def slots(self, ordinals: NDArray[np.uint32]) -> NDArray[np.int32] | None:
        """Slots of the ordinals' texts, valid until the next call; None if a text is too long or there are too many."""
        slots = self._slots.take(ordinals)
        if np.count_nonzero(slots) == slots.size:
            return slots
        self._read(np.unique(ordinals))
        slots = self._slots.take(ordinals)
        return slots if np.count_nonzero(slots) == slots.size else None

    def texts(self, slots: NDArray[np.int32]) -> bytes:
        """Texts in these slots, one after another, each with its padding."""
        return self._texts.take(slots).tobytes()

    def _read(self, ordinals: NDArray[np.uint32]) -> None:
        new = ordinals[self._slots[ordinals] == 0]
        if self._filled_count + len(new) > self._room:
            self._slots[:], self._filled_count = 0, 0
            new = ordinals
        for ordinal, id_ in zip(new.tolist(), self._ids_of(new[: self._room]), strict=False):
            text = self._write(id_)
            if len(text) <= self.width:
                self._filled_count += 1
                self._texts[self._filled_count] = np.void(text.ljust(self.width, self._pad))
                self._slots[ordinal] = self._filled_count

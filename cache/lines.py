"""Lists of item ids as JSON, many at once: texts of one width, gathered like numbers."""

from collections.abc import Callable, Sequence

import numpy as np
import orjson
from numpy.typing import NDArray

LONGEST = 61
"""Bytes of an id: of longer ones too much of a line would be padding."""

KEPT_MAX = 1 << 18
"""Ids kept: at most 16 MB; beyond it what is asked next starts afresh."""

_PAD, _END = b"\0", b"\n"
"""Bytes that no JSON string holds as they are."""


class Lines:
    """The ids of a catalogue whose longest has `longest` bytes; `ids_of` reads those that are new."""

    def __init__(
        self, count: int, longest: int, ids_of: Callable[[NDArray[np.uint32]], Sequence[str]]
    ) -> None:
        self._ids_of = ids_of
        self._room = min(count, KEPT_MAX)
        self._width = longest + len('"",')
        self._slots = np.zeros(count, np.int32)
        """Of each ordinal in `_texts`; 0: not there."""
        self._texts = np.zeros(self._room + 1, f"V{self._width}")
        self._kept = 0

    def of(self, ordinals: NDArray[np.uint32]) -> list[bytes] | None:
        """A comma-separated line of each of uint32[n, k], k > 0; None if an id's JSON is longer than the id."""
        slots = self._slots[ordinals]
        if not slots.all():
            self._read(np.unique(ordinals))
            slots = self._slots[ordinals]
            if not slots.all():
                return None
        found = self._texts.take(slots).tobytes()
        size = ordinals.shape[1] * self._width
        lines = np.empty((len(ordinals), size + 1), np.uint8)
        lines[:, :-1] = np.frombuffer(found, np.uint8).reshape(-1, size)
        lines[:, 0] = _PAD[0]  # the comma before the first
        lines[:, -1] = _END[0]
        return lines.tobytes().translate(None, _PAD).split(_END)[:-1]

    def _read(self, ordinals: NDArray[np.uint32]) -> None:
        new = ordinals[self._slots[ordinals] == 0]
        if self._kept + len(new) > self._room:
            self._slots[:], self._kept = 0, 0
            new = ordinals
        texts = [b"," + orjson.dumps(each) for each in self._ids_of(new[: self._room])]
        for ordinal, text in zip(new.tolist(), texts, strict=False):
            if len(text) <= self._width:
                self._kept += 1
                self._texts[self._kept] = np.void(text.ljust(self._width, _PAD))
                self._slots[ordinal] = self._kept

"""Lists of item ids as JSON, many at once: texts of one width, gathered like numbers."""

from collections.abc import Callable, Sequence

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.format.text_table import TextTable

_PAD, _END = b"\0", b"\n"
"""Bytes that no JSON string holds as they are."""


class ItemJsonRows:
    """The ids of a catalogue whose longest has `longest` bytes; `ids_of` reads those that are new."""

    def __init__(
        self, count: int, longest: int, ids_of: Callable[[NDArray[np.uint32]], Sequence[str]]
    ) -> None:
        self._text_table = TextTable(count, longest + len('"",'), _PAD, _json, ids_of)

    def of(self, ordinals: NDArray[np.uint32]) -> list[bytes] | None:
        """A comma-separated line of each of uint32[n, k], k > 0; None if an id's JSON is longer than the id."""
        slots = self._text_table.slots(ordinals)
        if slots is None:
            return None
        size = ordinals.shape[1] * self._text_table.width
        lines = np.empty((len(ordinals), size + 1), np.uint8)
        padded_texts = np.frombuffer(self._text_table.texts(slots), np.uint8)
        lines[:, :-1] = padded_texts.reshape(-1, size)
        lines[:, 0] = _PAD[0]  # the comma before the first
        lines[:, -1] = _END[0]
        return lines.tobytes().translate(None, _PAD).split(_END)[:-1]


def _json(id_: str) -> bytes:
    return b"," + orjson.dumps(id_)

"""Numbers as JSON, written once: a float16 times a power of two has so few values that each has a place of its own."""

from collections.abc import Iterable
from typing import Final

import numpy as np
import orjson
from numpy.typing import NDArray

DROPPED_BITS: Final = 13
"""Number of low bits of a float32, all of them 0 in such a number; a key is what remains."""

NUMERAL_BYTES: Final = 16
"""Bytes for each number: how many follow, 0 where it was not written yet, then its text."""

_TOO_LONG: Final = NUMERAL_BYTES


class Numerals:
    """A table of numbers' texts: 8 MiB of address space, of which the system gives only what is written."""

    def __init__(self) -> None:
        self.table: NDArray[np.uint8] = np.zeros(
            (1 << (32 - DROPPED_BITS), NUMERAL_BYTES), np.uint8
        )

    def write(self, keys: Iterable[int]) -> None:
        """Writes numbers that are missing, finite ones; one whose text is too long is marked as such."""
        new = np.unique(np.fromiter(keys, np.uint32))
        numbers = (new << np.uint32(DROPPED_BITS)).view(np.float32)
        number_texts = orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",")
        for key, text in zip(new.tolist(), number_texts, strict=True):
            if len(text) < NUMERAL_BYTES:
                self.table[key, 1 : 1 + len(text)] = np.frombuffer(text, np.uint8)
            self.table[key, 0] = min(len(text), _TOO_LONG)

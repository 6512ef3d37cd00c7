"""Ids by their places, found again by two hashes: no Python object per id, so a catalogue may be of any size."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.format.ids import FINGERPRINT_SEED
from precompute.sources.columns import text_hashes

AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """Distinct ids in an order of their own: `texts` is a chunked Arrow array of strings.

    An id is told from others by 128 bits, as in `Ids.of`; 24 bytes each beside the texts.
    """

    texts: Any
    _seed: int
    _hashes: NDArray[np.uint64]
    _fingerprints: NDArray[np.uint64]
    _order: NDArray[np.int64]

    @classmethod
    def of(cls, texts: Any, seed: int = 0) -> Self | None:
        """Vocabulary of Arrow strings, None where an id comes twice."""
        hashes, fingerprints = text_hashes(texts, seed), text_hashes(texts, FINGERPRINT_SEED)
        order = np.argsort(hashes)
        hashes, fingerprints = hashes[order], fingerprints[order]
        shared = hashes[1:] == hashes[:-1]
        if (fingerprints[1:] == fingerprints[:-1])[shared].any():
            return None
        if shared.any():
            return cls.of(texts, seed + 1)
        return cls(texts, seed, hashes, fingerprints, order)

    def __len__(self) -> int:
        return len(self.texts)

    def find_positions(self, texts: Any) -> NDArray[np.int64]:
        """int64[n]: the place of each of some Arrow strings, -1 where it is not among these."""
        if not len(self):
            return np.full(len(texts), -1, np.int64)
        hashes = text_hashes(texts, self._seed)
        sorted_positions = np.minimum(self._hashes.searchsorted(hashes), len(self) - 1)
        is_match = self._hashes[sorted_positions] == hashes
        is_match &= self._fingerprints[sorted_positions] == text_hashes(texts, FINGERPRINT_SEED)
        return np.where(is_match, self._order[sorted_positions], -1)


def repeats_in(texts: Any) -> NDArray[np.int64]:
    """Rows, ascending, of Arrow strings whose text an earlier row has."""
    hashes, fingerprints = text_hashes(texts, 0), text_hashes(texts, FINGERPRINT_SEED)
    order = np.lexsort((fingerprints, hashes))  # stable
    is_repeat = (hashes[order][1:] == hashes[order][:-1]) & (
        fingerprints[order][1:] == fingerprints[order][:-1]
    )
    return np.sort(order[1:][is_repeat])


def as_strings(column: Any) -> Any:
    """A column of strings or large strings as chunks of AT_ONCE strings at most, each with offsets of 32 bits."""
    chunks = [
        chunk.slice(start, AT_ONCE).cast(pa.string())
        for chunk in column.chunks
        for start in range(0, len(chunk), AT_ONCE)
    ]
    return pa.chunked_array(chunks, pa.string())

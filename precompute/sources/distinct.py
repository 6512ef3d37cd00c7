"""Distinct ids, counted or sampled by the smallest of their hashes."""

import numpy as np
from numpy.typing import NDArray

SMALLEST = 1 << 16


class Distinct:
    """Count of different 64-bit hashes, from the smallest of them: exact up to SMALLEST, then within 0.4 %.

    The estimator is that of the k minimum values (Beyer et al., SIGMOD 2007).
    """

    def __init__(self, keep: int = SMALLEST) -> None:
        self._keep = keep
        self.smallest: NDArray[np.uint64] = np.empty(0, np.uint64)

    def add(self, hashes: NDArray[np.uint64]) -> None:
        """Add any number of hashes, any of them again."""
        if len(self.smallest) == self._keep:
            hashes = hashes[hashes < self.smallest[-1]]
        self.smallest = np.union1d(self.smallest, hashes)[: self._keep]

    @property
    def count(self) -> int:
        """Estimated number of different hashes."""
        hash_count = len(self.smallest)
        if hash_count < self._keep:
            return hash_count
        return round((hash_count - 1) / (float(self.smallest[-1]) / 2.0**64))

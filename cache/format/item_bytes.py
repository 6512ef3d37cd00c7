"""Item ids as they are, many at once: their bytes one behind the other, and how many each has."""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray


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

"""Mask of the items that pass a filter."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class FilterMask:
    """Mask of the items that pass, one bit per item (little-endian within a byte), and their number."""

    packed_bits: NDArray[np.uint8]
    passing_count: int

    @classmethod
    def of(cls, mask: Mask) -> Self:
        """Build from a mask bool [items]."""
        return cls(np.packbits(mask, bitorder="little"), int(np.count_nonzero(mask)))

    def among(self, ordinals: NDArray[Any]) -> Mask:
        """Return a mask bool [len(ordinals)] of the ordinals that pass."""
        bit_indexes = np.asarray(ordinals, np.int64)
        mask: Mask = (self.packed_bits[bit_indexes >> 3] >> (bit_indexes & 7).astype(np.uint8) & 1).astype(np.bool_)
        return mask

    def append_mask(self, appended_mask: "FilterMask", item_count: int) -> "FilterMask":
        """Return this mask of `item_count` items followed by the mask of further items."""
        full_byte_count = item_count >> 3
        last_bits = np.unpackbits(self.packed_bits[full_byte_count:], count=item_count & 7, bitorder="little")
        appended_bits = np.unpackbits(appended_mask.packed_bits, bitorder="little")
        tail_bytes = np.packbits(np.concatenate([last_bits, appended_bits]), bitorder="little")
        return FilterMask(
            np.concatenate([self.packed_bits[:full_byte_count], tail_bytes]),
            self.passing_count + appended_mask.passing_count,
        )

    def ordinals(self) -> NDArray[np.int64]:
        """Return all ordinals that pass, ascending."""
        return np.flatnonzero(np.unpackbits(self.packed_bits, bitorder="little")).astype(np.int64)

"""A batch of ids of one table as columns: what is wanted, and what the tiers hold of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from cache.format.manifest import Table
from cache.tiers.l1 import LocalKey
from cache.tiers.results import ReadResult, RecordKey


@dataclass(frozen=True, slots=True, eq=False)
class RecordKeys:
    """Entities that the night knows, and who sent nothing to compute from; the columns of as many `RecordKey`s.

    `positions` are int64[n], none of them negative; `fingerprints` uint64[n].
    """

    table: Table
    keys: Sequence[int]
    fingerprints: NDArray[np.uint64]
    positions: NDArray[np.int64]
    digest: bytes | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def local_keys(self, generation: str) -> list[LocalKey]:
        """Keys in L1: plain tuples, which are equal to and hash like the named ones."""
        named = zip(repeat(generation), repeat(self.table.name), self.keys)
        return cast(list[LocalKey], list(named))

    def select(self, indexes: Sequence[int]) -> "RecordKeys":
        """The wants at `indexes`, as columns."""
        if len(indexes) == len(self.keys):
            return self
        keys = [self.keys[index] for index in indexes]
        at = np.array(indexes, np.intp)
        return RecordKeys(self.table, keys, self.fingerprints[at], self.positions[at], self.digest)

    def record_key_at(self, index: int) -> RecordKey:
        """The want at `index`."""
        print_, position = int(self.fingerprints[index]), int(self.positions[index])
        digest = self.digest if position >= 0 else None
        return RecordKey(self.table, self.keys[index], print_, position, digest)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows that a read of `RecordKeys` found, in their order.

    `records` are of the table's dtype, with the wanted fingerprint; those at the places of `result_by_index` mean
    nothing. `is_l2`: bool[n], False where L1 had it.
    """

    records: NDArray[Any]
    is_l2: NDArray[np.bool_]
    result_by_index: dict[int, ReadResult]

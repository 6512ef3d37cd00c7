"""A batch of ids of one table as columns: what is wanted, and what the tiers hold of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from cache.format.manifest import Table
from cache.tiers.l1 import LocalKey
from cache.tiers.results import Outcome, Want


@dataclass(frozen=True, slots=True, eq=False)
class Wants:
    """Entities that the night knows, and who sent nothing to compute from; the columns of as many `Want`s.

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

    def of(self, indexes: Sequence[int]) -> "Wants":
        """The wants at `indexes`, as columns."""
        if len(indexes) == len(self.keys):
            return self
        keys = [self.keys[index] for index in indexes]
        at = np.array(indexes, np.intp)
        return Wants(self.table, keys, self.fingerprints[at], self.positions[at], self.digest)

    def one(self, index: int) -> Want:
        """The want at `index`."""
        print_, position = int(self.fingerprints[index]), int(self.positions[index])
        digest = self.digest if position >= 0 else None
        return Want(self.table, self.keys[index], print_, position, digest)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows that a read of `Wants` found, in their order.

    `records` are of the table's dtype, with the wanted fingerprint; those at the places of `others` mean nothing.
    `is_l2`: bool[n], False where L1 had it.
    """

    records: NDArray[Any]
    is_l2: NDArray[np.bool_]
    others: dict[int, Outcome]

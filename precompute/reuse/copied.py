"""Users of a hash range, some of them copied from the base and some computed: where each one's records go."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cache.model.tower import Histories
from precompute.builds.reuse_fact import COPIED, ENTERED, INPUTS, LOST
from precompute.partitions.shard_input import ShardInput
from precompute.reuse.digests import Digests
from precompute.reuse.kept_shard import PAIR


@dataclass(frozen=True, slots=True, eq=False)
class Decisions:
    """Users of a hash range: `rows` of its inputs are looked at, `same` is where the base has them with equal inputs.

    `same` int64 [rows], -1 for nowhere; `could_stay` marks those that are copied unless an item enters their list.
    `kept` int64 are the base's records of all others, in hash order, with their `kept_hashes`; `with_vector` of them
    brought a vector along. `pairs` are all users with their digests.
    """

    rows: NDArray[np.int64]
    same: NDArray[np.int64]
    could_stay: NDArray[np.bool_]
    kept: NDArray[np.int64]
    kept_hashes: Digests
    pairs: NDArray[Any]
    with_vector: int = 0

    @classmethod
    def everybody(cls, entities: ShardInput, digests: Digests) -> Self:
        """All are computed."""
        count = len(entities.ids)
        nowhere, none = np.full(count, -1), np.zeros(count, np.bool_)
        return cls(
            np.arange(count), nowhere, none, np.empty(0, np.int64), np.empty(0, np.uint64),
            paired(entities, digests),
        )  # fmt: skip

    def inputs_of(self, entities: ShardInput) -> ShardInput:
        """Inputs of the users that are looked at."""
        return entities if len(self.rows) == len(entities.ids) else entities.take(self.rows)


def paired(entities: ShardInput, digests: Digests) -> NDArray[Any]:
    """Users with their digests, PAIR [n]."""
    found = np.empty(len(entities.ids), PAIR)
    found["hash"], found["digest"] = entities.hashes, digests
    return found


@dataclass(slots=True, eq=False)
class Copied:
    """Places of a hash range's users: `hashes` [m] of all, `rows` [n] of the chunk's own among them, ascending.

    `places` int64 [m] are the base's records of the others, -1 for the chunk's own. `same` int64 [n] are the base's
    records of those of its own whose inputs did not change, -1 for the others.
    """

    hashes: Digests
    places: NDArray[np.int64]
    rows: NDArray[np.int64]
    same: NDArray[np.int64]
    could_stay: NDArray[np.bool_]
    """Own users that are copied unless an item enters a list of theirs, bool [n]."""
    entered: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))

    @classmethod
    def of(cls, asked: Decisions, hashes: Digests, own: NDArray[np.int64]) -> Self:
        """Places of the `own` ones, int64, of those that are looked at, which have these `hashes`, beside the kept."""
        both = np.concatenate([hashes[own], asked.kept_hashes])
        order = np.argsort(both, kind="stable")
        turned = np.empty(len(order), np.int64)
        turned[order] = np.arange(len(order))
        places = np.concatenate([np.full(len(own), -1), asked.kept])[order]
        return cls(both[order], places, turned[: len(own)], asked.same[own], asked.could_stay[own])

    def parts(self, most: int) -> Iterator[tuple[Self, slice]]:
        """Pieces of at most so many users, with the own ones of each."""
        for start in range(0, len(self.hashes), most):
            end = min(start + most, len(self.hashes))
            own = slice(*np.searchsorted(self.rows, [start, end]).tolist())
            yield type(self)(
                self.hashes[start:end], self.places[start:end], self.rows[own] - start,
                self.same[own], self.could_stay[own],
            ), own  # fmt: skip

    def stay(self, which: NDArray[np.bool_]) -> None:
        """Own users of a mask are copied after all; of the others that could have been, an item entered a list."""
        self.places[self.rows[which]] = self.same[which]
        left = ~which
        self.entered = self.could_stay[left]
        self.rows, self.same = self.rows[left], self.same[left]
        self.could_stay = self.could_stay[left]

    def reasons(self) -> NDArray[np.uint8]:
        """Reasons [m] by number."""
        found = np.full(len(self.hashes), COPIED, np.uint8)
        entered = self.entered if len(self.entered) else np.zeros(len(self.rows), np.bool_)
        found[self.rows] = np.where(self.same < 0, INPUTS, np.where(entered, ENTERED, LOST))
        return found

    @property
    def others(self) -> NDArray[np.int64]:
        """Rows of all that are copied."""
        return np.flatnonzero(self.places >= 0)

    def rows_together(self, own: NDArray[Any], others: NDArray[Any]) -> NDArray[Any]:
        """A value for each of all, from those of the chunk's own and of the others."""
        found = np.empty(len(self.hashes), own.dtype)
        found[self.rows], found[self.others] = own, others
        return found

    def together(self, own: Histories, others: Histories) -> Histories:
        """Histories of all, from those of the chunk's own and of the others."""
        ends = np.concatenate([own.indptr, own.indptr[-1] + others.indptr[1:]])
        order = np.empty(len(self.hashes), np.int64)
        order[self.rows] = np.arange(len(self.rows))
        order[self.others] = len(self.rows) + np.arange(len(self.others))
        return Histories(ends, np.concatenate([own.indices, others.indices])).take(order)

"""Users of a hash range, some of them copied from the base and some computed: where each one's records go."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cache.model.tower import Histories
from precompute.builds.reuse_fact import COPIED, ENTERED, INPUTS, ITEM_LOST
from precompute.partitions.shard_input import ShardInput
from precompute.reuse.digests import Digests
from precompute.reuse.kept_shard import PAIR


@dataclass(frozen=True, slots=True, eq=False)
class CopyDecisions:
    """Users of a hash range: `rows` of its inputs are looked at, the base has them unchanged at `unchanged_positions`.

    `unchanged_positions` int64 [rows], -1 for nowhere; `could_stay` marks those that are copied unless an item enters
    their list. `copied_positions` int64 are the base's records of all others, in hash order, with their
    `copied_hashes`; `with_vector` of them brought a vector along. `pairs` are all users with their digests.
    """

    rows: NDArray[np.int64]
    unchanged_positions: NDArray[np.int64]
    could_stay: NDArray[np.bool_]
    copied_positions: NDArray[np.int64]
    copied_hashes: Digests
    pairs: NDArray[Any]
    with_vector: int = 0

    @classmethod
    def without_copies(cls, entities: ShardInput, digests: Digests) -> Self:
        """All are computed."""
        count = len(entities.ids)
        nowhere, none = np.full(count, -1), np.zeros(count, np.bool_)
        return cls(
            np.arange(count), nowhere, none, np.empty(0, np.int64), np.empty(0, np.uint64),
            paired(entities, digests),
        )  # fmt: skip

    def inputs_of(self, entities: ShardInput) -> ShardInput:
        """Inputs of the users that are looked at."""
        return entities if len(self.rows) == len(entities.ids) else entities.select_rows(self.rows)


def paired(entities: ShardInput, digests: Digests) -> NDArray[Any]:
    """Users with their digests, PAIR [n]."""
    pairs = np.empty(len(entities.ids), PAIR)
    pairs["hash"], pairs["digest"] = entities.hashes, digests
    return pairs


@dataclass(slots=True, eq=False)
class CopiedUsers:
    """Places of a hash range's users: `hashes` [m] of all, `rows` [n] of the chunk's own among them, ascending.

    `copied_positions` int64 [m] are the base's records of the others, -1 for the chunk's own. `unchanged_positions`
    int64 [n] are the base's records of those of its own whose inputs did not change, -1 for the others.
    """

    hashes: Digests
    copied_positions: NDArray[np.int64]
    rows: NDArray[np.int64]
    unchanged_positions: NDArray[np.int64]
    could_stay: NDArray[np.bool_]
    """Own users that are copied unless an item enters a list of theirs, bool [n]."""
    entered: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))

    @classmethod
    def of(cls, decisions: CopyDecisions, hashes: Digests, own_rows: NDArray[np.int64]) -> Self:
        """Places int64 of the `own_rows` among those looked at, which have these `hashes`, and of the kept."""
        all_hashes = np.concatenate([hashes[own_rows], decisions.copied_hashes])
        order = np.argsort(all_hashes, kind="stable")
        turned = np.empty(len(order), np.int64)
        turned[order] = np.arange(len(order))
        base_positions = np.concatenate([np.full(len(own_rows), -1), decisions.copied_positions])[
            order
        ]
        return cls(
            all_hashes[order],
            base_positions,
            turned[: len(own_rows)],
            decisions.unchanged_positions[own_rows],
            decisions.could_stay[own_rows],
        )

    def parts(self, users_max: int) -> Iterator[tuple[Self, slice]]:
        """Pieces of at most so many users, with the own ones of each."""
        for start in range(0, len(self.hashes), users_max):
            end = min(start + users_max, len(self.hashes))
            own_slice = slice(*np.searchsorted(self.rows, [start, end]).tolist())
            yield type(self)(
                self.hashes[start:end], self.copied_positions[start:end], self.rows[own_slice] - start,
                self.unchanged_positions[own_slice], self.could_stay[own_slice],
            ), own_slice  # fmt: skip

    def stay(self, stay_mask: NDArray[np.bool_]) -> None:
        """Own users of a mask are copied after all; of the others that could have been, an item entered a list."""
        self.copied_positions[self.rows[stay_mask]] = self.unchanged_positions[stay_mask]
        computed_mask = ~stay_mask
        self.entered = self.could_stay[computed_mask]
        self.rows, self.unchanged_positions = (
            self.rows[computed_mask],
            self.unchanged_positions[computed_mask],
        )
        self.could_stay = self.could_stay[computed_mask]

    def reasons(self) -> NDArray[np.uint8]:
        """Reasons [m] by number."""
        reason_numbers = np.full(len(self.hashes), COPIED, np.uint8)
        entered = self.entered if len(self.entered) else np.zeros(len(self.rows), np.bool_)
        reason_numbers[self.rows] = np.where(
            self.unchanged_positions < 0, INPUTS, np.where(entered, ENTERED, ITEM_LOST)
        )
        return reason_numbers

    @property
    def copied_rows(self) -> NDArray[np.int64]:
        """Rows of all that are copied."""
        return np.flatnonzero(self.copied_positions >= 0)

    def merge_values(self, own_values: NDArray[Any], copied_values: NDArray[Any]) -> NDArray[Any]:
        """A value for each of all, from those of the chunk's own and of the others."""
        merged_values = np.empty(len(self.hashes), own_values.dtype)
        merged_values[self.rows], merged_values[self.copied_rows] = own_values, copied_values
        return merged_values

    def merge_histories(self, own_histories: Histories, copied_histories: Histories) -> Histories:
        """Histories of all, from those of the chunk's own and of the others."""
        ends = np.concatenate(
            [own_histories.indptr, own_histories.indptr[-1] + copied_histories.indptr[1:]]
        )
        order = np.empty(len(self.hashes), np.int64)
        order[self.rows] = np.arange(len(self.rows))
        order[self.copied_rows] = len(self.rows) + np.arange(len(self.copied_rows))
        return Histories(
            ends, np.concatenate([own_histories.indices, copied_histories.indices])
        ).select_rows(order)

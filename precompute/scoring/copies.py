"""Records that are copied from an earlier generation instead of being computed: decisions, places, and interfaces.

Who decides, and holds the records, is a feature; scoring keeps an index of rows.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from cache.format.item_table import ItemTable
from cache.model.tower import Histories
from cache.records import Layout
from precompute.builds.build import Build
from precompute.bundles.bundle import Bundle
from precompute.config.settings import NightConfig, TableConfig
from precompute.partitions.digests import Digests
from precompute.partitions.partition import EarlierPartition
from precompute.partitions.shard_input import ShardInput
from precompute.sources.erasures import ErasedEntities

COPIED, INPUTS, ITEM_LOST, ENTERED = range(4)
REASONS: Final = ("copied", "inputs", "lost", "entered")
"""Reasons by number: copied; or computed for its inputs, for an item of its list, for one that could enter it."""

HASH_AND_DIGEST = np.dtype([("hash", "<u8"), ("digest", "<u8")])
"""A user and the digest of the input: 16 bytes for each, in hash order."""


def inputs_file(shard: int) -> str:
    """Path of the digests of a shard's users."""
    return f"work/inputs/{shard:04d}.u64"


def reasons_file(shard: int) -> str:
    """Path of the reasons for which a shard's records were computed, or copied: a byte each, in hash order."""
    return f"work/reasons/{shard:04d}.u1"


@dataclass(frozen=True, slots=True, eq=False)
class CopyDecisions:
    """Decisions on a hash range: `rows` of its inputs are checked, `unchanged_positions` locate them in the base.

    `unchanged_positions` int64 [rows], -1 for changed; `could_stay` marks those that are copied unless an item enters
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
        """Return decisions by which all users are computed."""
        count = len(entities.ids)
        nowhere, none = np.full(count, -1), np.zeros(count, np.bool_)
        return cls(
            np.arange(count), nowhere, none, np.empty(0, np.int64), np.empty(0, np.uint64),
            pair_with_digests(entities, digests),
        )  # fmt: skip

    def inputs_of(self, entities: ShardInput) -> ShardInput:
        """Return the inputs of the users that are checked."""
        return entities if len(self.rows) == len(entities.ids) else entities.select_rows(self.rows)


@dataclass(slots=True, eq=False)
class CopiedUsers:
    """Positions of a hash range's users: `hashes` [m] of all, `rows` [n] of the chunk's own among them, ascending.

    `copied_positions` int64 [m] are the base's records of the others, -1 for the chunk's own. `unchanged_positions`
    int64 [n] are the base's records of its own users with unchanged inputs, -1 for the others.
    """

    hashes: Digests
    copied_positions: NDArray[np.int64]
    rows: NDArray[np.int64]
    unchanged_positions: NDArray[np.int64]
    could_stay: NDArray[np.bool_]
    """Own users that are copied unless an item enters one of their lists, bool [n]."""
    entered: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))

    @classmethod
    def of(cls, decisions: CopyDecisions, hashes: Digests, own_rows: NDArray[np.int64]) -> Self:
        """Build from the decisions, the `hashes` of the checked users, and the `own_rows` of this chunk."""
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
        """Yield pieces of at most `users_max` users, with the own ones of each."""
        for start in range(0, len(self.hashes), users_max):
            end = min(start + users_max, len(self.hashes))
            own_slice = slice(*np.searchsorted(self.rows, [start, end]).tolist())
            yield type(self)(
                self.hashes[start:end], self.copied_positions[start:end], self.rows[own_slice] - start,
                self.unchanged_positions[own_slice], self.could_stay[own_slice],
            ), own_slice  # fmt: skip

    def stay(self, stay_mask: NDArray[np.bool_]) -> None:
        """Mark own users of a mask as copied after all; into a list of the other candidates an item entered."""
        self.copied_positions[self.rows[stay_mask]] = self.unchanged_positions[stay_mask]
        computed_mask = ~stay_mask
        self.entered = self.could_stay[computed_mask]
        self.rows, self.unchanged_positions = (
            self.rows[computed_mask],
            self.unchanged_positions[computed_mask],
        )
        self.could_stay = self.could_stay[computed_mask]

    def reasons(self) -> NDArray[np.uint8]:
        """Return the reasons [m] by number."""
        reason_numbers = np.full(len(self.hashes), COPIED, np.uint8)
        entered = self.entered if len(self.entered) else np.zeros(len(self.rows), np.bool_)
        reason_numbers[self.rows] = np.where(
            self.unchanged_positions < 0, INPUTS, np.where(entered, ENTERED, ITEM_LOST)
        )
        return reason_numbers

    @property
    def copied_rows(self) -> NDArray[np.int64]:
        """Rows of all copied users."""
        return np.flatnonzero(self.copied_positions >= 0)

    def merge_values(self, own_values: NDArray[Any], copied_values: NDArray[Any]) -> NDArray[Any]:
        """Merge values of the chunk's own and of the copied users, one per user."""
        merged_values = np.empty(len(self.hashes), own_values.dtype)
        merged_values[self.rows], merged_values[self.copied_rows] = own_values, copied_values
        return merged_values

    def merge_histories(self, own_histories: Histories, copied_histories: Histories) -> Histories:
        """Merge histories of the chunk's own and of the copied users."""
        ends = np.concatenate(
            [own_histories.indptr, own_histories.indptr[-1] + copied_histories.indptr[1:]]
        )
        order = np.empty(len(self.hashes), np.int64)
        order[self.rows] = np.arange(len(self.rows))
        order[self.copied_rows] = len(self.rows) + np.arange(len(self.copied_rows))
        return Histories(
            ends, np.concatenate([own_histories.indices, copied_histories.indices])
        ).select_rows(order)


def pair_with_digests(entities: ShardInput, digests: Digests) -> NDArray[Any]:
    """Return users with their digests, HASH_AND_DIGEST [n]."""
    pairs = np.empty(len(entities.ids), HASH_AND_DIGEST)
    pairs["hash"], pairs["digest"] = entities.hashes, digests
    return pairs


@dataclass(frozen=True, slots=True, eq=False)
class CopiedVectors:
    """Vectors of items that the base has: `base_ordinals[i]` is item i's row there, -1 for one to be computed."""

    base_ordinals: NDArray[np.int64]
    vectors: NDArray[np.float32]


class UserCopies(Protocol):
    """Records of users of one shard that may be copied."""

    @property
    def touched(self) -> Digests | None:
        """Sorted hashes of the users whose inputs have to be read; None for all."""
        ...

    @property
    def tables(self) -> Collection[str]:
        """Tables of which it has records."""
        ...

    @property
    def list_tables(self) -> Collection[str]:
        """Tables of lists that an item may enter."""
        ...

    def decide(self, entities: ShardInput, digests: Digests, hashes: range) -> CopyDecisions:
        """Decide which users of a hash range, with these inputs, are checked, and which are copied unread."""
        ...

    def enters(
        self,
        name: str,
        base_positions: NDArray[np.int64],
        vectors: NDArray[np.float32],
        exclusions: Histories,
    ) -> NDArray[np.bool_]:
        """Return a mask of the lists at `base_positions` that a new or changed item may enter."""
        ...

    def records(self, name: str, base_positions: NDArray[np.int64], at: int) -> NDArray[Any]:
        """Return the records with this night's cut `at` (Unix seconds) and item ordinals."""
        ...

    def read_seen_items(self, base_positions: NDArray[np.int64]) -> Histories:
        """Return the items that the users had, by this night's ordinals."""
        ...

    def read_times(self, base_positions: NDArray[np.int64]) -> Histories:
        """Return the times of these items, when each happened last."""
        ...

    def read_feature_json(self, base_positions: NDArray[np.int64]) -> Histories:
        """Return the JSON of the user tower's other inputs of the users."""
        ...

    def read_own_vector_mask(self, base_positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the users who brought a vector along."""
        ...


class ItemCopies(Protocol):
    """Records of items of one shard that may be copied."""

    @property
    def base_positions_by_table(self) -> Mapping[str, NDArray[np.int64]]:
        """Positions int64 [items of the shard] of the records by table, -1 for one to be computed."""
        ...

    def select_records(self, name: str, base_positions: NDArray[np.int64], at: int) -> NDArray[Any]:
        """Some records of a table as this night has them, with its cut `at` (Unix seconds)."""
        ...


AllowedItems = Callable[[Build], Mapping[str, NDArray[np.bool_]]]
"""Function that returns masks bool [items] of the allowed items by table; other tables may list all items."""


@dataclass(frozen=True, slots=True)
class ShardScope:
    """Shard of a build, with the tables of one entity to score, and the device (None: the processor)."""

    build: Build
    bundle: Bundle
    number: int
    tables: Mapping[str, TableConfig]
    layouts: Mapping[str, Layout]
    items: ItemTable
    device: str | None
    allowed_items: AllowedItems


class CopySource(Protocol):
    """Earlier generation that records of one build may be copied from; several threads may ask at once."""

    def user_copies(self, shard: ShardScope) -> UserCopies | None:
        """Return the records of users; None if none of the shard can be copied."""
        ...

    def item_copies(self, shard: ShardScope) -> ItemCopies | None:
        """Return the records of items; None if none of the shard can be copied."""
        ...


class EarlierPartitionOf(Protocol):
    """Function that finds the partition of an earlier night to take over."""

    def __call__(
        self,
        config: NightConfig,
        items: ItemTable,
        inputs: Sequence[Mapping[str, Any]],
        *,
        cut: str | None,
        erased: ErasedEntities,
        events: int,
        user_values: str,
    ) -> tuple[EarlierPartition | None, str]:
        """Return (partition, ""), or (None, the reason to read all source files).

        `events` counts the files of the further input, `user_values` is the digest of its values for users.
        """
        ...


def _no_partition(*_inputs: Any, **_more: Any) -> tuple[EarlierPartition | None, str]:
    return None, ""


def _nothing_noted(_bundle: Bundle, _items: ItemTable, _root: Path) -> None:
    return None


def _no_vectors(
    _bundle: Bundle, _items: ItemTable, _root: Path, _device: str | None
) -> CopiedVectors | None:
    return None


def _no_files(_bundle: Bundle) -> list[str]:
    return []


@dataclass(frozen=True, slots=True)
class NightCopies:
    """Functions by which `begin` takes data over from an earlier generation; by default nothing is taken over.

    `facts` are fields of `base` in the report of `begin`. `note_items` writes notes of each item below a folder, whose
    paths are `item_files`; `item_vectors` returns the vectors that can be copied, by these notes.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    note_items: Callable[[Bundle, ItemTable, Path], None] = _nothing_noted
    item_files: Callable[[Bundle], list[str]] = _no_files
    item_vectors: Callable[[Bundle, ItemTable, Path, str | None], CopiedVectors | None] = (
        _no_vectors
    )
    earlier_partition: EarlierPartitionOf = _no_partition


NO_COPIES: Final = NightCopies()


def _no_fields(_items: ItemTable) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class EmbeddingCopies:
    """Vectors that need not be embedded; `finish` gets all items with vectors, and returns fields of the report."""

    vectors: CopiedVectors | None = None
    finish: Callable[[ItemTable], dict[str, Any]] = _no_fields

"""Records copied from an earlier generation instead of computed: decisions, positions, and interfaces.

A feature chooses the generation and decides; scoring keeps track of rows.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from cache.format.item_table import ItemTable
from cache.model.tower import Histories
from cache.records import Layout
from precompute.builds.build import Build
from precompute.builds.reports import PriorEntry
from precompute.bundles.bundle import Bundle
from precompute.config.settings import TableConfig
from precompute.partitions.digests import Digests
from precompute.partitions.night_input import NightInput
from precompute.partitions.partition import EarlierPartition
from precompute.partitions.shard_input import ShardInput

COPIED_REASON, INPUTS_REASON, ITEM_LOST_REASON, ENTERED_REASON = range(4)
REASON_NAMES: Final = ("copied", "inputs", "lost", "entered")
"""Reasons by number: copied, or computed for changed inputs, a lost list item, or an item entering a list."""

HASH_AND_DIGEST = np.dtype([("hash", "<u8"), ("digest", "<u8")])
"""A user's hash and the digest of the user's inputs, 16 bytes, in hash order."""


def inputs_path(shard: int) -> str:
    """Return the path of the digests of a shard's users."""
    return f"work/inputs/{shard:04d}.u64"


def reasons_path(shard: int) -> str:
    """Return the path of the reasons why a shard's users were computed, or copied: a byte per user, in hash order."""
    return f"work/reasons/{shard:04d}.u1"


@dataclass(frozen=True, slots=True, eq=False)
class PublishedInputs:
    """Inputs of users that a generation publishes if filters or events need them; None: not published.

    `seen_item_times` belong to `seen_items`; `feature_json` holds the user tower's other inputs as JSON;
    `has_own_vector` marks users whose vector comes from the sources.
    """

    seen_items: Histories
    seen_item_times: Histories | None = None
    feature_json: Histories | None = None
    has_own_vector: NDArray[np.bool_] | None = None

    def select_rows(self, user_rows: NDArray[np.int64]) -> Self:
        """Return the inputs of some users."""
        return type(self)(
            self.seen_items.select_rows(user_rows),
            None if self.seen_item_times is None else self.seen_item_times.select_rows(user_rows),
            None if self.feature_json is None else self.feature_json.select_rows(user_rows),
            None if self.has_own_vector is None else self.has_own_vector[user_rows],
        )


@dataclass(frozen=True, slots=True, eq=False)
class CopyDecisions:
    """Decisions on the users of a hash range: which are checked (`checked_rows`), which are copied, and from where.

    For checked users, `unchanged_positions` int64 [rows] are the base's records of those with unchanged inputs, -1 for
    others, and `could_stay` marks users who are copied unless an item enters one of their lists. For the other copied
    users, `copied_positions` int64 are the base's records and `copied_hashes` their hashes; `copied_vector_count` of
    them have a vector from the sources. `digest_pairs` are all users of the range with their digests.
    """

    checked_rows: NDArray[np.int64]
    unchanged_positions: NDArray[np.int64]
    could_stay: NDArray[np.bool_]
    copied_positions: NDArray[np.int64]
    copied_hashes: Digests
    digest_pairs: NDArray[Any]
    copied_vector_count: int = 0

    @classmethod
    def without_copies(cls, entities: ShardInput, digests: Digests) -> Self:
        """Return decisions to compute all users."""
        user_count = len(entities.entity_ids)
        no_positions, no_mask = np.full(user_count, -1), np.zeros(user_count, np.bool_)
        return cls(
            np.arange(user_count), no_positions, no_mask, np.empty(0, np.int64), np.empty(0, np.uint64),
            pair_with_digests(entities, digests),
        )  # fmt: skip

    def inputs_of(self, entities: ShardInput) -> ShardInput:
        """Return the inputs of the checked users."""
        return (
            entities if len(self.checked_rows) == len(entities.entity_ids) else entities.select_rows(self.checked_rows)
        )


@dataclass(slots=True, eq=False)
class CopiedUsers:
    """Users of a hash range: `user_hashes` [m] of all; `own_rows` [n] of the chunk's own (computed) users, ascending.

    `copied_positions` int64 [m] are the base's records of copied users, -1 for own users. `unchanged_positions` int64
    [n] are the base's records of own users with unchanged inputs, -1 for others.
    """

    user_hashes: Digests
    copied_positions: NDArray[np.int64]
    own_rows: NDArray[np.int64]
    unchanged_positions: NDArray[np.int64]
    could_stay: NDArray[np.bool_]
    """Own users who are copied unless an item enters one of their lists, bool [n]."""
    has_entering_item: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))

    @classmethod
    def of(cls, decisions: CopyDecisions, hashes: Digests, own_rows: NDArray[np.int64]) -> Self:
        """Build from the decisions, the `user_hashes` of the checked users, and the `own_rows` of this chunk."""
        all_hashes = np.concatenate([hashes[own_rows], decisions.copied_hashes])
        hash_order = np.argsort(all_hashes, kind="stable")
        sorted_rows = np.empty(len(hash_order), np.int64)
        sorted_rows[hash_order] = np.arange(len(hash_order))
        base_positions = np.concatenate([np.full(len(own_rows), -1), decisions.copied_positions])[hash_order]
        return cls(
            all_hashes[hash_order],
            base_positions,
            sorted_rows[: len(own_rows)],
            decisions.unchanged_positions[own_rows],
            decisions.could_stay[own_rows],
        )

    def split(self, users_max: int) -> Iterator[tuple[Self, slice]]:
        """Yield (piece of at most `users_max` users, slice of its own users)."""
        for first_user in range(0, len(self.user_hashes), users_max):
            end_user = min(first_user + users_max, len(self.user_hashes))
            own_slice = slice(*np.searchsorted(self.own_rows, [first_user, end_user]).tolist())
            yield type(self)(
                self.user_hashes[first_user:end_user], self.copied_positions[first_user:end_user],
                self.own_rows[own_slice] - first_user,
                self.unchanged_positions[own_slice], self.could_stay[own_slice],
            ), own_slice  # fmt: skip

    def stay(self, stay_mask: NDArray[np.bool_]) -> None:
        """Mark the own users in the mask as copied after all.

        An item may enter a list of each candidate that is not in the mask.
        """
        self.copied_positions[self.own_rows[stay_mask]] = self.unchanged_positions[stay_mask]
        computed_mask = ~stay_mask
        self.has_entering_item = self.could_stay[computed_mask]
        self.own_rows, self.unchanged_positions = (
            self.own_rows[computed_mask],
            self.unchanged_positions[computed_mask],
        )
        self.could_stay = self.could_stay[computed_mask]

    def reason_numbers(self) -> NDArray[np.uint8]:
        """Return the number of each user's reason, uint8 [m]."""
        reason_numbers = np.full(len(self.user_hashes), COPIED_REASON, np.uint8)
        entered = self.has_entering_item if len(self.has_entering_item) else np.zeros(len(self.own_rows), np.bool_)
        reason_numbers[self.own_rows] = np.where(
            self.unchanged_positions < 0, INPUTS_REASON, np.where(entered, ENTERED_REASON, ITEM_LOST_REASON)
        )
        return reason_numbers

    @property
    def copied_rows(self) -> NDArray[np.int64]:
        """Rows of all copied users."""
        return np.flatnonzero(self.copied_positions >= 0)

    def merge_inputs(self, own: PublishedInputs, copied: PublishedInputs) -> PublishedInputs:
        """Merge the own users' published inputs with the copied users'; what is None for own users stays None."""
        has_own_vector = None
        if own.has_own_vector is not None:
            assert copied.has_own_vector is not None  # noqa: S101 - the base has the same settings
            has_own_vector = np.empty(len(self.user_hashes), np.bool_)
            has_own_vector[self.own_rows] = own.has_own_vector
            has_own_vector[self.copied_rows] = copied.has_own_vector
        return PublishedInputs(
            self.merge_histories(own.seen_items, copied.seen_items),
            None if own.seen_item_times is None else self.merge_histories(own.seen_item_times, copied.seen_item_times),
            None if own.feature_json is None else self.merge_histories(own.feature_json, copied.feature_json),
            has_own_vector,
        )

    def merge_histories(self, own_histories: Histories, copied_histories: Histories | None) -> Histories:
        """Merge histories of own and of copied users into hash order."""
        assert copied_histories is not None  # noqa: S101 - the base has the same settings
        merged_indptr = np.concatenate([own_histories.indptr, own_histories.indptr[-1] + copied_histories.indptr[1:]])
        history_order = np.empty(len(self.user_hashes), np.int64)
        history_order[self.own_rows] = np.arange(len(self.own_rows))
        history_order[self.copied_rows] = len(self.own_rows) + np.arange(len(self.copied_rows))
        return Histories(merged_indptr, np.concatenate([own_histories.indices, copied_histories.indices])).select_rows(
            history_order
        )


def pair_with_digests(entities: ShardInput, digests: Digests) -> NDArray[Any]:
    """Return the users' hashes with their digests, HASH_AND_DIGEST [n]."""
    pairs = np.empty(len(entities.entity_ids), HASH_AND_DIGEST)
    pairs["hash"], pairs["digest"] = entities.entity_hashes, digests
    return pairs


@dataclass(frozen=True, slots=True, eq=False)
class CopiedVectors:
    """Item vectors of the base: `base_ordinals[i]` is item i's row in `base_vectors`, -1 if it must be computed."""

    base_ordinals: NDArray[np.int64]
    base_vectors: NDArray[np.float32]


class UserCopies(Protocol):
    """Records of users of one shard that may be copied."""

    @property
    def touched_user_hashes(self) -> Digests | None:
        """Sorted hashes of the users whose inputs must be read; None: all users."""
        ...

    @property
    def table_names(self) -> Collection[str]:
        """Tables of which there are records."""
        ...

    @property
    def list_table_names(self) -> Collection[str]:
        """Tables of lists that an item may enter."""
        ...

    def decide(self, entities: ShardInput, digests: Digests, hash_range: range) -> CopyDecisions:
        """Decide which users of a hash range, with these inputs, are checked, and which are copied without a check."""
        ...

    def entered_lists_mask(
        self,
        table_name: str,
        base_positions: NDArray[np.int64],
        user_vectors: NDArray[np.float32],
        exclusions: Histories,
    ) -> NDArray[np.bool_]:
        """Return the mask of the lists at `base_positions` that a new or changed item may enter."""
        ...

    def read_records(self, table_name: str, base_positions: NDArray[np.int64], cut_s: int) -> NDArray[Any]:
        """Return the records with this night's cut `cut_s` (Unix seconds) and item ordinals."""
        ...

    def read_inputs(self, base_positions: NDArray[np.int64]) -> PublishedInputs:
        """Return the published inputs of these users, with this night's item ordinals."""
        ...


def renumber_items(list_records: NDArray[Any], new_ordinals: NDArray[np.int64]) -> None:
    """Replace the item ordinals in lists by `new_ordinals` int64 [base items]; none of the items may be removed."""
    new_ordinal_by_base_ordinal = np.append(new_ordinals, -1).astype(np.uint32)  # as uint32, -1 is NO_ITEM
    list_records["items"] = new_ordinal_by_base_ordinal[np.minimum(list_records["items"], np.uint32(len(new_ordinals)))]


@dataclass(frozen=True, slots=True, eq=False)
class ItemCopies:
    """Records of items of one shard that may be copied.

    `base_positions_by_table`: int64 [items of the shard] by table, -1 for a record to compute. `new_ordinals` int64
    [base items] are the items' ordinals in this night, None if no ordinal changed.
    """

    base_records_by_table: Mapping[str, NDArray[Any]]
    base_positions_by_table: Mapping[str, NDArray[np.int64]]
    new_ordinals: NDArray[np.int64] | None

    def select_records(self, table_name: str, base_positions: NDArray[np.int64], cut_s: int) -> NDArray[Any]:
        """Return some records of a table with this night's cut `cut_s` (Unix seconds) and item ordinals."""
        records: NDArray[Any] = self.base_records_by_table[table_name][base_positions]
        records["scored_at"] = cut_s
        if self.new_ordinals is not None and "items" in (records.dtype.names or ()):
            renumber_items(records, self.new_ordinals)
        return records


AllowedItemsFunction = Callable[[Build], Mapping[str, NDArray[np.bool_]]]
"""Function that returns masks bool [items] of the allowed items by table; tables without a mask may list all items."""


@dataclass(frozen=True, slots=True)
class ShardScope:
    """Shard of a build with the tables of one entity to score; `device` None is the processor."""

    build: Build
    bundle: Bundle
    shard: int
    tables: Mapping[str, TableConfig]
    layout_by_table: Mapping[str, Layout]
    items: ItemTable
    device: str | None
    allowed_items: AllowedItemsFunction


class Prior(Protocol):
    """Earlier generation from which one build copies; thread-safe."""

    @property
    def prior_entry(self) -> PriorEntry:
        """Fields on the base in the report of `begin`."""
        ...

    def partition(self, night_input: NightInput) -> tuple[EarlierPartition | None, str]:
        """Return (its partition, ""), or (None, the reason why all source files must be read)."""
        ...

    def item_vectors(self, bundle: Bundle, items: ItemTable, root: Path, device: str | None) -> CopiedVectors | None:
        """Return the vectors of items with the same inputs; None if there are none. `root` has this night's digests."""
        ...

    def user_copies(self, shard: ShardScope) -> UserCopies | None:
        """Return the records of users that may be copied; None if the shard has none."""
        ...

    def item_copies(self, shard: ShardScope) -> ItemCopies | None:
        """Return the records of items that may be copied; None if the shard has none."""
        ...

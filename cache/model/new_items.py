"""New items of a generation, unknown to its night: their numbers, which follow the ordinals, and vectors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from cache.format.item_table import ItemTable
from cache.model.ranking import Metric, score
from cache.records import NO_ITEM, Layout, unfit_row_mask

RankedLists = tuple[NDArray[np.uint32], NDArray[np.float32]]
"""Numbers and scores [n, width], best first; unused slots are NO_ITEM and 0."""

_NO_VECTORS: Final = np.empty((0, 0), np.float32)


class NewItem(NamedTuple):
    """Item that an event brought: number of its newest position, and its vector if the event had one."""

    raw_id: bytes
    position_number: int
    vector: NDArray[np.float32] | None = None


class NextTry(NamedTuple):
    """Next try of an input on which the models raised: number of tries so far, and the time of the next (monotonic)."""

    try_count: int
    retry_at_s: float


@dataclass(frozen=True, eq=False)  # no slots: cached properties need a __dict__
class NewItems:
    """New items of one generation, in the order of their positions, with vectors float32 [n, dims].

    Their numbers start at `first_item_number`, after the generation's own items: among equal scores the generation's
    own items come first, then older new items. `input_keys` identify the input of each vector; together with the
    positions they identify this object. The models cannot use `refused_inputs`, which are not tried again. They raised
    on the inputs in `next_try_by_input`, which are tried again. `left_out_ids` are the ids of both kinds of inputs.
    """

    first_item_number: int = 0
    items: tuple[NewItem, ...] = ()
    vectors: NDArray[np.float32] = field(default_factory=lambda: _NO_VECTORS)
    input_keys: tuple[bytes, ...] = ()
    refused_inputs: frozenset[bytes] = frozenset()
    next_try_by_input: Mapping[bytes, NextTry] = field(default_factory=dict)
    left_out_ids: frozenset[bytes] = frozenset()

    def __len__(self) -> int:
        return len(self.items)

    @property
    def newest_position_number(self) -> int:
        """Position number of the newest item; 0 without any."""
        return self.items[-1].position_number if self.items else 0

    @cached_property
    def next_retry_at_s(self) -> float:
        """Monotonic time of the earliest next try; infinite without any."""
        return min((next_try.retry_at_s for next_try in self.next_try_by_input.values()), default=math.inf)

    @cached_property
    def digest(self) -> bytes:
        """Digest of ids, positions and inputs: equal for answers with the same new items; empty without any."""
        if not self.items:
            return b""
        hasher = xxhash.xxh3_128()
        for item, input_key in zip(self.items, self.input_keys, strict=True):
            for part in (item.raw_id, item.position_number.to_bytes(8, "little"), input_key):
                hasher.update(len(part).to_bytes(4, "little") + part)
        return hasher.digest()

    @cached_property
    def item_number_by_id(self) -> Mapping[bytes, int]:
        """Number of each item, by id."""
        return {item.raw_id: self.first_item_number + index for index, item in enumerate(self.items)}

    def ids_of(self, item_table: ItemTable, item_numbers: NDArray[np.uint32]) -> list[str]:
        """Return external ids by number, including numbers of the generation's own items."""
        if not self.items or not (is_new := item_numbers >= self.first_item_number).any():
            return item_table.ids_of(item_numbers)
        ids = iter(item_table.ids_of(item_numbers[~is_new]))
        return [
            self.items[number - self.first_item_number].raw_id.decode()
            if number >= self.first_item_number
            else next(ids)
            for number in item_numbers.tolist()
        ]

    def item_numbers_of(self, raw_ids: Sequence[bytes], own_ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return int64 [n]: the number of each id, given `own_ordinals` among the generation's own items.

        Returns -1 for an unknown id.
        """
        if not self.items or not (own_ordinals < 0).any():
            return own_ordinals
        pairs = zip(raw_ids, own_ordinals.tolist(), strict=True)
        numbers = [ordinal if ordinal >= 0 else self.item_number_by_id.get(raw, -1) for raw, ordinal in pairs]
        return np.array(numbers, np.int64)

    def up_to(self, position_number: int) -> Self:
        """Return only the new items up to position number `position_number`; their numbers do not change."""
        count = sum(item.position_number <= position_number for item in self.items)
        if count == len(self.items):
            return self
        return type(self)(self.first_item_number, self.items[:count], self.vectors[:count], self.input_keys[:count])

    def merge_into(
        self,
        ranked: RankedLists,
        list_row: int,
        user_vector: NDArray[np.float32],
        excluded_item_numbers: frozenset[int],
        metric: Metric,
    ) -> None:
        """Insert new items, except `excluded_item_numbers`, into one row of lists for a vector, in place."""
        remaining_indexes = [
            index for index in range(len(self.items)) if self.first_item_number + index not in excluded_item_numbers
        ]
        if not remaining_indexes:
            return
        numbers, scores = ranked[0][list_row], ranked[1][list_row]
        used_mask = numbers != NO_ITEM
        new_scores = score(user_vector[None], self.vectors, np.array([remaining_indexes], np.int64), metric)[0]
        all_numbers = np.concatenate(
            [numbers[used_mask], np.array(remaining_indexes, np.uint32) + np.uint32(self.first_item_number)]
        )
        all_scores = np.concatenate([scores[used_mask], new_scores])
        rank_order = np.lexsort((all_numbers, -all_scores))[: len(numbers)]
        numbers[: len(rank_order)], scores[: len(rank_order)] = (all_numbers[rank_order], all_scores[rank_order])


NO_NEW_ITEMS: Final = NewItems()
"""No new items."""


class EligibleNewItems(NamedTuple):
    """New items that one answer may name, and numbers of items to leave out.

    `own_fingerprint` is the fingerprint of the record for the same input without new items.
    """

    items: NewItems = NO_NEW_ITEMS
    excluded_item_numbers: frozenset[int] = frozenset()
    own_fingerprint: int = 0


NO_ELIGIBLE_NEW_ITEMS: Final = EligibleNewItems()


def merge_new_items(
    ranked: RankedLists,
    user_vectors: NDArray[np.float32],
    eligible_by_row: Sequence[EligibleNewItems],
    metric: Metric,
    layout: Layout,
) -> RankedLists:
    """Return copies of the lists with each row's new items merged in.

    A row stays unchanged if its new scores would not fit a record of this layout, since events are untrusted.
    """
    if not any(len(row_items.items) for row_items in eligible_by_row):
        return ranked
    merged = ranked[0].copy(), ranked[1].copy()
    for row, (items, excluded_numbers, _) in enumerate(eligible_by_row):
        if len(items):
            items.merge_into(merged, row, user_vectors[row], excluded_numbers, metric)
    unfit_mask = unfit_row_mask(layout, merged[1])
    merged[0][unfit_mask], merged[1][unfit_mask] = ranked[0][unfit_mask], ranked[1][unfit_mask]
    return merged

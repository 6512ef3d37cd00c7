"""Comparison of this night's items with the base's: same, removed and changed items, and copied vectors."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cache.format.directory import map_file
from cache.format.item_table import ItemTable
from cache.store.artefacts import write_atomically
from precompute.builds.build import Build
from precompute.builds.reports import EMBED_ITEMS_REPORT
from precompute.bundles.bundle import Bundle, BundleModel
from precompute.partitions.catalogue import item_id_texts, ordinals_of_texts
from precompute.partitions.digests import Digests, item_digests_path
from precompute.reuse.base import OTHER_PROGRAMS_REASON, BaseGeneration, CannotCopy
from precompute.scoring.copies import CopiedVectors
from precompute.scoring.programs import computed_by

BASE_ITEMS_FILE = "work/base_items.i64"
"""File with this night's ordinal of each item of the base, -1 for a removed item; int64 [base items]."""
CHANGED_ITEMS_FILE = "work/changed_items.u1"
"""File with a flag for each item of this night, 1 if it is new or its vector changed since the base; uint8 [items]."""

_ROWS_AT_ONCE = 1 << 16


def find_new_ordinals(items: ItemTable, base_items: ItemTable) -> NDArray[np.int64]:
    """Return the current ordinal of each earlier item, -1 for a removed one; int64 [earlier items]."""
    return ordinals_of_texts(items, item_id_texts(base_items))


def invert_ordinals(new_ordinals: NDArray[np.int64], item_count: int) -> NDArray[np.int64]:
    """Invert the mapping: return the earlier ordinal of each of the `item_count` current items, -1 for a new one."""
    base_ordinals = np.full(item_count, -1)
    kept_ordinals = np.flatnonzero(new_ordinals >= 0)
    base_ordinals[new_ordinals[kept_ordinals]] = kept_ordinals
    return base_ordinals


def find_same_inputs(
    base: BaseGeneration, model: BundleModel, digests: Digests, base_ordinals: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return the mask of items with the same inputs of this item model as in the base; all False if the model differs.

    `base_ordinals` are the items' ordinals in the base, -1 for a new item.
    """
    if not base.has_model(model):
        return np.zeros(len(base_ordinals), np.bool_)
    base_digests = map_file(base.fetch_noted(item_digests_path(model.name)), "<u8")
    is_same_input: NDArray[np.bool_] = base_ordinals >= 0
    kept_rows = np.flatnonzero(is_same_input)
    is_same_input[kept_rows] = base_digests[base_ordinals[kept_rows]] == digests[kept_rows]
    return is_same_input


def open_copied_vectors(
    base: BaseGeneration, bundle: Bundle, items: ItemTable, root: Path, device: str | None
) -> CopiedVectors:
    """Return the item vectors that can be copied from the base; `root` has this night's digests."""
    model = bundle.item_tower
    base.demand_dims(bundle.dims)
    base_report = base.report(EMBED_ITEMS_REPORT)
    if base_report is None or base_report.get("computed_by") != computed_by(device):
        raise CannotCopy(OTHER_PROGRAMS_REASON)
    base_ordinals = invert_ordinals(find_new_ordinals(items, base.items), items.count)
    digests = map_file(root / item_digests_path(model.name), "<u8")
    base_ordinals[~find_same_inputs(base, model, digests, base_ordinals)] = -1
    if not (base_ordinals >= 0).any():
        raise CannotCopy("no item has the same input")
    return CopiedVectors(base_ordinals, base.items.vectors)


@dataclass(frozen=True, slots=True, eq=False)
class ItemChanges:
    """Changes of the items since the base.

    `new_ordinals` int64 [base items] and `is_changed` bool [items], as in BASE_ITEMS_FILE and CHANGED_ITEMS_FILE.
    """

    new_ordinals: NDArray[np.int64]
    is_changed: NDArray[np.bool_]

    @classmethod
    def since(cls, base: BaseGeneration, items: ItemTable) -> Self:
        """Compare the items and their vectors with the base's."""
        base.demand_dims(items.vectors.shape[1])
        base_items = base.items
        new_ordinals = find_new_ordinals(items, base_items)
        is_changed = np.ones(items.count, np.bool_)
        kept_ordinals = np.flatnonzero(new_ordinals >= 0)
        for first_row in range(0, len(kept_ordinals), _ROWS_AT_ONCE):
            base_rows = kept_ordinals[first_row : first_row + _ROWS_AT_ONCE]
            new_bits, base_bits = (
                np.ascontiguousarray(vectors).view(np.uint32)
                for vectors in (items.vectors[new_ordinals[base_rows]], base_items.vectors[base_rows])
            )
            is_changed[new_ordinals[base_rows]] = (new_bits != base_bits).any(axis=1)
        return cls(new_ordinals, is_changed)

    def write(self, build: Build) -> None:
        """Write the changes for the shards of this night."""
        write_atomically(build.path(BASE_ITEMS_FILE), self.new_ordinals.astype("<i8").tobytes())
        write_atomically(build.path(CHANGED_ITEMS_FILE), self.is_changed.astype("u1").tobytes())
        build.finish(BASE_ITEMS_FILE, CHANGED_ITEMS_FILE)

    @classmethod
    def open(cls, build: Build) -> Self:
        """Open the changes that `embed_items` wrote."""
        return cls(
            map_file(build.fetch(BASE_ITEMS_FILE), "<i8"),
            map_file(build.fetch(CHANGED_ITEMS_FILE), "u1").astype(np.bool_),
        )

    @property
    def has_moved_items(self) -> bool:
        """True if an ordinal of the base means another item in this night, or none."""
        return len(self.new_ordinals) != len(self.is_changed) or bool(
            (self.new_ordinals != np.arange(len(self.new_ordinals))).any()
        )

    def compute_unlistable_mask(self, is_allowed: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
        """Return the mask [base items + 1] of items whose lists cannot be copied; the last entry is for free slots."""
        is_lost = np.zeros(len(self.new_ordinals) + 1, np.bool_)
        is_gone = self.new_ordinals < 0
        is_lost[:-1] = is_gone | self.is_changed[np.where(is_gone, 0, self.new_ordinals)]
        if is_allowed is not None:
            is_lost[:-1] |= ~is_allowed[np.where(is_gone, 0, self.new_ordinals)]
        return is_lost

    def find_entering_items(
        self, was_allowed: NDArray[np.bool_] | None, is_allowed: NDArray[np.bool_] | None
    ) -> NDArray[np.int64]:
        """Return ordinals of items that may enter lists since the base: new, changed or newly allowed ones."""
        can_enter = self.is_changed.copy()
        if is_allowed is not None and was_allowed is not None:
            is_formerly_allowed = np.zeros(len(self.is_changed), np.bool_)
            kept_ordinals = np.flatnonzero(self.new_ordinals >= 0)
            is_formerly_allowed[self.new_ordinals[kept_ordinals]] = was_allowed[kept_ordinals]
            can_enter = (can_enter | ~is_formerly_allowed) & is_allowed
        return np.flatnonzero(can_enter)

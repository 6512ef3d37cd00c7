"""Items of this night beside those of its base: which are the same, which are gone, which vectors are copied."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.errors import CorruptArtefact, UnknownGeneration
from cache.format.directory import map_file
from cache.format.item_table import ItemTable, Ordinals
from cache.model.tower_spec import TowerSpec
from cache.store.artefacts import write_atomically
from precompute.builds.build import Build
from precompute.bundles.bundle import Bundle, BundleModel
from precompute.partitions.catalogue import ITEM_FEATURES, item_texts, ordinals_of_texts
from precompute.reuse.base import Base
from precompute.reuse.computed_by import computed_by
from precompute.reuse.digests import Digests, mixed, of_columns

PLACES = "work/base_items.i64"
"""Ordinals that the base's items have in this night, -1 for one that is gone; int64 [base items]."""
CHANGED = "work/changed_items.u1"
"""Flags of this night's items whose vector the base does not have: new ones, and changed ones; [items]."""

_ROWS_AT_ONCE = 1 << 16


def digests_file(model: str) -> str:
    """Path of the digests of what a model of items is given for each of them."""
    return f"work/item_inputs/{model}.u64"


def digests_files(bundle: Bundle) -> list[str]:
    """Paths of the digests of all models of items."""
    return [digests_file(model.name) for model in bundle.models if model.entity == "item"]


def write_item_digests(bundle: Bundle, items: ItemTable, root: Path) -> None:
    """Write the digest of every item's input for each model of items."""
    for model in bundle.models:
        if model.entity == "item":
            found = _digests(model.spec, items, root)
            write_atomically(root / digests_file(model.name), found.astype("<u8").tobytes())


def _digests(spec: TowerSpec, items: ItemTable, root: Path) -> Digests:
    count = items.count
    columns: dict[str, Any] = {}
    if spec.features:
        with pa.memory_map(str(root / ITEM_FEATURES)) as source:
            table = pa.ipc.open_stream(source).read_all()
        columns = {
            name: table.column(name) for name in {str(each.column) for each in spec.features}
        }
    found = of_columns(columns, count)
    if any(each.bind == "item_index" for each in spec.inputs):
        found += mixed(items.to_model(Ordinals(np.arange(count))).astype(np.uint64))
    return found


def places_of_items(items: ItemTable, before: ItemTable) -> NDArray[np.int64]:
    """Ordinals that earlier items have now, -1 for one that is gone; int64 [earlier items]."""
    return ordinals_of_texts(items, item_texts(before))


def turned(places: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The other way round: earlier ordinals of the `count` items of now, -1 for a new one."""
    found = np.full(count, -1)
    kept = np.flatnonzero(places >= 0)
    found[places[kept]] = kept
    return found


def same_inputs(
    base: Base, model: BundleModel, digests: Digests, places: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Mask of the items for which a model of items is given what the base's was; none where it is another model.

    `places` are their ordinals in the base, -1 for a new one. Raises CorruptArtefact for a damaged file.
    """
    if not base.has_model(model):
        return np.zeros(len(places), np.bool_)
    before = map_file(base.fetch_noted(digests_file(model.name)), "<u8")
    same: NDArray[np.bool_] = places >= 0
    rows = np.flatnonzero(same)
    same[rows] = before[places[rows]] == digests[rows]
    return same


@dataclass(frozen=True, slots=True, eq=False)
class KeptVectors:
    """Vectors of items that the base has already: row i of `places` is where, -1 for one to be computed."""

    places: NDArray[np.int64]
    vectors: NDArray[np.float32]

    @classmethod
    def of(
        cls, base: Base | None, bundle: Bundle, items: ItemTable, root: Path, device: str | None
    ) -> Self | None:
        """Vectors that can be copied of the base, None if none can; `root` holds the digests of this night's inputs."""
        model = bundle.item_tower
        if base is None or base.manifest.items.dims != bundle.dims:
            return None
        try:
            embedded = base.report("embed_items")
            if embedded.get("computed_by") != computed_by(device):
                return None
            before = base.items
            places = turned(places_of_items(items, before), items.count)
            digests = map_file(root / digests_file(model.name), "<u8")
            places[~same_inputs(base, model, digests, places)] = -1
        except (CorruptArtefact, UnknownGeneration, FileNotFoundError):
            return None
        return cls(places, before.vectors) if (places >= 0).any() else None


def write_changes(base: Base, made: Build, items: ItemTable) -> list[str]:
    """Write where the base's items are now, and whose vectors it does not have; returns the files.

    Raises CorruptArtefact where the base's files are not as its manifest says.
    """
    before = base.items
    places = places_of_items(items, before)
    changed = np.ones(items.count, np.bool_)
    kept = np.flatnonzero(places >= 0)
    for start in range(0, len(kept), _ROWS_AT_ONCE):
        rows = kept[start : start + _ROWS_AT_ONCE]
        ours, theirs = (
            np.ascontiguousarray(each).view(np.uint32)
            for each in (items.vectors[places[rows]], before.vectors[rows])
        )
        changed[places[rows]] = (ours != theirs).any(axis=1)
    write_atomically(made.path(PLACES), places.astype("<i8").tobytes())
    write_atomically(made.path(CHANGED), changed.astype("u1").tobytes())
    return [PLACES, CHANGED]


@dataclass(frozen=True, slots=True, eq=False)
class ItemChanges:
    """Changes of the items since the base: `places` int64 [base items], `changed` bool [items] as they are written."""

    places: NDArray[np.int64]
    changed: NDArray[np.bool_]

    @classmethod
    def open(cls, made: Build) -> Self:
        """Changes as `embed_items` wrote them."""
        return cls(
            map_file(made.fetch(PLACES), "<i8"),
            map_file(made.fetch(CHANGED), "u1").astype(np.bool_),
        )

    @property
    def moved(self) -> bool:
        """True if an ordinal of the base means another item now, or none."""
        return len(self.places) != len(self.changed) or bool(
            (self.places != np.arange(len(self.places))).any()
        )

    def lost(self, is_allowed: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
        """Mask [base items + 1] of those that no list may be copied with; the last one stands for a free place."""
        found = np.zeros(len(self.places) + 1, np.bool_)
        gone = self.places < 0
        found[:-1] = gone | self.changed[np.where(gone, 0, self.places)]
        if is_allowed is not None:
            found[:-1] |= ~is_allowed[np.where(gone, 0, self.places)]
        return found

    def entering(
        self, was_allowed: NDArray[np.bool_] | None, is_allowed: NDArray[np.bool_] | None
    ) -> NDArray[np.int64]:
        """Ordinals of the items that were in no list of the base as they are now: new, changed, or newly allowed."""
        could = self.changed.copy()
        if is_allowed is not None and was_allowed is not None:
            before = np.zeros(len(self.changed), np.bool_)
            kept = np.flatnonzero(self.places >= 0)
            before[self.places[kept]] = was_allowed[kept]
            could = (could | ~before) & is_allowed
        return np.flatnonzero(could)

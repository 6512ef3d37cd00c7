"""Records of items that are copied from the base, by the rule of users: an item's own vector is its input."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.errors import CorruptArtefact, UnknownGeneration
from cache.format.directory import map_file
from cache.format.item_table import ItemTable
from cache.format.records.layout import ABSENT
from cache.model.tower import Histories
from precompute.builds.build import Build, shard_report
from precompute.builds.filtered_items import allowed_items
from precompute.builds.tables import layout_of, metric_of
from precompute.bundles.bundle import Bundle
from precompute.config.settings import TableConfig
from precompute.reuse.base import Base
from precompute.reuse.computed_by import computed_by
from precompute.reuse.items import ItemChanges, digests_file, same_inputs, turned
from precompute.reuse.kept_shard import table_records
from precompute.reuse.lists import ENTERING_MAX, could_enter, floors, holds_lost, renumbered
from precompute.reuse.shard_reuse import ListRule


class ItemRecords:
    """Records of the base for one shard of items: `places` int64 [items of the shard] by table, -1 to be computed."""

    def __init__(
        self,
        records: Mapping[str, NDArray[Any]],
        places: Mapping[str, NDArray[np.int64]],
        renumber: NDArray[np.int64] | None,
    ) -> None:
        self._records = records
        self.places = places
        self._renumber = renumber

    def take(self, name: str, places: NDArray[np.int64], at: int) -> NDArray[Any]:
        """Some records of a table as this night has them, with its cut `at` (Unix seconds)."""
        found: NDArray[Any] = self._records[name][places]
        found["scored_at"] = at
        if self._renumber is not None and "items" in (found.dtype.names or ()):
            renumbered(found, self._renumber)
        return found


def item_records(
    made: Build,
    base: Base | None,
    bundle: Bundle,
    shard: int,
    tables: Mapping[str, TableConfig],
    items: ItemTable,
    device: str | None,
) -> ItemRecords | None:
    """Records of the base for one shard of items that may be copied, None if none may."""
    embedded = made.need("embed_items")
    if base is None or not base.has_changes(embedded) or not tables:
        return None
    try:
        report = base.report(shard_report(shard))
        if report.get("computed_by") != computed_by(device):
            return None
        changes, begun = ItemChanges.open(made), made.need("begin")
        before = turned(changes.places, items.count)
        bounds, theirs = begun["bounds"], base.begun["bounds"]
        own = np.arange(bounds[shard], bounds[shard + 1])
        first, end = theirs[shard], theirs[shard + 1]
        there = before[own] - first
        there[
            (there < 0) | (there >= end - first)
        ] = -1  # another seed has put it into another shard
        records: dict[str, NDArray[Any]] = {}
        places: dict[str, NDArray[np.int64]] = {}
        now = allowed_items(made)
        was = base.allowed_items() if now else {}
        for name, table in tables.items():
            stored = base.manifest.stored.get(name)
            if stored is None or stored.layout != layout_of(bundle, table):
                continue
            if table.kind == "value":
                model = bundle.values[str(table.value)]
                if not embedded["regrouped"].get(model.name):
                    continue
                digests = map_file(made.fetch(digests_file(model.name)), "<u8")
                may = same_inputs(base, model, digests, before)[own]
            else:
                may = ~changes.changed[own]
            records[name] = table_records(base, shard, stored)
            found = np.where(may, there, -1)
            has_any = found >= 0
            has_any[has_any] = records[name]["flags"][found[has_any]] != ABSENT
            found[~has_any] = -1
            if table.kind == "item_similar":
                rule = ListRule.of(
                    stored.layout, metric_of(bundle, table), changes, was.get(name), now.get(name)
                )
                found = _lists(rule, records[name], found, own, items)
            places[name] = found
    except (CorruptArtefact, UnknownGeneration, FileNotFoundError):
        return None
    return ItemRecords(records, places, changes.places if changes.moved else None)


def _lists(
    rule: ListRule,
    records: NDArray[Any],
    places: NDArray[np.int64],
    own: NDArray[np.int64],
    items: ItemTable,
) -> NDArray[np.int64]:
    """Places of lists of similar items, -1 where one is to be computed by the rule of lists."""
    found = np.full(len(places), -1)
    if len(rule.entering) > ENTERING_MAX * items.count:
        return found
    rows = np.flatnonzero(places >= 0)
    rows = rows[~holds_lost(records[places[rows]], rule.lost)]
    vectors = np.asarray(items.vectors)
    itself = Histories(np.arange(len(rows) + 1), own[rows])
    enters = could_enter(
        vectors[own[rows]], vectors[rule.entering], rule.entering,
        floors(rule.layout, records[places[rows]]), itself, rule.metric,
    )  # fmt: skip
    found[rows[~enters]] = places[rows[~enters]]
    return found

"""Records of items that are copied from the base, by the rule of users: an item's own vector is its input."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.errors import CorruptArtefact, UnknownGeneration
from cache.format.directory import map_file
from cache.format.item_table import ItemTable
from cache.model.tower import Histories
from cache.records import ABSENT_FLAGS
from precompute.builds.build import shard_report
from precompute.builds.tables import metric_of
from precompute.reuse.base import BaseGeneration, table_records
from precompute.reuse.items import ItemChanges, digests_file, same_inputs, turned
from precompute.reuse.lists import ENTERING_MAX, could_enter, floors, holds_lost, renumbered
from precompute.reuse.shard_reuse import ListRule
from precompute.scoring.copies import ShardScope
from precompute.scoring.programs import computed_by


class ItemRecords:
    """Records of the base for one shard of items.

    `base_positions_by_table`: int64 [items of the shard] by table, -1 to be computed.
    """

    def __init__(
        self,
        records: Mapping[str, NDArray[Any]],
        base_positions_by_table: Mapping[str, NDArray[np.int64]],
        renumber: NDArray[np.int64] | None,
    ) -> None:
        self._records = records
        self.base_positions_by_table = base_positions_by_table
        self._renumber = renumber

    def select_records(self, name: str, base_positions: NDArray[np.int64], at: int) -> NDArray[Any]:
        """Some records of a table as this night has them, with its cut `at` (Unix seconds)."""
        records: NDArray[Any] = self._records[name][base_positions]
        records["scored_at"] = at
        if self._renumber is not None and "items" in (records.dtype.names or ()):
            renumbered(records, self._renumber)
        return records


def item_records(base: BaseGeneration, scope: ShardScope) -> ItemRecords | None:
    """Records of the base for one shard of items that may be copied, None if none may."""
    build, bundle, shard = scope.build, scope.bundle, scope.number
    tables, items = scope.tables, scope.items
    embedded = build.need("embed_items")
    if not base.has_changes(embedded) or not tables:
        return None
    try:
        report = base.report(shard_report(shard))
        if report.get("computed_by") != computed_by(scope.device):
            return None
        changes, begin_report = ItemChanges.open(build), build.need("begin")
        base_ordinals = turned(changes.new_ordinals, items.count)
        bounds, theirs = begin_report["bounds"], base.begin_report["bounds"]
        shard_ordinals = np.arange(bounds[shard], bounds[shard + 1])
        first, end = theirs[shard], theirs[shard + 1]
        base_positions = base_ordinals[shard_ordinals] - first
        base_positions[
            (base_positions < 0) | (base_positions >= end - first)
        ] = -1  # another seed has put it into another shard
        records: dict[str, NDArray[Any]] = {}
        base_positions_by_table: dict[str, NDArray[np.int64]] = {}
        allowed_by_table = scope.allowed_items(build)
        was = base.allowed_by_table(scope.allowed_items) if allowed_by_table else {}
        for name, table in tables.items():
            base_table = base.manifest.stored_tables.get(name)
            if base_table is None or base_table.layout != scope.layouts[name]:
                continue
            if table.kind == "value":
                model = bundle.values[str(table.value)]
                if not embedded["regrouped"].get(model.name):
                    continue
                digests = map_file(build.fetch(digests_file(model.name)), "<u8")
                may = same_inputs(base, model, digests, base_ordinals)[shard_ordinals]
            else:
                may = ~changes.is_changed[shard_ordinals]
            records[name] = table_records(base, shard, base_table)
            copy_positions = np.where(may, base_positions, -1)
            has_any = copy_positions >= 0
            has_any[has_any] = records[name]["flags"][copy_positions[has_any]] != ABSENT_FLAGS
            copy_positions[~has_any] = -1
            if table.kind == "item_similar":
                rule = ListRule.of(
                    base_table.layout,
                    metric_of(bundle, table),
                    changes,
                    was.get(name),
                    allowed_by_table.get(name),
                )
                copy_positions = _lists(rule, records[name], copy_positions, shard_ordinals, items)
            base_positions_by_table[name] = copy_positions
    except (CorruptArtefact, UnknownGeneration, FileNotFoundError):
        return None
    return ItemRecords(
        records, base_positions_by_table, changes.new_ordinals if changes.moved else None
    )


def _lists(
    rule: ListRule,
    records: NDArray[Any],
    base_positions: NDArray[np.int64],
    shard_ordinals: NDArray[np.int64],
    items: ItemTable,
) -> NDArray[np.int64]:
    """Places of lists of similar items, -1 where one is to be computed by the rule of lists."""
    copy_positions = np.full(len(base_positions), -1)
    if len(rule.entering) > ENTERING_MAX * items.count:
        return copy_positions
    rows = np.flatnonzero(base_positions >= 0)
    rows = rows[~holds_lost(records[base_positions[rows]], rule.is_unlistable)]
    vectors = np.asarray(items.vectors)
    itself = Histories(np.arange(len(rows) + 1), shard_ordinals[rows])
    enters = could_enter(
        vectors[shard_ordinals[rows]], vectors[rule.entering], rule.entering,
        floors(rule.layout, records[base_positions[rows]]), itself, rule.metric,
    )  # fmt: skip
    copy_positions[rows[~enters]] = base_positions[rows[~enters]]
    return copy_positions

"""Records of items that are copied from the base, by the rule of users: an item's own vector is its input."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.format.directory import map_file
from cache.format.item_table import ItemTable
from cache.model.tower import Histories
from cache.records import ABSENT_FLAGS
from precompute.builds.reports import BEGIN_REPORT, EMBED_ITEMS_REPORT, shard_report_name
from precompute.builds.tables import metric_of
from precompute.partitions.digests import item_digests_path
from precompute.reuse.base import OTHER_PROGRAMS, BaseGeneration, CannotCopy, table_records
from precompute.reuse.items import ItemChanges, same_inputs, turned
from precompute.reuse.lists import ENTERING_MAX, could_enter, floors, holds_lost
from precompute.reuse.shard_reuse import ListRule
from precompute.scoring.copies import ItemCopies, ShardScope
from precompute.scoring.programs import computed_by


def item_records(base: BaseGeneration, scope: ShardScope) -> ItemCopies:
    """Return the base's records for one shard of items that may be copied."""
    build, bundle, shard = scope.build, scope.bundle, scope.number
    tables, items = scope.tables, scope.items
    embed_report = build.need_report(EMBED_ITEMS_REPORT)
    base.demand_changes(embed_report)
    base_report = base.report(shard_report_name(shard))
    if base_report is None or base_report.get("computed_by") != computed_by(scope.device):
        raise CannotCopy(OTHER_PROGRAMS)
    changes, bounds = ItemChanges.open(build), build.need_report(BEGIN_REPORT)["bounds"]
    base_ordinals = turned(changes.new_ordinals, items.count)
    shard_ordinals = np.arange(bounds[shard], bounds[shard + 1])
    first, end = base.begin_report["bounds"][shard : shard + 2]
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
            if not embed_report["regrouped"].get(model.name):
                continue
            digests = map_file(build.fetch(item_digests_path(model.name)), "<u8")
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
    return ItemCopies(
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

"""Records of items copied from the base, by the rule for users' lists: an item's own vector is its input."""

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
from precompute.reuse.base import OTHER_PROGRAMS_REASON, BaseGeneration, CannotCopy, read_table_records
from precompute.reuse.items import ItemChanges, find_same_inputs, invert_ordinals
from precompute.reuse.lists import ENTERING_SHARE_MAX, could_enter, find_lists_with_lost_items, find_score_floors
from precompute.reuse.shard_reuse import ListRule
from precompute.scoring.copies import ItemCopies, ShardScope
from precompute.scoring.programs import computed_by


def item_records(base: BaseGeneration, scope: ShardScope) -> ItemCopies:
    """Return the base's records of one shard's items that may be copied; raise CannotCopy if there are none."""
    build, bundle, shard = scope.build, scope.bundle, scope.shard
    tables, items = scope.tables, scope.items
    embed_report = build.need_report(EMBED_ITEMS_REPORT)
    base.demand_changes(embed_report)
    base_report = base.report(shard_report_name(shard))
    if base_report is None or base_report.get("computed_by") != computed_by(scope.device):
        raise CannotCopy(OTHER_PROGRAMS_REASON)
    changes, bounds = ItemChanges.open(build), build.need_report(BEGIN_REPORT)["bounds"]
    base_ordinals = invert_ordinals(changes.new_ordinals, items.count)
    shard_ordinals = np.arange(bounds[shard], bounds[shard + 1])
    first_base_ordinal, end_base_ordinal = base.begin_report["bounds"][shard : shard + 2]
    base_positions = base_ordinals[shard_ordinals] - first_base_ordinal
    base_positions[
        (base_positions < 0) | (base_positions >= end_base_ordinal - first_base_ordinal)
    ] = -1  # with another hash seed, the item was in another shard
    records_by_table: dict[str, NDArray[Any]] = {}
    base_positions_by_table: dict[str, NDArray[np.int64]] = {}
    allowed_by_table = scope.allowed_items(build)
    base_allowed_by_table = base.read_allowed_by_table(scope.allowed_items) if allowed_by_table else {}
    for table_name, table in tables.items():
        base_table = base.manifest.stored_tables.get(table_name)
        if base_table is None or base_table.layout != scope.layout_by_table[table_name]:
            continue
        if table.kind == "value":
            model = bundle.value_models[str(table.value)]
            if not embed_report["regrouped"].get(model.name):
                continue
            digests = map_file(build.fetch(item_digests_path(model.name)), "<u8")
            may_copy = find_same_inputs(base, model, digests, base_ordinals)[shard_ordinals]
        else:
            may_copy = ~changes.is_changed[shard_ordinals]
        records_by_table[table_name] = read_table_records(base, shard, base_table)
        copy_positions = np.where(may_copy, base_positions, -1)
        has_record = copy_positions >= 0
        has_record[has_record] = records_by_table[table_name]["flags"][copy_positions[has_record]] != ABSENT_FLAGS
        copy_positions[~has_record] = -1
        if table.kind == "item_similar":
            rule = ListRule.of(
                base_table.layout,
                metric_of(bundle, table),
                changes,
                base_allowed_by_table.get(table_name),
                allowed_by_table.get(table_name),
            )
            copy_positions = _copyable_list_positions(
                rule, records_by_table[table_name], copy_positions, shard_ordinals, items
            )
        base_positions_by_table[table_name] = copy_positions
    return ItemCopies(
        records_by_table, base_positions_by_table, changes.new_ordinals if changes.has_moved_items else None
    )


def _copyable_list_positions(
    rule: ListRule,
    records: NDArray[Any],
    base_positions: NDArray[np.int64],
    shard_ordinals: NDArray[np.int64],
    items: ItemTable,
) -> NDArray[np.int64]:
    """Return the base positions of lists of similar items, -1 for a list that the rule says to compute."""
    copy_positions = np.full(len(base_positions), -1)
    if len(rule.entering_ordinals) > ENTERING_SHARE_MAX * items.count:
        return copy_positions
    copyable_rows = np.flatnonzero(base_positions >= 0)
    copyable_rows = copyable_rows[
        ~find_lists_with_lost_items(records[base_positions[copyable_rows]], rule.is_unlistable)
    ]
    vectors = np.asarray(items.vectors)
    own_items = Histories(np.arange(len(copyable_rows) + 1), shard_ordinals[copyable_rows])
    may_be_entered = could_enter(
        vectors[shard_ordinals[copyable_rows]], vectors[rule.entering_ordinals], rule.entering_ordinals,
        find_score_floors(rule.layout, records[base_positions[copyable_rows]]), own_items, rule.metric,
    )  # fmt: skip
    copy_positions[copyable_rows[~may_be_entered]] = base_positions[copyable_rows[~may_be_entered]]
    return copy_positions

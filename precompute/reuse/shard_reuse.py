"""Reuse within one shard: which users are copied from the base, which are computed, and where each record is."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cache.format.manifest import FEATURE_ONLY_USERS_FACT
from cache.model.ranking import Metric
from cache.model.tower import Histories
from cache.records import Layout
from precompute.builds.build import Build
from precompute.builds.reports import BEGIN_REPORT, EMBED_ITEMS_REPORT
from precompute.builds.tables import metric_of
from precompute.bundles.bundle import Bundle
from precompute.config.settings import TableConfig
from precompute.partitions.digests import Digests
from precompute.partitions.shard_files import HASH_COLUMN, TOUCHED_KIND, read_stream
from precompute.partitions.shard_input import ShardInput
from precompute.reuse.base import BaseGeneration, BaseShard, CannotCopy
from precompute.reuse.items import ItemChanges
from precompute.reuse.lists import ENTERING_SHARE_MAX, could_enter, find_lists_with_lost_items, find_score_floors
from precompute.scoring.copies import CopyDecisions, PublishedInputs, ShardScope, pair_with_digests, renumber_items
from precompute.scoring.programs import computed_by


@dataclass(frozen=True, slots=True, eq=False)
class ListRule:
    """Rule for a table of lists: base items that no copied list may hold, and items that may enter lists."""

    layout: Layout
    metric: Metric
    is_unlistable: NDArray[np.bool_]
    entering_ordinals: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        layout: Layout,
        metric: Metric,
        changes: ItemChanges,
        was_allowed: NDArray[np.bool_] | None,
        is_allowed: NDArray[np.bool_] | None,
    ) -> Self:
        return cls(
            layout,
            metric,
            changes.compute_unlistable_mask(is_allowed),
            changes.find_entering_items(was_allowed, is_allowed),
        )


@dataclass(frozen=True, slots=True, eq=False)
class ShardReuse:
    """Shard of the base, compared with this night's shard."""

    base_shard: BaseShard
    changes: ItemChanges | None
    list_rules: Mapping[str, ListRule]
    has_broken_list: NDArray[np.bool_]
    """Mask [records] of the users with a list that cannot be copied, even if their inputs are unchanged."""
    item_vectors: NDArray[np.float32]
    is_same_bundle: bool
    """True if the base was made from the same bundle (`BaseGeneration.has_lists`)."""
    touched_user_hashes: Digests | None
    """Sorted hashes of the users whose inputs must be read; None: all users."""

    @classmethod
    def open(cls, base: BaseGeneration, scope: ShardScope) -> Self:
        """Open the base's shard of users for comparison with this night's; raise CannotCopy if none can be copied."""
        build, bundle, shard, tables = scope.build, scope.bundle, scope.shard, scope.tables
        begin_report = build.need_report(BEGIN_REPORT)
        if base.begin_report["user_seed"] != begin_report["user_seed"]:
            raise CannotCopy("its users are hashed with another seed")
        if base.begin_report[FEATURE_ONLY_USERS_FACT] != begin_report[FEATURE_ONLY_USERS_FACT]:
            raise CannotCopy("users without a record in it may now have one from the same inputs")
        fitting_tables = _find_fitting_tables(build, base, bundle, tables)
        base_table_by_name = {
            table_name: base.manifest.stored_tables[table_name]
            for table_name in fitting_tables
            if table_name in base.manifest.stored_tables
        }
        if not base_table_by_name:
            raise CannotCopy("no table is from the same model")
        base_shard = BaseShard.open(base, shard, base_table_by_name, computed_by(scope.device))
        tower = bundle.user_tower
        publishes_features = build.config.events.enabled and bool(tower.spec.features)
        if publishes_features and not base.has_model(tower):
            raise CannotCopy("its published features are those of another user tower")
        list_tables = {table_name: table for table_name, table in tables.items() if table.kind == "user_topk"}
        changes = ItemChanges.open(build) if base.has_changes(build.need_report(EMBED_ITEMS_REPORT)) else None
        if base_shard.published is not None or list_tables.keys() & base_table_by_name.keys():
            base.demand_changes(build.need_report(EMBED_ITEMS_REPORT))
        has_broken_list, list_rules = ~base_shard.has_all_tables, dict[str, ListRule]()
        if changes is not None and list_tables.keys() <= base_table_by_name.keys():
            allowed_by_table = scope.allowed_items(build)
            base_allowed_by_table = base.read_allowed_by_table(scope.allowed_items) if allowed_by_table else {}
            for table_name, table in list_tables.items():
                list_rules[table_name] = ListRule.of(
                    scope.layout_by_table[table_name],
                    metric_of(bundle, table),
                    changes,
                    base_allowed_by_table.get(table_name),
                    allowed_by_table.get(table_name),
                )
                has_broken_list |= find_lists_with_lost_items(
                    base_shard.records_by_table[table_name], list_rules[table_name].is_unlistable
                )
        entering_limit = ENTERING_SHARE_MAX * scope.items.count
        has_many_entering = (
            max((len(rule.entering_ordinals) for rule in list_rules.values()), default=0) > entering_limit
        )
        if list_rules.keys() != list_tables.keys() or base_table_by_name.keys() != tables.keys() or has_many_entering:
            has_broken_list[:] = True
        hashes = np.ascontiguousarray(base_shard.hash_digest_pairs["hash"][base_shard.base_positions >= 0])
        touched = (
            None if _has_entering_items(list_rules) else _find_touched_hashes(build, shard, hashes[has_broken_list])
        )
        if touched is not None and 2 * len(touched) > len(base_shard.hash_digest_pairs):
            touched = None  # selecting most of the users takes longer than reading all
        return cls(
            base_shard, changes, list_rules, has_broken_list, np.asarray(scope.items.vectors), base.has_lists, touched
        )

    @property
    def needs_vectors(self) -> bool:
        """True if an item may enter lists, so that vectors of unchanged users must be computed to check."""
        return _has_entering_items(self.list_rules) and not self.has_broken_list.all()

    @property
    def table_names(self) -> Collection[str]:
        """Tables of which the base's shard has records that may be copied."""
        return self.base_shard.records_by_table.keys()

    @property
    def list_table_names(self) -> Collection[str]:
        """Tables of lists that an item may enter."""
        return self.list_rules.keys()

    def decide(self, entities: ShardInput, digests: Digests, hash_range: range) -> CopyDecisions:
        """Decide which users of a hash range, with these inputs, are checked, and which are copied without a check."""
        hash_slice = self.base_shard.slice_between(hash_range)
        digest_pairs, base_positions = (
            self.base_shard.hash_digest_pairs[hash_slice],
            self.base_shard.base_positions[hash_slice],
        )
        user_rows = self.base_shard.find_rows(entities.entity_hashes)
        is_equal = user_rows >= 0
        is_equal[is_equal] = self.base_shard.hash_digest_pairs["digest"][user_rows[is_equal]] == digests[is_equal]
        matched_positions = np.full(len(user_rows), -1)
        matched_positions[is_equal] = self.base_shard.base_positions[user_rows[is_equal]]
        had_no_record = is_equal & (matched_positions < 0) & self.is_same_bundle  # and has none now
        could_stay = matched_positions >= 0
        could_stay[could_stay] = ~self.has_broken_list[matched_positions[could_stay]]
        matched_positions[matched_positions >= 0] = np.where(
            self.base_shard.has_all_tables[matched_positions[matched_positions >= 0]],
            matched_positions[matched_positions >= 0],
            -1,
        )
        is_asked = ~had_no_record if self.needs_vectors else ~had_no_record & ~could_stay
        checked_rows, is_copied = np.flatnonzero(is_asked), could_stay & ~is_asked
        copied_positions, kept_hashes, all_pairs = (
            matched_positions[is_copied],
            entities.entity_hashes[is_copied],
            pair_with_digests(entities, digests),
        )
        if self.touched_user_hashes is not None:  # users that are not touched were not read
            is_unread = ~np.isin(digest_pairs["hash"], entities.entity_hashes)
            all_pairs = np.sort(np.concatenate([all_pairs, digest_pairs[is_unread]]), order="hash")
            is_unread &= base_positions >= 0
            copied_positions = np.concatenate([copied_positions, base_positions[is_unread]])
            kept_hashes = np.concatenate([kept_hashes, digest_pairs["hash"][is_unread]])
        return CopyDecisions(
            checked_rows, matched_positions[checked_rows], could_stay[checked_rows],
            copied_positions, kept_hashes, all_pairs,
            int(entities.has_vector[is_copied].sum()),
        )  # fmt: skip

    def entered_lists_mask(
        self,
        table_name: str,
        base_positions: NDArray[np.int64],
        user_vectors: NDArray[np.float32],
        exclusions: Histories,
    ) -> NDArray[np.bool_]:
        """Return the mask of the base's lists at `base_positions` that a new or changed item may enter."""
        rule = self.list_rules[table_name]
        return could_enter(
            user_vectors, self.item_vectors[rule.entering_ordinals], rule.entering_ordinals,
            find_score_floors(rule.layout, self.base_shard.records_by_table[table_name][base_positions]), exclusions,
            rule.metric,
        )  # fmt: skip

    def read_records(self, table_name: str, base_positions: NDArray[np.int64], cut_s: int) -> NDArray[Any]:
        """Return the base's records with this night's cut `cut_s` (Unix seconds) and item ordinals."""
        copied_records: NDArray[Any] = self.base_shard.records_by_table[table_name][base_positions]
        copied_records["scored_at"] = cut_s  # safe: indexing by an array copies the records
        if table_name in self.list_rules and self.changes is not None and self.changes.has_moved_items:
            renumber_items(copied_records, self.changes.new_ordinals)
        return copied_records

    def read_inputs(self, base_positions: NDArray[np.int64]) -> PublishedInputs:
        """Return the published inputs of these users of the base, with this night's item ordinals."""
        assert self.base_shard.published is not None  # noqa: S101 - callers check it
        assert self.changes is not None  # noqa: S101 - checked by `open`
        inputs = self.base_shard.published.select_rows(base_positions)
        ordinals = self.changes.new_ordinals[inputs.seen_items.indices.astype(np.int64)]
        return replace(inputs, seen_items=Histories(inputs.seen_items.indptr, ordinals))


def _has_entering_items(list_rules: Mapping[str, ListRule]) -> bool:
    return any(len(rule.entering_ordinals) for rule in list_rules.values())


def _find_fitting_tables(
    build: Build, base: BaseGeneration, bundle: Bundle, tables: Mapping[str, TableConfig]
) -> list[str]:
    """Return the tables whose records may be copied: lists of the same bundle, other tables of the same model."""
    embed_report = build.need_report(EMBED_ITEMS_REPORT)
    is_alike_by_model = embed_report["regrouped"]
    has_same_vocabulary = base.manifest.facts.get("vocabulary_digest") == bundle.vocabulary_digest
    is_fitting_by_model = {
        bundle_model.name: is_alike_by_model.get(bundle_model.name, False)
        and (bundle_model.spec.history is None or has_same_vocabulary)
        for bundle_model in bundle.models
    }
    fitting_tables = []
    for table_name, table in tables.items():
        model = str(table.value) if table.kind == "value" else bundle.user_tower.name
        is_list = table.kind == "user_topk"
        if is_fitting_by_model[model] and (not is_list or (base.has_lists and base.has_changes(embed_report))):
            fitting_tables.append(table_name)
    return fitting_tables


def _find_touched_hashes(build: Build, shard: int, broken_hashes: Digests) -> Digests | None:
    """Return sorted hashes of the users whose inputs must be read; None: all users.

    They are the users whom `begin` recorded for newly read rows or a lost item, and those with a broken list.
    """
    begin_report = build.need_report(BEGIN_REPORT)
    if not begin_report["base"]["took_over"] or begin_report.get("user_vectors"):
        return None
    path = build.fetch(f"work/partition/{shard:04d}.{TOUCHED_KIND}")
    return np.union1d(np.asarray(read_stream(path).column(HASH_COLUMN)), broken_hashes)

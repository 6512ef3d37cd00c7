"""Partition of the base and the conditions for taking it over: then only new source files are read."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cache.format.directory import map_file
from cache.format.item_table import ItemTable
from precompute.config.settings import NightConfig, parse_time
from precompute.partitions.catalogue import item_id_texts
from precompute.partitions.night_input import EventFields, NightInput
from precompute.partitions.partition import (
    POPULARITY_FILE,
    UNKNOWN_ITEMS_FILE,
    UNKNOWN_ITEMS_SEED,
    EarlierPartition,
    partition_file_paths,
)
from precompute.partitions.shard_files import PARTITION_FOLDER, POSITION_COLUMN, read_batches, shard_paths
from precompute.partitions.user_tables import USER_FEATURES_SOURCE, USER_VECTORS_SOURCE
from precompute.reuse.base import BaseGeneration, CannotCopy
from precompute.reuse.items import find_new_ordinals, invert_ordinals
from precompute.sources.columns import text_hashes
from precompute.sources.files import InputEntry
from precompute.sources.plausibility import RowCounts
from precompute.sources.readers import EVENT_INTERACTIONS_SOURCE, INTERACTIONS_SOURCE
from precompute.sources.unusable import UNKNOWN_ITEMS_NAMED_FIELD

ERASED_REASON: Final = "the erasures differ from the base's"
LATE_REASON: Final = "the base left out interactions after its cut"
CUT_REASON: Final = "the base's cut is after this night's, or one of them has none"
FILES_REASON: Final = "source files were changed, removed or inserted"
TABLES_REASON: Final = "a table of users' features or vectors changed"
VALUES_REASON: Final = "events set users' features since"
BACK_REASON: Final = "earlier interactions name a new item"
NAMED_ITEM_GONE_REASON: Final = "events name a removed item"


def interaction_file_count(config: NightConfig, inputs: Sequence[InputEntry]) -> int:
    """Return the number of inputs that are interactions, events included: they precede the tables."""
    sources = config.sources
    table_settings = (
        sources.user_features, sources.item_features, sources.user_vectors, sources.item_vectors,
    )  # fmt: skip
    return len(inputs) - sum(table is not None for table in table_settings)


def user_table_checksums(config: NightConfig, inputs: Sequence[InputEntry]) -> list[str]:
    """Return the checksums of the tables of users among the inputs."""
    sources, interaction_count = config.sources, interaction_file_count(config, inputs)
    table_names = [
        table_name
        for table_name in ("user_features", "item_features", "user_vectors", "item_vectors")
        if getattr(sources, table_name) is not None
    ]
    return [
        input_entry["sha256"]
        for table_name, input_entry in zip(table_names, inputs[interaction_count:], strict=True)
        if table_name.startswith("user_")
    ]


def earlier_partition(base: BaseGeneration, night_input: NightInput) -> EarlierPartition:
    """Return the base's partition for this night; raise CannotCopy with the reason to read all source files."""
    begin_report, config = base.begin_report, night_input.config
    if list(begin_report.get("erased", ())) != list(night_input.erased.numbers):
        raise CannotCopy(ERASED_REASON)
    if begin_report.get("late") != 0:
        raise CannotCopy(LATE_REASON)
    if not _is_later(night_input.cutoff_at, begin_report.get("cut")):
        raise CannotCopy(CUT_REASON)
    base_inputs = begin_report["inputs"]
    base_checksums = _split_checksums(config, base_inputs, event_file_count(begin_report))
    current_checksums = _split_checksums(config, night_input.pinned_inputs, len(night_input.further.files))
    if any(
        current_sha256s[: len(base_sha256s)] != base_sha256s
        for base_sha256s, current_sha256s in zip(base_checksums, current_checksums, strict=True)
    ):
        raise CannotCopy(FILES_REASON)
    has_table = bool(config.sources.user_features or config.sources.user_vectors)
    if user_table_checksums(config, base_inputs) != user_table_checksums(config, night_input.pinned_inputs) or (
        has_table and not base.has_lists  # another bundle takes other columns
    ):
        raise CannotCopy(TABLES_REASON)
    if begin_report.get("user_values", "") != night_input.values.user_values_digest:
        raise CannotCopy(VALUES_REASON)
    return _reuse_partition(base, config, night_input.items, *map(len, base_checksums))


def event_file_count(begin_report: EventFields) -> int:
    """Return the number of event files that a night read, by the report of `begin`."""
    return begin_report["events"]["files"] if "events" in begin_report else 0


def _split_checksums(
    config: NightConfig, inputs: Sequence[InputEntry], event_count: int
) -> tuple[list[str], list[str]]:
    """Return the checksums of the interaction files among the inputs, and of the event files after them."""
    checksums = [input_entry["sha256"] for input_entry in inputs[: interaction_file_count(config, inputs)]]
    own_count = len(checksums) - event_count
    return checksums[:own_count], checksums[own_count:]


def _reuse_partition(
    base: BaseGeneration, config: NightConfig, items: ItemTable, file_count: int, event_count: int
) -> EarlierPartition:
    begin_report, base_items = base.begin_report, base.items
    for source_name in partition_file_paths(begin_report.get("user_vectors", False), config.shards):
        base.fetch_noted(source_name)
    new_ordinals = find_new_ordinals(items, base_items)
    unknown_hashes = map_file(base.build.root / UNKNOWN_ITEMS_FILE, "<u8")
    is_new = invert_ordinals(new_ordinals, items.count) < 0
    if is_new.any() and np.isin(_item_hashes(items, is_new), unknown_hashes).any():
        raise CannotCopy(BACK_REASON)
    if event_count and (new_ordinals < 0).any() and _named_by_events(base, config.shards, new_ordinals < 0):
        raise CannotCopy(NAMED_ITEM_GONE_REASON)
    is_same_order = len(new_ordinals) == items.count and bool((new_ordinals == np.arange(len(new_ordinals))).all())
    user_sources = (INTERACTIONS_SOURCE, USER_FEATURES_SOURCE, USER_VECTORS_SOURCE)
    return EarlierPartition(
        folder=base.build.root / PARTITION_FOLDER,
        hash_seed=begin_report["user_seed"],
        interaction_file_count=file_count,
        event_file_count=event_count,
        new_ordinals=None if is_same_order else new_ordinals,
        lost_item_hashes=_item_hashes(base_items, new_ordinals < 0),
        interactions_by_item=map_file(base.build.root / POPULARITY_FILE, "<i8"),
        unknown_item_hashes=unknown_hashes,
        interaction_count=begin_report["interactions"],
        unknown_item_interactions=begin_report["unknown_items"],
        row_counts=RowCounts.of_report(begin_report["rows"]),
        unknown_item_examples=tuple(begin_report.get(UNKNOWN_ITEMS_NAMED_FIELD, ())),
        unusable={
            source_name: source_report
            for source_name, source_report in begin_report["unusable"].items()
            if source_name == EVENT_INTERACTIONS_SOURCE or source_name.partition(".")[0] in user_sources
        },
    )


def _named_by_events(base: BaseGeneration, shard_count: int, item_mask: NDArray[np.bool_]) -> bool:
    """True if an event names one of these items.

    A night that reads all files would drop the event's row, and a user that only such rows name.
    """
    for shard in range(shard_count):
        (path,) = shard_paths(base.build.root / PARTITION_FOLDER, shard, ("rows",))
        for batch in read_batches(path, column_indexes=(1, 3)):
            ordinals = np.asarray(batch.column("ordinal"))[np.asarray(batch.column(POSITION_COLUMN)) > 0]
            if item_mask[ordinals[ordinals >= 0]].any():
                return True
    return False


def _item_hashes(items: ItemTable, item_mask: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Return the hashes of the ids of the items in the mask, as a partition stores those of unknown items."""
    if not item_mask.any():
        return np.empty(0, np.uint64)
    return text_hashes(item_id_texts(items), UNKNOWN_ITEMS_SEED)[item_mask]


def _is_later(cutoff_at: datetime | None, base_cut: str | None) -> bool:
    if cutoff_at is None or base_cut is None:
        return cutoff_at is None and base_cut is None
    return cutoff_at >= parse_time(base_cut)

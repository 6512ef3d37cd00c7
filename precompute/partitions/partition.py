"""Partition: one pass over the sources that writes each user's rows into the file of the shard that has its hash."""

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from cache.format.ids import hash_ids
from cache.model.tower_spec import InputSpec
from cache.store.artefacts import link_or_copy_file, write_atomically
from precompute.partitions.catalogue import item_id_texts
from precompute.partitions.grouping import DistinctHashes
from precompute.partitions.holdout import Holdout
from precompute.partitions.night_input import NightInput
from precompute.partitions.shard_files import (
    HASH_COLUMN,
    POSITION_COLUMN,
    TOUCHED_KIND,
    ShardFiles,
    allow_open_files,
    file_kinds_in,
    partition_file_kinds,
    range_count_per_shard,
    range_of,
    read_batches,
    read_stream,
    shard_paths,
    user_naming_kinds,
)
from precompute.partitions.shard_input import (
    COUNTED_ROWS_AT_ONCE,
    HashIds,
    count_distinct_ids,
    hash_id_names,
    hash_id_rows,
    scratch_folder,
    slice_shard,
)
from precompute.partitions.stages import StreamStages
from precompute.partitions.user_tables import (
    USER_FEATURES_SOURCE,
    USER_IDS_SCHEMA,
    USER_VECTORS_SOURCE,
    note_event_values,
    write_feature_files,
    write_vector_files,
)
from precompute.sources.columns import text_hashes
from precompute.sources.id_forms import IdForms
from precompute.sources.plausibility import RowCounts
from precompute.sources.readers import ColumnsOfLists, Interactions, read_interactions
from precompute.sources.unusable import (
    ALL_IDS_SOURCE,
    CASES_MAX,
    LISTED_BEFORE_REASON,
    UnusableReport,
    UnusableRows,
    merge_reports,
)

POPULARITY_FILE = "work/popularity.i64"
"""Number of interactions with each item, int64 [items]."""

UNKNOWN_ITEMS_FILE = "work/unknown_items.u64"
"""Sorted uint64 hashes of the item ids in interactions that the catalogue lacks."""

UNKNOWN_ITEMS_SEED = 0
"""Seed of the hashes of unknown items."""

UNKNOWN_EXAMPLES_MAX = 2
"""Examples of unknown items that reports name, at most."""

SHARDS_COUNTED_AT_ONCE = 2
"""Shards whose entities are counted at once: each needs memory for COUNTED_ROWS_AT_ONCE rows."""

OPEN_FILES_PER_SHARD = 2
"""Files of each shard that are open for writing at once: rows and ids. A taken-over partition adds touched users."""

_ROWS_SCHEMA = pa.schema([(HASH_COLUMN, pa.uint64()), ("ordinal", pa.int32()), ("time", pa.int64())])
_POSITIONED_ROWS_SCHEMA = _ROWS_SCHEMA.append(pa.field(POSITION_COLUMN, pa.int64()))
_TOUCHED_SCHEMA = pa.schema([(HASH_COLUMN, pa.uint64())])


@dataclass(frozen=True, slots=True, eq=False)
class InteractionCounts:
    """Counts of interactions: all before the cut, with unknown items, per item, and after the cut.

    `unknown_item_hashes` are the sorted hashes of the unknown items' ids.
    """

    interaction_count: int
    unknown_item_interactions: int
    interactions_by_item: NDArray[np.int64]
    unknown_item_hashes: NDArray[np.uint64]
    late_interaction_count: int
    row_counts: RowCounts
    oldest_late_us: int | None = None
    """Time of the oldest interaction after the cut, in microseconds since 1970; None without one."""

    unknown_item_examples: tuple[str, ...] = ()
    """Some unknown items that the interaction files name; items of events are never examples."""


@dataclass(frozen=True, slots=True, eq=False)
class PartitionResult:
    """Result of a PartitionJob: its seed, its counts, and the unusable rows."""

    hash_seed: int
    user_count: int
    feature_only_user_count: int
    """Users, counted in `user_count` too, that only the feature table names."""
    interaction_counts: InteractionCounts
    unusable: UnusableReport
    took_over_earlier: bool


@dataclass(frozen=True, slots=True, eq=False)
class EarlierPartition:
    """Partition of an earlier night, made from the first interaction files and event files.

    `new_ordinals` int64 [earlier items] maps the earlier ordinals to this night's, -1 for a removed item; None if no
    ordinal changed. `lost_item_hashes` are hashes of the removed items' ids. The counts, and `unusable` by source, are
    of the earlier rows.
    """

    folder: Path
    hash_seed: int
    interaction_file_count: int
    new_ordinals: NDArray[np.int64] | None
    lost_item_hashes: NDArray[np.uint64]
    interactions_by_item: NDArray[np.int64]
    unknown_item_hashes: NDArray[np.uint64]
    interaction_count: int
    unknown_item_interactions: int
    unusable: UnusableReport
    event_file_count: int = 0
    row_counts: RowCounts = field(default_factory=RowCounts)
    unknown_item_examples: tuple[str, ...] = ()

    def shard_rows(self, shard: int) -> Iterator[tuple[Any, NDArray[np.uint64]]]:
        """Yield (batch of a shard's rows with this night's ordinals, hashes of its users who lost an item)."""
        (rows_path,) = shard_paths(self.folder, shard, ("rows",))
        for batch in read_batches(rows_path):
            if self.new_ordinals is None:
                yield batch, np.empty(0, np.uint64)
                continue
            ordinals = np.asarray(batch.column("ordinal"))
            is_known_item = ordinals >= 0
            new_ordinals = np.where(is_known_item, self.new_ordinals[np.where(is_known_item, ordinals, 0)], -1).astype(
                np.int32
            )
            affected_hashes = np.asarray(batch.column(HASH_COLUMN))[is_known_item & (new_ordinals < 0)]
            new_columns = [batch.column(HASH_COLUMN), pa.array(new_ordinals), *batch.columns[2:]]
            yield pa.record_batch(new_columns, schema=batch.schema), np.unique(affected_hashes)

    def shard_batches(self, shard: int, file_kind: str) -> Iterator[Any]:
        """Yield the batches of a shard's file of this kind, unchanged."""
        (file_path,) = shard_paths(self.folder, shard, (file_kind,))
        yield from read_batches(file_path)

    def remap_counts(self, item_count: int) -> tuple[NDArray[np.int64], int, NDArray[np.uint64]]:
        """Return this night's (popularity int64 [items], count of rows without a known item, hashes of unknown ids)."""
        if self.new_ordinals is None:
            return self.interactions_by_item.copy(), self.unknown_item_interactions, self.unknown_item_hashes
        popularity = np.zeros(item_count, np.int64)
        is_kept_item = self.new_ordinals >= 0
        popularity[self.new_ordinals[is_kept_item]] = self.interactions_by_item[is_kept_item]
        lost_interaction_count = int(self.interactions_by_item[~is_kept_item].sum())
        return (
            popularity,
            self.unknown_item_interactions + lost_interaction_count,
            np.union1d(self.unknown_item_hashes, self.lost_item_hashes),
        )

    def take_over(
        self, shard_count: int, folder: Path, rows_files: ShardFiles, ids_files: ShardFiles, touched_files: ShardFiles
    ) -> None:
        """Copy the rows, ids and other files into this night's partition; record the users who lost an item."""
        for shard in range(shard_count):
            for batch, affected_hashes in self.shard_rows(shard):
                rows_files.extend(shard, [batch])
                if len(affected_hashes):
                    touched_files.extend(shard, [pa.record_batch([affected_hashes], names=[HASH_COLUMN])])
            ids_files.extend(shard, self.shard_batches(shard, "ids"))
            for file_kind in file_kinds_in(self.folder, shard)[2:]:
                target_path, earlier_path = (
                    shard_paths(partition_folder, shard, (file_kind,))[0] for partition_folder in (folder, self.folder)
                )
                link_or_copy_file(earlier_path, target_path)


def partition_file_paths(has_user_vectors: bool, shard_count: int) -> list[str]:
    """Return the paths of all files of a partition, and of the count files that a later night takes over."""
    return [
        *(
            f"work/partition/{shard:04d}.{file_kind}"
            for shard in range(shard_count)
            for file_kind in partition_file_kinds(has_user_vectors)
        ),
        POPULARITY_FILE,
        UNKNOWN_ITEMS_FILE,
    ]


class UserCounts(NamedTuple):
    """Counts of a shard's users in all sources, and of the users that only the feature table names."""

    all_user_count: int
    feature_only_user_count: int


@dataclass(frozen=True, slots=True, eq=False)
class PartitionJob:
    """Partition of a night's input into the Arrow files of each shard (`file_kinds_in`), below `folder`.

    Values that one of `feature_inputs` cannot use are counted; values of further `feature_columns` are not checked.
    Users' vectors, if the night has any, must have `vector_dims` numbers. With `needs_history`, no model answers for a
    user without a history, so users known only from features set by events are not counted. The `holdout` collects
    interactions after the cut.
    """

    night: NightInput
    folder: Path
    feature_inputs: Sequence[InputSpec] = ()
    feature_columns: Sequence[str] = ()
    columns_of_lists: ColumnsOfLists = field(default_factory=dict)
    vector_dims: int = 0
    needs_history: bool = False
    holdout: Holdout | None = None
    report_row_count: Callable[[int], None] = lambda _rows: None
    hasher: HashIds = hash_ids

    def run(self, earlier: EarlierPartition | None = None, *, seed: int = 0) -> PartitionResult:
        """Write the files; retry with the next seed until no two ids have the same hash.

        The rows of an `earlier` partition are taken over, only source files that it lacks are read, and the users whose
        inputs changed since are recorded (TOUCHED_KIND). Erased entities are in no file and not in the holdout. Raises
        ConfigError if this process may not open a file for each shard, SourceError if no row has a usable value for an
        input.
        """
        night, shard_count = self.night, self.night.config.shards
        erased, user_values = night.erased, night.values.user_values
        self.folder.mkdir(parents=True, exist_ok=True)
        allow_open_files((OPEN_FILES_PER_SHARD + (earlier is not None)) * shard_count)
        feature_columns = sorted({*self.feature_columns, *(str(feature.column) for feature in self.feature_inputs)})
        seed = seed if earlier is None else earlier.hash_seed
        while True:
            unusable_rows = UnusableRows(erased.users | erased.items)
            user_forms, item_forms = IdForms("user", seed), IdForms("item", UNKNOWN_ITEMS_SEED)
            interaction_counts = _partition_interactions(self, seed, earlier, unusable_rows, item_forms)
            if earlier is None:
                hash_user_ids = partial(hash_id_rows, hash_seed=seed, hasher=self.hasher)
                write_feature_files(
                    night.config, self.folder, hash_user_ids, feature_columns, self.feature_inputs, unusable_rows,
                    event_values=user_values, erased=erased, columns_of_lists=self.columns_of_lists,
                )  # fmt: skip
                if night.config.sources.user_vectors:
                    write_vector_files(
                        night.config, self.folder, self.vector_dims, hash_user_ids, unusable_rows, erased=erased
                    )
            else:
                note_event_values(night, feature_columns, self.feature_inputs, unusable_rows, self.columns_of_lists)
            # Repeated rows of an earlier partition are already counted in its report.
            counted_unusable = unusable_rows if earlier is None else UnusableRows()
            event_user_hashes = np.empty(0, np.uint64)
            if self.needs_history and user_values:
                event_user_hashes = np.unique(self.hasher(list(user_values), seed))
            count_users = partial(
                _count_users,
                self.folder,
                shard_count=shard_count,
                unusable_rows=counted_unusable,
                event_user_hashes=event_user_hashes,
                user_forms=user_forms,
            )
            with ThreadPoolExecutor(SHARDS_COUNTED_AT_ONCE) as pool:
                counts_by_shard = list(pool.map(count_users, range(shard_count)))
            distinct_counts = [counts for counts in counts_by_shard if counts is not None]
            if len(distinct_counts) == shard_count:
                item_forms.add(item_id_texts(night.items))
                item_forms.add_hashes(interaction_counts.unknown_item_hashes)
                for id_forms in (user_forms, item_forms):
                    if (remark := id_forms.remark(unusable_rows.hidden)) is not None:
                        unusable_rows.count_checked(ALL_IDS_SOURCE, 0)
                        unusable_rows.remark(ALL_IDS_SOURCE, *remark)
                return PartitionResult(
                    seed,
                    sum(counts.all_user_count for counts in distinct_counts),
                    sum(counts.feature_only_user_count for counts in distinct_counts),
                    interaction_counts,
                    merge_reports([{} if earlier is None else earlier.unusable, unusable_rows.to_json()]),
                    earlier is not None,
                )
            earlier = None
            seed += 1
            if self.holdout is not None:
                self.holdout.restart()


def _partition_interactions(
    job: PartitionJob, seed: int, earlier: EarlierPartition | None, unusable_rows: UnusableRows, item_forms: IdForms
) -> InteractionCounts:
    folder, config, items, erased = job.folder, job.night.config, job.night.items, job.night.erased
    popularity, unknown_hashes_seen = np.zeros(items.count, np.int64), DistinctHashes()
    row_count = unknown_item_rows = late_count = 0
    oldest_late_us: int | None = None
    row_counts = RowCounts()
    unknown_examples: tuple[str, ...] = ()

    def note_late_batch(batch: Interactions) -> None:
        nonlocal late_count, oldest_late_us
        late_count += len(batch.times_us)
        batch_oldest_us = int(batch.times_us.min())
        oldest_late_us = batch_oldest_us if oldest_late_us is None else min(oldest_late_us, batch_oldest_us)
        if job.holdout is not None:
            job.holdout.add(erased.leave_out(batch))

    rows_schema = _POSITIONED_ROWS_SCHEMA if config.events.enabled else _ROWS_SCHEMA
    with (
        _open_shard_files(folder, "rows", config.shards, rows_schema) as rows_files,
        _open_shard_files(folder, "ids", config.shards, USER_IDS_SCHEMA) as ids_files,
        ExitStack() as exit_stack,
        StreamStages() as stages,
    ):
        touched_files = None
        if earlier is not None:
            row_count = earlier.interaction_count
            row_counts = copy.deepcopy(earlier.row_counts)
            popularity, unknown_item_rows, unknown_hashes = earlier.remap_counts(items.count)
            unknown_hashes_seen.add(unknown_hashes)
            unknown_examples = earlier.unknown_item_examples
            touched_files = exit_stack.enter_context(
                _open_shard_files(folder, TOUCHED_KIND, config.shards, _TOUCHED_SCHEMA)
            )
            earlier.take_over(config.shards, folder, rows_files, ids_files, touched_files)
        source_batches = read_interactions(
            config.sources,
            Path(config.base),
            cutoff_at=job.night.cutoff_at,
            take_late=note_late_batch,
            unusable_rows=unusable_rows,
            skipped_file_count=0 if earlier is None else earlier.interaction_file_count,
            interaction_files=job.night.interaction_files,
        )
        first_file = 0 if earlier is None else earlier.event_file_count
        all_batches = chain(source_batches, job.night.further.interactions(first_file, unusable_rows))

        def place_batch(batch: Interactions) -> tuple[Interactions, NDArray[Any], NDArray[Any]]:
            """Return the batch, the hashes of its user names, and the ordinal of each item name (-1 if unknown)."""
            user_hashes = hash_id_names(batch.user_ids, seed, job.hasher)
            return batch, user_hashes, items.ordinals_of(batch.item_ids.distinct_raw_ids()).astype(np.int32)

        placed_batches = stages.run_ahead(map(place_batch, stages.run_ahead(map(erased.leave_out, all_batches))))
        for batch, user_hashes, ordinal_by_name in placed_batches:
            ordinals = ordinal_by_name[batch.item_ids.id_codes]
            known_ordinals = ordinals[ordinals >= 0]
            popularity += np.bincount(known_ordinals, minlength=items.count)
            if (ordinal_by_name < 0).any():
                unknown_ids = batch.item_ids.distinct_ids.filter(pa.array(ordinal_by_name < 0))
                unknown_id_hashes = text_hashes(unknown_ids, UNKNOWN_ITEMS_SEED)
                unknown_hashes_seen.add(unknown_id_hashes)
                if batch.event_positions is None:
                    item_forms.add(unknown_ids, unknown_id_hashes)
                if batch.event_positions is None and len(unknown_examples) < UNKNOWN_EXAMPLES_MAX:
                    named_examples = dict.fromkeys([*unknown_examples, *unknown_ids[:UNKNOWN_EXAMPLES_MAX].to_pylist()])
                    unknown_examples = tuple(named_examples)[:UNKNOWN_EXAMPLES_MAX]
            row_count += len(ordinals)
            unknown_item_rows += len(ordinals) - len(known_ordinals)
            job.report_row_count(row_count)
            if batch.event_positions is not None and len(known_ordinals) < len(ordinals):
                # Any caller can send events: rows with unknown items must not lower the coverage that a gate judges.
                batch = batch.only(ordinals >= 0)
                user_hashes, ordinals = hash_id_names(batch.user_ids, seed, job.hasher), known_ordinals
            row_counts.add(user_hashes[batch.user_ids.id_codes], batch.times_us)
            user_codes, user_ranges = batch.user_ids.id_codes, range_of(user_hashes, config.shards)
            ids_files.write(pa.table([batch.user_ids.distinct_ids, user_hashes], schema=USER_IDS_SCHEMA), user_ranges)
            row_columns = [user_hashes[user_codes], ordinals, batch.times_us]
            if config.events.enabled:
                zero_positions = np.zeros(len(user_codes), np.int64)
                row_columns.append(zero_positions if batch.event_positions is None else batch.event_positions)
            rows_files.write(pa.table(row_columns, schema=rows_schema), user_ranges[user_codes])
            if touched_files is not None:
                touched_files.write(pa.table([user_hashes], schema=_TOUCHED_SCHEMA), user_ranges)
    return InteractionCounts(
        row_count,
        unknown_item_rows,
        popularity,
        unknown_hashes_seen.all_hashes(),
        late_count,
        row_counts,
        oldest_late_us,
        unknown_examples,
    )


def _open_shard_files(folder: Path, file_kind: str, shard_count: int, arrow_schema: Any) -> ShardFiles:
    paths = [folder / f"{shard:04d}.{file_kind}" for shard in range(shard_count)]
    return ShardFiles(paths, arrow_schema, ranges_per_file=range_count_per_shard(shard_count))


def _count_users(
    folder: Path,
    shard: int,
    shard_count: int,
    unusable_rows: UnusableRows,
    event_user_hashes: NDArray[np.uint64],
    user_forms: IdForms,
) -> UserCounts | None:
    """Count a shard's users, None if two share a hash; note repeated users, and add all ids to `user_forms`.

    Users in `event_user_hashes` (sorted) that only features name are not counted.
    """
    with scratch_folder(folder) as scratch_path:
        naming_kinds = user_naming_kinds(file_kinds_in(folder, shard))
        slices = slice_shard(
            folder, shard, shard_count, scratch_path, slice_rows_max=COUNTED_ROWS_AT_ONCE, file_kinds=naming_kinds
        )
        user_count, hash_count = (sum(slice_counts) for slice_counts in zip(*count_distinct_ids(slices), strict=True))
        uncounted_users = feature_only_users = 0
        for slice_number in slices.slice_numbers:
            ids_table, *user_tables = map(read_stream, shard_paths(slices.folder, slice_number, naming_kinds))
            for source_name, user_table in zip((USER_FEATURES_SOURCE, USER_VECTORS_SOURCE), user_tables, strict=False):
                note_repeated_users(source_name, user_table, unusable_rows)
            for user_table in (ids_table, *user_tables):
                user_forms.add(user_table.column("user"), np.asarray(user_table.column(HASH_COLUMN)))
            feature_hashes, *other_hashes = (
                np.asarray(table.column(HASH_COLUMN)) for table in (*user_tables, ids_table)
            )
            feature_only_hashes = np.setdiff1d(feature_hashes, np.concatenate(other_hashes))
            event_user_count = len(np.intersect1d(feature_only_hashes, event_user_hashes))
            uncounted_users += event_user_count
            feature_only_users += len(feature_only_hashes) - event_user_count
    return UserCounts(user_count - uncounted_users, feature_only_users) if user_count == hash_count else None


def note_repeated_users(source_name: str, user_table: Any, unusable_rows: UnusableRows) -> None:
    """Note rows of users that an earlier row of the table has: only the first row counts."""
    user_hashes = np.asarray(user_table.column(HASH_COLUMN))
    hash_order = np.argsort(user_hashes, kind="stable")
    sorted_hashes = user_hashes[hash_order]
    repeated_rows = np.sort(hash_order[1:][sorted_hashes[1:] == sorted_hashes[:-1]])
    if len(repeated_rows):
        repeated_ids = user_table.column("user").take(pa.array(repeated_rows[:CASES_MAX])).to_pylist()
        unusable_rows.note(
            source_name, LISTED_BEFORE_REASON, len(repeated_rows), ({"user": user_id} for user_id in repeated_ids)
        )


def write_count_files(generation_folder: Path, interaction_counts: InteractionCounts) -> list[str]:
    """Write interaction counts by item, and the unknown items, for a later night that takes this partition over."""
    write_atomically(
        generation_folder / POPULARITY_FILE, interaction_counts.interactions_by_item.astype("<i8").tobytes()
    )
    write_atomically(
        generation_folder / UNKNOWN_ITEMS_FILE, interaction_counts.unknown_item_hashes.astype("<u8").tobytes()
    )
    return [POPULARITY_FILE, UNKNOWN_ITEMS_FILE]

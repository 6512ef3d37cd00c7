"""Partition: one pass over the sources that writes every entity's rows into the file of its hash shard."""

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
from precompute.partitions.catalogue import item_texts
from precompute.partitions.grouping import DistinctHashes
from precompute.partitions.holdout import Holdout
from precompute.partitions.night_input import NightInput
from precompute.partitions.shard_files import (
    HASH,
    POSITION,
    TOUCHED,
    ShardFiles,
    allow_files,
    kinds_in,
    kinds_of,
    naming,
    range_of,
    ranges_of_a_shard,
    read_batches,
    read_stream,
    shard_paths,
)
from precompute.partitions.shard_input import (
    COUNTED_ROWS,
    Hasher,
    count_distinct,
    hashes_of,
    hashes_of_names,
    scratch_folder,
    slice_shard,
)
from precompute.partitions.stages import Stages
from precompute.partitions.user_tables import (
    IDS,
    USER_ROWS,
    VECTOR_ROWS,
    note_event_values,
    write_features,
    write_vectors,
)
from precompute.sources.columns import text_hashes
from precompute.sources.id_forms import IdForms
from precompute.sources.plausibility import RowCounts
from precompute.sources.readers import ColumnsOfLists, Interactions, read_interactions
from precompute.sources.unusable import (
    ALL_IDS,
    CASES,
    LISTED_BEFORE,
    UnusableReport,
    UnusableRows,
    merged,
)

POPULARITY = "work/popularity.i64"
"""Number of interactions with each item, int64 [items]."""

UNKNOWN_ITEMS = "work/unknown_items.u64"
"""Sorted uint64 hashes of the item ids in interactions that the catalogue lacks."""

UNKNOWN_ITEMS_SEED = 0
"""Seed of these hashes."""

UNKNOWN_EXAMPLES = 2
"""Unknown items that are named."""

COUNTED_AT_ONCE = 2
"""Shards whose entities are counted at once: each takes COUNTED_ROWS of memory."""

FILES_AT_ONCE = 2
"""Files of each shard open for writing at the same time: rows and ids (and touched users)."""

_ROWS = pa.schema([(HASH, pa.uint64()), ("ordinal", pa.int32()), ("time", pa.int64())])
_PLACED_ROWS = _ROWS.append(pa.field(POSITION, pa.int64()))
_TOUCHED = pa.schema([(HASH, pa.uint64())])


@dataclass(frozen=True, slots=True, eq=False)
class InteractionCounts:
    """Counts of interactions: all before the cut, those with unknown items, those of each item, and those after it.

    `unknown` are the hashes of the unknown items' ids, sorted.
    """

    interactions: int
    unknown_items: int
    popularity: NDArray[np.int64]
    unknown: NDArray[np.uint64]
    late: int
    rows: RowCounts
    unknown_examples: tuple[str, ...] = ()
    """Some of the unknown items that the team's interactions name."""


@dataclass(frozen=True, slots=True, eq=False)
class PartitionResult:
    """Result of a PartitionJob: its seed, its counts, and the unusable rows."""

    seed: int
    users: int
    featured: int
    """Users among these that only the feature table names."""
    interaction_counts: InteractionCounts
    unusable: UnusableReport
    took_over: bool


@dataclass(frozen=True, slots=True, eq=False)
class EarlierPartition:
    """Partition of an earlier night, made of the first `files` of the team's interactions and `event_files` of events.

    `new_ordinals` int64 [its items] are their ordinals now, -1 for a removed item, None if all stayed;
    `lost_item_hashes` are hashes of the removed items' ids. The counts, and `unusable` by source, are of its rows.
    """

    folder: Path
    seed: int
    files: int
    new_ordinals: NDArray[np.int64] | None
    lost_item_hashes: NDArray[np.uint64]
    popularity: NDArray[np.int64]
    unknown: NDArray[np.uint64]
    interactions: int
    unknown_items: int
    unusable: UnusableReport
    event_files: int = 0
    row_counts: RowCounts = field(default_factory=RowCounts)
    unknown_examples: tuple[str, ...] = ()

    def rows(self, shard: int) -> Iterator[tuple[Any, NDArray[np.uint64]]]:
        """Yield batches of a shard's rows with this night's ordinals, and the users who lost an item."""
        (path,) = shard_paths(self.folder, shard, ("rows",))
        for batch in read_batches(path):
            if self.new_ordinals is None:
                yield batch, np.empty(0, np.uint64)
                continue
            ordinals = np.asarray(batch.column("ordinal"))
            is_known = ordinals >= 0
            new_ordinals = np.where(
                is_known, self.new_ordinals[np.where(is_known, ordinals, 0)], -1
            ).astype(np.int32)
            affected_hashes = np.asarray(batch.column(HASH))[is_known & (new_ordinals < 0)]
            columns = [batch.column(HASH), pa.array(new_ordinals), *batch.columns[2:]]
            yield pa.record_batch(columns, schema=batch.schema), np.unique(affected_hashes)

    def batches(self, shard: int, kind: str) -> Iterator[Any]:
        """Yield batches of another file of a shard, unchanged."""
        (path,) = shard_paths(self.folder, shard, (kind,))
        yield from read_batches(path)

    def remap_counts(self, items: int) -> tuple[NDArray[np.int64], int, NDArray[np.uint64]]:
        """Return (popularity int64 [items], rows without a known item, hashes of unknown ids), all for this night."""
        if self.new_ordinals is None:
            return self.popularity.copy(), self.unknown_items, self.unknown
        popularity = np.zeros(items, np.int64)
        is_kept = self.new_ordinals >= 0
        popularity[self.new_ordinals[is_kept]] = self.popularity[is_kept]
        lost_interaction_count = int(self.popularity[~is_kept].sum())
        return (
            popularity,
            self.unknown_items + lost_interaction_count,
            np.union1d(self.unknown, self.lost_item_hashes),
        )

    def take_over(
        self, shards: int, folder: Path, rows: ShardFiles, ids: ShardFiles, touched: ShardFiles
    ) -> None:
        """Copy its rows, ids and other files into the files of this night's partition."""
        for shard in range(shards):
            for batch, affected_hashes in self.rows(shard):
                rows.extend(shard, [batch])
                if len(affected_hashes):
                    touched.extend(shard, [pa.record_batch([affected_hashes], names=[HASH])])
            ids.extend(shard, self.batches(shard, "ids"))
            for kind in kinds_in(self.folder, shard)[2:]:
                target_path, theirs = (
                    shard_paths(partition_folder, shard, (kind,))[0]
                    for partition_folder in (folder, self.folder)
                )
                link_or_copy_file(theirs, target_path)


def partition_files(has_user_vectors: bool, shards: int) -> list[str]:
    """Return the paths of the files of a partition, with the counts that a later night takes over."""
    return [
        *(
            f"work/partition/{shard:04d}.{kind}"
            for shard in range(shards)
            for kind in kinds_of(has_user_vectors)
        ),
        POPULARITY,
        UNKNOWN_ITEMS,
    ]


class UserCounts(NamedTuple):
    """Counts of a shard's users in the sources, and of those that only the feature table names."""

    named: int
    featured: int


@dataclass(frozen=True, slots=True, eq=False)
class PartitionJob:
    """Partition of a night's input into the Arrow files of each shard (`kinds_in`), below `folder`.

    Values that one of `feature_inputs` cannot use are counted, those of further `feature_columns` are not. Vectors of
    users, if the night has any, must have `dims` numbers. `needs_history`: no model answers for a user without a
    history, so users whom events made known by features alone are not counted. The `holdout` gets interactions after
    the cut.
    """

    night: NightInput
    folder: Path
    feature_inputs: Sequence[InputSpec] = ()
    feature_columns: Sequence[str] = ()
    lists: ColumnsOfLists = field(default_factory=dict)
    dims: int = 0
    needs_history: bool = False
    holdout: Holdout | None = None
    progress: Callable[[int], None] = lambda _rows: None
    hasher: Hasher = hash_ids

    def run(self, earlier: EarlierPartition | None = None, *, seed: int = 0) -> PartitionResult:
        """Write the files, trying seeds until no id collides.

        The rows of an `earlier` partition are taken over, source files that are not in it are read, and the users whose
        inputs differ from then are recorded (TOUCHED). Erased entities are in none of the files, nor in the holdout.
        Raises ConfigError where this process may not open a file for each shard, SourceError for an input that no row
        can fill.
        """
        night, shards = self.night, self.night.config.shards
        erased, values = night.erased, night.values.users
        self.folder.mkdir(parents=True, exist_ok=True)
        allow_files((FILES_AT_ONCE + (earlier is not None)) * shards)
        columns = sorted(
            {*self.feature_columns, *(str(feature.column) for feature in self.feature_inputs)}
        )
        seed = seed if earlier is None else earlier.seed
        while True:
            unusable = UnusableRows(erased.users | erased.items)
            user_forms, item_forms = IdForms("user", seed), IdForms("item", UNKNOWN_ITEMS_SEED)
            interaction_counts = _write_interactions(self, seed, earlier, unusable, item_forms)
            if earlier is None:
                named = partial(hashes_of, seed=seed, hasher=self.hasher)
                write_features(
                    night.config, self.folder, named, columns, self.feature_inputs, unusable,
                    values=values, erased=erased, lists=self.lists,
                )  # fmt: skip
                if night.config.sources.user_vectors:
                    write_vectors(
                        night.config, self.folder, self.dims, named, unusable, erased=erased
                    )
            else:
                note_event_values(night, columns, self.feature_inputs, unusable, self.lists)
            # What is taken over was counted when it was read.
            counting_notes = unusable if earlier is None else UnusableRows()
            set_by_events = np.empty(0, np.uint64)
            if self.needs_history and values:
                set_by_events = np.unique(self.hasher(list(values), seed))
            count = partial(
                _count_users,
                self.folder,
                shards=shards,
                unusable=counting_notes,
                set_by_events=set_by_events,
                forms=user_forms,
            )
            with ThreadPoolExecutor(COUNTED_AT_ONCE) as pool:
                user_counts = list(pool.map(count, range(shards)))
            distinct_counts = [counts for counts in user_counts if counts is not None]
            if len(distinct_counts) == shards:
                item_forms.add(item_texts(night.items))
                item_forms.add_hashes(interaction_counts.unknown)
                for forms in (user_forms, item_forms):
                    if (remark := forms.remark(unusable.hidden)) is not None:
                        unusable.looked_at(ALL_IDS, 0)
                        unusable.remark(ALL_IDS, *remark)
                return PartitionResult(
                    seed,
                    sum(counts.named for counts in distinct_counts),
                    sum(counts.featured for counts in distinct_counts),
                    interaction_counts,
                    merged([{} if earlier is None else earlier.unusable, unusable.to_json()]),
                    earlier is not None,
                )
            earlier = None
            seed += 1
            if self.holdout is not None:
                self.holdout.restart()


def _write_interactions(
    job: PartitionJob,
    seed: int,
    earlier: EarlierPartition | None,
    unusable: UnusableRows,
    item_forms: IdForms,
) -> InteractionCounts:
    folder, config, items, erased = job.folder, job.night.config, job.night.items, job.night.erased
    popularity, unknown = np.zeros(items.count, np.int64), DistinctHashes()
    count = without_item = late_count = 0
    row_counts = RowCounts()
    examples: tuple[str, ...] = ()

    def note_late_batch(batch: Interactions) -> None:
        nonlocal late_count
        late_count += len(batch.times)
        if job.holdout is not None:
            job.holdout.add(erased.leave_out(batch))

    schema = _PLACED_ROWS if config.events.enabled else _ROWS
    with (
        _shard_files(folder, "rows", config.shards, schema) as rows,
        _shard_files(folder, "ids", config.shards, IDS) as ids,
        ExitStack() as exit_stack,
        Stages() as stages,
    ):
        touched = None
        if earlier is not None:
            count = earlier.interactions
            row_counts = copy.deepcopy(earlier.row_counts)
            popularity, without_item, unknown_hashes = earlier.remap_counts(items.count)
            unknown.add(unknown_hashes)
            examples = earlier.unknown_examples
            touched = exit_stack.enter_context(
                _shard_files(folder, TOUCHED, config.shards, _TOUCHED)
            )
            earlier.take_over(config.shards, folder, rows, ids, touched)
        read = read_interactions(
            config.sources,
            Path(config.base),
            cutoff_at=job.night.cutoff_at,
            late=note_late_batch,
            unusable=unusable,
            skip=0 if earlier is None else earlier.files,
            files=job.night.files,
        )
        first_file = 0 if earlier is None else earlier.event_files
        batches = chain(read, job.night.further.interactions(first_file, unusable))

        def placed(batch: Interactions) -> tuple[Interactions, NDArray[Any], NDArray[Any]]:
            """Return a batch with the hashes of its users' names and an ordinal, -1 = unknown, for each item name."""
            hashes = hashes_of_names(batch.users, seed, job.hasher)
            return batch, hashes, items.ordinals_of(batch.items.raws()).astype(np.int32)

        placed_batches = stages.ahead(map(placed, stages.ahead(map(erased.leave_out, batches))))
        for batch, hashes, name_ordinals in placed_batches:
            ordinals = name_ordinals[batch.items.codes]
            known_ordinals = ordinals[ordinals >= 0]
            popularity += np.bincount(known_ordinals, minlength=items.count)
            if (name_ordinals < 0).any():
                nameless = batch.items.names.filter(pa.array(name_ordinals < 0))
                nameless_hashes = text_hashes(nameless, UNKNOWN_ITEMS_SEED)
                unknown.add(nameless_hashes)
                if batch.positions is None:
                    item_forms.add(nameless, nameless_hashes)
                if batch.positions is None and len(examples) < UNKNOWN_EXAMPLES:
                    named = dict.fromkeys([*examples, *nameless[:UNKNOWN_EXAMPLES].to_pylist()])
                    examples = tuple(named)[:UNKNOWN_EXAMPLES]
            count += len(ordinals)
            without_item += len(ordinals) - len(known_ordinals)
            job.progress(count)
            if batch.positions is not None and len(known_ordinals) < len(ordinals):
                # Anybody sends events: users of items that nobody knows would make the coverage as low as they like.
                batch = batch.only(ordinals >= 0)
                hashes, ordinals = hashes_of_names(batch.users, seed, job.hasher), known_ordinals
            row_counts.add(hashes[batch.users.codes], batch.times)
            codes, ranges = batch.users.codes, range_of(hashes, config.shards)
            ids.write(pa.table([batch.users.names, hashes], schema=IDS), ranges)
            placed_rows = [hashes[codes], ordinals, batch.times]
            if config.events.enabled:
                zero_positions = np.zeros(len(codes), np.int64)
                placed_rows.append(zero_positions if batch.positions is None else batch.positions)
            rows.write(pa.table(placed_rows, schema=schema), ranges[codes])
            if touched is not None:
                touched.write(pa.table([hashes], schema=_TOUCHED), ranges)
    return InteractionCounts(
        count, without_item, popularity, unknown.all(), late_count, row_counts, examples
    )


def _shard_files(folder: Path, kind: str, shards: int, schema: Any) -> ShardFiles:
    paths = [folder / f"{shard:04d}.{kind}" for shard in range(shards)]
    return ShardFiles(paths, schema, ranges=ranges_of_a_shard(shards))


def _count_users(
    folder: Path,
    shard: int,
    shards: int,
    unusable: UnusableRows,
    set_by_events: NDArray[np.uint64],
    forms: IdForms,
) -> UserCounts | None:
    """Count the entities of a shard, None if two share a hash; note repeated entities of a table, and all in `forms`.

    Not those in `set_by_events` (sorted hashes) that only features name.
    """
    with scratch_folder(folder) as scratch:
        kinds = naming(kinds_in(folder, shard))
        slices = slice_shard(folder, shard, shards, scratch, rows=COUNTED_ROWS, kinds=kinds)
        users, hashes = (
            sum(slice_counts) for slice_counts in zip(*count_distinct(slices), strict=True)
        )
        uncounted = featured = 0
        for number in slices.numbers:
            ids, *tables = map(read_stream, shard_paths(slices.folder, number, kinds))
            for source, table in zip((USER_ROWS, VECTOR_ROWS), tables, strict=False):
                note_repeated_users(source, table, unusable)
            for table in (ids, *tables):
                forms.add(table.column("user"), np.asarray(table.column(HASH)))
            features, *other_hashes = (np.asarray(table.column(HASH)) for table in (*tables, ids))
            alone = np.setdiff1d(features, np.concatenate(other_hashes))
            count_of_events = len(np.intersect1d(alone, set_by_events))
            uncounted += count_of_events
            featured += len(alone) - count_of_events
    return UserCounts(users - uncounted, featured) if users == hashes else None


def note_repeated_users(source: str, table: Any, unusable: UnusableRows) -> None:
    """Note rows of users that an earlier row named: the first one counts."""
    hashes = np.asarray(table.column(HASH))
    order = np.argsort(hashes, kind="stable")
    placed = hashes[order]
    repeated_rows = np.sort(order[1:][placed[1:] == placed[:-1]])
    if len(repeated_rows):
        named = table.column("user").take(pa.array(repeated_rows[:CASES])).to_pylist()
        unusable.note(
            source, LISTED_BEFORE, len(repeated_rows), ({"user": user_id} for user_id in named)
        )


def write_counts(root: Path, interaction_counts: InteractionCounts) -> list[str]:
    """Write counts of interactions by item, and the unknown items, for a night that takes this partition over."""
    write_atomically(root / POPULARITY, interaction_counts.popularity.astype("<i8").tobytes())
    write_atomically(root / UNKNOWN_ITEMS, interaction_counts.unknown.astype("<u8").tobytes())
    return [POPULARITY, UNKNOWN_ITEMS]

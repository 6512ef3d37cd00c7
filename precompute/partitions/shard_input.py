"""Input of one shard: the shard's rows of the partition grouped by entity, a bounded number of rows at a time."""

import mmap
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.format.ids import FINGERPRINT_SEED, hash_ids
from cache.model.tower import Histories
from precompute.partitions.grouping import (
    distinct_hashes,
    first_row_of_hashes,
    last_occurrence_mask,
    order_by_user_and_time,
    positions_of_hashes,
)
from precompute.partitions.shard_files import (
    HASH_COLUMN,
    POSITION_COLUMN,
    USER_VECTORS_KIND,
    ShardFiles,
    allow_open_files,
    count_rows,
    file_kinds_in,
    first_hash,
    range_count_per_shard,
    read_stream,
    shard_paths,
    user_naming_kinds,
)
from precompute.partitions.user_tables import vectors_of_hashes
from precompute.sources.columns import Ids, native_text_hashes

HashIds = Callable[[Sequence[bytes], int], NDArray[np.uint64]]

SLICE_ROWS_MAX = 1 << 20
"""Rows grouped at once; grouping them takes about 150 MB of memory."""

SLICE_BYTES_MAX = 256 << 20
"""Bytes of a shard's files grouped at once; bounds the slices of users with many features."""

PIECE_ROWS = 1 << 17
"""Rows of a shard grouped in one piece: the columns and their sort fit into a core's caches."""

PIECE_ROWS_PER_BATCH_MIN = 512
"""Least mean number of rows that a piece takes from each batch: with fewer, slicing costs more than sorting."""

SLICE_FILES_MAX = 256
"""Slice files written at once; more slices take two passes."""

_LOW_BITS_MASK = (1 << 20) - 1

COUNTED_ROWS_AT_ONCE = 4 * SLICE_ROWS_MAX
"""Rows whose entities are counted at once."""


@dataclass(frozen=True, slots=True)
class ShardSlices:
    """Consecutive hash ranges of one shard; each is a number, like a shard's, with its own files in `folder`."""

    folder: Path
    slice_numbers: range


@dataclass(frozen=True, slots=True, eq=False)
class ShardInput:
    """Entities in hash order; entity i's history is `history_ordinals` from `history_indptr[i]` on, oldest first.

    The ids are one Arrow array of strings, since millions of Python objects would be slow. Histories are complete,
    because lists must leave out every item that the user had; models get the newest `history_limit` items.
    """

    entity_ids: Any
    entity_hashes: NDArray[np.uint64]
    history_indptr: NDArray[np.int64]
    history_ordinals: NDArray[np.int64]
    features: dict[str, Any]
    history_limit: int = sys.maxsize
    entity_vectors: NDArray[np.float32] | None = None
    """Vectors [entities, dims] from the table of users' vectors, NaN for a user without one; None without a table."""
    history_times: NDArray[np.int64] | None = None
    """Microseconds since 1970 of each history item's last interaction; None if events are not read."""
    answers_without_history: bool = False
    """True if a model of histories and features answers for an entity without a history by its features alone."""

    def select_rows(self, entity_rows: NDArray[np.int64]) -> "ShardInput":
        """Return the input of these entities, in the order given."""
        histories = Histories(self.history_indptr, self.history_ordinals).select_rows(entity_rows)
        times = (
            None
            if self.history_times is None
            else Histories(self.history_indptr, self.history_times).select_rows(entity_rows)
        )
        return ShardInput(
            entity_ids=self.entity_ids.take(pa.array(entity_rows)),
            entity_hashes=self.entity_hashes[entity_rows],
            history_indptr=histories.indptr,
            history_ordinals=histories.indices,
            features={name: column.take(pa.array(entity_rows)) for name, column in self.features.items()},
            history_limit=self.history_limit,
            entity_vectors=None if self.entity_vectors is None else self.entity_vectors[entity_rows],
            history_times=None if times is None else times.indices,
            answers_without_history=self.answers_without_history,
        )

    @property
    def has_vector(self) -> NDArray[np.bool_]:
        """Mask of the entities whose vector the sources give, bool [entities]."""
        if self.entity_vectors is None:
            return np.zeros(len(self.entity_ids), np.bool_)
        return ~np.isnan(self.entity_vectors[:, 0])


@contextmanager
def scratch_folder(parent_folder: Path) -> Iterator[Path]:
    """Yield a folder for slices, not created yet, removed at the end; `retire` sweeps those of killed processes."""
    scratch_path = parent_folder / f".slices.{secrets.token_hex(4)}.part"
    try:
        yield scratch_path
    finally:
        shutil.rmtree(scratch_path, ignore_errors=True)


def slice_shard(
    folder: Path,
    shard: int,
    shard_count: int,
    scratch_path: Path,
    *,
    slice_rows_max: int | None = None,
    file_kinds: Sequence[str] | None = None,
    first_slices_max: int | None = None,
) -> ShardSlices:
    """Return the shard itself if it is no larger than one slice, else slices of it.

    A slice has at most `slice_rows_max` (default SLICE_ROWS_MAX) rows and SLICE_BYTES_MAX bytes, but all rows of one
    entity are in one slice. Slices are files in `scratch_path`, so memory does not grow with the shard. With
    `first_slices_max`, only that many slices are written, those with the lowest hashes. Without `file_kinds`, all kinds
    of files are sliced.
    """
    file_kinds = file_kinds or file_kinds_in(folder, shard)
    file_paths = shard_paths(folder, shard, file_kinds)
    slice_count = max(
        -(-sum(map(count_rows, file_paths)) // (slice_rows_max or SLICE_ROWS_MAX)),
        -(-sum(path.stat().st_size for path in file_paths) // SLICE_BYTES_MAX),
    )
    if slice_count <= 1:
        return ShardSlices(folder, range(shard, shard + 1))
    rough_count = -(-slice_count // SLICE_FILES_MAX)
    if rough_count == 1 or (first_slices_max or slice_count) <= SLICE_FILES_MAX:
        slice_numbers = range(shard * slice_count, (shard + 1) * slice_count)[:first_slices_max]
        _split_shard_files(folder, shard, scratch_path, slice_numbers, shard_count * slice_count, file_kinds)
        return ShardSlices(scratch_path, slice_numbers)
    rough_numbers, slices_per_rough = (
        range(shard * rough_count, (shard + 1) * rough_count),
        -(-slice_count // rough_count),
    )
    _split_shard_files(folder, shard, scratch_path / "rough", rough_numbers, shard_count * rough_count, file_kinds)
    for rough_number in rough_numbers:
        slice_numbers_of_rough = range(rough_number * slices_per_rough, (rough_number + 1) * slices_per_rough)
        _split_shard_files(
            scratch_path / "rough",
            rough_number,
            scratch_path,
            slice_numbers_of_rough,
            shard_count * rough_count * slices_per_rough,
            file_kinds,
        )
        for path in shard_paths(scratch_path / "rough", rough_number, file_kinds):
            path.unlink()
    return ShardSlices(
        scratch_path, range(rough_numbers.start * slices_per_rough, rough_numbers.stop * slices_per_rough)
    )


def _split_shard_files(
    folder: Path, shard: int, target_folder: Path, range_numbers: range, total_ranges: int, file_kinds: Sequence[str]
) -> None:
    """Split a shard's files into `total_ranges` hash ranges; only the ranges in `range_numbers` are written."""
    target_folder.mkdir(parents=True, exist_ok=True)
    allow_open_files(len(range_numbers))
    bound_numbers = range(range_numbers.start, min(range_numbers.stop + 1, total_ranges))
    first_hashes = np.array([first_hash(range_number, total_ranges) for range_number in bound_numbers], np.uint64)
    # Kinds that name users, if sliced alone, are only needed for their ids and hashes.
    column_indexes = [0, 1] if tuple(file_kinds) == user_naming_kinds(file_kinds_in(folder, shard)) else None
    for file_kind in file_kinds:
        target_paths = [
            target_path
            for range_number in range_numbers
            for target_path in shard_paths(target_folder, range_number, (file_kind,))
        ]
        (source_path,) = shard_paths(folder, shard, (file_kind,))
        with pa.OSFile(str(source_path)) as source:  # a map would count as this process's memory
            options = pa.ipc.IpcReadOptions(included_fields=column_indexes)
            stream = pa.ipc.open_stream(source, options=options)
            with ShardFiles(target_paths, stream.schema, is_synced=False) as range_files:
                for batch in stream:
                    row_hashes = np.asarray(batch.column(HASH_COLUMN))
                    row_range_numbers = first_hashes.searchsorted(row_hashes, "right") - 1
                    range_files.write(pa.Table.from_batches([batch]), row_range_numbers)


def write_selected_users(folder: Path, shard: int, user_hashes: NDArray[np.uint64], scratch_path: Path) -> Path:
    """Write the rows of the users with these sorted hashes to a folder in `scratch_path`; return the folder."""
    target_folder = scratch_path / "alone"
    target_folder.mkdir(parents=True, exist_ok=True)
    may_match = np.zeros(_LOW_BITS_MASK + 1, np.bool_)  # a filter by the hashes' low bits drops most other rows
    may_match[(user_hashes & np.uint64(_LOW_BITS_MASK)).astype(np.int64)] = True
    for file_kind in file_kinds_in(folder, shard):
        (source_path,), (target_path,) = (
            shard_paths(parent_folder, shard, (file_kind,)) for parent_folder in (folder, target_folder)
        )
        with pa.OSFile(str(source_path)) as source, pa.OSFile(str(target_path), "wb") as sink:
            stream = pa.ipc.open_stream(source)
            with pa.ipc.new_stream(sink, stream.schema) as writer:
                for batch in stream:
                    row_hashes = np.asarray(batch.column(HASH_COLUMN))
                    candidate_rows = np.flatnonzero(
                        may_match[(row_hashes & np.uint64(_LOW_BITS_MASK)).astype(np.int64)]
                    )
                    hash_positions = np.minimum(
                        user_hashes.searchsorted(row_hashes[candidate_rows]), max(0, len(user_hashes) - 1)
                    )
                    candidate_rows = (
                        candidate_rows[user_hashes[hash_positions] == row_hashes[candidate_rows]]
                        if len(user_hashes)
                        else candidate_rows[:0]
                    )
                    if len(candidate_rows):
                        writer.write_batch(batch.take(pa.array(candidate_rows)))
    return target_folder


def hash_id_rows(ids: Ids, hash_seed: int, hasher: HashIds = hash_ids) -> NDArray[np.uint64]:
    """Return the hash of each row's id, uint64[rows]; each distinct id is hashed once."""
    return hash_id_names(ids, hash_seed, hasher)[ids.id_codes]


def hash_id_names(ids: Ids, hash_seed: int, hasher: HashIds = hash_ids) -> NDArray[np.uint64]:
    """Return the hash of each distinct id, uint64[names]."""
    return ids.distinct_hashes(hash_seed) if hasher is hash_ids else hasher(ids.distinct_raw_ids(), hash_seed)


def count_distinct_ids(slices: ShardSlices) -> Iterator[tuple[int, int]]:
    """Yield counts of (distinct ids, distinct hashes) of each slice's users; equal unless two ids share a hash."""
    for slice_number in slices.slice_numbers:
        naming_kinds = user_naming_kinds(file_kinds_in(slices.folder, slice_number))
        user_tables = [read_stream(path) for path in shard_paths(slices.folder, slice_number, naming_kinds)]
        user_hashes = np.concatenate([np.asarray(table.column(HASH_COLUMN)) for table in user_tables])
        id_chunks = [chunk for table in user_tables for chunk in table.column("user").chunks]
        chunk_fingerprints = [native_text_hashes(chunk, FINGERPRINT_SEED) for chunk in id_chunks if len(chunk)]
        if any(fingerprints is None for fingerprints in chunk_fingerprints):  # no compiled extension
            all_ids = pa.chunked_array(id_chunks, pa.string())
            yield len(pc.unique(all_ids)), len(distinct_hashes(user_hashes)[0])
        else:
            yield _count_distinct_pairs(user_hashes, np.concatenate([np.empty(0, np.uint64), *chunk_fingerprints]))


def _count_distinct_pairs(hashes: NDArray[np.uint64], fingerprints: NDArray[np.uint64]) -> tuple[int, int]:
    """Return counts of distinct (pairs, hashes).

    The sort is by hash alone, which needs less memory: if two ids share a hash, the first count may be too high.
    """
    hash_order = np.argsort(hashes)
    sorted_hashes, fingerprints = hashes[hash_order], fingerprints[hash_order]
    is_new_hash = sorted_hashes[1:] != sorted_hashes[:-1]
    first_count = min(1, len(hash_order))
    return first_count + int((is_new_hash | (fingerprints[1:] != fingerprints[:-1])).sum()), first_count + int(
        is_new_hash.sum()
    )


class MappedStream:
    """Memory-mapped Arrow stream of one shard, with the start of each hash range in each of its batches."""

    def __init__(self, stream_path: Path) -> None:
        with stream_path.open("rb") as stream_file:
            self._map = mmap.mmap(stream_file.fileno(), 0, access=mmap.ACCESS_READ)
        stream = pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(self._map)))
        self._schema, self._batches = stream.schema, list(stream)
        self._range_starts: list[NDArray[np.int64]] = []
        self.rows = sum(batch.num_rows for batch in self._batches)
        self.batches = len(self._batches)
        self.size_bytes = len(self._map)

    def find_ranges(self, first_hashes: NDArray[np.uint64], last_hashes: NDArray[np.uint64]) -> bool:
        """Find each batch's rows of the ranges with these bounds (inclusive); False if a batch is out of order."""
        for batch in self._batches:
            batch_hashes = np.asarray(batch.column(HASH_COLUMN))
            range_starts = np.append(batch_hashes.searchsorted(first_hashes), len(batch_hashes))
            filled_ranges = np.flatnonzero(range_starts[1:] > range_starts[:-1])
            if len(batch_hashes):
                filled_starts = range_starts[filled_ranges]
                lowest_hashes, highest_hashes = (
                    np.minimum.reduceat(batch_hashes, filled_starts),
                    np.maximum.reduceat(batch_hashes, filled_starts),
                )
                is_in_order = range_starts[0] == 0 and (range_starts[1:] >= range_starts[:-1]).all()
                if not (
                    is_in_order
                    and (lowest_hashes >= first_hashes[filled_ranges]).all()
                    and (highest_hashes <= last_hashes[filled_ranges]).all()
                ):
                    return False
            self._range_starts.append(range_starts)
        return True

    def table(self, range_index: int) -> Any:
        """Return the rows of one range, by its index in the shard, as slices of the mapped batches."""
        batch_pieces = []
        for batch, starts in zip(self._batches, self._range_starts, strict=True):
            first_row, end_row = int(starts[range_index]), int(starts[range_index + 1])
            if end_row > first_row:
                batch_pieces.append(batch.slice(first_row, end_row - first_row))
        return pa.Table.from_batches(batch_pieces, self._schema)

    def let_go(self) -> None:
        """Drop the pages read so far from memory: mapped pages count as this process's memory."""
        self._map.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True, eq=False)
class ShardPieces:
    """Consecutive hash ranges of one shard, numbered like shards; the rows of a range are one piece of every batch."""

    range_numbers: range
    slice_count: int
    """Number of slices that the ranges form, each of about SLICE_ROWS_MAX or SLICE_BYTES_MAX."""
    stream_by_kind: Mapping[str, MappedStream]

    @classmethod
    def open(cls, folder: Path, shard: int, shard_count: int) -> "ShardPieces | None":
        """Open the pieces of a shard; None if its batches are not ordered by range, or a range would be too large."""
        file_kinds = file_kinds_in(folder, shard)
        file_paths = shard_paths(folder, shard, file_kinds)
        stream_by_kind = {kind: MappedStream(path) for kind, path in zip(file_kinds, file_paths, strict=True)}
        row_count = sum(stream.rows for stream in stream_by_kind.values())
        size_bytes = sum(stream.size_bytes for stream in stream_by_kind.values())
        slice_count = max(1, -(-row_count // SLICE_ROWS_MAX), -(-size_bytes // SLICE_BYTES_MAX))
        range_limit = range_count_per_shard(shard_count)
        if slice_count > range_limit:
            return None
        batch_count_max = max(stream.batches for stream in stream_by_kind.values())
        piece_count = min(row_count // PIECE_ROWS, row_count // (PIECE_ROWS_PER_BATCH_MIN * max(1, batch_count_max)))
        range_count = min(range_limit, 1 << (max(slice_count, piece_count) - 1).bit_length())
        slice_count = -(-range_count // max(1, range_count // slice_count))
        range_numbers, total_ranges = (range(shard * range_count, (shard + 1) * range_count), shard_count * range_count)
        first_hashes = np.array([first_hash(number, total_ranges) for number in range_numbers], np.uint64)
        last_hashes = np.array([first_hash(number + 1, total_ranges) - 1 for number in range_numbers], np.uint64)
        if not all(stream.find_ranges(first_hashes, last_hashes) for stream in stream_by_kind.values()):
            return None
        return cls(range_numbers, slice_count, stream_by_kind)

    def tables(self, range_number: int) -> dict[str, Any]:
        """Return the rows of one range, an Arrow table for each kind of file."""
        range_index = range_number - self.range_numbers.start
        return {kind: stream.table(range_index) for kind, stream in self.stream_by_kind.items()}

    def let_go(self) -> None:
        """Drop the pages of all files read so far from memory."""
        for stream in self.stream_by_kind.values():
            stream.let_go()


def read_shard(folder: Path, shard: int, *, history_limit: int, answers_without_history: bool = False) -> ShardInput:
    """Read a shard's rows and group them by entity; histories hold known items, each once at its last interaction."""
    return group_rows_by_entity(
        read_tables_by_kind(folder, shard), history_limit=history_limit, answers_without_history=answers_without_history
    )


def read_tables_by_kind(folder: Path, shard: int) -> dict[str, Any]:
    """Read the files of a shard or a slice: an Arrow table for each kind."""
    file_kinds = file_kinds_in(folder, shard)
    file_paths = shard_paths(folder, shard, file_kinds)
    return {kind: read_stream(path) for kind, path in zip(file_kinds, file_paths, strict=True)}


def join_shard_inputs(shard_inputs: Sequence[ShardInput]) -> ShardInput:
    """Concatenate the entities of several inputs."""
    if len(shard_inputs) == 1:
        return shard_inputs[0]
    history_lengths = np.concatenate([np.diff(shard_input.history_indptr) for shard_input in shard_inputs])
    vector_parts = [
        shard_input.entity_vectors for shard_input in shard_inputs if shard_input.entity_vectors is not None
    ]
    time_parts = [shard_input.history_times for shard_input in shard_inputs if shard_input.history_times is not None]
    return ShardInput(
        entity_ids=pa.concat_arrays([shard_input.entity_ids for shard_input in shard_inputs]),
        entity_hashes=np.concatenate([shard_input.entity_hashes for shard_input in shard_inputs]),
        history_indptr=np.concatenate([np.zeros(1, np.int64), np.cumsum(history_lengths)]),
        history_ordinals=np.concatenate([shard_input.history_ordinals for shard_input in shard_inputs]),
        features={
            name: pa.concat_arrays([shard_input.features[name] for shard_input in shard_inputs])
            for name in shard_inputs[0].features
        },
        history_limit=shard_inputs[0].history_limit,
        entity_vectors=np.concatenate(vector_parts) if vector_parts else None,
        history_times=np.concatenate(time_parts) if time_parts else None,
        answers_without_history=shard_inputs[0].answers_without_history,
    )


def group_rows_by_entity(
    table_by_kind: Mapping[str, Any], *, history_limit: int, answers_without_history: bool = False
) -> ShardInput:
    """Group a hash range's Arrow tables by entity; histories hold known items, each once at its last interaction."""
    file_kinds = tuple(table_by_kind)
    interaction_rows, ids_table, *user_tables = table_by_kind.values()
    user_ids_table = pa.concat_tables([ids_table, *(table.select(ids_table.column_names) for table in user_tables)])
    features_table = user_tables[0]
    entity_hashes, one_row_of_entity = distinct_hashes(np.asarray(user_ids_table.column(HASH_COLUMN)))
    entity_ids = user_ids_table.column("user").take(pa.array(one_row_of_entity)).combine_chunks()

    entity_of_row = positions_of_hashes(entity_hashes, np.asarray(interaction_rows.column(HASH_COLUMN)))
    ordinal_of_row, time_of_row = (
        np.asarray(interaction_rows.column("ordinal")),
        np.asarray(interaction_rows.column("time")),
    )
    is_known = ordinal_of_row >= 0
    entity_of_row, ordinal_of_row, time_of_row = (
        entity_of_row[is_known],
        ordinal_of_row[is_known],
        time_of_row[is_known],
    )
    position_of_row = None
    if has_events := POSITION_COLUMN in interaction_rows.column_names:
        position_of_row = np.asarray(interaction_rows.column(POSITION_COLUMN))[is_known]
    row_order = order_by_user_and_time(entity_of_row, time_of_row, position_of_row)
    entity_of_row, ordinal_of_row = entity_of_row[row_order], ordinal_of_row[row_order]
    is_last_of_pair = last_occurrence_mask(entity_of_row, ordinal_of_row)
    entity_of_row, ordinal_of_row = entity_of_row[is_last_of_pair], ordinal_of_row[is_last_of_pair]

    feature_row_of_entity = first_row_of_hashes(entity_hashes, features_table)
    return ShardInput(
        entity_ids=entity_ids,
        entity_hashes=entity_hashes,
        history_indptr=np.searchsorted(entity_of_row, np.arange(len(entity_hashes) + 1)),
        history_ordinals=np.asarray(ordinal_of_row, np.int64),
        features={
            name: features_table.column(name)
            .combine_chunks()
            .take(pa.array(feature_row_of_entity, mask=feature_row_of_entity < 0))
            for name in features_table.column_names[2:]
        },
        history_limit=history_limit,
        entity_vectors=vectors_of_hashes(entity_hashes, user_tables[1]) if USER_VECTORS_KIND in file_kinds else None,
        history_times=time_of_row[row_order][is_last_of_pair] if has_events else None,
        answers_without_history=answers_without_history,
    )

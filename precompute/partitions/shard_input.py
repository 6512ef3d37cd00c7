"""Input of one shard: its rows of the partition grouped by entity, a bounded number of rows at a time."""

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
    by_time,
    distinct,
    first_rows,
    last_occurrence_mask,
    places_of,
)
from precompute.partitions.shard_files import (
    HASH,
    POSITION,
    USER_VECTORS,
    ShardFiles,
    allow_files,
    count_rows,
    first_hash,
    kinds_in,
    naming,
    ranges_of_a_shard,
    read_stream,
    shard_paths,
)
from precompute.partitions.user_tables import vectors_of
from precompute.sources.columns import Ids, hashes_of_texts

Hasher = Callable[[Sequence[bytes], int], NDArray[np.uint64]]

SLICE_ROWS = 1 << 20
"""Rows grouped at once: some 150 MB of memory meanwhile."""

SLICE_BYTES = 256 << 20
"""Bytes of a shard's files grouped at once, which bounds a slice of users with many features."""

PIECE_ROWS = 1 << 17
"""Rows of a shard grouped in one piece: the columns, and their sort, stay in a core's caches."""

PIECE_OF_A_BATCH_ROWS = 512
"""Rows that a piece takes of each batch, on average at least: below it, handling them costs more than their sort."""

FILES_MAX = 256
"""Files written at once; more slices take two passes."""

_COULD = (1 << 20) - 1

COUNTED_ROWS = 4 * SLICE_ROWS
"""Rows whose entities are counted at once."""


@dataclass(frozen=True, slots=True)
class Slices:
    """Consecutive hash ranges of one shard, each a pair of files in a folder, numbered as shards are."""

    folder: Path
    numbers: range


@dataclass(frozen=True, slots=True, eq=False)
class ShardInput:
    """Entities in hash order; `ordinals[indptr[i]:indptr[i + 1]]` is entity i's history, oldest first.

    Their ids are Arrow strings in one array, so that Python handles none of the millions singly. The history is
    complete, so that no item of it is recommended again; models are given the newest `history_limit` items.
    """

    ids: Any
    hashes: NDArray[np.uint64]
    indptr: NDArray[np.int64]
    ordinals: NDArray[np.int64]
    features: dict[str, Any]
    history_limit: int = sys.maxsize
    vectors: NDArray[np.float32] | None = None
    """Vectors [entities, dims] that users bring, NaN for a user without one; None if the sources have none."""
    times: NDArray[np.int64] | None = None
    """Times of the histories' items, when each happened last, in microseconds; None if no events are taken in."""
    answers_without_history: bool = False
    """True if a model of histories and features answers an entity without a history by its features."""

    def select_rows(self, rows: NDArray[np.int64]) -> "ShardInput":
        """Return some of the entities, in the order given."""
        histories = Histories(self.indptr, self.ordinals).select_rows(rows)
        times = None if self.times is None else Histories(self.indptr, self.times).select_rows(rows)
        return ShardInput(
            ids=self.ids.take(pa.array(rows)),
            hashes=self.hashes[rows],
            indptr=histories.indptr,
            ordinals=histories.indices,
            features={name: column.take(pa.array(rows)) for name, column in self.features.items()},
            history_limit=self.history_limit,
            vectors=None if self.vectors is None else self.vectors[rows],
            times=None if times is None else times.indices,
            answers_without_history=self.answers_without_history,
        )

    @property
    def has_vector(self) -> NDArray[np.bool_]:
        """Mask of the entities that bring their vector along, bool [entities]."""
        if self.vectors is None:
            return np.zeros(len(self.ids), np.bool_)
        return ~np.isnan(self.vectors[:, 0])


@contextmanager
def scratch_folder(parent_folder: Path) -> Iterator[Path]:
    """Yield a folder for slices, created on demand and removed at the end; after a kill it is swept by its name."""
    scratch = parent_folder / f".slices.{secrets.token_hex(4)}.part"
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def slice_shard(
    folder: Path,
    shard: int,
    shards: int,
    scratch: Path,
    *,
    rows: int | None = None,
    kinds: Sequence[str] | None = None,
    first: int | None = None,
) -> Slices:
    """Return the shard itself if it is no larger than a slice (`rows` or SLICE_ROWS, SLICE_BYTES), else slices of it.

    The slices are files in `scratch`, so memory does not grow with the shard; one entity's rows stay together,
    however many they are. With `first` only so many slices are written, those of the lowest hashes. Without `kinds`
    all kinds of the shard are sliced.
    """
    kinds = kinds or kinds_in(folder, shard)
    paths = shard_paths(folder, shard, kinds)
    count = max(
        -(-sum(map(count_rows, paths)) // (rows or SLICE_ROWS)),
        -(-sum(path.stat().st_size for path in paths) // SLICE_BYTES),
    )
    if count <= 1:
        return Slices(folder, range(shard, shard + 1))
    coarse = -(-count // FILES_MAX)
    if coarse == 1 or (first or count) <= FILES_MAX:
        slice_numbers = range(shard * count, (shard + 1) * count)[:first]
        _split(folder, shard, scratch, slice_numbers, shards * count, kinds)
        return Slices(scratch, slice_numbers)
    rough, fine = range(shard * coarse, (shard + 1) * coarse), -(-count // coarse)
    _split(folder, shard, scratch / "rough", rough, shards * coarse, kinds)
    for part in rough:
        finer = range(part * fine, (part + 1) * fine)
        _split(scratch / "rough", part, scratch, finer, shards * coarse * fine, kinds)
        for path in shard_paths(scratch / "rough", part, kinds):
            path.unlink()
    return Slices(scratch, range(rough.start * fine, rough.stop * fine))


def _split(
    folder: Path, shard: int, target: Path, numbers: range, total: int, kinds: Sequence[str]
) -> None:
    """Split a shard's files into `total` hash ranges, of which only those in `numbers` are written."""
    target.mkdir(parents=True, exist_ok=True)
    allow_files(len(numbers))
    ends = range(numbers.start, min(numbers.stop + 1, total))
    firsts = np.array([first_hash(number, total) for number in ends], np.uint64)
    # Who there is can be told without what is known of them.
    fields = [0, 1] if tuple(kinds) == naming(kinds_in(folder, shard)) else None
    for kind in kinds:
        targets = [
            target_path
            for number in numbers
            for target_path in shard_paths(target, number, (kind,))
        ]
        (path,) = shard_paths(folder, shard, (kind,))
        with pa.OSFile(str(path)) as source:  # a map would count as ours, once it is read
            options = pa.ipc.IpcReadOptions(included_fields=fields)
            stream = pa.ipc.open_stream(source, options=options)
            with ShardFiles(targets, stream.schema, lasting=False) as files:
                for batch in stream:
                    hashes = np.asarray(batch.column(HASH))
                    range_numbers = firsts.searchsorted(hashes, "right") - 1
                    files.write(pa.Table.from_batches([batch]), range_numbers)


def users_alone(folder: Path, shard: int, user_hashes: NDArray[np.uint64], scratch: Path) -> Path:
    """Write the rows of the users with these sorted hashes to a folder in `scratch`; return the folder."""
    target = scratch / "alone"
    target.mkdir(parents=True, exist_ok=True)
    could = np.zeros(
        _COULD + 1, np.bool_
    )  # most of the others are told from these by their last bits
    could[(user_hashes & np.uint64(_COULD)).astype(np.int64)] = True
    for kind in kinds_in(folder, shard):
        (path,), (alone,) = (
            shard_paths(parent_folder, shard, (kind,)) for parent_folder in (folder, target)
        )
        with pa.OSFile(str(path)) as source, pa.OSFile(str(alone), "wb") as sink:
            stream = pa.ipc.open_stream(source)
            with pa.ipc.new_stream(sink, stream.schema) as writer:
                for batch in stream:
                    hashes = np.asarray(batch.column(HASH))
                    rows = np.flatnonzero(could[(hashes & np.uint64(_COULD)).astype(np.int64)])
                    at = np.minimum(
                        user_hashes.searchsorted(hashes[rows]), max(0, len(user_hashes) - 1)
                    )
                    rows = rows[user_hashes[at] == hashes[rows]] if len(user_hashes) else rows[:0]
                    if len(rows):
                        writer.write_batch(batch.take(pa.array(rows)))
    return target


def hashes_of(ids: Ids, seed: int, hasher: Hasher = hash_ids) -> NDArray[np.uint64]:
    """Return uint64[rows]; each distinct id is hashed once."""
    return hashes_of_names(ids, seed, hasher)[ids.codes]


def hashes_of_names(ids: Ids, seed: int, hasher: Hasher = hash_ids) -> NDArray[np.uint64]:
    """Return uint64[names]."""
    return ids.hashes(seed) if hasher is hash_ids else hasher(ids.raws(), seed)


def count_distinct(slices: Slices) -> Iterator[tuple[int, int]]:
    """Yield the numbers of distinct (ids, hashes) of each naming slice: equal unless two ids share a hash."""
    for number in slices.numbers:
        kinds = naming(kinds_in(slices.folder, number))
        tables = [read_stream(path) for path in shard_paths(slices.folder, number, kinds)]
        hashes = np.concatenate([np.asarray(table.column(HASH)) for table in tables])
        chunks = [chunk for table in tables for chunk in table.column("user").chunks]
        chunk_fingerprints = [
            hashes_of_texts(chunk, FINGERPRINT_SEED) for chunk in chunks if len(chunk)
        ]
        if any(
            fingerprints is None for fingerprints in chunk_fingerprints
        ):  # without what is compiled
            named = pa.chunked_array(chunks, pa.string())
            yield len(pc.unique(named)), len(distinct(hashes)[0])
        else:
            yield _count_distinct(
                hashes, np.concatenate([np.empty(0, np.uint64), *chunk_fingerprints])
            )


def _count_distinct(
    hashes: NDArray[np.uint64], fingerprints: NDArray[np.uint64]
) -> tuple[int, int]:
    """Return distinct (pairs, hashes); too many pairs if two have the same hash, as one sort needs less memory."""
    order = np.argsort(hashes)
    placed, fingerprints = hashes[order], fingerprints[order]
    differ = placed[1:] != placed[:-1]
    first_count = min(1, len(order))
    return first_count + int(
        (differ | (fingerprints[1:] != fingerprints[:-1])).sum()
    ), first_count + int(differ.sum())


class MappedStream:
    """Memory-mapped Arrow stream of one shard, with the start of each hash range in each of its batches."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        stream = pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(self._map)))
        self._schema, self._batches = stream.schema, list(stream)
        self._starts: list[NDArray[np.int64]] = []
        self.rows = sum(batch.num_rows for batch in self._batches)
        self.batches = len(self._batches)
        self.size_bytes = len(self._map)

    def find_ranges(self, firsts: NDArray[np.uint64], lasts: NDArray[np.uint64]) -> bool:
        """Find the ranges with these first and last hashes in each batch; False if a batch is in another order."""
        for batch in self._batches:
            hashes = np.asarray(batch.column(HASH))
            starts = np.append(hashes.searchsorted(firsts), len(hashes))
            filled = np.flatnonzero(starts[1:] > starts[:-1])
            if len(hashes):
                at = starts[filled]
                lowest_hashes, highest_hashes = (
                    np.minimum.reduceat(hashes, at),
                    np.maximum.reduceat(hashes, at),
                )
                in_order = starts[0] == 0 and (starts[1:] >= starts[:-1]).all()
                if not (
                    in_order
                    and (lowest_hashes >= firsts[filled]).all()
                    and (highest_hashes <= lasts[filled]).all()
                ):
                    return False
            self._starts.append(starts)
        return True

    def table(self, range_index: int) -> Any:
        """Return the rows of one range, by its index among all: slices of the mapped batches."""
        pieces = []
        for batch, starts in zip(self._batches, self._starts, strict=True):
            start, end = int(starts[range_index]), int(starts[range_index + 1])
            if end > start:
                pieces.append(batch.slice(start, end - start))
        return pa.Table.from_batches(pieces, self._schema)

    def let_go(self) -> None:
        """Unmap the pages read so far: mapped pages count as this process's memory."""
        self._map.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True, eq=False)
class ShardPieces:
    """Consecutive hash ranges of one shard, numbered as shards are, each a piece of every batch of its files."""

    numbers: range
    slices: int
    """Number of slices that the ranges make, each of about SLICE_ROWS or SLICE_BYTES."""
    streams: Mapping[str, MappedStream]

    @classmethod
    def open(cls, folder: Path, shard: int, shards: int) -> "ShardPieces | None":
        """Open the pieces of a shard; None if its batches are not in the order of hash ranges, or are too large."""
        kinds = kinds_in(folder, shard)
        paths = shard_paths(folder, shard, kinds)
        streams = {kind: MappedStream(path) for kind, path in zip(kinds, paths, strict=True)}
        rows = sum(stream.rows for stream in streams.values())
        size_bytes = sum(stream.size_bytes for stream in streams.values())
        slices = max(1, -(-rows // SLICE_ROWS), -(-size_bytes // SLICE_BYTES))
        range_limit = ranges_of_a_shard(shards)
        if slices > range_limit:
            return None
        batches = max(stream.batches for stream in streams.values())
        piece_count = min(rows // PIECE_ROWS, rows // (PIECE_OF_A_BATCH_ROWS * max(1, batches)))
        count = min(range_limit, 1 << (max(slices, piece_count) - 1).bit_length())
        slices = -(-count // max(1, count // slices))
        numbers, total = range(shard * count, (shard + 1) * count), shards * count
        firsts = np.array([first_hash(number, total) for number in numbers], np.uint64)
        lasts = np.array([first_hash(number + 1, total) - 1 for number in numbers], np.uint64)
        if not all(stream.find_ranges(firsts, lasts) for stream in streams.values()):
            return None
        return cls(numbers, slices, streams)

    def tables(self, number: int) -> dict[str, Any]:
        """Return the rows of one range, an Arrow table for each kind of file."""
        range_index = number - self.numbers.start
        return {kind: stream.table(range_index) for kind, stream in self.streams.items()}

    def let_go(self) -> None:
        """Unmap the pages read so far of all files."""
        for stream in self.streams.values():
            stream.let_go()


def read_shard(
    folder: Path, shard: int, *, history_limit: int, answers_without_history: bool = False
) -> ShardInput:
    """Read a shard's rows and group them by entity: known items only, each once (its latest position)."""
    return group_rows(
        read_tables(folder, shard),
        history_limit=history_limit,
        answers_without_history=answers_without_history,
    )


def read_tables(folder: Path, shard: int) -> dict[str, Any]:
    """Read the rows of a shard, or of a slice in files of its own: an Arrow table for each kind of file."""
    kinds = kinds_in(folder, shard)
    paths = shard_paths(folder, shard, kinds)
    return {kind: read_stream(path) for kind, path in zip(kinds, paths, strict=True)}


def joined(parts: Sequence[ShardInput]) -> ShardInput:
    """Concatenate the entities of several parts."""
    if len(parts) == 1:
        return parts[0]
    lengths = np.concatenate([np.diff(part.indptr) for part in parts])
    vectors = [part.vectors for part in parts if part.vectors is not None]
    times = [part.times for part in parts if part.times is not None]
    return ShardInput(
        ids=pa.concat_arrays([part.ids for part in parts]),
        hashes=np.concatenate([part.hashes for part in parts]),
        indptr=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
        ordinals=np.concatenate([part.ordinals for part in parts]),
        features={
            name: pa.concat_arrays([part.features[name] for part in parts])
            for name in parts[0].features
        },
        history_limit=parts[0].history_limit,
        vectors=np.concatenate(vectors) if vectors else None,
        times=np.concatenate(times) if times else None,
        answers_without_history=parts[0].answers_without_history,
    )


def group_rows(
    tables: Mapping[str, Any], *, history_limit: int, answers_without_history: bool = False
) -> ShardInput:
    """Group the Arrow tables of a hash range by entity: known items only, each once."""
    kinds = tuple(tables)
    rows, ids, *user_tables = tables.values()
    named = pa.concat_tables([ids, *(table.select(ids.column_names) for table in user_tables)])
    features = user_tables[0]
    hashes, one_of = distinct(np.asarray(named.column(HASH)))
    names = named.column("user").take(pa.array(one_of)).combine_chunks()

    users = places_of(hashes, np.asarray(rows.column(HASH)))
    ordinals, times = np.asarray(rows.column("ordinal")), np.asarray(rows.column("time"))
    is_known = ordinals >= 0
    users, ordinals, times = users[is_known], ordinals[is_known], times[is_known]
    positions = None
    if has_events := POSITION in rows.column_names:
        positions = np.asarray(rows.column(POSITION))[is_known]
    order = by_time(users, times, positions)
    users, ordinals = users[order], ordinals[order]
    keep = last_occurrence_mask(users, ordinals)
    users, ordinals = users[keep], ordinals[keep]

    row_of = first_rows(hashes, features)
    return ShardInput(
        ids=names,
        hashes=hashes,
        indptr=np.searchsorted(users, np.arange(len(hashes) + 1)),
        ordinals=np.asarray(ordinals, np.int64),
        features={
            name: features.column(name).combine_chunks().take(pa.array(row_of, mask=row_of < 0))
            for name in features.column_names[2:]
        },
        history_limit=history_limit,
        vectors=vectors_of(hashes, user_tables[1]) if USER_VECTORS in kinds else None,
        times=times[order][keep] if has_events else None,
        answers_without_history=answers_without_history,
    )

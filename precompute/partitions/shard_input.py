"""Input of one shard: its rows of the partition grouped by entity, a bounded number of rows at a time."""

import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.errors import CorruptArtefact
from cache.format.ids import FINGERPRINT_SEED, hash_ids
from precompute.partitions.shard_files import (
    HASH,
    KINDS,
    NAMING,
    ShardFiles,
    allow_files,
    count_rows,
    first_hash,
    read_stream,
    shard_paths,
)
from precompute.sources.columns import Ids, hashes_of_texts, raws_of

Hasher = Callable[[Sequence[bytes], int], NDArray[np.uint64]]

SLICE_ROWS = 1 << 20
"""Rows grouped at once: some 150 MB of memory while it lasts."""

SLICE_BYTES = 256 << 20
"""Bytes of a shard's files that are grouped at once: what bounds a slice of users with many features."""

FILES_MAX = 256
"""Files written at once; more slices take two passes."""

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

    All of it, so that nothing of it comes back into a list; models are given the newest `history_limit` items.
    """

    ids: list[bytes]
    hashes: NDArray[np.uint64]
    indptr: NDArray[np.int64]
    ordinals: NDArray[np.int64]
    features: dict[str, Any]
    history_limit: int = sys.maxsize


@contextmanager
def scratch_folder(beside: Path) -> Iterator[Path]:
    """A place for slices, made when it is needed and removed in the end; what a kill leaves is swept by its name."""
    scratch = beside / f".slices.{secrets.token_hex(4)}.part"
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
    kinds: Sequence[str] = KINDS,
    first: int | None = None,
) -> Slices:
    """The shard itself if it is no larger than a slice (`rows` or SLICE_ROWS, SLICE_BYTES), else slices in `scratch`.

    So memory does not grow with the shard; one entity's rows stay together, however many they are. With `first` only
    so many slices are written, those of the lowest hashes.
    """
    paths = shard_paths(folder, shard, kinds)
    count = max(
        -(-sum(map(count_rows, paths)) // (rows or SLICE_ROWS)),
        -(-sum(path.stat().st_size for path in paths) // SLICE_BYTES),
    )
    if count <= 1:
        return Slices(folder, range(shard, shard + 1))
    coarse = -(-count // FILES_MAX)
    if coarse == 1 or (first or count) <= FILES_MAX:
        wanted = range(shard * count, (shard + 1) * count)[:first]
        _split(folder, shard, scratch, wanted, shards * count, kinds)
        return Slices(scratch, wanted)
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
    """Cut a shard's files into hash ranges, of which there are `total`; what lies beyond `numbers` is left out."""
    target.mkdir(parents=True, exist_ok=True)
    allow_files(len(numbers))
    ends = range(numbers.start, min(numbers.stop + 1, total))
    firsts = np.array([first_hash(number, total) for number in ends], np.uint64)
    # Who there is can be told without what is known of them.
    fields = None if tuple(kinds) == KINDS else [0, 1]
    for kind in kinds:
        targets = [each for number in numbers for each in shard_paths(target, number, (kind,))]
        (path,) = shard_paths(folder, shard, (kind,))
        with pa.OSFile(str(path)) as source:  # a map would count as ours, once it is read
            options = pa.ipc.IpcReadOptions(included_fields=fields)
            stream = pa.ipc.open_stream(source, options=options)
            with ShardFiles(targets, stream.schema, lasting=False) as files:
                for batch in stream:
                    hashes = np.asarray(batch.column(HASH))
                    which = firsts.searchsorted(hashes, "right") - 1
                    files.write(pa.Table.from_batches([batch]), which)


def hashes_of(ids: Ids, seed: int, hasher: Hasher = hash_ids) -> NDArray[np.uint64]:
    """uint64[rows]; each distinct id is hashed once."""
    return hashes_of_names(ids, seed, hasher)[ids.codes]


def hashes_of_names(ids: Ids, seed: int, hasher: Hasher = hash_ids) -> NDArray[np.uint64]:
    """uint64[names]."""
    return ids.hashes(seed) if hasher is hash_ids else hasher(ids.raws(), seed)


def count_distinct(slices: Slices) -> Iterator[tuple[int, int]]:
    """(ids, hashes) that differ in each slice of NAMING kinds: as many of both, unless two ids share a hash."""
    for number in slices.numbers:
        tables = [read_stream(path) for path in shard_paths(slices.folder, number, NAMING)]
        hashes = np.concatenate([np.asarray(each.column(HASH)) for each in tables])
        chunks = [chunk for each in tables for chunk in each.column("user").chunks]
        marks = [hashes_of_texts(chunk, FINGERPRINT_SEED) for chunk in chunks if len(chunk)]
        if any(each is None for each in marks):  # without what is compiled
            named = pa.chunked_array(chunks, pa.string())
            yield len(pc.unique(named)), len(_distinct(hashes)[0])
        else:
            yield _count_distinct(hashes, np.concatenate([np.empty(0, np.uint64), *marks]))


def _count_distinct(hashes: NDArray[np.uint64], marks: NDArray[np.uint64]) -> tuple[int, int]:
    """(pairs, hashes) that differ, and more pairs than there are where two have one hash; a sort takes less memory."""
    order = np.argsort(hashes)
    placed, marks = hashes[order], marks[order]
    differ = placed[1:] != placed[:-1]
    some = min(1, len(order))
    return some + int((differ | (marks[1:] != marks[:-1])).sum()), some + int(differ.sum())


def read_shard(folder: Path, shard: int, *, history_limit: int) -> ShardInput:
    """Group a shard's rows by entity: known items only, each once (its latest place)."""
    rows, ids, features = map(read_stream, shard_paths(folder, shard))
    named = pa.concat_tables([ids, features.select(ids.column_names)])
    hashes, one_of = _distinct(np.asarray(named.column(HASH)))
    names = named.column("user").take(pa.array(one_of)).combine_chunks()

    users = places_of(hashes, np.asarray(rows.column(HASH)))
    ordinals, times = np.asarray(rows.column("ordinal")), np.asarray(rows.column("time"))
    known = ordinals >= 0
    users, ordinals, times = users[known], ordinals[known], times[known]
    by_time = _by_time(users, times)
    users, ordinals = users[by_time], ordinals[by_time]
    keep = _latest_of_each(users, ordinals)
    users, ordinals = users[keep], ordinals[keep]

    featured = places_of(hashes, np.asarray(features.column(HASH)))
    row_of = np.full(len(hashes), -1)
    row_of[featured[::-1]] = np.arange(len(featured))[::-1]  # the first row of each
    return ShardInput(
        ids=raws_of(names),
        hashes=hashes,
        indptr=np.searchsorted(users, np.arange(len(hashes) + 1)),
        ordinals=np.asarray(ordinals, np.int64),
        features={
            name: features.column(name).combine_chunks().take(pa.array(row_of, mask=row_of < 0))
            for name in features.column_names[2:]
        },
        history_limit=history_limit,
    )


def _distinct(hashes: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """(each of them once, sorted; a row of each): as `np.unique`, whose sort is stable and five times slower."""
    order = np.argsort(hashes)
    placed = hashes[order]
    first = np.ones(len(placed), np.bool_)
    first[1:] = placed[1:] != placed[:-1]
    return placed[first], order[first]


def places_of(hashes: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Places of `wanted` in the sorted `hashes`, int64; raises CorruptArtefact for one that is not among them.

    Hashes are spread evenly, so their leading bits say nearly where: an interpolation search, all of them at once.
    """
    if not len(wanted):
        return np.empty(0, np.int64)
    if not len(hashes) or wanted.min() < hashes[0] or wanted.max() > hashes[-1]:
        raise _nameless()
    first, reach = hashes[0], int(hashes[-1] - hashes[0])
    shift = np.uint64(max(0, reach.bit_length() - len(hashes).bit_length() - 1))
    buckets = np.arange((reach >> int(shift)) + 1, dtype=np.uint64)
    starts = ((hashes - first) >> shift).searchsorted(buckets)
    found: NDArray[np.int64] = starts[(wanted - first) >> shift]
    before = np.flatnonzero(hashes[found] < wanted)
    while len(before):
        found[before] += 1
        before = before[hashes[found[before]] < wanted[before]]
    if (hashes[found] != wanted).any():
        raise _nameless()
    return found


def _nameless() -> CorruptArtefact:
    return CorruptArtefact(
        "the partition has rows of users that it does not name: begin the night again"
    )


def _by_time(users: NDArray[np.int64], times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Order that `np.lexsort((times, users))` gives: the users are numbered, for which numpy has a radix sort."""
    order = np.argsort(times, kind="stable")
    placed = users[order]
    for shift in range(0, int(users.max(initial=0)).bit_length(), 16):
        digits = (placed >> shift).astype(np.uint16)
        again = np.argsort(digits, kind="stable")
        order, placed = order[again], placed[again]
    return order


def _latest_of_each(users: NDArray[np.int64], ordinals: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mask of the rows that are the last occurrence of their (user, item) pair.

    Values alone are sorted several times faster than an order is found: that is for the rows whose pair comes again.
    """
    pairs = users * (int(ordinals.max(initial=0)) + 1) + ordinals
    placed = np.sort(pairs)
    repeated = placed[1:][placed[1:] == placed[:-1]]
    keep = np.ones(len(pairs), np.bool_)
    if len(repeated):
        rows = np.arange(len(pairs))
        if len(repeated) < len(pairs) // 8:
            at = np.minimum(np.searchsorted(repeated, pairs), len(repeated) - 1)
            rows = np.flatnonzero(repeated[at] == pairs)
        order = rows[np.argsort(pairs[rows], kind="stable")]
        last = np.ones(len(order), np.bool_)
        last[:-1] = pairs[order[1:]] != pairs[order[:-1]]
        keep[order] = last
    return keep

"""Stratified sample of the users of a generation, with the night's inputs."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.errors import CorruptArtefact
from cache.format.directory import Directory
from cache.format.ids import FINGERPRINT_SEED
from cache.format.manifest import EntitySet
from precompute.partitions.marks import marked_mask
from precompute.partitions.shard_files import (
    HASH_COLUMN,
    USER_VECTORS_KIND,
    file_kinds_in,
    read_batches,
    read_stream,
    shard_paths,
    user_naming_kinds,
)
from precompute.partitions.shard_input import (
    ShardInput,
    join_shard_inputs,
    scratch_folder,
    slice_shard,
)
from precompute.partitions.user_tables import VECTOR_COLUMN
from precompute.sources.columns import text_hashes

SHARDS_MAX: Final = 16
"""Partition files read at most: all of a usual night, spread over the hash range of a large one."""

STRATA: Final = ("head", "tail", "new", "recent", "spread")
PER_STRATUM: Final = 80


@dataclass(frozen=True, slots=True, eq=False)
class UserSample:
    """Users with a record: longest histories (head), shortest, newest, most recently active, and any.

    `rows` names each stratum's rows of `users`; `positions` are theirs in the directory, `last` the time at which they
    last chose an item for the first time (microseconds since 1970). `with_record` counts the users of the slices that
    were read, `without_record` those of them that have none, by what they lack.
    """

    users: ShardInput
    positions: NDArray[np.int64]
    last: NDArray[np.int64]
    rows: Mapping[str, NDArray[np.int64]]
    in_source: int
    with_record: int
    without_record: Mapping[str, int]


def sampled_shards(entities: EntitySet) -> list[int]:
    """The shards whose partition files gates read."""
    shard_count = len(entities.parts)
    return sorted(
        {
            shard * shard_count // min(shard_count, SHARDS_MAX)
            for shard in range(min(shard_count, SHARDS_MAX))
        }
    )


def names_of(folder: Path, shard: int) -> Iterator[Any]:
    """Arrow strings: every user that a shard's partition names, some of them again."""
    for path in _naming_paths(folder, shard):
        for batch in read_batches(path, column_indexes=[0]):
            yield batch.column("user")


def _naming_paths(folder: Path, shard: int) -> list[Path]:
    return shard_paths(folder, shard, user_naming_kinds(file_kinds_in(folder, shard)))


def seen_by(folder: Path, shard: int, users: Sequence[str]) -> set[tuple[str, int]]:
    """(user, ordinal) of all that these users chose before the cut."""
    user_ids = pa.array(users, pa.string())
    user_of: dict[int, str] = {}
    for path in _naming_paths(folder, shard):
        for batch in read_batches(path, column_indexes=[0, 1]):
            matching_rows = batch.filter(pc.is_in(batch.column("user"), value_set=user_ids))
            user_of |= dict(
                zip(
                    *(column.to_pylist() for column in reversed(matching_rows.columns)), strict=True
                )
            )
    hashes = pa.array(list(user_of), pa.uint64())
    pairs: set[tuple[str, int]] = set()
    for batch in read_batches(folder / f"{shard:04d}.rows"):
        matching_rows = batch.filter(pc.is_in(batch.column(HASH_COLUMN), value_set=hashes))
        user_hashes, chosen_ordinals = (
            matching_rows.column(name).to_pylist() for name in (HASH_COLUMN, "ordinal")
        )
        pairs |= {
            (user_of[user], ordinal)
            for user, ordinal in zip(user_hashes, chosen_ordinals, strict=True)
        }
    return pairs


def _users(folder: Path, shard: int) -> Any:
    """Every distinct user that a slice names, with the hash."""
    named = [read_stream(path) for path in _naming_paths(folder, shard)]
    return (
        pa.concat_tables([table.select(["user", HASH_COLUMN]) for table in named])
        .group_by(["user", HASH_COLUMN], use_threads=False)
        .aggregate([])
    )


def sample_users(
    folder: Path,
    entities: EntitySet,
    directory: Directory,
    *,
    history_limit: int,
    set_by_events: Path | None = None,
    answers_without_history: bool = False,
    counts_featured: bool = True,
) -> UserSample:
    """Choose among the users of the first slice of each shard that gates read; the same files give the same sample.

    Users whom the feature table alone names are counted if `counts_featured`; of those whose values
    are `set_by_events`, by a file of marks, none is. `answers_without_history` goes into the inputs.
    """
    shards = sampled_shards(entities)
    per_shard = -(-PER_STRATUM // len(shards))
    parts = []
    for shard in shards:
        with scratch_folder(folder) as scratch:
            slices = slice_shard(folder, shard, len(entities.parts), scratch, first_slices_max=1)
            (number,) = slices.numbers
            parts.append(
                _slice(
                    slices.folder,
                    number,
                    directory,
                    per_shard,
                    history_limit,
                    set_by_events,
                    counts_featured=counts_featured,
                )
            )
    starts = np.cumsum([0, *(len(part.positions) for part in parts)])
    users = join_shard_inputs([part.users for part in parts])
    lacking: Counter[str] = Counter()
    for part in parts:
        lacking.update(part.without_record)
    return UserSample(
        replace(users, times=None, answers_without_history=answers_without_history),
        np.concatenate([part.positions for part in parts]),
        np.concatenate([part.last for part in parts]),
        {
            name: np.concatenate(
                [part.rows[name] + start for part, start in zip(parts, starts, strict=False)]
            )
            for name in STRATA
        },
        sum(part.in_source for part in parts),
        sum(part.with_record for part in parts),
        lacking,
    )


def _slice(
    folder: Path,
    shard: int,
    directory: Directory,
    per_stratum: int,
    history_limit: int,
    set_by_events: Path | None,
    *,
    counts_featured: bool,
) -> UserSample:
    kinds = file_kinds_in(folder, shard)
    rows, ids, features, *other_tables = map(read_stream, shard_paths(folder, shard, kinds))
    users = _users(folder, shard).combine_chunks()
    grouped = rows.group_by(HASH_COLUMN).aggregate(
        [("time", "min"), ("time", "max"), ("time", "count")]
    )
    if pc.index_in(grouped.column(HASH_COLUMN), users.column(HASH_COLUMN)).null_count:
        raise CorruptArtefact(
            f"shard {shard} of the partition has rows of users that it does not name"
        )
    grouped_index = pc.index_in(
        users.column(HASH_COLUMN), grouped.column(HASH_COLUMN)
    ).combine_chunks()
    counts, first, last = (
        np.asarray(
            pc.fill_null(
                grouped.column(f"time_{statistic}").combine_chunks().take(grouped_index), 0
            )
        )
        for statistic in ("count", "min", "max")
    )
    hashes = text_hashes(users.column("user"), directory.seed)
    is_counted = np.ones(len(hashes), np.bool_)
    if set_by_events is not None or not counts_featured:
        named = np.concatenate(
            [np.asarray(table.column(HASH_COLUMN)) for table in (ids, *other_tables)]
        )
        is_counted = np.isin(np.asarray(users.column(HASH_COLUMN)), named)
        if counts_featured and set_by_events is not None:
            user_fingerprints = text_hashes(users.column("user"), FINGERPRINT_SEED)
            is_counted |= ~marked_mask(set_by_events, user_fingerprints)
    positions = directory.find_many(hashes)
    recorded_rows = np.flatnonzero(positions >= 0)
    recorded_rows = recorded_rows[np.argsort(positions[recorded_rows], kind="stable")]
    spread = np.linspace(0, max(0, len(recorded_rows) - 1), min(per_stratum, len(recorded_rows)))
    orders = {
        "head": np.argsort(-counts[recorded_rows], kind="stable"),
        "tail": np.argsort(counts[recorded_rows], kind="stable"),
        "new": np.argsort(-first[recorded_rows], kind="stable"),
        "recent": np.argsort(-last[recorded_rows], kind="stable"),
        "spread": np.unique(spread.astype(np.int64)),
    }
    rows_by_stratum = {name: recorded_rows[order[:per_stratum]] for name, order in orders.items()}
    picked = np.unique(np.concatenate(list(rows_by_stratum.values())))
    named_users = users
    users, chose = _inputs(rows, features, users, picked, hashes, history_limit)
    if USER_VECTORS_KIND in kinds:
        users = replace(users, vectors=_vectors(users, other_tables[0]))
    strata = {
        name: np.searchsorted(picked, np.sort(stratum_rows))
        for name, stratum_rows in rows_by_stratum.items()
    }
    missing = np.flatnonzero((positions < 0) & is_counted)
    lacking = _lacking(named_users.take(pa.array(missing)), counts[missing], features)
    in_source = int(is_counted.sum())
    return UserSample(
        users, positions[picked], chose, strata, in_source, len(recorded_rows), lacking
    )


def _lacking(users: Any, counts: NDArray[np.int64], features: Any) -> dict[str, int]:
    """Count users by their missing input: a history, or the first feature without a value."""
    rows = pc.index_in(users.column(HASH_COLUMN), features.column(HASH_COLUMN)).combine_chunks()
    lacks_any = np.zeros(len(counts), np.bool_)
    lacking_counts: dict[str, int] = {}
    if is_without := int((counts == 0).sum()):
        lacking_counts["a history"] = is_without
    for name in features.column_names[2:]:
        is_null = np.asarray(pc.is_null(features.column(name).combine_chunks().take(rows)))
        if count := int((is_null & ~lacks_any).sum()):
            lacking_counts[f"a value of {name!r}"] = count
        lacks_any |= is_null
    return lacking_counts


def _inputs(
    rows: Any,
    features: Any,
    users: Any,
    picked: NDArray[np.int64],
    hashes: NDArray[np.uint64],
    history_limit: int,
) -> tuple[ShardInput, NDArray[np.int64]]:
    """Inputs of these users as `read_shard` gives them, found another way: row by row, the later occurrence wins.

    Also the time at which each of them last chose an item that was new to them: a repeat changes no list.
    """
    users = users.take(pa.array(picked)).combine_chunks()
    picked_hashes = users.column(HASH_COLUMN).combine_chunks()
    picked_rows = rows.filter(pc.is_in(rows.column(HASH_COLUMN), value_set=picked_hashes))
    user_indices = np.asarray(pc.index_in(picked_rows.column(HASH_COLUMN), picked_hashes))
    ordinals = np.asarray(picked_rows.column("ordinal"))
    times = np.asarray(picked_rows.column("time"))
    order = np.argsort(times, kind="stable")
    chose = np.zeros(len(picked), np.int64)
    histories: list[dict[int, None]] = [{} for _ in range(len(picked))]
    for user, ordinal, time in zip(
        user_indices[order].tolist(), ordinals[order].tolist(), times[order].tolist(), strict=True
    ):
        if ordinal < 0:
            continue
        if ordinal in histories[user]:
            del histories[user][ordinal]
        else:
            chose[user] = time
        histories[user][ordinal] = None
    history_lists = [list(history) for history in histories]
    at = pc.index_in(picked_hashes, features.column(HASH_COLUMN))
    inputs = ShardInput(
        ids=users.column("user").combine_chunks(),
        hashes=hashes[picked],
        indptr=np.cumsum([0, *(len(history) for history in history_lists)]),
        ordinals=np.array([ordinal for history in history_lists for ordinal in history], np.int64),
        features={
            name: features.column(name).combine_chunks().take(at)
            for name in features.column_names[2:]
        },
        history_limit=history_limit,
    )
    return inputs, chose


def _vectors(users: ShardInput, vector_table: Any) -> NDArray[np.float32]:
    """Vectors of these users as the partition has them, found another way: one user at a time."""
    dims = vector_table.schema.field(VECTOR_COLUMN).type.list_size
    vectors = np.full((len(users.ids), dims), np.nan, np.float32)
    names = vector_table.column("user").combine_chunks()
    for row, name in enumerate(users.ids):
        at = pc.index(names, name).as_py()
        if at >= 0:
            vectors[row] = vector_table.column(VECTOR_COLUMN)[at].as_py()
    return vectors

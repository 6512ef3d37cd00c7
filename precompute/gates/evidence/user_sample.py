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
from precompute.partitions.shard_input import ShardInput, join_shard_inputs, scratch_folder, slice_shard
from precompute.partitions.user_tables import VECTOR_COLUMN
from precompute.sources.columns import text_hashes

SHARDS_MAX: Final = 16
"""Maximum number of partition files read: all of a usual night; of a large one, files spread over the hash range."""

STRATA: Final = ("head", "tail", "new", "recent", "spread")
USERS_PER_STRATUM: Final = 80


@dataclass(frozen=True, slots=True, eq=False)
class UserSample:
    """Users with a record: longest histories (head), shortest, newest, most recently active, and any.

    `rows_by_stratum` has the rows of `users` in each stratum; `directory_positions` are their positions in the
    directory; `last_new_choice_times` is when they last chose an item for the first time (microseconds since 1970).
    `recorded_user_count` counts the users of the slices that were read, `unrecorded_by_missing_input` counts users
    without a record by the input that they lack.
    """

    users: ShardInput
    directory_positions: NDArray[np.int64]
    last_new_choice_times: NDArray[np.int64]
    rows_by_stratum: Mapping[str, NDArray[np.int64]]
    source_user_count: int
    recorded_user_count: int
    unrecorded_by_missing_input: Mapping[str, int]


def sampled_shards(entities: EntitySet) -> list[int]:
    """Return the shards whose partition files gates read."""
    shard_count = len(entities.parts)
    return sorted(
        {shard * shard_count // min(shard_count, SHARDS_MAX) for shard in range(min(shard_count, SHARDS_MAX))}
    )


def read_user_ids(folder: Path, shard: int) -> Iterator[Any]:
    """Return Arrow strings: every user that a shard's partition names, perhaps several times."""
    for path in _naming_paths(folder, shard):
        for batch in read_batches(path, column_indexes=[0]):
            yield batch.column("user")


def _naming_paths(folder: Path, shard: int) -> list[Path]:
    return shard_paths(folder, shard, user_naming_kinds(file_kinds_in(folder, shard)))


def read_seen_pairs(folder: Path, shard: int, user_names: Sequence[str]) -> set[tuple[str, int]]:
    """Return (user, ordinal) of all items that these users chose before the cut."""
    user_ids = pa.array(user_names, pa.string())
    user_by_hash: dict[int, str] = {}
    for path in _naming_paths(folder, shard):
        for batch in read_batches(path, column_indexes=[0, 1]):
            matching_rows = batch.filter(pc.is_in(batch.column("user"), value_set=user_ids))
            user_by_hash |= dict(zip(*(column.to_pylist() for column in reversed(matching_rows.columns)), strict=True))
    hashes = pa.array(list(user_by_hash), pa.uint64())
    seen_pairs: set[tuple[str, int]] = set()
    for batch in read_batches(folder / f"{shard:04d}.rows"):
        matching_rows = batch.filter(pc.is_in(batch.column(HASH_COLUMN), value_set=hashes))
        user_hashes, chosen_ordinals = (
            matching_rows.column(column_name).to_pylist() for column_name in (HASH_COLUMN, "ordinal")
        )
        seen_pairs |= {
            (user_by_hash[user_hash], ordinal) for user_hash, ordinal in zip(user_hashes, chosen_ordinals, strict=True)
        }
    return seen_pairs


def _read_named_users(folder: Path, shard: int) -> Any:
    """Return every distinct user that a slice names, with the hash."""
    naming_tables = [read_stream(path) for path in _naming_paths(folder, shard)]
    return (
        pa.concat_tables([table.select(["user", HASH_COLUMN]) for table in naming_tables])
        .group_by(["user", HASH_COLUMN], use_threads=False)
        .aggregate([])
    )


def sample_users(
    folder: Path,
    entities: EntitySet,
    directory: Directory,
    *,
    history_limit: int,
    event_marks_path: Path | None = None,
    answers_without_history: bool = False,
    counts_feature_only_users: bool = True,
) -> UserSample:
    """Sample users of the first slice of each shard that gates read; the same files give the same sample.

    Users that only the feature table names are counted if `counts_feature_only_users`; of those with values from
    events, by the marks at `event_marks_path`, none is counted. `answers_without_history` is passed on to the inputs.
    """
    shards = sampled_shards(entities)
    stratum_users_per_shard = -(-USERS_PER_STRATUM // len(shards))
    shard_samples = []
    for shard in shards:
        with scratch_folder(folder) as scratch:
            slices = slice_shard(folder, shard, len(entities.parts), scratch, first_slices_max=1)
            (slice_number,) = slices.slice_numbers
            shard_samples.append(
                _sample_slice(
                    slices.folder,
                    slice_number,
                    directory,
                    stratum_users_per_shard,
                    history_limit,
                    event_marks_path,
                    counts_feature_only_users=counts_feature_only_users,
                )
            )
    row_starts = np.cumsum([0, *(len(part.directory_positions) for part in shard_samples)])
    users = join_shard_inputs([part.users for part in shard_samples])
    unrecorded_by_missing_input: Counter[str] = Counter()
    for shard_sample in shard_samples:
        unrecorded_by_missing_input.update(shard_sample.unrecorded_by_missing_input)
    return UserSample(
        replace(users, history_times=None, answers_without_history=answers_without_history),
        np.concatenate([part.directory_positions for part in shard_samples]),
        np.concatenate([part.last_new_choice_times for part in shard_samples]),
        {
            stratum: np.concatenate(
                [
                    part.rows_by_stratum[stratum] + row_start
                    for part, row_start in zip(shard_samples, row_starts, strict=False)
                ]
            )
            for stratum in STRATA
        },
        sum(part.source_user_count for part in shard_samples),
        sum(part.recorded_user_count for part in shard_samples),
        unrecorded_by_missing_input,
    )


def _sample_slice(
    folder: Path,
    slice_number: int,
    directory: Directory,
    per_stratum: int,
    history_limit: int,
    event_marks_path: Path | None,
    *,
    counts_feature_only_users: bool,
) -> UserSample:
    kinds = file_kinds_in(folder, slice_number)
    interaction_table, id_table, feature_table, *other_tables = map(
        read_stream, shard_paths(folder, slice_number, kinds)
    )
    user_table = _read_named_users(folder, slice_number).combine_chunks()
    times_by_user = interaction_table.group_by(HASH_COLUMN).aggregate(
        [("time", "min"), ("time", "max"), ("time", "count")]
    )
    if pc.index_in(times_by_user.column(HASH_COLUMN), user_table.column(HASH_COLUMN)).null_count:
        raise CorruptArtefact(f"shard {slice_number} of the partition has rows of users that it does not name")
    times_indices = pc.index_in(user_table.column(HASH_COLUMN), times_by_user.column(HASH_COLUMN)).combine_chunks()
    interaction_counts, first_times, last_times = (
        np.asarray(pc.fill_null(times_by_user.column(f"time_{statistic}").combine_chunks().take(times_indices), 0))
        for statistic in ("count", "min", "max")
    )
    hashes = text_hashes(user_table.column("user"), directory.seed)
    is_counted = np.ones(len(hashes), np.bool_)
    if event_marks_path is not None or not counts_feature_only_users:
        named_hashes = np.concatenate([np.asarray(table.column(HASH_COLUMN)) for table in (id_table, *other_tables)])
        is_counted = np.isin(np.asarray(user_table.column(HASH_COLUMN)), named_hashes)
        if counts_feature_only_users and event_marks_path is not None:
            user_fingerprints = text_hashes(user_table.column("user"), FINGERPRINT_SEED)
            is_counted |= ~marked_mask(event_marks_path, user_fingerprints)
    positions = directory.find_positions(hashes)
    recorded_rows = np.flatnonzero(positions >= 0)
    recorded_rows = recorded_rows[np.argsort(positions[recorded_rows], kind="stable")]
    spread_indices = np.linspace(0, max(0, len(recorded_rows) - 1), min(per_stratum, len(recorded_rows)))
    order_by_stratum = {
        "head": np.argsort(-interaction_counts[recorded_rows], kind="stable"),
        "tail": np.argsort(interaction_counts[recorded_rows], kind="stable"),
        "new": np.argsort(-first_times[recorded_rows], kind="stable"),
        "recent": np.argsort(-last_times[recorded_rows], kind="stable"),
        "spread": np.unique(spread_indices.astype(np.int64)),
    }
    rows_by_stratum = {stratum: recorded_rows[order[:per_stratum]] for stratum, order in order_by_stratum.items()}
    picked_rows = np.unique(np.concatenate(list(rows_by_stratum.values())))
    named_users = user_table
    user_table, last_new_choice_times = _select_inputs(
        interaction_table, feature_table, user_table, picked_rows, hashes, history_limit
    )
    if USER_VECTORS_KIND in kinds:
        user_table = replace(user_table, entity_vectors=_find_vectors(user_table, other_tables[0]))
    sample_rows_by_stratum = {
        stratum: np.searchsorted(picked_rows, np.sort(stratum_rows))
        for stratum, stratum_rows in rows_by_stratum.items()
    }
    unrecorded_rows = np.flatnonzero((positions < 0) & is_counted)
    unrecorded_by_missing_input = _count_by_missing_input(
        named_users.take(pa.array(unrecorded_rows)), interaction_counts[unrecorded_rows], feature_table
    )
    source_user_count = int(is_counted.sum())
    return UserSample(
        user_table,
        positions[picked_rows],
        last_new_choice_times,
        sample_rows_by_stratum,
        source_user_count,
        len(recorded_rows),
        unrecorded_by_missing_input,
    )


def _count_by_missing_input(
    user_table: Any, interaction_counts: NDArray[np.int64], feature_table: Any
) -> dict[str, int]:
    """Count users by their missing input: a history, or the first feature without a value."""
    feature_rows = pc.index_in(user_table.column(HASH_COLUMN), feature_table.column(HASH_COLUMN)).combine_chunks()
    lacks_any = np.zeros(len(interaction_counts), np.bool_)
    users_by_missing_input: dict[str, int] = {}
    if without_history_count := int((interaction_counts == 0).sum()):
        users_by_missing_input["a history"] = without_history_count
    for feature_name in feature_table.column_names[2:]:
        is_null = np.asarray(pc.is_null(feature_table.column(feature_name).combine_chunks().take(feature_rows)))
        if lacking_count := int((is_null & ~lacks_any).sum()):
            users_by_missing_input[f"a value of {feature_name!r}"] = lacking_count
        lacks_any |= is_null
    return users_by_missing_input


def _select_inputs(
    interaction_table: Any,
    feature_table: Any,
    user_table: Any,
    picked_rows: NDArray[np.int64],
    user_hashes: NDArray[np.uint64],
    history_limit: int,
) -> tuple[ShardInput, NDArray[np.int64]]:
    """Return the inputs of these users as `read_shard` does, but computed row by row; the later occurrence wins.

    Also return when each of them last chose an item for the first time: a repeat changes no list.
    """
    user_table = user_table.take(pa.array(picked_rows)).combine_chunks()
    picked_hashes = user_table.column(HASH_COLUMN).combine_chunks()
    picked_interactions = interaction_table.filter(
        pc.is_in(interaction_table.column(HASH_COLUMN), value_set=picked_hashes)
    )
    user_indices = np.asarray(pc.index_in(picked_interactions.column(HASH_COLUMN), picked_hashes))
    ordinals = np.asarray(picked_interactions.column("ordinal"))
    times = np.asarray(picked_interactions.column("time"))
    order = np.argsort(times, kind="stable")
    last_new_choice_times = np.zeros(len(picked_rows), np.int64)
    item_sets: list[dict[int, None]] = [{} for _ in range(len(picked_rows))]
    for user_index, ordinal, time in zip(
        user_indices[order].tolist(), ordinals[order].tolist(), times[order].tolist(), strict=True
    ):
        if ordinal < 0:
            continue
        if ordinal in item_sets[user_index]:
            del item_sets[user_index][ordinal]
        else:
            last_new_choice_times[user_index] = time
        item_sets[user_index][ordinal] = None
    history_lists = [list(history) for history in item_sets]
    feature_rows = pc.index_in(picked_hashes, feature_table.column(HASH_COLUMN))
    inputs = ShardInput(
        entity_ids=user_table.column("user").combine_chunks(),
        entity_hashes=user_hashes[picked_rows],
        history_indptr=np.cumsum([0, *(len(history) for history in history_lists)]),
        history_ordinals=np.array([ordinal for history in history_lists for ordinal in history], np.int64),
        features={
            feature_name: feature_table.column(feature_name).combine_chunks().take(feature_rows)
            for feature_name in feature_table.column_names[2:]
        },
        history_limit=history_limit,
    )
    return inputs, last_new_choice_times


def _find_vectors(users: ShardInput, vector_table: Any) -> NDArray[np.float32]:
    """Return vectors of these users as in the partition, but computed one user at a time."""
    dims = vector_table.schema.field(VECTOR_COLUMN).type.list_size
    vectors = np.full((len(users.entity_ids), dims), np.nan, np.float32)
    vector_user_ids = vector_table.column("user").combine_chunks()
    for row, user_id in enumerate(users.entity_ids):
        vector_row = pc.index(vector_user_ids, user_id).as_py()
        if vector_row >= 0:
            vectors[row] = vector_table.column(VECTOR_COLUMN)[vector_row].as_py()
    return vectors

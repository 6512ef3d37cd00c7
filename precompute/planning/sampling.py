"""A sample of the users with all their rows, and the number of all users, from two passes over the real inputs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cache.errors import ConfigError
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig, Sources
from precompute.partitions.shard_input import hash_id_rows
from precompute.sources.columns import Ids
from precompute.sources.files import feature_file, source_file
from precompute.sources.readers import (
    NO_COLUMNS_OF_LISTS,
    ColumnsOfLists,
    Interactions,
    read_features,
    read_interactions,
)
from precompute.sources.vocabulary import DistinctCounter

SAMPLE_HASH_SEED = 0x5DEECE66D
"""Seed that no directory has, so that the sample is not just a part of one shard."""

SAMPLED_USERS_MIN = 1024
_INTERACTION_SCHEMA = pa.schema([("user", pa.string()), ("item", pa.string()), ("time", pa.int64())])
OWNER_COLUMN = "\x1fowner"
"""Column name that no feature table has."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """All rows of the sampled users, numbered by `owner_indices`, and the counts of all inputs."""

    source_user_count: int
    source_interaction_count: int
    user_ids: Sequence[str]
    owner_indices: NDArray[np.int64]
    item_ids: Any
    interaction_times: NDArray[np.int64]
    user_feature_table: Any
    """Arrow table of user features with OWNER_COLUMN; None if the models take none."""
    user_vector_table: Any = None
    """Arrow table of users' vectors with OWNER_COLUMN; None if the sources have none."""

    def write(self, folder: Path, user_count: int, sources: Sources) -> Sources:
        """Write files of `user_count` users and return sources that name them.

        The sample is repeated as often as needed; repetitions have new user ids.
        """
        folder.mkdir(parents=True, exist_ok=True)
        copy_starts = range(0, user_count, len(self.user_ids))
        user_ids_of_copies = [self._copy_user_ids(copy) for copy in range(len(copy_starts))]
        rows_of_copies = [np.flatnonzero(self.owner_indices < user_count - copy_start) for copy_start in copy_starts]
        repeated_user_ids = [
            copy_user_ids[self.owner_indices[copy_rows]].astype(object)
            for copy_user_ids, copy_rows in zip(user_ids_of_copies, rows_of_copies, strict=True)
        ]
        sample_rows = np.concatenate(rows_of_copies)
        interaction_columns = {
            sources.user_column: pa.array(np.concatenate(repeated_user_ids), pa.string()),
            sources.item_column: self.item_ids.take(pa.array(sample_rows)),
            sources.timestamp_column: pa.array(self.interaction_times[sample_rows], pa.timestamp("us")),
        }
        interaction_file = folder / "interactions.parquet"
        if sources.interactions:
            pq.write_table(pa.table(interaction_columns), interaction_file)

        def written(rows_table: Any, path: Path) -> str | None:
            if rows_table is None:
                return None
            owners, copied_tables = np.asarray(rows_table.column(OWNER_COLUMN)), []
            for copy_user_ids, copy_start in zip(user_ids_of_copies, copy_starts, strict=True):
                kept_rows = np.flatnonzero(owners < user_count - copy_start)
                copied_table = rows_table.take(pa.array(kept_rows)).drop_columns([OWNER_COLUMN])
                copied_tables.append(
                    copied_table.append_column(sources.user_column, pa.array(copy_user_ids[owners[kept_rows]]))
                )
            pq.write_table(pa.concat_tables(copied_tables), path)
            return str(path)

        return replace(
            sources, interactions=(str(interaction_file),) if sources.interactions else (), format="parquet",
            user_features=written(self.user_feature_table, folder / "users.parquet"),
            user_vectors=written(self.user_vector_table, folder / "user_vectors.parquet"),
        )  # fmt: skip

    def _copy_user_ids(self, copy_number: int) -> NDArray[Any]:
        if copy_number == 0:
            return np.array(self.user_ids, object)
        return np.array([f"{copy_number}\x1f{user_index}" for user_index in range(len(self.user_ids))], object)


def draw_sample(
    config: NightConfig,
    user_share: float,
    *,
    feature_columns: Sequence[str] = (),
    list_columns: ColumnsOfLists = NO_COLUMNS_OF_LISTS,
    cutoff_at: datetime | None = None,
    progress: Progress = quiet,
) -> Sample:
    """Draw the users with the smallest hashes: `user_share` of all, at least SAMPLED_USERS_MIN if there are so many.

    `feature_columns` are the models' columns of the user features; users that only have features count too.
    """
    distinct_users, interactions = DistinctCounter(), 0
    for batch in _read_interactions(config, cutoff_at):
        distinct_users.add(batch.user_ids.distinct_hashes(SAMPLE_HASH_SEED))
        interactions += len(batch.times_us)
        progress("count users", interactions, 0)
    for feature_batches in (_read_user_features(config, feature_columns, list_columns), _read_user_vectors(config)):
        for user_ids, _ in feature_batches:
            distinct_users.add(user_ids.distinct_hashes(SAMPLE_HASH_SEED))
    if not distinct_users.distinct_count:
        raise ConfigError("the sources name no entity: check sources.interactions")
    sample_size = min(
        len(distinct_users.smallest_hashes), max(SAMPLED_USERS_MIN, round(user_share * distinct_users.distinct_count))
    )
    hash_max = distinct_users.smallest_hashes[sample_size - 1]
    interaction_tables = [_INTERACTION_SCHEMA.empty_table()]  # the only table of a night without interactions
    for batch in _read_interactions(config, cutoff_at):
        sampled_batch = batch.only(hash_id_rows(batch.user_ids, SAMPLE_HASH_SEED) <= hash_max)
        interaction_tables.append(
            pa.table(
                {
                    "user": sampled_batch.user_ids.row_texts(),
                    "item": sampled_batch.item_ids.row_texts(),
                    "time": sampled_batch.times_us,
                }
            )
        )
        progress("draw the sample", sum(map(len, interaction_tables)), 0)
    feature_tables = [
        _read_sampled_rows(_read_user_features(config, feature_columns, list_columns), hash_max),
        _read_sampled_rows(_read_user_vectors(config), hash_max),
    ]
    return _build_sample(
        distinct_users.distinct_count, interactions, pa.concat_tables(interaction_tables), feature_tables
    )


def _build_sample(
    user_count: int, interaction_count: int, interaction_table: Any, feature_tables: Sequence[Any]
) -> Sample:
    present_tables = [interaction_table, *(table for table in feature_tables if table is not None)]
    coded_user_ids = pc.dictionary_encode(
        pa.concat_arrays([table.column("user").combine_chunks() for table in present_tables])
    )
    codes = np.split(np.asarray(coded_user_ids.indices, np.int64), np.cumsum([*map(len, present_tables)])[:-1])
    owner_code_arrays = iter(codes[1:])
    features, vectors = (
        None if table is None
        else table.drop_columns(["user"]).append_column(OWNER_COLUMN, pa.array(next(owner_code_arrays)))
        for table in feature_tables
    )  # fmt: skip
    return Sample(
        user_count, interaction_count, coded_user_ids.dictionary.to_pylist(), codes[0],
        interaction_table.column("item").combine_chunks(), np.asarray(interaction_table.column("time")),
        features, vectors,
    )  # fmt: skip


def _read_interactions(config: NightConfig, cutoff_at: datetime | None) -> Iterator[Interactions]:
    return read_interactions(config.sources, Path(config.base), cutoff_at=cutoff_at)


def _read_user_features(
    config: NightConfig, feature_columns: Sequence[str], list_columns: ColumnsOfLists
) -> Iterator[tuple[Ids, Mapping[str, Any]]]:
    if feature_columns:
        path = feature_file(config, "user", feature_columns[0])
        yield from read_features(path, config.sources.user_column, feature_columns, columns_of_lists=list_columns)


def _read_user_vectors(config: NightConfig) -> Iterator[tuple[Ids, Mapping[str, Any]]]:
    sources = config.sources
    if sources.user_vectors:
        path = source_file(sources.user_vectors, config.path("."))
        yield from read_features(path, sources.user_column, (sources.vector_column,))


def _read_sampled_rows(feature_batches: Iterator[tuple[Ids, Mapping[str, Any]]], hash_max: np.uint64) -> Any:
    sampled_tables = []
    for user_ids, value_by_column in feature_batches:
        is_sampled = pa.array(hash_id_rows(user_ids, SAMPLE_HASH_SEED) <= hash_max)
        sampled_tables.append(pa.table({"user": user_ids.row_texts(), **value_by_column}).filter(is_sampled))
    return pa.concat_tables(sampled_tables) if sampled_tables else None

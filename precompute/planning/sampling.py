"""A sample of the users with all that they did, and how many there are, from two passes over the real inputs."""

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

SEED = 0x5DEECE66D
"""Independent of every directory seed, so that a shard is no sample."""

USERS_MIN = 1024
_ROWS = pa.schema([("user", pa.string()), ("item", pa.string()), ("time", pa.int64())])
OWNER = "\x1fowner"
"""A column name that no table of features has."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """All rows of some users; `owners` number them from 0. `users` and `interactions` are those of all inputs."""

    users: int
    interactions: int
    ids: Sequence[str]
    owners: NDArray[np.int64]
    items: Any
    times: NDArray[np.int64]
    features: Any
    """Arrow table of user features, OWNER among them; None where the models want none."""
    vectors: Any = None
    """Arrow table of users' vectors, OWNER among them; None where the night is given none."""

    def write(self, folder: Path, users: int, sources: Sources) -> Sources:
        """Files of so many users: the sample over and over, under new names from the second time on."""
        folder.mkdir(parents=True, exist_ok=True)
        rounds = range(0, users, len(self.ids))
        names = [self._names(copy) for copy in range(len(rounds))]
        rows = [np.flatnonzero(self.owners < users - start) for start in rounds]
        named = [
            name[self.owners[row]].astype(object) for name, row in zip(names, rows, strict=True)
        ]
        sample_rows = np.concatenate(rows)
        columns = {
            sources.user_column: pa.array(np.concatenate(named), pa.string()),
            sources.item_column: self.items.take(pa.array(sample_rows)),
            sources.timestamp_column: pa.array(self.times[sample_rows], pa.timestamp("us")),
        }
        file = folder / "interactions.parquet"
        if sources.interactions:
            pq.write_table(pa.table(columns), file)

        def written(table: Any, path: Path) -> str | None:
            if table is None:
                return None
            owners, parts = np.asarray(table.column(OWNER)), []
            for name, start in zip(names, rounds, strict=True):
                kept_rows = np.flatnonzero(owners < users - start)
                part = table.take(pa.array(kept_rows)).drop_columns([OWNER])
                parts.append(
                    part.append_column(sources.user_column, pa.array(name[owners[kept_rows]]))
                )
            pq.write_table(pa.concat_tables(parts), path)
            return str(path)

        return replace(
            sources, interactions=(str(file),) if sources.interactions else (), format="parquet",
            user_features=written(self.features, folder / "users.parquet"),
            user_vectors=written(self.vectors, folder / "user_vectors.parquet"),
        )  # fmt: skip

    def _names(self, copy: int) -> NDArray[Any]:
        if copy == 0:
            return np.array(self.ids, object)
        return np.array([f"{copy}\x1f{number}" for number in range(len(self.ids))], object)


def draw(
    config: NightConfig,
    user_share: float,
    *,
    columns: Sequence[str] = (),
    lists: ColumnsOfLists = NO_COLUMNS_OF_LISTS,
    cutoff_at: datetime | None = None,
    progress: Progress = quiet,
) -> Sample:
    """Draw the users with the smallest hashes: `user_share` of them, at least USERS_MIN if there are so many.

    `columns` of the user features are those of the models; a user with features alone counts, too.
    """
    distinct_users, interactions = DistinctCounter(), 0
    for batch in _read(config, cutoff_at):
        distinct_users.add(batch.users.hashes(SEED))
        interactions += len(batch.times)
        progress("count users", interactions, 0)
    for read in (_features(config, columns, lists), _vectors(config)):
        for ids, _ in read:
            distinct_users.add(ids.hashes(SEED))
    if not distinct_users.count:
        raise ConfigError("the sources name no entity at all; is sources.interactions right?")
    sample_size = min(
        len(distinct_users.smallest_hashes),
        max(USERS_MIN, round(user_share * distinct_users.count)),
    )
    limit = distinct_users.smallest_hashes[sample_size - 1]
    rows = [_ROWS.empty_table()]  # of a night without interactions there are no others
    for batch in _read(config, cutoff_at):
        sampled_batch = batch.only(hash_id_rows(batch.users, SEED) <= limit)
        rows.append(
            pa.table(
                {
                    "user": sampled_batch.users.texts(),
                    "item": sampled_batch.items.texts(),
                    "time": sampled_batch.times,
                }
            )
        )
        progress("draw the sample", sum(map(len, rows)), 0)
    tables = [
        _read_sampled_rows(_features(config, columns, lists), limit),
        _read_sampled_rows(_vectors(config), limit),
    ]
    return _sample(distinct_users.count, interactions, pa.concat_tables(rows), tables)


def _sample(users: int, interactions: int, rows: Any, tables: Sequence[Any]) -> Sample:
    present_tables = [rows, *(table for table in tables if table is not None)]
    coded = pc.dictionary_encode(
        pa.concat_arrays([table.column("user").combine_chunks() for table in present_tables])
    )
    codes = np.split(
        np.asarray(coded.indices, np.int64), np.cumsum([*map(len, present_tables)])[:-1]
    )
    owners = iter(codes[1:])
    features, vectors = (
        None if table is None
        else table.drop_columns(["user"]).append_column(OWNER, pa.array(next(owners)))
        for table in tables
    )  # fmt: skip
    return Sample(
        users, interactions, coded.dictionary.to_pylist(), codes[0],
        rows.column("item").combine_chunks(), np.asarray(rows.column("time")), features, vectors,
    )  # fmt: skip


def _read(config: NightConfig, cutoff_at: datetime | None) -> Iterator[Interactions]:
    return read_interactions(config.sources, Path(config.base), cutoff_at=cutoff_at)


def _features(
    config: NightConfig, columns: Sequence[str], lists: ColumnsOfLists
) -> Iterator[tuple[Ids, Mapping[str, Any]]]:
    if columns:
        path = feature_file(config, "user", columns[0])
        yield from read_features(path, config.sources.user_column, columns, columns_of_lists=lists)


def _vectors(config: NightConfig) -> Iterator[tuple[Ids, Mapping[str, Any]]]:
    sources = config.sources
    if sources.user_vectors:
        path = source_file(sources.user_vectors, config.path("."))
        yield from read_features(path, sources.user_column, (sources.vector_column,))


def _read_sampled_rows(read: Iterator[tuple[Ids, Mapping[str, Any]]], limit: np.uint64) -> Any:
    parts = []
    for ids, values in read:
        is_sampled = pa.array(hash_id_rows(ids, SEED) <= limit)
        parts.append(pa.table({"user": ids.texts(), **values}).filter(is_sampled))
    return pa.concat_tables(parts) if parts else None

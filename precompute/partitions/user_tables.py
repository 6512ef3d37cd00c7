"""Tables of users that a night is given, features and vectors: into the partition, and vectors out of it again."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.errors import SourceError
from cache.model.tower_spec import InputSpec
from precompute.config.settings import NightConfig
from precompute.partitions.grouping import first_rows
from precompute.partitions.night_input import NightInput
from precompute.partitions.shard_files import (
    HASH,
    USER_VECTORS,
    ShardFiles,
    range_of,
    ranges_of_a_shard,
    shard_paths,
)
from precompute.sources.columns import Ids
from precompute.sources.erasures import NO_ERASURES, ErasedEntities
from precompute.sources.features import (
    NO_VALUES,
    EntityValues,
    demand_type,
    read_set_values,
    read_values,
    union_of_masks,
    with_event_values,
    without_long_texts,
)
from precompute.sources.files import feature_file, source_file
from precompute.sources.readers import NO_LISTS, ColumnsOfLists, feature_schema, read_features
from precompute.sources.unusable import TOO_LONG, UnusableRows

IDS = pa.schema([("user", pa.string()), (HASH, pa.uint64())])
"""Columns that all files of a partition's users begin with."""

VECTOR = "vector"
"""Column of the partition's vectors."""

USER_ROWS = "user_features"
"""Name of the feature table of users in reports."""

VECTOR_ROWS = "user_vectors"
"""Name of the table of users' vectors in reports."""


def write_features(
    config: NightConfig,
    folder: Path,
    hashes_of: Callable[[Ids], NDArray[np.uint64]],
    columns: Sequence[str],
    inputs: Sequence[InputSpec],
    unusable: UnusableRows,
    *,
    values: EntityValues = NO_VALUES,
    erased: ErasedEntities = NO_ERASURES,
    lists: ColumnsOfLists = NO_LISTS,
) -> None:
    """Write each shard's file of feature columns, events' values included; note values that an input cannot use.

    Raises SourceError for an input that no row can fill.
    """
    schema: Any = IDS
    batches: Any = ()
    if columns:
        path = feature_file(config, "user", columns[0])
        kinds = feature_schema(path, columns, lists)
        schema = pa.schema([*IDS, *((name, kinds.field(name).type) for name in columns)])
        batches = with_event_values(
            read_features(
                path,
                config.sources.user_column,
                columns,
                source=USER_ROWS,
                unusable=unusable,
                lists=lists,
            ),
            values,
            kind="user",
            unusable=unusable,
            inputs=inputs,
            adds=values,
        )
    filled = dict.fromkeys(inputs, 0)
    count = 0
    paths = [path for n in range(config.shards) for path in shard_paths(folder, n, ("features",))]
    with ShardFiles(paths, schema, ranges=ranges_of_a_shard(config.shards)) as files:
        for ids, column_by_name in batches:
            count += len(ids)
            column_by_name = _shortened(config, ids, column_by_name, inputs, unusable)
            for name in columns:
                of_column = [input_spec for input_spec in filled if input_spec.column == name]
                for input_spec, rows in _note_values(
                    ids, name, column_by_name[name], of_column, unusable
                ):
                    filled[input_spec] += rows
            hashes = hashes_of(ids)
            table = pa.table([ids.texts(), hashes, *column_by_name.values()], schema=schema)
            if erased.users:
                is_kept = erased.keeps_users(ids)
                table, hashes = table.filter(pa.array(is_kept)), hashes[is_kept]
            files.write(table, range_of(hashes, config.shards))
    for input_spec, rows in filled.items():
        if count and not rows:
            raise SourceError(
                f"{config.sources.user_features}: column {input_spec.column!r} has no value that the model's input "
                f"{input_spec.name!r} can use, in none of {count:,} rows",
                column=input_spec.column,
            )


def note_event_values(
    night: NightInput,
    columns: Sequence[str],
    inputs: Sequence[InputSpec],
    unusable: UnusableRows,
    lists: ColumnsOfLists,
) -> None:
    """Note unusable values set by events as `write_features` does, where an earlier partition's features are reused."""
    values = night.values.users
    if columns and values:
        kinds = feature_schema(feature_file(night.config, "user", columns[0]), columns, lists)
        types = {name: kinds.field(name).type for name in columns}
        read_set_values(types, values, "user", inputs, unusable)


def _shortened(
    config: NightConfig,
    ids: Ids,
    columns: Mapping[str, Any],
    inputs: Sequence[InputSpec],
    unusable: UnusableRows,
) -> dict[str, Any]:
    """The columns, in those of text inputs null for a text that the service would refuse; such rows are noted."""
    shortened = dict(columns)
    for name in sorted(
        {str(input_spec.column) for input_spec in inputs if input_spec.dtype == "string"}
    ):
        shortened[name], is_long = without_long_texts(columns[name], config.feature_text_bytes)
        if is_long.any():
            bad_mask_by_reason = {f"{name}: {TOO_LONG}": is_long}
            unusable.note_rows(
                f"{USER_ROWS}.{name}", bad_mask_by_reason, lambda row: {"user": ids.name_of(row)}
            )
    return shortened


def _note_values(
    ids: Ids, name: str, column: Any, inputs: Sequence[InputSpec], unusable: UnusableRows
) -> list[tuple[InputSpec, int]]:
    """Number of a batch's values that each input of a column can use; unusable ones are noted, missing ones are not.

    A row is looked at once, and noted once, however many models take the column.
    """
    unusable.looked_at(source := f"{USER_ROWS}.{name}", len(ids))
    values_by_input = {input_spec: read_values(column, input_spec) for input_spec in inputs}
    if bad_mask_by_reason := union_of_masks(
        values.unusable_mask_by_reason for values in values_by_input.values()
    ):
        unusable.note_rows(source, bad_mask_by_reason, lambda row: {"user": ids.name_of(row)})
    return [
        (input_spec, int(values.usable.sum())) for input_spec, values in values_by_input.items()
    ]


def write_vectors(
    config: NightConfig,
    folder: Path,
    dims: int,
    hashes_of: Callable[[Ids], NDArray[np.uint64]],
    unusable: UnusableRows,
    *,
    erased: ErasedEntities = NO_ERASURES,
) -> None:
    """Write each shard's file of the vectors that have `dims` finite numbers; the others are noted.

    Raises SourceError for a column that is not of such vectors, or where none can be used.
    """
    sources = config.sources
    path, column = source_file(str(sources.user_vectors), config.path(".")), sources.vector_column
    spec = InputSpec("vector", "feature", "float32", column=column, width=dims)
    demand_type(feature_schema(path, (column,)).field(column).type, spec, str(path))
    texts, numbers = pa.string(), pa.list_(pa.float32(), dims)
    schema = pa.schema([("user", texts), (HASH, pa.uint64()), (VECTOR, numbers)])
    rows_read = used = 0
    paths = [path for n in range(config.shards) for path in shard_paths(folder, n, (USER_VECTORS,))]
    with ShardFiles(paths, schema, ranges=ranges_of_a_shard(config.shards)) as files:
        for ids, values in read_features(
            path, sources.user_column, (column,), source=VECTOR_ROWS, unusable=unusable
        ):
            rows_read += len(ids)
            unusable.looked_at(VECTOR_ROWS, len(ids))
            vector_values = read_values(values[column], spec)
            if vector_values.unusable_mask_by_reason:
                named = lambda row, ids=ids: {"user": ids.name_of(row)}  # noqa: E731
                unusable.note_rows(VECTOR_ROWS, vector_values.unusable_mask_by_reason, named)
            is_kept = vector_values.usable & erased.keeps_users(ids)
            used += int(is_kept.sum())
            hashes, rows = hashes_of(ids)[is_kept], pa.array(vector_values.numbers[is_kept].ravel())
            files.write(
                pa.table([
                    ids.texts().filter(pa.array(is_kept)), hashes,
                    pa.FixedSizeListArray.from_arrays(rows, dims),
                ], schema=schema),
                range_of(hashes, config.shards),
            )  # fmt: skip
    if not used:
        requirement = f"each is a list of {dims} finite numbers, as the bundle's dimensions"
        raise SourceError(
            f"{path}: column {column!r} has no vector that can be used: "
            + (
                f"of its {rows_read:,} rows none is; {requirement}"
                if rows_read
                else "it has no rows"
            ),
            column=column,
        )


def vectors_of(hashes: NDArray[np.uint64], table: Any) -> NDArray[np.float32]:
    """Return [hashes, dims], the vector of each of the sorted hashes, NaN for a hash without one."""
    rows, dims = first_rows(hashes, table), table.schema.field(VECTOR).type.list_size
    vectors = np.full((len(hashes), dims), np.nan, np.float32)
    has_any = rows >= 0
    numbers = np.asarray(table.column(VECTOR).combine_chunks().flatten()).reshape(-1, dims)
    vectors[has_any] = numbers[rows[has_any]]
    return vectors

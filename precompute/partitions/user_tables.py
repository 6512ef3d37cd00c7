"""Tables of users, features and vectors: written to the partition, and vectors read from it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.errors import SourceError
from cache.model.tower_spec import InputSpec
from precompute.config.settings import NightConfig
from precompute.partitions.grouping import first_row_of_hashes
from precompute.partitions.night_input import NightInput
from precompute.partitions.shard_files import (
    HASH_COLUMN,
    USER_VECTORS_KIND,
    ShardFiles,
    range_count_per_shard,
    range_of,
    shard_paths,
)
from precompute.sources.columns import Ids
from precompute.sources.erasures import NO_ERASURES, ErasedEntities
from precompute.sources.features import (
    NO_ENTITY_VALUES,
    EntityValues,
    demand_column_type,
    read_event_values,
    read_feature_values,
    union_of_masks,
    with_event_values,
    without_long_texts,
)
from precompute.sources.files import feature_file, source_file
from precompute.sources.readers import NO_COLUMNS_OF_LISTS, ColumnsOfLists, feature_schema, read_features
from precompute.sources.unusable import TEXT_TOO_LONG_REASON, UnusableRows

USER_IDS_SCHEMA = pa.schema([("user", pa.string()), (HASH_COLUMN, pa.uint64())])
"""First columns of every file with a partition's users."""

VECTOR_COLUMN = "vector"
"""Column with the vectors in a partition's file."""

USER_FEATURES_SOURCE = "user_features"
"""Name of the feature table of users in reports."""

USER_VECTORS_SOURCE = "user_vectors"
"""Name of the table of users' vectors in reports."""


def write_feature_files(
    config: NightConfig,
    folder: Path,
    hash_user_ids: Callable[[Ids], NDArray[np.uint64]],
    feature_columns: Sequence[str],
    input_specs: Sequence[InputSpec],
    unusable_rows: UnusableRows,
    *,
    event_values: EntityValues = NO_ENTITY_VALUES,
    erased: ErasedEntities = NO_ERASURES,
    columns_of_lists: ColumnsOfLists = NO_COLUMNS_OF_LISTS,
) -> None:
    """Write each shard's file of feature columns, with values that events set; note values that an input cannot use.

    Raises SourceError if no row has a usable value for an input.
    """
    file_schema: Any = USER_IDS_SCHEMA
    feature_batches: Any = ()
    if feature_columns:
        path = feature_file(config, "user", feature_columns[0])
        table_schema = feature_schema(path, feature_columns, columns_of_lists)
        file_schema = pa.schema(
            [*USER_IDS_SCHEMA, *((name, table_schema.field(name).type) for name in feature_columns)]
        )
        feature_batches = with_event_values(
            read_features(
                path,
                config.sources.user_column,
                feature_columns,
                source_name=USER_FEATURES_SOURCE,
                unusable_rows=unusable_rows,
                columns_of_lists=columns_of_lists,
            ),
            event_values,
            entity_kind="user",
            unusable=unusable_rows,
            input_specs=input_specs,
            addable_ids=event_values,
        )
    usable_count_by_input = dict.fromkeys(input_specs, 0)
    read_row_count = 0
    shard_file_paths = [path for n in range(config.shards) for path in shard_paths(folder, n, ("features",))]
    with ShardFiles(shard_file_paths, file_schema, ranges_per_file=range_count_per_shard(config.shards)) as shard_files:
        for ids, column_by_name in feature_batches:
            read_row_count += len(ids)
            column_by_name = _without_long_texts(config, ids, column_by_name, input_specs, unusable_rows)
            for column_name in feature_columns:
                column_specs = [input_spec for input_spec in usable_count_by_input if input_spec.column == column_name]
                for input_spec, usable_count in _count_usable_values(
                    ids, column_name, column_by_name[column_name], column_specs, unusable_rows
                ):
                    usable_count_by_input[input_spec] += usable_count
            user_hashes = hash_user_ids(ids)
            table = pa.table([ids.row_texts(), user_hashes, *column_by_name.values()], schema=file_schema)
            if erased.users:
                is_kept = erased.kept_users_mask(ids)
                table, user_hashes = table.filter(pa.array(is_kept)), user_hashes[is_kept]
            shard_files.write(table, range_of(user_hashes, config.shards))
    for input_spec, usable_count in usable_count_by_input.items():
        if read_row_count and not usable_count:
            raise SourceError(
                f"{config.sources.user_features}: none of {read_row_count:,} rows has a value in column "
                f"{input_spec.column!r} that the model's input {input_spec.name!r} can use",
                column=input_spec.column,
            )


def note_event_values(
    night: NightInput,
    feature_columns: Sequence[str],
    input_specs: Sequence[InputSpec],
    unusable_rows: UnusableRows,
    columns_of_lists: ColumnsOfLists,
) -> None:
    """Note unusable values that events set, as `write_feature_files` does, for a reused partition."""
    event_values = night.values.user_values
    if feature_columns and event_values:
        table_schema = feature_schema(
            feature_file(night.config, "user", feature_columns[0]), feature_columns, columns_of_lists
        )
        type_by_column = {column_name: table_schema.field(column_name).type for column_name in feature_columns}
        read_event_values(type_by_column, event_values, "user", input_specs, unusable_rows)


def _without_long_texts(
    config: NightConfig,
    ids: Ids,
    column_by_name: Mapping[str, Any],
    input_specs: Sequence[InputSpec],
    unusable_rows: UnusableRows,
) -> dict[str, Any]:
    """Return the columns, texts longer than `feature_text_bytes` (refused by the service) as null; note such rows."""
    shortened_columns = dict(column_by_name)
    for column_name in sorted({str(input_spec.column) for input_spec in input_specs if input_spec.dtype == "string"}):
        shortened_columns[column_name], is_long = without_long_texts(
            column_by_name[column_name], config.feature_text_bytes
        )
        if is_long.any():
            bad_mask_by_reason = {f"{column_name}: {TEXT_TOO_LONG_REASON}": is_long}
            unusable_rows.note_rows(
                f"{USER_FEATURES_SOURCE}.{column_name}", bad_mask_by_reason, lambda row: {"user": ids.name_of(row)}
            )
    return shortened_columns


def _count_usable_values(
    ids: Ids, column_name: str, feature_column: Any, input_specs: Sequence[InputSpec], unusable_rows: UnusableRows
) -> list[tuple[InputSpec, int]]:
    """Return how many of a batch's values each input of a column can use; note unusable values, not missing ones.

    A row is noted once, however many models use the column.
    """
    unusable_rows.count_checked(source_name := f"{USER_FEATURES_SOURCE}.{column_name}", len(ids))
    values_by_input = {input_spec: read_feature_values(feature_column, input_spec) for input_spec in input_specs}
    if bad_mask_by_reason := union_of_masks(
        feature_values.unusable_mask_by_reason for feature_values in values_by_input.values()
    ):
        unusable_rows.note_rows(source_name, bad_mask_by_reason, lambda row: {"user": ids.name_of(row)})
    return [
        (input_spec, int(feature_values.usable_mask.sum())) for input_spec, feature_values in values_by_input.items()
    ]


def write_vector_files(
    config: NightConfig,
    folder: Path,
    dims: int,
    hash_user_ids: Callable[[Ids], NDArray[np.uint64]],
    unusable_rows: UnusableRows,
    *,
    erased: ErasedEntities = NO_ERASURES,
) -> None:
    """Write each shard's file of the vectors that have `dims` finite numbers; note the others.

    Raises SourceError if the column does not hold such vectors, or none of them can be used.
    """
    sources = config.sources
    path, column = source_file(str(sources.user_vectors), config.path(".")), sources.vector_column
    spec = InputSpec("vector", "feature", "float32", column=column, width=dims)
    demand_column_type(feature_schema(path, (column,)).field(column).type, spec, str(path))
    id_type, vector_type = pa.string(), pa.list_(pa.float32(), dims)
    file_schema = pa.schema([("user", id_type), (HASH_COLUMN, pa.uint64()), (VECTOR_COLUMN, vector_type)])
    rows_read = used_rows = 0
    shard_file_paths = [path for n in range(config.shards) for path in shard_paths(folder, n, (USER_VECTORS_KIND,))]
    with ShardFiles(shard_file_paths, file_schema, ranges_per_file=range_count_per_shard(config.shards)) as shard_files:
        for ids, column_by_name in read_features(
            path, sources.user_column, (column,), source_name=USER_VECTORS_SOURCE, unusable_rows=unusable_rows
        ):
            rows_read += len(ids)
            unusable_rows.count_checked(USER_VECTORS_SOURCE, len(ids))
            vector_values = read_feature_values(column_by_name[column], spec)
            if vector_values.unusable_mask_by_reason:
                describe_row = lambda row, ids=ids: {"user": ids.name_of(row)}  # noqa: E731
                unusable_rows.note_rows(USER_VECTORS_SOURCE, vector_values.unusable_mask_by_reason, describe_row)
            is_kept = vector_values.usable_mask & erased.kept_users_mask(ids)
            used_rows += int(is_kept.sum())
            kept_hashes, flat_vectors = (
                hash_user_ids(ids)[is_kept],
                pa.array(vector_values.input_numbers[is_kept].ravel()),
            )
            shard_files.write(
                pa.table([
                    ids.row_texts().filter(pa.array(is_kept)), kept_hashes,
                    pa.FixedSizeListArray.from_arrays(flat_vectors, dims),
                ], schema=file_schema),
                range_of(kept_hashes, config.shards),
            )  # fmt: skip
    if not used_rows:
        requirement = f"each is a list of {dims} finite numbers, as the bundle's dimensions"
        raise SourceError(
            f"{path}: column {column!r} has no vector that can be used: "
            + (f"of its {rows_read:,} rows none is; {requirement}" if rows_read else "it has no rows"),
            column=column,
        )


def vectors_of_hashes(sorted_hashes: NDArray[np.uint64], vectors_table: Any) -> NDArray[np.float32]:
    """Return float32 [hashes, dims], the vector of each of the sorted hashes, NaN for a hash without one."""
    row_of_hash, dims = (
        first_row_of_hashes(sorted_hashes, vectors_table),
        vectors_table.schema.field(VECTOR_COLUMN).type.list_size,
    )
    vectors = np.full((len(sorted_hashes), dims), np.nan, np.float32)
    has_vector = row_of_hash >= 0
    numbers = np.asarray(vectors_table.column(VECTOR_COLUMN).combine_chunks().flatten()).reshape(-1, dims)
    vectors[has_vector] = numbers[row_of_hash[has_vector]]
    return vectors

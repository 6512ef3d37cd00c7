"""Features of items or users as a caller has them (arrays by name, a table, a file), in the order of the ids."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from cache.errors import SourceError
from precompute.adapters.given import ids_of


def feature_columns(feature_source: Any, ids: Any, entity_kind: str) -> dict[str, Any]:
    """Columns by name, each with a row for each id, in their order.

    `feature_source` is a mapping of arrays, which is taken as it is, or a table: of Arrow, pandas or polars, or the
    path of a Parquet or CSV file. A table with a column of ids, named `entity_kind` ("item" or "user"), may have its
    rows in any order, and more of them; a table whose ids stand in a column of another name, in another order, is
    refused. Without `ids` the rows stay as they are. Raises SourceError, naming the remedy.
    """
    if feature_source is None:
        return {}
    if isinstance(feature_source, Mapping):
        return dict(feature_source)
    table = table_of(feature_source, f"{entity_kind}_features")
    if ids is None:
        pass  # of entities that nobody names, the values are examples
    elif entity_kind in table.column_names:
        table = _in_order(table, ids, entity_kind)
    elif table.num_rows != len(ids):
        raise SourceError(
            f"{entity_kind}_features has {table.num_rows:,} rows for {len(ids):,} {entity_kind} ids, and no column "
            f"{entity_kind!r} that "
            "tells whose they are: add it, or give a row for each id, in their order"
        )
    elif name := _misnamed_ids(table, ids):
        raise SourceError(
            f"{entity_kind}_features has no column {entity_kind!r}, but {name!r} holds {entity_kind} ids: rename it to "
            f"{entity_kind!r}; "
            f"or, if these are no {entity_kind} ids, give arrays by name, with a row for each id, in their order"
        )
    return {
        name: _values(table[name].combine_chunks())
        for name in table.column_names
        if name != entity_kind
    }


def table_of(table_source: Any, setting: str) -> Any:
    """The Arrow table that an argument, called `setting` in errors, is or names; raises SourceError."""
    try:
        if isinstance(table_source, str | Path):
            path = Path(table_source)
            is_csv = path.suffix.lower() == ".csv"
            return pa.csv.read_csv(path) if is_csv else pq.read_table(path)
        if isinstance(table_source, pa.Table):
            return table_source
        if hasattr(table_source, "to_arrow"):  # polars
            return table_source.to_arrow()
        if hasattr(table_source, "columns") and hasattr(table_source, "iloc"):  # pandas
            return pa.Table.from_pandas(table_source, preserve_index=False)
    except (OSError, pa.ArrowException) as error:
        raise SourceError(
            f"{setting}: {error}; a file is Parquet, or CSV with the ending .csv"
        ) from None
    raise SourceError(
        f"{setting} is a {type(table_source).__name__}: give arrays by name, a table of Arrow, pandas or polars, or "
        "the "
        "path of a Parquet or CSV file"
    )


def _in_order(table: Any, ids: Any, entity_kind: str) -> Any:
    """The rows of the ids, in their order."""
    texts = ids_of(table[entity_kind], entity_kind)
    row_indices = pc.index_in(ids, value_set=texts)
    if row_indices.null_count:
        missing = ids.filter(pc.is_null(row_indices))[0].as_py()
        raise SourceError(
            f"{entity_kind}_features has no row of {row_indices.null_count:,} {entity_kind} ids, {missing!r} among "
            "them: give one for each"
        )
    return table.take(row_indices)


def _misnamed_ids(table: Any, ids: Any) -> str | None:
    """Name of a column that holds at least half of the ids, in another order than theirs."""
    for name in table.column_names:
        column = table[name]
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        kind = column.type
        if not (
            pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)
        ):
            continue
        texts = column.cast(pa.string()).combine_chunks()
        if texts.equals(ids.cast(pa.string())):
            continue
        if 2 * pc.index_in(ids, value_set=texts.drop_null().unique()).null_count <= len(ids):
            return str(name)
    return None


def _values(column: Any) -> Any:
    """Numbers as numpy has them, a row of a list column each; texts and all else stay in Arrow."""
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if pa.types.is_string(kind.value_type):
            return column
        lists = column.to_pylist()
        is_even = None not in lists and len({len(row) for row in lists}) <= 1
        return np.asarray(lists) if is_even else column
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return column if column.null_count else column.to_numpy(zero_copy_only=False)
    return column

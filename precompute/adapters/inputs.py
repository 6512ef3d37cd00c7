"""Checked inputs of an import: ids, vectors, clicks and features from arrays, tables or files."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import scipy.sparse as sp
from numpy.typing import NDArray

from cache.config.night import Sources
from cache.errors import SourceError
from cache.model.tower import Histories
from precompute.sources import unusable
from precompute.sources.columns import read_ids
from precompute.sources.csv_files import BLANK_CHARACTERS
from precompute.sources.readers import Interactions, read_interactions
from precompute.sources.vocabulary import NumberedIds, Vocabulary, repeated_text_rows

CLICK_COLUMNS = ("user", "item", "timestamp")
"""Names of columns of users, items and times in a table of clicks, unless settings name others."""

_TIMESTAMP_TYPE = pa.timestamp("us", "UTC")
_EXAMPLE_BATCHES_MAX = 8
"""Maximum number of batches of clicks from which examples of item ids in messages are taken."""
_REPEAT_REASON, _UNKNOWN_REASON, _NO_CLICK_REASON = ("repeats", "of unknown users or items", "of weight 0 or less")


@dataclass(frozen=True, slots=True, eq=False)
class EntityVectors:
    """Vectors float32 [n, dims] of entities, and their ids as Arrow strings."""

    entity_ids: Any
    vectors: NDArray[np.float32]

    @classmethod
    def of(cls, entity_ids: Any, rows: Any, entity_kind: str) -> Self:
        """Check ids and rows; `vectors` may be the path of a .npy file, or of a Parquet file with ids and vectors.

        Raises SourceError, which names the cause and the remedy.
        """
        if isinstance(rows, str | Path):
            file_ids, rows = _read_vectors_file(Path(rows), entity_kind)
            entity_ids = file_ids if entity_ids is None else entity_ids
        matrix = _vector_matrix(rows, entity_kind)
        id_texts = checked_ids(range(len(matrix)) if entity_ids is None else entity_ids, entity_kind)
        if len(id_texts) != len(matrix):
            raise SourceError(
                f"{len(id_texts):,} {entity_kind} ids, but {len(matrix):,} {entity_kind} vectors: give one id for each "
                "row, in the order of the rows"
            )
        return cls(id_texts, matrix)

    @property
    def dims(self) -> int:
        """Number of dimensions."""
        return int(self.vectors.shape[1])


class NoKnownClicks(SourceError):
    """No click has both a known user and a known item."""


@dataclass(frozen=True, slots=True, eq=False)
class ClickMatrix:
    """Clicks of users on items: a CSR matrix [users, items] of weights above 0.

    `is_time_ordered`: clicks of a row are in the order of their times. `left_out_by_reason`: number of given clicks
    that are not in the matrix, by reason. `click_times`: microseconds since 1970 of each click, in the order of
    `matrix.indices`, 0 if unknown. `click_columns`: names of a table's columns of users, items and times.
    """

    matrix: sp.csr_matrix
    user_ids: Any
    is_time_ordered: bool = False
    left_out_by_reason: Mapping[str, int] = field(default_factory=dict)
    click_times: NDArray[np.int64] | None = None
    click_columns: tuple[str, str, str] = CLICK_COLUMNS

    @classmethod
    def of(cls, clicks: Any, user_ids: Any, item_ids: Any) -> Self:
        """Check a scipy matrix [users, items] (or its .npz file), or read a table (a path; `Sources` names columns).

        `user_ids` are the users' ids in the order of the rows (None: the matrix' row numbers, or all users of the
        table), `item_ids` Arrow strings in the order of the columns; a table's clicks on other items are left out.
        Raises SourceError, which names both sides of a mismatch.
        """
        if isinstance(clicks, cls):
            return clicks
        if isinstance(clicks, str | Path) and Path(clicks).suffix != ".npz":
            clicks = Sources(interactions=(str(clicks),))
        if isinstance(clicks, Sources):
            files_text = ", ".join(clicks.interactions)
            click_matrix = cls.read(read_interactions(clicks, Path.cwd()), files_text, user_ids, item_ids)
            column_names = clicks.user_column, clicks.item_column, clicks.timestamp_column
            return replace(click_matrix, click_columns=column_names)
        if isinstance(clicks, str | Path):
            try:
                clicks = sp.load_npz(clicks)
            except (OSError, ValueError, KeyError) as error:
                raise SourceError(f"{clicks}: {error}; write it with scipy.sparse.save_npz") from None
        if not sp.issparse(clicks):
            raise SourceError(f"clicks must be a scipy sparse matrix, users by items, not a {type(clicks).__name__}")
        matrix = sp.csr_matrix(clicks, dtype=np.float32, copy=True)
        user_texts = checked_ids(range(matrix.shape[0]), "user") if user_ids is None else user_ids
        if matrix.shape != (len(user_texts), len(item_ids)):
            is_transposed = matrix.shape == (len(item_ids), len(user_texts))
            remedy = "give a row for each user, a column for each item, in the order of their ids"
            raise SourceError(
                f"the clicks are {matrix.shape[0]:,} by {matrix.shape[1]:,}, there are {len(user_texts):,} users and "
                f"{len(item_ids):,} items: {'it is items by users, give its transpose' if is_transposed else remedy}"
            )
        if not np.isfinite(matrix.data).all():
            raise SourceError("the clicks have weights that are not finite: leave these clicks out")
        matrix.sum_duplicates()
        matrix.data[matrix.data < 0] = 0  # a negative weight is a dislike, which a history cannot express
        left_out = {_NO_CLICK_REASON: int(matrix.nnz - matrix.count_nonzero())}
        matrix.eliminate_zeros()
        return cls(matrix, user_texts, left_out_by_reason=left_out)

    @classmethod
    def read(cls, batches: Iterable[Interactions], files_text: str, user_ids: Any, item_ids: Any) -> Self:
        """Read clicks as a night does; leave out unknown items, and users not in `user_ids` (None: keep all users).

        Raises NoKnownClicks, naming the files `files_text`, if no click is left.
        """
        item_vocabulary, numbered_users = Vocabulary.of(pa.chunked_array([item_ids])), NumberedIds()
        user_row_parts: list[NDArray[np.int64]] = []
        time_parts: list[NDArray[np.int64]] = []
        example_item_ids: list[Any] = []
        assert item_vocabulary is not None  # noqa: S101 - ids were checked
        for batch in batches:
            numbered_users.add(batch.user_ids)
            user_row_parts.append(item_vocabulary.find_positions(batch.item_ids.distinct_ids)[batch.item_ids.id_codes])
            time_parts.append(batch.times_us)
            if len(example_item_ids) < _EXAMPLE_BATCHES_MAX:
                example_item_ids.append(pc.unique(batch.item_ids.distinct_ids))
        user_rows, item_columns, click_times = (
            numbered_users.codes(),
            np.concatenate(user_row_parts),
            np.concatenate(time_parts),
        )
        user_names = numbered_users.distinct_ids.cast(pa.string())
        if user_ids is not None:
            user_vocabulary = Vocabulary.of(pa.chunked_array([user_ids]))
            assert user_vocabulary is not None  # noqa: S101
            user_rows, user_names = user_vocabulary.find_positions(user_names)[user_rows], user_ids
        is_known = (user_rows >= 0) & (item_columns >= 0)
        if not is_known.any():
            clicked_item_ids = pa.concat_arrays([batch_ids.cast(pa.string()) for batch_ids in example_item_ids])
            remedy = (
                _leading_zeros_remedy("item", item_ids, clicked_item_ids)
                or _leading_zeros_remedy("user", user_ids, numbered_users.distinct_ids.cast(pa.string()))
                or _ids_remedy(user_ids, item_ids)
            )
            raise NoKnownClicks(f"{files_text}: no click has both a known user and a known item; {remedy}")
        click_matrix = cls.in_order(
            user_rows[is_known],
            item_columns[is_known],
            click_times[is_known],
            user_names,
            len(item_ids),
            keeps_times=True,
        )
        left_out = {**click_matrix.left_out_by_reason, _UNKNOWN_REASON: int((~is_known).sum())}
        return replace(click_matrix, left_out_by_reason=left_out)

    @classmethod
    def in_order(
        cls, user_rows: NDArray[np.int64], item_columns: NDArray[np.int64], click_times: NDArray[Any], user_ids: Any,
        item_count: int,
        *, keeps_times: bool = False,
    ) -> Self:  # fmt: skip
        """Order clicks by time, and keep the latest of each pair of user and item; `user_ids` are Arrow strings.

        `keeps_times` is for times in microseconds since 1970.
        """
        newest_first = np.lexsort((click_times, user_rows))[::-1]
        pair_codes = user_rows[newest_first] * item_count + item_columns[newest_first]
        latest_clicks = newest_first[np.sort(np.unique(pair_codes, return_index=True)[1])][::-1]
        indptr = np.searchsorted(user_rows[latest_clicks], np.arange(len(user_ids) + 1))
        ones = np.ones(len(latest_clicks), np.float32)
        matrix = sp.csr_matrix((ones, item_columns[latest_clicks], indptr), (len(user_ids), item_count))
        has_times = bool(click_times.any())
        latest_times = click_times[latest_clicks] if has_times and keeps_times else None
        return cls(matrix, user_ids, has_times, {_REPEAT_REASON: len(user_rows) - len(latest_clicks)}, latest_times)

    @property
    def median_weight(self) -> float:
        """Median weight of a click; 1 without clicks."""
        return float(np.median(self.matrix.data)) if self.matrix.nnz else 1.0

    @property
    def is_weighted(self) -> bool:
        """True if clicks have different weights."""
        return bool(self.matrix.nnz) and self.matrix.data.min() != self.matrix.data.max()

    def sample_users(
        self, users_max: int, items_min: int, rng: np.random.Generator, is_usable_user: NDArray[np.bool_] | None = None
    ) -> NDArray[np.int64]:
        """Return the rows of at most `users_max` usable users with at least `items_min` items, ascending."""
        has_enough = np.diff(self.matrix.indptr) >= items_min
        eligible_users = np.flatnonzero(has_enough if is_usable_user is None else has_enough & is_usable_user)
        return np.sort(rng.choice(eligible_users, min(users_max, len(eligible_users)), replace=False))

    def histories(self, user_rows: NDArray[np.int64], history_items_max: int) -> Histories:
        """Return the histories of some users, with the last `history_items_max` items of each."""
        all_histories = Histories(self.matrix.indptr.astype(np.int64), self.matrix.indices.astype(np.int64))
        user_histories = [
            all_histories.indices[all_histories.indptr[user_row] : all_histories.indptr[user_row + 1]][
                -history_items_max:
            ]
            for user_row in user_rows
        ]
        return Histories.of(user_histories)

    def write(self, path: Path, item_ids: Any, click_columns: tuple[str, str, str] = CLICK_COLUMNS) -> None:
        """Write a Parquet file with a row for each click: user, item and, if known, time, in these columns."""
        user_column, item_column, timestamp_column = click_columns
        schema_fields = [(user_column, pa.string()), (item_column, pa.string())]
        has_times = self.click_times is not None and bool(timestamp_column)
        schema = pa.schema([*schema_fields, (timestamp_column, _TIMESTAMP_TYPE)] if has_times else schema_fields)
        with pq.ParquetWriter(path, schema) as file:
            rows_at_once = 100_000
            for first_row in range(0, self.matrix.shape[0], rows_at_once):
                matrix_part = self.matrix[first_row : first_row + rows_at_once].tocoo()
                row_order = np.argsort(matrix_part.row, kind="stable")
                user_column_values = self.user_ids.take(pa.array(matrix_part.row[row_order] + first_row))
                column_values = [user_column_values, item_ids.take(pa.array(matrix_part.col[row_order]))]
                if self.click_times is not None and has_times:
                    first_click = int(self.matrix.indptr[first_row])
                    part_times = self.click_times[first_click : first_click + matrix_part.nnz]
                    column_values.append(pa.array(part_times, pa.int64(), mask=part_times == 0).cast(_TIMESTAMP_TYPE))
                file.write_table(pa.table(column_values, schema=schema))


def _leading_zeros_remedy(entity_kind: str, known_ids: Any, clicked_ids: Any) -> str:
    """Return the remedy for ids that only differ by leading zeros, with an example of each form; else empty."""
    if known_ids is None or not len(clicked_ids):
        return ""
    known_without_zeros, clicked_without_zeros = (pc.utf8_ltrim(texts, "0") for texts in (known_ids, clicked_ids))
    known_positions = pc.index_in(clicked_without_zeros, value_set=known_without_zeros)
    if known_positions.null_count == len(known_positions):
        return ""
    clicked_row = int(np.flatnonzero(np.asarray(known_positions.is_valid()))[0])
    id_text, clicked_text = (known_ids[known_positions[clicked_row].as_py()].as_py(), clicked_ids[clicked_row].as_py())
    if id_text == clicked_text:
        return ""
    return (
        f"the {entity_kind} {clicked_text!r} of the clicks is {id_text!r} among the {entity_kind} ids: leading zeros "
        "are part of an id, so write both as texts of the same form (integers have no leading zeros)"
    )


def _ids_remedy(user_ids: Any, item_ids: Any) -> str:
    """Return the remedy for clicks without a known id: most often the model was imported without ids."""
    missing_arguments = [
        f"{entity_kind}_ids (--{entity_kind}-ids)"
        for entity_kind, ids in (("user", user_ids), ("item", item_ids))
        if ids is not None and len(ids) and ids[len(ids) - 1].as_py() == str(len(ids) - 1)
    ]
    if not missing_arguments:
        return "do both use the same ids?"
    return (
        f"the model was imported with row numbers as ids: give {' and '.join(missing_arguments)}, one id a line, in "
        "the order of the rows"
    )


def checked_ids(entity_ids: Any, entity_kind: str) -> Any:
    """Convert ids (texts or integers, or the path of a file with one a line) to Arrow strings; raise SourceError."""
    if isinstance(entity_ids, str | Path):
        path = Path(entity_ids)
        try:
            # Only a line feed ends a line: `splitlines` also splits at eight other characters, which ids may contain.
            id_lines = path.read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
            entity_ids = [line.strip(BLANK_CHARACTERS) for line in id_lines]
        except (OSError, UnicodeDecodeError) as error:
            raise SourceError(f"{entity_kind} ids {path}: {error}; the file needs one id a line, in UTF-8") from None
    id_values = entity_ids.tolist() if isinstance(entity_ids, np.ndarray) else entity_ids
    try:
        id_array = id_values if isinstance(id_values, pa.Array | pa.ChunkedArray) else pa.array(list(id_values))
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError) as error:
        raise SourceError(f"{entity_kind} ids: {error}; ids are texts or integers, all of the same type") from None
    if isinstance(id_array, pa.ChunkedArray):
        id_array = id_array.combine_chunks()
    if not len(id_array):
        raise SourceError(f"there are no {entity_kind} ids: give at least one")
    id_column, invalid_mask_by_reason = read_ids(id_array, Path("the ids given"), entity_kind)
    if invalid_mask_by_reason:
        reason, invalid_mask = next(iter(invalid_mask_by_reason.items()))
        raise SourceError(
            f"{entity_kind} ids: {reason}, first in row {int(invalid_mask.argmax())}{unusable.remedy(reason)}"
        )
    id_texts = id_column.row_texts()
    repeated_rows = repeated_text_rows(id_texts)
    if len(repeated_rows):
        repeated_row = int(repeated_rows[0])
        raise SourceError(
            f"{entity_kind} id {id_texts[repeated_row].as_py()!r} is repeated in row {repeated_row}: keep one row for "
            "each",
            row=repeated_row,
        )
    return id_texts


def _read_vectors_file(path: Path, entity_kind: str) -> tuple[Any, Any]:
    """Return (ids, or None if the file has none; rows)."""
    try:
        if path.suffix == ".npy":
            return None, np.load(path, allow_pickle=False)
        if path.suffix != ".parquet":
            raise SourceError(f"{entity_kind} vectors {path}: give a .npy or a .parquet file")
        column_names = pq.read_schema(path).names
        if len(set(column_names)) < len(column_names):
            raise SourceError(
                f"{entity_kind} vectors {path} has two columns with the same name among {', '.join(column_names)}: "
                "keep one"
            )
        table = pq.read_table(path)
    except FileNotFoundError:
        raise SourceError(f"{entity_kind} vectors: there is no file {path}") from None
    except (OSError, ValueError, pa.ArrowInvalid) as error:
        if "pickle" in str(error).lower():  # numpy's message recommends loading the file with pickle
            raise SourceError(
                f"{entity_kind} vectors {path} are pickled, and loading them would run any code in the file: save "
                "numbers, not objects"
            ) from None
        raise SourceError(f"{entity_kind} vectors {path}: {error}") from None
    vector_columns = [arrow_field.name for arrow_field in table.schema if _is_list_type(arrow_field.type)]
    id_columns = [name for name in table.column_names if name not in vector_columns]
    if len(vector_columns) != 1 or len(id_columns) > 1:
        raise SourceError(
            f"{entity_kind} vectors {path} has the columns {', '.join(table.column_names)}: one of ids and one of "
            "lists of numbers are needed"
        )
    ids = table.column(id_columns[0]) if id_columns else None
    return ids, table.column(vector_columns[0])


def _vector_matrix(vector_rows: Any, entity_kind: str) -> NDArray[np.float32]:
    if isinstance(vector_rows, pa.Array | pa.ChunkedArray):
        if isinstance(vector_rows, pa.ChunkedArray):
            vector_rows = vector_rows.combine_chunks()
        if not _is_list_type(vector_rows.type):
            raise SourceError(f"{entity_kind} vectors are {vector_rows.type}: lists of numbers are needed")
        row_widths = pc.list_value_length(vector_rows).unique().to_pylist()
        if len(row_widths) > 1 or None in row_widths:
            raise SourceError(
                f"{entity_kind} vectors have {row_widths} numbers: all rows need the same length, without missing "
                "numbers"
            )
        flat_values = pc.list_flatten(vector_rows)
        if flat_values.null_count:
            row = int(np.flatnonzero(np.asarray(flat_values.is_null()))[0]) // row_widths[0]
            raise SourceError(
                f"a number is missing in {entity_kind} vectors, first in row {row:,}: vectors need all numbers", row=row
            )
        flat_numbers = flat_values.to_numpy(zero_copy_only=False)
        vector_rows = flat_numbers.reshape(len(vector_rows), -1)
    if hasattr(vector_rows, "detach"):  # a torch tensor
        vector_rows = vector_rows.detach().cpu().numpy()
    try:
        matrix = np.asarray(vector_rows)
    except ValueError as error:
        raise SourceError(f"{entity_kind} vectors: {error}; all rows need the same length") from None
    if matrix.dtype == object or matrix.ndim != 2 or 0 in matrix.shape:
        raise SourceError(
            f"{entity_kind} vectors must be a matrix of numbers with a row for each {entity_kind}, not {matrix.dtype} "
            f"{list(matrix.shape)}"
        )
    if matrix.dtype == np.float16:
        raise SourceError(
            f"{entity_kind} vectors are float16, whose rounding would change lists: give the float32 vectors of the "
            "fitted model"
        )
    if not np.issubdtype(matrix.dtype, np.number) or np.iscomplexobj(matrix):
        raise SourceError(f"{entity_kind} vectors are {matrix.dtype}: real numbers are needed")
    with np.errstate(over="ignore"):  # numbers too large for float32 become infinite, which is refused below
        matrix = np.ascontiguousarray(matrix, np.float32)
    is_finite_row = np.isfinite(matrix).all(axis=1)
    if not is_finite_row.all():
        nonfinite_rows = np.flatnonzero(~is_finite_row)
        raise SourceError(
            f"{len(nonfinite_rows):,} {entity_kind} vectors are not finite (NaN or infinite), the first in row "
            f"{nonfinite_rows[0]:,}: finish the training of the model, or leave these rows and their ids out",
            row=int(nonfinite_rows[0]),
        )
    return matrix


def _is_list_type(arrow_type: Any) -> bool:
    list_type_predicates = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_list_type(arrow_type) for is_list_type in list_type_predicates)


def name_row(subject: str, entity_ids: Any, batch_rows: NDArray[np.int64], row_index: int) -> str:
    """Return "subject 'id'" for a row of a batch; `batch_rows` are its positions among the ids (Arrow strings)."""
    return f"{subject} {entity_ids[int(batch_rows[row_index])].as_py()!r}"


class FeatureColumns(NamedTuple):
    """Columns by name, each with a row for each id, in the order of the ids.

    `limit_texts` says how many rows of the table have other ids, for the report of an import; it is empty if none has.
    """

    column_by_name: dict[str, Any]
    limit_texts: tuple[str, ...] = ()


def feature_columns(
    feature_source: Any, entity_ids: Any, entity_kind: str, sources: Sources | None = None
) -> FeatureColumns:
    """Return the columns of `feature_source`, which is a mapping of arrays or a table.

    A mapping is used unchanged. A table is one of Arrow, pandas or polars, or the path of a Parquet or CSV file. Its
    column of ids has the name that `sources` gives it, or `entity_kind` ("item" or "user"); then its rows may have any
    order, and rows of other ids are left out. A table with the ids in another order in a column of another name is
    refused. If `entity_ids` is None, the rows keep their order. Raises SourceError, naming the remedy.
    """
    if feature_source is None:
        return FeatureColumns({})
    if isinstance(feature_source, Mapping):
        return FeatureColumns(dict(feature_source))
    id_column = entity_kind
    if sources is not None:
        id_column = sources.item_column if entity_kind == "item" else sources.user_column
    table = feature_table(feature_source, f"{entity_kind}_features", id_column)
    if id_column not in table.column_names:
        id_column = entity_kind
    limit_texts: tuple[str, ...] = ()
    if entity_ids is None:
        pass  # without ids the values are only examples
    elif id_column in table.column_names:
        table_ids = checked_ids(table[id_column], entity_kind)
        limit_texts = _limits_of_other_rows(table_ids, entity_ids, entity_kind)
        table = _select_rows_of_ids(table, table_ids, entity_ids, entity_kind)
    elif table.num_rows != len(entity_ids):
        raise SourceError(
            f"{entity_kind}_features has {table.num_rows:,} rows for {len(entity_ids):,} {entity_kind} ids, "
            "and no column "
            f"{entity_kind!r} with the ids: add it, or give a row for each id, in the order of the ids"
        )
    elif column_name := _find_misnamed_id_column(table, entity_ids):
        raise SourceError(
            f"{entity_kind}_features has no column {entity_kind!r}, but {column_name!r} holds {entity_kind} ids: "
            f"rename it to {entity_kind!r}; or, if these are not {entity_kind} ids, give arrays by name, with a row "
            "for each id, in the order of the ids"
        )
    column_by_name = {
        name: _column_values(table[name].combine_chunks()) for name in table.column_names if name != id_column
    }
    return FeatureColumns(column_by_name, limit_texts)


def _limits_of_other_rows(table_ids: Any, entity_ids: Any, entity_kind: str) -> tuple[str, ...]:
    """Return how many rows of a table have ids that are not in `entity_ids`, and the first; nothing if none has."""
    other_ids = table_ids.filter(pc.is_null(pc.index_in(table_ids, value_set=entity_ids)))
    if not len(other_ids):
        return ()
    rows_text = "1 row" if len(other_ids) == 1 else f"{len(other_ids):,} rows"
    limit_text = (
        f"take in {rows_text} of {entity_kind}_features, of {entity_kind}s that are not in "
        f"{entity_kind}_ids ({other_ids[0].as_py()!r} first): for nights with them, name your own table in [sources] "
        f"{entity_kind}_features"
    )
    return (limit_text,)


def feature_table(table_source: Any, setting_name: str, id_column: str) -> Any:
    """Return the Arrow table of an argument, or read it from a path; raise SourceError with the argument's name.

    The column of ids in a CSV file is read as text: "007" stays "007".
    """
    try:
        if isinstance(table_source, str | Path):
            path = Path(table_source)
            if not path.exists():
                raise SourceError(f"{setting_name}: there is no file {path}")
            is_csv = path.suffix.lower() == ".csv"
            id_as_text_options = pa.csv.ConvertOptions(column_types={id_column: pa.string()})
            return pa.csv.read_csv(path, convert_options=id_as_text_options) if is_csv else pq.read_table(path)
        if isinstance(table_source, pa.Table):
            return table_source
        if hasattr(table_source, "to_arrow"):  # polars
            return table_source.to_arrow()
        if hasattr(table_source, "columns") and hasattr(table_source, "iloc"):  # pandas
            return pa.Table.from_pandas(table_source, preserve_index=False)
    except (OSError, pa.ArrowException) as error:
        raise SourceError(f"{setting_name}: {error}; a file is Parquet, or CSV with the ending .csv") from None
    raise SourceError(
        f"{setting_name} is a {type(table_source).__name__}: give arrays by name, a table of Arrow, pandas or "
        "polars, or "
        "the path of a Parquet or CSV file"
    )


def _select_rows_of_ids(feature_table: Any, table_ids: Any, entity_ids: Any, entity_kind: str) -> Any:
    """Return the rows of `entity_ids`, in their order; `table_ids` are the ids of the table's rows."""
    row_indices = pc.index_in(entity_ids, value_set=table_ids)
    if row_indices.null_count:
        missing_id = entity_ids.filter(pc.is_null(row_indices))[0].as_py()
        remedy = (
            _leading_zeros_remedy(entity_kind, entity_ids, table_ids)
            if row_indices.null_count == len(entity_ids)
            else ""
        )
        raise SourceError(
            f"{entity_kind}_features lacks rows for {row_indices.null_count:,} {entity_kind} ids, {missing_id!r} among "
            f"them: {remedy or 'give one for each'}"
        )
    return feature_table.take(row_indices)


def _find_misnamed_id_column(feature_table: Any, entity_ids: Any) -> str | None:
    """Return the name of a column that holds at least half of the ids, in another order."""
    for column_name in feature_table.column_names:
        column = feature_table[column_name]
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        arrow_type = column.type
        if not (
            pa.types.is_integer(arrow_type) or pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type)
        ):
            continue
        column_texts = column.cast(pa.string()).combine_chunks()
        if column_texts.equals(entity_ids.cast(pa.string())):
            continue
        if 2 * pc.index_in(entity_ids, value_set=column_texts.drop_null().unique()).null_count <= len(entity_ids):
            return str(column_name)
    return None


def _column_values(column: Any) -> Any:
    """Convert numbers to numpy, a list column to a matrix; leave texts and other types in Arrow."""
    arrow_type = column.type
    if pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type) or pa.types.is_fixed_size_list(arrow_type):
        if pa.types.is_string(arrow_type.value_type):
            return column
        row_lists = column.to_pylist()
        has_equal_lengths = None not in row_lists and len({len(row) for row in row_lists}) <= 1
        return np.asarray(row_lists) if has_equal_lengths else column
    if pa.types.is_integer(arrow_type) or pa.types.is_floating(arrow_type) or pa.types.is_boolean(arrow_type):
        return column if column.null_count else column.to_numpy(zero_copy_only=False)
    return column

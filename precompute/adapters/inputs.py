"""Checked inputs of an import: ids, vectors, clicks and features from arrays, tables or files."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

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
from precompute.sources.csv_files import BLANKS
from precompute.sources.readers import Interactions, read_interactions
from precompute.sources.vocabulary import NumberedIds, Vocabulary, repeats_in

COLUMNS = ("user", "item", "timestamp")
"""Names of columns of users, items and times in a table of clicks, unless settings name others."""

_TIME = pa.timestamp("us", "UTC")
_BATCHES_SHOWN = 8
"""Batches of clicks whose item ids a message about ids is made of."""
_REPEAT, _UNKNOWN, _NO_CLICK = "repeats", "of unknown users or items", "of weight 0 or less"


@dataclass(frozen=True, slots=True, eq=False)
class Vectors:
    """Vectors float32 [n, dims] of entities, and their ids as Arrow strings."""

    ids: Any
    rows: NDArray[np.float32]

    @classmethod
    def of(cls, ids: Any, rows: Any, entity_kind: str) -> Self:
        """Check ids and rows; `rows` may be the path of a .npy file, or a Parquet file with columns of ids and vectors.

        Raises SourceError, which names what is wrong and the remedy.
        """
        if isinstance(rows, str | Path):
            named, rows = _read_vectors_file(Path(rows), entity_kind)
            ids = named if ids is None else ids
        matrix = _vector_matrix(rows, entity_kind)
        texts = ids_of(range(len(matrix)) if ids is None else ids, entity_kind)
        if len(texts) != len(matrix):
            raise SourceError(
                f"{len(texts):,} {entity_kind} ids, but {len(matrix):,} {entity_kind} vectors: give one id for each "
                "row, in its order"
            )
        return cls(texts, matrix)

    @property
    def dims(self) -> int:
        """Number of dimensions."""
        return int(self.rows.shape[1])


class NothingKnown(SourceError):
    """No click is of a known user on a known item."""


@dataclass(frozen=True, slots=True, eq=False)
class ClickMatrix:
    """Clicks of users on items: a CSR matrix [users, items] of weights above 0.

    Those that were read from a table with times are in their order within a row (`is_ordered`). `left_out`: number of
    clicks that are not in it, by reason. `times`: microseconds since 1970 of each click, in the order of
    `matrix.indices`, 0 for none. `columns`: names of a table's columns of users, items and times.
    """

    matrix: sp.csr_matrix
    users: Any
    is_ordered: bool = False
    left_out: Mapping[str, int] = field(default_factory=dict)
    times: NDArray[np.int64] | None = None
    columns: tuple[str, str, str] = COLUMNS

    @classmethod
    def of(cls, clicks: Any, users: Any, items: Any) -> Self:
        """Check a scipy matrix [users, items] (or its .npz file), or read a table (a path; `Sources` names columns).

        `users` are the users' ids in the order of the rows (None: the matrix' row numbers, or all users of the table),
        `items` Arrow strings in the order of the columns; a table's clicks on other items are left out. Raises
        SourceError, which names both sides.
        """
        if isinstance(clicks, cls):
            return clicks
        if isinstance(clicks, str | Path) and Path(clicks).suffix != ".npz":
            clicks = Sources(interactions=(str(clicks),))
        if isinstance(clicks, Sources):
            where = ", ".join(clicks.interactions)
            click_matrix = cls.read(read_interactions(clicks, Path.cwd()), where, users, items)
            names = clicks.user_column, clicks.item_column, clicks.timestamp_column
            return replace(click_matrix, columns=names)
        if isinstance(clicks, str | Path):
            try:
                clicks = sp.load_npz(clicks)
            except (OSError, ValueError, KeyError) as error:
                raise SourceError(
                    f"{clicks}: {error}; write it with scipy.sparse.save_npz"
                ) from None
        if not sp.issparse(clicks):
            raise SourceError(
                f"clicks are a scipy sparse matrix, users by items, not a {type(clicks).__name__}"
            )
        matrix = sp.csr_matrix(clicks, dtype=np.float32, copy=True)
        texts = ids_of(range(matrix.shape[0]), "user") if users is None else users
        if matrix.shape != (len(texts), len(items)):
            is_turned = matrix.shape == (len(items), len(texts))
            remedy = "give a row for each user, a column for each item, in the order of their ids"
            raise SourceError(
                f"the clicks are {matrix.shape[0]:,} by {matrix.shape[1]:,}, there are {len(texts):,} users and "
                f"{len(items):,} items: {'it is items by users, give its transpose' if is_turned else remedy}"
            )
        if not np.isfinite(matrix.data).all():
            raise SourceError("the clicks have weights that are no finite numbers: leave those out")
        matrix.sum_duplicates()
        matrix.data[matrix.data < 0] = 0  # a dislike, which no history can say
        left_out = {_NO_CLICK: int(matrix.nnz - matrix.count_nonzero())}
        matrix.eliminate_zeros()
        return cls(matrix, texts, left_out=left_out)

    @classmethod
    def read(cls, batches: Iterable[Interactions], where: str, users: Any, items: Any) -> Self:
        """Read clicks like a night; leave out unknown items, and users that are not in `users` (None: keep all users).

        Raises NothingKnown if no click is left, naming their source `where`.
        """
        columns, numbered = Vocabulary.of(pa.chunked_array([items])), NumberedIds()
        rows: list[NDArray[np.int64]] = []
        times: list[NDArray[np.int64]] = []
        item_ids: list[Any] = []
        assert columns is not None  # noqa: S101 - ids were checked
        for batch in batches:
            numbered.add(batch.users)
            rows.append(columns.find_positions(batch.items.names)[batch.items.codes])
            times.append(batch.times)
            if len(item_ids) < _BATCHES_SHOWN:
                item_ids.append(pc.unique(batch.items.names))
        row, column, time = numbered.codes(), np.concatenate(rows), np.concatenate(times)
        names = numbered.names.cast(pa.string())
        if users is not None:
            user_vocabulary = Vocabulary.of(pa.chunked_array([users]))
            assert user_vocabulary is not None  # noqa: S101
            row, names = user_vocabulary.find_positions(names)[row], users
        is_known = (row >= 0) & (column >= 0)
        if not is_known.any():
            item_names = pa.concat_arrays([batch_ids.cast(pa.string()) for batch_ids in item_ids])
            remedy = (
                _zeros_remedy("item", items, item_names)
                or _zeros_remedy("user", users, numbered.names.cast(pa.string()))
                or _ids_remedy(users, items)
            )
            raise NothingKnown(
                f"{where}: not one click is of a known user on a known item; {remedy}"
            )
        click_matrix = cls.in_order(
            row[is_known], column[is_known], time[is_known], names, len(items), keeps_times=True
        )
        left_out = {**click_matrix.left_out, _UNKNOWN: int((~is_known).sum())}
        return replace(click_matrix, left_out=left_out)

    @classmethod
    def in_order(
        cls, row: NDArray[np.int64], column: NDArray[np.int64], time: NDArray[Any], users: Any, items: int,
        *, keeps_times: bool = False,
    ) -> Self:  # fmt: skip
        """Order clicks by time, and keep the latest of each pair; `users` are Arrow strings.

        Times are kept only if they are microseconds since 1970.
        """
        order = np.lexsort((time, row))[::-1]
        pairs = row[order] * items + column[order]
        latest = order[np.sort(np.unique(pairs, return_index=True)[1])][::-1]
        indptr = np.searchsorted(row[latest], np.arange(len(users) + 1))
        ones = np.ones(len(latest), np.float32)
        matrix = sp.csr_matrix((ones, column[latest], indptr), (len(users), items))
        has_times = bool(time.any())
        times = time[latest] if has_times and keeps_times else None
        return cls(matrix, users, has_times, {_REPEAT: len(row) - len(latest)}, times)

    @property
    def usual_weight(self) -> float:
        """Median weight of a click; 1 without clicks."""
        return float(np.median(self.matrix.data)) if self.matrix.nnz else 1.0

    @property
    def is_weighted(self) -> bool:
        """True if clicks have different weights."""
        return bool(self.matrix.nnz) and self.matrix.data.min() != self.matrix.data.max()

    def sample(
        self,
        max_users: int,
        min_items: int,
        rng: np.random.Generator,
        are_usable: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.int64]:
        """Return the rows of at most `max_users` usable users with at least `min_items` items, ascending."""
        has_enough = np.diff(self.matrix.indptr) >= min_items
        enough = np.flatnonzero(has_enough if are_usable is None else has_enough & are_usable)
        return np.sort(rng.choice(enough, min(max_users, len(enough)), replace=False))

    def histories(self, rows: NDArray[np.int64], longest: int) -> Histories:
        """Return the histories of some users, the last `longest` items of each."""
        all_histories = Histories(
            self.matrix.indptr.astype(np.int64), self.matrix.indices.astype(np.int64)
        )
        parts = [
            all_histories.indices[all_histories.indptr[row] : all_histories.indptr[row + 1]][
                -longest:
            ]
            for row in rows
        ]
        return Histories.of(parts)

    def write(self, path: Path, items: Any, columns: tuple[str, str, str] = COLUMNS) -> None:
        """Write a Parquet file with a row for each click: `columns` of users, items and, if there are any, times."""
        user_column, item_column, timestamp_column = columns
        fields = [(user_column, pa.string()), (item_column, pa.string())]
        has_times = self.times is not None and bool(timestamp_column)
        schema = pa.schema([*fields, (timestamp_column, _TIME)] if has_times else fields)
        with pq.ParquetWriter(path, schema) as file:
            step = 100_000
            for start in range(0, self.matrix.shape[0], step):
                part = self.matrix[start : start + step].tocoo()
                order = np.argsort(part.row, kind="stable")
                users = self.users.take(pa.array(part.row[order] + start))
                values = [users, items.take(pa.array(part.col[order]))]
                if self.times is not None and has_times:
                    first = int(self.matrix.indptr[start])
                    times = self.times[first : first + part.nnz]
                    values.append(pa.array(times, pa.int64(), mask=times == 0).cast(_TIME))
                file.write_table(pa.table(values, schema=schema))


def _zeros_remedy(entity_kind: str, ids: Any, clicked_ids: Any) -> str:
    """Return the remedy for ids that differ by leading zeros alone, with an example of both forms; else nothing."""
    if ids is None or not len(clicked_ids):
        return ""
    bare_ids, bare_clicked = (pc.utf8_ltrim(texts, "0") for texts in (ids, clicked_ids))
    places = pc.index_in(bare_clicked, value_set=bare_ids)
    if places.null_count == len(places):
        return ""
    clicked_row = int(np.flatnonzero(np.asarray(places.is_valid()))[0])
    id_text, clicked_text = (
        ids[places[clicked_row].as_py()].as_py(),
        clicked_ids[clicked_row].as_py(),
    )
    if id_text == clicked_text:
        return ""
    return (
        f"the {entity_kind} that is {clicked_text!r} there is {id_text!r} among the {entity_kind} ids: zeros in front "
        "are part of an id, so write both as texts of one form (integers have no zeros in front)"
    )


def _ids_remedy(users: Any, items: Any) -> str:
    """Return the remedy for clicks without a known id: most often the model's rows were given no ids."""
    unnamed = [
        f"{entity_kind}_ids (--{entity_kind}-ids)"
        for entity_kind, ids in (("user", users), ("item", items))
        if ids is not None and len(ids) and ids[len(ids) - 1].as_py() == str(len(ids) - 1)
    ]
    if not unnamed:
        return "are the ids the same?"
    return f"the model's rows are called by their numbers: give {' and '.join(unnamed)}, one id a line in their order"


def ids_of(ids: Any, entity_kind: str) -> Any:
    """Convert ids (texts or integers, or the path of a file with one a line) to Arrow strings; raise SourceError."""
    if isinstance(ids, str | Path):
        path = Path(ids)
        try:
            # Only a line break ends a line: `splitlines` knows eight more signs, which ids may hold.
            lines = path.read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
            ids = [line.strip(BLANKS) for line in lines]
        except (OSError, UnicodeDecodeError) as error:
            raise SourceError(
                f"{entity_kind} ids {path}: {error}; it holds one id a line, in UTF-8"
            ) from None
    values = ids.tolist() if isinstance(ids, np.ndarray) else ids
    try:
        column = (
            values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(list(values))
        )
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError) as error:
        raise SourceError(
            f"{entity_kind} ids: {error}; ids are texts or integers, all of one kind"
        ) from None
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if not len(column):
        raise SourceError(f"there is no {entity_kind}: give at least one")
    id_column, invalid_mask_by_reason = read_ids(column, Path("the ids given"), entity_kind)
    if invalid_mask_by_reason:
        reason, rows = next(iter(invalid_mask_by_reason.items()))
        raise SourceError(
            f"{entity_kind} ids: {reason}, first in row {int(rows.argmax())}{unusable.remedy(reason)}"
        )
    texts = id_column.texts()
    repeated = repeats_in(texts)
    if len(repeated):
        at = int(repeated[0])
        raise SourceError(
            f"{entity_kind} id {texts[at].as_py()!r} is there twice, the second time in row {at}: keep one row for "
            "each",
            row=at,
        )
    return texts


def _read_vectors_file(path: Path, entity_kind: str) -> tuple[Any, Any]:
    """Return (ids if the file has them, rows)."""
    try:
        if path.suffix == ".npy":
            return None, np.load(path, allow_pickle=False)
        if path.suffix != ".parquet":
            raise SourceError(f"{entity_kind} vectors {path}: a .npy or a .parquet file is read")
        column_names = pq.read_schema(path).names
        if len(set(column_names)) < len(column_names):
            raise SourceError(
                f"{entity_kind} vectors {path} has two columns of one name among {', '.join(column_names)}: leave one"
            )
        table = pq.read_table(path)
    except FileNotFoundError:
        raise SourceError(f"{entity_kind} vectors: there is no file {path}") from None
    except (OSError, ValueError, pa.ArrowInvalid) as error:
        if "pickle" in str(error).lower():  # numpy says how it would be read all the same
            raise SourceError(
                f"{entity_kind} vectors {path} are pickled, and would run whatever code is in them: save numbers, not "
                "objects"
            ) from None
        raise SourceError(f"{entity_kind} vectors {path}: {error}") from None
    names = [arrow_field.name for arrow_field in table.schema if _is_list(arrow_field.type)]
    id_columns = [name for name in table.column_names if name not in names]
    if len(names) != 1 or len(id_columns) > 1:
        raise SourceError(
            f"{entity_kind} vectors {path} has {', '.join(table.column_names)}: it wants one of ids and one of "
            "lists of numbers"
        )
    ids = table.column(id_columns[0]) if id_columns else None
    return ids, table.column(names[0])


def _vector_matrix(rows: Any, entity_kind: str) -> NDArray[np.float32]:
    if isinstance(rows, pa.Array | pa.ChunkedArray):
        if isinstance(rows, pa.ChunkedArray):
            rows = rows.combine_chunks()
        if not _is_list(rows.type):
            raise SourceError(f"{entity_kind} vectors are {rows.type}: lists of numbers are needed")
        widths = pc.list_value_length(rows).unique().to_pylist()
        if len(widths) > 1 or None in widths:
            raise SourceError(
                f"{entity_kind} vectors have {widths} numbers: all rows need as many, and none may be missing"
            )
        values = pc.list_flatten(rows)
        if values.null_count:
            row = int(np.flatnonzero(np.asarray(values.is_null()))[0]) // widths[0]
            raise SourceError(
                f"a number is missing in {entity_kind} vectors, first in row {row:,}: all numbers of a vector are "
                "needed",
                row=row,
            )
        flat = values.to_numpy(zero_copy_only=False)
        rows = flat.reshape(len(rows), -1)
    if hasattr(rows, "detach"):  # a tensor of torch
        rows = rows.detach().cpu().numpy()
    try:
        matrix = np.asarray(rows)
    except ValueError as error:
        raise SourceError(
            f"{entity_kind} vectors: {error}; all rows need as many numbers"
        ) from None
    if matrix.dtype == object or matrix.ndim != 2 or 0 in matrix.shape:
        raise SourceError(
            f"{entity_kind} vectors are a matrix of numbers, a row for each {entity_kind}, not {matrix.dtype} "
            f"{list(matrix.shape)}"
        )
    if matrix.dtype == np.float16:
        raise SourceError(
            f"{entity_kind} vectors are float16, whose rounding lists would show: give the float32 that they were "
            "fitted in"
        )
    if not np.issubdtype(matrix.dtype, np.number) or np.iscomplexobj(matrix):
        raise SourceError(f"{entity_kind} vectors are {matrix.dtype}: real numbers are needed")
    with np.errstate(
        over="ignore"
    ):  # what float32 cannot hold becomes infinite, and is refused as that
        matrix = np.ascontiguousarray(matrix, np.float32)
    finite = np.isfinite(matrix).all(axis=1)
    if not finite.all():
        nonfinite_rows = np.flatnonzero(~finite)
        raise SourceError(
            f"{len(nonfinite_rows):,} {entity_kind} vectors are not finite (NaN or infinite), the first in row "
            f"{nonfinite_rows[0]:,}: fit the model "
            "to its end, or leave these rows and their ids out",
            row=int(nonfinite_rows[0]),
        )
    return matrix


def _is_list(kind: Any) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_list_type(kind) for is_list_type in lists)


def name_row(subject: str, ids: Any, rows: NDArray[np.int64], row: int) -> str:
    """Return the name of a row of a batch, whose `rows` are places of ids (Arrow strings)."""
    return f"{subject} {ids[int(rows[row])].as_py()!r}"


def feature_columns(feature_source: Any, ids: Any, entity_kind: str) -> dict[str, Any]:
    """Return columns by name, each with a row for each id, in their order.

    `feature_source` is a mapping of arrays, which is used unchanged, or a table: of Arrow, pandas or polars, or the
    path of a Parquet or CSV file. A table with a column of ids, named `entity_kind` ("item" or "user"), may have its
    rows in any order, and more of them; a table whose ids are in a column of another name, in another order, is
    refused. Without `ids` the rows keep their order. Raises SourceError, naming the remedy.
    """
    if feature_source is None:
        return {}
    if isinstance(feature_source, Mapping):
        return dict(feature_source)
    table = feature_table(feature_source, f"{entity_kind}_features", entity_kind)
    if ids is None:
        pass  # of entities that nobody names, the values are examples
    elif entity_kind in table.column_names:
        table = _rows_of_ids(table, ids, entity_kind)
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
        name: _column_values(table[name].combine_chunks())
        for name in table.column_names
        if name != entity_kind
    }


def feature_table(table_source: Any, setting: str, id_column: str) -> Any:
    """Return the Arrow table of an argument, or read it from a path; raise SourceError with the argument's name.

    The column of ids in a CSV file is read as texts: "007" stays "007".
    """
    try:
        if isinstance(table_source, str | Path):
            path = Path(table_source)
            if not path.exists():
                raise SourceError(f"{setting}: there is no file {path}")
            is_csv = path.suffix.lower() == ".csv"
            as_texts = pa.csv.ConvertOptions(column_types={id_column: pa.string()})
            return (
                pa.csv.read_csv(path, convert_options=as_texts) if is_csv else pq.read_table(path)
            )
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


def _rows_of_ids(table: Any, ids: Any, entity_kind: str) -> Any:
    """Return the rows of the ids, in their order."""
    texts = ids_of(table[entity_kind], entity_kind)
    row_indices = pc.index_in(ids, value_set=texts)
    if row_indices.null_count:
        missing = ids.filter(pc.is_null(row_indices))[0].as_py()
        remedy = (
            _zeros_remedy(entity_kind, ids, texts) if row_indices.null_count == len(ids) else ""
        )
        raise SourceError(
            f"{entity_kind}_features has no row of {row_indices.null_count:,} {entity_kind} ids, {missing!r} among "
            f"them: {remedy or 'give one for each'}"
        )
    return table.take(row_indices)


def _misnamed_ids(table: Any, ids: Any) -> str | None:
    """Return the name of a column that holds at least half of the ids, in another order."""
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


def _column_values(column: Any) -> Any:
    """Convert numbers to numpy, a list column to a matrix; leave texts and other types in Arrow."""
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

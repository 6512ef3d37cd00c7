"""Readers of interactions and feature tables: Parquet, CSV and lines of ids, in bounded batches."""

import errno
import gzip
import re
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray

from cache.config.night import Sources
from cache.errors import SourceError, StoreError
from precompute.sources.columns import (
    Ids,
    UnusableMaskByReason,
    as_rows,
    demand_columns,
    demand_once,
    is_text,
    plain_batch,
    plain_type,
    read_ids,
    without_codes,
)
from precompute.sources.csv_files import (
    BLANKS,
    NO_COLUMN_NAMES,
    ROW_IN_QUOTES,
    CsvFile,
    is_like_a_row,
)
from precompute.sources.files import (
    NOT_GZIP,
    UTF_8_MARK,
    SourceFile,
    looks_like_rows,
    name_of_sign,
    readable,
    source_files,
    unreadable_by_name,
    unreadable_by_text,
)
from precompute.sources.id_forms import OddIds
from precompute.sources.repeated_rows import RepeatedRows
from precompute.sources.times import MICROSECONDS, TimeScale, are_positive, microseconds
from precompute.sources.unusable import (
    BREAK,
    COLUMNS,
    EVENTS,
    HEADER,
    Case,
    UnusableRows,
    format_case_value,
)

INTERACTIONS = "interactions"
"""Name of the interactions in reports."""

EVENT_ROWS = f"{EVENTS}.{INTERACTIONS}"
"""Name in reports of the interactions that events brought."""

ColumnsOfLists = Mapping[str, Sequence[str]]
"""Names of the columns that a table may have in place of a list of their values, by the list's name."""

NO_LISTS: Final[ColumnsOfLists] = MappingProxyType({})

BATCH_ROWS = 1 << 19
"""Rows of a batch at most."""

BATCH_BYTES = 128 << 20
"""Bytes of a batch of features at most."""

READ_BYTES = 1 << 20
"""Bytes of a feature table that are read at once."""

LINES_LOOKED_AT = 1_000
"""Lines of a text file that are checked before it is read as lines of ids."""

TABLE_FIELDS = range(3, 9)
"""Numbers of fields that tables of interactions have."""

_NUMBER_OR_TIME = re.compile(rb"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?$|\d{4}-\d{2}-\d{2}|\d{2}:\d{2}")
KINDS_OF_IDS = 20
"""Words before a colon up to which they may be kinds of ids."""
_NUMBER = re.compile(rb"[+-]?\d+(\.\d*)?")
_NAMES_OF_LINES = re.compile(
    rb"(user|customer|visitor|session)(_?id)?s? (item|product|movie|article)(_?id)?s?( .*)?",
    re.IGNORECASE,
)
"""Pattern of a first line of lines of ids that names its columns."""
_COMMENTS = (b"# ", b"% ", b"// ")
"""Prefixes of comment lines at the start of a text file, as in those of graphs and matrices."""

INT96_UNIT = "us"
"""Unit of Spark's old times: in nanoseconds they wrap around beyond the year 2262, to 1816."""

TEXT_LENGTH_BYTES = 4
"""Bytes in a Parquet file for the length of each text outside a dictionary."""

_LIKE_NONE = (
    r"^(\(not set\)|\(other\)|-+|\?+|#{3,}|nil|Nil|-1|unknown|Unknown|anonymous|Anonymous)$"
)
"""Pattern of ids that programs write for a missing one, but that may also be names."""
LIKE_NONE_SHARE = 0.01
LIKE_NONE_NAMED = 5
"""Such ids that are counted, and the share of the first rows from which one is named."""

_UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError, pa.ArrowException)
_PARQUET_MAGIC = b"PAR1"
_SNIFFED_BYTES = 1 << 16
_CUT_OFF = re.compile("Truncated compressed stream")
"""Message of Arrow for a compressed file without its end."""
_NO_GZIP = re.compile("incorrect header check|Not a gzipped file")
"""Messages of readers for a file that ends in .gz but is not gzip."""

_LASTING_ERRNOS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG}
)
"""File system errors that a retry meets again."""


@dataclass(frozen=True, slots=True, eq=False)
class Interactions:
    """Batch of interactions: `users`, `items` and `times` int64 microseconds since 1970 (0 = not given).

    `positions` int64 are those of events in their stream; None for the team's own files.
    """

    users: Ids
    items: Ids
    times: NDArray[np.int64]
    positions: NDArray[np.int64] | None = None

    def only(self, rows: NDArray[np.bool_]) -> Self:
        """Return some of the rows."""
        positions = None if self.positions is None else self.positions[rows]
        return type(self)(self.users.only(rows), self.items.only(rows), self.times[rows], positions)


def read_interactions(
    sources: Sources,
    base: Path,
    *,
    cutoff_at: datetime | None = None,
    late: Callable[[Interactions], None] = lambda _late: None,
    unusable: UnusableRows | None = None,
    skip: int = 0,
    files: Sequence[SourceFile] | None = None,
) -> Generator[Interactions, None, None]:
    """Yield batches of all interaction files; with `cutoff_at`, only strictly older rows and those without a time.

    The `files` are those that `sources` name, unless they are listed here; the first `skip`, or all, are left out.
    `late` is called with the other rows. Rows of weight 0 or less are not interactions and are left out; so are
    unusable rows, which are counted in `unusable`; remarks on odd ids and repeated rows go there, too, at the end or
    when the iterator is closed. Raises SourceError naming file and column, or if no row can be used.
    """
    look = None if unusable is None else _OddRows(sources, unusable)
    cut = None if cutoff_at is None else int(cutoff_at.timestamp() * MICROSECONDS)
    unusable = UnusableRows() if unusable is None else unusable
    named = source_files(sources.interactions, base) if files is None else files
    paths, alike = named[skip:], SameColumns(sources)
    if paths and (skipped := named[:skip]):
        alike.add(skipped[0], column_names(skipped[0], sources) or ())
    try:
        for path in paths:
            remark = partial(unusable.remark, INTERACTIONS)
            clock = TimeScale(path, sources.timestamp_column, remark)
            with reading(path):
                for columns, titles in _batches(path, sources, unusable):
                    if len(columns):
                        alike.add(path, columns.schema.names)
                    batch = _usable(columns, titles, path, sources, unusable, clock)
                    if look is not None:
                        look.add(path, batch)
                    if cut is not None and (is_late := batch.times >= cut).any():
                        late(batch.only(is_late))
                        yield batch.only(~is_late)
                    else:
                        yield batch
    finally:
        if look is not None:
            look.note_remarks()
    if not skip:
        unusable.demand_some(INTERACTIONS, ", ".join(path.name for path in paths[:3]))


class _OddRows:
    """Collector of remarks on odd ids and on repeated rows, over all rows of all files; they go into `unusable`.

    An erased user's id must not be in a report, so no hidden id is named.
    """

    def __init__(self, sources: Sources, unusable: UnusableRows) -> None:
        self._unusable, self._repeated = unusable, RepeatedRows()
        self._columns = (sources.user_column, sources.item_column)
        self._odd_ids = tuple(OddIds(column, unusable.hidden) for column in self._columns)
        self._path: SourceFile | None = None

    def add(self, path: SourceFile, batch: Interactions) -> None:
        """Add the next rows of a file."""
        if not len(batch.times):
            return
        self._repeated.add(path, batch.users, batch.items, batch.times)
        is_first, self._path = path != self._path, path
        for ids, odd_ids, column in zip(
            (batch.users, batch.items), self._odd_ids, self._columns, strict=True
        ):
            odd_ids.add(ids)
            if is_first:
                self._remark_on_ids_like_none(ids, column)

    def note_remarks(self) -> None:
        """Hand the remarks over."""
        for odd_ids in self._odd_ids:
            for remark, named in odd_ids.remarks():
                self._unusable.remark(INTERACTIONS, remark, named)
        for remark in self._repeated.remarks():
            self._unusable.remark(INTERACTIONS, remark)

    def _remark_on_ids_like_none(self, ids: Ids, column: str) -> None:
        like_none = np.flatnonzero(as_rows(pc.match_substring_regex(ids.names, _LIKE_NONE)))
        for code in like_none[:LIKE_NONE_NAMED].tolist():
            row_count = int((ids.codes == code).sum())
            if row_count >= LIKE_NONE_SHARE * len(ids.codes):
                self._unusable.remark(
                    INTERACTIONS,
                    f"column {column!r} has the id {ids.names[code].as_py()!r} in {row_count:,} of its first "
                    f"{len(ids.codes):,} rows: if it stands for none, leave these rows out",
                )


def _batches(
    path: SourceFile, sources: Sources, unusable: UnusableRows
) -> Iterator[tuple[Any, Sequence[str]]]:
    """Yield (record batch of the columns that settings name, names of all columns of the file)."""
    match format_of(path, sources):
        case "lines":
            return read_lines(path, sources)
        case "csv":
            return csv_batches(path, sources, unusable)
    return parquet_batches(path, sources)


def _usable(
    batch: Any,
    titles: Sequence[str],
    path: SourceFile,
    sources: Sources,
    unusable: UnusableRows,
    clock: TimeScale,
) -> Interactions:
    """Return ids and times of a batch without unusable rows, which are noted."""
    names = batch.schema.names
    users, items, weight = sources.user_column, sources.item_column, sources.weight_column
    demand_columns(names, (users, items), path)
    bad_mask_by_reason: UnusableMaskByReason = {}
    unusable.looked_at(INTERACTIONS, len(batch))
    if weight in names:
        positive, bad_mask_by_reason = are_positive(batch.column(weight), path, sources)
        keep_mask = (
            positive | np.logical_or.reduce(list(bad_mask_by_reason.values()))
            if bad_mask_by_reason
            else positive
        )
        if not keep_mask.all():
            batch, bad_mask_by_reason = (
                batch.filter(pa.array(keep_mask)),
                {reason: rows[keep_mask] for reason, rows in bad_mask_by_reason.items()},
            )
    times, no_time = np.zeros(len(batch), np.int64), UnusableMaskByReason()
    if (name := sources.timestamp_column) in names:
        times, no_time = microseconds(batch.column(name), path, name, clock)
    user_ids, bad_users = read_ids(batch.column(users), path, users)
    item_ids, bad_items = read_ids(batch.column(items), path, items)
    interactions = Interactions(user_ids, item_ids, times)
    header_mask_by_reason = _header_again(interactions, batch, titles, path, sources)
    if not (
        bad_mask_by_reason := {
            **header_mask_by_reason,
            **bad_users,
            **bad_items,
            **no_time,
            **bad_mask_by_reason,
        }
    ):
        return interactions

    def case(row: int) -> Case:
        ids = (format_case_value(_value(batch.column(column), row)) for column in (users, items))
        return {**dict(zip(("user", "item"), ids, strict=True)), "file": path.name}

    return interactions.only(~unusable.note_rows(INTERACTIONS, bad_mask_by_reason, case))


def _header_again(
    interactions: Interactions,
    batch: Any,
    titles: Sequence[str],
    path: SourceFile,
    sources: Sources,
) -> UnusableMaskByReason:
    """Return a mask of rows that repeat the column names, in any case, as in joined files.

    Raises SourceError for one with the names in another order: the rows below it have other columns.
    """
    file_titles = {title.strip(BLANKS).lower() for title in titles}
    is_header = np.ones(len(interactions.times), np.bool_)
    for ids in (interactions.items, interactions.users):  # items are fewer
        if not (codes := _codes_of_titles(ids.names, file_titles)).size:
            return {}
        is_header &= np.isin(ids.codes, codes)
    columns = [name for name in _column_names(sources) if name in batch.schema.names]
    expected = [name.strip(BLANKS).lower() for name in columns]
    other_header: list[str] = []
    for row in np.flatnonzero(is_header).tolist():
        cells = [str(format_case_value(_value(batch.column(name), row))) for name in columns]
        names = [cell.strip(BLANKS).lower() for cell in cells]
        if names != expected and len(file_titles.intersection(names)) == len(names):
            other_header = names
        is_header[row] = names[:2] == expected[:2]
    if other_header:
        _refuse_other_header(titles, other_header, path, sources)
    return {HEADER: is_header} if is_header.any() else {}


def _codes_of_titles(names: Any, titles: set[str]) -> NDArray[np.intp]:
    """Return the positions of ids that are a column's name, in any case."""
    lengths = pa.array(sorted({len(title.encode()) for title in titles}), pa.int32())
    as_long = np.flatnonzero(as_rows(pc.is_in(pc.binary_length(names), value_set=lengths)))
    texts = pc.ascii_lower(names.take(pa.array(as_long)))
    return as_long[as_rows(pc.is_in(texts, value_set=pa.array(sorted(titles), pa.string())))]


def _refuse_other_header(
    titles: Sequence[str], cells: Sequence[str], path: SourceFile, sources: Sources
) -> None:
    """Raise SourceError for a row of the column names in another order; in CSV, if a line is such a row."""
    place = "one of its rows"
    if format_of(path, sources) == "csv":
        with CsvFile.opened(path, sources) as file:
            if (found := file.find_line_of_names()) is None:
                return
        line, cells = found
        place = f"line {line}"
    raise SourceError(
        f"{path}, {place} is another header: {','.join(cells)}: the rows below it have their columns in another order "
        f"than {','.join(titles)}: write them into a file of their own",
        path=str(path),
    )


def _value(column: Any, row: int) -> Any:
    """Return a row's value as a Python object: bytes of a text, which may not be UTF-8."""
    value = column[row : row + 1]
    if pa.types.is_dictionary(value.type):
        value = value.dictionary_decode()
    return (value.cast(pa.large_binary()) if is_text(value.type) else value)[0].as_py()


def read_features(
    path: SourceFile,
    id_column: str,
    columns: Sequence[str],
    *,
    source: str = "features",
    unusable: UnusableRows | None = None,
    lists: ColumnsOfLists = NO_LISTS,
) -> Iterator[tuple[Ids, dict[str, Any]]]:
    """Yield batches (ids, {column: Arrow array}) of a Parquet feature table; raise SourceError for a missing column.

    A column that the table lacks is made of those that `lists` names for it. Rows without a usable id are left out, and
    noted in `unusable` under `source`; so are remarks on odd ids.
    """
    unusable = UnusableRows() if unusable is None else unusable
    odd_ids = OddIds(id_column, unusable.hidden)
    # Without a buffer a whole row group of a column is read at once.
    opened = partial(
        pa.parquet.ParquetFile, buffer_size=READ_BYTES, coerce_int96_timestamp_unit=INT96_UNIT
    )
    with reading(path), readable(path) as raw, opened(raw) as file:
        names = {name: _columns_of(name, file.schema_arrow.names, lists) for name in columns}
        file_columns = [id_column, *chain.from_iterable(names.values())]
        _demand_features(file.schema_arrow.names, file_columns, path)
        for batch in file.iter_batches(
            _rows_at_once(file.metadata), columns=list(dict.fromkeys(file_columns))
        ):
            batch = plain_batch(batch)
            unusable.looked_at(source, len(batch))
            id_values = batch.column(id_column)
            ids, bad_mask_by_reason = read_ids(id_values, path, id_column)
            if bad_mask_by_reason:

                def case(row: int, id_values: Any = id_values) -> dict[str, str | None]:
                    return {"id": format_case_value(_value(id_values, row)), "file": path.name}

                is_usable = ~unusable.note_rows(source, bad_mask_by_reason, case)
                ids, batch = ids.only(is_usable), batch.filter(pa.array(is_usable))
            odd_ids.add(ids)
            yield (
                ids,
                {
                    name: _packed([without_codes(batch.column(part)) for part in parts])
                    for name, parts in names.items()
                },
            )
    for remark, named in odd_ids.remarks():
        unusable.remark(source, f"{path.name}: {remark}", named)
    unusable.demand_some(source, path.name)


def _rows_at_once(metadata: Any) -> int:
    """Return the rows of a batch, at most BATCH_ROWS and about BATCH_BYTES."""
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    row_bytes: int = sum(group.total_byte_size for group in groups) // max(1, metadata.num_rows)
    return max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, row_bytes)))


def feature_schema(
    path: SourceFile, columns: Sequence[str] = (), lists: ColumnsOfLists = NO_LISTS
) -> Any:
    """Return the Arrow schema of a Parquet feature table, in the types read; raise SourceError for a missing column.

    It has those of `columns` that `read_features` makes of others as well.
    """
    with reading(path), readable(path) as raw:
        schema = pa.parquet.read_schema(raw)
    names = {name: _columns_of(name, schema.names, lists) for name in columns}
    _demand_features(schema.names, list(chain.from_iterable(names.values())), path)
    fields = [field.with_type(plain_type(_value_type(field.type))) for field in schema]
    types = {field.name: field.type for field in fields}
    for name, parts in names.items():
        if name not in types:
            try:
                kind = _packed([pa.array([], types[part]) for part in parts]).type
            except pa.ArrowException as error:
                raise SourceError(
                    f"{path}: columns {', '.join(parts)} are read as one list {name!r}, and are not all numbers, or "
                    f"all texts: {error}",
                    column=name,
                ) from None
            fields.append(pa.field(name, kind))
    return pa.schema(fields)


def _columns_of(name: str, file_columns: Sequence[str], lists: ColumnsOfLists) -> Sequence[str]:
    """Return the columns of a table that a feature is read from: its own, else those that its list is made of."""
    parts = lists.get(name, ())
    has_part = any(part in file_columns for part in parts)
    return (name,) if name in file_columns or not has_part else parts


def _packed(parts: Sequence[Any]) -> Any:
    """Return one column as it is, several as a column of lists: of texts, whole numbers or float64."""
    if len(parts) == 1:
        return parts[0]
    kinds = [part.type for part in parts]
    kind = pa.float64()
    if all(map(is_text, kinds)):
        kind = pa.string()
    elif all(pa.types.is_integer(kind) or pa.types.is_boolean(kind) for kind in kinds):
        kind = pa.int64()
    elif any(map(is_text, kinds)):
        raise pa.ArrowInvalid(f"they are {', '.join(sorted(set(map(str, kinds))))}")
    values = pa.concat_arrays([part.cast(kind, safe=kind != pa.float64()) for part in parts])
    places = np.arange(len(values)).reshape(len(parts), -1).T.ravel()
    return pa.FixedSizeListArray.from_arrays(values.take(pa.array(places)), len(parts))


def _demand_features(file_columns: Sequence[str], columns: Sequence[str], path: SourceFile) -> None:
    """Raise SourceError for a column that is missing or repeated."""
    demand_columns(file_columns, columns, path)
    for name in columns:
        demand_once(file_columns, name, path)


def _value_type(kind: Any) -> Any:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def row_count(path: SourceFile) -> int:
    """Return the number of rows of a Parquet file, from its metadata."""
    with reading(path), readable(path) as raw:
        rows: int = pa.parquet.read_metadata(raw).num_rows
    return rows


@contextmanager
def reading(path: SourceFile) -> Iterator[None]:
    """Translate the errors of file readers to SourceError or StoreError."""
    try:
        yield
    except _UNREADABLE as error:
        if _may_pass(error):
            raise StoreError(f"cannot read {path} now: {error}; run the step again") from error
        match error:
            case UnicodeDecodeError():
                remedy = "it is not UTF-8; convert it, e.g. with iconv -t utf-8"
            case _ if isinstance(error, EOFError) or _CUT_OFF.search(str(error)):
                remedy = "it is cut off; copy it again"
            case _ if _NO_GZIP.search(str(error)):
                remedy = f"it {NOT_GZIP}"
            case zlib.error() | gzip.BadGzipFile():
                remedy = "its compressed data is damaged; copy it again"
            case OSError():
                remedy = "is it whole, and may this user read it?"
            case _:
                remedy = _remedy_by_content(path)
        raise SourceError(f"cannot read {path}: {error} ({remedy})", path=str(path)) from error


def _remedy_by_content(path: SourceFile) -> str:
    """Return what to do about a file that its reader refused, by its name and first bytes."""
    try:
        with path.open("rb") as raw:
            head = raw.read(_SNIFFED_BYTES)
    except (*_UNREADABLE, StoreError):
        head = _PARQUET_MAGIC
    is_parquet = path.suffix.lower() in (".parquet", ".pq")
    if is_parquet and not head.startswith(_PARQUET_MAGIC):
        if not head:
            return "it is empty; copy it again, or remove it"
        if reason := unreadable_by_text(head):
            return f"it {reason}"
        if looks_like_rows(head) is not None:
            return "it looks like rows of text: rename it to end in .csv"
    return "is it whole, and of the format that its name or sources.format says?"


def _may_pass(error: Exception) -> bool:
    """True if a disk or a network failed (EIO, a stale NFS handle), not the file; Arrow's own errors have no number."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    return (
        isinstance(error, OSError)
        and error.errno is not None
        and error.errno not in _LASTING_ERRNOS
    )


def format_of(path: SourceFile, sources: Sources) -> str:
    if sources.format != "auto":
        return sources.format
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    match suffixes[-1] if suffixes else "":
        case ".parquet" | ".pq":
            return "parquet"
        case ".csv" | ".tsv":
            return "csv"
        case ".txt":
            return "lines"
    if reason := unreadable_by_name(path.name):
        raise SourceError(f"cannot read {path}: {reason}")
    raise SourceError(
        f"cannot tell the format of {path}; set sources.format to parquet, csv or lines"
    )


def column_names(path: SourceFile, sources: Sources) -> list[str] | None:
    """Return the names of a file's columns; None for lines of ids, which have none."""
    with reading(path):
        match format_of(path, sources):
            case "lines":
                return None
            case "csv":
                with CsvFile.opened(path, sources) as file:
                    return file.names
        with readable(path) as raw:
            return list(pa.parquet.read_schema(raw).names)


def named_columns(sources: Sources) -> list[str]:
    """Return the columns of times and weights that settings name explicitly, which must exist."""
    usual = Sources()
    unnamed = ("", usual.timestamp_column, usual.weight_column)
    named = (sources.timestamp_column, sources.weight_column)
    return [name for name in named if name not in unnamed]


def demand_named(file_columns: Sequence[str], sources: Sources, path: SourceFile) -> None:
    """Raise SourceError, naming the setting, for a required column that is missing or repeated."""
    needed = [sources.user_column, sources.item_column, *named_columns(sources)]
    settings = ("user_column", "item_column", "timestamp_column", "weight_column")
    is_csv = format_of(path, sources) == "csv"
    if is_csv and is_like_a_row(file_columns):
        is_lacking = any(name.strip(BLANKS) not in file_columns for name in needed)
        if is_lacking or (is_like_a_row(needed) and not _are_counted(file_columns)):
            raise SourceError(f"{path} {NO_COLUMN_NAMES}")
    otherwise = ", or put a line of column names above if there is none" if is_csv else ""
    if is_csv and "" in file_columns:
        otherwise += "; is the first line a title? Leave it out"
    for setting in settings:
        name = getattr(sources, setting)
        title = name.strip(BLANKS) if is_csv else name
        if name in needed and title not in file_columns:
            columns_text = (
                ", ".join(map(repr, file_columns))
                if any(map(_is_padded, file_columns))
                else ", ".join(file_columns)
            )
            raise SourceError(
                f"{path} has no column {name!r}; it has {columns_text}: name it by {setting}{otherwise}",
                column=name,
            )
        demand_once(file_columns, title, path)


def _are_counted(file_columns: Sequence[str]) -> bool:
    """True for the names 0, 1, 2 ..., which pandas gives to columns without one."""
    return list(file_columns) == [str(number) for number in range(len(file_columns))]


def _is_padded(name: str) -> bool:
    return name != name.strip()


def demand_same_columns(paths: Sequence[SourceFile], sources: Sources) -> None:
    """Raise SourceError naming a file that lacks a column of times or weights which another one has."""
    alike = SameColumns(sources)
    for path in paths:
        alike.add(path, column_names(path, sources) or ())


class SameColumns:
    """Check that either all files have a column of times or weights, or none has."""

    def __init__(self, sources: Sources) -> None:
        self._names = [*filter(None, (sources.timestamp_column, sources.weight_column))]
        self._first: tuple[SourceFile, frozenset[str]] | None = None

    def add(self, path: SourceFile, file_columns: Sequence[str]) -> None:
        """Add the next file; raise SourceError if its columns of times and weights differ from the first one's."""
        columns = frozenset(
            name
            for name in self._names
            if name.strip(BLANKS) in file_columns or name in file_columns
        )
        if self._first is None:
            self._first = path, columns
        first, first_columns = self._first
        for name in self._names:
            if (name in columns) == (name in first_columns):
                continue
            lacking, having = (path, first) if name in first_columns else (first, path)
            setting = "timestamp_column" if name == self._names[0] else "weight_column"
            raise SourceError(
                f"{lacking} has no column {name!r}, {having} has one: its rows would count as the oldest, or as "
                f'positive: give it the column, or set [sources] {setting} = "" to read it from no file',
                column=name,
            )


def _column_names(sources: Sources) -> list[str]:
    """Return the names of the columns that are read if they exist."""
    optional = (sources.timestamp_column, sources.weight_column)
    return [sources.user_column, sources.item_column, *filter(None, optional)]


def parquet_batches(path: SourceFile, sources: Sources) -> Iterator[tuple[Any, Sequence[str]]]:
    """Yield batches of the columns of a Parquet file that settings name, each with the names of all columns."""
    with readable(path) as raw:
        metadata = pa.parquet.read_metadata(raw)
    file_columns = metadata.schema.to_arrow_schema().names
    demand_named(file_columns, sources, path)
    names = [name for name in _column_names(sources) if name in file_columns]
    encoded = [name for name in names[:2] if name in _dictionary_columns(metadata)]
    opened = partial(
        pa.parquet.ParquetFile,
        metadata=metadata,
        read_dictionary=encoded,
        coerce_int96_timestamp_unit=INT96_UNIT,
    )
    with readable(path) as raw, opened(raw) as file:
        for batch in file.iter_batches(BATCH_ROWS, columns=names):
            yield plain_batch(batch), file_columns


def _dictionary_columns(metadata: Any) -> set[str]:
    """Return the columns of a Parquet file that are dictionary-encoded throughout.

    If the dictionary grew too large for its page, plain texts follow: looking those up costs more than sorting.
    """
    if not metadata.num_row_groups:
        return set()
    group = metadata.row_group(0)
    columns = (group.column(number) for number in range(group.num_columns))
    return {
        column.path_in_schema
        for column in columns
        if column.total_uncompressed_size < TEXT_LENGTH_BYTES * column.num_values
    }


def csv_batches(
    path: SourceFile, sources: Sources, unusable: UnusableRows
) -> Iterator[tuple[Any, Sequence[str]]]:
    """Yield batches of the columns of a CSV file that settings name, each with the names of all columns.

    Columns are strings that may not be UTF-8.
    """

    def skip_line(line: int) -> None:
        unusable.looked_at(INTERACTIONS, 1)
        unusable.note(INTERACTIONS, COLUMNS, 1, [{"file": path.name, "line": str(line)}])

    named = {name: name.strip(BLANKS) for name in _column_names(sources)}
    with CsvFile.opened(path, sources) as file:
        if len(file.names) == 1 and named[sources.user_column] not in file.names:
            remedy = ROW_IN_QUOTES
            if sources.separator not in file.names[0]:
                remedy = (
                    "if a row's fields stand between another sign than "
                    f"{name_of_sign(sources.separator)}, name it in [sources] separator; is the first line a title? "
                    "Leave it out"
                )
            raise SourceError(f"{path} has one column, {file.names[0]!r}: {remedy}")
        demand_named(file.names, sources, path)
        read = {name: title for name, title in named.items() if title in file.names}
        user, item = sources.user_column, sources.item_column
        for batch in file.batches(list(read.values()), skip_line):
            rows = pa.record_batch(batch.columns, list(read))
            if file.has_long_values:
                for name in (user, item):
                    has_break = pc.match_substring_regex(rows.column(name), "[\r\n]")
                    rows = _without_rows(rows, f"{name}: {BREAK}", has_break, path, unusable)
            yield rows, file.names


def _without_rows(
    rows: Any, reason: str, mask: Any, path: SourceFile, unusable: UnusableRows
) -> Any:
    """Return rows without those of a mask, which are noted."""
    if count := pc.sum(mask).as_py():
        unusable.looked_at(INTERACTIONS, count)
        unusable.note(INTERACTIONS, reason, count, [{"file": path.name}])
        return rows.filter(pc.invert(mask))
    return rows


def read_lines(path: SourceFile, sources: Sources) -> Iterator[tuple[Any, Sequence[str]]]:
    """Yield batches of lines `user item item ...`, separated by blanks, each with the names of its columns."""
    users: list[bytes] = []
    items: list[bytes] = []
    titles = [sources.user_column, sources.item_column]

    def batch() -> tuple[Any, Sequence[str]]:
        # Not looked at here: a line that is not UTF-8 costs its own rows.
        columns = (pa.array(ids, pa.binary()).view(pa.string()) for ids in (users, items))
        return pa.record_batch(list(columns), titles), titles

    if sources.format != "lines":
        demand_lines(path)
    with path.open("rb") as raw:
        for line in _lines_of(path, raw):
            if not (fields := line.split()):
                continue
            user, *line_items = fields
            users += [user] * len(line_items)
            items += line_items
            if len(users) >= BATCH_ROWS:
                yield batch()
                users, items = [], []
    if users:
        yield batch()


def _lines_of(path: SourceFile, raw: Any) -> Iterator[bytes]:
    """Yield the lines of a file without its byte order mark."""
    lines = iter(gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw)
    for first in islice(lines, 1):
        if reason := unreadable_by_text(first):
            raise SourceError(f"{path} {reason}")
        while first.startswith(UTF_8_MARK):
            first = first.removeprefix(UTF_8_MARK)
        yield first
    yield from lines


def demand_lines(path: SourceFile) -> None:
    """Raise SourceError for a text file that looks like a table; one whose format is set is not checked."""
    with path.open("rb") as raw:
        head = [line.strip(b"\r\n") for line in islice(_lines_of(path, raw), LINES_LOOKED_AT)]
    if head and head[0].startswith(_COMMENTS):
        raise SourceError(
            f"{path} begins with a comment, {format_case_value(head[0])!r}: lines are read as `user item item ...`, so "
            "leave "
            "comments out"
        )
    if reason := _odd_signs([line for line in head if line.strip()]):
        raise SourceError(
            f"{path} {reason}: lines are read as `user item item ...`, with blanks between them: leave out what is no "
            'id; if it belongs to the ids, set [sources] format = "lines"; if the lines are rows of a table, '
            'format = "csv"'
        )
    if reason := unlike_lines([line for line in head if line.strip()]):
        raise SourceError(
            f"{path} {reason}, not lines of `user item item ...`: put a line of column names above if there is none, "
            'and set [sources] format = "csv" and separator to the sign between its fields; if lines of ids they are, '
            'set format = "lines"'
        )


def _odd_signs(lines: Sequence[bytes]) -> str | None:
    """Return the signs around the ids of most lines, or the names above them, that would be read as ids; else None."""
    rows = [row for row in (line.split() for line in lines) if len(row) > 1]
    if not rows:
        return None
    # `user item` is left out and counted as a header.
    if rows[0] != [b"user", b"item"] and _NAMES_OF_LINES.fullmatch(b" ".join(rows[0])):
        return f"begins with column names, {format_case_value(b' '.join(rows[0]))!r}"
    for sign in (b",", b";"):
        if _are_most(field.endswith(sign) for row in rows for field in row[:-1]):
            return f"has {sign.decode()!r} behind its ids"
    if _are_most(row[0].endswith(b":") for row in rows):
        return "has ':' behind the first id of its lines"
    for sign in (b"[", b"(", b"{"):
        if _are_most(row[1].startswith(sign) for row in rows):
            return f"has lists that begin with {sign.decode()!r}"
    for sign in (b"|", b":", b"->", b"=>", b"="):
        if _are_most(row[1] == sign for row in rows):
            return f"has {sign.decode()!r} behind the first id of its lines"
    values = [field.rpartition(b":") for row in rows for field in row[1:]]
    # Ids such as `film:17` have few words before the colon.
    if _are_most(_NUMBER.fullmatch(value) is not None for _, _, value in values):
        before, behind = ({value[part] for value in values} for part in (0, 2))
        if len(before) > min(len(behind), KINDS_OF_IDS) and _are_most(
            sign == b":" for _, sign, _ in values
        ):
            return "has a value behind each id, after ':'"
    return None


def _are_most(flags: Iterable[bool]) -> bool:
    truths = list(flags)
    return 2 * sum(truths) > len(truths)


def unlike_lines(lines: Sequence[bytes]) -> str | None:
    """Return the reason why lines look like the rows of a table, None if they do not."""
    if not lines:
        return None
    for sign in (b"::", b",", b";", b"|"):
        counts = {line.count(sign) for line in lines}
        if len(counts) == 1 and counts != {0} and all(len(line.split()) == 1 for line in lines):
            return f"has fields between {sign.decode()!r}"
    tabs = {line.count(b"\t") for line in lines}
    if len(lines) > 1 and len(tabs) == 1 and (count := tabs.pop()) >= 2:
        return f"has {count + 1} fields in each line, with tabs between them: it looks like a table"
    fields = [line.split() for line in lines]
    width = len(fields[0])
    if len(lines) < 2 or width not in TABLE_FIELDS or any(len(row) != width for row in fields):
        return None
    if all(_NUMBER_OR_TIME.match(field) for row in fields[1:] for field in row[2:]):
        return f"has {width} fields in each line, from the third on numbers or times: it looks like a table"
    return None

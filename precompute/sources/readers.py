"""Readers of interactions and feature tables: Parquet, CSV and lines of ids, in bounded batches."""

import errno
import gzip
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

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
from precompute.sources.csv_files import BLANKS, CsvFile
from precompute.sources.files import (
    NOT_GZIP,
    UTF_8_MARK,
    SourceFile,
    readable,
    source_files,
    unreadable_by_name,
    unreadable_by_text,
)
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
_COMMENTS = (b"# ", b"% ", b"// ")
"""Prefixes of comment lines at the start of a text file, as in those of graphs and matrices."""

INT96_UNIT = "us"
"""Unit of Spark's old times: in nanoseconds they wrap around beyond the year 2262, to 1816."""

TEXT_LENGTH_BYTES = 4
"""Bytes in a Parquet file for the length of each text outside a dictionary."""

NAMES_LOOKED_AT = 10_000
"""Ids at the start of each file that are checked for blanks around them."""

_UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError, pa.ArrowException)
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
) -> Iterator[Interactions]:
    """Yield batches of all interaction files; with `cutoff_at`, only strictly older rows and those without a time.

    The `files` are those that `sources` name, unless they are listed here; the first `skip`, or all, are left out.
    `late` is called with the other rows. Rows of weight 0 or less are not interactions and are left out; so are
    unusable rows, which are counted in `unusable`. Raises SourceError naming file and column, or if no row can be
    used.
    """
    cut = None if cutoff_at is None else int(cutoff_at.timestamp() * MICROSECONDS)
    unusable = UnusableRows() if unusable is None else unusable
    named = source_files(sources.interactions, base) if files is None else files
    paths, alike = named[skip:], SameColumns(sources)
    if paths and (skipped := named[:skip]):
        with reading(skipped[0]):
            alike.add(skipped[0], column_names(skipped[0], sources) or ())
    for path in paths:
        remark = partial(unusable.remark, INTERACTIONS)
        clock, is_first = TimeScale(path, sources.timestamp_column, remark), True
        with reading(path):
            for columns in _batches(path, sources, unusable):
                if len(columns):
                    alike.add(path, columns.schema.names)
                batch = _usable(columns, path, sources, unusable, clock)
                if is_first and len(batch.times):
                    _remark_on_blanks(batch, sources, remark)
                    is_first = False
                if cut is not None and (is_late := batch.times >= cut).any():
                    late(batch.only(is_late))
                    yield batch.only(~is_late)
                else:
                    yield batch
    if not skip:
        unusable.demand_some(INTERACTIONS, ", ".join(path.name for path in paths[:3]))


def _remark_on_blanks(batch: Interactions, sources: Sources, remark: Callable[[str], None]) -> None:
    """Remark on ids with blanks around them, as in fixed-width columns; a request has to send these, too.

    No id is named, since an erased user's id must not be in a report.
    """
    for ids, column in ((batch.users, sources.user_column), (batch.items, sources.item_column)):
        names = ids.names[:NAMES_LOOKED_AT]
        is_padded = pc.not_equal(pc.utf8_trim_whitespace(names), names)
        if count := pc.sum(is_padded).as_py():
            remark(
                f"column {column!r} has blanks around {count:,} of its first {len(names):,} ids, which are part of "
                "them: trim them in the file"
            )


def _batches(path: SourceFile, sources: Sources, unusable: UnusableRows) -> Iterator[Any]:
    match format_of(path, sources):
        case "lines":
            return read_lines(path, sources)
        case "csv":
            return csv_batches(path, sources, unusable)
    return parquet_batches(path, sources)


def _usable(
    batch: Any, path: SourceFile, sources: Sources, unusable: UnusableRows, clock: TimeScale
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
    header_mask_by_reason = _header_again(user_ids, users, item_ids, items)
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
    users: Ids, user_column: str, items: Ids, item_column: str
) -> UnusableMaskByReason:
    """Return a mask of rows that repeat the column names, in any case, as in joined files."""
    is_header = np.ones(len(users), np.bool_)
    for ids, column in ((items, item_column), (users, user_column)):  # items are fewer
        title = column.strip(BLANKS)
        as_long = np.flatnonzero(
            as_rows(pc.equal(pc.binary_length(ids.names), len(title.encode())))
        )
        names = pc.ascii_lower(ids.names.take(pa.array(as_long)))
        titles = as_long[as_rows(pc.equal(names, pc.ascii_lower(pa.scalar(title))))]
        if not len(titles):
            return {}
        is_header &= np.isin(ids.codes, titles)
    return {HEADER: is_header} if is_header.any() else {}


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
) -> Iterator[tuple[Ids, dict[str, Any]]]:
    """Yield batches (ids, {column: Arrow array}) of a Parquet feature table; raise SourceError for a missing column.

    Rows without a usable id are left out, and noted in `unusable` under `source`.
    """
    unusable = UnusableRows() if unusable is None else unusable
    # Without a buffer a whole row group of a column is read at once.
    opened = partial(
        pa.parquet.ParquetFile, buffer_size=READ_BYTES, coerce_int96_timestamp_unit=INT96_UNIT
    )
    with reading(path), readable(path) as raw, opened(raw) as file:
        _demand_features(file.schema_arrow.names, (id_column, *columns), path)
        for batch in file.iter_batches(_rows_at_once(file.metadata), columns=[id_column, *columns]):
            batch = plain_batch(batch)
            unusable.looked_at(source, len(batch))
            id_values = batch.column(id_column)
            ids, bad_mask_by_reason = read_ids(id_values, path, id_column)
            if bad_mask_by_reason:

                def case(row: int, id_values: Any = id_values) -> dict[str, str | None]:
                    return {"id": format_case_value(_value(id_values, row)), "file": path.name}

                is_usable = ~unusable.note_rows(source, bad_mask_by_reason, case)
                ids, batch = ids.only(is_usable), batch.filter(pa.array(is_usable))
            yield ids, {name: without_codes(batch.column(name)) for name in columns}
    unusable.demand_some(source, path.name)


def _rows_at_once(metadata: Any) -> int:
    """Return the rows of a batch, at most BATCH_ROWS and about BATCH_BYTES."""
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    row_bytes: int = sum(group.total_byte_size for group in groups) // max(1, metadata.num_rows)
    return max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, row_bytes)))


def feature_schema(path: SourceFile, columns: Sequence[str] = ()) -> Any:
    """Return the Arrow schema of a Parquet feature table, in the types read; raise SourceError for a missing column."""
    with reading(path), readable(path) as raw:
        schema = pa.parquet.read_schema(raw)
    _demand_features(schema.names, columns, path)
    return pa.schema([field.with_type(plain_type(_value_type(field.type))) for field in schema])


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
            case EOFError():
                remedy = "it is cut off; copy it again"
            case _ if _NO_GZIP.search(str(error)):
                remedy = f"it {NOT_GZIP}"
            case zlib.error() | gzip.BadGzipFile():
                remedy = "its compressed data is damaged; copy it again"
            case OSError():
                remedy = "is it whole, and may this user read it?"
            case _:
                remedy = "is it whole, and of the format that its name or sources.format says?"
        raise SourceError(f"cannot read {path}: {error} ({remedy})", path=str(path)) from error


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
                f"{path} has no column {name!r}; it has {columns_text}: name it by {setting}",
                column=name,
            )
        demand_once(file_columns, title, path)


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


def parquet_batches(path: SourceFile, sources: Sources) -> Iterator[Any]:
    """Yield batches of the columns of a Parquet file that settings name."""
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
            yield plain_batch(batch)


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


def csv_batches(path: SourceFile, sources: Sources, unusable: UnusableRows) -> Iterator[Any]:
    """Yield batches of the columns of a CSV file that settings name, as strings that may not be UTF-8."""

    def skip_line(line: int) -> None:
        unusable.looked_at(INTERACTIONS, 1)
        unusable.note(INTERACTIONS, COLUMNS, 1, [{"file": path.name, "line": str(line)}])

    named = {name: name.strip(BLANKS) for name in _column_names(sources)}
    with CsvFile.opened(path, sources) as file:
        if len(file.names) == 1 and named[sources.user_column] not in file.names:
            raise SourceError(
                f"{path} has one column, {file.names[0]!r}: if a row's fields stand between another sign than "
                f"{sources.separator!r}, name it in [sources] separator"
            )
        demand_named(file.names, sources, path)
        read = {name: title for name, title in named.items() if title in file.names}
        user, item = sources.user_column, sources.item_column
        for batch in file.batches(list(read.values()), skip_line):
            rows = pa.record_batch(batch.columns, list(read))
            if file.has_long_values:
                for name in (user, item):
                    has_break = pc.match_substring_regex(rows.column(name), "[\r\n]")
                    rows = _without_rows(rows, f"{name}: {BREAK}", has_break, path, unusable)
            yield rows


def _without_rows(
    rows: Any, reason: str, mask: Any, path: SourceFile, unusable: UnusableRows
) -> Any:
    """Return rows without those of a mask, which are noted."""
    if count := pc.sum(mask).as_py():
        unusable.looked_at(INTERACTIONS, count)
        unusable.note(INTERACTIONS, reason, count, [{"file": path.name}])
        return rows.filter(pc.invert(mask))
    return rows


def read_lines(path: SourceFile, sources: Sources) -> Iterator[Any]:
    """Yield batches of lines `user item item ...`, separated by single spaces."""
    users: list[bytes] = []
    items: list[bytes] = []

    def batch() -> Any:
        # Not looked at here: a line that is not UTF-8 costs its own rows.
        columns = (pa.array(ids, pa.binary()).view(pa.string()) for ids in (users, items))
        return pa.record_batch(list(columns), [sources.user_column, sources.item_column])

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
    if reason := unlike_lines([line for line in head if line.strip()]):
        raise SourceError(
            f"{path} {reason}, not lines of `user item item ...`: put a line of column names above, and set "
            '[sources] format = "csv" and separator to the sign between its fields; if lines of ids they are, set '
            'format = "lines"'
        )


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

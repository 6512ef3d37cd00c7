"""Formats of interactions: Parquet, CSV and lines of ids, each as batches of Arrow columns."""

import gzip
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from cache.config.sections import Sources
from cache.errors import SourceError
from precompute.sources import unread
from precompute.sources.columns import demand_once, plain_batch
from precompute.sources.csv_files import BLANKS, CsvFile
from precompute.sources.files import SourceFile, readable
from precompute.sources.unread import UTF_8_MARK
from precompute.sources.unusable import BREAK, COLUMNS, UnusableRows, format_case_value

INTERACTIONS = "interactions"
"""Name of the interactions in reports."""
BATCH_ROWS = 1 << 19
LINES_LOOKED_AT = 1_000
"""Lines of a text file that are looked at before it is taken for lines of ids."""
TABLE_FIELDS = range(3, 9)
"""Numbers of fields that tables of interactions have."""
_NUMBER_OR_TIME = re.compile(rb"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?$|\d{4}-\d{2}-\d{2}|\d{2}:\d{2}")
_COMMENTS = (b"# ", b"% ", b"// ")
"""Beginnings of a text file that describe it, as those of graphs and matrices do."""
INT96_UNIT = "us"
"""Unit of Spark's old times: those of nanoseconds wrap around beyond the year 2262, to 1816."""
TEXT_BYTES = 4
"""Bytes that a Parquet file spends on the length of each text that it does not have in a dictionary."""


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
    if reason := unread.of_name(path.name):
        raise SourceError(f"cannot read {path}: {reason}")
    raise SourceError(
        f"cannot tell the format of {path}; set sources.format to parquet, csv or lines"
    )


def read_lines(path: SourceFile, sources: Sources) -> Iterator[Any]:
    """`user item item ...` per line, separated by single spaces."""
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
    """Lines of a file without its byte order mark."""
    lines = iter(gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw)
    for first in islice(lines, 1):
        if reason := unread.of_text(first):
            raise SourceError(f"{path} {reason}")
        while first.startswith(UTF_8_MARK):
            first = first.removeprefix(UTF_8_MARK)
        yield first
    yield from lines


def demand_lines(path: SourceFile) -> None:
    """Raises SourceError for a text file that looks like a table; one whose format is set is not looked at."""
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
    """Reason why lines look like the rows of a table, None if they do not."""
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


def named_columns(sources: Sources) -> list[str]:
    """Columns of times and weights that settings name: these must be there, those of the default names need not."""
    usual = Sources()
    unnamed = ("", usual.timestamp_column, usual.weight_column)
    named = (sources.timestamp_column, sources.weight_column)
    return [name for name in named if name not in unnamed]


def demand_named(file_columns: Sequence[str], sources: Sources, path: SourceFile) -> None:
    """Raises SourceError, naming the setting, for a column that has to be there, or is there twice."""
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


def csv_batches(path: SourceFile, sources: Sources, unusable: UnusableRows) -> Iterator[Any]:
    """Batches of the columns of a CSV file that settings name, as strings that may not be UTF-8."""

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
                    rows = _less(rows, f"{name}: {BREAK}", has_break, path, unusable)
            yield rows


def _less(rows: Any, reason: str, mask: Any, path: SourceFile, unusable: UnusableRows) -> Any:
    """Rows without those of a mask, which are noted."""
    if count := pc.sum(mask).as_py():
        unusable.looked_at(INTERACTIONS, count)
        unusable.note(INTERACTIONS, reason, count, [{"file": path.name}])
        return rows.filter(pc.invert(mask))
    return rows


def _column_names(sources: Sources) -> list[str]:
    """Names of the columns that are read where they are there."""
    optional = (sources.timestamp_column, sources.weight_column)
    return [sources.user_column, sources.item_column, *filter(None, optional)]


def parquet_batches(path: SourceFile, sources: Sources) -> Iterator[Any]:
    """Batches of the columns of a Parquet file that settings name."""
    with readable(path) as raw:
        metadata = pa.parquet.read_metadata(raw)
    file_columns = metadata.schema.to_arrow_schema().names
    demand_named(file_columns, sources, path)
    names = [name for name in _column_names(sources) if name in file_columns]
    encoded = [name for name in names[:2] if name in _encoded(metadata)]
    opened = partial(
        pa.parquet.ParquetFile,
        metadata=metadata,
        read_dictionary=encoded,
        coerce_int96_timestamp_unit=INT96_UNIT,
    )
    with readable(path) as raw, opened(raw) as file:
        for batch in file.iter_batches(BATCH_ROWS, columns=names):
            yield plain_batch(batch)


def demand_same_columns(paths: Sequence[SourceFile], sources: Sources) -> None:
    """Raises SourceError naming a file that lacks a column of times or weights which another one has."""
    alike = SameColumns(sources)
    for path in paths:
        alike.add(path, column_names(path, sources) or ())


class SameColumns:
    """Columns of times and weights of the files so far: either all have one, or none."""

    def __init__(self, sources: Sources) -> None:
        self._names = [*filter(None, (sources.timestamp_column, sources.weight_column))]
        self._first: tuple[SourceFile, frozenset[str]] | None = None

    def add(self, path: SourceFile, file_columns: Sequence[str]) -> None:
        """Raises SourceError where the next file has not what the first one has, or the other way round."""
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


def column_names(path: SourceFile, sources: Sources) -> list[str] | None:
    """Names of a file's columns as its reader finds them; None for lines of ids, which have none."""
    match format_of(path, sources):
        case "lines":
            return None
        case "csv":
            with CsvFile.opened(path, sources) as file:
                return file.names
    with readable(path) as raw:
        return list(pa.parquet.read_schema(raw).names)


def _encoded(metadata: Any) -> set[str]:
    """Columns of a Parquet file that are numbers into a dictionary and can be taken as such.

    Where the dictionary grew too large for its page, texts follow: to find those again in it costs more than to sort.
    """
    if not metadata.num_row_groups:
        return set()
    group = metadata.row_group(0)
    columns = (group.column(number) for number in range(group.num_columns))
    return {
        column.path_in_schema
        for column in columns
        if column.total_uncompressed_size < TEXT_BYTES * column.num_values
    }

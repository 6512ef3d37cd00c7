"""Tables among a folder's files: the files of each table, its columns, and its number of rows."""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from cache.errors import LarderError, SourceError
from precompute.sources.csv_files import (
    BLANK_CHARACTERS,
    NO_COLUMN_NAMES_REASON,
    ROW_IN_QUOTES_REMEDY,
    Dialect,
    is_like_a_row,
)
from precompute.sources.files import (
    NOT_GZIP_REASON,
    UTF_8_BYTE_ORDER_MARK,
    FolderEntry,
    LocalStorage,
    find_row_separator,
    is_data_name,
    is_gzip,
    is_unreadable_data_name,
    separator_in_words,
    source_files,
    table_kind_by_folder,
    unreadable_name_reason,
    unreadable_text_reason,
)

ColumnKind = Literal["integer", "float", "text", "time", "vector", "other"]
"""Kind of a column's values; a vector is a list of fractional numbers."""

DEPTH_MAX = 8
"""Levels of folders below the inspected one, such as table/year/month/day/hour."""

FILES_MAX = 20_000

SAMPLE_ROWS = 1 << 16
"""Rows at a table's start that are inspected."""

ERRORS = (OSError, pa.ArrowException, ValueError, KeyError, LarderError)
"""Errors that an odd file raises: they cost one remark, and the inspection continues."""

_CSV_BYTES = 4 << 20

_ENDINGS = {
    ".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".csv.gz": "csv", ".tsv": "csv", ".tsv.gz": "csv",
}  # fmt: skip

_LEFT_OUT = {"artifacts", "bundle", "node_modules", "__pycache__", "venv"}
"""Names of folders that are not inspected."""

_SEPARATORS = (",", ";", "\t", "|", "\x01")
"""Candidate separators of fields, of which the most frequent one in the first line is taken."""

_SNIFFED_BYTES = 1 << 16
"""Bytes inspected at the start of a file without a known ending."""

NOT_UTF_8_NAME = "has a name that is not UTF-8: rename it"
_NAMED_MOST = 3
"""Files of one kind that a remark names."""


@dataclass(frozen=True, slots=True, eq=False)
class FoundTable:
    """Table of one or more files with the same columns; `pattern` names them as `larder.toml` does."""

    pattern: tuple[str, ...]
    files: tuple[Path, ...]
    format: str
    columns: Mapping[str, ColumnKind]
    sample: Any
    rows: int | None
    """Number of rows; None if that would need reading all."""
    size_bytes: int
    separator: str = ","
    unread: tuple[str, ...] = ()
    """Remarks on files that cannot be read and that belong to the table by their folder or name."""
    whole_pattern: tuple[str, ...] = ()
    """Pattern that names these, too."""

    @property
    def title(self) -> str:
        """Pattern for messages."""
        return ", ".join(self.pattern[:3]) + (", ..." if len(self.pattern) > 3 else "")


def discover_tables(folder: Path, base: Path) -> tuple[list[FoundTable], list[str]]:
    """Find the tables below a folder, largest first, patterns relative to `base`; return also remarks on others."""
    groups: dict[_GroupKey, list[_FileLook]] = defaultdict(list)
    unread: list[_FileLook] = []
    walk = _Walk(folder, base)
    paths = list(walk)
    files, remarks = [path for path in paths if _ending(path)][:FILES_MAX], list(walk.remarks)
    for path in files:
        file_look = _one_remark(path, partial(_look_at, path))
        if file_look.is_table:
            columns = tuple(sorted(file_look.columns))
            groups[file_look.format, file_look.separator, columns].append(file_look)
            if file_look.remark:
                remarks.append(f"{_relative(path, base)} {file_look.remark}")
        else:
            unread.append(file_look)
    unread_by_key = _unread_by_group(groups, unread, folder)
    remarks += [
        f"{_relative(look.path, base)} {look.remark}"
        for look in unread
        if look not in chain.from_iterable(unread_by_key.values())
    ]
    tables = [_table_of(group, base, unread_by_key[key]) for key, group in groups.items()]
    remarks += _about_others(paths, base, is_all=not tables)
    return sorted(tables, key=lambda table: -table.size_bytes), remarks


def are_unique(table: FoundTable, column: str) -> bool:
    """True if no value of a column is repeated, in all rows of Parquet and the first ones of CSV."""
    if table.format == "parquet":
        values = pa.chunked_array(
            [
                _to_comparable_type(chunk)
                for path in table.files
                for chunk in pa.parquet.read_table(path, columns=[column])[column].chunks
            ]
        )
    else:
        values = table.sample[column]
    return bool(len(values) and pc.count_distinct(values).as_py() == len(values))


class _FileLook(NamedTuple):
    """Result of inspecting one file: its table's columns, or a remark why it is no table, or both."""

    path: Path
    format: str
    separator: str = ","
    columns: tuple[str, ...] = ()
    sample: Any = None
    rows: int | None = None
    remark: str | None = None
    is_table: bool = True


_GroupKey = tuple[str, str, tuple[str, ...]]
"""Format, separator and sorted columns of the files of one table."""


def _unread_by_group(
    groups: Mapping[_GroupKey, Sequence[_FileLook]], unread: Sequence[_FileLook], folder: Path
) -> dict[_GroupKey, list[_FileLook]]:
    """Return the files that cannot be read by the table that they belong to.

    That is the table whose files alone lie in their folder, or one of whose files there has the same name but for its
    digits. A lone file of Parquet in the inspected `folder` may be of items or users as well, which CSV never is.
    """
    unread_by_key: dict[_GroupKey, list[_FileLook]] = {key: [] for key in groups}
    for look in (look for look in unread if look.remark != NOT_UTF_8_NAME):
        neighbours = {
            key: [file.path for file in group if file.path.parent == look.path.parent]
            for key, group in groups.items()
        }
        keys = [key for key, paths in neighbours.items() if paths]
        alike = [
            key for key in keys if any(_stem(path) == _stem(look.path) for path in neighbours[key])
        ]
        is_folder_of_one = len(keys) == 1 and (
            len(neighbours[keys[0]]) > 1 or look.path.parent != folder or look.format == "csv"
        )
        if len(alike) == 1 or is_folder_of_one:
            unread_by_key[(alike or keys)[0]].append(look)
    return unread_by_key


def _stem(path: Path) -> str:
    """Return a file's name without its ending and its numbers."""
    return re.sub(r"[\W_\d]+", "", path.name.lower().removesuffix(_ending(path)))


class _Walk:
    """Files below a folder that may be data by their names; `remarks` lists skipped folders."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.remarks: list[str] = []
        self._folder, self._base = folder, base

    def __iter__(self) -> Iterator[Path]:
        root = len(self._folder.parts)
        for dirpath, folders, names in os.walk(self._folder, onerror=self._note_unlisted):
            folder = Path(dirpath)
            entries = [FolderEntry(name, is_folder=True) for name in folders]
            entries += _metadata_of(folder) if "metadata" in folders else []
            for kind in table_kind_by_folder(entries).values():
                self.remarks.append(
                    f"{_relative(folder, self._base)} is {kind}, and is not read: its log says which of its files "
                    "count; "
                    "write its rows as Parquet files into a folder of their own"
                )
                folders[:], names[:] = [], []
            subfolders = sorted(
                name
                for name in folders
                if is_data_name(name, is_folder=True)
                and name not in _LEFT_OUT
                and not (folder / name / "bundle.json").exists()
            )
            if subfolders and len(folder.parts) - root >= DEPTH_MAX:
                self.remarks.append(
                    f"{_relative(folder, self._base)} has folders that were not looked into: they lie too deep"
                )
                subfolders = []
            folders[:] = subfolders
            yield from (folder / name for name in sorted(names) if is_data_name(name))

    def _note_unlisted(self, error: OSError) -> None:
        folder = _relative(Path(str(error.filename)), self._base)
        self.remarks.append(f"{folder} cannot be listed: {error.strerror}; may this user read it?")


def _metadata_of(folder: Path) -> list[FolderEntry]:
    entries = LocalStorage().children(str(folder / "metadata"))
    return [FolderEntry(f"metadata/{entry.path}", entry.is_folder) for entry in entries]


def _one_remark(path: Path, look_at: Callable[[], _FileLook]) -> _FileLook:
    """Inspect a file; for an error return the reason as the remark on a file that is no table."""
    try:
        str(path).encode()
        return look_at()
    except UnicodeEncodeError:
        reason = NOT_UTF_8_NAME
    except UnicodeDecodeError:
        reason = "is not UTF-8: convert it from its encoding, e.g. with iconv -f latin1 (or -f shift_jis) -t utf-8"
    except ERRORS as error:
        lines = str(error).splitlines() or [type(error).__name__]
        reason = f"cannot be read: {lines[0]}"
    return _FileLook(path, _ENDINGS[_ending(path)], remark=reason, is_table=False)


def _about_others(paths: Sequence[Path], base: Path, *, is_all: bool) -> Iterator[str]:
    """Yield remarks on unused files: their apparent content, and a remedy.

    Unless `is_all`, only on those that hold data by their names, since there are other tables.
    """
    paths_by_reason: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        if not _ending(path) and (is_all or is_unreadable_data_name(path.name)):
            paths_by_reason[_why_not_taken(path)].append(path)
    for reason, files in paths_by_reason.items():
        names = ", ".join(_relative(path, base) for path in files[:_NAMED_MOST])
        more = f" (and {len(files) - _NAMED_MOST} more)" if len(files) > _NAMED_MOST else ""
        yield f"{names}{more} {reason}"


def _why_not_taken(path: Path) -> str:
    if path.name.lower().endswith((".txt", ".txt.gz")):
        return (
            "is text: if its lines are `user item item ...`, name it in [sources] interactions, with "
            'format = "lines"'
        )
    if reason := unreadable_name_reason(path.name):
        return f"is not taken: {reason}"
    try:
        with path.open("rb") as file:
            head = file.read(_SNIFFED_BYTES)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if reason := unreadable_text_reason(head):
        return reason
    if (sign := find_row_separator(head)) == "::":
        return "has fields between double colons: write it with commas into a file of a name that ends in .csv"
    if sign is not None:
        ending = ".tsv" if sign == "\t" else ".csv"
        return (
            f"is not taken: its name does not say its format: it looks like rows with {separator_in_words(sign)} "
            "between "
            f"their fields: rename it to {ending}, and put a line of column names above if there is none"
        )
    return (
        "is not taken: its name does not say its format: Parquet, CSV, TSV and lines of ids are read, of names that "
        "end in .parquet, .csv, .tsv or .txt"
    )


def _ending(path: Path) -> str:
    name = path.name.lower()
    return next((ending for ending in _ENDINGS if name.endswith(ending)), "")


def _look_at(path: Path) -> _FileLook:
    """Return the columns and first rows of a file, or the reason why it is no table."""
    if _ENDINGS[_ending(path)] == "csv":
        return _look_at_csv(path)
    with pa.parquet.ParquetFile(path) as file:
        names = tuple(file.schema_arrow.names)
        file_look = _FileLook(path, "parquet", columns=names, rows=file.metadata.num_rows)
        if twice := _twice(names):
            return file_look._replace(remark=twice, is_table=False)
        batch = next(file.iter_batches(SAMPLE_ROWS), None) if file_look.rows else None
        rows = [] if batch is None else [batch]
        return file_look._replace(
            sample=_plain_table(pa.Table.from_batches(rows, file.schema_arrow))
        )


def _look_at_csv(path: Path) -> _FileLook:
    file_look, is_packed = _FileLook(path, "csv"), path.name.lower().endswith(".gz")
    if is_packed and not is_gzip(path):
        return file_look._replace(remark=NOT_GZIP_REASON, is_table=False)
    # A part of its bytes, read to its end: no reader is left running behind the look.
    with pa.input_stream(str(path), compression="gzip" if is_packed else None) as raw:
        head: bytes = raw.read(_CSV_BYTES)
        is_cut = len(head) == _CSV_BYTES
    if reason := unreadable_text_reason(head):
        return file_look._replace(remark=reason, is_table=False)
    while head.startswith(UTF_8_BYTE_ORDER_MARK):
        head = head.removeprefix(UTF_8_BYTE_ORDER_MARK)
    # Without a line break the reader takes the names for no rows of no columns.
    head = head[: head.rfind(b"\n") + 1] if is_cut else head + b"\n"
    header_line = re.split(rb"[\r\n]", head, maxsplit=1)[0]
    header = header_line.decode()
    if not header.strip():
        return file_look._replace(
            remark="cannot be read: it is empty, or its first line is", is_table=False
        )
    separator = max(_SEPARATORS, key=header.count)
    head = Dialect(separator.encode(), b'"', b"").with_bare_quotes(head)
    header_line = re.split(rb"[\r\n]", head, maxsplit=1)[0]
    other_widths: list[Any] = []

    if header.count('"') % 2 and b'"' not in head[len(header_line) :]:
        return file_look._replace(
            remark="has a quote in its line of column names that is not closed: close it, or leave it out",
            is_table=False,
        )

    def left_out(row: Any) -> str:
        other_widths.append(row)
        return "skip"

    def parsed(**types: Any) -> Any:
        return pa.csv.read_csv(
            pa.BufferReader(head),
            pa.csv.ReadOptions(use_threads=False, block_size=max(1, len(head))),
            pa.csv.ParseOptions(delimiter=separator, invalid_row_handler=left_out),
            pa.csv.ConvertOptions(column_types=types),
        )

    sample = parsed()
    # Twenty digits are no float: what is written as whole numbers is an id as it is.
    floats = {
        field.name: pa.string() for field in sample.schema if pa.types.is_floating(field.type)
    }
    if floats:
        texts = parsed(**floats)
        for name in floats:
            if is_digits(texts[name]):
                sample = sample.set_column(sample.column_names.index(name), name, texts[name])
    sample = sample.rename_columns([name.strip(BLANK_CHARACTERS) for name in sample.column_names])
    names = tuple(sample.column_names)
    file_look = file_look._replace(separator=separator, columns=names)
    if twice := _twice(names):
        return file_look._replace(remark=twice, is_table=False)
    if not len(sample) and other_widths:
        row = other_widths[0]
        return file_look._replace(
            remark=f"has {row.expected_columns} column names and {row.actual_columns} fields in each row: is there "
            f"{separator_in_words(separator)} behind the last one, one within a value that has no quotes around it, "
            "or a "
            "line above the column names? Write as many fields as names",
            is_table=False,
        )
    if remark := _no_table(names, separator):
        return file_look._replace(remark=remark, is_table=False)
    sample, header_repeat_count = _without_header(sample.slice(0, SAMPLE_ROWS))
    remark = (
        f"has its header again in {header_repeat_count:,} of its first rows"
        if header_repeat_count
        else None
    )
    if not len(sample):
        remark = "has a header and no rows"
    return file_look._replace(sample=sample, remark=remark)


def _twice(names: Sequence[str]) -> str | None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if "" in repeated:
        return "has several columns without a name: is the first line a title? Leave it out"
    return (
        f"has several columns called {', '.join(map(repr, repeated))}: rename them"
        if repeated
        else None
    )


def _without_header(sample: Any) -> tuple[Any, int]:
    """Return (rows without repeated headers, number of those): rows whose values are all their columns' names."""
    if not len(sample) or not all(pa.types.is_string(field.type) for field in sample.schema):
        return sample, 0
    is_header = None
    for name in sample.column_names:
        is_column_name = pc.fill_null(pc.equal(pc.utf8_trim_whitespace(sample[name]), name), False)
        is_header = is_column_name if is_header is None else pc.and_(is_header, is_column_name)
    count = pc.sum(is_header).as_py() or 0
    return (sample.filter(pc.invert(is_header)) if count else sample), count


def _plain_table(table: Any) -> Any:
    return pa.table(
        [_to_comparable_type(table[name]) for name in table.column_names], table.column_names
    )


def _to_comparable_type(column: Any) -> Any:
    """Convert a column to a comparable type: no dictionary, no views, whole decimals as texts of digits."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return _to_comparable_type(column.cast(kind.storage_type))
    if pa.types.is_dictionary(kind):
        return _to_comparable_type(column.cast(kind.value_type))
    if pa.types.is_string_view(kind) or pa.types.is_large_string(kind):
        return column.cast(pa.string())
    if pa.types.is_decimal(kind):
        texts = pc.replace_substring_regex(column.cast(pa.string()), r"\.0+$", "")
        return texts if is_digits(texts) else column.cast(pa.float64())
    return column


def is_digits(texts: Any) -> bool:
    """True if all texts that are not missing are whole numbers in digits."""
    matches = pc.match_substring_regex(texts, r"^\s*[+-]?\d+\s*$")
    return bool(len(texts) > texts.null_count and pc.all(matches, skip_nulls=True).as_py())


def _no_table(names: Sequence[str], separator: str) -> str | None:
    """Return the reason why a CSV file with these column names cannot be read; None if it can."""
    if any("::" in name for name in names):
        return "has fields between double colons: write it with commas"
    if len(names) == 1 and separator in names[0]:
        return f"has one column, {names[0]!r}: {ROW_IN_QUOTES_REMEDY}"
    if len(names) == 1:
        return (
            f"has one column, {names[0]!r}: if a row's fields stand between another sign than a comma, a semicolon, a "
            "tab or a bar, name the file in [sources] interactions and the sign in separator; is the first line a "
            "title? Leave it out"
        )
    if is_like_a_row(names):
        return NO_COLUMN_NAMES_REASON
    return None


def _table_of(group: Sequence[_FileLook], base: Path, unread: Sequence[_FileLook]) -> FoundTable:
    """Build the table of files with the same columns; its kinds are those of the first one with rows."""
    first = next((file for file in group if len(file.sample)), group[0])
    files = [file.path for file in group]
    rows = [file.rows for file in group]
    columns = {
        name: _kind(first.sample.schema.field(name).type, first.sample[name], first.format)
        for name in first.columns
    }
    return FoundTable(
        _pattern(files, base),
        tuple(files),
        first.format,
        columns,
        first.sample,
        None if None in rows else sum(filter(None, rows)),
        sum(path.stat().st_size for path in files),
        first.separator,
        tuple(f"{_relative(look.path, base)} {look.remark}" for look in unread),
        _pattern(sorted([*files, *(look.path for look in unread)]), base) if unread else (),
    )


def _pattern(files: list[Path], base: Path) -> tuple[str, ...]:
    """Return the shortest pattern that matches exactly these files: a wildcard, else each of them."""
    if len(files) > 1:
        top = Path(os.path.commonpath([path.parent for path in files]))
        endings = {path.name[-len(_ending(path)) :] for path in files}
        wildcards = [f"{below}*{ending}" for ending in endings for below in ("", "**/")]
        for wildcard in wildcards if len(endings) == 1 else ():
            pattern = (PurePosixPath(_relative(top, base)) / wildcard).as_posix()
            if _names(pattern, base) == {os.path.realpath(path) for path in files}:
                return (pattern,)
    return tuple(_relative(path, base) for path in files)


def _names(pattern: str, base: Path) -> set[str]:
    """Return the files that a night would read for a pattern."""
    try:
        return {os.path.realpath(str(path)) for path in source_files((pattern,), base)}
    except SourceError:
        return set()


def _relative(path: Path, base: Path) -> str:
    relative_path = Path(os.path.relpath(path, base)).as_posix()
    return relative_path.encode("utf-8", "backslashreplace").decode()


def _kind(kind: Any, values: Any, file_format: str) -> ColumnKind:
    if pa.types.is_integer(kind):
        return "integer"
    if pa.types.is_floating(kind):
        return "float"
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind):
        return "vector" if pa.types.is_floating(kind.value_type) else "other"
    if pa.types.is_string(kind):
        return "integer" if is_digits(values) else "text"
    # Texts of CSV that are not UTF-8, and columns without a value, of which any kind may come.
    if pa.types.is_null(kind) or (file_format == "csv" and pa.types.is_binary(kind)):
        return "text"
    return "time" if pa.types.is_timestamp(kind) or pa.types.is_date(kind) else "other"

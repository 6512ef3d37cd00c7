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
"""Number of folder levels that are inspected, such as table/year/month/day/hour."""

FILES_MAX = 20_000

SAMPLE_ROWS = 1 << 16
"""Number of a table's first rows that are inspected."""

FILE_ERRORS = (OSError, pa.ArrowException, ValueError, KeyError, LarderError)
"""Errors of unreadable files: each becomes a remark, and the inspection continues."""

_CSV_BYTES_MAX = 4 << 20

_FORMAT_BY_ENDING = {
    ".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".csv.gz": "csv", ".tsv": "csv", ".tsv.gz": "csv",
}  # fmt: skip

_LEFT_OUT_FOLDERS = {"artifacts", "bundle", "node_modules", "__pycache__", "venv"}
"""Names of folders that are not inspected."""

_SEPARATORS = (",", ";", "\t", "|", "\x01")
"""Candidate separators of fields; the most frequent one in the first line is used."""

_SNIFFED_BYTES_MAX = 1 << 16
"""Bytes inspected at the start of a file without a known ending."""

NOT_UTF_8_NAME = "has a name that is not UTF-8: rename it"
_NAMED_FILES_MAX = 3
"""Maximum number of files that a remark names."""


@dataclass(frozen=True, slots=True, eq=False)
class FoundTable:
    """Table of one or more files with the same columns; `pattern_parts` matches them in `larder.toml`."""

    pattern_parts: tuple[str, ...]
    file_paths: tuple[Path, ...]
    file_format: str
    kind_by_column: Mapping[str, ColumnKind]
    sample_table: Any
    row_count: int | None
    """Number of rows; None if only reading the whole files would tell."""
    size_bytes: int
    field_separator: str = ","
    unread_file_remarks: tuple[str, ...] = ()
    """Remarks on unreadable files that, by folder or name, belong to the table."""
    whole_pattern_parts: tuple[str, ...] = ()
    """Pattern that matches the unreadable files as well; empty without any."""

    @property
    def title(self) -> str:
        """Return the pattern for messages, cut after three parts."""
        return ", ".join(self.pattern_parts[:3]) + (", ..." if len(self.pattern_parts) > 3 else "")


def discover_tables(folder: Path, base_folder: Path) -> tuple[list[FoundTable], list[str]]:
    """Return the tables below a folder, largest first, and remarks on other files; paths start at `base_folder`."""
    file_looks_by_key: dict[_GroupKey, list[_FileLook]] = defaultdict(list)
    unread_looks: list[_FileLook] = []
    folder_walk = _FolderWalk(folder, base_folder)
    paths = list(folder_walk)
    table_files, remarks = ([path for path in paths if _ending(path)][:FILES_MAX], list(folder_walk.remarks))
    for path in table_files:
        file_look = _look_at_safely(path, partial(_look_at, path))
        if file_look.is_table:
            column_names = tuple(sorted(file_look.column_names))
            file_looks_by_key[file_look.file_format, file_look.field_separator, column_names].append(file_look)
            if file_look.remark:
                remarks.append(f"{_relative_text(path, base_folder)} {file_look.remark}")
        else:
            unread_looks.append(file_look)
    unread_by_key = _unread_looks_by_group(file_looks_by_key, unread_looks, folder)
    remarks += [
        f"{_relative_text(unread_look.file_path, base_folder)} {unread_look.remark}"
        for unread_look in unread_looks
        if unread_look not in chain.from_iterable(unread_by_key.values())
    ]
    tables = [
        _build_table(file_looks, base_folder, unread_by_key[group_key])
        for group_key, file_looks in file_looks_by_key.items()
    ]
    remarks += _remarks_on_unused_files(paths, base_folder, is_all=not tables)
    return sorted(tables, key=lambda table: -table.size_bytes), remarks


def are_unique(table: FoundTable, column_name: str) -> bool:
    """Return True if a column has no repeated value, in all rows for Parquet, in the sampled rows for CSV."""
    if table.file_format == "parquet":
        column_values = pa.chunked_array(
            [
                _to_comparable_type(chunk)
                for path in table.file_paths
                for chunk in pa.parquet.read_table(path, columns=[column_name])[column_name].chunks
            ]
        )
    else:
        column_values = table.sample_table[column_name]
    return bool(len(column_values) and pc.count_distinct(column_values).as_py() == len(column_values))


class _FileLook(NamedTuple):
    """Result of inspecting one file; `remark` says why it is not a table, or names an oddity of the table."""

    file_path: Path
    file_format: str
    field_separator: str = ","
    column_names: tuple[str, ...] = ()
    sample_table: Any = None
    row_count: int | None = None
    remark: str | None = None
    is_table: bool = True


_GroupKey = tuple[str, str, tuple[str, ...]]
"""Format, separator and sorted column names, which are the same in all files of a table."""


def _unread_looks_by_group(
    file_looks_by_key: Mapping[_GroupKey, Sequence[_FileLook]], unread_looks: Sequence[_FileLook], folder: Path
) -> dict[_GroupKey, list[_FileLook]]:
    """Return the unreadable files, grouped by the table that each belongs to.

    A file belongs to the table that has a file of the same name, apart from digits, in its folder, or to the only table
    in its folder. If that table is a single file in the inspected `folder`, this holds for CSV only: an unreadable
    Parquet file there may be a table of features, which are never CSV.
    """
    unread_by_key: dict[_GroupKey, list[_FileLook]] = {group_key: [] for group_key in file_looks_by_key}
    for unread_look in (unread_look for unread_look in unread_looks if unread_look.remark != NOT_UTF_8_NAME):
        neighbours_by_key = {
            group_key: [
                file_look.file_path
                for file_look in file_looks
                if file_look.file_path.parent == unread_look.file_path.parent
            ]
            for group_key, file_looks in file_looks_by_key.items()
        }
        neighbour_keys = [group_key for group_key, paths in neighbours_by_key.items() if paths]
        alike_keys = [
            group_key
            for group_key in neighbour_keys
            if any(
                _stem_without_digits(path) == _stem_without_digits(unread_look.file_path)
                for path in neighbours_by_key[group_key]
            )
        ]
        is_folder_of_one = len(neighbour_keys) == 1 and (
            len(neighbours_by_key[neighbour_keys[0]]) > 1
            or unread_look.file_path.parent != folder
            or unread_look.file_format == "csv"
        )
        if len(alike_keys) == 1 or is_folder_of_one:
            unread_by_key[(alike_keys or neighbour_keys)[0]].append(unread_look)
    return unread_by_key


def _stem_without_digits(path: Path) -> str:
    """Return a file's name in lower case without ending, digits and punctuation."""
    return re.sub(r"[\W_\d]+", "", path.name.lower().removesuffix(_ending(path)))


class _FolderWalk:
    """Iterable of the files below a folder whose names may be those of data; `remarks` names skipped folders."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.remarks: list[str] = []
        self._folder, self._base = folder, base

    def __iter__(self) -> Iterator[Path]:
        root_depth = len(self._folder.parts)
        for dirpath, subfolder_names, file_names in os.walk(self._folder, onerror=self._note_unlisted):
            folder = Path(dirpath)
            folder_entries = [FolderEntry(name, is_folder=True) for name in subfolder_names]
            folder_entries += _list_metadata_entries(folder) if "metadata" in subfolder_names else []
            for table_kind in table_kind_by_folder(folder_entries).values():
                self.remarks.append(
                    f"{_relative_text(folder, self._base)} is {table_kind}, and is not read: only its log says which "
                    "of its files are valid; write its rows as Parquet files into a separate folder"
                )
                subfolder_names[:], file_names[:] = [], []
            subfolders = sorted(
                name
                for name in subfolder_names
                if is_data_name(name, is_folder=True)
                and name not in _LEFT_OUT_FOLDERS
                and not (folder / name / "bundle.json").exists()
            )
            if subfolders and len(folder.parts) - root_depth >= DEPTH_MAX:
                self.remarks.append(
                    f"{_relative_text(folder, self._base)} has folders that were not inspected: they are too deep"
                )
                subfolders = []
            subfolder_names[:] = subfolders
            yield from (folder / name for name in sorted(file_names) if is_data_name(name))

    def _note_unlisted(self, error: OSError) -> None:
        folder = _relative_text(Path(str(error.filename)), self._base)
        self.remarks.append(f"{folder} cannot be listed: {error.strerror}; may this user read it?")


def _list_metadata_entries(folder: Path) -> list[FolderEntry]:
    entries = LocalStorage().children(str(folder / "metadata"))
    return [FolderEntry(f"metadata/{entry.path}", entry.is_folder) for entry in entries]


def _look_at_safely(path: Path, look_at_file: Callable[[], _FileLook]) -> _FileLook:
    """Inspect a file; turn an error into the remark of a result that is not a table."""
    try:
        str(path).encode()
        return look_at_file()
    except UnicodeEncodeError:
        failure_reason = NOT_UTF_8_NAME
    except UnicodeDecodeError:
        failure_reason = (
            "is not UTF-8: convert it from its encoding, e.g. with iconv -f latin1 (or -f shift_jis) -t utf-8"
        )
    except FILE_ERRORS as error:
        error_lines = str(error).splitlines() or [type(error).__name__]
        failure_reason = f"cannot be read: {error_lines[0]}"
    return _FileLook(path, _FORMAT_BY_ENDING[_ending(path)], remark=failure_reason, is_table=False)


def _remarks_on_unused_files(paths: Sequence[Path], base_folder: Path, *, is_all: bool) -> Iterator[str]:
    """Yield remarks on unused files, with their apparent content and a remedy.

    Without `is_all`, for folders that have tables, only files whose names are those of data are named.
    """
    paths_by_reason: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        if not _ending(path) and (is_all or is_unreadable_data_name(path.name)):
            paths_by_reason[_unused_file_reason(path)].append(path)
    for reason, unused_files in paths_by_reason.items():
        names_text = ", ".join(_relative_text(path, base_folder) for path in unused_files[:_NAMED_FILES_MAX])
        more_text = (
            f" (and {len(unused_files) - _NAMED_FILES_MAX} more)" if len(unused_files) > _NAMED_FILES_MAX else ""
        )
        yield f"{names_text}{more_text} {reason}"


def _unused_file_reason(path: Path) -> str:
    if path.name.lower().endswith((".txt", ".txt.gz")):
        return 'is text: if its lines are `user item item ...`, add it to [sources] interactions with format = "lines"'
    if reason := unreadable_name_reason(path.name):
        return f"is not used: {reason}"
    try:
        with path.open("rb") as file:
            first_bytes = file.read(_SNIFFED_BYTES_MAX)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if reason := unreadable_text_reason(first_bytes):
        return reason
    if (separator_sign := find_row_separator(first_bytes)) == "::":
        return "has fields between double colons: write it with commas into a file whose name ends in .csv"
    if separator_sign is not None:
        ending = ".tsv" if separator_sign == "\t" else ".csv"
        return (
            "is not used: its name does not say its format. It looks like rows with "
            f"{separator_in_words(separator_sign)} "
            "between "
            f"their fields: rename it to {ending}, and add a first line of column names if it has none"
        )
    return (
        "is not used: its name does not say its format. Files of Parquet, CSV, TSV and lines of ids are read if their "
        "names end in .parquet, .csv, .tsv or .txt"
    )


def _ending(path: Path) -> str:
    file_name = path.name.lower()
    return next((ending for ending in _FORMAT_BY_ENDING if file_name.endswith(ending)), "")


def _look_at(path: Path) -> _FileLook:
    """Return the columns and first rows of a file, or a remark why it is not a table."""
    if _FORMAT_BY_ENDING[_ending(path)] == "csv":
        return _look_at_csv(path)
    with pa.parquet.ParquetFile(path) as parquet_file:
        column_names = tuple(parquet_file.schema_arrow.names)
        file_look = _FileLook(path, "parquet", column_names=column_names, row_count=parquet_file.metadata.num_rows)
        if repeated_names_remark := _repeated_names_remark(column_names):
            return file_look._replace(remark=repeated_names_remark, is_table=False)
        batch = next(parquet_file.iter_batches(SAMPLE_ROWS), None) if file_look.row_count else None
        first_batches = [] if batch is None else [batch]
        return file_look._replace(
            sample_table=_plain_table(pa.Table.from_batches(first_batches, parquet_file.schema_arrow))
        )


def _look_at_csv(path: Path) -> _FileLook:
    file_look, is_packed = _FileLook(path, "csv"), path.name.lower().endswith(".gz")
    if is_packed and not is_gzip(path):
        return file_look._replace(remark=NOT_GZIP_REASON, is_table=False)
    # Read a bounded part of the file in one go, so that no background reader is left running.
    with pa.input_stream(str(path), compression="gzip" if is_packed else None) as csv_stream:
        first_bytes: bytes = csv_stream.read(_CSV_BYTES_MAX)
        is_cut = len(first_bytes) == _CSV_BYTES_MAX
    if reason := unreadable_text_reason(first_bytes):
        return file_look._replace(remark=reason, is_table=False)
    while first_bytes.startswith(UTF_8_BYTE_ORDER_MARK):
        first_bytes = first_bytes.removeprefix(UTF_8_BYTE_ORDER_MARK)
    # Without a line break after the column names, the CSV reader finds neither columns nor rows.
    first_bytes = first_bytes[: first_bytes.rfind(b"\n") + 1] if is_cut else first_bytes + b"\n"
    header_line = re.split(rb"[\r\n]", first_bytes, maxsplit=1)[0]
    header_text = header_line.decode()
    if not header_text.strip():
        return file_look._replace(remark="cannot be read: it is empty, or its first line is empty", is_table=False)
    separator = max(_SEPARATORS, key=header_text.count)
    first_bytes = Dialect(separator.encode(), b'"', b"").with_bare_quotes(first_bytes)
    header_line = re.split(rb"[\r\n]", first_bytes, maxsplit=1)[0]
    odd_rows: list[Any] = []

    if header_text.count('"') % 2 and b'"' not in first_bytes[len(header_line) :]:
        return file_look._replace(
            remark="has a quote in its line of column names that is not closed: close it, or leave it out",
            is_table=False,
        )

    def note_odd_row(odd_row: Any) -> str:
        odd_rows.append(odd_row)
        return "skip"

    def read_rows(**types: Any) -> Any:
        return pa.csv.read_csv(
            pa.BufferReader(first_bytes),
            pa.csv.ReadOptions(use_threads=False, block_size=max(1, len(first_bytes))),
            pa.csv.ParseOptions(delimiter=separator, invalid_row_handler=note_odd_row),
            pa.csv.ConvertOptions(column_types=types),
        )

    sample = read_rows()
    # Arrow reads whole numbers of more than 64 bits as floats; such ids are kept as texts.
    type_by_float_column = {field.name: pa.string() for field in sample.schema if pa.types.is_floating(field.type)}
    if type_by_float_column:
        text_table = read_rows(**type_by_float_column)
        for name in type_by_float_column:
            if is_digits(text_table[name]):
                sample = sample.set_column(sample.column_names.index(name), name, text_table[name])
    sample = sample.rename_columns([name.strip(BLANK_CHARACTERS) for name in sample.column_names])
    column_names = tuple(sample.column_names)
    file_look = file_look._replace(field_separator=separator, column_names=column_names)
    if repeated_names_remark := _repeated_names_remark(column_names):
        return file_look._replace(remark=repeated_names_remark, is_table=False)
    if not len(sample) and odd_rows:
        first_odd_row = odd_rows[0]
        return file_look._replace(
            remark=(
                f"has {first_odd_row.expected_columns} column names and {first_odd_row.actual_columns} fields in "
                f"each row: is there {separator_in_words(separator)} behind the last field, one within a value "
                "that has no quotes around it, "
                "or a line above the column names? Write as many fields as names"
            ),
            is_table=False,
        )
    if remark := _unreadable_csv_reason(column_names, separator):
        return file_look._replace(remark=remark, is_table=False)
    sample, header_repeat_count = _without_header(sample.slice(0, SAMPLE_ROWS))
    remark = f"has its header again in {header_repeat_count:,} of its first rows" if header_repeat_count else None
    if not len(sample):
        remark = "has a header and no rows"
    return file_look._replace(sample_table=sample, remark=remark)


def _repeated_names_remark(column_names: Sequence[str]) -> str | None:
    repeated_names = sorted({name for name in column_names if column_names.count(name) > 1})
    if "" in repeated_names:
        return "has several columns without a name: is the first line a title? If so, remove it"
    return f"has several columns called {', '.join(map(repr, repeated_names))}: rename them" if repeated_names else None


def _without_header(sample_table: Any) -> tuple[Any, int]:
    """Return the rows without repeated header lines, whose values equal the column names, and the number of those."""
    if not len(sample_table) or not all(pa.types.is_string(field.type) for field in sample_table.schema):
        return sample_table, 0
    header_mask = None
    for column_name in sample_table.column_names:
        column_name_mask = pc.fill_null(
            pc.equal(pc.utf8_trim_whitespace(sample_table[column_name]), column_name), False
        )
        header_mask = column_name_mask if header_mask is None else pc.and_(header_mask, column_name_mask)
    header_row_count = pc.sum(header_mask).as_py() or 0
    return (sample_table.filter(pc.invert(header_mask)) if header_row_count else sample_table), header_row_count


def _plain_table(table: Any) -> Any:
    return pa.table([_to_comparable_type(table[name]) for name in table.column_names], table.column_names)


def _to_comparable_type(column: Any) -> Any:
    """Convert a column of dictionary, view, extension or decimal type to a plain type; whole decimals become texts."""
    arrow_type = column.type
    if isinstance(arrow_type, pa.BaseExtensionType):
        return _to_comparable_type(column.cast(arrow_type.storage_type))
    if pa.types.is_dictionary(arrow_type):
        return _to_comparable_type(column.cast(arrow_type.value_type))
    if pa.types.is_string_view(arrow_type) or pa.types.is_large_string(arrow_type):
        return column.cast(pa.string())
    if pa.types.is_decimal(arrow_type):
        texts = pc.replace_substring_regex(column.cast(pa.string()), r"\.0+$", "")
        return texts if is_digits(texts) else column.cast(pa.float64())
    return column


def is_digits(id_texts: Any) -> bool:
    """Return True if there are texts and all of them, apart from nulls, are whole numbers in digits."""
    matches = pc.match_substring_regex(id_texts, r"^\s*[+-]?\d+\s*$")
    return bool(len(id_texts) > id_texts.null_count and pc.all(matches, skip_nulls=True).as_py())


def _unreadable_csv_reason(column_names: Sequence[str], field_separator: str) -> str | None:
    """Return the reason why a CSV file with these column names cannot be read; None if it can."""
    if any("::" in name for name in column_names):
        return "has fields between double colons: write it with commas"
    if len(column_names) == 1 and field_separator in column_names[0]:
        return f"has one column, {column_names[0]!r}: {ROW_IN_QUOTES_REMEDY}"
    if len(column_names) == 1:
        return (
            f"has one column, {column_names[0]!r}: if another character than a "
            "comma, a "
            "semicolon, a tab or a bar separates its fields, set the file in [sources] interactions and the character "
            "in separator; if the first line is a title, remove it"
        )
    if is_like_a_row(column_names):
        return NO_COLUMN_NAMES_REASON
    return None


def _build_table(file_looks: Sequence[_FileLook], base_folder: Path, unread_looks: Sequence[_FileLook]) -> FoundTable:
    """Build the table of files with the same columns; column kinds are taken from the first file with rows."""
    first_look = next((file for file in file_looks if len(file.sample_table)), file_looks[0])
    file_paths = [file.file_path for file in file_looks]
    row_counts = [file.row_count for file in file_looks]
    kind_by_column = {
        name: _column_kind(
            first_look.sample_table.schema.field(name).type, first_look.sample_table[name], first_look.file_format
        )
        for name in first_look.column_names
    }
    return FoundTable(
        _shortest_pattern(file_paths, base_folder),
        tuple(file_paths),
        first_look.file_format,
        kind_by_column,
        first_look.sample_table,
        None if None in row_counts else sum(filter(None, row_counts)),
        sum(path.stat().st_size for path in file_paths),
        first_look.field_separator,
        tuple(f"{_relative_text(look.file_path, base_folder)} {look.remark}" for look in unread_looks),
        _shortest_pattern(sorted([*file_paths, *(look.file_path for look in unread_looks)]), base_folder)
        if unread_looks
        else (),
    )


def _shortest_pattern(file_paths: list[Path], base_folder: Path) -> tuple[str, ...]:
    """Return a wildcard pattern that matches exactly these files; if there is none, the files' paths."""
    if len(file_paths) > 1:
        top_folder = Path(os.path.commonpath([path.parent for path in file_paths]))
        endings = {path.name[-len(_ending(path)) :] for path in file_paths}
        wildcards = [f"{subfolders_wildcard}*{ending}" for ending in endings for subfolders_wildcard in ("", "**/")]
        for wildcard in wildcards if len(endings) == 1 else ():
            pattern = (PurePosixPath(_relative_text(top_folder, base_folder)) / wildcard).as_posix()
            if _files_of_pattern(pattern, base_folder) == {os.path.realpath(path) for path in file_paths}:
                return (pattern,)
    return tuple(_relative_text(path, base_folder) for path in file_paths)


def _files_of_pattern(pattern: str, base_folder: Path) -> set[str]:
    """Return the files that a night would read for a pattern."""
    try:
        return {os.path.realpath(str(path)) for path in source_files((pattern,), base_folder)}
    except SourceError:
        return set()


def _relative_text(path: Path, base_folder: Path) -> str:
    relative_path = Path(os.path.relpath(path, base_folder)).as_posix()
    return relative_path.encode("utf-8", "backslashreplace").decode()


def _column_kind(arrow_type: Any, column_values: Any, file_format: str) -> ColumnKind:
    if pa.types.is_integer(arrow_type):
        return "integer"
    if pa.types.is_floating(arrow_type):
        return "float"
    if pa.types.is_list(arrow_type) or pa.types.is_fixed_size_list(arrow_type) or pa.types.is_large_list(arrow_type):
        return "vector" if pa.types.is_floating(arrow_type.value_type) else "other"
    if pa.types.is_string(arrow_type):
        return "integer" if is_digits(column_values) else "text"
    # CSV columns with invalid UTF-8 are binary, and columns without any value are null: both count as text.
    if pa.types.is_null(arrow_type) or (file_format == "csv" and pa.types.is_binary(arrow_type)):
        return "text"
    return "time" if pa.types.is_timestamp(arrow_type) or pa.types.is_date(arrow_type) else "other"

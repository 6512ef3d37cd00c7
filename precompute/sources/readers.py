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
    as_numpy_mask,
    demand_columns,
    demand_unrepeated_column,
    is_text_type,
    normalise_and_decode,
    normalise_batch,
    normalised_type,
    read_ids,
)
from precompute.sources.csv_files import (
    BLANK_CHARACTERS,
    NO_COLUMN_NAMES_REASON,
    ROW_IN_QUOTES_REMEDY,
    CsvFile,
    is_like_a_row,
)
from precompute.sources.files import (
    NOT_GZIP_REASON,
    UTF_8_BYTE_ORDER_MARK,
    SourceFile,
    find_row_separator,
    open_for_arrow,
    separator_in_words,
    source_files,
    unreadable_name_reason,
    unreadable_text_reason,
)
from precompute.sources.id_forms import OddIds
from precompute.sources.repeated_rows import RepeatedRows
from precompute.sources.times import MICROSECONDS_PER_SECOND, TimeScale, parse_times, positive_weight_mask
from precompute.sources.unusable import (
    EVENTS_SOURCE_PREFIX,
    FIELD_COUNT_REASON,
    HEADER_REASON,
    LINE_BREAK_REASON,
    RowCase,
    UnusableRows,
    format_case_value,
)

INTERACTIONS_SOURCE = "interactions"
"""Name of the interactions in reports."""

EVENT_INTERACTIONS_SOURCE = f"{EVENTS_SOURCE_PREFIX}.{INTERACTIONS_SOURCE}"
"""Name in reports of the interactions from events."""

ColumnsOfLists = Mapping[str, Sequence[str]]
"""Columns that a table may have instead of a list column, by the list's name."""

NO_COLUMNS_OF_LISTS: Final[ColumnsOfLists] = MappingProxyType({})

BATCH_ROWS_MAX = 1 << 19
"""Most rows of a batch."""

BATCH_BYTES_MAX = 128 << 20
"""Most bytes of a batch of features."""

READ_BUFFER_BYTES = 1 << 20
"""Bytes of a feature table read at once."""

CHECKED_LINES_MAX = 1_000
"""Lines of a text file that are checked before it is read as lines of ids."""

TABLE_FIELD_COUNTS = range(3, 9)
"""Numbers of fields of a line that may be a row of a table."""

_NUMBER_OR_TIME_PATTERN = re.compile(rb"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?$|\d{4}-\d{2}-\d{2}|\d{2}:\d{2}")
ID_KINDS_MAX = 20
"""Most distinct words before a colon that may be kinds of ids, as in `film:17`."""
_NUMBER_PATTERN = re.compile(rb"[+-]?\d+(\.\d*)?")
_NAMES_LINE_PATTERN = re.compile(
    rb"(user|customer|visitor|session)(_?id)?s? (item|product|movie|article)(_?id)?s?( .*)?", re.IGNORECASE
)
"""Pattern of a first line, in a file of lines of ids, that names columns."""
_COMMENT_PREFIXES = (b"# ", b"% ", b"// ")
"""Prefixes of comment lines at the start of a text file, as in files of graphs and matrices."""

INT96_UNIT = "us"
"""Unit for Spark's INT96 times: in nanoseconds, times after the year 2262 would wrap around."""

PARQUET_LENGTH_BYTES = 4
"""Bytes of a text's length in a Parquet file, outside of dictionaries."""

_LIKE_NONE_PATTERN = r"^(\(not set\)|\(other\)|-+|\?+|#{3,}|nil|Nil|-1|unknown|Unknown|anonymous|Anonymous)$"
"""Pattern of ids that programs write for a missing value, but that may also be names."""
LIKE_NONE_SHARE_MIN = 0.01
LIKE_NONE_IDS_MAX = 5
"""Such ids that are counted, at most; LIKE_NONE_SHARE_MIN is the share of the first rows from which one is named."""

_READ_ERRORS = (OSError, EOFError, zlib.error, UnicodeDecodeError, pa.ArrowException)
_PARQUET_MAGIC = b"PAR1"
_SNIFFED_BYTES = 1 << 16
_CUT_OFF_PATTERN = re.compile("Truncated compressed stream")
"""Arrow's message for a truncated compressed file."""
_NOT_GZIP_PATTERN = re.compile("incorrect header check|Not a gzipped file")
"""Readers' messages for a file that ends in .gz but is not gzip."""

_LASTING_ERRNOS = frozenset({errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG})
"""File system errors that persist on a retry."""


@dataclass(frozen=True, slots=True, eq=False)
class Interactions:
    """Batch of interactions; `times_us` are int64 microseconds since 1970, 0 if not given.

    `event_positions` int64 are those of events in their stream; None for source files.
    """

    user_ids: Ids
    item_ids: Ids
    times_us: NDArray[np.int64]
    event_positions: NDArray[np.int64] | None = None

    def only(self, row_mask: NDArray[np.bool_]) -> Self:
        """Return the rows in the mask."""
        positions = None if self.event_positions is None else self.event_positions[row_mask]
        return type(self)(
            self.user_ids.only(row_mask), self.item_ids.only(row_mask), self.times_us[row_mask], positions
        )


def read_interactions(
    sources: Sources,
    base_folder: Path,
    *,
    cutoff_at: datetime | None = None,
    take_late: Callable[[Interactions], None] = lambda _late: None,
    unusable_rows: UnusableRows | None = None,
    skipped_file_count: int = 0,
    interaction_files: Sequence[SourceFile] | None = None,
) -> Generator[Interactions, None, None]:
    """Yield batches of interactions; with `cutoff_at`, only earlier rows and those without a time.

    The files are `interaction_files`, by default those that `sources` name; the first `skipped_file_count` are skipped.
    Later rows go to `take_late`. Rows with a weight of 0 or less are no interactions and are left out. Unusable rows
    are left out and counted in `unusable_rows`, where remarks on odd ids and repeated rows are added at the end, or
    when the iterator is closed. Raises SourceError naming file and column, or if no row can be used.
    """
    odd_rows = None if unusable_rows is None else _OddRowsCollector(sources, unusable_rows)
    cutoff_us = None if cutoff_at is None else int(cutoff_at.timestamp() * MICROSECONDS_PER_SECOND)
    unusable_rows = UnusableRows() if unusable_rows is None else unusable_rows
    all_files = source_files(sources.interactions, base_folder) if interaction_files is None else interaction_files
    read_files, same_columns = all_files[skipped_file_count:], SameColumnsCheck(sources)
    if read_files and (skipped_files := all_files[:skipped_file_count]):
        same_columns.add(skipped_files[0], column_names(skipped_files[0], sources) or ())
    try:
        for source_file in read_files:
            remark = partial(unusable_rows.remark, INTERACTIONS_SOURCE)
            time_scale = TimeScale(source_file, sources.timestamp_column, remark)
            with translate_read_errors(source_file):
                for arrow_batch, file_columns in _read_batches(source_file, sources, unusable_rows):
                    if len(arrow_batch):
                        same_columns.add(source_file, arrow_batch.schema.names)
                    batch = _usable_interactions(
                        arrow_batch, file_columns, source_file, sources, unusable_rows, time_scale
                    )
                    if odd_rows is not None:
                        odd_rows.add(source_file, batch)
                    if cutoff_us is not None and (is_late := batch.times_us >= cutoff_us).any():
                        take_late(batch.only(is_late))
                        yield batch.only(~is_late)
                    else:
                        yield batch
    finally:
        if odd_rows is not None:
            odd_rows.note_remarks()
    if not skipped_file_count:
        unusable_rows.demand_some(INTERACTIONS_SOURCE, ", ".join(path.name for path in read_files[:3]))


class _OddRowsCollector:
    """Collector of remarks on odd ids and repeated rows, over all files, for `unusable_rows`.

    Reports must not have erased users' ids, so hidden ids are never named.
    """

    def __init__(self, sources: Sources, unusable_rows: UnusableRows) -> None:
        self._unusable_rows, self._repeated_rows = unusable_rows, RepeatedRows()
        self._id_columns = (sources.user_column, sources.item_column)
        self._odd_ids = tuple(OddIds(column, unusable_rows.hidden) for column in self._id_columns)
        self._last_file: SourceFile | None = None

    def add(self, path: SourceFile, batch: Interactions) -> None:
        """Add the next rows of a file."""
        if not len(batch.times_us):
            return
        self._repeated_rows.add(path, batch.user_ids, batch.item_ids, batch.times_us)
        is_first_batch, self._last_file = path != self._last_file, path
        for ids, odd_ids, column in zip((batch.user_ids, batch.item_ids), self._odd_ids, self._id_columns, strict=True):
            odd_ids.add(ids)
            if is_first_batch:
                self._remark_on_ids_like_none(ids, column)

    def note_remarks(self) -> None:
        """Add the remarks to `unusable_rows`."""
        for odd_ids in self._odd_ids:
            for remark, named_ids in odd_ids.remarks():
                self._unusable_rows.remark(INTERACTIONS_SOURCE, remark, named_ids)
        for remark in self._repeated_rows.remarks():
            self._unusable_rows.remark(INTERACTIONS_SOURCE, remark)

    def _remark_on_ids_like_none(self, ids: Ids, column_name: str) -> None:
        like_none_codes = np.flatnonzero(as_numpy_mask(pc.match_substring_regex(ids.distinct_ids, _LIKE_NONE_PATTERN)))
        for id_code in like_none_codes[:LIKE_NONE_IDS_MAX].tolist():
            row_count = int((ids.id_codes == id_code).sum())
            if row_count >= LIKE_NONE_SHARE_MIN * len(ids.id_codes):
                self._unusable_rows.remark(
                    INTERACTIONS_SOURCE,
                    f"column {column_name!r} has the id {ids.distinct_ids[id_code].as_py()!r} in "
                    f"{row_count:,} of its first "
                    f"{len(ids.id_codes):,} rows: if it stands for a missing id, remove these rows",
                )


def _read_batches(
    path: SourceFile, sources: Sources, unusable_rows: UnusableRows
) -> Iterator[tuple[Any, Sequence[str]]]:
    """Yield (record batch of the columns that settings name, names of all columns of the file)."""
    match file_format_of(path, sources):
        case "lines":
            return read_lines(path, sources)
        case "csv":
            return csv_batches(path, sources, unusable_rows)
    return parquet_batches(path, sources)


def _usable_interactions(
    arrow_batch: Any,
    file_columns: Sequence[str],
    path: SourceFile,
    sources: Sources,
    unusable_rows: UnusableRows,
    time_scale: TimeScale,
) -> Interactions:
    """Return ids and times of a batch's usable rows; note the others."""
    read_columns = arrow_batch.schema.names
    user_column, item_column, weight_column = (sources.user_column, sources.item_column, sources.weight_column)
    demand_columns(read_columns, (user_column, item_column), path)
    bad_mask_by_reason: UnusableMaskByReason = {}
    unusable_rows.count_checked(INTERACTIONS_SOURCE, len(arrow_batch))
    if weight_column in read_columns:
        positive_mask, bad_mask_by_reason = positive_weight_mask(arrow_batch.column(weight_column), path, sources)
        keep_mask = (
            positive_mask | np.logical_or.reduce(list(bad_mask_by_reason.values()))
            if bad_mask_by_reason
            else positive_mask
        )
        if not keep_mask.all():
            arrow_batch, bad_mask_by_reason = (
                arrow_batch.filter(pa.array(keep_mask)),
                {reason: bad_mask[keep_mask] for reason, bad_mask in bad_mask_by_reason.items()},
            )
    times, no_time_mask_by_reason = np.zeros(len(arrow_batch), np.int64), UnusableMaskByReason()
    if (timestamp_column := sources.timestamp_column) in read_columns:
        times, no_time_mask_by_reason = parse_times(
            arrow_batch.column(timestamp_column), path, timestamp_column, time_scale
        )
    user_ids, bad_user_mask_by_reason = read_ids(arrow_batch.column(user_column), path, user_column)
    item_ids, bad_item_mask_by_reason = read_ids(arrow_batch.column(item_column), path, item_column)
    interactions = Interactions(user_ids, item_ids, times)
    header_mask_by_reason = _header_mask_by_reason(interactions, arrow_batch, file_columns, path, sources)
    if not (
        bad_mask_by_reason := {
            **header_mask_by_reason,
            **bad_user_mask_by_reason,
            **bad_item_mask_by_reason,
            **no_time_mask_by_reason,
            **bad_mask_by_reason,
        }
    ):
        return interactions

    def describe_row(row_index: int) -> RowCase:
        ids = (
            format_case_value(_python_value(arrow_batch.column(column), row_index))
            for column in (user_column, item_column)
        )
        return {**dict(zip(("user", "item"), ids, strict=True)), "file": path.name}

    return interactions.only(~unusable_rows.note_rows(INTERACTIONS_SOURCE, bad_mask_by_reason, describe_row))


def _header_mask_by_reason(
    interactions: Interactions, arrow_batch: Any, file_columns: Sequence[str], path: SourceFile, sources: Sources
) -> UnusableMaskByReason:
    """Return the mask of rows that repeat the column names, ignoring case, as in joined files.

    Raises SourceError for a header with the names in another order, since the rows below it have other columns.
    """
    lowered_titles = {title.strip(BLANK_CHARACTERS).lower() for title in file_columns}
    is_header = np.ones(len(interactions.times_us), np.bool_)
    for ids in (interactions.item_ids, interactions.user_ids):  # items first: there are fewer
        if not (title_codes := _codes_equal_to_titles(ids.distinct_ids, lowered_titles)).size:
            return {}
        is_header &= np.isin(ids.id_codes, title_codes)
    read_columns = [name for name in _read_column_names(sources) if name in arrow_batch.schema.names]
    expected_titles = [name.strip(BLANK_CHARACTERS).lower() for name in read_columns]
    other_header: list[str] = []
    for row in np.flatnonzero(is_header).tolist():
        cells = [str(format_case_value(_python_value(arrow_batch.column(name), row))) for name in read_columns]
        lowered_cells = [cell.strip(BLANK_CHARACTERS).lower() for cell in cells]
        if lowered_cells != expected_titles and len(lowered_titles.intersection(lowered_cells)) == len(lowered_cells):
            other_header = lowered_cells
        is_header[row] = lowered_cells[:2] == expected_titles[:2]
    if other_header:
        _refuse_other_header(file_columns, other_header, path, sources)
    return {HEADER_REASON: is_header} if is_header.any() else {}


def _codes_equal_to_titles(id_texts: Any, lowered_titles: set[str]) -> NDArray[np.intp]:
    """Return the codes of ids that equal a column's name, ignoring case."""
    title_lengths = pa.array(sorted({len(title.encode()) for title in lowered_titles}), pa.int32())
    same_length_codes = np.flatnonzero(as_numpy_mask(pc.is_in(pc.binary_length(id_texts), value_set=title_lengths)))
    lowered_ids = pc.ascii_lower(id_texts.take(pa.array(same_length_codes)))
    return same_length_codes[
        as_numpy_mask(pc.is_in(lowered_ids, value_set=pa.array(sorted(lowered_titles), pa.string())))
    ]


def _refuse_other_header(
    file_columns: Sequence[str], row_cells: Sequence[str], path: SourceFile, sources: Sources
) -> None:
    """Raise SourceError for a row of the column names in another order; for CSV, only if a line is such a row."""
    place_text = "one of its rows"
    if file_format_of(path, sources) == "csv":
        with CsvFile.opened(path, sources) as file:
            if (header_line := file.find_line_of_names()) is None:
                return
        line_number, row_cells = header_line
        place_text = f"line {line_number}"
    raise SourceError(
        f"{path}, {place_text} is another header: {','.join(row_cells)}: the rows below it have their columns "
        "in another "
        "order "
        f"than {','.join(file_columns)}: write them into a separate file",
        path=str(path),
    )


def _python_value(column: Any, row_index: int) -> Any:
    """Return a row's value as a Python object; texts as bytes, which may not be UTF-8."""
    arrow_value = column[row_index : row_index + 1]
    if pa.types.is_dictionary(arrow_value.type):
        arrow_value = arrow_value.dictionary_decode()
    return (arrow_value.cast(pa.large_binary()) if is_text_type(arrow_value.type) else arrow_value)[0].as_py()


def read_features(
    path: SourceFile,
    id_column: str,
    feature_columns: Sequence[str],
    *,
    source_name: str = "features",
    unusable_rows: UnusableRows | None = None,
    columns_of_lists: ColumnsOfLists = NO_COLUMNS_OF_LISTS,
) -> Iterator[tuple[Ids, dict[str, Any]]]:
    """Yield batches (ids, {column: Arrow array}) of a Parquet feature table; raise SourceError for a missing column.

    A list column that the table lacks is built from the columns that `columns_of_lists` names for it. Rows without a
    usable id are left out and noted in `unusable_rows` under `source_name`, as are remarks on odd ids.
    """
    unusable_rows = UnusableRows() if unusable_rows is None else unusable_rows
    odd_ids = OddIds(id_column, unusable_rows.hidden)
    # Without a buffer, a whole row group of a column would be read at once.
    open_parquet = partial(
        pa.parquet.ParquetFile, buffer_size=READ_BUFFER_BYTES, coerce_int96_timestamp_unit=INT96_UNIT
    )
    with translate_read_errors(path), open_for_arrow(path) as raw, open_parquet(raw) as file:
        parts_by_column = {
            name: _source_columns_of(name, file.schema_arrow.names, columns_of_lists) for name in feature_columns
        }
        file_columns = [id_column, *chain.from_iterable(parts_by_column.values())]
        _demand_features(file.schema_arrow.names, file_columns, path)
        for batch in file.iter_batches(_batch_row_count(file.metadata), columns=list(dict.fromkeys(file_columns))):
            batch = normalise_batch(batch)
            unusable_rows.count_checked(source_name, len(batch))
            id_array = batch.column(id_column)
            ids, bad_mask_by_reason = read_ids(id_array, path, id_column)
            if bad_mask_by_reason:

                def describe_row(row_index: int, id_values: Any = id_array) -> dict[str, str | None]:
                    return {"id": format_case_value(_python_value(id_values, row_index)), "file": path.name}

                is_usable = ~unusable_rows.note_rows(source_name, bad_mask_by_reason, describe_row)
                ids, batch = ids.only(is_usable), batch.filter(pa.array(is_usable))
            odd_ids.add(ids)
            yield (
                ids,
                {
                    name: _pack_columns(
                        [normalise_and_decode(batch.column(part_column)) for part_column in part_columns]
                    )
                    for name, part_columns in parts_by_column.items()
                },
            )
    for remark, named_ids in odd_ids.remarks():
        unusable_rows.remark(source_name, f"{path.name}: {remark}", named_ids)
    unusable_rows.demand_some(source_name, path.name)


def _batch_row_count(parquet_metadata: Any) -> int:
    """Return the rows per batch: at most BATCH_ROWS_MAX, and about BATCH_BYTES_MAX."""
    row_groups = (parquet_metadata.row_group(group_index) for group_index in range(parquet_metadata.num_row_groups))
    row_bytes: int = sum(group.total_byte_size for group in row_groups) // max(1, parquet_metadata.num_rows)
    return max(1, min(BATCH_ROWS_MAX, BATCH_BYTES_MAX // max(1, row_bytes)))


def feature_schema(
    path: SourceFile, feature_columns: Sequence[str] = (), columns_of_lists: ColumnsOfLists = NO_COLUMNS_OF_LISTS
) -> Any:
    """Return the Arrow schema of a Parquet feature table, in the types read; raise SourceError for a missing column.

    It includes list columns among `feature_columns` that `read_features` builds from other columns.
    """
    with translate_read_errors(path), open_for_arrow(path) as raw:
        schema = pa.parquet.read_schema(raw)
    parts_by_column = {name: _source_columns_of(name, schema.names, columns_of_lists) for name in feature_columns}
    _demand_features(schema.names, list(chain.from_iterable(parts_by_column.values())), path)
    fields = [field.with_type(normalised_type(_value_type(field.type))) for field in schema]
    type_by_column = {field.name: field.type for field in fields}
    for name, part_columns in parts_by_column.items():
        if name not in type_by_column:
            try:
                packed_type = _pack_columns(
                    [pa.array([], type_by_column[part_column]) for part_column in part_columns]
                ).type
            except pa.ArrowException as error:
                raise SourceError(
                    f"{path}: columns {', '.join(part_columns)} are read as one list {name!r}, so they must be all "
                    "numbers or "
                    f"all texts: {error}",
                    column=name,
                ) from None
            fields.append(pa.field(name, packed_type))
    return pa.schema(fields)


def _source_columns_of(
    feature_name: str, file_columns: Sequence[str], columns_of_lists: ColumnsOfLists
) -> Sequence[str]:
    """Return the columns from which a feature is read: its own, else those of which its list consists."""
    part_columns = columns_of_lists.get(feature_name, ())
    has_part = any(part_column in file_columns for part_column in part_columns)
    return (feature_name,) if feature_name in file_columns or not has_part else part_columns


def _pack_columns(part_arrays: Sequence[Any]) -> Any:
    """Return a single column unchanged, several as a column of lists: of texts, whole numbers or float64."""
    if len(part_arrays) == 1:
        return part_arrays[0]
    part_types = [part_array.type for part_array in part_arrays]
    packed_type = pa.float64()
    if all(map(is_text_type, part_types)):
        packed_type = pa.string()
    elif all(pa.types.is_integer(kind) or pa.types.is_boolean(kind) for kind in part_types):
        packed_type = pa.int64()
    elif any(map(is_text_type, part_types)):
        raise pa.ArrowInvalid(f"they are {', '.join(sorted(set(map(str, part_types))))}")
    values = pa.concat_arrays(
        [part_array.cast(packed_type, safe=packed_type != pa.float64()) for part_array in part_arrays]
    )
    take_indexes = np.arange(len(values)).reshape(len(part_arrays), -1).T.ravel()
    return pa.FixedSizeListArray.from_arrays(values.take(pa.array(take_indexes)), len(part_arrays))


def _demand_features(file_columns: Sequence[str], feature_columns: Sequence[str], path: SourceFile) -> None:
    """Raise SourceError for a column that is missing or repeated."""
    demand_columns(file_columns, feature_columns, path)
    for feature_column in feature_columns:
        demand_unrepeated_column(file_columns, feature_column, path)


def _value_type(arrow_type: Any) -> Any:
    return arrow_type.value_type if pa.types.is_dictionary(arrow_type) else arrow_type


def row_count(path: SourceFile) -> int:
    """Return the number of rows of a Parquet file, from its metadata."""
    with translate_read_errors(path), open_for_arrow(path) as raw:
        row_count: int = pa.parquet.read_metadata(raw).num_rows
    return row_count


@contextmanager
def translate_read_errors(path: SourceFile) -> Iterator[None]:
    """Translate the errors of file readers to SourceError or StoreError."""
    try:
        yield
    except _READ_ERRORS as error:
        if _is_transient_error(error):
            raise StoreError(f"cannot read {path} now: {error}; run the step again") from error
        match error:
            case UnicodeDecodeError():
                remedy = "it is not UTF-8; convert it, e.g. with iconv -t utf-8"
            case _ if isinstance(error, EOFError) or _CUT_OFF_PATTERN.search(str(error)):
                remedy = "it is cut off; copy it again"
            case _ if _NOT_GZIP_PATTERN.search(str(error)):
                remedy = f"it {NOT_GZIP_REASON}"
            case zlib.error() | gzip.BadGzipFile():
                remedy = "its compressed data is damaged; copy it again"
            case OSError():
                remedy = "is it complete, and may this user read it?"
            case _:
                remedy = _remedy_by_content(path)
        raise SourceError(f"cannot read {path}: {error} ({remedy})", path=str(path)) from error


def _remedy_by_content(path: SourceFile) -> str:
    """Return a remedy for a file that its reader refused, by its name and first bytes."""
    try:
        with path.open("rb") as raw:
            first_bytes = raw.read(_SNIFFED_BYTES)
    except (*_READ_ERRORS, StoreError):
        first_bytes = _PARQUET_MAGIC
    is_parquet = path.suffix.lower() in (".parquet", ".pq")
    if is_parquet and not first_bytes.startswith(_PARQUET_MAGIC):
        if not first_bytes:
            return "it is empty; copy it again, or remove it"
        if reason := unreadable_text_reason(first_bytes):
            return f"it {reason}"
        if find_row_separator(first_bytes) is not None:
            return "it looks like rows of text: rename it to end in .csv"
    return "is it complete, and in the format that its name or sources.format says?"


def _is_transient_error(error: Exception) -> bool:
    """True if a disk or a network failed (EIO, a stale NFS handle), not the file; Arrow's errors have no errno."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    return isinstance(error, OSError) and error.errno is not None and error.errno not in _LASTING_ERRNOS


def file_format_of(path: SourceFile, sources: Sources) -> str:
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
    if reason := unreadable_name_reason(path.name):
        raise SourceError(f"cannot read {path}: {reason}")
    raise SourceError(f"cannot tell the format of {path}; set sources.format to parquet, csv or lines")


def column_names(path: SourceFile, sources: Sources) -> list[str] | None:
    """Return the names of a file's columns; None for lines of ids, which have none."""
    with translate_read_errors(path):
        match file_format_of(path, sources):
            case "lines":
                return None
            case "csv":
                with CsvFile.opened(path, sources) as file:
                    return file.column_names
        with open_for_arrow(path) as raw:
            return list(pa.parquet.read_schema(raw).names)


def required_optional_columns(sources: Sources) -> list[str]:
    """Return the columns of times and weights that settings name explicitly, which must therefore exist."""
    default_sources = Sources()
    default_columns = ("", default_sources.timestamp_column, default_sources.weight_column)
    configured_columns = (sources.timestamp_column, sources.weight_column)
    return [name for name in configured_columns if name not in default_columns]


def demand_named_columns(file_columns: Sequence[str], sources: Sources, path: SourceFile) -> None:
    """Raise SourceError, naming the setting, for a required column that is missing or repeated."""
    needed_columns = [sources.user_column, sources.item_column, *required_optional_columns(sources)]
    setting_names = ("user_column", "item_column", "timestamp_column", "weight_column")
    is_csv = file_format_of(path, sources) == "csv"
    if is_csv and is_like_a_row(file_columns):
        lacks_column = any(name.strip(BLANK_CHARACTERS) not in file_columns for name in needed_columns)
        if lacks_column or (is_like_a_row(needed_columns) and not _are_pandas_numbers(file_columns)):
            raise SourceError(f"{path} {NO_COLUMN_NAMES_REASON}")
    further_remedy = ", or put a line of column names above if there is none" if is_csv else ""
    if is_csv and "" in file_columns:
        further_remedy += "; is the first line a title? Remove it"
    for setting_name in setting_names:
        column_name = getattr(sources, setting_name)
        column_title = column_name.strip(BLANK_CHARACTERS) if is_csv else column_name
        if column_name in needed_columns and column_title not in file_columns:
            columns_text = (
                ", ".join(map(repr, file_columns)) if any(map(_is_padded, file_columns)) else ", ".join(file_columns)
            )
            raise SourceError(
                f"{path} has no column {column_name!r}; it has {columns_text}: name it by "
                f"{setting_name}{further_remedy}",
                column=column_name,
            )
        demand_unrepeated_column(file_columns, column_title, path)


def _are_pandas_numbers(file_columns: Sequence[str]) -> bool:
    """True for the names 0, 1, 2 ..., which pandas writes for columns without names."""
    return list(file_columns) == [str(number) for number in range(len(file_columns))]


def _is_padded(column_name: str) -> bool:
    return column_name != column_name.strip()


def demand_same_columns(source_files: Sequence[SourceFile], sources: Sources) -> None:
    """Raise SourceError naming a file that lacks a column of times or weights that another file has."""
    same_columns = SameColumnsCheck(sources)
    for path in source_files:
        same_columns.add(path, column_names(path, sources) or ())


class SameColumnsCheck:
    """Check that all files have the same optional columns, of times and of weights."""

    def __init__(self, sources: Sources) -> None:
        self._checked_columns = [*filter(None, (sources.timestamp_column, sources.weight_column))]
        self._first_file_columns: tuple[SourceFile, frozenset[str]] | None = None

    def add(self, path: SourceFile, file_columns: Sequence[str]) -> None:
        """Add the next file; raise SourceError if its columns of times or weights differ from the first file's."""
        present_columns = frozenset(
            name
            for name in self._checked_columns
            if name.strip(BLANK_CHARACTERS) in file_columns or name in file_columns
        )
        if self._first_file_columns is None:
            self._first_file_columns = path, present_columns
        first_file, first_columns = self._first_file_columns
        for name in self._checked_columns:
            if (name in present_columns) == (name in first_columns):
                continue
            lacking_file, having_file = (path, first_file) if name in first_columns else (first_file, path)
            setting_name = "timestamp_column" if name == self._checked_columns[0] else "weight_column"
            raise SourceError(
                f"{lacking_file} has no column {name!r}, but {having_file} has: its rows would count as the oldest, "
                "or as "
                f'positive: add the column, or set [sources] {setting_name} = "" to read it from no file',
                column=name,
            )


def _read_column_names(sources: Sources) -> list[str]:
    """Return the names of the columns that are read if they exist."""
    optional_columns = (sources.timestamp_column, sources.weight_column)
    return [sources.user_column, sources.item_column, *filter(None, optional_columns)]


def parquet_batches(path: SourceFile, sources: Sources) -> Iterator[tuple[Any, Sequence[str]]]:
    """Yield (batch of the columns that settings name, all column names) of a Parquet file."""
    with open_for_arrow(path) as raw:
        metadata = pa.parquet.read_metadata(raw)
    file_columns = metadata.schema.to_arrow_schema().names
    demand_named_columns(file_columns, sources, path)
    read_columns = [name for name in _read_column_names(sources) if name in file_columns]
    dictionary_columns = [name for name in read_columns[:2] if name in _dictionary_columns(metadata)]
    open_parquet = partial(
        pa.parquet.ParquetFile,
        metadata=metadata,
        read_dictionary=dictionary_columns,
        coerce_int96_timestamp_unit=INT96_UNIT,
    )
    with open_for_arrow(path) as raw, open_parquet(raw) as file:
        for batch in file.iter_batches(BATCH_ROWS_MAX, columns=read_columns):
            yield normalise_batch(batch), file_columns


def _dictionary_columns(parquet_metadata: Any) -> set[str]:
    """Return the columns of a Parquet file that are dictionary-encoded throughout.

    Once a dictionary is too large for its page, plain texts follow, and looking those up costs more than sorting.
    """
    if not parquet_metadata.num_row_groups:
        return set()
    row_group = parquet_metadata.row_group(0)
    column_chunks = (row_group.column(column_index) for column_index in range(row_group.num_columns))
    return {
        column_chunk.path_in_schema
        for column_chunk in column_chunks
        if column_chunk.total_uncompressed_size < PARQUET_LENGTH_BYTES * column_chunk.num_values
    }


def csv_batches(path: SourceFile, sources: Sources, unusable_rows: UnusableRows) -> Iterator[tuple[Any, Sequence[str]]]:
    """Yield (batch of the columns that settings name, all column names) of a CSV file.

    Columns are strings that may not be UTF-8.
    """

    def note_skipped_line(line_number: int) -> None:
        unusable_rows.count_checked(INTERACTIONS_SOURCE, 1)
        unusable_rows.note(INTERACTIONS_SOURCE, FIELD_COUNT_REASON, 1, [{"file": path.name, "line": str(line_number)}])

    title_by_column = {name: name.strip(BLANK_CHARACTERS) for name in _read_column_names(sources)}
    with CsvFile.opened(path, sources) as file:
        if len(file.column_names) == 1 and title_by_column[sources.user_column] not in file.column_names:
            remedy = ROW_IN_QUOTES_REMEDY
            if sources.separator not in file.column_names[0]:
                remedy = (
                    "if fields are separated by another character than "
                    f"{separator_in_words(sources.separator)}, name it in [sources] separator; is the first line a "
                    "title? "
                    "Remove it"
                )
            raise SourceError(f"{path} has one column, {file.column_names[0]!r}: {remedy}")
        demand_named_columns(file.column_names, sources, path)
        present_title_by_column = {name: title for name, title in title_by_column.items() if title in file.column_names}
        user_column, item_column = sources.user_column, sources.item_column
        for batch in file.batches(list(present_title_by_column.values()), note_skipped_line):
            arrow_batch = pa.record_batch(batch.columns, list(present_title_by_column))
            if file.has_long_values:
                for name in (user_column, item_column):
                    has_break = pc.match_substring_regex(arrow_batch.column(name), "[\r\n]")
                    arrow_batch = _without_rows(
                        arrow_batch, f"{name}: {LINE_BREAK_REASON}", has_break, path, unusable_rows
                    )
            yield arrow_batch, file.column_names


def _without_rows(arrow_batch: Any, reason: str, bad_mask: Any, path: SourceFile, unusable_rows: UnusableRows) -> Any:
    """Return the rows outside the mask; note the others."""
    if bad_row_count := pc.sum(bad_mask).as_py():
        unusable_rows.count_checked(INTERACTIONS_SOURCE, bad_row_count)
        unusable_rows.note(INTERACTIONS_SOURCE, reason, bad_row_count, [{"file": path.name}])
        return arrow_batch.filter(pc.invert(bad_mask))
    return arrow_batch


def read_lines(path: SourceFile, sources: Sources) -> Iterator[tuple[Any, Sequence[str]]]:
    """Yield (batch, column names) of lines `user item item ...`, separated by blanks."""
    row_users: list[bytes] = []
    row_items: list[bytes] = []
    column_titles = [sources.user_column, sources.item_column]

    def make_batch() -> tuple[Any, Sequence[str]]:
        # Not checked here: a line that is not UTF-8 only loses its own rows.
        columns = (pa.array(ids, pa.binary()).view(pa.string()) for ids in (row_users, row_items))
        return pa.record_batch(list(columns), column_titles), column_titles

    if sources.format != "lines":
        demand_lines_of_ids(path)
    with path.open("rb") as raw:
        for line in _iterate_lines(path, raw):
            if not (fields := line.split()):
                continue
            user, *line_items = fields
            row_users += [user] * len(line_items)
            row_items += line_items
            if len(row_users) >= BATCH_ROWS_MAX:
                yield make_batch()
                row_users, row_items = [], []
    if row_users:
        yield make_batch()


def _iterate_lines(path: SourceFile, raw_file: Any) -> Iterator[bytes]:
    """Yield the lines of a file without its byte order mark."""
    lines = iter(gzip.GzipFile(fileobj=raw_file) if path.suffix.lower() == ".gz" else raw_file)
    for first_line in islice(lines, 1):
        if reason := unreadable_text_reason(first_line):
            raise SourceError(f"{path} {reason}")
        while first_line.startswith(UTF_8_BYTE_ORDER_MARK):
            first_line = first_line.removeprefix(UTF_8_BYTE_ORDER_MARK)
        yield first_line
    yield from lines


def demand_lines_of_ids(path: SourceFile) -> None:
    """Raise SourceError for a text file that looks like a table; not called if the format is set."""
    with path.open("rb") as raw:
        first_lines = [line.strip(b"\r\n") for line in islice(_iterate_lines(path, raw), CHECKED_LINES_MAX)]
    if first_lines and first_lines[0].startswith(_COMMENT_PREFIXES):
        raise SourceError(
            f"{path} begins with a comment, {format_case_value(first_lines[0])!r}: lines are read as `user item item "
            "...`, so "
            "remove "
            "comments"
        )
    if reason := _odd_signs_reason([line for line in first_lines if line.strip()]):
        raise SourceError(
            f"{path} {reason}: lines are read as `user item item ...`, with blanks between them: remove what is not an "
            'id; if it is part of the ids, set [sources] format = "lines"; if the lines are rows of a table, '
            'format = "csv"'
        )
    if reason := table_like_reason([line for line in first_lines if line.strip()]):
        raise SourceError(
            f"{path} {reason}, not lines of `user item item ...`: put a line of column names above if there is none, "
            'and set [sources] format = "csv" and separator to the character between fields; if they are lines of ids, '
            'set format = "lines"'
        )


def _odd_signs_reason(lines: Sequence[bytes]) -> str | None:
    """Return the reason why the lines have characters or names that would be read as ids; else None."""
    split_lines = [fields for fields in (line.split() for line in lines) if len(fields) > 1]
    if not split_lines:
        return None
    # A first line `user item` is left out and counted as a header.
    if split_lines[0] != [b"user", b"item"] and _NAMES_LINE_PATTERN.fullmatch(b" ".join(split_lines[0])):
        return f"begins with column names, {format_case_value(b' '.join(split_lines[0]))!r}"
    for sign in (b",", b";"):
        if _is_majority(field.endswith(sign) for fields in split_lines for field in fields[:-1]):
            return f"has {sign.decode()!r} after its ids"
    if _is_majority(fields[0].endswith(b":") for fields in split_lines):
        return "has ':' after the first id of its lines"
    for sign in (b"[", b"(", b"{"):
        if _is_majority(fields[1].startswith(sign) for fields in split_lines):
            return f"has lists that begin with {sign.decode()!r}"
    for sign in (b"|", b":", b"->", b"=>", b"="):
        if _is_majority(fields[1] == sign for fields in split_lines):
            return f"has {sign.decode()!r} after the first id of its lines"
    partitioned_fields = [field.rpartition(b":") for fields in split_lines for field in fields[1:]]
    # Prefixed ids such as `film:17` have few distinct words before the colon.
    if _is_majority(_NUMBER_PATTERN.fullmatch(value) is not None for _, _, value in partitioned_fields):
        key_parts, value_parts = ({value[part] for value in partitioned_fields} for part in (0, 2))
        if len(key_parts) > min(len(value_parts), ID_KINDS_MAX) and _is_majority(
            sign == b":" for _, sign, _ in partitioned_fields
        ):
            return "has a value after each id and ':'"
    return None


def _is_majority(line_flags: Iterable[bool]) -> bool:
    flag_list = list(line_flags)
    return 2 * sum(flag_list) > len(flag_list)


def table_like_reason(lines: Sequence[bytes]) -> str | None:
    """Return the reason why lines look like rows of a table; None if they do not."""
    if not lines:
        return None
    for separator in (b"::", b",", b";", b"|"):
        separator_counts = {line.count(separator) for line in lines}
        if len(separator_counts) == 1 and separator_counts != {0} and all(len(line.split()) == 1 for line in lines):
            return f"has fields between {separator.decode()!r}"
    tab_counts = {line.count(b"\t") for line in lines}
    if len(lines) > 1 and len(tab_counts) == 1 and (tab_count := tab_counts.pop()) >= 2:
        return f"has {tab_count + 1} fields in each line, with tabs between them: it looks like a table"
    split_lines = [line.split() for line in lines]
    field_count = len(split_lines[0])
    if len(lines) < 2 or field_count not in TABLE_FIELD_COUNTS or any(len(row) != field_count for row in split_lines):
        return None
    if all(_NUMBER_OR_TIME_PATTERN.match(field) for row in split_lines[1:] for field in row[2:]):
        return f"has {field_count} fields in each line, from the third on numbers or times: it looks like a table"
    return None

"""Reading what the night is computed from: interactions and feature tables, in bounded batches."""

import errno
import gzip
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray

from cache.errors import SourceError, StoreError
from precompute.config.settings import Sources
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
from precompute.sources.csv_files import BLANKS
from precompute.sources.files import SourceFile, readable, source_files
from precompute.sources.formats import (
    BATCH_ROWS,
    INT96_UNIT,
    INTERACTIONS,
    SameColumns,
    column_names,
    csv_batches,
    format_of,
    parquet_batches,
    read_lines,
)
from precompute.sources.moments import MICROSECONDS, TimeScale, are_positive, microseconds
from precompute.sources.unread import NOT_GZIP
from precompute.sources.unusable import HEADER, Case, UnusableRows, format_case_value

BATCH_BYTES = 128 << 20
READ_BYTES = 1 << 20
NAMES_LOOKED_AT = 10_000
"""Ids at the beginning of each file that are looked at for blanks around them."""

_UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError, pa.ArrowException)
_NO_GZIP = re.compile("incorrect header check|Not a gzipped file")
"""What readers say of a file that has the ending of gzip and begins as another one."""
_LASTING = frozenset({errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG})


@dataclass(frozen=True, slots=True, eq=False)
class Interactions:
    """Batch of interactions: `users`, `items` and `times` int64 microseconds since 1970 (0 = not given).

    `positions` int64 are those of events in their stream; None where they are the team's own.
    """

    users: Ids
    items: Ids
    times: NDArray[np.int64]
    positions: NDArray[np.int64] | None = None

    def only(self, rows: NDArray[np.bool_]) -> Self:
        """Some of the rows."""
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
    """Batches of all interaction files; with `cutoff_at`, only what is strictly older (rows without a time stay).

    The `files` are those that `sources` name, unless they are listed here; the first `skip`, or all, are left out.
    `late` is handed what is not older. Rows of weight 0 or less are not
    interactions and are left out; so are, noted in `unusable`, rows that say nothing. Raises SourceError naming file
    and column, or where no row can be used.
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
    """Remark on ids with blanks around them, as columns of a fixed width have them; a request has to send these, too.

    No id is named, since those of an erased user must stand in no report.
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
    """Ids and times of a batch of rows, less those that cannot be used, which are noted."""
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
    """Rows that are the names of the columns once more, in whatever case, as files that were joined have them."""
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
    """Value of a row as Python's own: bytes of a text, which may not be UTF-8."""
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
    """Batches (ids, {column: Arrow array}) of a Parquet feature table; a missing column is named.

    Rows without an id that can be used are left out, and noted in `unusable` under `source`.
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
    """Rows of a batch: fewer where they are wide, so that a batch takes BATCH_BYTES at most, whatever the features."""
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    row_bytes: int = sum(group.total_byte_size for group in groups) // max(1, metadata.num_rows)
    return max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, row_bytes)))


def feature_schema(path: SourceFile, columns: Sequence[str] = ()) -> Any:
    """Arrow schema of a Parquet feature table, of the types in which it is read; a missing column is named."""
    with reading(path), readable(path) as raw:
        schema = pa.parquet.read_schema(raw)
    _demand_features(schema.names, columns, path)
    return pa.schema([field.with_type(plain_type(_value_type(field.type))) for field in schema])


def _demand_features(file_columns: Sequence[str], columns: Sequence[str], path: SourceFile) -> None:
    """Raises SourceError for a column that is not there, or is there twice."""
    demand_columns(file_columns, columns, path)
    for name in columns:
        demand_once(file_columns, name, path)


def _value_type(kind: Any) -> Any:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def row_count(path: SourceFile) -> int:
    """Number of rows of a Parquet file, as its metadata says."""
    with reading(path), readable(path) as raw:
        rows: int = pa.parquet.read_metadata(raw).num_rows
    return rows


@contextmanager
def reading(path: SourceFile) -> Iterator[None]:
    """The one translator of what readers of files raise."""
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
    return isinstance(error, OSError) and error.errno is not None and error.errno not in _LASTING

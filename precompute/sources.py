"""Reading what the night is computed from: interactions and feature tables, in bounded batches."""

import glob
import gzip
import hashlib
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray

from cache.errors import SourceError
from precompute.columns import (
    MICROSECONDS,
    Ids,
    are_positive,
    check_lengths,
    demand_columns,
    microseconds,
    read_ids,
)
from precompute.config import Sources

BATCH_ROWS = 1 << 19
TEXT_BYTES = 4
"""What a Parquet file spends on the length of each text that it does not have in a dictionary."""

_UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError, pa.ArrowException)


@dataclass(frozen=True, slots=True, eq=False)
class Interactions:
    """One batch: who, with what, and `times` int64 microseconds since 1970 (0 = not given)."""

    users: Ids
    items: Ids
    times: NDArray[np.int64]

    def only(self, rows: NDArray[np.bool_]) -> Self:
        """Some of the rows."""
        return type(self)(self.users.only(rows), self.items.only(rows), self.times[rows])


def source_files(patterns: Sequence[str], base: Path) -> list[Path]:
    """The files that the patterns name, sorted; raises SourceError for a pattern without a file.

    In folders and behind wildcards, names that start with `_` or `.` are other programs' notes, not data.
    """
    found: list[Path] = []
    for pattern in patterns:
        full = base / pattern
        if full.is_file():
            found.append(full)
            continue
        names = full.iterdir() if full.is_dir() else map(Path, glob.glob(str(full), recursive=True))  # noqa: PTH207
        paths = sorted(path for path in names if path.is_file() and path.name[0] not in "_.")
        if not paths:
            raise SourceError(f"no source file matches {full}", pattern=str(full))
        found += paths
    return found


def pin(files: Sequence[Path]) -> tuple[str, list[dict[str, object]]]:
    """Digest over contents of all input files, and the list of them for the manifest."""
    whole = hashlib.sha256()
    listed: list[dict[str, object]] = []
    for path in files:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(bytes.fromhex(digest))
        listed.append({"name": path.name, "size_bytes": path.stat().st_size, "sha256": digest})
    return whole.hexdigest(), listed


def read_interactions(
    sources: Sources,
    base: Path,
    *,
    before: datetime | None = None,
    late: Callable[[Interactions], None] = lambda _late: None,
) -> Iterator[Interactions]:
    """Batches of all interaction files; with `before`, only what is strictly older (rows without a time stay).

    `late` is handed what is not. Rows of weight 0 or less are not interactions and are left out. Raises SourceError
    naming file and column.
    """
    cut = None if before is None else int(before.timestamp() * MICROSECONDS)
    for path in source_files(sources.interactions, base):
        match _format(path, sources):
            case "lines":
                batches: Iterator[Interactions] = _read_lines(path)
            case "csv":
                batches = (_columns(batch, path, sources) for batch in _csv_batches(path, sources))
            case _:
                batches = (
                    _columns(batch, path, sources) for batch in _parquet_batches(path, sources)
                )
        with _reading(path):
            for batch in batches:
                if cut is not None and (newer := batch.times >= cut).any():
                    late(batch.only(newer))
                    yield batch.only(~newer)
                else:
                    yield batch


def read_features(
    path: Path, id_column: str, columns: Sequence[str]
) -> Iterator[tuple[Ids, dict[str, Any]]]:
    """Batches (ids, {column: Arrow array}) of a Parquet feature table; a missing column is named."""
    with _reading(path), pa.parquet.ParquetFile(path) as file:
        demand_columns(file.schema_arrow.names, (id_column, *columns), path)
        for batch in file.iter_batches(BATCH_ROWS, columns=[id_column, *columns]):
            yield (
                read_ids(batch.column(id_column), path, id_column),
                {name: batch.column(name) for name in columns},
            )


def feature_schema(path: Path, columns: Sequence[str] = ()) -> Any:
    """Arrow schema of a Parquet feature table; a missing column is named."""
    with _reading(path):
        found = pa.parquet.read_schema(path)
    demand_columns(found.names, columns, path)
    return found


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """The one translator of what readers of files raise."""
    try:
        yield
    except _UNREADABLE as error:
        match error:
            case UnicodeDecodeError():
                remedy = "it is not UTF-8; convert it, e.g. with iconv -t utf-8"
            case EOFError():
                remedy = "it is cut off; copy it again"
            case zlib.error() | gzip.BadGzipFile():
                remedy = "its compressed data is damaged; copy it again"
            case OSError():
                remedy = "is it whole, and may this user read it?"
            case _:
                remedy = "is it whole, and of the format that its name or sources.format says?"
        raise SourceError(f"cannot read {path}: {error} ({remedy})", path=str(path)) from error


def _format(path: Path, sources: Sources) -> str:
    if sources.format != "auto":
        return sources.format
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    match suffixes[-1] if suffixes else "":
        case ".parquet" | ".pq":
            return "parquet"
        case ".csv":
            return "csv"
        case ".txt":
            return "lines"
    raise SourceError(
        f"cannot tell the format of {path}; set sources.format to parquet, csv or lines"
    )


@contextmanager
def _text(path: Path) -> Iterator[IO[str]]:
    with path.open("rb") as raw:
        plain: Any = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        yield io.TextIOWrapper(plain, encoding="utf-8")


def _read_lines(path: Path) -> Iterator[Interactions]:
    """`user item item ...` per line, separated by single spaces."""
    users: list[str] = []
    items: list[str] = []
    with _text(path) as lines:
        for line in lines:
            if not (words := line.split()):
                continue
            user, *rest = words
            users += [user] * len(rest)
            items += rest
            if len(users) >= BATCH_ROWS:
                yield _pairs(users, items, path)
                users, items = [], []
    if users:
        yield _pairs(users, items, path)


def _pairs(users: list[str], items: list[str], path: Path) -> Interactions:
    columns = Ids.of(pa.array(users, pa.string())), Ids.of(pa.array(items, pa.string()))
    for name, ids in zip(("user", "item"), columns, strict=True):
        check_lengths(ids, path, name)
    return Interactions(*columns, np.zeros(len(users), np.int64))


def _csv_batches(path: Path, sources: Sources) -> Iterator[Any]:
    # Left alone, the reader infers types: "007" would become 7.
    strings = {sources.user_column: pa.string(), sources.item_column: pa.string()}
    options = pa.csv.ConvertOptions(column_types=strings, strings_can_be_null=False)
    with pa.csv.open_csv(path, convert_options=options) as reader:
        yield from reader


def _parquet_batches(path: Path, sources: Sources) -> Iterator[Any]:
    found = pa.parquet.read_metadata(path)
    known = found.schema.to_arrow_schema().names
    names = [sources.user_column, sources.item_column]
    demand_columns(known, names, path)
    encoded = [name for name in names if name in _encoded(found)]
    with pa.parquet.ParquetFile(path, metadata=found, read_dictionary=encoded) as file:
        optional = (sources.timestamp_column, sources.weight_column)
        names += [name for name in optional if name in known]
        yield from file.iter_batches(BATCH_ROWS, columns=names)


def _encoded(found: Any) -> set[str]:
    """Columns of a Parquet file that are numbers into a dictionary and can be taken as such.

    Where the dictionary grew too large for its page, texts follow: to find those again in it costs more than to sort.
    """
    if not found.num_row_groups:
        return set()
    group = found.row_group(0)
    columns = (group.column(number) for number in range(group.num_columns))
    return {
        each.path_in_schema
        for each in columns
        if each.total_uncompressed_size < TEXT_BYTES * each.num_values
    }


def _columns(batch: Any, path: Path, sources: Sources) -> Interactions:
    names = batch.schema.names
    demand_columns(names, (sources.user_column, sources.item_column), path)
    if sources.weight_column in names:
        batch = batch.filter(are_positive(batch.column(sources.weight_column), path, sources))
    times = np.zeros(len(batch), np.int64)
    if (name := sources.timestamp_column) in names:
        times = microseconds(batch.column(name), path, name)
    return Interactions(
        read_ids(batch.column(sources.user_column), path, sources.user_column),
        read_ids(batch.column(sources.item_column), path, sources.item_column),
        times,
    )

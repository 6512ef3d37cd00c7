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
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray

from cache.errors import SourceError
from cache.keys import ID_BYTES_MAX
from precompute.config import Sources

BATCH_ROWS = 1 << 19
MICROSECONDS = 1_000_000
YEAR_2200_S = 7_258_118_400
YEAR_1_S = -62_135_596_800

_UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError, pa.ArrowException)
_PER_SECOND = {"s": 1, "ms": 1_000, "us": MICROSECONDS, "ns": 1_000_000_000}


@dataclass(frozen=True, slots=True, eq=False)
class Interactions:
    """One batch: `users` and `items` are Arrow strings, `times` int64 microseconds since 1970 (0 = not given)."""

    users: Any
    items: Any
    times: NDArray[np.int64]


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
                    late(_only(batch, newer))
                    yield _only(batch, ~newer)
                else:
                    yield batch


def _only(batch: Interactions, rows: NDArray[np.bool_]) -> Interactions:
    keep = pa.array(rows)
    return Interactions(batch.users.filter(keep), batch.items.filter(keep), batch.times[rows])


def read_features(
    path: Path, id_column: str, columns: Sequence[str]
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Batches (ids, {column: Arrow array}) of a Parquet feature table; a missing column is named."""
    with _reading(path), pa.parquet.ParquetFile(path) as file:
        _demand_columns(file.schema_arrow.names, (id_column, *columns), path)
        for batch in file.iter_batches(BATCH_ROWS, columns=[id_column, *columns]):
            yield (
                _ids(batch.column(id_column), path, id_column),
                {name: batch.column(name) for name in columns},
            )


def feature_schema(path: Path, columns: Sequence[str] = ()) -> Any:
    """Arrow schema of a Parquet feature table; a missing column is named."""
    with _reading(path):
        found = pa.parquet.read_schema(path)
    _demand_columns(found.names, columns, path)
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


def _demand_columns(known: Sequence[str], wanted: Sequence[str], path: Path) -> None:
    for name in wanted:
        if name not in known:
            raise SourceError(
                f"{path} has no column {name!r}; it has {', '.join(known)}", column=name
            )


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
    columns = pa.array(users, pa.string()), pa.array(items, pa.string())
    for name, ids in zip(("user", "item"), columns, strict=True):
        _check_lengths(ids, path, name)
    return Interactions(*columns, np.zeros(len(users), np.int64))


def _csv_batches(path: Path, sources: Sources) -> Iterator[Any]:
    # Left alone, the reader infers types: "007" would become 7.
    strings = {sources.user_column: pa.string(), sources.item_column: pa.string()}
    options = pa.csv.ConvertOptions(column_types=strings, strings_can_be_null=False)
    with pa.csv.open_csv(path, convert_options=options) as reader:
        yield from reader


def _parquet_batches(path: Path, sources: Sources) -> Iterator[Any]:
    with pa.parquet.ParquetFile(path) as file:
        known = file.schema_arrow.names
        names = [sources.user_column, sources.item_column]
        _demand_columns(known, names, path)
        optional = (sources.timestamp_column, sources.weight_column)
        names += [name for name in optional if name in known]
        yield from file.iter_batches(BATCH_ROWS, columns=names)


def _columns(batch: Any, path: Path, sources: Sources) -> Interactions:
    names = batch.schema.names
    _demand_columns(names, (sources.user_column, sources.item_column), path)
    if sources.weight_column in names:
        batch = batch.filter(_positive(batch.column(sources.weight_column), path, sources))
    times = np.zeros(len(batch), np.int64)
    if (name := sources.timestamp_column) in names:
        times = _microseconds(batch.column(name), path, name)
    return Interactions(
        _ids(batch.column(sources.user_column), path, sources.user_column),
        _ids(batch.column(sources.item_column), path, sources.item_column),
        times,
    )


def _positive(weights: Any, path: Path, sources: Sources) -> Any:
    """Which rows have a weight above 0; a missing one is not."""
    kind, name = weights.type, sources.weight_column
    if pa.types.is_null(kind):
        weights = weights.cast(pa.float64())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        raise SourceError(
            f"{path}: column {name!r} is {kind}; weights are numbers. If it is no weight, name another column in "
            "sources.weight_column",
            column=name,
        )
    return pc.fill_null(pc.greater(weights, 0), False)


def _ids(column: Any, path: Path, name: str) -> Any:
    if column.null_count:
        raise SourceError(
            f"{path}: column {name!r} holds {column.null_count} missing ids", column=name
        )
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.dictionary_decode()
        kind = column.type
    if not (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)
    ):
        raise SourceError(
            f"{path}: column {name!r} is {kind}; ids are strings or integers", column=name
        )
    try:
        column.validate(full=True)
        ids = column.cast(pa.string())
    except pa.ArrowInvalid as error:
        raise SourceError(
            f"{path}: column {name!r}: {error}; ids are UTF-8", column=name
        ) from error
    _check_lengths(ids, path, name)
    return ids


def _check_lengths(ids: Any, path: Path, name: str) -> None:
    lengths = pc.min_max(pc.binary_length(ids)).as_py()
    if len(ids) and not 1 <= lengths["min"] <= lengths["max"] <= ID_BYTES_MAX:
        raise SourceError(
            f"{path}: {name} ids have {lengths['min']} to {lengths['max']} bytes; 1 to {ID_BYTES_MAX} are allowed"
        )


def _microseconds(times: Any, path: Path, name: str) -> NDArray[np.int64]:
    """int64 microseconds since 1970; raises SourceError for what cannot be a moment in seconds or a time."""
    where = f"{path}: column {name!r}"
    if times.null_count:
        raise SourceError(
            f"{where}: {times.null_count} interactions have no timestamp, others do; fill them in, or name "
            "another column in sources.timestamp_column",
            column=name,
        )
    if not len(times):
        return np.zeros(0, np.int64)
    kind = times.type
    if pa.types.is_date(kind):
        times = times.cast(pa.timestamp("ms"))
        kind = times.type
    if pa.types.is_timestamp(kind):
        per_second = _PER_SECOND[kind.unit]
        raw = np.asarray(times.cast(pa.int64()))
        low, high = int(raw.min()), int(raw.max())
        if not YEAR_1_S * per_second <= low <= high < YEAR_2200_S * per_second:
            raise SourceError(f"{where} holds times beyond the years 1 to 2200", column=name)
        # Digits below a microsecond are dropped: they could only break ties within one.
        return raw // (per_second // MICROSECONDS) if per_second > MICROSECONDS else raw * (
            MICROSECONDS // per_second
        )  # fmt: skip
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise SourceError(
            f"{where}: timestamps are {kind}; expected a time (in CSV: ISO 8601), or seconds since 1970",
            column=name,
        )
    seconds = np.asarray(times)
    wrong = ~((seconds >= 0) & (seconds < YEAR_2200_S))
    if wrong.any():
        raise SourceError(
            f"{where} holds {seconds[wrong][0]}; numbers are seconds since 1970, from 0 to the year 2200. "
            "Divide milliseconds by 1,000 and microseconds by 1,000,000, or store a timestamp type",
            column=name,
        )
    if pa.types.is_integer(kind):
        return np.asarray(seconds, np.int64) * MICROSECONDS
    return np.asarray(np.asarray(seconds, np.float64) * MICROSECONDS, np.int64)

"""Reading what the night is computed from: interactions and feature tables, in bounded batches."""

import glob
import gzip
import hashlib
import io
from collections.abc import Iterator, Sequence
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

BATCH_ROWS = 1 << 18
MICROSECONDS = 1_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Interactions:
    """One batch: `users` and `items` are Arrow strings, `times` int64 microseconds since 1970 (0 = not given)."""

    users: Any
    items: Any
    times: NDArray[np.int64]


def source_files(patterns: Sequence[str], base: Path) -> list[Path]:
    """The files that the patterns name, sorted; raises SourceError for a pattern without a file."""
    found: list[Path] = []
    for pattern in patterns:
        full = str(base / pattern)
        names = [full] if Path(full).is_file() else sorted(glob.glob(full, recursive=True))  # noqa: PTH207
        if Path(full).is_dir():
            names = sorted(str(path) for path in Path(full).iterdir() if path.is_file())
        if not names:
            raise SourceError(f"no source file matches {full}", pattern=full)
        found += [Path(name) for name in names]
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
    sources: Sources, base: Path, *, before: datetime | None = None
) -> Iterator[Interactions]:
    """Batches of all interaction files; with `before`, only what is strictly older (rows without a time stay).

    Rows of weight 0 or less are not interactions and are left out. Raises SourceError naming file and column.
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
        for batch in batches:
            if cut is not None and (late := batch.times >= cut).any():
                keep = pa.array(~late)
                yield Interactions(
                    batch.users.filter(keep), batch.items.filter(keep), batch.times[~late]
                )
            else:
                yield batch


def read_features(
    path: Path, id_column: str, columns: Sequence[str]
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Batches (ids, {column: Arrow array}) of a Parquet feature table; a missing column is named."""
    try:
        file = pa.parquet.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise SourceError(f"cannot read feature table {path}: {error}") from error
    known = file.schema_arrow.names
    for name in (id_column, *columns):
        if name not in known:
            raise SourceError(
                f"{path} has no column {name!r}; it has {', '.join(known)}", column=name
            )
    for batch in file.iter_batches(BATCH_ROWS, columns=[id_column, *columns]):
        yield (
            _ids(batch.column(id_column), path, id_column),
            {name: batch.column(name) for name in columns},
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
                yield _batch(pa.array(users), pa.array(items), None, path)
                users, items = [], []
    if users:
        yield _batch(pa.array(users), pa.array(items), None, path)


def _csv_batches(path: Path, sources: Sources) -> Iterator[Any]:
    # Left alone, the reader infers types: "007" would become 7.
    strings = {sources.user_column: pa.string(), sources.item_column: pa.string()}
    try:
        reader = pa.csv.open_csv(
            path,
            convert_options=pa.csv.ConvertOptions(column_types=strings, strings_can_be_null=False),
        )
        yield from reader
    except (OSError, pa.ArrowInvalid) as error:
        raise SourceError(f"cannot read {path}: {error}") from error


def _parquet_batches(path: Path, sources: Sources) -> Iterator[Any]:
    try:
        file = pa.parquet.ParquetFile(path)
        optional = (sources.timestamp_column, sources.weight_column)
        names = [sources.user_column, sources.item_column]
        names += [name for name in optional if name in file.schema_arrow.names]
        missing = [name for name in names if name not in file.schema_arrow.names]
        if missing:
            raise SourceError(
                f"{path} has no column {missing[0]!r}; it has {', '.join(file.schema_arrow.names)}"
            )
        yield from file.iter_batches(BATCH_ROWS, columns=names)
    except (OSError, pa.ArrowInvalid) as error:
        raise SourceError(f"cannot read {path}: {error}") from error


def _columns(batch: Any, path: Path, sources: Sources) -> Interactions:
    names = batch.schema.names
    for name in (sources.user_column, sources.item_column):
        if name not in names:
            raise SourceError(
                f"{path} has no column {name!r}; it has {', '.join(names)}", column=name
            )
    if sources.weight_column in names:
        keep = pc.fill_null(pc.greater(batch.column(sources.weight_column), 0), False)
        batch = batch.filter(keep)
    times = batch.column(sources.timestamp_column) if sources.timestamp_column in names else None
    return _batch(
        _ids(batch.column(sources.user_column), path, sources.user_column),
        _ids(batch.column(sources.item_column), path, sources.item_column),
        times,
        path,
    )


def _batch(users: Any, items: Any, times: Any, path: Path) -> Interactions:
    for name, ids in (("user", users), ("item", items)):
        _check_lengths(ids, path, name)
    return Interactions(users, items, _microseconds(times, len(users), path))


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
    ids = column.cast(pa.string())
    _check_lengths(ids, path, name)
    return ids


def _check_lengths(ids: Any, path: Path, name: str) -> None:
    lengths = pc.min_max(pc.binary_length(ids)).as_py()
    if len(ids) and not 1 <= lengths["min"] <= lengths["max"] <= ID_BYTES_MAX:
        raise SourceError(
            f"{path}: {name} ids have {lengths['min']} to {lengths['max']} bytes; 1 to {ID_BYTES_MAX} are allowed"
        )


def _microseconds(times: Any, rows: int, path: Path) -> NDArray[np.int64]:
    if times is None:
        return np.zeros(rows, np.int64)
    if times.null_count:
        raise SourceError(f"{path}: {times.null_count} interactions have no timestamp, others do")
    kind = times.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return np.asarray(
            times.cast(pa.timestamp("us", tz=getattr(kind, "tz", None))).cast(pa.int64())
        )
    if pa.types.is_integer(kind):
        return np.asarray(times.cast(pa.int64())) * MICROSECONDS
    if pa.types.is_floating(kind):
        return np.asarray(np.asarray(times) * MICROSECONDS, np.int64)
    raise SourceError(f"{path}: timestamps are {kind}; expected a time, or seconds since 1970")

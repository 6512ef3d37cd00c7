"""A look at files: which of them are one table, its columns, and how many rows it has."""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from infra.cli.init.roles import Kind

DEPTH_MAX = 3
FILES_MAX = 20_000
SAMPLE_ROWS = 1 << 16
"""Rows at a table's beginning that are looked at."""
_CSV_BYTES = 4 << 20
_ENDINGS = {
    ".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".csv.gz": "csv", ".tsv": "csv", ".tsv.gz": "csv",
}  # fmt: skip
_LEFT_OUT = {"artifacts", "bundle", "node_modules", "__pycache__", "venv"}
_SEPARATORS = (",", ";", "\t", "|")
"""Signs between fields, of which the one that stands most often in the first line is taken."""
_HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class FoundTable:
    """Table of one or more files with the same columns; `pattern` names them as `larder.toml` does."""

    pattern: tuple[str, ...]
    files: tuple[Path, ...]
    format: str
    columns: Mapping[str, Kind]
    sample: Any
    rows: int | None
    """Number of rows; None where only reading all would tell."""
    size_bytes: int
    separator: str = ","

    @property
    def title(self) -> str:
        """Pattern for messages."""
        return ", ".join(self.pattern[:3]) + (", ..." if len(self.pattern) > 3 else "")


def look(folder: Path, base: Path) -> tuple[list[FoundTable], list[str]]:
    """Tables below a folder, the largest first, their patterns relative to `base`; and remarks on what is none."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[Path]] = defaultdict(list)
    remarks: list[str] = []
    paths = list(_files(folder))
    for path in paths:
        try:
            separator, names = _names(path)
        except (OSError, pa.ArrowException) as error:
            remarks.append(f"{_relative(path, base)} cannot be read: {str(error).splitlines()[0]}")
            continue
        if remark := _no_table(path, names):
            remarks.append(f"{_relative(path, base)} {remark}")
        else:
            groups[_ending(path), separator, tuple(names)].append(path)
    seen = [_seen(files, separator, paths, base) for (_, separator, _), files in groups.items()]
    lines = [each for each in _walk(folder) if each.name.endswith((".txt", ".txt.gz"))]
    if lines and not seen:
        remarks.append(
            f"{_relative(lines[0], base)} is text: if its lines are `user item item ...`, name it in [sources] "
            'interactions, with format = "lines"'
        )
    return sorted(seen, key=lambda each: -each.size_bytes), remarks


def are_unique(table: FoundTable, column: str) -> bool:
    """True if no value of a column comes twice, in all rows of Parquet and the first ones of CSV."""
    if table.format == "parquet":
        values = pa.chunked_array(
            [
                chunk
                for path in table.files
                for chunk in pa.parquet.read_table(path, columns=[column])[column].chunks
            ]
        )
    else:
        values = table.sample[column]
    return bool(len(values) and pc.count_distinct(values).as_py() == len(values))


def _walk(folder: Path) -> Iterator[Path]:
    root = len(folder.parts)
    for place, folders, names in os.walk(folder):
        here = Path(place)
        deep = len(here.parts) - root >= DEPTH_MAX
        folders[:] = (
            []
            if deep
            else sorted(
                each
                for each in folders
                if each[0] not in "._"
                and each not in _LEFT_OUT
                and not (here / each / "bundle.json").exists()
            )
        )
        yield from (here / each for each in sorted(names) if each[0] not in "._")


def _files(folder: Path) -> Iterator[Path]:
    for number, path in enumerate(each for each in _walk(folder) if _ending(each)):
        if number < FILES_MAX:
            yield path


def _ending(path: Path) -> str:
    return next((each for each in _ENDINGS if path.name.endswith(each)), "")


def _names(path: Path) -> tuple[str, list[str]]:
    """Sign between fields, and names of the columns."""
    if _ENDINGS[_ending(path)] == "parquet":
        return ",", list(pa.parquet.read_schema(path).names)
    with pa.input_stream(str(path), compression="detect") as raw:
        head = raw.read(_HEAD_BYTES).partition(b"\n")[0].decode(errors="replace")
    separator = max(_SEPARATORS, key=head.count)
    with _csv(path, separator) as reader:
        return separator, list(reader.schema.names)


def _csv(path: Path, separator: str) -> Any:
    skipping = pa.csv.ParseOptions(delimiter=separator, invalid_row_handler=lambda _: "skip")
    reading = pa.csv.ReadOptions(block_size=_CSV_BYTES, use_threads=False)
    return pa.csv.open_csv(path, read_options=reading, parse_options=skipping)


def _no_table(path: Path, names: list[str]) -> str | None:
    """Reason why a file cannot be read as it is; None if it can."""
    if _ENDINGS[_ending(path)] == "parquet":
        return None
    if any("::" in each for each in names):
        return "has fields between double colons: write it with commas"
    if any(each.replace(".", "", 1).isdigit() for each in names):
        return "has no line of column names: put one above, e.g. user,item,timestamp"
    return None


def _seen(files: list[Path], separator: str, all_files: list[Path], base: Path) -> FoundTable:
    first = files[0]
    kind = _ENDINGS[_ending(first)]
    rows: int | None = None
    if kind == "parquet":
        sizes = [pa.parquet.read_metadata(each).num_rows for each in files]
        rows = sum(sizes)
        with pa.parquet.ParquetFile(first) as file:
            sample = pa.Table.from_batches(
                [next(file.iter_batches(SAMPLE_ROWS))] if sizes[0] else [], file.schema_arrow
            )
    else:
        with _csv(first, separator) as reader:
            sample = pa.Table.from_batches([reader.read_next_batch()])
    columns = {each.name: _kind(each.type) for each in sample.schema}
    size = sum(each.stat().st_size for each in files)
    pattern = _pattern(files, all_files, base)
    return FoundTable(pattern, tuple(files), kind, columns, sample, rows, size, separator)


def _pattern(files: list[Path], all_files: list[Path], base: Path) -> tuple[str, ...]:
    """The shortest that names these files and no other: a wildcard, else each of them."""
    if len(files) > 1:
        ending, top = _ending(files[0]), Path(os.path.commonpath([each.parent for each in files]))
        direct = [each for each in all_files if each.parent == top and each.name.endswith(ending)]
        below = [
            each for each in all_files if each.is_relative_to(top) and each.name.endswith(ending)
        ]
        for found, glob in ((direct, f"*{ending}"), (below, f"**/*{ending}")):
            if sorted(found) == sorted(files):
                return ((PurePosixPath(_relative(top, base)) / glob).as_posix(),)
    return tuple(_relative(each, base) for each in files)


def _relative(path: Path, base: Path) -> str:
    return Path(os.path.relpath(path, base)).as_posix()


def _kind(kind: Any) -> Kind:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_integer(kind):
        return "integer"
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "float"
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind):
        return "vector" if pa.types.is_floating(kind.value_type) else "other"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "text"
    return "time" if pa.types.is_timestamp(kind) or pa.types.is_date(kind) else "other"

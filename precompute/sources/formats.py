"""Formats of interactions: Parquet, CSV and lines of ids, each as batches of Arrow columns."""

import gzip
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from cache.config.sections import Sources
from cache.errors import SourceError
from precompute.sources.columns import demand_columns
from precompute.sources.files import SourceFile, readable
from precompute.sources.unusable import COLUMNS, Unusable

INTERACTIONS = "interactions"
"""Name of the interactions in reports."""
BATCH_ROWS = 1 << 19
TEXT_BYTES = 4
"""Bytes that a Parquet file spends on the length of each text that it does not have in a dictionary."""


def format_of(path: SourceFile, sources: Sources) -> str:
    if sources.format != "auto":
        return sources.format
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    match suffixes[-1].lower() if suffixes else "":
        case ".parquet" | ".pq":
            return "parquet"
        case ".csv" | ".tsv":
            return "csv"
        case ".txt":
            return "lines"
    raise SourceError(
        f"cannot tell the format of {path}; set sources.format to parquet, csv or lines"
    )


def read_lines(path: SourceFile, sources: Sources) -> Iterator[Any]:
    """`user item item ...` per line, separated by single spaces."""
    users: list[bytes] = []
    items: list[bytes] = []

    def batch() -> Any:
        # Not looked at here: a line that is not UTF-8 costs its own rows.
        columns = (pa.array(each, pa.binary()).view(pa.string()) for each in (users, items))
        return pa.record_batch(list(columns), [sources.user_column, sources.item_column])

    with path.open("rb") as raw:
        for line in gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw:
            if not (words := line.split()):
                continue
            user, *rest = words
            users += [user] * len(rest)
            items += rest
            if len(users) >= BATCH_ROWS:
                yield batch()
                users, items = [], []
    if users:
        yield batch()


def named_columns(sources: Sources) -> list[str]:
    """Columns of times and weights that settings name: these must be there, those of the default names need not."""
    usual = Sources()
    unnamed = ("", usual.timestamp_column, usual.weight_column)
    named = (sources.timestamp_column, sources.weight_column)
    return [name for name in named if name not in unnamed]


def _demand_named(known: Sequence[str], sources: Sources, path: SourceFile) -> None:
    """Raises SourceError, naming the setting, for a column that has to be there."""
    try:
        demand_columns(
            known, [sources.user_column, sources.item_column, *named_columns(sources)], path
        )
    except SourceError as error:
        settings = ("user_column", "item_column", "timestamp_column", "weight_column")
        name = next(each for each in settings if getattr(sources, each) == error.details["column"])
        raise SourceError(f"{error.message}: name it by {name}", **error.details) from None


def csv_batches(path: SourceFile, sources: Sources, unusable: Unusable) -> Iterator[Any]:
    def left_out(row: Any) -> str:
        unusable.looked_at(INTERACTIONS, 1)
        unusable.note(INTERACTIONS, COLUMNS, 1, [{"file": path.name, "line": str(row.number)}])
        return "skip"

    names = [sources.user_column, sources.item_column]
    skipping = pa.csv.ParseOptions(
        delimiter=sources.separator, invalid_row_handler=lambda _: "skip"
    )
    with readable(path) as raw, pa.csv.open_csv(raw, parse_options=skipping) as reader:
        known = reader.schema.names
    if len(known) == 1 and sources.user_column not in known:
        raise SourceError(
            f"{path} has one column, {known[0]!r}: if a row's fields stand between another sign than "
            f"{sources.separator!r}, name it in [sources] separator"
        )
    _demand_named(known, sources, path)
    names += [each for each in (sources.timestamp_column, sources.weight_column) if each in known]
    # Left alone, the reader infers types: "007" would become 7, and one odd time would end the file.
    options = pa.csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.binary()),
        include_columns=names,
        strings_can_be_null=False,
    )
    with (
        readable(path) as raw,
        pa.csv.open_csv(
            raw,
            read_options=pa.csv.ReadOptions(use_threads=False),  # else rows have no numbers
            parse_options=pa.csv.ParseOptions(
                delimiter=sources.separator, invalid_row_handler=left_out
            ),
            convert_options=options,
        ) as reader,
    ):
        for batch in reader:
            columns = [batch.column(name).view(pa.string()) for name in names]
            yield pa.record_batch(columns, names)


def parquet_batches(path: SourceFile, sources: Sources) -> Iterator[Any]:
    with readable(path) as raw:
        found = pa.parquet.read_metadata(raw)
    known = found.schema.to_arrow_schema().names
    names = [sources.user_column, sources.item_column]
    _demand_named(known, sources, path)
    encoded = [name for name in names if name in _encoded(found)]
    with (
        readable(path) as raw,
        pa.parquet.ParquetFile(raw, metadata=found, read_dictionary=encoded) as file,
    ):
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

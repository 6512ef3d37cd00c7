"""Columns of the sources as the night knows them: ids, weights and times, of whatever Arrow types they come in."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache import compiled
from cache.errors import SourceError
from cache.keys import FINGERPRINT_SEED, ID_BYTES_MAX, hash_ids
from precompute.config import Sources

MICROSECONDS = 1_000_000
YEAR_2200_S = 7_258_118_400
YEAR_1_S = -62_135_596_800

_PER_SECOND = {"s": 1, "ms": 1_000, "us": MICROSECONDS, "ns": 1_000_000_000}


@dataclass(frozen=True, slots=True, eq=False)
class Ids:
    """A column of ids, each of them once: row r is `names[codes[r]]` (Arrow strings; int32 [rows]).

    Every name has a row: what holds for all names holds for all rows, and the other way round.
    """

    names: Any
    codes: NDArray[np.int32]

    @classmethod
    def of(cls, column: Any) -> Self:
        """From an Arrow array of strings or integers, dictionary-encoded or not, without nulls.

        Raises pa.ArrowInvalid for what is not UTF-8.
        """
        if pa.types.is_string(column.type) and (found := _sorted(column)) is not None:
            found[0].validate(full=True)
            return cls(*found)
        coded = column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)
        coded.validate(full=True)
        names, codes = _used(coded.dictionary, np.asarray(coded.indices.cast(pa.int32())))
        return cls(names.cast(pa.string()), codes)

    def __len__(self) -> int:
        return len(self.codes)

    def raws(self) -> list[bytes]:
        """The names as records know them."""
        return raws_of(self.names)

    def hashes(self, seed: int) -> NDArray[np.uint64]:
        """uint64[names], as `cache.keys.hash_ids` has them."""
        found = hashes_of_texts(self.names, seed)
        return hash_ids(self.raws(), seed) if found is None else found

    def only(self, rows: NDArray[np.bool_]) -> Self:
        """Some of the rows."""
        return type(self)(*_used(self.names, self.codes[rows]))

    def texts(self) -> Any:
        """Arrow strings, one for each row."""
        return self.names.take(pa.array(self.codes))


def _sorted(texts: Any) -> tuple[Any, NDArray[np.int32]] | None:
    """(names, codes) by sorting hashes, faster than a hash table that leaves the caches; None where it cannot be.

    Two ids with one hash would become one, so a second hash of each row has to agree with it: 128 bits in all.
    """
    hashes, marks = (hashes_of_texts(texts, seed) for seed in (0, FINGERPRINT_SEED))
    if hashes is None or marks is None:
        return None
    order = np.argsort(hashes)
    placed = hashes[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = placed[1:] != placed[:-1]
    placed = marks[order]
    if (placed[1:] != placed[:-1])[~is_first[1:]].any():
        return None
    codes = np.empty(len(order), np.int32)
    codes[order] = np.cumsum(is_first, dtype=np.int32) - 1
    return texts.take(pa.array(order[is_first])), codes


def hashes_of_texts(texts: Any, seed: int) -> NDArray[np.uint64] | None:
    """uint64[n] of an Arrow string array; None without what is compiled, or if a text is too long."""
    columns, (_, cuts, data) = compiled.columns(), texts.buffers()
    if columns is None or cuts is None or data is None:
        return None
    ends = np.frombuffer(cuts, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    found = columns.text_hashes(data, ends, seed)
    return None if found is None else np.frombuffer(found, np.uint64)


def raws_of(texts: Any) -> list[bytes]:
    """Arrow strings as records know them."""
    raws: list[bytes] = texts.cast(pa.binary()).to_pylist()
    return raws


def _used(names: Any, codes: NDArray[np.int32]) -> tuple[Any, NDArray[np.int32]]:
    """The names that have a row, and the rows' codes among them."""
    used = np.zeros(len(names), np.bool_)
    used[codes] = True
    if used.all():
        return names, codes
    places = np.cumsum(used, dtype=np.int32) - 1
    return names.filter(pa.array(used)), places[codes]


def demand_columns(known: Sequence[str], wanted: Sequence[str], path: Path) -> None:
    """Raises SourceError naming the first that is not there."""
    for name in wanted:
        if name not in known:
            raise SourceError(
                f"{path} has no column {name!r}; it has {', '.join(known)}", column=name
            )


def read_ids(column: Any, path: Path, name: str) -> Ids:
    """The ids of a column; raises SourceError for what cannot be one."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
        if column.dictionary.null_count:
            column = column.dictionary_decode()
    if column.null_count:
        raise SourceError(
            f"{path}: column {name!r} holds {column.null_count} missing ids", column=name
        )
    if not (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)
    ):
        raise SourceError(
            f"{path}: column {name!r} is {kind}; ids are strings or integers", column=name
        )
    try:
        ids = Ids.of(column)
    except pa.ArrowInvalid as error:
        raise SourceError(
            f"{path}: column {name!r}: {error}; ids are UTF-8", column=name
        ) from error
    check_lengths(ids, path, name)
    return ids


def check_lengths(ids: Ids, path: Path, name: str) -> None:
    """Raises SourceError unless all have a length that an id may have."""
    lengths = pc.min_max(pc.binary_length(ids.names)).as_py()
    if len(ids) and not 1 <= lengths["min"] <= lengths["max"] <= ID_BYTES_MAX:
        raise SourceError(
            f"{path}: {name} ids have {lengths['min']} to {lengths['max']} bytes; 1 to {ID_BYTES_MAX} are allowed"
        )


def are_positive(weights: Any, path: Path, sources: Sources) -> Any:
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


def microseconds(times: Any, path: Path, name: str) -> NDArray[np.int64]:
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

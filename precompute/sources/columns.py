"""Columns of ids in the sources: conversion from Arrow types, hashes and checks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cache.errors import SourceError
from cache.format.ids import FINGERPRINT_SEED, ID_BYTES_MAX, hash_ids
from cache.native import loader
from precompute.sources import unusable
from precompute.sources.files import SourceFile

UnusableMaskByReason = dict[str, NDArray[np.bool_]]
"""Reason -> mask of the rows that are unusable for it; no reason without a row."""

# Of Unicode 15, table 3-7; RE2 takes binary as bytes.
_UTF_8 = (
    r"^(?:[\x00-\x7F]|[\xC2-\xDF][\x80-\xBF]|\xE0[\xA0-\xBF][\x80-\xBF]|[\xE1-\xEC\xEE\xEF][\x80-\xBF]{2}"
    r"|\xED[\x80-\x9F][\x80-\xBF]|\xF0[\x90-\xBF][\x80-\xBF]{2}|[\xF1-\xF3][\x80-\xBF]{3}"
    r"|\xF4[\x80-\x8F][\x80-\xBF]{2})*$"
)

_HASHED_AT_ONCE = 1 << 18
WORDS_FOR_NOTHING = (
    "NULL", "null", "Null", "<NULL>", "<null>", "(null)", "\\N", "NaN", "nan", "NAN", "-NaN", "-nan", "NaT", "NA",
    "<NA>", "#NA", "N/A", "n/a", "#N/A", "#N/A N/A", "None", "none", "NONE", "<none>", "(none)", "undefined",
    "#NULL!", "#REF!", "#VALUE!", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN",
)  # fmt: skip
"""Texts that programs write for a missing value; `nil`, `na` and the like are also names, so they are not here."""
_DECIMAL_DIGITS_MAX = 76
FLOAT = r"^[+-]?(\d+(\.0+|,0{1,2})|\d([.,]\d+)?[eE][+]\d+)$"
"""Pattern of whole numbers that a program wrote as fractions."""
_WHOLE_NUMBER = r"^[+-]?\d+$"
_SHARE_OF_FLOATS = 0.9
"""Share of a column's ids that must be such texts for it to be refused."""
_SHARE_AMONG_WHOLE_NUMBERS = 0.05
"""Share at which it is refused if all others are whole numbers, as in joined files: 17 and 17.0 are then one id."""


@dataclass(frozen=True, slots=True, eq=False)
class Ids:
    """Column of ids, with distinct names: row r is `names[codes[r]]` (Arrow strings; int32 [rows]).

    Every name has a row: a statement on all names holds for all rows, and the other way round.
    """

    names: Any
    codes: NDArray[np.int32]

    @classmethod
    def of(cls, column: Any) -> Self:
        """Convert an Arrow array of strings or integers, dictionary-encoded or not, without nulls.

        Raises pa.ArrowInvalid for text that is not UTF-8.
        """
        if pa.types.is_string(column.type) and (names_and_codes := _sorted(column)) is not None:
            names_and_codes[0].validate(full=True)
            return cls(*names_and_codes)
        coded = column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)
        coded.validate(full=True)
        names, codes = _used(coded.dictionary, np.asarray(coded.indices.cast(pa.int32())))
        return cls(names.cast(pa.string()), codes)

    def __len__(self) -> int:
        return len(self.codes)

    def raws(self) -> list[bytes]:
        """Return the names as records' raw ids."""
        return raws_of(self.names)

    def hashes(self, seed: int) -> NDArray[np.uint64]:
        """Return uint64[names], equal to `cache.format.ids.hash_ids`."""
        return text_hashes(self.names, seed)

    def only(self, rows: NDArray[np.bool_]) -> Self:
        """Return some of the rows."""
        return type(self)(*_used(self.names, self.codes[rows]))

    def name_of(self, row: int) -> str:
        """Return the id of a row."""
        return str(self.names[int(self.codes[row])])

    def texts(self) -> Any:
        """Return Arrow strings, one for each row."""
        return self.names.take(pa.array(self.codes))


def _sorted(texts: Any) -> tuple[Any, NDArray[np.int32]] | None:
    """Return (names, codes) by sorting hashes, faster than a hash table beyond the caches; None if not possible.

    Two ids with one hash would become one, so a second hash of each row has to agree with it: 128 bits in all.
    """
    hashes, fingerprints = (hashes_of_texts(texts, seed) for seed in (0, FINGERPRINT_SEED))
    if hashes is None or fingerprints is None:
        return None
    order = np.argsort(hashes)
    placed = hashes[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = placed[1:] != placed[:-1]
    placed = fingerprints[order]
    if (placed[1:] != placed[:-1])[~is_first[1:]].any():
        return None
    codes = np.empty(len(order), np.int32)
    codes[order] = np.cumsum(is_first, dtype=np.int32) - 1
    return texts.take(pa.array(order[is_first])), codes


def hashes_of_texts(texts: Any, seed: int) -> NDArray[np.uint64] | None:
    """Return uint64[n] of an Arrow string array; None without the compiled part, or for too long a text."""
    _, cuts, data = texts.buffers()
    if cuts is None or data is None:
        return None
    ends = np.frombuffer(cuts, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    raw_hashes = loader.kernels.text_hashes(data, ends, seed)
    return None if raw_hashes is None else np.frombuffer(raw_hashes, np.uint64)


def text_hashes(texts: Any, seed: int) -> NDArray[np.uint64]:
    """Return uint64[n] of Arrow strings, contiguous or chunked, equal to `cache.format.ids.hash_ids`."""
    chunks = texts.chunks if isinstance(texts, pa.ChunkedArray) else [texts]
    hash_parts = [np.empty(0, np.uint64)]
    for chunk in chunks:
        for start in range(0, len(chunk), _HASHED_AT_ONCE):
            part = chunk.slice(start, _HASHED_AT_ONCE)
            hashes = hashes_of_texts(part, seed)
            hash_parts.append(hash_ids(raws_of(part), seed) if hashes is None else hashes)
    return np.concatenate(hash_parts)


def strings_of(texts: Sequence[str] | pa.Array) -> Any:
    """Convert texts to Arrow strings, unless they are already."""
    return texts if isinstance(texts, pa.Array) else pa.array(list(texts), pa.string())


def raws_of(texts: Any) -> list[bytes]:
    """Return Arrow strings as records' raw ids."""
    raws: list[bytes] = texts.cast(pa.binary()).to_pylist()
    return raws


def _used(names: Any, codes: NDArray[np.int32]) -> tuple[Any, NDArray[np.int32]]:
    """Return the names that have a row, and the rows' codes among them."""
    used = np.zeros(len(names), np.bool_)
    used[codes] = True
    if used.all():
        return names, codes
    new_codes = np.cumsum(used, dtype=np.int32) - 1
    return names.filter(pa.array(used)), new_codes[codes]


def demand_columns(
    column_names: Sequence[str], required_names: Sequence[str], path: SourceFile
) -> None:
    """Raise SourceError naming the first missing column."""
    for name in required_names:
        if name not in column_names:
            raise SourceError(
                f"{path} has no column {name!r}; it has {', '.join(column_names)}", column=name
            )


def demand_once(column_names: Sequence[str], name: str, path: SourceFile) -> None:
    """Raise SourceError for a name that more than one column has."""
    if (count := list(column_names).count(name)) > 1:
        raise SourceError(
            f"{path} has {count} columns {name!r}: which of them is meant? Leave one, or give the others another name",
            column=name,
        )


def normalise_column(column: Any) -> Any:
    """Convert a column to a type that readers support: views to texts, run-ends and nested dictionaries expanded."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return normalise_column(column.storage)
    if pa.types.is_run_end_encoded(kind):
        return normalise_column(pc.run_end_decode(column))
    if pa.types.is_dictionary(kind):
        values = normalise_column(column.dictionary)
        if values.type == kind.value_type:
            return column
        return pa.DictionaryArray.from_arrays(column.indices, values)
    target_type = plain_type(kind)
    return column if target_type == kind else column.cast(target_type)


def plain_batch(batch: Any) -> Any:
    """Return a record batch with normalised columns: not all other types can be filtered."""
    return pa.RecordBatch.from_arrays(
        [normalise_column(column) for column in batch.columns], batch.schema.names
    )


def plain_type(kind: Any) -> Any:
    """Return the type to which `normalise_column` converts columns of a type."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if pa.types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_list(kind):
        return pa.list_(plain_type(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(plain_type(kind.value_type))
    return kind


def without_codes(column: Any) -> Any:
    """Normalise a column and decode its dictionary."""
    column = normalise_column(column)
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _whole_texts(column: Any, path: SourceFile, name: str) -> Any:
    """Convert decimals to texts of whole numbers; raise SourceError for fractions."""
    try:
        return column.cast(pa.decimal256(_DECIMAL_DIGITS_MAX, 0)).cast(pa.string())
    except pa.ArrowInvalid:
        raise SourceError(
            f"{path}: column {name!r} is {column.type} and holds fractions; ids are strings or whole numbers: is it "
            "the column of ids?",
            column=name,
        ) from None


def read_ids(column: Any, path: SourceFile, name: str) -> tuple[Ids, UnusableMaskByReason]:
    """Return the ids of a column, and masks of the rows without a usable id (whose ids are meaningless).

    Raises SourceError for a column of a type that holds no ids.
    """
    column = normalise_column(column)
    is_coded = pa.types.is_dictionary(column.type)
    kind = column.type.value_type if is_coded else column.type
    if pa.types.is_decimal(kind):
        column, is_coded = _whole_texts(without_codes(column), path, name), False
        kind = column.type
    if not (pa.types.is_null(kind) or pa.types.is_integer(kind) or is_text(kind)):
        raise SourceError(
            f"{path}: column {name!r} is {kind}; ids are strings or integers{_remedy(kind)}",
            column=name,
        )
    nulls = column.null_count + (column.dictionary.null_count if is_coded else 0)
    if not nulls:
        try:
            ids = Ids.of(column)
        except pa.ArrowInvalid:
            pass
        else:
            lengths = pc.min_max(pc.binary_length(ids.names)).as_py()
            if not len(ids) or (
                1 <= lengths["min"] <= lengths["max"] <= ID_BYTES_MAX
                and not pc.any(_says_nothing(ids.names)).as_py()
            ):
                _demand_no_floats(ids.names, kind, path, name)
                return ids, {}
    return _ids_one_by_one(column, path, name)


def _demand_no_floats(names: Any, kind: Any, path: SourceFile, name: str) -> None:
    """Raise SourceError for ids such as 42.0, which no request will ask for."""
    if not is_text(kind) or not len(names):
        return
    if as_rows(pc.match_substring_regex(names[:100], FLOAT)).mean() < _SHARE_AMONG_WHOLE_NUMBERS:
        return  # a look at all of them takes as long as the rest of reading
    is_float = as_rows(pc.match_substring_regex(names, FLOAT))
    float_share = is_float.mean()
    is_mixed = float_share >= _SHARE_AMONG_WHOLE_NUMBERS and bool(
        (is_float | as_rows(pc.match_substring_regex(names, _WHOLE_NUMBER))).all()
    )
    if float_share >= _SHARE_OF_FLOATS or is_mixed:
        example = names[int(is_float.argmax())].as_py()
        raise SourceError(
            f"{path}: column {name!r} holds ids such as {example!r}: a program took whole numbers for fractions, as "
            'pandas does where one is missing: write them as whole numbers (pandas: astype("Int64") before to_csv or '
            "to_parquet; in spreadsheets format the column as text)",
            column=name,
        )


def _ids_one_by_one(column: Any, path: SourceFile, name: str) -> tuple[Ids, UnusableMaskByReason]:
    if pa.types.is_dictionary(column.type):
        codes = pc.min_max(column.indices).as_py()
        if len(column) and not 0 <= (codes["min"] or 0) <= (codes["max"] or 0) < max(
            1, len(column.dictionary)
        ):
            raise SourceError(
                f"{path}: column {name!r} has codes out of bounds of its dictionary: copy the file again"
            )
        column = column.dictionary_decode()
    if not is_text(column.type):
        column = column.cast(pa.string())
    raw = column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())
    lengths = pc.fill_null(pc.binary_length(raw), 1)
    bad_mask_by_reason = {
        f"{name}: {unusable.NO_ID}": as_rows(pc.or_(raw.is_null(), _says_nothing(raw))),
        f"{name}: {unusable.LENGTH}": as_rows(
            pc.or_(pc.less(lengths, 1), pc.greater(lengths, ID_BYTES_MAX))
        ),
        f"{name}: {unusable.NOT_UTF_8}": ~is_utf_8(raw),
    }
    usable = ~np.logical_or.reduce(list(bad_mask_by_reason.values()))
    _demand_no_floats(
        raw.filter(pa.array(usable)).cast(pa.string()).unique(), pa.string(), path, name
    )
    texts = pc.if_else(pa.array(usable), raw, pa.scalar(b"-", raw.type)).cast(pa.string())
    return Ids.of(texts), {
        reason: rows for reason, rows in bad_mask_by_reason.items() if rows.any()
    }


def _says_nothing(texts: Any) -> Any:
    """Return an Arrow mask of the strings, or binaries, that mean a missing value."""
    return pc.is_in(texts, value_set=pa.array(WORDS_FOR_NOTHING).cast(texts.type))


def is_utf_8(raw: Any) -> NDArray[np.bool_]:
    """Return a mask of the rows of an Arrow binary array that are UTF-8 or missing."""
    return as_rows(pc.fill_null(pc.match_substring_regex(raw, _UTF_8), True))


def is_text(kind: Any) -> bool:
    """True if an Arrow type holds strings."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _remedy(kind: Any) -> str:
    if pa.types.is_floating(kind):
        return " (pandas makes floats of integers where one is missing: write the column as Int64)"
    if pa.types.is_nested(kind) and not pa.types.is_struct(kind):
        return " (write a row for each of a list's values: in pandas explode, in SQL unnest)"
    if pa.types.is_struct(kind):
        return " (write the field that holds the id as a column of its own)"
    if pa.types.is_temporal(kind) or pa.types.is_boolean(kind):
        return " (is it the column of ids? Name another one in [sources], or write the column as strings)"
    return " (write the column as strings)"


def as_rows(mask: Any) -> NDArray[np.bool_]:
    """Convert an Arrow mask without nulls to numpy."""
    return np.asarray(mask, np.bool_)

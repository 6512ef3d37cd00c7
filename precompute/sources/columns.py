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
"""Reason -> mask of the rows that are unusable for it; only reasons that apply to a row."""

# From Unicode 15, table 3-7; RE2 matches binary values as bytes.
_UTF_8_PATTERN = (
    r"^(?:[\x00-\x7F]|[\xC2-\xDF][\x80-\xBF]|\xE0[\xA0-\xBF][\x80-\xBF]|[\xE1-\xEC\xEE\xEF][\x80-\xBF]{2}"
    r"|\xED[\x80-\x9F][\x80-\xBF]|\xF0[\x90-\xBF][\x80-\xBF]{2}|[\xF1-\xF3][\x80-\xBF]{3}"
    r"|\xF4[\x80-\x8F][\x80-\xBF]{2})*$"
)

_ROWS_HASHED_AT_ONCE = 1 << 18
MISSING_VALUE_WORDS = (
    "NULL", "null", "Null", "<NULL>", "<null>", "(null)", "\\N", "NaN", "nan", "NAN", "-NaN", "-nan", "NaT", "NA",
    "<NA>", "#NA", "N/A", "n/a", "#N/A", "#N/A N/A", "None", "none", "NONE", "<none>", "(none)", "undefined",
    "#NULL!", "#REF!", "#VALUE!", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN",
)  # fmt: skip
"""Texts that programs write for a missing value; `nil`, `na` and the like may also be names, so they are not listed."""
_DECIMAL_DIGITS_MAX = 76
WHOLE_AS_FRACTION_PATTERN = r"^[+-]?(\d+(\.0+|,0{1,2})|\d([.,]\d+)?[eE][+]\d+)$"
"""Pattern of whole numbers written as fractions, such as 42.0."""
_WHOLE_NUMBER_PATTERN = r"^[+-]?\d+$"
_FLOAT_SHARE_MAX = 0.9
"""Share of such ids in a column from which on the column is refused."""
_MIXED_FLOAT_SHARE_MAX = 0.05
"""Share of such ids from which on a column is refused if all others are whole numbers: 17 and 17.0 are one id."""


@dataclass(frozen=True, slots=True, eq=False)
class Ids:
    """Column of ids as codes of distinct ids: row r is `distinct_ids[id_codes[r]]` (Arrow strings; int32 [rows]).

    Every name has a row, so a statement about all names is one about all rows, and vice versa.
    """

    distinct_ids: Any
    id_codes: NDArray[np.int32]

    @classmethod
    def of(cls, column: Any) -> Self:
        """Convert an Arrow array of strings or integers, dictionary-encoded or not, without nulls.

        Raises pa.ArrowInvalid for text that is not UTF-8.
        """
        if pa.types.is_string(column.type) and (names_and_codes := _encode_by_sorting(column)) is not None:
            names_and_codes[0].validate(full=True)
            return cls(*names_and_codes)
        encoded_column = column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)
        encoded_column.validate(full=True)
        names, codes = _drop_unused_names(
            encoded_column.dictionary, np.asarray(encoded_column.indices.cast(pa.int32()))
        )
        return cls(names.cast(pa.string()), codes)

    def __len__(self) -> int:
        return len(self.id_codes)

    def distinct_raw_ids(self) -> list[bytes]:
        """Return the names as raw ids, as records have them."""
        return to_raw_ids(self.distinct_ids)

    def distinct_hashes(self, hash_seed: int) -> NDArray[np.uint64]:
        """Return uint64[names], equal to `cache.format.ids.hash_ids`."""
        return text_hashes(self.distinct_ids, hash_seed)

    def only(self, row_mask: NDArray[np.bool_]) -> Self:
        """Return the rows in the mask."""
        return type(self)(*_drop_unused_names(self.distinct_ids, self.id_codes[row_mask]))

    def name_of(self, row_index: int) -> str:
        """Return the id of a row."""
        return str(self.distinct_ids[int(self.id_codes[row_index])])

    def row_texts(self) -> Any:
        """Return Arrow strings, one for each row."""
        return self.distinct_ids.take(pa.array(self.id_codes))


def _encode_by_sorting(id_texts: Any) -> tuple[Any, NDArray[np.int32]] | None:
    """Return (names, codes) by sorting hashes, faster than a hash table beyond the caches; None if not possible.

    A second hash of each row must agree, 128 bits in all: otherwise two ids with the same hash would become one.
    """
    hashes, fingerprints = (native_text_hashes(id_texts, seed) for seed in (0, FINGERPRINT_SEED))
    if hashes is None or fingerprints is None:
        return None
    order = np.argsort(hashes)
    sorted_hashes = hashes[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = sorted_hashes[1:] != sorted_hashes[:-1]
    sorted_hashes = fingerprints[order]
    if (sorted_hashes[1:] != sorted_hashes[:-1])[~is_first[1:]].any():
        return None
    codes = np.empty(len(order), np.int32)
    codes[order] = np.cumsum(is_first, dtype=np.int32) - 1
    return id_texts.take(pa.array(order[is_first])), codes


def native_text_hashes(id_texts: Any, hash_seed: int) -> NDArray[np.uint64] | None:
    """Return uint64[n] of an Arrow string array; None without the compiled extension, or if a text is too long."""
    _, offsets_buffer, text_buffer = id_texts.buffers()
    if offsets_buffer is None or text_buffer is None:
        return None
    text_offsets = np.frombuffer(offsets_buffer, np.int32)[id_texts.offset : id_texts.offset + len(id_texts) + 1]
    raw_hashes = loader.kernels.text_hashes(text_buffer, text_offsets, hash_seed)
    return None if raw_hashes is None else np.frombuffer(raw_hashes, np.uint64)


def text_hashes(id_texts: Any, hash_seed: int) -> NDArray[np.uint64]:
    """Return uint64[n] of Arrow strings, contiguous or chunked, equal to `cache.format.ids.hash_ids`."""
    text_chunks = id_texts.chunks if isinstance(id_texts, pa.ChunkedArray) else [id_texts]
    hash_parts = [np.empty(0, np.uint64)]
    for text_chunk in text_chunks:
        for start_row in range(0, len(text_chunk), _ROWS_HASHED_AT_ONCE):
            chunk_part = text_chunk.slice(start_row, _ROWS_HASHED_AT_ONCE)
            hashes = native_text_hashes(chunk_part, hash_seed)
            hash_parts.append(hash_ids(to_raw_ids(chunk_part), hash_seed) if hashes is None else hashes)
    return np.concatenate(hash_parts)


def to_arrow_strings(id_texts: Sequence[str] | pa.Array) -> Any:
    """Convert texts to Arrow strings, unless they are already."""
    return id_texts if isinstance(id_texts, pa.Array) else pa.array(list(id_texts), pa.string())


def to_raw_ids(id_texts: Any) -> list[bytes]:
    """Return Arrow strings as raw ids, as records have them."""
    raw_ids: list[bytes] = id_texts.cast(pa.binary()).to_pylist()
    return raw_ids


def _drop_unused_names(distinct_ids: Any, id_codes: NDArray[np.int32]) -> tuple[Any, NDArray[np.int32]]:
    """Return the names that have a row, and the rows' codes for them."""
    used_name_mask = np.zeros(len(distinct_ids), np.bool_)
    used_name_mask[id_codes] = True
    if used_name_mask.all():
        return distinct_ids, id_codes
    new_codes = np.cumsum(used_name_mask, dtype=np.int32) - 1
    return distinct_ids.filter(pa.array(used_name_mask)), new_codes[id_codes]


def demand_columns(column_names: Sequence[str], required_names: Sequence[str], path: SourceFile) -> None:
    """Raise SourceError naming the first missing column."""
    for required_name in required_names:
        if required_name not in column_names:
            raise SourceError(
                f"{path} has no column {required_name!r}; it has {', '.join(column_names)}", column=required_name
            )


def demand_unrepeated_column(column_names: Sequence[str], column_name: str, path: SourceFile) -> None:
    """Raise SourceError for a name that several columns have."""
    if (count := list(column_names).count(column_name)) > 1:
        raise SourceError(
            f"{path} has {count} columns {column_name!r}: which one is meant? Keep one, or rename the others",
            column=column_name,
        )


def normalise_column(column: Any) -> Any:
    """Convert a column to a type that readers support: views to texts, run-ends and nested dictionaries expanded."""
    arrow_type = column.type
    if isinstance(arrow_type, pa.BaseExtensionType):
        return normalise_column(column.storage)
    if pa.types.is_run_end_encoded(arrow_type):
        return normalise_column(pc.run_end_decode(column))
    if pa.types.is_dictionary(arrow_type):
        dictionary_values = normalise_column(column.dictionary)
        if dictionary_values.type == arrow_type.value_type:
            return column
        return pa.DictionaryArray.from_arrays(column.indices, dictionary_values)
    target_type = normalised_type(arrow_type)
    return column if target_type == arrow_type else column.cast(target_type)


def normalise_batch(batch: Any) -> Any:
    """Return a record batch with normalised columns: Arrow cannot filter all other types."""
    return pa.RecordBatch.from_arrays([normalise_column(column) for column in batch.columns], batch.schema.names)


def normalised_type(arrow_type: Any) -> Any:
    """Return the type to which `normalise_column` converts columns of this type."""
    if isinstance(arrow_type, pa.BaseExtensionType):
        return normalised_type(arrow_type.storage_type)
    if pa.types.is_run_end_encoded(arrow_type):
        return normalised_type(arrow_type.value_type)
    if pa.types.is_string_view(arrow_type):
        return pa.string()
    if pa.types.is_binary_view(arrow_type):
        return pa.binary()
    if pa.types.is_list(arrow_type):
        return pa.list_(normalised_type(arrow_type.value_type))
    if pa.types.is_large_list(arrow_type):
        return pa.large_list(normalised_type(arrow_type.value_type))
    return arrow_type


def normalise_and_decode(column: Any) -> Any:
    """Normalise a column and decode its dictionary."""
    column = normalise_column(column)
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _decimals_as_texts(column: Any, path: SourceFile, column_name: str) -> Any:
    """Convert decimals to texts of whole numbers; raise SourceError for fractions."""
    try:
        return column.cast(pa.decimal256(_DECIMAL_DIGITS_MAX, 0)).cast(pa.string())
    except pa.ArrowInvalid:
        raise SourceError(
            f"{path}: column {column_name!r} is {column.type} and holds fractions; ids are strings or whole numbers: "
            "is it "
            "the column of ids?",
            column=column_name,
        ) from None


def read_ids(column: Any, path: SourceFile, column_name: str) -> tuple[Ids, UnusableMaskByReason]:
    """Return the ids of a column, and masks of the rows without a usable id, whose ids are undefined.

    Raises SourceError if the column's type cannot hold ids.
    """
    column = normalise_column(column)
    is_dictionary = pa.types.is_dictionary(column.type)
    arrow_type = column.type.value_type if is_dictionary else column.type
    if pa.types.is_decimal(arrow_type):
        column, is_dictionary = (_decimals_as_texts(normalise_and_decode(column), path, column_name), False)
        arrow_type = column.type
    if not (pa.types.is_null(arrow_type) or pa.types.is_integer(arrow_type) or is_text_type(arrow_type)):
        raise SourceError(
            f"{path}: column {column_name!r} is {arrow_type}; ids are strings or integers{_id_type_remedy(arrow_type)}",
            column=column_name,
        )
    null_count = column.null_count + (column.dictionary.null_count if is_dictionary else 0)
    if not null_count:
        try:
            ids = Ids.of(column)
        except pa.ArrowInvalid:
            pass
        else:
            length_bounds = pc.min_max(pc.binary_length(ids.distinct_ids)).as_py()
            if not len(ids) or (
                1 <= length_bounds["min"] <= length_bounds["max"] <= ID_BYTES_MAX
                and not pc.any(_missing_word_mask(ids.distinct_ids)).as_py()
            ):
                _demand_no_floats(ids.distinct_ids, arrow_type, path, column_name)
                return ids, {}
    return _read_ids_by_row(column, path, column_name)


def _demand_no_floats(id_texts: Any, arrow_type: Any, path: SourceFile, column_name: str) -> None:
    """Raise SourceError for ids such as 42.0, which no request will have."""
    if not is_text_type(arrow_type) or not len(id_texts):
        return
    if (
        as_numpy_mask(pc.match_substring_regex(id_texts[:100], WHOLE_AS_FRACTION_PATTERN)).mean()
        < _MIXED_FLOAT_SHARE_MAX
    ):
        return  # checking all ids takes as long as the rest of reading
    is_float = as_numpy_mask(pc.match_substring_regex(id_texts, WHOLE_AS_FRACTION_PATTERN))
    float_share = is_float.mean()
    has_floats_among_whole_numbers = float_share >= _MIXED_FLOAT_SHARE_MAX and bool(
        (is_float | as_numpy_mask(pc.match_substring_regex(id_texts, _WHOLE_NUMBER_PATTERN))).all()
    )
    if float_share >= _FLOAT_SHARE_MAX or has_floats_among_whole_numbers:
        float_like_id = id_texts[int(is_float.argmax())].as_py()
        raise SourceError(
            f"{path}: column {column_name!r} holds ids such as {float_like_id!r}: a program converted whole numbers to "
            "fractions, as "
            'pandas does if values are missing: write them as whole numbers (pandas: astype("Int64") before to_csv or '
            "to_parquet; in spreadsheets format the column as text)",
            column=column_name,
        )


def _read_ids_by_row(column: Any, path: SourceFile, column_name: str) -> tuple[Ids, UnusableMaskByReason]:
    if pa.types.is_dictionary(column.type):
        code_bounds = pc.min_max(column.indices).as_py()
        if len(column) and not 0 <= (code_bounds["min"] or 0) <= (code_bounds["max"] or 0) < max(
            1, len(column.dictionary)
        ):
            raise SourceError(
                f"{path}: column {column_name!r} has codes out of bounds of its dictionary: copy the file again"
            )
        column = column.dictionary_decode()
    if not is_text_type(column.type):
        column = column.cast(pa.string())
    raw_ids = column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())
    id_lengths = pc.fill_null(pc.binary_length(raw_ids), 1)
    bad_mask_by_reason = {
        f"{column_name}: {unusable.NO_ID_REASON}": as_numpy_mask(
            pc.or_(raw_ids.is_null(), _missing_word_mask(raw_ids))
        ),
        f"{column_name}: {unusable.ID_LENGTH_REASON}": as_numpy_mask(
            pc.or_(pc.less(id_lengths, 1), pc.greater(id_lengths, ID_BYTES_MAX))
        ),
        f"{column_name}: {unusable.NOT_UTF_8_REASON}": ~utf_8_mask(raw_ids),
    }
    is_usable = ~np.logical_or.reduce(list(bad_mask_by_reason.values()))
    _demand_no_floats(raw_ids.filter(pa.array(is_usable)).cast(pa.string()).unique(), pa.string(), path, column_name)
    id_texts = pc.if_else(pa.array(is_usable), raw_ids, pa.scalar(b"-", raw_ids.type)).cast(pa.string())
    return Ids.of(id_texts), {reason: bad_mask for reason, bad_mask in bad_mask_by_reason.items() if bad_mask.any()}


def _missing_word_mask(id_texts: Any) -> Any:
    """Return an Arrow mask of the strings, or binary values, that mean a missing value."""
    return pc.is_in(id_texts, value_set=pa.array(MISSING_VALUE_WORDS).cast(id_texts.type))


def utf_8_mask(binary_column: Any) -> NDArray[np.bool_]:
    """Return the mask of the rows of an Arrow binary array that are UTF-8 or missing."""
    return as_numpy_mask(pc.fill_null(pc.match_substring_regex(binary_column, _UTF_8_PATTERN), True))


def is_text_type(arrow_type: Any) -> bool:
    """True if an Arrow type holds strings."""
    return bool(pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type))


def _id_type_remedy(arrow_type: Any) -> str:
    if pa.types.is_floating(arrow_type):
        return " (pandas converts integers to floats if values are missing: write the column as Int64)"
    if pa.types.is_nested(arrow_type) and not pa.types.is_struct(arrow_type):
        return " (write a row for each of a list's values: in pandas explode, in SQL unnest)"
    if pa.types.is_struct(arrow_type):
        return " (write the field that holds the id as a column of its own)"
    if pa.types.is_temporal(arrow_type) or pa.types.is_boolean(arrow_type):
        return " (is it the column of ids? Name another one in [sources], or write the column as strings)"
    return " (write the column as strings)"


def as_numpy_mask(arrow_mask: Any) -> NDArray[np.bool_]:
    """Convert an Arrow mask without nulls to numpy."""
    return np.asarray(arrow_mask, np.bool_)

"""Attributes of a generation's items: typed columns by ordinal, mapped from its files or copied with changed values."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from cache.filters.expression import TEXT_BYTES_MAX
from cache.format.directory import map_file
from cache.format.iso_times import iso_time
from cache.format.manifest import AttributeKind, Manifest

NO_CODE: Final = np.uint32(0xFFFF_FFFF)
"""Code that means: the item has no text."""

NO_FLAG: Final = 2
"""Value that means: the item has no flag."""

NO_TIME: Final = np.iinfo(np.int64).min
"""Value that means: the item has no time. For numbers, NaN means the same."""

DTYPE_BY_KIND: Final[Mapping[AttributeKind, str]] = {
    "text": "<u4", "texts": "<u4", "number": "<f8", "flag": "u1", "time": "<i8",
}  # fmt: skip
"""Kind -> dtype of its values: codes of texts, numbers, 0 or 1, microseconds since 1970."""

TEXT_TOO_LONG: Final = f"a text of more than {TEXT_BYTES_MAX} bytes"
NUMBER_TOO_LARGE: Final = "a whole number beyond 2**53"

_UNFIT_MESSAGE_BY_KIND: Final[Mapping[AttributeKind, str]] = {
    "text": "not a text", "texts": "not a list of texts", "number": "not a finite number",
    "flag": "not true or false", "time": "not a time (ISO 8601, or seconds since 1970)",
}  # fmt: skip

_ABSENT_VALUE_BY_KIND: Final[Mapping[AttributeKind, Any]] = {"number": np.nan, "flag": NO_FLAG, "time": NO_TIME}
_MICROSECONDS_PER_S: Final = 1_000_000
_UNIX_SECONDS_MAX: Final = 1e11
_EXACT_NUMBER_MAX: Final = 2**53
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_ParsedValue = tuple[Any, str | None]
"""(value in the column's representation or None, reason why the column cannot hold the value or None)."""


@dataclass(frozen=True, slots=True, eq=False)
class TextDictionary:
    """Distinct texts of a column, by their UTF-8: code c is bytes `text_offsets[c]` to `text_offsets[c + 1]`."""

    joined_texts: NDArray[np.uint8]
    text_offsets: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.text_offsets) - 1

    def text_bytes(self, text_code: int) -> bytes:
        """Return the UTF-8 of a code's text."""
        return self.joined_texts[int(self.text_offsets[text_code]) : int(self.text_offsets[text_code + 1])].tobytes()

    def code_of_text(self, text: str) -> int:
        """Return the code of a text, -1 if no item has it; binary search."""
        encoded_text, low, high = text.encode(errors="replace"), 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self.text_bytes(middle) < encoded_text:
                low = middle + 1
            else:
                high = middle
        return low if low < len(self) and self.text_bytes(low) == encoded_text else -1


@dataclass(frozen=True, slots=True, eq=False)
class AttributeColumn:
    """Column of one attribute: a value per item, or with `item_offsets` an item's text codes, between its offsets."""

    kind: AttributeKind
    values: NDArray[Any]
    item_offsets: NDArray[np.uint64] | None = None
    dictionary: TextDictionary | None = None

    def mask_having_text(self, text: str, ordinals: NDArray[Any]) -> NDArray[np.bool_]:
        """Return a mask of the ordinals whose items have a text, in a column of one or several texts per item."""
        code = -1 if self.dictionary is None else self.dictionary.code_of_text(text)
        if code < 0:
            return np.zeros(len(ordinals), np.bool_)
        if self.item_offsets is None:
            return np.asarray(self.values[ordinals] == np.uint32(code), np.bool_)
        code_spans = [self.item_offsets[ordinal : ordinal + 2].tolist() for ordinal in ordinals.tolist()]
        has_text = [bool((self.values[first:last] == code).any()) for first, last in code_spans]
        return np.array(has_text, np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class ItemAttributes:
    """Columns of all attributes by name, for `item_count` items."""

    item_count: int
    columns: Mapping[str, AttributeColumn]

    @classmethod
    def open(cls, generation_folder: Path, manifest: Manifest) -> Self:
        """Map the columns that a manifest lists."""
        return cls.of_files(
            generation_folder,
            {
                name: (attribute.kind, {part: file.path for part, file in attribute.file_by_part().items()})
                for name, attribute in manifest.items.attributes.items()
            },
            manifest.items.count,
        )

    @classmethod
    def of_files(
        cls,
        files_folder: Path,
        files_by_attribute: Mapping[str, tuple[AttributeKind, Mapping[str, str]]],
        item_count: int,
    ) -> Self:
        """Map columns from their kinds and the paths of their files, by the files' names in `Attribute`."""
        return cls(
            item_count,
            {
                name: _open_column(files_folder, *kind_and_files, item_count)
                for name, kind_and_files in files_by_attribute.items()
            },
        )

    @property
    def kind_by_attribute(self) -> dict[str, str]:
        """Kinds of the attributes by name, for error messages."""
        return {name: column.kind for name, column in sorted(self.columns.items())}


def _open_column(
    files_folder: Path, kind: AttributeKind, path_by_part: Mapping[str, str], item_count: int
) -> AttributeColumn:
    dtype = DTYPE_BY_KIND[kind]
    dictionary = offsets = None
    if "names" in path_by_part:
        dictionary = TextDictionary(
            map_file(files_folder / path_by_part["names"], "u1"),
            map_file(files_folder / path_by_part["name_offsets"], "<u8"),
        )
    if "offsets" in path_by_part:
        offsets = map_file(files_folder / path_by_part["offsets"], "<u8", (item_count + 1,))
        values = map_file(files_folder / path_by_part["values"], dtype)
    else:
        values = map_file(files_folder / path_by_part["values"], dtype, (item_count,))
    return AttributeColumn(kind, values, offsets, dictionary)


def parse_time_us(time_value: object) -> int | None:
    """Convert ISO 8601 (UTC without a zone) or Unix seconds to microseconds since 1970; None for anything else."""
    if isinstance(time_value, str):
        try:
            time = iso_time(time_value)
        except ValueError:
            return None
        return (time - _EPOCH) // timedelta(microseconds=1)
    if isinstance(time_value, bool) or not isinstance(time_value, int | float):
        return None
    return round(time_value * _MICROSECONDS_PER_S) if abs(time_value) <= _UNIX_SECONDS_MAX else None


class ItemValue(NamedTuple):
    """Value to set for an item by ordinal, None to clear it; of several for the same attribute the last counts."""

    item_ordinal: int
    attribute: str
    new_value: Any


@dataclass(frozen=True, slots=True, eq=False)
class ChangedColumns:
    """Item attributes with some values set, names of the changed attributes, and items whose values do not fit.

    A value that does not fit its attribute clears it for that item, as in a night.
    """

    attributes: ItemAttributes
    changed_attributes: frozenset[str]
    unfit_ordinals: Mapping[str, Mapping[str, tuple[int, ...]]]
    """Ordinals by attribute and reason."""
    unknown_attribute_value_count: int
    """Number of values for attributes that the items do not have."""


def set_item_values(attributes: ItemAttributes, values: Iterable[ItemValue]) -> ChangedColumns:
    """Return the attributes with the values set; columns that do not change are the same objects."""
    values_by_attribute: dict[str, dict[int, Any]] = {}
    unknown_count = 0
    for ordinal, attribute, value in values:
        if attribute in attributes.columns:
            values_by_attribute.setdefault(attribute, {})[ordinal] = value
        else:
            unknown_count += 1
    columns = dict(attributes.columns)
    unfit_ordinals: dict[str, dict[str, tuple[int, ...]]] = {}
    for attribute, value_by_ordinal in values_by_attribute.items():
        parsed_by_ordinal, ordinals_by_reason = _parse_values(columns[attribute].kind, value_by_ordinal)
        columns[attribute] = _SETTER_BY_KIND[columns[attribute].kind](columns[attribute], parsed_by_ordinal)
        if ordinals_by_reason:
            unfit_ordinals[attribute] = {
                reason: tuple(sorted(ordinals)) for reason, ordinals in ordinals_by_reason.items()
            }
    changed_names = {
        attribute for attribute in values_by_attribute if columns[attribute] is not attributes.columns[attribute]
    }
    updated_attributes = replace(attributes, columns=columns) if changed_names else attributes
    return ChangedColumns(updated_attributes, frozenset(changed_names), unfit_ordinals, unknown_count)


def attributes_of_new_items(attributes: ItemAttributes, values_by_item: Sequence[Mapping[str, Any]]) -> ItemAttributes:
    """Return columns of the same attributes for new items only, one row per mapping in `values_by_item`."""
    item_count = len(values_by_item)
    blank_columns = {name: _blank_column(column.kind, item_count) for name, column in attributes.columns.items()}
    item_values = [
        ItemValue(ordinal, name, value)
        for ordinal, value_by_name in enumerate(values_by_item)
        for name, value in value_by_name.items()
    ]
    return set_item_values(ItemAttributes(item_count, blank_columns), item_values).attributes


def _blank_column(kind: AttributeKind, item_count: int) -> AttributeColumn:
    """Return a column in which none of `item_count` items has the attribute."""
    if kind not in ("text", "texts"):
        return AttributeColumn(kind, np.full(item_count, _ABSENT_VALUE_BY_KIND[kind], DTYPE_BY_KIND[kind]))
    empty_dictionary = TextDictionary(np.empty(0, np.uint8), np.zeros(1, np.uint64))
    if kind == "text":
        return AttributeColumn(kind, np.full(item_count, NO_CODE, np.uint32), dictionary=empty_dictionary)
    return AttributeColumn(kind, np.empty(0, np.uint32), np.zeros(item_count + 1, np.uint64), empty_dictionary)


def _parse_values(
    kind: AttributeKind, value_by_ordinal: Mapping[int, Any]
) -> tuple[dict[int, Any], dict[str, list[int]]]:
    """Return (parsed values by ordinal, ascending; ordinals of the values that do not fit the kind, by reason)."""
    parsed_value_by_ordinal: dict[int, Any] = {}
    ordinals_by_reason: dict[str, list[int]] = {}
    for ordinal in sorted(value_by_ordinal):
        value = value_by_ordinal[ordinal]
        parsed, reason = (None, None) if value is None else _PARSER_BY_KIND[kind](value)
        if reason is not None:
            ordinals_by_reason.setdefault(reason, []).append(ordinal)
        parsed_value_by_ordinal[ordinal] = parsed
    return parsed_value_by_ordinal, ordinals_by_reason


def _parse_text(raw_value: object) -> _ParsedValue:
    if not isinstance(raw_value, str):
        return None, _UNFIT_MESSAGE_BY_KIND["text"]
    text_bytes = raw_value.encode(errors="replace")
    return (None, TEXT_TOO_LONG) if len(text_bytes) > TEXT_BYTES_MAX else (text_bytes, None)


def _parse_texts(raw_value: object) -> _ParsedValue:
    if not isinstance(raw_value, list | tuple) or not all(isinstance(text, str) for text in raw_value):
        return None, _UNFIT_MESSAGE_BY_KIND["texts"]
    encoded_texts = [text.encode(errors="replace") for text in raw_value]
    return [encoded_text for encoded_text in encoded_texts if len(encoded_text) <= TEXT_BYTES_MAX], None


def _parse_number(raw_value: object) -> _ParsedValue:
    if isinstance(raw_value, bool) or not isinstance(raw_value, int | float) or not math.isfinite(raw_value):
        return None, _UNFIT_MESSAGE_BY_KIND["number"]
    if isinstance(raw_value, int) and abs(raw_value) > _EXACT_NUMBER_MAX:
        return None, NUMBER_TOO_LARGE
    return float(raw_value), None


def _parse_flag(raw_value: object) -> _ParsedValue:
    return (int(raw_value), None) if isinstance(raw_value, bool) else (None, _UNFIT_MESSAGE_BY_KIND["flag"])


def _parse_time(raw_value: object) -> _ParsedValue:
    time_us = parse_time_us(raw_value)
    return (None, _UNFIT_MESSAGE_BY_KIND["time"]) if time_us is None else (time_us, None)


_PARSER_BY_KIND: Final[Mapping[AttributeKind, Callable[[object], _ParsedValue]]] = {
    "text": _parse_text, "texts": _parse_texts, "number": _parse_number, "flag": _parse_flag, "time": _parse_time,
}  # fmt: skip


def _set_scalars(column: AttributeColumn, parsed_value_by_ordinal: Mapping[int, Any]) -> AttributeColumn:
    absent_value = _ABSENT_VALUE_BY_KIND[column.kind]
    stored_values = [absent_value if parsed is None else parsed for parsed in parsed_value_by_ordinal.values()]
    new_values = np.array(stored_values, column.values.dtype)
    ordinals = np.fromiter(parsed_value_by_ordinal, np.int64, len(parsed_value_by_ordinal))
    if np.array_equal(column.values[ordinals], new_values, equal_nan=column.kind == "number"):
        return column
    values = np.array(column.values)
    values[ordinals] = new_values
    return replace(column, values=values)


def _set_text(column: AttributeColumn, parsed_value_by_ordinal: Mapping[int, Any]) -> AttributeColumn:
    text_codes = _TextCodes.of(column, [text for text in parsed_value_by_ordinal.values() if text is not None])
    ordinals = np.fromiter(parsed_value_by_ordinal, np.int64, len(parsed_value_by_ordinal))
    new_codes = np.array(
        [NO_CODE if text is None else text_codes.code_by_text[text] for text in parsed_value_by_ordinal.values()],
        np.uint32,
    )
    if np.array_equal(column.values[ordinals], new_codes):
        return column
    values = np.array(column.values)
    values[ordinals] = new_codes
    return text_codes.renumber(column, values)


def _set_texts(column: AttributeColumn, parsed_value_by_ordinal: Mapping[int, Any]) -> AttributeColumn:
    assert column.item_offsets is not None  # noqa: S101 - a column of several texts has them
    text_lists = [item_texts or [] for item_texts in parsed_value_by_ordinal.values()]
    text_codes = _TextCodes.of(column, [text for several in text_lists for text in several])
    code_lists = [[text_codes.code_by_text[text] for text in several] for several in text_lists]
    offsets = column.item_offsets.astype(np.int64)
    if all(
        column.values[offsets[ordinal] : offsets[ordinal + 1]].tolist() == codes
        for ordinal, codes in zip(parsed_value_by_ordinal, code_lists, strict=True)
    ):
        return column
    old_lengths = np.diff(offsets)
    new_lengths, set_mask = old_lengths.copy(), np.zeros(len(old_lengths), np.bool_)
    ordinals = np.fromiter(parsed_value_by_ordinal, np.int64, len(parsed_value_by_ordinal))
    new_lengths[ordinals], set_mask[ordinals] = [len(codes) for codes in code_lists], True
    values = np.empty(int(new_lengths.sum()), np.uint32)
    values[np.repeat(~set_mask, new_lengths)] = column.values[np.repeat(~set_mask, old_lengths)]
    values[np.repeat(set_mask, new_lengths)] = np.array([code for codes in code_lists for code in codes], np.uint32)
    new_offsets = np.concatenate([np.zeros(1, np.uint64), np.cumsum(new_lengths).astype(np.uint64)])
    return text_codes.renumber(replace(column, item_offsets=new_offsets), values)


_SETTER_BY_KIND: Final[Mapping[AttributeKind, Callable[[AttributeColumn, Mapping[int, Any]], AttributeColumn]]] = {
    "text": _set_text, "texts": _set_texts, "number": _set_scalars, "flag": _set_scalars, "time": _set_scalars,
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _TextCodes:
    """Codes for texts that are set in a column: known texts keep their code, new texts get the codes after those."""

    dictionary: TextDictionary
    code_by_text: Mapping[bytes, int]
    new_texts: Sequence[bytes]
    insert_positions: NDArray[np.int64]
    """Number of the dictionary's texts before each new text."""

    @classmethod
    def of(cls, column: AttributeColumn, texts: Sequence[bytes]) -> "_TextCodes":
        """Look the texts up in the dictionary of a column."""
        dictionary = column.dictionary
        assert dictionary is not None  # noqa: S101 - a column of texts has them
        code_by_text: dict[bytes, int] = {}
        new_texts: list[bytes] = []
        insertion_indexes: list[int] = []
        count = len(dictionary)
        for text in sorted(set(texts)):
            insertion_index = bisect_left(range(count), text, key=dictionary.text_bytes)
            if insertion_index < count and dictionary.text_bytes(insertion_index) == text:
                code_by_text[text] = insertion_index
            else:
                code_by_text[text] = count + len(new_texts)
                new_texts.append(text)
                insertion_indexes.append(insertion_index)
        return cls(dictionary, code_by_text, new_texts, np.array(insertion_indexes, np.int64))

    def renumber(self, column: AttributeColumn, item_text_codes: NDArray[np.uint32]) -> AttributeColumn:
        """Return the column with these codes, renumbered by the order of the texts.

        Texts that no item has are dropped.
        """
        count, new_count = len(self.dictionary), len(self.new_texts)
        used_codes = np.zeros(count + new_count + 1, np.bool_)
        used_codes[np.minimum(item_text_codes, count + new_count)] = True
        used_mask = used_codes[:count]
        if new_count == 0 and used_mask.all():
            return replace(column, values=item_text_codes)
        kept_ranks = np.concatenate([np.zeros(1, np.int64), np.cumsum(used_mask)])
        inserted_before = np.cumsum(np.bincount(self.insert_positions, minlength=count + 1))
        codes = np.empty(count + new_count + 1, np.uint32)
        codes[:count] = kept_ranks[:-1] + inserted_before[:count]
        codes[count:-1] = kept_ranks[self.insert_positions] + np.arange(new_count)
        codes[-1] = NO_CODE
        item_text_codes = codes[np.minimum(item_text_codes, count + new_count)]
        return replace(column, values=item_text_codes, dictionary=self._merge_dictionary(used_mask))

    def _merge_dictionary(self, used_text_mask: NDArray[np.bool_]) -> TextDictionary:
        """Return the dictionary of kept and new texts, copied in runs of consecutive kept texts."""
        data, offsets, count = (
            self.dictionary.joined_texts,
            self.dictionary.text_offsets.astype(np.int64),
            len(used_text_mask),
        )
        # A dropped text ends a run like a new text, but adds nothing.
        cut_points = [
            (index, 1, text) for index, text in zip(self.insert_positions.tolist(), self.new_texts, strict=True)
        ]
        cut_points += [(index, 2, b"") for index in np.flatnonzero(~used_text_mask).tolist()]
        pieces, lengths, piece_start = [], [], 0
        text_sizes = np.diff(offsets)
        for index, cut_kind, text in sorted(cut_points):
            pieces.append(data[offsets[piece_start] : offsets[index]])
            lengths.append(text_sizes[piece_start:index])
            piece_start = index
            if cut_kind == 1:
                pieces.append(np.frombuffer(text, np.uint8))
                lengths.append(np.array([len(text)]))
            else:
                piece_start = index + 1
        pieces.append(data[offsets[piece_start] : offsets[count]])
        lengths.append(text_sizes[piece_start:])
        new_ends = np.cumsum(np.concatenate(lengths))
        return TextDictionary(
            np.concatenate(pieces), np.concatenate([np.zeros(1, np.uint64), new_ends.astype(np.uint64)])
        )

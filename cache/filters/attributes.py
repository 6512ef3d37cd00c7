"""Attributes of a generation's items: typed columns by ordinal, mapped from its files or with some values set anew."""

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
"""Code of a text that an item does not have."""

NO_FLAG: Final = 2
"""Value of a flag that an item does not have."""

NO_TIME: Final = np.iinfo(np.int64).min
"""Value of a time that an item does not have; of a number it is NaN."""

DTYPES: Final[Mapping[AttributeKind, str]] = {
    "text": "<u4", "texts": "<u4", "number": "<f8", "flag": "u1", "time": "<i8",
}  # fmt: skip
"""Kind -> dtype of its values: codes of texts, numbers, 0 or 1, microseconds since 1970."""

TEXT_TOO_LONG: Final = f"a text of more than {TEXT_BYTES_MAX} bytes"
NUMBER_TOO_LARGE: Final = "a whole number beyond 2**53"

_UNFIT_MESSAGES: Final[Mapping[AttributeKind, str]] = {
    "text": "not a text", "texts": "not a list of texts", "number": "not a finite number",
    "flag": "not true or false", "time": "not a time (ISO 8601, or seconds since 1970)",
}  # fmt: skip

_ABSENT: Final[Mapping[AttributeKind, Any]] = {"number": np.nan, "flag": NO_FLAG, "time": NO_TIME}
_MICROSECONDS: Final = 1_000_000
_SECONDS_MAX: Final = 1e11
_EXACT_MAX: Final = 2**53
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_Parsed = tuple[Any, str | None]
"""(value in the form that the column keeps, reason why the column cannot hold the value); None for either."""


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """Texts of a column, each once, in the order of their UTF-8: code c is bytes `offsets[c]` to `offsets[c + 1]`."""

    data: NDArray[np.uint8]
    offsets: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def raw(self, code: int) -> bytes:
        """UTF-8 of a code's text."""
        return self.data[int(self.offsets[code]) : int(self.offsets[code + 1])].tobytes()

    def code_of(self, text: str) -> int:
        """Code of a text, -1 if no item has it; found by halving."""
        encoded_text, low, high = text.encode(errors="replace"), 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self.raw(middle) < encoded_text:
                low = middle + 1
            else:
                high = middle
        return low if low < len(self) and self.raw(low) == encoded_text else -1


@dataclass(frozen=True, slots=True, eq=False)
class AttributeColumn:
    """Column of one attribute: a value for each item, or with `texts` codes between an item's offsets."""

    kind: AttributeKind
    values: NDArray[Any]
    offsets: NDArray[np.uint64] | None = None
    names: Names | None = None

    def have(self, text: str, ordinals: NDArray[Any]) -> NDArray[np.bool_]:
        """Mask of the items of a list that have a text, in a column of one or several."""
        code = -1 if self.names is None else self.names.code_of(text)
        if code < 0:
            return np.zeros(len(ordinals), np.bool_)
        if self.offsets is None:
            return np.asarray(self.values[ordinals] == np.uint32(code), np.bool_)
        spans = [self.offsets[ordinal : ordinal + 2].tolist() for ordinal in ordinals.tolist()]
        has_text = [bool((self.values[first:last] == code).any()) for first, last in spans]
        return np.array(has_text, np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class ItemAttributes:
    """Columns of all attributes by name, for `count` items."""

    count: int
    columns: Mapping[str, AttributeColumn]

    @classmethod
    def open(cls, root: Path, manifest: Manifest) -> Self:
        """Maps the columns that a manifest lists."""
        return cls.of_files(
            root,
            {
                name: (
                    attribute.kind,
                    {part: file.path for part, file in attribute.parts().items()},
                )
                for name, attribute in manifest.items.attributes.items()
            },
            manifest.items.count,
        )

    @classmethod
    def of_files(
        cls, root: Path, files: Mapping[str, tuple[AttributeKind, Mapping[str, str]]], count: int
    ) -> Self:
        """Maps columns from the kind of each and the paths of its files, by their names in `Attribute`."""
        return cls(
            count,
            {
                name: _open_column(root, *kind_and_files, count)
                for name, kind_and_files in files.items()
            },
        )

    @property
    def kinds(self) -> dict[str, str]:
        """Kinds of the attributes, for refusals."""
        return {name: column.kind for name, column in sorted(self.columns.items())}


def _open_column(
    root: Path, kind: AttributeKind, files: Mapping[str, str], count: int
) -> AttributeColumn:
    dtype = DTYPES[kind]
    names = offsets = None
    if "names" in files:
        names = Names(
            map_file(root / files["names"], "u1"), map_file(root / files["name_offsets"], "<u8")
        )
    if "offsets" in files:
        offsets = map_file(root / files["offsets"], "<u8", (count + 1,))
        values = map_file(root / files["values"], dtype)
    else:
        values = map_file(root / files["values"], dtype, (count,))
    return AttributeColumn(kind, values, offsets, names)


def moment_us(value: object) -> int | None:
    """Microseconds since 1970 of ISO 8601 (UTC without a zone) or Unix seconds; None for anything else."""
    if isinstance(value, str):
        try:
            moment = iso_time(value)
        except ValueError:
            return None
        return (moment - _EPOCH) // timedelta(microseconds=1)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return round(value * _MICROSECONDS) if abs(value) <= _SECONDS_MAX else None


class ItemValue(NamedTuple):
    """Value set for an item by its ordinal, None to clear it; of several of one attribute the last counts."""

    ordinal: int
    attribute: str
    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class ChangedColumns:
    """Item attributes after a set of values, with the names of the changed attributes and the values that do not fit.

    A value that its attribute cannot hold leaves the item without that attribute, as in the table of a night.
    """

    attributes: ItemAttributes
    changed_attributes: frozenset[str]
    unfit: Mapping[str, Mapping[str, tuple[int, ...]]]
    """Ordinals by attribute and reason."""
    unknown: int
    """Number of values of attributes that the items do not have."""


def set_item_values(attributes: ItemAttributes, values: Iterable[ItemValue]) -> ChangedColumns:
    """Sets the values; columns of which none differs are the very same ones."""
    of_column: dict[str, dict[int, Any]] = {}
    unknown = 0
    for ordinal, name, value in values:
        if name in attributes.columns:
            of_column.setdefault(name, {})[ordinal] = value
        else:
            unknown += 1
    columns = dict(attributes.columns)
    unfit: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, value_by_ordinal in of_column.items():
        parsed_by_ordinal, ordinals_by_reason = _parse_values(columns[name].kind, value_by_ordinal)
        columns[name] = _SETTERS[columns[name].kind](columns[name], parsed_by_ordinal)
        if ordinals_by_reason:
            unfit[name] = {
                reason: tuple(sorted(ordinals)) for reason, ordinals in ordinals_by_reason.items()
            }
    changed_names = {name for name in of_column if columns[name] is not attributes.columns[name]}
    updated_attributes = replace(attributes, columns=columns) if changed_names else attributes
    return ChangedColumns(updated_attributes, frozenset(changed_names), unfit, unknown)


def attributes_of_new_items(
    attributes: ItemAttributes, values: Sequence[Mapping[str, Any]]
) -> ItemAttributes:
    """Return columns of the same attributes for new items only, a row for each mapping in `values`."""
    count = len(values)
    blank = {name: _blank_column(column.kind, count) for name, column in attributes.columns.items()}
    item_values = [
        ItemValue(ordinal, name, value)
        for ordinal, value_by_name in enumerate(values)
        for name, value in value_by_name.items()
    ]
    return set_item_values(ItemAttributes(count, blank), item_values).attributes


def _blank_column(kind: AttributeKind, count: int) -> AttributeColumn:
    """A column of `count` items that all lack the attribute."""
    if kind not in ("text", "texts"):
        return AttributeColumn(kind, np.full(count, _ABSENT[kind], DTYPES[kind]))
    names = Names(np.empty(0, np.uint8), np.zeros(1, np.uint64))
    if kind == "text":
        return AttributeColumn(kind, np.full(count, NO_CODE, np.uint32), names=names)
    return AttributeColumn(kind, np.empty(0, np.uint32), np.zeros(count + 1, np.uint64), names)


def _parse_values(
    kind: AttributeKind, value_by_ordinal: Mapping[int, Any]
) -> tuple[dict[int, Any], dict[str, list[int]]]:
    """Return (parsed values by ordinal, ascending; ordinals of the values that do not fit the kind, by reason)."""
    parsed_by_ordinal: dict[int, Any] = {}
    ordinals_by_reason: dict[str, list[int]] = {}
    for ordinal in sorted(value_by_ordinal):
        value = value_by_ordinal[ordinal]
        parsed, reason = (None, None) if value is None else _PARSERS[kind](value)
        if reason is not None:
            ordinals_by_reason.setdefault(reason, []).append(ordinal)
        parsed_by_ordinal[ordinal] = parsed
    return parsed_by_ordinal, ordinals_by_reason


def _parse_text(value: object) -> _Parsed:
    if not isinstance(value, str):
        return None, _UNFIT_MESSAGES["text"]
    raw = value.encode(errors="replace")
    return (None, TEXT_TOO_LONG) if len(raw) > TEXT_BYTES_MAX else (raw, None)


def _parse_texts(value: object) -> _Parsed:
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        return None, _UNFIT_MESSAGES["texts"]
    raws = [text.encode(errors="replace") for text in value]
    return [raw for raw in raws if len(raw) <= TEXT_BYTES_MAX], None


def _parse_number(value: object) -> _Parsed:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None, _UNFIT_MESSAGES["number"]
    if isinstance(value, int) and abs(value) > _EXACT_MAX:
        return None, NUMBER_TOO_LARGE
    return float(value), None


def _parse_flag(value: object) -> _Parsed:
    return (int(value), None) if isinstance(value, bool) else (None, _UNFIT_MESSAGES["flag"])


def _parse_time(value: object) -> _Parsed:
    time_us = moment_us(value)
    return (None, _UNFIT_MESSAGES["time"]) if time_us is None else (time_us, None)


_PARSERS: Final[Mapping[AttributeKind, Callable[[object], _Parsed]]] = {
    "text": _parse_text, "texts": _parse_texts, "number": _parse_number, "flag": _parse_flag, "time": _parse_time,
}  # fmt: skip


def _set_scalars(column: AttributeColumn, parsed_by_ordinal: Mapping[int, Any]) -> AttributeColumn:
    absent = _ABSENT[column.kind]
    stored_values = [absent if parsed is None else parsed for parsed in parsed_by_ordinal.values()]
    new_values = np.array(stored_values, column.values.dtype)
    ordinals = np.fromiter(parsed_by_ordinal, np.int64, len(parsed_by_ordinal))
    if np.array_equal(column.values[ordinals], new_values, equal_nan=column.kind == "number"):
        return column
    values = np.array(column.values)
    values[ordinals] = new_values
    return replace(column, values=values)


def _set_text(column: AttributeColumn, parsed_by_ordinal: Mapping[int, Any]) -> AttributeColumn:
    texts = _TextCodes.of(column, [text for text in parsed_by_ordinal.values() if text is not None])
    ordinals = np.fromiter(parsed_by_ordinal, np.int64, len(parsed_by_ordinal))
    new_codes = np.array(
        [NO_CODE if text is None else texts.codes[text] for text in parsed_by_ordinal.values()],
        np.uint32,
    )
    if np.array_equal(column.values[ordinals], new_codes):
        return column
    values = np.array(column.values)
    values[ordinals] = new_codes
    return texts.in_order(column, values)


def _set_texts(column: AttributeColumn, parsed_by_ordinal: Mapping[int, Any]) -> AttributeColumn:
    assert column.offsets is not None  # noqa: S101 - a column of several texts has them
    lists = [item_texts or [] for item_texts in parsed_by_ordinal.values()]
    texts = _TextCodes.of(column, [text for several in lists for text in several])
    coded = [[texts.codes[text] for text in several] for several in lists]
    offsets = column.offsets.astype(np.int64)
    if all(
        column.values[offsets[ordinal] : offsets[ordinal + 1]].tolist() == codes
        for ordinal, codes in zip(parsed_by_ordinal, coded, strict=True)
    ):
        return column
    old_lengths = np.diff(offsets)
    after, is_set = old_lengths.copy(), np.zeros(len(old_lengths), np.bool_)
    ordinals = np.fromiter(parsed_by_ordinal, np.int64, len(parsed_by_ordinal))
    after[ordinals], is_set[ordinals] = [len(codes) for codes in coded], True
    values = np.empty(int(after.sum()), np.uint32)
    values[np.repeat(~is_set, after)] = column.values[np.repeat(~is_set, old_lengths)]
    values[np.repeat(is_set, after)] = np.array(
        [code for codes in coded for code in codes], np.uint32
    )
    ends = np.concatenate([np.zeros(1, np.uint64), np.cumsum(after).astype(np.uint64)])
    return texts.in_order(replace(column, offsets=ends), values)


_SETTERS: Final[Mapping[AttributeKind, Callable[[AttributeColumn, Mapping[int, Any]], AttributeColumn]]] = {
    "text": _set_text, "texts": _set_texts, "number": _set_scalars, "flag": _set_scalars, "time": _set_scalars,
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _TextCodes:
    """Codes of the texts to be set in a column: known texts keep their code, new texts get the codes behind these."""

    names: Names
    codes: Mapping[bytes, int]
    new: Sequence[bytes]
    insert_positions: NDArray[np.int64]
    """Number of the names before each new text."""

    @classmethod
    def of(cls, column: AttributeColumn, texts: Sequence[bytes]) -> "_TextCodes":
        """Finds the texts among the names of a column."""
        names = column.names
        assert names is not None  # noqa: S101 - a column of texts has them
        codes: dict[bytes, int] = {}
        new: list[bytes] = []
        insertion_indexes: list[int] = []
        count = len(names)
        for text in sorted(set(texts)):
            insertion_index = bisect_left(range(count), text, key=names.raw)
            if insertion_index < count and names.raw(insertion_index) == text:
                codes[text] = insertion_index
            else:
                codes[text] = count + len(new)
                new.append(text)
                insertion_indexes.append(insertion_index)
        return cls(names, codes, new, np.array(insertion_indexes, np.int64))

    def in_order(self, column: AttributeColumn, values: NDArray[np.uint32]) -> AttributeColumn:
        """The column with these codes, renumbered by the order of the texts; names that no item has any more leave."""
        count, more = len(self.names), len(self.new)
        used = np.zeros(count + more + 1, np.bool_)
        used[np.minimum(values, count + more)] = True
        is_used = used[:count]
        if more == 0 and is_used.all():
            return replace(column, values=values)
        kept_ranks = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_used)])
        between = np.cumsum(np.bincount(self.insert_positions, minlength=count + 1))
        codes = np.empty(count + more + 1, np.uint32)
        codes[:count] = kept_ranks[:-1] + between[:count]
        codes[count:-1] = kept_ranks[self.insert_positions] + np.arange(more)
        codes[-1] = NO_CODE
        values = codes[np.minimum(values, count + more)]
        return replace(column, values=values, names=self._names(is_used))

    def _names(self, is_used: NDArray[np.bool_]) -> Names:
        """Names that are kept and the new ones, joined piece by piece: mostly a few long ones."""
        data, offsets, count = self.names.data, self.names.offsets.astype(np.int64), len(is_used)
        # A name that left ends a piece as a new one does, and has no text in its place.
        cuts = [
            (index, 1, text)
            for index, text in zip(self.insert_positions.tolist(), self.new, strict=True)
        ]
        cuts += [(index, 2, b"") for index in np.flatnonzero(~is_used).tolist()]
        pieces, lengths, start = [], [], 0
        sizes = np.diff(offsets)
        for index, kind, text in sorted(cuts):
            pieces.append(data[offsets[start] : offsets[index]])
            lengths.append(sizes[start:index])
            start = index
            if kind == 1:
                pieces.append(np.frombuffer(text, np.uint8))
                lengths.append(np.array([len(text)]))
            else:
                start = index + 1
        pieces.append(data[offsets[start] : offsets[count]])
        lengths.append(sizes[start:])
        ends = np.cumsum(np.concatenate(lengths))
        return Names(
            np.concatenate(pieces), np.concatenate([np.zeros(1, np.uint64), ends.astype(np.uint64)])
        )

"""Masks of items that pass a filter: made once for each distinct one over a generation, and kept within bytes."""

import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from cache.filters.attributes import (
    NO_CODE,
    NO_FLAG,
    NO_TIME,
    AttributeColumn,
    ItemAttributes,
    moment_us,
)
from cache.filters.expression import Combining, Comparing, Expression, Filter, InvalidFilter, Scalar
from cache.format.manifest_files import AttributeKind

Mask = NDArray[np.bool_]

_EQUAL: Final = ("==", "in", "exists")
_ORDERED: Final = ("==", "in", "<", "<=", ">", ">=", "exists")
OPERATORS: Final[Mapping[AttributeKind, tuple[str, ...]]] = {
    "text": _EQUAL, "texts": ("contains", "exists"), "number": _ORDERED, "flag": _EQUAL, "time": _ORDERED,
}  # fmt: skip
"""Kind -> operators that its attributes take."""
_COMPARED: Final[Mapping[str, Callable[[Any, Any], Mask]]] = {
    "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal,
}  # fmt: skip


class UnknownAttribute(InvalidFilter):
    """An attribute that the generation's items do not have; `details["attributes"]` has those there are."""

    code = "unknown_attribute"


def unknown_attribute(name: str, known: Mapping[str, str], place: str) -> UnknownAttribute:
    """Refusal of an attribute by its name, with the kinds of those that items have."""
    has = f"; they have {', '.join(known)}" if known else " here, nor any other"
    return UnknownAttribute(
        f"items have no attribute {name!r}{has}", field=place, attributes=dict(known)
    )


@dataclass(frozen=True, slots=True, eq=False)
class Passing:
    """Items that pass, one bit each (little-endian within a byte), and how many they are."""

    bits: NDArray[np.uint8]
    count: int

    @classmethod
    def of(cls, mask: Mask) -> Self:
        """From a mask bool [items]."""
        return cls(np.packbits(mask, bitorder="little"), int(np.count_nonzero(mask)))

    def among(self, ordinals: NDArray[Any]) -> Mask:
        """Mask of the ordinals that pass."""
        places = np.asarray(ordinals, np.int64)
        found: Mask = (self.bits[places >> 3] >> (places & 7).astype(np.uint8) & 1).astype(np.bool_)
        return found

    def followed_by(self, other: "Passing", items: int) -> "Passing":
        """These of `items` items, and behind them what passes of others, whose numbers go on from there."""
        whole = items >> 3
        last = np.unpackbits(self.bits[whole:], count=items & 7, bitorder="little")
        more = np.unpackbits(other.bits, bitorder="little")
        tail = np.packbits(np.concatenate([last, more]), bitorder="little")
        return Passing(np.concatenate([self.bits[:whole], tail]), self.count + other.count)

    def ordinals(self) -> NDArray[np.int64]:
        """All that pass, ascending."""
        return np.flatnonzero(np.unpackbits(self.bits, bitorder="little")).astype(np.int64)


class Masks:
    """Items that each distinct filter lets pass in one generation, the latest filters kept; for any thread."""

    def __init__(self, attributes: ItemAttributes, bytes_max: int) -> None:
        self.attributes = attributes
        self._kept: LRUCache[bytes, tuple[Passing, frozenset[str]]] = LRUCache(
            bytes_max, getsizeof=lambda each: each[0].bits.nbytes + _OVERHEAD
        )
        self._lock = threading.Lock()

    def kept(self, filter_: Filter) -> Passing | None:
        """Items that pass, where that is known already."""
        with self._lock:
            found = self._kept.get(filter_.key)
        return None if found is None else found[0]

    def changed(self, attributes: ItemAttributes, changed: Set[str]) -> "Masks":
        """Masks over other columns, which keep what is known of filters that compare none of the changed ones."""
        made = Masks(attributes, int(self._kept.maxsize))
        with self._lock:
            for key, each in self._kept.items():
                if not each[1] & changed:
                    made._kept[key] = each
        return made

    def of(self, filter_: Filter) -> Passing:
        """Items that pass; raises InvalidFilter for a filter that does not fit the attributes."""
        found = self.kept(filter_)
        if found is None:
            found = Passing.of(mask_of(filter_.root, self.attributes))
            if found.bits.nbytes + _OVERHEAD <= self._kept.maxsize:
                with self._lock:
                    self._kept[filter_.key] = found, filter_.attributes
        return found


_OVERHEAD: Final = 1_024
"""Bytes that an entry takes beside its bits: its key, and the objects around both."""


_TEXTS_COST: Final = 20
"""Cost of one of several texts of an item, beside a number that is compared."""


def cost_of(expression: Expression, attributes: ItemAttributes) -> int:
    """Estimate of the work of `mask_of`, in comparisons of one number: 2,000 take about a microsecond."""
    if isinstance(expression, Comparing):
        column = attributes.columns.get(expression.attribute)
        if column is None:  # refused at once
            return 0
        passes = max(1, len(expression.values))
        return len(column.values) * (_TEXTS_COST if column.kind == "texts" else passes)
    own = attributes.count * len(expression.parts)
    return own + sum(cost_of(part, attributes) for part in expression.parts)


def mask_of(expression: Expression, attributes: ItemAttributes) -> Mask:
    """Mask bool [items] of what passes; an item without the attribute passes no comparison."""
    if isinstance(expression, Comparing):
        return _comparing(expression, attributes)
    return _combining(expression, [mask_of(each, attributes) for each in expression.parts])


def _combining(expression: Combining, masks: list[Mask]) -> Mask:
    if expression.operator == "not":
        return ~masks[0]
    combined = masks[0]
    for mask in masks[1:]:
        combined = combined & mask if expression.operator == "and" else combined | mask
    return combined


def _comparing(each: Comparing, attributes: ItemAttributes) -> Mask:
    column = attributes.columns.get(each.attribute)
    if column is None:
        raise unknown_attribute(each.attribute, attributes.kinds, each.place)
    if each.operator not in OPERATORS[column.kind]:
        raise InvalidFilter(
            f"{each.attribute} is of kind {column.kind}, which takes {', '.join(OPERATORS[column.kind])}",
            field=each.place,
        )
    return _HOW[column.kind](each, column)


def _text(each: Comparing, column: AttributeColumn) -> Mask:
    if each.operator == "exists":
        return _mask(column.values != NO_CODE)
    codes = [_code(column, value, each) for value in each.values]
    known = np.array([code for code in codes if code >= 0], np.uint32)
    return _mask(column.values == known[0]) if len(known) == 1 else np.isin(column.values, known)


def _texts(each: Comparing, column: AttributeColumn) -> Mask:
    assert column.offsets is not None  # noqa: S101 - a column of several texts has them
    if each.operator == "exists":
        return column.offsets[1:] > column.offsets[:-1]
    mask = np.zeros(len(column.offsets) - 1, np.bool_)
    if (code := _code(column, each.values[0], each)) >= 0:
        places = np.flatnonzero(column.values == np.uint32(code)).astype(np.uint64)
        mask[np.searchsorted(column.offsets, places, side="right") - 1] = True
    return mask


def _flag(each: Comparing, column: AttributeColumn) -> Mask:
    if each.operator == "exists":
        return _mask(column.values != NO_FLAG)
    for value in each.values:
        if not isinstance(value, bool):
            raise _unfit(each, "true or false")
    return np.isin(column.values, np.array(each.values, np.uint8))


def _number(each: Comparing, column: AttributeColumn) -> Mask:
    if each.operator == "exists":
        return _mask(~np.isnan(column.values))
    for value in each.values:
        if isinstance(value, bool | str):
            raise _unfit(each, "a number")
    return _ordered(each.operator, column.values, np.array(each.values, np.float64))


def _time(each: Comparing, column: AttributeColumn) -> Mask:
    there: Mask = column.values != NO_TIME
    if each.operator == "exists":
        return there
    return (
        _ordered(
            each.operator, column.values, np.array([_moment(value, each) for value in each.values])
        )
        & there
    )


def _ordered(operator: str, values: NDArray[Any], wanted: NDArray[Any]) -> Mask:
    if (compared := _COMPARED.get(operator)) is not None:
        return _mask(compared(values, wanted[0]))
    return _mask(values == wanted[0]) if len(wanted) == 1 else np.isin(values, wanted)


def _mask(found: Any) -> Mask:
    return np.asarray(found, np.bool_)


_HOW: Final[Mapping[AttributeKind, Callable[[Comparing, AttributeColumn], Mask]]] = {
    "text": _text, "texts": _texts, "number": _number, "flag": _flag, "time": _time,
}  # fmt: skip


def _code(column: AttributeColumn, value: Scalar, each: Comparing) -> int:
    if not isinstance(value, str):
        raise _unfit(each, "a text")
    assert column.names is not None  # noqa: S101 - a column of texts has them
    return column.names.code_of(value)


def _moment(value: Scalar, each: Comparing) -> int:
    found = moment_us(value)
    if found is None:
        raise _unfit(each, "a time (ISO 8601, or seconds since 1970)")
    return found


def _unfit(each: Comparing, wanted: str) -> InvalidFilter:
    return InvalidFilter(f"{each.attribute} is compared with {wanted}", field=each.place)

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
from cache.filters.expression import (
    CombinationNode,
    ComparisonNode,
    Expression,
    Filter,
    InvalidFilter,
    Scalar,
)
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


def unknown_attribute(
    name: str, kind_by_attribute: Mapping[str, str], path: str
) -> UnknownAttribute:
    """Refusal of an attribute by its name, with the kinds of those that items have."""
    has = (
        f"; they have {', '.join(kind_by_attribute)}"
        if kind_by_attribute
        else " here, nor any other"
    )
    return UnknownAttribute(
        f"items have no attribute {name!r}{has}", field=path, attributes=dict(kind_by_attribute)
    )


@dataclass(frozen=True, slots=True, eq=False)
class FilterMask:
    """Items that pass, one bit each (little-endian within a byte), and how many they are."""

    bits: NDArray[np.uint8]
    count: int

    @classmethod
    def of(cls, mask: Mask) -> Self:
        """From a mask bool [items]."""
        return cls(np.packbits(mask, bitorder="little"), int(np.count_nonzero(mask)))

    def among(self, ordinals: NDArray[Any]) -> Mask:
        """Mask of the ordinals that pass."""
        bit_indexes = np.asarray(ordinals, np.int64)
        mask: Mask = (self.bits[bit_indexes >> 3] >> (bit_indexes & 7).astype(np.uint8) & 1).astype(
            np.bool_
        )
        return mask

    def followed_by(self, appended_mask: "FilterMask", items: int) -> "FilterMask":
        """These of `items` items, and behind them what passes of others, whose numbers go on from there."""
        full_byte_count = items >> 3
        last = np.unpackbits(self.bits[full_byte_count:], count=items & 7, bitorder="little")
        more = np.unpackbits(appended_mask.bits, bitorder="little")
        tail = np.packbits(np.concatenate([last, more]), bitorder="little")
        return FilterMask(
            np.concatenate([self.bits[:full_byte_count], tail]), self.count + appended_mask.count
        )

    def ordinals(self) -> NDArray[np.int64]:
        """All that pass, ascending."""
        return np.flatnonzero(np.unpackbits(self.bits, bitorder="little")).astype(np.int64)


class Masks:
    """Items that each distinct filter lets pass in one generation, the latest filters kept; for any thread."""

    def __init__(self, attributes: ItemAttributes, bytes_max: int) -> None:
        self.attributes = attributes
        self._cached_masks: LRUCache[bytes, tuple[FilterMask, frozenset[str]]] = LRUCache(
            bytes_max, getsizeof=lambda cached_mask: cached_mask[0].bits.nbytes + _OVERHEAD
        )
        self._lock = threading.Lock()

    def get_cached(self, filter_: Filter) -> FilterMask | None:
        """Items that pass, where that is known already."""
        with self._lock:
            cached_mask = self._cached_masks.get(filter_.key)
        return None if cached_mask is None else cached_mask[0]

    def carry_over(self, attributes: ItemAttributes, changed_attributes: Set[str]) -> "Masks":
        """Masks over other columns, which keep what is known of filters that compare none of the changed ones."""
        masks = Masks(attributes, int(self._cached_masks.maxsize))
        with self._lock:
            for key, cached_mask in self._cached_masks.items():
                if not cached_mask[1] & changed_attributes:
                    masks._cached_masks[key] = cached_mask
        return masks

    def of(self, filter_: Filter) -> FilterMask:
        """Items that pass; raises InvalidFilter for a filter that does not fit the attributes."""
        filter_mask = self.get_cached(filter_)
        if filter_mask is None:
            filter_mask = FilterMask.of(mask_of(filter_.root, self.attributes))
            if filter_mask.bits.nbytes + _OVERHEAD <= self._cached_masks.maxsize:
                with self._lock:
                    self._cached_masks[filter_.key] = filter_mask, filter_.attributes
        return filter_mask


_OVERHEAD: Final = 1_024
"""Bytes that an entry takes beside its bits: its key, and the objects around both."""


_TEXTS_COST: Final = 20
"""Cost of one of several texts of an item, beside a number that is compared."""


def cost_of(expression: Expression, attributes: ItemAttributes) -> int:
    """Estimate of the work of `mask_of`, in comparisons of one number: 2,000 take about a microsecond."""
    if isinstance(expression, ComparisonNode):
        column = attributes.columns.get(expression.attribute)
        if column is None:  # refused at once
            return 0
        passes = max(1, len(expression.values))
        return len(column.values) * (_TEXTS_COST if column.kind == "texts" else passes)
    combining_cost = attributes.count * len(expression.parts)
    return combining_cost + sum(cost_of(part, attributes) for part in expression.parts)


def mask_of(expression: Expression, attributes: ItemAttributes) -> Mask:
    """Mask bool [items] of what passes; an item without the attribute passes no comparison."""
    if isinstance(expression, ComparisonNode):
        return _comparing(expression, attributes)
    return _combining(expression, [mask_of(part, attributes) for part in expression.parts])


def _combining(expression: CombinationNode, masks: list[Mask]) -> Mask:
    if expression.operator == "not":
        return ~masks[0]
    combined = masks[0]
    for mask in masks[1:]:
        combined = combined & mask if expression.operator == "and" else combined | mask
    return combined


def _comparing(comparison: ComparisonNode, attributes: ItemAttributes) -> Mask:
    column = attributes.columns.get(comparison.attribute)
    if column is None:
        raise unknown_attribute(comparison.attribute, attributes.kinds, comparison.field_path)
    if comparison.operator not in OPERATORS[column.kind]:
        raise InvalidFilter(
            f"{comparison.attribute} is of kind {column.kind}, which takes {', '.join(OPERATORS[column.kind])}",
            field=comparison.field_path,
        )
    return _HOW[column.kind](comparison, column)


def _text(comparison: ComparisonNode, column: AttributeColumn) -> Mask:
    if comparison.operator == "exists":
        return _mask(column.values != NO_CODE)
    codes = [_code(column, value, comparison) for value in comparison.values]
    known_codes = np.array([code for code in codes if code >= 0], np.uint32)
    return (
        _mask(column.values == known_codes[0])
        if len(known_codes) == 1
        else np.isin(column.values, known_codes)
    )


def _texts(comparison: ComparisonNode, column: AttributeColumn) -> Mask:
    assert column.offsets is not None  # noqa: S101 - a column of several texts has them
    if comparison.operator == "exists":
        return column.offsets[1:] > column.offsets[:-1]
    mask = np.zeros(len(column.offsets) - 1, np.bool_)
    if (code := _code(column, comparison.values[0], comparison)) >= 0:
        value_indexes = np.flatnonzero(column.values == np.uint32(code)).astype(np.uint64)
        mask[np.searchsorted(column.offsets, value_indexes, side="right") - 1] = True
    return mask


def _flag(comparison: ComparisonNode, column: AttributeColumn) -> Mask:
    if comparison.operator == "exists":
        return _mask(column.values != NO_FLAG)
    for value in comparison.values:
        if not isinstance(value, bool):
            raise _unfit(comparison, "true or false")
    return np.isin(column.values, np.array(comparison.values, np.uint8))


def _number(comparison: ComparisonNode, column: AttributeColumn) -> Mask:
    if comparison.operator == "exists":
        return _mask(~np.isnan(column.values))
    for value in comparison.values:
        if isinstance(value, bool | str):
            raise _unfit(comparison, "a number")
    return _ordered(comparison.operator, column.values, np.array(comparison.values, np.float64))


def _time(comparison: ComparisonNode, column: AttributeColumn) -> Mask:
    has_time: Mask = column.values != NO_TIME
    if comparison.operator == "exists":
        return has_time
    return (
        _ordered(
            comparison.operator,
            column.values,
            np.array([_moment(value, comparison) for value in comparison.values]),
        )
        & has_time
    )


def _ordered(operator: str, values: NDArray[Any], operands: NDArray[Any]) -> Mask:
    if (compared := _COMPARED.get(operator)) is not None:
        return _mask(compared(values, operands[0]))
    return _mask(values == operands[0]) if len(operands) == 1 else np.isin(values, operands)


def _mask(mask_like: Any) -> Mask:
    return np.asarray(mask_like, np.bool_)


_HOW: Final[Mapping[AttributeKind, Callable[[ComparisonNode, AttributeColumn], Mask]]] = {
    "text": _text, "texts": _texts, "number": _number, "flag": _flag, "time": _time,
}  # fmt: skip


def _code(column: AttributeColumn, value: Scalar, comparison: ComparisonNode) -> int:
    if not isinstance(value, str):
        raise _unfit(comparison, "a text")
    assert column.names is not None  # noqa: S101 - a column of texts has them
    return column.names.code_of(value)


def _moment(value: Scalar, comparison: ComparisonNode) -> int:
    time_us = moment_us(value)
    if time_us is None:
        raise _unfit(comparison, "a time (ISO 8601, or seconds since 1970)")
    return time_us


def _unfit(comparison: ComparisonNode, expected_kind: str) -> InvalidFilter:
    return InvalidFilter(
        f"{comparison.attribute} is compared with {expected_kind}", field=comparison.field_path
    )

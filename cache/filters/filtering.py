"""Filters over the items of one generation: cached masks of the items that pass, and search for the best of them."""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from cache.filters.attributes import (
    NO_CODE,
    NO_FLAG,
    NO_TIME,
    AttributeColumn,
    ChangedColumns,
    ItemAttributes,
    ItemValue,
    attributes_of_new_items,
    parse_time_us,
    set_item_values,
)
from cache.filters.expression import (
    CombinationNode,
    ComparisonNode,
    Expression,
    Filter,
    InvalidFilter,
    Scalar,
    read_filter,
)
from cache.format.item_table import ItemTable
from cache.format.manifest import AttributeKind, Manifest
from cache.model.filter_mask import FilterMask, Mask
from cache.model.ranking import Metric, rank
from cache.native import loader

_EQUALITY_OPERATORS: Final = ("==", "in", "exists")
_ORDER_OPERATORS: Final = ("==", "in", "<", "<=", ">", ">=", "exists")

OPERATORS_BY_KIND: Final[Mapping[AttributeKind, tuple[str, ...]]] = {
    "text": _EQUALITY_OPERATORS,
    "texts": ("contains", "exists"),
    "number": _ORDER_OPERATORS,
    "flag": _EQUALITY_OPERATORS,
    "time": _ORDER_OPERATORS,
}
"""Kind of an attribute -> operators that it supports."""

MASKS_BYTES_MAX = 64 << 20
"""Largest size of cached masks in bytes, per generation and process: one mask takes 125 KB per million items."""

_COMPARE_BY_OPERATOR: Final[Mapping[str, Callable[[Any, Any], Mask]]] = {
    "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal,
}  # fmt: skip

_MASK_OVERHEAD_BYTES: Final = 1_024
"""Bytes of a cache entry besides its mask: the key and the Python objects."""

_TEXTS_COST: Final = 20
"""Cost of comparing one of several texts of an item, relative to comparing a number."""

_DIRECTLY_RANKED_MAX: Final = 512
"""Number of items up to which all are ranked, without choosing candidates first."""


class UnknownAttribute(InvalidFilter):
    """The generation's items do not have the attribute; `details["attributes"]` has the attributes that exist."""

    code = "unknown_attribute"


def unknown_attribute_error(
    attribute_name: str, kind_by_attribute: Mapping[str, str], field_path: str
) -> UnknownAttribute:
    """Return the error for an unknown attribute, with the attributes that exist and their kinds."""
    kinds_clause = (
        f"; they have {', '.join(kind_by_attribute)}" if kind_by_attribute else " in this generation, nor any other"
    )
    return UnknownAttribute(
        f"items have no attribute {attribute_name!r}{kinds_clause}",
        field=field_path,
        attributes=dict(kind_by_attribute),
    )


class MaskCache:
    """Cache of the items that pass each filter in one generation, the least recently used dropped first.

    Thread-safe.
    """

    def __init__(self, attributes: ItemAttributes, masks_bytes_max: int) -> None:
        self.attributes = attributes
        self._cached_masks: LRUCache[bytes, tuple[FilterMask, frozenset[str]]] = LRUCache(
            masks_bytes_max, getsizeof=lambda cached_mask: cached_mask[0].packed_bits.nbytes + _MASK_OVERHEAD_BYTES
        )
        self._lock = threading.Lock()

    def get_cached(self, filter_: Filter) -> FilterMask | None:
        """Return the items that pass if they are cached, else None."""
        with self._lock:
            cached_mask = self._cached_masks.get(filter_.canonical_bytes)
        return None if cached_mask is None else cached_mask[0]

    def carry_over(self, attributes: ItemAttributes, changed_attributes: Set[str]) -> "MaskCache":
        """Return a cache for changed columns, with the masks of filters that compare no changed attribute."""
        masks = MaskCache(attributes, int(self._cached_masks.maxsize))
        with self._lock:
            for key, cached_mask in self._cached_masks.items():
                if not cached_mask[1] & changed_attributes:
                    masks._cached_masks[key] = cached_mask
        return masks

    def of(self, filter_: Filter) -> FilterMask:
        """Return the items that pass; raise InvalidFilter for a filter that does not fit the attributes."""
        filter_mask = self.get_cached(filter_)
        if filter_mask is None:
            filter_mask = FilterMask.of(mask_of(filter_.root_expression, self.attributes))
            if filter_mask.packed_bits.nbytes + _MASK_OVERHEAD_BYTES <= self._cached_masks.maxsize:
                with self._lock:
                    self._cached_masks[filter_.canonical_bytes] = filter_mask, filter_.attribute_names
        return filter_mask


def mask_cost(expression: Expression, attributes: ItemAttributes) -> int:
    """Return the estimated cost of `mask_of`, in comparisons of one number: 2,000 take about a microsecond."""
    if isinstance(expression, ComparisonNode):
        column = attributes.columns.get(expression.attribute)
        if column is None:  # mask_of will refuse it at once
            return 0
        comparison_count = max(1, len(expression.values))
        return len(column.values) * (_TEXTS_COST if column.kind == "texts" else comparison_count)
    combining_cost = attributes.item_count * len(expression.parts)
    return combining_cost + sum(mask_cost(part, attributes) for part in expression.parts)


def mask_of(expression: Expression, attributes: ItemAttributes) -> Mask:
    """Return a mask bool [items] of the items that pass; an item without the attribute passes no comparison."""
    if isinstance(expression, ComparisonNode):
        return _comparison_mask(expression, attributes)
    return _combined_mask(expression, [mask_of(part, attributes) for part in expression.parts])


def _combined_mask(expression: CombinationNode, masks: list[Mask]) -> Mask:
    if expression.operator == "not":
        return ~masks[0]
    combined_mask = masks[0]
    for mask in masks[1:]:
        combined_mask = combined_mask & mask if expression.operator == "and" else combined_mask | mask
    return combined_mask


def _comparison_mask(comparison: ComparisonNode, attributes: ItemAttributes) -> Mask:
    column = attributes.columns.get(comparison.attribute)
    if column is None:
        raise unknown_attribute_error(comparison.attribute, attributes.kind_by_attribute, comparison.field_path)
    if comparison.operator not in OPERATORS_BY_KIND[column.kind]:
        raise InvalidFilter(
            f"{comparison.attribute} is of kind {column.kind}, which takes {', '.join(OPERATORS_BY_KIND[column.kind])}",
            field=comparison.field_path,
        )
    return _MASK_FUNCTION_BY_KIND[column.kind](comparison, column)


def _text_mask(comparison: ComparisonNode, column: AttributeColumn) -> Mask:
    if comparison.operator == "exists":
        return _as_mask(column.values != NO_CODE)
    codes = [_code_of_value(column, value, comparison) for value in comparison.values]
    known_codes = np.array([code for code in codes if code >= 0], np.uint32)
    return _as_mask(column.values == known_codes[0]) if len(known_codes) == 1 else np.isin(column.values, known_codes)


def _texts_mask(comparison: ComparisonNode, column: AttributeColumn) -> Mask:
    assert column.item_offsets is not None  # noqa: S101 - a column of several texts has them
    if comparison.operator == "exists":
        return column.item_offsets[1:] > column.item_offsets[:-1]
    mask = np.zeros(len(column.item_offsets) - 1, np.bool_)
    if (code := _code_of_value(column, comparison.values[0], comparison)) >= 0:
        value_indexes = np.flatnonzero(column.values == np.uint32(code)).astype(np.uint64)
        mask[np.searchsorted(column.item_offsets, value_indexes, side="right") - 1] = True
    return mask


def _flag_mask(comparison: ComparisonNode, column: AttributeColumn) -> Mask:
    if comparison.operator == "exists":
        return _as_mask(column.values != NO_FLAG)
    for value in comparison.values:
        if not isinstance(value, bool):
            raise _unfit_comparison_error(comparison, "true or false")
    return np.isin(column.values, np.array(comparison.values, np.uint8))


def _number_mask(comparison: ComparisonNode, column: AttributeColumn) -> Mask:
    if comparison.operator == "exists":
        return _as_mask(~np.isnan(column.values))
    for value in comparison.values:
        if isinstance(value, bool | str):
            raise _unfit_comparison_error(comparison, "a number")
    return _ordered_mask(comparison.operator, column.values, np.array(comparison.values, np.float64))


def _time_mask(comparison: ComparisonNode, column: AttributeColumn) -> Mask:
    has_time: Mask = column.values != NO_TIME
    if comparison.operator == "exists":
        return has_time
    return (
        _ordered_mask(
            comparison.operator,
            column.values,
            np.array([_time_us_of(value, comparison) for value in comparison.values]),
        )
        & has_time
    )


def _ordered_mask(operator: str, item_values: NDArray[Any], operands: NDArray[Any]) -> Mask:
    if (compare := _COMPARE_BY_OPERATOR.get(operator)) is not None:
        return _as_mask(compare(item_values, operands[0]))
    return _as_mask(item_values == operands[0]) if len(operands) == 1 else np.isin(item_values, operands)


def _as_mask(mask_like: Any) -> Mask:
    return np.asarray(mask_like, np.bool_)


_MASK_FUNCTION_BY_KIND: Final[Mapping[AttributeKind, Callable[[ComparisonNode, AttributeColumn], Mask]]] = {
    "text": _text_mask, "texts": _texts_mask, "number": _number_mask, "flag": _flag_mask, "time": _time_mask,
}  # fmt: skip


def _code_of_value(column: AttributeColumn, value: Scalar, comparison: ComparisonNode) -> int:
    if not isinstance(value, str):
        raise _unfit_comparison_error(comparison, "a text")
    assert column.dictionary is not None  # noqa: S101 - a column of texts has them
    return column.dictionary.code_of_text(value)


def _time_us_of(value: Scalar, comparison: ComparisonNode) -> int:
    time_us = parse_time_us(value)
    if time_us is None:
        raise _unfit_comparison_error(comparison, "a time (ISO 8601, or seconds since 1970)")
    return time_us


def _unfit_comparison_error(comparison: ComparisonNode, expected_kind: str) -> InvalidFilter:
    return InvalidFilter(f"{comparison.attribute} is compared with {expected_kind}", field=comparison.field_path)


class SubsetSearch:
    """Search for the best items, among given ordinals, in vectors float32 [items, dims]; thread-safe."""

    def __init__(self, item_vectors: NDArray[np.float32]) -> None:
        self._vectors = item_vectors

    @cached_property
    def _vector_lengths(self) -> NDArray[np.float32]:
        """Lengths of the items' vectors, float32 [items]; computed once."""
        vector_lengths: NDArray[np.float32] = np.sqrt(np.einsum("nd,nd->n", self._vectors, self._vectors))
        return vector_lengths

    def search(
        self,
        query_vector: NDArray[np.float32],
        searched_ordinals: NDArray[np.int64],
        k: int,
        metric: Metric = "inner_product",
    ) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
        """Return (ordinals uint32, scores float32) of the best `min(k, len(ordinals))` of `searched_ordinals`.

        Order and bits are those of `cache.model.ranking.rank` over all `searched_ordinals`.
        """
        result_count = min(k, len(searched_ordinals))
        if len(searched_ordinals) > max(_DIRECTLY_RANKED_MAX, 4 * k):
            searched_ordinals = self._candidates(query_vector, searched_ordinals, k, metric)
        best_ordinals, scores = rank(query_vector[None], self._vectors, searched_ordinals[None], None, k, metric=metric)
        return best_ordinals[0, :result_count], scores[0, :result_count]

    def _candidates(
        self, query_vector: NDArray[np.float32], searched_ordinals: NDArray[np.int64], k: int, metric: Metric
    ) -> NDArray[np.int64]:
        """Return the ordinals that may be among the best k, given rounding errors.

        Returns all of them if a bound is not finite.
        """
        kernel_arguments = (
            np.ascontiguousarray(query_vector, np.float32),
            self._vectors,
            searched_ordinals.astype(np.int64),
        )
        scores: NDArray[np.float32] = np.frombuffer(loader.kernels.dots(*kernel_arguments), np.float32)
        vector_length = float(np.sqrt(np.dot(query_vector, query_vector)))
        candidate_lengths = self._vector_lengths[searched_ordinals]
        if metric == "cosine":
            scores = np.divide(
                scores,
                candidate_lengths * vector_length,
                out=np.zeros_like(scores),
                where=candidate_lengths * vector_length > 0,
            )
            magnitude = 1.0
        else:
            magnitude = vector_length * float(candidate_lengths.max())
        # Bound of both sums' rounding errors in any order of addition, doubled for the length in a cosine.
        rounding_error_max = 4 * (len(query_vector) + 64) * 2.0**-23 * magnitude
        kth_index = len(scores) - k
        kth_score = float(np.partition(scores, kth_index)[kth_index])
        if not np.isfinite(rounding_error_max) or not np.isfinite(kth_score):
            return searched_ordinals
        return searched_ordinals[scores >= kth_score - rounding_error_max]


class UnknownFilter(InvalidFilter):
    """The generation has no filter of that name; `details["declared"]` has the names that exist."""

    code = "unknown_filter"


def unknown_filter_error(filter_name: str, declared_filter_names: Collection[str] = ()) -> UnknownFilter:
    """Return the error for an unknown filter, with the names that exist."""
    declared_names = sorted(declared_filter_names)
    return UnknownFilter(
        f"this generation has no filter {filter_name[:64]!r}; there are {', '.join(declared_names) or 'none'}",
        declared=declared_names,
    )


class Filtering:
    """Filters over a generation's items, sent by requests or named in the manifest; thread-safe."""

    def __init__(
        self,
        attributes: ItemAttributes,
        item_vectors: NDArray[np.float32],
        masks_bytes_max: int = MASKS_BYTES_MAX,
        filter_by_name: Mapping[str, Filter] | None = None,
    ) -> None:
        self.attributes = attributes
        self.changed_attributes: frozenset[str] = frozenset()
        """Attributes that have another value than the night wrote, for any item."""
        self.new_items_filtering: Filtering | None = None
        """Filtering of the new items that events brought; their numbers follow those of the generation's own items."""
        self._filter_by_name = filter_by_name or {}
        self._masks = MaskCache(attributes, masks_bytes_max)
        self._subset_search = SubsetSearch(item_vectors)

    @classmethod
    def open(cls, generation_folder: Path, manifest: Manifest, items: ItemTable) -> Self | None:
        """Map the attributes of a generation; None if its items have none."""
        if not manifest.items.attributes:
            return None
        filter_by_name = {name: read_filter(named_filter.expression) for name, named_filter in manifest.filters.items()}
        return cls(ItemAttributes.open(generation_folder, manifest), items.vectors, filter_by_name=filter_by_name)

    def with_item_values(self, item_values: Iterable[ItemValue]) -> tuple[Self, ChangedColumns]:
        """Return a filtering with these item values set, and the changed columns; itself if nothing changed."""
        changed_columns = set_item_values(self.attributes, item_values)
        if not changed_columns.changed_attributes:
            return self, changed_columns
        filtering = copy(self)
        filtering.attributes, filtering.changed_attributes = (
            changed_columns.attributes,
            self.changed_attributes | changed_columns.changed_attributes,
        )
        filtering._masks = self._masks.carry_over(changed_columns.attributes, changed_columns.changed_attributes)
        return filtering, changed_columns

    def with_new_items(
        self, new_item_values: Sequence[Mapping[str, Any]], new_item_vectors: NDArray[np.float32]
    ) -> Self:
        """Return a filtering of the same items followed by new items with these attributes and vectors [n, dims]."""
        filtering = copy(self)
        filtering.new_items_filtering = None
        if len(new_item_values):
            attributes = attributes_of_new_items(self.attributes, new_item_values)
            filtering.new_items_filtering = Filtering(attributes, new_item_vectors, filter_by_name=self._filter_by_name)
        return filtering

    def may_differ_from_night(self, filter_name: str) -> bool:
        """Return whether a declared filter may pass other items than it did in the night."""
        declared_filter = self._filter_by_name.get(filter_name)
        return declared_filter is not None and not declared_filter.attribute_names.isdisjoint(self.changed_attributes)

    def get_cached(self, filter_: Filter | str) -> FilterMask | None:
        """Return the items that pass if they are cached, else None."""
        resolved_filter = self._filter_by_name.get(filter_) if isinstance(filter_, str) else filter_
        filter_mask = None if resolved_filter is None else self._masks.get_cached(resolved_filter)
        return None if filter_mask is None else self._append_new_items_mask(filter_mask, filter_)

    def evaluation_cost(self, filter_: Filter | str) -> int:
        """Return the estimated cost of `evaluate` without a cached mask, in comparisons of one number."""
        resolved_filter = self._filter_by_name.get(filter_) if isinstance(filter_, str) else filter_
        return 0 if resolved_filter is None else mask_cost(resolved_filter.root_expression, self.attributes)

    def evaluate(self, filter_: Filter | str) -> FilterMask:
        """Return the items that pass.

        Raises InvalidFilter for a filter that does not fit the attributes, or an unknown name.
        """
        resolved_filter = self._filter_by_name.get(filter_) if isinstance(filter_, str) else filter_
        if resolved_filter is None:
            raise unknown_filter_error(str(filter_), self._filter_by_name)
        return self._append_new_items_mask(self._masks.of(resolved_filter), filter_)

    def search(
        self,
        query_vector: NDArray[np.float32],
        filter_mask: FilterMask,
        excluded_ordinals: NDArray[np.int64],
        k: int,
        metric: Metric,
    ) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
        """Return (ordinals uint32, scores float32) of the best k items that pass and are not excluded, best first.

        There may be fewer than k.
        """
        ordinals = filter_mask.ordinals()
        if len(excluded_ordinals):
            ordinals = ordinals[~np.isin(ordinals, excluded_ordinals)]
        own_count = int(ordinals.searchsorted(self.attributes.item_count))
        own_result = self._subset_search.search(query_vector, ordinals[:own_count], k, metric)
        if self.new_items_filtering is None or own_count == len(ordinals):
            return own_result
        own_item_count = self.attributes.item_count
        new_ordinals, scores = self.new_items_filtering._subset_search.search(
            query_vector, ordinals[own_count:] - own_item_count, k, metric
        )
        all_numbers = np.concatenate([own_result[0], new_ordinals + np.uint32(own_item_count)])
        all_scores = np.concatenate([own_result[1], scores])
        score_order = np.lexsort((all_numbers, -all_scores))[:k]
        return all_numbers[score_order], all_scores[score_order]

    def _append_new_items_mask(self, filter_mask: FilterMask, filter_: Filter | str) -> FilterMask:
        if self.new_items_filtering is None:
            return filter_mask
        return filter_mask.append_mask(self.new_items_filtering.evaluate(filter_), self.attributes.item_count)

"""Filtering of one generation: what passes, and the best of it for a vector."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cache.filters.attributes import ItemAttributes
from cache.filters.best import SubsetSearch
from cache.filters.changed_columns import (
    ChangedColumns,
    ItemValue,
    of_new_items,
    with_values,
)
from cache.filters.expression import Filter, InvalidFilter, read_filter
from cache.filters.masks import FilterMask, Masks, cost_of
from cache.format.item_table import ItemTable
from cache.format.manifest import Manifest
from cache.model.ranking import Metric

BYTES_MAX = 64 << 20
"""Bytes that may be kept of filters, of each generation and process: a million items take 125 KB for each."""


class UnknownFilter(InvalidFilter):
    """A name that the generation has no filter of; `details["declared"]` has those there are."""

    code = "unknown_filter"


def unknown_filter(name: str, declared: Collection[str] = ()) -> UnknownFilter:
    """Refusal of a filter by its name, with the names of those that the generation has."""
    declared_names = sorted(declared)
    return UnknownFilter(
        f"this generation has no filter {name[:64]!r}; there are {', '.join(declared_names) or 'none'}",
        declared=declared_names,
    )


class Filtering:
    """Filters over a generation's items, sent or called by their names in its manifest; for any thread."""

    def __init__(
        self,
        attributes: ItemAttributes,
        vectors: NDArray[np.float32],
        bytes_max: int = BYTES_MAX,
        declared: Mapping[str, Filter] | None = None,
    ) -> None:
        self.attributes = attributes
        self.changed_attributes: frozenset[str] = frozenset()
        """Attributes of which some item has another value than the night wrote."""
        self.new: Filtering | None = None
        """Filtering of the items behind these, which events brought."""
        self._declared = declared or {}
        self._masks = Masks(attributes, bytes_max)
        self._subset_search = SubsetSearch(vectors)

    @classmethod
    def open(cls, root: Path, manifest: Manifest, items: ItemTable) -> Self | None:
        """Maps the attributes of a generation; None where its items have none."""
        if not manifest.items.attributes:
            return None
        declared = {
            name: read_filter(named_filter.expression)
            for name, named_filter in manifest.filters.items()
        }
        return cls(ItemAttributes.open(root, manifest), items.vectors, declared=declared)

    def changed_by(self, values: Iterable[ItemValue]) -> tuple[Self, ChangedColumns]:
        """Filtering with values of some items set anew, and what came of them; this one where nothing differs."""
        changed_columns = with_values(self.attributes, values)
        if not changed_columns.changed_attributes:
            return self, changed_columns
        filtering = copy(self)
        filtering.attributes, filtering.changed_attributes = (
            changed_columns.attributes,
            self.changed_attributes | changed_columns.changed_attributes,
        )
        filtering._masks = self._masks.carry_over(
            changed_columns.attributes, changed_columns.changed_attributes
        )
        return filtering, changed_columns

    def with_new(self, values: Sequence[Mapping[str, Any]], vectors: NDArray[np.float32]) -> Self:
        """Filtering of these items, and behind them of new ones with the attributes and vectors [n, dims] of each."""
        filtering = copy(self)
        filtering.new = None
        if len(values):
            attributes = of_new_items(self.attributes, values)
            filtering.new = Filtering(attributes, vectors, declared=self._declared)
        return filtering

    def differs(self, name: str) -> bool:
        """True if a declared filter may let other items pass than it did in the night."""
        declared_filter = self._declared.get(name)
        return declared_filter is not None and not declared_filter.attributes.isdisjoint(
            self.changed_attributes
        )

    def get_cached(self, filter_: Filter | str) -> FilterMask | None:
        """Items that pass, where that is known already."""
        resolved_filter = self._declared.get(filter_) if isinstance(filter_, str) else filter_
        filter_mask = None if resolved_filter is None else self._masks.get_cached(resolved_filter)
        return None if filter_mask is None else self._with_new(filter_mask, filter_)

    def cost(self, filter_: Filter | str) -> int:
        """Estimate of the work of `evaluate` where nothing is kept, in comparisons of one number."""
        resolved_filter = self._declared.get(filter_) if isinstance(filter_, str) else filter_
        return 0 if resolved_filter is None else cost_of(resolved_filter.root, self.attributes)

    def evaluate(self, filter_: Filter | str) -> FilterMask:
        """Items that pass; raises InvalidFilter for one that does not fit the attributes, or an unknown name."""
        resolved_filter = self._declared.get(filter_) if isinstance(filter_, str) else filter_
        if resolved_filter is None:
            raise unknown_filter(str(filter_), self._declared)
        return self._with_new(self._masks.of(resolved_filter), filter_)

    def search(
        self,
        vector: NDArray[np.float32],
        filter_mask: FilterMask,
        exclusions: NDArray[np.int64],
        k: int,
        metric: Metric,
    ) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
        """(ordinals uint32, scores float32) of the best k that pass and are no `exclusions`; there may be fewer."""
        ordinals = filter_mask.ordinals()
        if len(exclusions):
            ordinals = ordinals[~np.isin(ordinals, exclusions)]
        own_count = int(ordinals.searchsorted(self.attributes.count))
        own_ranked = self._subset_search.search(vector, ordinals[:own_count], k, metric)
        if self.new is None or own_count == len(ordinals):
            return own_ranked
        count = self.attributes.count
        new, scores = self.new._subset_search.search(
            vector, ordinals[own_count:] - count, k, metric
        )
        numbers = np.concatenate([own_ranked[0], new + np.uint32(count)])
        all_scores = np.concatenate([own_ranked[1], scores])
        order = np.lexsort((numbers, -all_scores))[:k]
        return numbers[order], all_scores[order]

    def _with_new(self, filter_mask: FilterMask, filter_: Filter | str) -> FilterMask:
        if self.new is None:
            return filter_mask
        return filter_mask.followed_by(self.new.evaluate(filter_), self.attributes.count)

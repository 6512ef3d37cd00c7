"""Filtering of one generation: what passes, and the best of it for a vector."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cache.filters.attributes import ItemAttributes
from cache.filters.best import BestOf
from cache.filters.changed_columns import (
    ChangedColumns,
    ItemValue,
    of_new_items,
    with_values,
)
from cache.filters.expression import Filter, InvalidFilter, read_filter
from cache.filters.masks import Masks, Passing, cost_of
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
    known = sorted(declared)
    return UnknownFilter(
        f"this generation has no filter {name[:64]!r}; there are {', '.join(known) or 'none'}",
        declared=known,
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
        self.changed: frozenset[str] = frozenset()
        """Attributes of which some item has another value than the night wrote."""
        self.new: Filtering | None = None
        """Filtering of the items behind these, which events brought."""
        self._declared = declared or {}
        self._masks = Masks(attributes, bytes_max)
        self._best = BestOf(vectors)

    @classmethod
    def open(cls, root: Path, manifest: Manifest, items: ItemTable) -> Self | None:
        """Maps the attributes of a generation; None where its items have none."""
        if not manifest.items.attributes:
            return None
        declared = {name: read_filter(each.expression) for name, each in manifest.filters.items()}
        return cls(ItemAttributes.open(root, manifest), items.vectors, declared=declared)

    def changed_by(self, values: Iterable[ItemValue]) -> tuple[Self, ChangedColumns]:
        """Filtering with values of some items set anew, and what came of them; this one where nothing differs."""
        found = with_values(self.attributes, values)
        if not found.changed:
            return self, found
        made = copy(self)
        made.attributes, made.changed = found.attributes, self.changed | found.changed
        made._masks = self._masks.changed(found.attributes, found.changed)
        return made, found

    def with_new(self, values: Sequence[Mapping[str, Any]], vectors: NDArray[np.float32]) -> Self:
        """Filtering of these items, and behind them of new ones with the attributes and vectors [n, dims] of each."""
        made = copy(self)
        made.new = None
        if len(values):
            attributes = of_new_items(self.attributes, values)
            made.new = Filtering(attributes, vectors, declared=self._declared)
        return made

    def differs(self, name: str) -> bool:
        """True if a declared filter may let other items pass than it did in the night."""
        found = self._declared.get(name)
        return found is not None and not found.attributes.isdisjoint(self.changed)

    def kept(self, filter_: Filter | str) -> Passing | None:
        """Items that pass, where that is known already."""
        found = self._declared.get(filter_) if isinstance(filter_, str) else filter_
        passing = None if found is None else self._masks.kept(found)
        return None if passing is None else self._with_new(passing, filter_)

    def cost(self, filter_: Filter | str) -> int:
        """Estimate of the work of `passing` where nothing is kept, in comparisons of one number."""
        found = self._declared.get(filter_) if isinstance(filter_, str) else filter_
        return 0 if found is None else cost_of(found.root, self.attributes)

    def passing(self, filter_: Filter | str) -> Passing:
        """Items that pass; raises InvalidFilter for one that does not fit the attributes, or an unknown name."""
        found = self._declared.get(filter_) if isinstance(filter_, str) else filter_
        if found is None:
            raise unknown_filter(str(filter_), self._declared)
        return self._with_new(self._masks.of(found), filter_)

    def best(
        self,
        vector: NDArray[np.float32],
        passing: Passing,
        gone: NDArray[np.int64],
        k: int,
        metric: Metric,
    ) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
        """(ordinals uint32, scores float32) of the best k that pass and are not `gone`, fewer where there are fewer."""
        ordinals = passing.ordinals()
        if len(gone):
            ordinals = ordinals[~np.isin(ordinals, gone)]
        own = int(ordinals.searchsorted(self.attributes.count))
        found = self._best.of(vector, ordinals[:own], k, metric)
        if self.new is None or own == len(ordinals):
            return found
        count = self.attributes.count
        new, scores = self.new._best.of(vector, ordinals[own:] - count, k, metric)
        numbers = np.concatenate([found[0], new + np.uint32(count)])
        both = np.concatenate([found[1], scores])
        order = np.lexsort((numbers, -both))[:k]
        return numbers[order], both[order]

    def _with_new(self, passing: Passing, filter_: Filter | str) -> Passing:
        if self.new is None:
            return passing
        return passing.followed_by(self.new.passing(filter_), self.attributes.count)

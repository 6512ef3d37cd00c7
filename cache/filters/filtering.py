"""Filtering of one generation: what passes, and the best of it for a vector."""

from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cache.filters.attributes import ItemAttributes
from cache.filters.best import BestOf
from cache.filters.expression import Filter
from cache.filters.masks import Masks, Passing
from cache.format.item_table import ItemTable
from cache.format.manifest import Manifest
from cache.model.ranking import Metric

BYTES_MAX = 64 << 20
"""Bytes that may be kept of filters, of each generation and process: a million items take 125 KB for each."""


class Filtering:
    """Filters over a generation's items; for any thread."""

    def __init__(
        self, attributes: ItemAttributes, vectors: NDArray[np.float32], bytes_max: int = BYTES_MAX
    ) -> None:
        self.attributes = attributes
        self._masks = Masks(attributes, bytes_max)
        self._best = BestOf(vectors)

    @classmethod
    def open(cls, root: Path, manifest: Manifest, items: ItemTable) -> Self | None:
        """Maps the attributes of a generation; None where its items have none."""
        if not manifest.items.attributes:
            return None
        return cls(ItemAttributes.open(root, manifest), items.vectors)

    def kept(self, filter_: Filter) -> Passing | None:
        """Items that pass, where that is known already."""
        return self._masks.kept(filter_)

    def passing(self, filter_: Filter) -> Passing:
        """Items that pass; raises InvalidFilter for a filter that does not fit the attributes."""
        return self._masks.of(filter_)

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
        return self._best.of(vector, ordinals, k, metric)

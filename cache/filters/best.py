"""The best of some items for a vector: by products up to their rounding, then by the score that the night uses."""

from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cache.model.ranking import Metric, rank
from cache.native import loader

_DIRECT: Final = 512
"""Items that are ranked without a look at which may matter."""


class SubsetSearch:
    """Best items of a catalogue of vectors float32 [items, dims], of those that the caller names; for any thread."""

    def __init__(self, vectors: NDArray[np.float32]) -> None:
        self._vectors = vectors

    @cached_property
    def _lengths(self) -> NDArray[np.float32]:
        """Length of each item's vector, float32 [items]; found once."""
        lengths: NDArray[np.float32] = np.sqrt(np.einsum("nd,nd->n", self._vectors, self._vectors))
        return lengths

    def search(
        self,
        vector: NDArray[np.float32],
        ordinals: NDArray[np.int64],
        k: int,
        metric: Metric = "inner_product",
    ) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
        """(ordinals uint32, scores float32) of the best k of `ordinals`, fewer if they are fewer.

        Order and bits are those of `cache.model.ranking.rank` over all of them.
        """
        result_count = min(k, len(ordinals))
        if len(ordinals) > max(_DIRECT, 4 * k):
            ordinals = self._candidates(vector, ordinals, k, metric)
        items, scores = rank(vector[None], self._vectors, ordinals[None], None, k, metric=metric)
        return items[0, :result_count], scores[0, :result_count]

    def _candidates(
        self, vector: NDArray[np.float32], ordinals: NDArray[np.int64], k: int, metric: Metric
    ) -> NDArray[np.int64]:
        """Those that the rounding of a product may put among the best k; all where numbers are out of bounds."""
        kernel_arguments = (
            np.ascontiguousarray(vector, np.float32),
            self._vectors,
            ordinals.astype(np.int64),
        )
        scores: NDArray[np.float32] = np.frombuffer(
            loader.kernels.dots(*kernel_arguments), np.float32
        )
        vector_length = float(np.sqrt(np.dot(vector, vector)))
        lengths = self._lengths[ordinals]
        if metric == "cosine":
            scores = np.divide(
                scores,
                lengths * vector_length,
                out=np.zeros_like(scores),
                where=lengths * vector_length > 0,
            )
            size = 1.0
        else:
            size = vector_length * float(lengths.max())
        # Both sums are off by less than this, in whatever order they are added; the length of a cosine as much again.
        slack = 4 * (len(vector) + 64) * 2.0**-23 * size
        kth_index = len(scores) - k
        kth_score = float(np.partition(scores, kth_index)[kth_index])
        if not np.isfinite(slack) or not np.isfinite(kth_score):
            return ordinals
        return ordinals[scores >= kth_score - slack]

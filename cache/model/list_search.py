"""Lists of a top-K table from vectors: candidates out of its index, and their exact re-score."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache.format.item_table import ItemTable
from cache.model.candidate_search import Searcher
from cache.model.input_preparation import PreparedInput
from cache.model.ranking import rank, score

Vectors = NDArray[np.float32]
Ordinals = NDArray[np.int64]
Ranked = tuple[NDArray[np.uint32], Vectors]
"""Ordinals and scores [n, width], best first; unused slots are NO_ITEM and 0."""

_ROWS = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class ListSearch:
    """Search for lists of `width` items; in two steps, so that the first may be spared. Thread-safe."""

    searcher: Searcher
    items: ItemTable
    width: int

    def excluded(self, batch: Sequence[PreparedInput], blocked: Ordinals) -> list[Ordinals]:
        """Ordinals that the re-score leaves out of each list: many blocked ones the index has left out itself."""
        if not len(blocked) or self.searcher.filters(blocked):
            return [prepared.excluded for prepared in batch]
        return [np.concatenate([prepared.excluded, blocked]) for prepared in batch]

    def counts(self, excluded: Sequence[Ordinals]) -> Ordinals:
        """Number of candidates [n] that are sure to hold a whole list of each input, without what it leaves out."""
        return self.searcher.fetch(
            self.width, np.array([len(exclusions) for exclusions in excluded])
        )

    def candidates(self, vectors: Vectors, counts: Ordinals, blocked: Ordinals) -> list[Ordinals]:
        """Ordinals that the index finds for each vector, best first, so many; -1 stands where there are no more."""
        inside = blocked if self.searcher.filters(blocked) else None
        candidate_lists: list[Ordinals] = [np.empty(0, np.int64)] * len(vectors)
        for count in np.unique(counts).tolist():
            rows = np.flatnonzero(counts == count)
            searched = self.searcher.search(vectors[rows], count, inside)
            for row, row_candidates in zip(rows.tolist(), searched, strict=True):
                candidate_lists[row] = row_candidates
        return candidate_lists

    def rank_candidates(
        self, vectors: Vectors, candidates: Sequence[Ordinals], excluded: Sequence[Ordinals]
    ) -> Ranked:
        """The best of each input's candidates, without what it leaves out."""
        ordinals = np.empty((len(vectors), self.width), np.uint32)
        scores = np.empty((len(vectors), self.width), np.float32)
        counts = np.array([len(row_candidates) for row_candidates in candidates])
        for count in np.unique(counts).tolist():
            rows = np.flatnonzero(counts == count).tolist()
            ordinals[rows], scores[rows] = rank(
                vectors[rows],
                self.items.vectors,
                np.stack([candidates[row] for row in rows]),
                [excluded[row] for row in rows],
                self.width,
                metric=self.searcher.metric,
            )
        return ordinals, scores

    def lists(self, batch: Sequence[PreparedInput], vectors: Vectors, blocked: Ordinals) -> Ranked:
        """The list of each input, by both steps."""
        excluded = self.excluded(batch, blocked)
        candidates = self.candidates(vectors, self.counts(excluded), blocked)
        return self.rank_candidates(vectors, candidates, excluded)

    def scores(self, vectors: Vectors, ordinals: Ordinals) -> Vectors:
        """float32 [n] score of one item for each vector."""
        scores = score(vectors, self.items.vectors, ordinals[:, None], self.searcher.metric)
        return scores[:, 0]

    def reach(self) -> float | None:
        """The most that an item's score can change over a distance of one; None unless the index is exact.

        The length of the longest item (Cauchy-Schwarz). It reads all vectors: ask once.
        """
        if not self.searcher.is_exact:
            return None
        if self.searcher.metric == "cosine":
            return 1.0
        vectors, count = self.items.vectors, self.items.count
        parts = (np.asarray(vectors[at : at + _ROWS]) for at in range(0, count, _ROWS))
        squares = [float(np.einsum("nd,nd->n", part, part).max()) for part in parts]
        return float(max(squares, default=0.0) ** 0.5)

"""Candidate search in a generation's FAISS index, and lists ranked by exact scores; index positions are ordinals."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import faiss as faiss_module
import numpy as np
from numpy.typing import NDArray

from cache.errors import CorruptArtefact
from cache.format.item_table import ItemTable
from cache.model.input_preparation import PreparedInput
from cache.model.ranking import Metric, rank, score

faiss: Any = faiss_module  # faiss' type stubs are incomplete
Vectors = NDArray[np.float32]
Ordinals = NDArray[np.int64]

RankedLists = tuple[NDArray[np.uint32], Vectors]
"""Ordinals and scores [n, width], best first; unused slots are NO_ITEM and 0."""

_QUERIES_PER_CALL = 16
"""Queries per FAISS call: with more, FAISS selects another kernel, whose last bits differ."""

_ROWS_AT_ONCE = 1 << 16
_EXTRA_CANDIDATES_MIN = 32
_BLOCKED_FILTERED_ABOVE = 64


class Searcher:
    """Read-only FAISS index mapped from its file; thread-safe."""

    def __init__(self, faiss_index: Any, metric: Metric, threads: int) -> None:
        self.vector_count: int = faiss_index.ntotal
        self.metric = metric
        concrete_index = faiss.downcast_index(faiss_index)
        self.is_exact = isinstance(concrete_index, faiss.IndexFlat)
        is_graph = isinstance(concrete_index, faiss.IndexHNSW)
        self.depth_max: int = concrete_index.hnsw.efSearch if is_graph else self.vector_count
        """Number of candidates up to which a larger request explores no further and returns the same candidates
        first."""
        self._index = faiss_index
        self._threads = threads

    @classmethod
    def open(cls, path: Path, metric: Metric, *, expected_vector_count: int | None = None, threads: int = 1) -> Self:
        """Map an index file; raise CorruptArtefact if it is malformed or does not hold `vector_count` vectors."""
        try:
            # Only with this flag do processes share the index's memory.
            index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            raise CorruptArtefact(f"{path.name} is not a FAISS index: {error}") from error
        if index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise CorruptArtefact(f"{path.name} does not search by inner product")
        if expected_vector_count is not None and index.ntotal != expected_vector_count:
            raise CorruptArtefact(
                f"{path.name} holds {index.ntotal} vectors, the generation has {expected_vector_count} items",
                count=index.ntotal,
            )
        return cls(index, metric, threads)

    def candidate_counts_for(self, k: int, exclusion_counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of candidates that each row needs for k answers after its own exclusions, int64 [n].

        Depends only on the row itself (k plus a power of two): rows with similar needs are searched together, and no
        row's answer depends on the others.
        """
        extra_counts = 1 << np.ceil(np.log2(np.maximum(exclusion_counts + 16, _EXTRA_CANDIDATES_MIN))).astype(np.int64)
        candidate_counts: NDArray[np.int64] = np.minimum(k + extra_counts, self.vector_count)
        return candidate_counts

    def search(
        self,
        query_vectors: NDArray[np.float32],
        candidate_count: int,
        blocked_ordinals: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64]:
        """Search for the best candidates; return ordinals int64 [n, count], padded with -1.

        If many ordinals are blocked, the index filters them; a few are handled by fetching more candidates.
        """
        # OpenMP keeps this setting per thread; any thread of a pool may search.
        faiss.omp_set_num_threads(self._threads)
        if self.metric == "cosine":
            query_lengths = np.linalg.norm(query_vectors, axis=1, keepdims=True)
            # For a blank input a model may return infinity, for example the logarithm of a price of 0.
            with np.errstate(invalid="ignore"):
                query_vectors = (query_vectors / np.where(query_lengths > 0, query_lengths, 1)).astype(np.float32)
        ordinals = np.empty((len(query_vectors), candidate_count), np.int64)
        search_parameters = None if blocked_ordinals is None else self._search_parameters_without(blocked_ordinals)
        for start in range(0, len(query_vectors), _QUERIES_PER_CALL):
            rows = slice(start, start + _QUERIES_PER_CALL)
            query_chunk = np.ascontiguousarray(query_vectors[rows], np.float32)
            ordinals[rows] = self._index.search(query_chunk, candidate_count, params=search_parameters)[1]
        return ordinals

    @staticmethod
    def should_index_filter(blocked_ordinals: NDArray[np.int64]) -> bool:
        """Return whether so many items are blocked that the index should filter them."""
        return len(blocked_ordinals) > _BLOCKED_FILTERED_ABOVE

    def _search_parameters_without(self, blocked_ordinals: NDArray[np.int64]) -> Any:
        allowed_mask = np.ones(self.vector_count, np.bool_)
        allowed_mask[blocked_ordinals[(blocked_ordinals >= 0) & (blocked_ordinals < self.vector_count)]] = False
        selector = faiss.IDSelectorBitmap(np.packbits(allowed_mask, bitorder="little"))
        index = faiss.downcast_index(self._index)
        if isinstance(index, faiss.IndexIVF):
            return faiss.SearchParametersIVF(sel=selector, nprobe=index.nprobe)
        if isinstance(index, faiss.IndexHNSW):
            return faiss.SearchParametersHNSW(sel=selector, efSearch=index.hnsw.efSearch)
        return faiss.SearchParameters(sel=selector)


@dataclass(frozen=True, slots=True, eq=False)
class ListSearch:
    """Search for lists of `list_width` items in two steps: `candidates`, which may be skipped, and `rank_candidates`.

    Thread-safe.
    """

    searcher: Searcher
    items: ItemTable
    list_width: int

    def excluded_by_input(self, batch: Sequence[PreparedInput], blocked_ordinals: Ordinals) -> list[Ordinals]:
        """Return the ordinals to exclude from each list when ranking; if many are blocked, the index filters those."""
        if not len(blocked_ordinals) or self.searcher.should_index_filter(blocked_ordinals):
            return [prepared.excluded_ordinals for prepared in batch]
        return [np.concatenate([prepared.excluded_ordinals, blocked_ordinals]) for prepared in batch]

    def candidate_counts(self, excluded_by_input: Sequence[Ordinals]) -> Ordinals:
        """Return the number of candidates [n] that each input needs for a full list after its exclusions."""
        return self.searcher.candidate_counts_for(
            self.list_width, np.array([len(exclusions) for exclusions in excluded_by_input])
        )

    def candidates(
        self, user_vectors: Vectors, candidate_counts: Ordinals, blocked_ordinals: Ordinals
    ) -> list[Ordinals]:
        """Search the index for `candidate_counts[i]` ordinals per vector, best first, padded with -1."""
        filtered_ordinals = blocked_ordinals if self.searcher.should_index_filter(blocked_ordinals) else None
        candidate_lists: list[Ordinals] = [np.empty(0, np.int64)] * len(user_vectors)
        for count, rows in _rows_by_count(candidate_counts.tolist()):
            found_candidates = self.searcher.search(user_vectors[rows], count, filtered_ordinals)
            for row, row_candidates in zip(rows, found_candidates, strict=True):
                candidate_lists[row] = row_candidates
        return candidate_lists

    def rank_candidates(
        self, user_vectors: Vectors, candidates: Sequence[Ordinals], excluded_by_input: Sequence[Ordinals]
    ) -> RankedLists:
        """Rank each input's candidates by exact score, without its excluded items."""
        ordinals = np.empty((len(user_vectors), self.list_width), np.uint32)
        scores = np.empty((len(user_vectors), self.list_width), np.float32)
        counts = [len(row_candidates) for row_candidates in candidates]
        for _, rows in _rows_by_count(counts):
            ordinals[rows], scores[rows] = rank(
                user_vectors[rows],
                self.items.vectors,
                np.stack([candidates[row] for row in rows]),
                [excluded_by_input[row] for row in rows],
                self.list_width,
                metric=self.searcher.metric,
            )
        return ordinals, scores

    def lists(self, batch: Sequence[PreparedInput], user_vectors: Vectors, blocked_ordinals: Ordinals) -> RankedLists:
        """Return the list of each input, from both steps."""
        excluded = self.excluded_by_input(batch, blocked_ordinals)
        candidates = self.candidates(user_vectors, self.candidate_counts(excluded), blocked_ordinals)
        return self.rank_candidates(user_vectors, candidates, excluded)

    def scores(self, user_vectors: Vectors, ordinals: Ordinals) -> Vectors:
        """Return the float32 [n] score of one item for each vector."""
        scores = score(user_vectors, self.items.vectors, ordinals[:, None], self.searcher.metric)
        return scores[:, 0]

    def score_change_max(self) -> float | None:
        """Return a bound on the change of an item's score per unit of vector distance; None unless the index is exact.

        The bound is the length of the longest item (Cauchy-Schwarz). Reads all vectors: call it once.
        """
        if not self.searcher.is_exact:
            return None
        if self.searcher.metric == "cosine":
            return 1.0
        vectors, count = self.items.vectors, self.items.count
        vector_chunks = (np.asarray(vectors[start : start + _ROWS_AT_ONCE]) for start in range(0, count, _ROWS_AT_ONCE))
        largest_squares = [
            float(np.einsum("nd,nd->n", vector_chunk, vector_chunk).max()) for vector_chunk in vector_chunks
        ]
        return float(max(largest_squares, default=0.0) ** 0.5)


def _rows_by_count(counts: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return each distinct count with its rows, smallest count first.

    For the rows of a live batch this is faster than `np.unique` with a mask for each count: 1 instead of 12 us for one
    row, 2 instead of 9 us for 16, and the same for 64.
    """
    rows_by_count: dict[int, list[int]] = {}
    for row, count in enumerate(counts):
        rows_by_count.setdefault(count, []).append(row)
    return sorted(rows_by_count.items())

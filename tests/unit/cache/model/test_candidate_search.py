"""Searches of an index by vectors that are no vectors."""

import warnings

import faiss
import numpy as np

from cache.model.candidate_search import Searcher


def test_a_vector_that_is_not_finite_is_searched_by_without_a_warning() -> None:
    index = faiss.IndexFlatIP(2)
    index.add(np.eye(2, dtype=np.float32))
    queries = np.array([[-np.inf, 1.0], [1.0, 0.0], [0.0, 0.0]], np.float32)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nearest_items = Searcher(index, "cosine", 1).search(queries, 1)

    assert nearest_items.shape == (3, 1) and nearest_items[1, 0] == 0

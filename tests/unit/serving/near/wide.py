"""A predictor over a few hundred items: real tables, indexes and re-scoring, and towers of one formula each."""

from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from cache.format.directory import Directory
from cache.format.ids import hash_ids
from cache.format.item_table import ItemTable
from cache.format.manifest import Producer, Table
from cache.model.candidate_search import Searcher
from cache.model.predictor import Predictor
from cache.model.tower import Histories
from cache.model.tower_spec import InputSpec, TowerSpec
from cache.records import Layout

ITEMS, DIMS, K, LABELS = 600, 12, 10, ("a", "b", "c")
_HISTORY = InputSpec("history", "history", "int32", max_length=64, pad=ITEMS)
_TASTE = InputSpec("taste", "feature", "float32", column="taste", width=4)
_AGE = InputSpec("age", "feature", "int64", column="age")


class MeanTower:
    """User tower: the mean of the history's item vectors."""

    spec = TowerSpec((_HISTORY,), "vector", DIMS)
    buckets = ()

    def __init__(self, vectors: NDArray[np.float32]) -> None:
        self._vectors = vectors

    def run(self, inputs: dict[str, Histories]) -> NDArray[np.float32]:
        """Return float32 [n, dims]."""
        histories = inputs["history"]
        rows = np.split(self._vectors[histories.indices], histories.indptr[1:-1])
        return np.stack([item_vectors.mean(axis=0) for item_vectors in rows])


class TasteTower:
    """Value tower: the weighted numbers of a taste."""

    buckets = ()

    def __init__(self, *inputs: InputSpec) -> None:
        self.spec = TowerSpec(inputs, "values", len(LABELS))
        self.rows = 0

    def run(self, inputs: dict[str, Any]) -> NDArray[np.float32]:
        """Return float32 [n, labels]."""
        self.rows += len(inputs["taste"])
        weights = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]], np.float32)
        values: NDArray[np.float32] = inputs["taste"] @ weights
        return values


def wide_predictor(seed: int = 0) -> Predictor:
    """Tables `user_topk` (from histories), `mood` (from numbers alone), `mixed` (from a number and an integer)."""
    rng = np.random.default_rng(seed)
    ids = [b"item-%d" % number for number in range(ITEMS)]
    hashes = hash_ids(ids, 1)
    order = np.argsort(hashes)
    raws = [ids[item_index] for item_index in order]
    offsets = np.cumsum([0, *map(len, raws)]).astype(np.uint64)
    centres = rng.standard_normal((30, DIMS))[rng.integers(0, 30, ITEMS)]
    vectors = (centres + 0.6 * rng.standard_normal((ITEMS, DIMS))).astype(np.float32)
    items = ItemTable(
        Directory(1, [0], [hashes[order]]), np.frombuffer(b"".join(raws), np.uint8), offsets,
        vectors, np.arange(ITEMS),
    )  # fmt: skip
    index = faiss.IndexFlatIP(DIMS)
    index.add(vectors)
    values, lists = Layout("value", len(LABELS), "f4"), Layout("topk", K, "f4")
    producers = {
        "user_topk": (Producer("topk", "user_tower", "inner_product"), lists),
        "mood": (Producer("value", "taste"), values),
        "mixed": (Producer("value", "mixed"), values),
        "single": (Producer("value", "taste"), Layout("value", 1, "f4")),
    }
    towers: dict[str, Any] = {
        "user_tower": MeanTower(vectors), "taste": TasteTower(_TASTE), "mixed": TasteTower(_TASTE, _AGE),
    }  # fmt: skip
    return Predictor(
        {
            name: Table(name, "user", producer, layout, 4, (), LABELS)
            for name, (producer, layout) in producers.items()
        },
        items, towers, {"inner_product": Searcher(index, "inner_product", 1)}, {}, "digest",
    )  # fmt: skip

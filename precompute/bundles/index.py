"""Builder of the live path's FAISS index: kind chosen by measurement, recall read back from the file."""

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import faiss as faiss_module
import numpy as np
from numpy.typing import NDArray

from cache.errors import ConfigError
from cache.model.agreement import recalls
from cache.model.candidate_search import Searcher
from cache.model.ranking import Metric, pack_sort_keys, top_sort_keys, unit_rows, unpack_sort_keys
from cache.store.artefacts import open_draft

IndexKind = Literal["auto", "flat", "ivf", "hnsw"]

RECALL_WANTED = 0.99
RECALL_AT = 100
SAMPLE = 256
TIMED = 32
"""Number of queries whose median is the time of a search."""
FLAT_BELOW = 10_000
"""Items up to which `auto` takes the flat index."""

faiss: Any = faiss_module  # its type stubs lag behind what the module has

TILE_ITEMS = 1 << 14
"""Items compared with all queries at once: some 200 MB with 256 of them."""

_WORTH_IT = 0.7
_TRAINING_PER_LIST = 64


@dataclass(frozen=True, slots=True)
class IndexReport:
    """Kind of a built index, and the share of the exact top 100 that is among its candidates."""

    kind: str
    recall: float


def build_index(
    vectors: NDArray[np.float32],
    metric: Metric,
    path: Path,
    kind: IndexKind = "auto",
    *,
    queries: NDArray[np.float32] | None = None,
) -> IndexReport:
    """Write an index over `vectors` float32 [items, dims] (position = ordinal) atomically.

    `auto`: flat while there are few items; else the inverted file whose probes reach 99 % of the exact
    top 100, if that answers in less than 0.7 of the flat index's time. `queries` are real users; without
    any, items are used.
    """
    if kind not in ("auto", "flat", "ivf", "hnsw"):
        raise ConfigError(f"index kind {kind!r} is none of auto, flat, ivf, hnsw")
    sample = sample_queries(vectors if queries is None else queries)
    index_kind: IndexKind = "flat" if kind == "auto" and len(vectors) < FLAT_BELOW else kind
    flat_ms = math.inf
    if index_kind == "flat":
        index, name = _flat(vectors, metric), "flat"
    elif index_kind == "hnsw":
        index = _graph(vectors, metric)
        name = f"hnsw32-ef{index.hnsw.efSearch}"
    else:
        if index_kind == "auto":
            flat = _write(_flat(vectors, metric), path, metric)
            exact, flat_ms = _candidates(flat, sample), _search_ms(flat, sample)
        else:
            exact = exact_neighbours(vectors, sample, metric)
        index = inverted_file(vectors, metric)
        _widen(index, Searcher(index, metric, 1), sample, exact)
        name = f"ivf{index.nlist}-nprobe{index.nprobe}"
    searcher = _write(index, path, metric)
    recall = measure_recall(searcher, vectors, sample)
    if index_kind == "auto" and (
        recall < RECALL_WANTED or _search_ms(searcher, sample) > _WORTH_IT * flat_ms
    ):
        searcher, name = _write(_flat(vectors, metric), path, metric), "flat"
        recall = measure_recall(searcher, vectors, sample)
    return IndexReport(name, recall)


def sample_queries(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return up to 256 rows: half from the tenth with the longest vectors (the head), half from the others."""
    order = np.argsort(-lengths_of(vectors), kind="stable")
    cut = max(1, len(order) // 10)
    rng = np.random.default_rng(0)
    parts = [
        rng.choice(ordinals, min(SAMPLE // 2, len(ordinals)), replace=False)
        for ordinals in (order[:cut], order[cut:])
    ]
    queries: NDArray[np.float32] = vectors[np.concatenate(parts)]
    return queries


def measure_recall(
    searcher: Searcher, vectors: NDArray[np.float32], sample: NDArray[np.float32]
) -> float:
    """Measure the share of the exact top 100 that the index finds, for the sample of `sample_queries`."""
    exact = exact_neighbours(vectors, sample, searcher.metric)
    return float(recalls(exact, _candidates(searcher, sample)).mean())


def tiles(
    vectors: NDArray[np.float32], metric: Metric = "inner_product"
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield (first ordinal, rows as compared) over all items, so that no step holds a matrix of all of them."""
    for start in range(0, len(vectors), TILE_ITEMS):
        part = vectors[start : start + TILE_ITEMS]
        yield (
            start,
            np.ascontiguousarray(unit_rows(part) if metric == "cosine" else part, np.float32),
        )


def best_with(
    keys: NDArray[np.uint64], scores: NDArray[np.float32], start: int, k: int
) -> NDArray[np.uint64]:
    """Return the best k of each row, of `cache.model.ranking`'s keys and of the scores of the items from `start` on."""
    top_start = max(0, scores.shape[1] - k)
    top_columns = np.argpartition(scores, top_start, axis=1)[:, top_start:]
    more = pack_sort_keys(np.take_along_axis(scores, top_columns, axis=1), top_columns + start)
    return top_sort_keys(np.concatenate([keys, more], axis=1), k)


def lengths_of(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return float32 [n], the length of each row."""
    parts = [np.linalg.norm(part, axis=1) for _, part in tiles(vectors)]
    return np.concatenate([np.empty(0, np.float32), *parts])


def _filled(index: Any, vectors: NDArray[np.float32], metric: Metric) -> Any:
    for _, part in tiles(vectors, metric):
        index.add(part)
    return index


def _flat(vectors: NDArray[np.float32], metric: Metric) -> Any:
    return _filled(faiss.IndexFlatIP(vectors.shape[1]), vectors, metric)


def list_count(items: int) -> int:
    """Return the number of lists of an inverted file."""
    return max(1, min(4096, round(math.sqrt(items) * 1.25), items // 8))


def inverted_file(vectors: NDArray[np.float32], metric: Metric) -> Any:
    """Train a FAISS inverted file for the vectors, float32 [n, dims], on a random part of them, and add all."""
    (count, dims), lists = vectors.shape, list_count(len(vectors))
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dims), dims, lists, faiss.METRIC_INNER_PRODUCT)
    index.cp.seed = 1
    training_rows = np.random.default_rng(0).choice(
        count, min(count, lists * _TRAINING_PER_LIST), replace=False
    )
    trained = vectors[np.sort(training_rows)]
    index.train(unit_rows(trained) if metric == "cosine" else trained)
    return _filled(index, vectors, metric)


def _graph(vectors: NDArray[np.float32], metric: Metric) -> Any:
    index = faiss.IndexHNSWFlat(vectors.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = 80
    index.hnsw.efSearch = 512
    return _filled(index, vectors, metric)


def _widen(
    index: Any, searcher: Searcher, sample: NDArray[np.float32], exact: NDArray[np.int64]
) -> None:
    """Double the probes until the sample's recall is reached."""
    index.nprobe = min(8, index.nlist)
    while index.nprobe < index.nlist:
        # A margin of a tenth of the allowed loss: the gate measures other queries.
        if recalls(exact, _candidates(searcher, sample)).mean() >= 1 - 0.9 * (1 - RECALL_WANTED):
            return
        index.nprobe = min(index.nlist, index.nprobe * 2)


def _write(index: Any, path: Path, metric: Metric) -> Searcher:
    """Write the index atomically (a mapped index must never be overwritten), and map it back."""
    with open_draft(path) as part_path:
        faiss.write_index(index, str(part_path))
    return Searcher.open(path, metric)


def exact_neighbours(
    vectors: NDArray[np.float32], sample: NDArray[np.float32], metric: Metric
) -> NDArray[np.int64]:
    """Return int64 [n, up to 100]: ordinals of the best items of each query, best first, computed tile by tile."""
    queries = unit_rows(sample) if metric == "cosine" else sample
    keys = np.empty((len(sample), 0), np.uint64)
    for start, part in tiles(vectors, metric):
        keys = best_with(keys, queries @ part.T, start, RECALL_AT)
    return unpack_sort_keys(keys, keys.shape[1])[0].astype(np.int64)


def _candidates(searcher: Searcher, sample: NDArray[np.float32]) -> NDArray[np.int64]:
    candidate_count = min(RECALL_AT, searcher.count)
    return searcher.search(sample, int(searcher.fetch(candidate_count, np.zeros(1, np.int64))[0]))


def _search_ms(searcher: Searcher, sample: NDArray[np.float32]) -> float:
    count = int(searcher.fetch(min(RECALL_AT, searcher.count), np.zeros(1, np.int64))[0])
    spent = []
    for row in range(min(TIMED, len(sample))):
        started = time.perf_counter()
        searcher.search(sample[row : row + 1], count)
        spent.append((time.perf_counter() - started) * 1e3)
    return statistics.median(spent)

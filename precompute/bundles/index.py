"""Builder of the live path's FAISS index: its kind is chosen by measurements, its recall is measured from the file."""

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

RECALL_MIN = 0.99
RECALL_TOP_ITEMS = 100
SAMPLE_QUERIES_MAX = 256
TIMED_QUERIES_MAX = 32
"""Maximum number of timed queries; the time of a search is their median."""
FLAT_ITEMS_MAX = 10_000
"""Number of items up to which `auto` takes the flat index."""

faiss: Any = faiss_module  # the type stubs lack a part of the module

TILE_ITEMS = 1 << 14
"""Items compared with all queries at once: some 200 MB with 256 queries."""

_IVF_TIME_SHARE_MAX = 0.7
_TRAINING_VECTORS_PER_LIST = 64


@dataclass(frozen=True, slots=True)
class IndexReport:
    """Report on a built index: its kind, and the share of the exact top 100 among its candidates."""

    index_kind: str
    recall: float


def build_index(
    item_vectors: NDArray[np.float32],
    metric: Metric,
    index_path: Path,
    kind: IndexKind = "auto",
    *,
    query_vectors: NDArray[np.float32] | None = None,
) -> IndexReport:
    """Write an index over `item_vectors` float32 [items, dims] (position = ordinal) atomically.

    `auto` is flat for few items; else an inverted file whose number of probes reaches 99 % of the exact top 100, if
    that takes less than 0.7 of the flat index's time. `query_vectors` are vectors of real users; without any, items are
    the queries.
    """
    if kind not in ("auto", "flat", "ivf", "hnsw"):
        raise ConfigError(f"index kind {kind!r} is not one of auto, flat, ivf, hnsw")
    query_sample = sample_query_vectors(item_vectors if query_vectors is None else query_vectors)
    index_kind: IndexKind = "flat" if kind == "auto" and len(item_vectors) < FLAT_ITEMS_MAX else kind
    flat_ms = math.inf
    if index_kind == "flat":
        index, index_name = _build_flat(item_vectors, metric), "flat"
    elif index_kind == "hnsw":
        index = _build_hnsw(item_vectors, metric)
        index_name = f"hnsw32-ef{index.hnsw.efSearch}"
    else:
        if index_kind == "auto":
            flat_searcher = _write_and_map(_build_flat(item_vectors, metric), index_path, metric)
            exact_ordinals, flat_ms = (
                _search_candidates(flat_searcher, query_sample),
                _median_search_ms(flat_searcher, query_sample),
            )
        else:
            exact_ordinals = exact_neighbours(item_vectors, query_sample, metric)
        index = build_inverted_file(item_vectors, metric)
        _widen_probes(index, Searcher(index, metric, 1), query_sample, exact_ordinals)
        index_name = f"ivf{index.nlist}-nprobe{index.nprobe}"
    searcher = _write_and_map(index, index_path, metric)
    recall = measure_recall(searcher, item_vectors, query_sample)
    if index_kind == "auto" and (
        recall < RECALL_MIN or _median_search_ms(searcher, query_sample) > _IVF_TIME_SHARE_MAX * flat_ms
    ):
        searcher, index_name = (_write_and_map(_build_flat(item_vectors, metric), index_path, metric), "flat")
        recall = measure_recall(searcher, item_vectors, query_sample)
    return IndexReport(index_name, recall)


def sample_query_vectors(all_vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return up to 256 rows: half of them from the tenth with the longest vectors (the head), half from the others."""
    longest_first = np.argsort(-vector_lengths(all_vectors), kind="stable")
    head_size = max(1, len(longest_first) // 10)
    rng = np.random.default_rng(0)
    sampled_parts = [
        rng.choice(ordinals, min(SAMPLE_QUERIES_MAX // 2, len(ordinals)), replace=False)
        for ordinals in (longest_first[:head_size], longest_first[head_size:])
    ]
    query_vectors: NDArray[np.float32] = all_vectors[np.concatenate(sampled_parts)]
    return query_vectors


def measure_recall(searcher: Searcher, item_vectors: NDArray[np.float32], query_sample: NDArray[np.float32]) -> float:
    """Measure the share of the exact top 100 that the index finds, for the result of `sample_query_vectors`."""
    exact_ordinals = exact_neighbours(item_vectors, query_sample, searcher.metric)
    return float(recalls(exact_ordinals, _search_candidates(searcher, query_sample)).mean())


def iterate_tiles(
    item_vectors: NDArray[np.float32], metric: Metric = "inner_product"
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield (first ordinal, rows as the metric compares them) over all items in tiles, to bound memory."""
    for first_ordinal in range(0, len(item_vectors), TILE_ITEMS):
        tile_rows = item_vectors[first_ordinal : first_ordinal + TILE_ITEMS]
        yield (
            first_ordinal,
            np.ascontiguousarray(unit_rows(tile_rows) if metric == "cosine" else tile_rows, np.float32),
        )


def merge_best_keys(
    best_keys: NDArray[np.uint64], item_scores: NDArray[np.float32], first_ordinal: int, best_count: int
) -> NDArray[np.uint64]:
    """Return the best of each row, of `cache.model.ranking`'s keys and the scores of items from `first_ordinal` on."""
    top_start = max(0, item_scores.shape[1] - best_count)
    top_columns = np.argpartition(item_scores, top_start, axis=1)[:, top_start:]
    new_keys = pack_sort_keys(np.take_along_axis(item_scores, top_columns, axis=1), top_columns + first_ordinal)
    return top_sort_keys(np.concatenate([best_keys, new_keys], axis=1), best_count)


def vector_lengths(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return float32 [n]: the length of each row."""
    length_parts = [np.linalg.norm(tile_rows, axis=1) for _, tile_rows in iterate_tiles(vectors)]
    return np.concatenate([np.empty(0, np.float32), *length_parts])


def _fill_index(faiss_index: Any, item_vectors: NDArray[np.float32], metric: Metric) -> Any:
    for _, tile_rows in iterate_tiles(item_vectors, metric):
        faiss_index.add(tile_rows)
    return faiss_index


def _build_flat(item_vectors: NDArray[np.float32], metric: Metric) -> Any:
    return _fill_index(faiss.IndexFlatIP(item_vectors.shape[1]), item_vectors, metric)


def inverted_list_count(item_count: int) -> int:
    """Return the number of lists of an inverted file."""
    return max(1, min(4096, round(math.sqrt(item_count) * 1.25), item_count // 8))


def build_inverted_file(item_vectors: NDArray[np.float32], metric: Metric) -> Any:
    """Train a FAISS inverted file on a random part of the vectors float32 [n, dims], and add all vectors."""
    (vector_count, dims), list_count = item_vectors.shape, inverted_list_count(len(item_vectors))
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dims), dims, list_count, faiss.METRIC_INNER_PRODUCT)
    index.cp.seed = 1
    training_rows = np.random.default_rng(0).choice(
        vector_count, min(vector_count, list_count * _TRAINING_VECTORS_PER_LIST), replace=False
    )
    training_vectors = item_vectors[np.sort(training_rows)]
    index.train(unit_rows(training_vectors) if metric == "cosine" else training_vectors)
    return _fill_index(index, item_vectors, metric)


def _build_hnsw(item_vectors: NDArray[np.float32], metric: Metric) -> Any:
    index = faiss.IndexHNSWFlat(item_vectors.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = 80
    index.hnsw.efSearch = 512
    return _fill_index(index, item_vectors, metric)


def _widen_probes(
    faiss_index: Any, searcher: Searcher, query_sample: NDArray[np.float32], exact_ordinals: NDArray[np.int64]
) -> None:
    """Double the number of probes until the recall of the sample is reached."""
    faiss_index.nprobe = min(8, faiss_index.nlist)
    while faiss_index.nprobe < faiss_index.nlist:
        # The target has a margin of a tenth of the allowed loss, since the gate measures other queries.
        if recalls(exact_ordinals, _search_candidates(searcher, query_sample)).mean() >= 1 - 0.9 * (1 - RECALL_MIN):
            return
        faiss_index.nprobe = min(faiss_index.nlist, faiss_index.nprobe * 2)


def _write_and_map(faiss_index: Any, index_path: Path, metric: Metric) -> Searcher:
    """Write the index atomically (a mapped index must never be overwritten), and map it back."""
    with open_draft(index_path) as part_path:
        faiss.write_index(faiss_index, str(part_path))
    return Searcher.open(index_path, metric)


def exact_neighbours(
    item_vectors: NDArray[np.float32], query_sample: NDArray[np.float32], metric: Metric
) -> NDArray[np.int64]:
    """Return int64 [n, up to 100]: ordinals of the best items of each query, best first, computed tile by tile."""
    queries = unit_rows(query_sample) if metric == "cosine" else query_sample
    best_keys = np.empty((len(query_sample), 0), np.uint64)
    for first_ordinal, tile_rows in iterate_tiles(item_vectors, metric):
        best_keys = merge_best_keys(best_keys, queries @ tile_rows.T, first_ordinal, RECALL_TOP_ITEMS)
    return unpack_sort_keys(best_keys, best_keys.shape[1])[0].astype(np.int64)


def _search_candidates(searcher: Searcher, query_sample: NDArray[np.float32]) -> NDArray[np.int64]:
    candidate_count = min(RECALL_TOP_ITEMS, searcher.vector_count)
    return searcher.search(query_sample, int(searcher.candidate_counts_for(candidate_count, np.zeros(1, np.int64))[0]))


def _median_search_ms(searcher: Searcher, query_sample: NDArray[np.float32]) -> float:
    fetch_count = int(
        searcher.candidate_counts_for(min(RECALL_TOP_ITEMS, searcher.vector_count), np.zeros(1, np.int64))[0]
    )
    durations_ms = []
    for query_index in range(min(TIMED_QUERIES_MAX, len(query_sample))):
        started_at = time.perf_counter()
        searcher.search(query_sample[query_index : query_index + 1], fetch_count)
        durations_ms.append((time.perf_counter() - started_at) * 1e3)
    return statistics.median(durations_ms)

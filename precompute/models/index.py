"""Building the FAISS index of the live path: kind chosen by measurement, recall read back from the file."""

import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import faiss as faiss_module
import numpy as np
from numpy.typing import NDArray

from cache.artefacts import written_beside
from cache.errors import ConfigError
from cache.ranking import Metric, best, pack, unpack
from cache.search import Searcher

IndexKind = Literal["auto", "flat", "ivf", "hnsw"]

RECALL_WANTED = 0.99
RECALL_AT = 100
SAMPLE = 256
FLAT_BELOW = 10_000
"""Items up to which `auto` takes the flat index."""

faiss: Any = faiss_module  # its type stubs lag behind what the module has

_WORTH_IT = 0.7
_TRAINING_PER_LIST = 64


@dataclass(frozen=True, slots=True)
class IndexReport:
    """What was built; `recall` is that of the top 100 among the candidates, of all, head and tail queries.

    `search_ms` is one query's median on one thread, `flat_ms` the same for the flat index if measured.
    """

    kind: str
    seconds: float
    size_bytes: int
    recall: float
    recall_head: float
    recall_tail: float
    search_ms: float
    flat_ms: float | None


def build_index(
    vectors: NDArray[np.float32],
    metric: Metric,
    path: Path,
    kind: IndexKind = "auto",
    seed: int = 0,
    *,
    queries: NDArray[np.float32] | None = None,
) -> IndexReport:
    """Write an index over `vectors` float32 [items, dims] (position = ordinal) beside, fsync, rename.

    `auto`: flat while there are few items; else the inverted file whose probes reach 99 % of the exact
    top 100, if that answers in less than 0.7 of the flat index's time. `queries` are real users; items
    themselves stand in when there are none.
    """
    if kind not in ("auto", "flat", "ivf", "hnsw"):
        raise ConfigError(f"index kind {kind!r} is none of auto, flat, ivf, hnsw")
    started = time.perf_counter()
    stored = np.ascontiguousarray(unit(vectors) if metric == "cosine" else vectors, np.float32)
    sample = sample_queries(vectors if queries is None else queries, seed)
    flat_ms: float | None = None
    chosen: IndexKind = "flat" if kind == "auto" and len(stored) < FLAT_BELOW else kind
    if chosen == "auto":
        flat = _write(_flat(stored), path, metric)
        exact = _candidates(flat, sample)
        flat_ms = _search_ms(flat, sample)
        index = _inverted(stored, seed)
        _widen(index, Searcher(index, metric, 1), sample, exact)
        searcher = _write(index, path, metric)
        ivf_ms = _search_ms(searcher, sample)
        recall = measure_recall(searcher, vectors, sample)
        if ivf_ms > _WORTH_IT * flat_ms or recall[0] < RECALL_WANTED:
            searcher, name = _write(_flat(stored), path, metric), "flat"
        else:
            name = f"ivf{index.nlist}-nprobe{index.nprobe}"
    elif chosen == "ivf":
        index = _inverted(stored, seed)
        _widen(index, Searcher(index, metric, 1), sample, _exact(stored, sample, metric))
        searcher, name = _write(index, path, metric), f"ivf{index.nlist}-nprobe{index.nprobe}"
    elif chosen == "hnsw":
        index = _graph(stored)
        searcher, name = _write(index, path, metric), f"hnsw32-ef{index.hnsw.efSearch}"
    else:
        searcher, name = _write(_flat(stored), path, metric), "flat"
    recall = measure_recall(searcher, vectors, sample)
    return IndexReport(
        name,
        time.perf_counter() - started,
        path.stat().st_size,
        *recall,
        _search_ms(searcher, sample),
        flat_ms,
    )


def sample_queries(vectors: NDArray[np.float32], seed: int = 0) -> NDArray[np.float32]:
    """Up to 256 rows: half from the tenth with the longest vectors (the head), then half from the rest."""
    order = np.argsort(-np.linalg.norm(vectors, axis=1), kind="stable")
    cut = max(1, len(order) // 10)
    rng = np.random.default_rng(seed)
    parts = [
        rng.choice(each, min(SAMPLE // 2, len(each)), replace=False)
        for each in (order[:cut], order[cut:])
    ]
    chosen: NDArray[np.float32] = vectors[np.concatenate(parts)]
    return chosen


def measure_recall(
    searcher: Searcher, vectors: NDArray[np.float32], sample: NDArray[np.float32]
) -> tuple[float, float, float]:
    """(all, head, tail) share of the exact top 100 that the index finds, for `sample_queries`' sample."""
    stored = unit(vectors) if searcher.metric == "cosine" else vectors
    hits = _overlap(_exact(stored, sample, searcher.metric), _candidates(searcher, sample))
    head = max(1, len(hits) // 2)
    tail = hits[head:] if len(hits) > head else hits
    return float(hits.mean()), float(hits[:head].mean()), float(tail.mean())


def unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows divided by their length; zero rows stay zero."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    divided: NDArray[np.float32] = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return divided


def _flat(stored: NDArray[np.float32]) -> Any:
    index = faiss.IndexFlatIP(stored.shape[1])
    index.add(stored)
    return index


def list_count(items: int) -> int:
    """Lists of an inverted file."""
    return max(1, min(4096, round(math.sqrt(items) * 1.25), items // 8))


def _inverted(stored: NDArray[np.float32], seed: int) -> Any:
    lists = list_count(len(stored))
    index = faiss.IndexIVFFlat(
        faiss.IndexFlatIP(stored.shape[1]), stored.shape[1], lists, faiss.METRIC_INNER_PRODUCT
    )
    index.cp.seed = seed + 1
    rng = np.random.default_rng(seed)
    count = min(len(stored), lists * _TRAINING_PER_LIST)
    index.train(stored[np.sort(rng.choice(len(stored), count, replace=False))])
    index.add(stored)
    return index


def _graph(stored: NDArray[np.float32]) -> Any:
    index = faiss.IndexHNSWFlat(stored.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = 80
    index.hnsw.efSearch = 512
    index.add(stored)
    return index


def _widen(
    index: Any, searcher: Searcher, sample: NDArray[np.float32], exact: NDArray[np.int64]
) -> None:
    """Double the probes until the sample's recall is reached."""
    index.nprobe = min(8, index.nlist)
    while index.nprobe < index.nlist:
        # A margin of a tenth of the allowed loss: the gate measures other queries.
        if _overlap(exact, _candidates(searcher, sample)).mean() >= 1 - 0.9 * (1 - RECALL_WANTED):
            return
        index.nprobe = min(index.nlist, index.nprobe * 2)


def _write(index: Any, path: Path, metric: Metric) -> Searcher:
    """Write beside, fsync, rename (a mapped index must never be overwritten), and map it back."""
    with written_beside(path) as beside:
        faiss.write_index(index, str(beside))
    return Searcher.open(path, metric)


def _exact(
    stored: NDArray[np.float32], sample: NDArray[np.float32], metric: Metric
) -> NDArray[np.int64]:
    scores = ((unit(sample) if metric == "cosine" else sample) @ stored.T).astype(np.float32)
    ordinals = np.broadcast_to(np.arange(len(stored)), scores.shape)
    keys = best(pack(scores, ordinals), min(RECALL_AT, len(stored)))
    return unpack(keys, keys.shape[1])[0].astype(np.int64)


def _candidates(searcher: Searcher, sample: NDArray[np.float32]) -> NDArray[np.int64]:
    wanted = min(RECALL_AT, searcher.count)
    return searcher.search(sample, int(searcher.fetch(wanted, np.zeros(1, np.int64))[0]))


def _overlap(exact: NDArray[np.int64], found: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.array(
        [np.isin(ours, theirs).mean() for ours, theirs in zip(exact, found, strict=True)]
    )


def _search_ms(searcher: Searcher, sample: NDArray[np.float32], rounds: int = 32) -> float:
    count = int(searcher.fetch(min(RECALL_AT, searcher.count), np.zeros(1, np.int64))[0])
    spent = []
    for row in range(min(rounds, len(sample))):
        started = time.perf_counter()
        searcher.search(sample[row : row + 1], count)
        spent.append((time.perf_counter() - started) * 1e3)
    return statistics.median(spent)

"""Gates on the FAISS files that the live path searches: opened and asked again, whatever the manifest says."""

from typing import Any, Final

import faiss as faiss_module
import numpy as np
from numpy.typing import NDArray

from cache.format.manifest import Index
from cache.model.agreement import recalls
from cache.model.candidate_search import Searcher
from cache.model.ranking import Metric, unit
from precompute.bundles.index import tiles
from precompute.gates.evidence.candidate import Candidate
from precompute.gates.evidence.evidence import select_spread_rows
from precompute.gates.evidence.gate import integrity, judgement
from precompute.gates.evidence.verdict import Measurement, at_least, not_measured, worst_of

faiss: Any = faiss_module  # its type stubs lag behind what the module has

QUERIES_AT_ONCE: Final = 16
QUERIES: Final = 32
"""Queries of a stratum."""

DISTANCE_ERROR: Final = 1e-3
"""Relative tolerance: vectors are stored in full, so only the order of a float32 sum may differ."""


@judgement("index_recall")
def index_recall(candidate: Candidate) -> Measurement:
    """The worst recall of the indexes against the exact pass: as the night measured it, and now in every stratum.

    Strata of users (head, tail, new, ...) for an index that serves users, of items for one that serves items.
    """
    manifest, threshold = candidate.manifest, candidate.thresholds.index_recall
    if not manifest.indexes:
        return not_measured(threshold, "no table uses an index")
    recalls: dict[str, float] = {}
    for name, index in manifest.indexes.items():
        recalls[f"{name} as the night measured it"] = (
            float("nan") if index.recall is None else index.recall
        )
        searcher = Searcher.open(
            candidate.root / index.file.path, index.metric, count=candidate.items.count
        )
        widths = {
            entity: max(table_widths)
            for entity in ("user", "item")
            if (table_widths := [
                table.layout.width for table in manifest.tables.values()
                if table.kind == "topk" and table.producer.index == name and table.entity == entity
            ])
        }  # fmt: skip
        for entity, width in widths.items():
            for stratum, queries in _strata(candidate, entity).items():
                recalls[f"{name}, {stratum} {entity}s"] = _recall(
                    candidate, searcher, queries, width
                )
    named, worst = worst_of(recalls)
    return at_least(worst, threshold, named)


@integrity("index_vectors")
def index_vectors(candidate: Candidate) -> Measurement:
    """The indexes hold tonight's item vectors: what they answer as distance is the product of query and vector."""
    errors: dict[str, float] = {}
    for name, index in candidate.manifest.indexes.items():
        errors[name] = _distance_error(candidate, index)
    if not errors:
        return not_measured(DISTANCE_ERROR, "no table uses an index")
    worst = max(errors, key=lambda name: np.inf if np.isnan(errors[name]) else errors[name])
    passed = bool(errors[worst] <= DISTANCE_ERROR)
    return Measurement(
        passed,
        round(errors[worst], 9),
        DISTANCE_ERROR,
        f"relative error in {worst}",
    )


def _strata(candidate: Candidate, entity: str) -> dict[str, NDArray[np.float32]]:
    evidence = candidate.evidence
    if entity == "item":
        return {
            name: candidate.items.vectors[select_spread_rows(rows, QUERIES)]
            for name, rows in evidence.item_strata.items()
        }
    vectors, rows = evidence.user_vectors
    queries_by_stratum = {}
    for name, members in evidence.users.rows.items():
        member_rows = np.flatnonzero(np.isin(rows, members))
        if len(member_rows):
            queries_by_stratum[name] = vectors[select_spread_rows(member_rows, QUERIES)]
    return queries_by_stratum


def _recall(
    candidate: Candidate, searcher: Searcher, queries: NDArray[np.float32], width: int
) -> float:
    item_vectors = np.asarray(candidate.items.vectors)
    if searcher.metric == "cosine":
        queries = unit(queries)
    neighbour_count = min(width, len(item_vectors))
    count = int(searcher.fetch(neighbour_count, np.zeros(1, np.int64))[0])
    exact = _nearest(item_vectors, queries, neighbour_count, searcher.metric)
    query_recalls: list[float] = []
    for start in range(0, len(queries), QUERIES_AT_ONCE):
        rows = slice(start, start + QUERIES_AT_ONCE)
        query_recalls += recalls(exact[rows], searcher.search(queries[rows], count)).tolist()
    return float(np.mean(query_recalls))


def _nearest(
    item_vectors: NDArray[np.float32],
    queries: NDArray[np.float32],
    neighbour_count: int,
    metric: Metric,
) -> NDArray[np.int64]:
    """int64 [n, wanted]: ordinals of each query's best items in no order, from one tile after another."""
    scores = np.empty((len(queries), 0), np.float32)
    nearest_ordinals = np.empty((len(queries), 0), np.int64)
    for start, part in tiles(item_vectors, metric):
        named = np.broadcast_to(np.arange(start, start + len(part)), (len(queries), len(part)))
        scores = np.concatenate([scores, queries @ part.T], axis=1)
        nearest_ordinals = np.concatenate([nearest_ordinals, named], axis=1)
        best_columns = np.argpartition(-scores, min(neighbour_count, scores.shape[1]) - 1, axis=1)[
            :, :neighbour_count
        ]
        scores = np.take_along_axis(scores, best_columns, axis=1)
        nearest_ordinals = np.take_along_axis(nearest_ordinals, best_columns, axis=1)
    return nearest_ordinals


def _distance_error(candidate: Candidate, index: Index) -> float:
    """The largest difference between answered and computed, relative to the lengths of query and longest vector."""
    rows = select_spread_rows(candidate.evidence.item_rows, QUERIES)
    # One answer each: an index that stores vectors returns the product with what it stores.
    item_vectors = candidate.items.vectors
    queries = np.ascontiguousarray(item_vectors[rows], np.float32)
    if index.metric == "cosine":
        queries = unit(queries)
    file = faiss.read_index(str(candidate.root / index.file.path), faiss.IO_FLAG_MMAP_IFC)
    if file.d != queries.shape[1] or file.ntotal != len(item_vectors):
        return float("nan")
    distances, answered_ordinals = file.search(queries, min(10, len(item_vectors)))
    used = answered_ordinals >= 0
    if not used.any():
        return float("nan")
    vectors = item_vectors[np.where(used, answered_ordinals, 0)].astype(np.float64)
    if index.metric == "cosine":
        lengths = np.linalg.norm(vectors, axis=2, keepdims=True)
        vectors = vectors / np.where(lengths > 0, lengths, 1)
    expected = np.einsum("nd,nkd->nk", queries.astype(np.float64), vectors)
    scale = np.linalg.norm(queries, axis=1, keepdims=True) * np.linalg.norm(vectors, axis=2)
    errors = np.abs(expected - distances) / np.maximum(scale, 1e-30)
    return float(np.where(used, errors, 0).max())

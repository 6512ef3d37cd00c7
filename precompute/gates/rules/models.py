"""Gates on the live path's models: the pinned bundle, its vocabulary and dimension, int8 forms and indexes."""

from typing import Any, Final

import faiss as faiss_module
import numpy as np
import orjson
from numpy.typing import NDArray

from cache.format.item_table import Ordinals
from cache.format.manifest import Index, Manifest, Model
from cache.model.agreement import recalls, row_cosines
from cache.model.candidate_search import Searcher
from cache.model.predictor import ModelPrecision, open_warmed
from cache.model.ranking import Metric, unit_rows
from cache.model.tower import Histories, Tower
from cache.model.tower_spec import TowerSpec
from precompute.bundles.agreement import NEWEST_OVERLAP_FACT, list_overlaps
from precompute.bundles.bundle import BundleModel
from precompute.bundles.index import iterate_tiles
from precompute.gates.evidence.candidate import (
    Candidate,
    Measurement,
    at_least,
    integrity,
    judgement,
    none_of,
    not_measured,
    worst_of,
)
from precompute.gates.evidence.evidence import select_spread_rows
from precompute.partitions.catalogue import item_id_texts, needs_item_index

faiss: Any = faiss_module  # the type stubs lack a part of the module

LISTS_COMPARED: Final = 200
"""Number of sampled users whose lists are compared."""

_ERROR_CHARS: Final = 400
"""Maximum characters of ONNX Runtime's error in a verdict."""

QUERIES_AT_ONCE: Final = 16
QUERIES_PER_STRATUM: Final = 32
"""Number of queries in a stratum."""

DISTANCE_ERROR: Final = 1e-3
"""Relative tolerance of a distance: vectors are stored in full, so only the order of a float32 sum may differ."""


@integrity("bundle")
def bundle(candidate: Candidate) -> Measurement:
    """Check that the models are those of the pinned bundle, and that the manifest names this bundle."""
    manifest, pinned_bundle = candidate.manifest, candidate.evidence.bundle
    if pinned_bundle.digest != manifest.bundle_digest:
        return Measurement(False, pinned_bundle.digest, manifest.bundle_digest, "the bundle's digest")
    for model in pinned_bundle.models:
        entry = manifest.models.get(model.name)
        if entry is None:
            return Measurement(False, "missing", model.name, "a model of the bundle")
        manifest_sha256s = " ".join(artefact.sha256 for artefact in entry.fp32_files)
        pinned_sha256s = " ".join(sha256 for _, _, sha256 in model.files)
        if manifest_sha256s != pinned_sha256s or entry.digest != model.digest:
            return Measurement(False, manifest_sha256s, pinned_sha256s, f"the file of {model.name}")
        if TowerSpec.from_json(entry.spec) != model.spec:
            return Measurement(False, "another", "the bundle's", f"the specification of {model.name}")
    return Measurement(True, pinned_bundle.digest, manifest.bundle_digest)


@integrity("vocabulary")
def vocabulary(candidate: Candidate) -> Measurement:
    """Check that model indexes are positions in the vocabulary, and that the same model has the same vocabulary.

    A vocabulary in another order is consistent in itself: only a comparison with the live generation of the same tower
    shows it. If no table depends on the vocabulary, as in a night with values alone, it may change: labels may be
    renamed.
    """
    pinned_bundle, items = candidate.evidence.bundle, candidate.items
    expected_indices = pinned_bundle.vocabulary.find_positions(item_id_texts(items))
    if needs_item_index(pinned_bundle) and (expected_indices < 0).any():
        return none_of(int((expected_indices < 0).sum()), "items that the model does not know")
    model_indices = np.asarray(items.model_indices_of(Ordinals(np.arange(items.count, dtype=np.int64))))
    if wrong_count := int((model_indices != expected_indices).sum()):
        return none_of(wrong_count, "items with another model index than the bundle gives them")
    vocabulary_digest, live = pinned_bundle.vocabulary_digest, candidate.live
    if candidate.manifest.facts.get("vocabulary_digest", vocabulary_digest) != vocabulary_digest:
        return Measurement(False, vocabulary_digest, "the digest in the manifest", "the vocabulary")
    if (
        live is not None
        and _depends_on_vocabulary(candidate.manifest)
        and (live_vocabulary_digest := live.facts.get("vocabulary_digest")) is not None
    ):
        has_same_models = {model_name: model.digest for model_name, model in live.models.items()} == {
            model_name: model.digest for model_name, model in candidate.manifest.models.items()
        }
        if has_same_models and live_vocabulary_digest != vocabulary_digest:
            return Measurement(False, vocabulary_digest, str(live_vocabulary_digest),
                "the models are those of the live generation, their vocabulary is not", live.generation,
            )  # fmt: skip
    return Measurement(True, vocabulary_digest, vocabulary_digest, baseline_generation=candidate.baseline_generation)


def _depends_on_vocabulary(manifest: Manifest) -> bool:
    """Return True if a table has lists of items, or if its model takes a history or an item's index."""
    return any(
        table.kind == "topk"
        or any(
            model_input.bind != "feature"
            for model_input in TowerSpec.from_json(manifest.models[str(table.producer.model)].spec).inputs
        )
        for table in manifest.tables.values()
    )


@integrity("live_models")
def live_models(candidate: Candidate) -> Measurement:
    """Check that the live models open and answer a blank input, in either precision, as they must in every replica."""
    precisions: tuple[ModelPrecision, ...] = ("fp32", "int8")
    for precision in precisions:
        try:
            open_warmed(candidate.manifest, candidate.root, candidate.items, precision=precision)
        except (OSError, MemoryError):
            raise  # trouble of this host says nothing about the models
        except Exception as error:  # ONNX Runtime's errors share no base class
            error_text = " ".join(str(error).split())[:_ERROR_CHARS]
            note = (
                f"in {precision}, with 0, empty texts and a history of one item, which each replica tries first; let "
                "the model take unknown values"
            )
            return Measurement(False, error_text, "opens and answers", note)
    return Measurement(True, "opens and answers", "opens and answers")


@integrity("dimension")
def dimension(candidate: Candidate) -> Measurement:
    """Check that bundle, item vectors, vector tables and value tables have matching numbers of dimensions."""
    manifest, pinned_bundle = candidate.manifest, candidate.evidence.bundle
    item_files = manifest.items
    dims_by_source = {
        "the item table": item_files.dims,
        "the item vectors": item_files.vectors.size_bytes / 4 / max(1, item_files.count),
        "the items' model index": item_files.model_index.size_bytes / 8 / max(1, item_files.count) * pinned_bundle.dims,
    }
    for table_name, table in manifest.tables.items():
        if table.kind == "vector":
            dims_by_source[table_name] = table.layout.width
        if table.kind == "value":
            model = pinned_bundle.value_models[str(table.producer.model)]
            if table.layout.width != model.spec.output_dims or table.labels != model.labels:
                return Measurement(False, table.layout.width, model.spec.output_dims, table_name)
    wrong_source = next((table_name for table_name, dims in dims_by_source.items() if dims != pinned_bundle.dims), None)
    if wrong_source is not None:
        return Measurement(False, dims_by_source[wrong_source], pinned_bundle.dims, wrong_source)
    return Measurement(True, pinned_bundle.dims, pinned_bundle.dims)


@integrity("defaults")
def defaults(candidate: Candidate) -> Measurement:
    """Check that every list has its defaults: items of the item table, each once, best first, as many as possible."""
    defaults_by_table = orjson.loads((candidate.root / "defaults.json").read_bytes())
    for table_name, table in candidate.manifest.tables.items():
        if table.kind != "topk" or table.is_facet:
            continue
        if table_name not in defaults_by_table:
            return Measurement(False, "none", "as the item table has them", table_name)
        item_ids, scores = (
            defaults_by_table[table_name]["items"],
            np.asarray(defaults_by_table[table_name]["scores"], np.float64),
        )
        ordinals = candidate.items.ordinals_of([str(item_id).encode() for item_id in item_ids])
        expected_count = min(table.layout.width, candidate.items.count)
        problem = (
            "too few or too many" if len(item_ids) != expected_count or len(scores) != expected_count
            else "unknown items" if (np.asarray(ordinals) < 0).any()
            else "an item twice" if len(set(item_ids)) != len(item_ids)
            else "scores that rise or are no numbers"
            if not np.isfinite(scores).all() or (np.diff(scores) > 0).any()
            else ""
        )  # fmt: skip
        if problem:
            return Measurement(False, problem, "as the item table has them", table_name)
    return Measurement(True, len(defaults_by_table), len(defaults_by_table))


@judgement("int8_agreement")
def int8_agreement(candidate: Candidate) -> Measurement:
    """Measure the worst overlap of a quantized model's answers with the full-precision ones, as found by `quantize`.

    For the user tower it is the overlap of the top 20, with whole histories and with the newest item of each alone; for
    every model of a value table that of the best label.
    """
    manifest, threshold = candidate.manifest, candidate.thresholds.int8_overlap
    figure_by_model = {"user_tower": "overlap_at_20"} | {
        str(table.producer.model): "overlap_at_1"
        for table in manifest.tables.values()
        if table.producer.kind == "value"
    }
    overlap_by_model = {
        model_name: float(manifest.models[model_name].agreement.get(figure, float("nan")))
        for model_name, figure in figure_by_model.items()
        if manifest.models[model_name].agreement.get("precision") != "fp32"
    }
    newest_overlap = manifest.models["user_tower"].agreement.get(NEWEST_OVERLAP_FACT)
    if newest_overlap is not None and newest_overlap < overlap_by_model.get("user_tower", 0.0):
        figure_by_model["user_tower"], overlap_by_model["user_tower"] = (NEWEST_OVERLAP_FACT, newest_overlap)
    if not overlap_by_model:
        reason = manifest.models["user_tower"].agreement.get("why", "")
        return not_measured(threshold, f"no model is quantized: {reason}")
    worst_model, worst_overlap = worst_of(overlap_by_model)
    note = f"{figure_by_model[worst_model]} of {worst_model} with fp32, the worst of {', '.join(overlap_by_model)}"
    note += _drawn_histories_note(candidate, worst_model)
    return at_least(worst_overlap, threshold, note)


@judgement("int8_overlap")
def int8_overlap(candidate: Candidate) -> Measurement:
    """Compare int8 files with full-precision ones on sampled entities: lists of the user tower, labels of values."""
    overlap_by_model = {}
    for model, entry in _quantized_models(candidate):
        if model.name == candidate.evidence.bundle.user_tower.name:
            overlap_by_model[model.name] = _list_overlap(candidate, model, entry)
        elif model.labels:
            exact, approximate, _ = _run_both_precisions(candidate, model, entry)
            is_same_label = exact.argmax(axis=1) == approximate.argmax(axis=1)
            overlap_by_model[model.name] = float(is_same_label.mean()) if len(is_same_label) else float("nan")
    threshold = candidate.thresholds.int8_overlap
    if not overlap_by_model:
        return not_measured(threshold, "no model of lists or labels is quantized")
    worst_model, worst_overlap = worst_of(overlap_by_model)
    return at_least(
        worst_overlap, threshold, f"{worst_model}, measured again{_drawn_histories_note(candidate, worst_model)}"
    )


@judgement("int8_cosine")
def int8_cosine(candidate: Candidate) -> Measurement:
    """Measure the mean cosine of outputs of every int8 file and the full-precision ones, over sampled entities."""
    cosine_by_model = {}
    for model, entry in _quantized_models(candidate):
        exact, approximate, _ = _run_both_precisions(candidate, model, entry)
        cosine_by_model[model.name] = float(row_cosines(exact, approximate).mean()) if len(exact) else float("nan")
    threshold = candidate.thresholds.int8_cosine
    if not cosine_by_model:
        return not_measured(threshold, "no model is quantized")
    worst_model, worst_cosine = worst_of(cosine_by_model)
    return at_least(
        worst_cosine, threshold, f"{worst_model}, measured again{_drawn_histories_note(candidate, worst_model)}"
    )


@judgement("index_recall")
def index_recall(candidate: Candidate) -> Measurement:
    """Measure the worst recall of the indexes against exact search: by the night's figures, and now in every stratum.

    Strata are of users (head, tail, new, ...) for an index that serves users, of items for one that serves items.
    """
    manifest, threshold = candidate.manifest, candidate.thresholds.index_recall
    if not manifest.indexes:
        return not_measured(threshold, "no table uses an index")
    recall_by_query_set: dict[str, float] = {}
    for index_name, index in manifest.indexes.items():
        recall_by_query_set[f"{index_name} as the night measured it"] = (
            float("nan") if index.recall is None else index.recall
        )
        searcher = Searcher.open(
            candidate.root / index.file.path, index.metric, expected_vector_count=candidate.items.count
        )
        width_by_entity = {
            entity: max(table_widths)
            for entity in ("user", "item")
            if (table_widths := [
                table.layout.width for table in manifest.tables.values()
                if table.kind == "topk" and table.producer.index == index_name and table.entity == entity
            ])
        }  # fmt: skip
        for entity, width in width_by_entity.items():
            for stratum, queries in _stratum_queries(candidate, entity).items():
                recall_by_query_set[f"{index_name}, {stratum} {entity}s"] = _recall(candidate, searcher, queries, width)
    worst_query_set, worst_recall = worst_of(recall_by_query_set)
    return at_least(worst_recall, threshold, worst_query_set)


@integrity("index_vectors")
def index_vectors(candidate: Candidate) -> Measurement:
    """Check that indexes hold this night's item vectors: a distance must be the product of query and vector."""
    error_by_index: dict[str, float] = {}
    for index_name, index in candidate.manifest.indexes.items():
        error_by_index[index_name] = _distance_error(candidate, index)
    if not error_by_index:
        return not_measured(DISTANCE_ERROR, "no table uses an index")
    worst_index = max(
        error_by_index,
        key=lambda index_name: np.inf if np.isnan(error_by_index[index_name]) else error_by_index[index_name],
    )
    is_passed = bool(error_by_index[worst_index] <= DISTANCE_ERROR)
    return Measurement(
        is_passed, round(error_by_index[worst_index], 9), DISTANCE_ERROR, f"relative error in {worst_index}"
    )


def _drawn_histories_note(candidate: Candidate, model_name: str) -> str:
    """Return the end of a note if no user had the history that this model needs, else an empty text."""
    is_drawn = candidate.manifest.models[model_name].agreement.get("histories") == "drawn"
    return ", on histories drawn at random" if is_drawn else ""


def _quantized_models(candidate: Candidate) -> list[tuple[BundleModel, Model]]:
    entries = candidate.manifest.models
    return [
        (model, entries[model.name])
        for model in candidate.evidence.bundle.models
        if entries[model.name].int8 is not None
    ]


def _run_both_precisions(
    candidate: Candidate, model: BundleModel, entry: Model
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """Return (full-precision outputs, int8 outputs, rows of the sample)."""
    evidence = candidate.evidence
    if model.entity == "user":
        inputs, rows = evidence.user_inputs(model, evidence.compared_users(model))
    else:
        rows = evidence.usable_item_ordinals(model)
        inputs = evidence.item_inputs(model, rows)
    quantized = Tower.open(candidate.root / str(entry.int8 and entry.int8.path), model.spec)
    exact, approximate = evidence.run_model(model, inputs), quantized.run(inputs)
    is_answered = np.isfinite(exact).all(axis=1)
    return exact[is_answered], approximate[is_answered], rows[is_answered]


def _list_overlap(candidate: Candidate, model: BundleModel, entry: Model) -> float:
    exact, approximate, sampled_rows = _run_both_precisions(candidate, model, entry)
    if not len(exact):
        return float("nan")
    users = candidate.evidence.compared_users(model)
    exclusions = Histories(users.history_indptr, users.history_ordinals).select_rows(sampled_rows)
    sample_rows = select_spread_rows(np.arange(len(exact)), LISTS_COMPARED)
    exact, approximate, exclusions = (exact[sample_rows], approximate[sample_rows], exclusions.select_rows(sample_rows))
    overlaps = list_overlaps(exact, approximate, candidate.items.vectors, candidate.evidence.bundle.metric, exclusions)
    return float(overlaps.mean())


def _stratum_queries(candidate: Candidate, entity: str) -> dict[str, NDArray[np.float32]]:
    evidence = candidate.evidence
    if entity == "item":
        return {
            stratum: candidate.items.vectors[select_spread_rows(ordinals, QUERIES_PER_STRATUM)]
            for stratum, ordinals in evidence.item_strata.items()
        }
    vectors, ordinals = evidence.user_vectors
    queries_by_stratum = {}
    for stratum, stratum_users in evidence.users.rows_by_stratum.items():
        member_rows = np.flatnonzero(np.isin(ordinals, stratum_users))
        if len(member_rows):
            queries_by_stratum[stratum] = vectors[select_spread_rows(member_rows, QUERIES_PER_STRATUM)]
    return queries_by_stratum


def _recall(candidate: Candidate, searcher: Searcher, query_vectors: NDArray[np.float32], list_length: int) -> float:
    item_vectors = np.asarray(candidate.items.vectors)
    if searcher.metric == "cosine":
        query_vectors = unit_rows(query_vectors)
    neighbour_count = min(list_length, len(item_vectors))
    fetch_count = int(searcher.candidate_counts_for(neighbour_count, np.zeros(1, np.int64))[0])
    exact = _nearest(item_vectors, query_vectors, neighbour_count, searcher.metric)
    query_recalls: list[float] = []
    for first_query in range(0, len(query_vectors), QUERIES_AT_ONCE):
        query_rows = slice(first_query, first_query + QUERIES_AT_ONCE)
        query_recalls += recalls(exact[query_rows], searcher.search(query_vectors[query_rows], fetch_count)).tolist()
    return float(np.mean(query_recalls))


def _nearest(
    item_vectors: NDArray[np.float32], query_vectors: NDArray[np.float32], neighbour_count: int, metric: Metric
) -> NDArray[np.int64]:
    """Return int64 [n, wanted]: ordinals of each query's best items in any order, computed tile by tile."""
    scores = np.empty((len(query_vectors), 0), np.float32)
    nearest_ordinals = np.empty((len(query_vectors), 0), np.int64)
    for first_ordinal, tile in iterate_tiles(item_vectors, metric):
        tile_ordinals = np.broadcast_to(
            np.arange(first_ordinal, first_ordinal + len(tile)), (len(query_vectors), len(tile))
        )
        scores = np.concatenate([scores, query_vectors @ tile.T], axis=1)
        nearest_ordinals = np.concatenate([nearest_ordinals, tile_ordinals], axis=1)
        best_columns = np.argpartition(-scores, min(neighbour_count, scores.shape[1]) - 1, axis=1)[:, :neighbour_count]
        scores = np.take_along_axis(scores, best_columns, axis=1)
        nearest_ordinals = np.take_along_axis(nearest_ordinals, best_columns, axis=1)
    return nearest_ordinals


def _distance_error(candidate: Candidate, index: Index) -> float:
    """Return the largest error of an answered product, relative to the lengths of query and longest vector."""
    ordinals = select_spread_rows(candidate.evidence.sampled_item_ordinals, QUERIES_PER_STRATUM)
    # One answer per query suffices: an index that stores vectors returns the product with the stored vector.
    item_vectors = candidate.items.vectors
    queries = np.ascontiguousarray(item_vectors[ordinals], np.float32)
    if index.metric == "cosine":
        queries = unit_rows(queries)
    faiss_index = faiss.read_index(str(candidate.root / index.file.path), faiss.IO_FLAG_MMAP_IFC)
    if faiss_index.d != queries.shape[1] or faiss_index.ntotal != len(item_vectors):
        return float("nan")
    distances, answered_ordinals = faiss_index.search(queries, min(10, len(item_vectors)))
    is_answered = answered_ordinals >= 0
    if not is_answered.any():
        return float("nan")
    vectors = item_vectors[np.where(is_answered, answered_ordinals, 0)].astype(np.float64)
    if index.metric == "cosine":
        vector_lengths = np.linalg.norm(vectors, axis=2, keepdims=True)
        vectors = vectors / np.where(vector_lengths > 0, vector_lengths, 1)
    expected = np.einsum("nd,nkd->nk", queries.astype(np.float64), vectors)
    length_products = np.linalg.norm(queries, axis=1, keepdims=True) * np.linalg.norm(vectors, axis=2)
    errors = np.abs(expected - distances) / np.maximum(length_products, 1e-30)
    return float(np.where(is_answered, errors, 0).max())

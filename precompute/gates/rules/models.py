"""Gates on the models: the bundle that was pinned, its vocabulary, its dimension, and its int8 forms."""

from typing import Final

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.format.item_table import Ordinals
from cache.format.manifest import Model
from cache.model.agreement import row_cosines
from cache.model.generation_models import open_warm
from cache.model.predictor import ModelPrecision
from cache.model.tower import Histories, Tower
from cache.model.tower_spec import TowerSpec
from precompute.bundles.agreement import list_overlaps
from precompute.bundles.bundle import BundleModel
from precompute.gates.evidence.candidate import Candidate
from precompute.gates.evidence.evidence import select_spread_rows
from precompute.gates.evidence.gate import integrity, judgement
from precompute.gates.evidence.verdict import Measurement, at_least, none_of, not_measured, worst_of
from precompute.partitions.catalogue import item_texts, needs_index

LISTS: Final = 200
"""Sampled users whose lists are compared."""
_ERROR_CHARS: Final = 400
"""Characters of ONNX Runtime's error that a verdict keeps."""


@integrity("bundle")
def bundle(candidate: Candidate) -> Measurement:
    """The models are those of the pinned bundle, and the pinned bundle is the one that the manifest names."""
    manifest, pinned_bundle = candidate.manifest, candidate.evidence.bundle
    if pinned_bundle.digest != manifest.bundle_digest:
        return Measurement(
            False, pinned_bundle.digest, manifest.bundle_digest, "the bundle's digest"
        )
    for model in pinned_bundle.models:
        entry = manifest.models.get(model.name)
        if entry is None:
            return Measurement(False, "missing", model.name, "a model of the bundle")
        manifest_sha256s = " ".join(artefact.sha256 for artefact in entry.fp32_files)
        pinned = " ".join(sha256 for _, _, sha256 in model.files)
        if manifest_sha256s != pinned or entry.digest != model.digest:
            return Measurement(False, manifest_sha256s, pinned, f"the file of {model.name}")
        if TowerSpec.from_json(entry.spec) != model.spec:
            return Measurement(
                False, "another", "the bundle's", f"the specification of {model.name}"
            )
    return Measurement(True, pinned_bundle.digest, manifest.bundle_digest)


@integrity("vocabulary")
def vocabulary(candidate: Candidate) -> Measurement:
    """Every item's model index is its place in the bundle's vocabulary; and the same model has the same vocabulary.

    A vocabulary in another order fits itself: only the live generation, made by the same tower, gives it away.
    """
    pinned_bundle, items = candidate.evidence.bundle, candidate.items
    expected = pinned_bundle.vocabulary.find_positions(item_texts(items))
    if needs_index(pinned_bundle) and (expected < 0).any():
        return none_of(int((expected < 0).sum()), "items that the model does not know")
    mapped = np.asarray(items.to_model(Ordinals(np.arange(items.count, dtype=np.int64))))
    if wrong := int((mapped != expected).sum()):
        return none_of(wrong, "items with another model index than the bundle gives them")
    digest, live = pinned_bundle.vocabulary_digest, candidate.live
    if candidate.manifest.facts.get("vocabulary_digest", digest) != digest:
        return Measurement(False, digest, "the digest in the manifest", "the vocabulary")
    if (
        live is not None
        and (live_vocabulary_digest := live.facts.get("vocabulary_digest")) is not None
    ):
        has_same_models = {name: model.digest for name, model in live.models.items()} == {
            name: model.digest for name, model in candidate.manifest.models.items()
        }
        if has_same_models and live_vocabulary_digest != digest:
            return Measurement(False, digest, str(live_vocabulary_digest),
                "the models are those of the live generation, their vocabulary is not", live.generation,
            )  # fmt: skip
    return Measurement(True, digest, digest, baseline=candidate.baseline)


@integrity("live_models")
def live_models(candidate: Candidate) -> Measurement:
    """The live models open and answer a blank input, in either precision, as they must in every replica."""
    precisions: tuple[ModelPrecision, ...] = ("int8", "fp32")
    for precision in precisions:
        try:
            open_warm(candidate.manifest, candidate.root, candidate.items, precision=precision)
        except (OSError, MemoryError):
            raise  # this host's trouble says nothing of the models
        except Exception as error:  # ONNX Runtime's errors share no base class of their own
            error_text = " ".join(str(error).split())[:_ERROR_CHARS]
            note = f"in {precision}, with 0, empty texts and a history of one item: it must answer them"
            return Measurement(False, error_text, "opens and answers", note)
    return Measurement(True, "opens and answers", "opens and answers")


@integrity("dimension")
def dimension(candidate: Candidate) -> Measurement:
    """Bundle, item vectors, vector tables and value tables agree on how many numbers there are."""
    manifest, pinned_bundle = candidate.manifest, candidate.evidence.bundle
    files = manifest.items
    sizes = {
        "the item table": files.dims,
        "the item vectors": files.vectors.size_bytes / 4 / max(1, files.count),
        "the items' model index": files.model_index.size_bytes
        / 8
        / max(1, files.count)
        * pinned_bundle.dims,
    }
    for name, table in manifest.tables.items():
        if table.kind == "vector":
            sizes[name] = table.layout.width
        if table.kind == "value":
            model = pinned_bundle.values[str(table.producer.model)]
            if table.layout.width != model.spec.output_dims or table.labels != model.labels:
                return Measurement(False, table.layout.width, model.spec.output_dims, name)
    wrong = next((name for name, dims in sizes.items() if dims != pinned_bundle.dims), None)
    if wrong is not None:
        return Measurement(False, sizes[wrong], pinned_bundle.dims, wrong)
    return Measurement(True, pinned_bundle.dims, pinned_bundle.dims)


@integrity("defaults")
def defaults(candidate: Candidate) -> Measurement:
    """Every list has its defaults: items of the item table, each once, best first, as many as there can be."""
    data = orjson.loads((candidate.root / "defaults.json").read_bytes())
    for name, table in candidate.manifest.tables.items():
        if table.kind != "topk" or table.is_facet:
            continue
        if name not in data:
            return Measurement(False, "none", "as the item table has them", name)
        ids, scores = data[name]["items"], np.asarray(data[name]["scores"], np.float64)
        ordinals = candidate.items.ordinals_of([str(item_id).encode() for item_id in ids])
        expected_count = min(table.layout.width, candidate.items.count)
        problem = (
            "too few or too many" if len(ids) != expected_count or len(scores) != expected_count
            else "unknown items" if (np.asarray(ordinals) < 0).any()
            else "an item twice" if len(set(ids)) != len(ids)
            else "scores that rise or are no numbers"
            if not np.isfinite(scores).all() or (np.diff(scores) > 0).any()
            else ""
        )  # fmt: skip
        if problem:
            return Measurement(False, problem, "as the item table has them", name)
    return Measurement(True, len(data), len(data))


@judgement("int8_agreement")
def int8_agreement(candidate: Candidate) -> Measurement:
    """The worst overlap of a quantized model's answers with the full-precision ones, as `quantize` measured it.

    Of the user tower's top 20; of the best label of every model that a value table shows.
    """
    manifest, threshold = candidate.manifest, candidate.thresholds.int8_overlap
    figures = {"user_tower": "overlap_at_20"} | {
        str(table.producer.model): "overlap_at_1"
        for table in manifest.tables.values()
        if table.producer.kind == "value"
    }
    overlaps = {
        name: float(manifest.models[name].agreement.get(figure, float("nan")))
        for name, figure in figures.items()
        if manifest.models[name].agreement.get("precision") != "fp32"
    }
    if not overlaps:
        reason = manifest.models["user_tower"].agreement.get("why", "")
        return not_measured(threshold, f"no model is quantized: {reason}")
    named, worst = worst_of(overlaps)
    note = f"{figures[named]} of {named} with fp32, the worst of {', '.join(overlaps)}"
    note += _of_what(candidate, named)
    return at_least(worst, threshold, note)


@judgement("int8_overlap")
def int8_overlap(candidate: Candidate) -> Measurement:
    """The int8 files against the full-precision ones on sampled entities: lists of the user tower, labels of values."""
    overlaps = {}
    for model, entry in _quantized(candidate):
        if model.name == candidate.evidence.bundle.user_tower.name:
            overlaps[model.name] = _lists(candidate, model, entry)
        elif model.labels:
            exact, approximate, _ = _outputs(candidate, model, entry)
            is_same_label = exact.argmax(axis=1) == approximate.argmax(axis=1)
            overlaps[model.name] = (
                float(is_same_label.mean()) if len(is_same_label) else float("nan")
            )
    threshold = candidate.thresholds.int8_overlap
    if not overlaps:
        return not_measured(threshold, "no model of lists or labels is quantized")
    named, worst = worst_of(overlaps)
    return at_least(worst, threshold, f"{named}, measured again{_of_what(candidate, named)}")


@judgement("int8_cosine")
def int8_cosine(candidate: Candidate) -> Measurement:
    """The outputs of every int8 file point where the full-precision ones do: mean cosine over sampled entities."""
    cosines = {}
    for model, entry in _quantized(candidate):
        exact, approximate, _ = _outputs(candidate, model, entry)
        cosines[model.name] = (
            float(row_cosines(exact, approximate).mean()) if len(exact) else float("nan")
        )
    threshold = candidate.thresholds.int8_cosine
    if not cosines:
        return not_measured(threshold, "no model is quantized")
    named, worst = worst_of(cosines)
    return at_least(worst, threshold, f"{named}, measured again{_of_what(candidate, named)}")


def _of_what(candidate: Candidate, model: str) -> str:
    """A note's end where no user had the history that this model wants."""
    is_drawn = candidate.manifest.models[model].agreement.get("histories") == "drawn"
    return ", on histories that were drawn" if is_drawn else ""


def _quantized(candidate: Candidate) -> list[tuple[BundleModel, Model]]:
    entries = candidate.manifest.models
    return [
        (model, entries[model.name])
        for model in candidate.evidence.bundle.models
        if entries[model.name].int8 is not None
    ]


def _outputs(
    candidate: Candidate, model: BundleModel, entry: Model
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """(full precision, int8, rows of the sample)."""
    evidence = candidate.evidence
    if model.entity == "user":
        inputs, rows = evidence.user_inputs(model, evidence.compared(model))
    else:
        rows = evidence.item_rows_for(model)
        inputs = evidence.item_inputs(model, rows)
    quantized = Tower.open(candidate.root / str(entry.int8 and entry.int8.path), model.spec)
    exact, approximate = evidence.run(model, inputs), quantized.run(inputs)
    answered = np.isfinite(exact).all(axis=1)
    return exact[answered], approximate[answered], rows[answered]


def _lists(candidate: Candidate, model: BundleModel, entry: Model) -> float:
    exact, approximate, rows = _outputs(candidate, model, entry)
    if not len(exact):
        return float("nan")
    users = candidate.evidence.compared(model)
    exclusions = Histories(users.indptr, users.ordinals).select_rows(rows)
    sample_rows = select_spread_rows(np.arange(len(exact)), LISTS)
    exact, approximate, exclusions = (
        exact[sample_rows],
        approximate[sample_rows],
        exclusions.select_rows(sample_rows),
    )
    overlaps = list_overlaps(
        exact, approximate, candidate.items.vectors, candidate.evidence.bundle.metric, exclusions
    )
    return float(overlaps.mean())

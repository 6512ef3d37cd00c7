"""Comparison of a served answer with the live path's current one, of the same generation."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.errors import traceback_of
from cache.format.ids import fingerprint, hash_id
from cache.format.manifest import Artefact, Table
from cache.model.agreement import SKEW_DEPTH, cosine, overlap, relative_errors
from cache.model.input_preparation import LiveInput
from cache.model.tower_spec import TowerSpec
from cache.quality.probe import PROBE_FACT, Probe
from cache.records import decode_record
from cache.store.artefacts import ArtefactStore, fetch_checked
from serving.engine.answer_observer import AnswerSample
from serving.engine.batch_inference import compute
from serving.engine.micro_batcher import ComputedRecord, InferenceJob, LiveUnavailable
from serving.generations.snapshot import Snapshot
from serving.requests.reasons import LiveReason

log = logging.getLogger(__name__)

CLOSE_SHARE = 2.0**-8
"""Difference of numbers, relative to the largest, that counts as equal: the rounding of float16 and int8."""

Band = Literal["none", "1-9", "10-99", "100+", "popular", "other"]
"""Band of the answered entity. For users: the length of their history, since a generation does not count requests per
entity. For items: whether they are among the popular items that a generation has as defaults."""

OrdinalsAndNumbers = tuple[NDArray[np.int64] | None, NDArray[np.float32]]
"""Ordinals (of lists) and scores or values."""


class AnswerComparison(NamedTuple):
    """Comparison of an answer: `overlap` and `score_error` are shares, `age_s` is the data's age when it was served.

    `overlap` of lists is that of the first n items, n being the served number; of vectors it is their cosine (0 if
    negative); of values it is 1 minus the error. `score_error` is the mean difference of the numbers rank by rank,
    relative to the model's largest number. `record_overlap` is the overlap as the night's gate computes it, None
    without the stored record.
    """

    table: str
    source: str
    producer: str
    band: Band
    is_exact: bool
    overlap: float
    score_error: float
    age_s: float
    record_overlap: float | None = None


class Agreement(NamedTuple):
    """Agreement of a served answer with the model's; fields as in `AnswerComparison`."""

    is_exact: bool
    overlap: float
    score_error: float


class SampleSkipped(Exception):
    """The answer cannot be compared; `reason` says why."""

    def __init__(self, skip_reason: str) -> None:
        super().__init__(skip_reason)
        self.reason = skip_reason


@dataclass(frozen=True, slots=True, eq=False)
class NightInputProbe:
    """Inputs of one generation's users."""

    probe: Probe
    hash_seed: int

    def of(self, user_id: bytes) -> LiveInput | None:
        """Return the input of a user; None if the probe lacks the user."""
        return self.probe.input_of(hash_id(user_id, self.hash_seed))


def open_night_inputs(store: ArtefactStore, snapshot: Snapshot) -> NightInputProbe | None:
    """Fetch, check and map a probe; None if it is missing or damaged: then user tables are not compared."""
    artefact_fields = snapshot.manifest.facts.get(PROBE_FACT)
    if not artefact_fields:
        return None
    try:
        artefact = Artefact(**artefact_fields)
        fetch_checked(store, snapshot.generation, artefact)
        probe = Probe.open(snapshot.generation_folder / artefact.path, snapshot.items)
        return NightInputProbe(probe, snapshot.directories["user"].seed)
    except Exception as error:
        log.warning("the probe of %s cannot be read: %s", snapshot.generation, error, exc_info=traceback_of(error))
        return None


def compare(sample: AnswerSample, snapshot: Snapshot, night_inputs: NightInputProbe | None) -> AnswerComparison:
    """Compare an answer; raise SampleSkipped: no_input, no_model, blocked, gone (its table) or failed."""
    table = snapshot.manifest.tables.get(sample.table)
    if table is None:
        raise SampleSkipped("gone")
    if snapshot.blocks_entity(table, sample.raw_id):
        raise SampleSkipped("blocked")
    if snapshot.predictor is None or not snapshot.predictor.supports(sample.table):
        raise SampleSkipped("no_model")
    live_input = _comparison_input(sample, snapshot, table, night_inputs)
    directory = snapshot.directories[table.entity]
    position = directory.find_position(hash_id(sample.raw_id, directory.seed))
    seen_ordinals = snapshot.past_item_ordinals(table, position)
    job = InferenceJob(
        snapshot, sample.table, live_input, fingerprint(sample.raw_id), 0, seen_item_ordinals=seen_ordinals
    )
    (outcome,) = compute([job])
    if isinstance(outcome, LiveUnavailable) and outcome.reason == LiveReason.NO_USABLE_INPUT:
        raise SampleSkipped("no_input")
    if not isinstance(outcome, ComputedRecord):
        raise SampleSkipped("failed")
    try:
        served_ordinals, served_numbers = _decode_served(sample, snapshot, table)
        stored_prediction = (
            _decode_stored(sample.stored_record, snapshot, table, SKEW_DEPTH) if sample.stored_record else None
        )
        live_record = decode_record(table.layout, outcome.record, snapshot.items.count)
    except Exception as damage:  # the read path counts damaged records
        raise SampleSkipped("failed") from damage
    if live_record.item_ordinals is None or served_ordinals is None:
        agreement = _compare_numbers(table, served_numbers, live_record.numbers)
        record_overlap: float | None = agreement.overlap
    else:
        allowed_indices = _allowed_indices(
            live_record.item_ordinals, (*sample.exclusions, snapshot.blocked_item_numbers)
        )
        live_items, live_scores = (live_record.item_ordinals[allowed_indices], live_record.numbers[allowed_indices])
        agreement = _compare_lists(served_ordinals, served_numbers, live_items, live_scores)
        record_overlap = None
        if stored_prediction is not None and stored_prediction[0] is not None:
            record_overlap = _compare_lists(stored_prediction[0], stored_prediction[1], live_items, live_scores).overlap
    age_s = 0.0 if sample.producer == "live" else sample.answered_at - snapshot.manifest.data_until
    band = _band(snapshot, live_input)
    return AnswerComparison(table.name, sample.source, sample.producer, band, *agreement, age_s, record_overlap)


def _comparison_input(
    sample: AnswerSample, snapshot: Snapshot, table: Table, night_inputs: NightInputProbe | None
) -> LiveInput:
    if sample.caller_input is not None:
        return sample.caller_input
    if sample.producer == "live":  # it was computed from the sent input of another request
        raise SampleSkipped("no_input")
    if table.entity == "item":
        return LiveInput(item_ordinal=snapshot.items.ordinal_of(sample.raw_id))
    night_input = None if night_inputs is None else night_inputs.of(sample.raw_id)
    if night_input is None:
        raise SampleSkipped("no_input")
    if night_input.features:  # features of all user models; each model uses its own
        tower_spec = TowerSpec.from_json(snapshot.manifest.models[str(table.producer.model)].spec)
        model_features = {
            str(feature.column): night_input.features[str(feature.column)] for feature in tower_spec.features
        }
        return replace(night_input, features=model_features or None)
    return night_input


def _decode_stored(record_bytes: bytes, snapshot: Snapshot, table: Table, k: int) -> OrdinalsAndNumbers:
    stored_record = decode_record(table.layout, record_bytes, snapshot.items.count)
    if stored_record.item_ordinals is None:
        return None, stored_record.numbers
    allowed_indices = _allowed_indices(stored_record.item_ordinals, (snapshot.blocked_item_numbers,))[:k]
    return stored_record.item_ordinals[allowed_indices].astype(np.int64), stored_record.numbers[allowed_indices]


def _decode_served(sample: AnswerSample, snapshot: Snapshot, table: Table) -> OrdinalsAndNumbers:
    if sample.answer_fields is None and not sample.answer_json:
        return _decode_stored(sample.stored_record, snapshot, table, sample.k)
    answer_fields: Mapping[str, Any] = sample.answer_fields or orjson.loads(sample.answer_json)
    if (items := answer_fields.get("items")) is not None:
        ordinals = snapshot.items.ordinals_of([item_id.encode() for item_id in items])
        return ordinals, np.asarray(answer_fields["scores"], np.float32)
    numbers = answer_fields["vector"] if table.kind == "vector" else answer_fields["values"]
    return None, np.asarray(numbers, np.float32)


def _allowed_indices(item_ordinals: NDArray[np.uint32], exclusion_sets: Sequence[frozenset[int]]) -> list[int]:
    """Return the indexes of the items that are in none of `exclusion_sets`."""
    ordinals = item_ordinals.tolist()
    return [
        item_index
        for item_index, ordinal in enumerate(ordinals)
        if not any(ordinal in excluded_ordinals for excluded_ordinals in exclusion_sets)
    ]


def _compare_lists(
    served_ordinals: NDArray[np.int64],
    served_scores: NDArray[np.float32],
    live_items: NDArray[np.uint32],
    live_scores: NDArray[np.float32],
) -> Agreement:
    served_count = len(served_ordinals)
    live_items, live_scores = live_items[:served_count], live_scores[:served_count]
    if not served_count or not len(live_items):
        return Agreement(served_count == len(live_items), float(served_count == len(live_items)), 0.0)
    is_exact = len(live_items) == served_count and bool((live_items == served_ordinals).all())
    error = relative_errors(served_scores[: len(live_items)], live_scores).mean_error
    return Agreement(is_exact, overlap(served_ordinals, live_items, served_count), error)


def _compare_numbers(table: Table, served_numbers: NDArray[np.float32], live_numbers: NDArray[np.float32]) -> Agreement:
    errors = relative_errors(served_numbers, live_numbers)
    is_close = errors.largest_error <= CLOSE_SHARE
    if table.kind != "vector":
        return Agreement(is_close, max(0.0, 1.0 - errors.largest_error), errors.mean_error)
    if (similarity := cosine(served_numbers, live_numbers)) is None:
        similarity = float(not (served_numbers.any() or live_numbers.any()))
    return Agreement(is_close, min(1.0, max(0.0, similarity)), errors.mean_error)


def _band(snapshot: Snapshot, live_input: LiveInput) -> Band:
    if live_input.item_ordinal is not None:
        is_popular = any(
            live_input.item_ordinal in default_list.ordinal_by_id.values()
            for default_list in snapshot.default_list_by_table.values()
        )
        return "popular" if is_popular else "other"
    history_length = len(live_input.history or ())
    return (
        "none" if not history_length else "1-9" if history_length < 10 else "10-99" if history_length < 100 else "100+"
    )

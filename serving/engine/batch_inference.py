"""Inference for a batch of jobs: from callers' inputs, from newer inputs, and with new items."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from cache.errors import InvalidInput
from cache.model.input_preparation import PreparedInput
from cache.model.new_items import merge_new_items
from cache.model.predictor import Predictor
from serving.engine.hooks import AnswerReuse, ComputeNewer
from serving.engine.micro_batcher import ComputedRecord, InferenceJob, InferenceOutcome, LiveUnavailable, without_frames
from serving.requests.reasons import LiveReason

_PrepareInputs = Callable[[], Sequence[PreparedInput | InvalidInput | None]]
_PredictRecords = Callable[[Sequence[InferenceJob], Sequence[PreparedInput]], Sequence[ComputedRecord]]


class BatchInference:
    """Inference for jobs of one snapshot, table and kind: the hook `compute`; features set its fields at the start."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.reuse: AnswerReuse | None = None
        """Reuse of answers; None: every input goes through the model."""
        self.compute_newer: ComputeNewer | None = None
        """Inference from newer inputs; None if no feature creates such inputs."""
        self._clock = clock

    def __call__(self, jobs: Sequence[InferenceJob]) -> list[InferenceOutcome]:
        """Run one inference; a failing job does not affect the others."""
        if jobs[0].newer_input is not None:
            assert self.compute_newer is not None  # noqa: S101 - set by the feature that made the input
            return self.compute_newer(jobs, int(self._clock()))
        if jobs[0].eligible_new_items.items:
            return compute_with_new_items(jobs, int(self._clock()))
        return compute(jobs, reuse=self.reuse, clock=self._clock)


def compute(
    jobs: Sequence[InferenceJob], *, reuse: AnswerReuse | None = None, clock: Callable[[], float] = time.time
) -> list[InferenceOutcome]:
    """Run one inference for jobs of one snapshot and table; a failing job does not affect the others."""
    snapshot, table, scored_at = jobs[0].snapshot, jobs[0].table, int(clock())
    predictor = snapshot.predictor
    if predictor is None:
        return [LiveUnavailable(LiveReason.NO_MODEL)] * len(jobs)

    def predict(batch_jobs: Sequence[InferenceJob], batch: Sequence[PreparedInput]) -> Sequence[ComputedRecord]:
        fingerprints = [job.id_fingerprint for job in batch_jobs]
        records = predictor.predict(
            table, batch, fingerprints, scored_at, blocked_ordinals=snapshot.blocked_item_ordinals
        )
        predicted_rows = zip(records, batch, strict=True)
        return [ComputedRecord(record, prepared.unknown_id_count) for record, prepared in predicted_rows]

    if reuse is not None and reuse.covers_table(snapshot, table):
        return run_in_halves(
            jobs,
            lambda: _prepare_inputs(predictor, jobs),
            lambda batch_jobs, batch: reuse.compute(batch_jobs, batch, scored_at),
        )
    return run_in_halves(jobs, lambda: _prepare_inputs(predictor, jobs), predict)


def compute_with_new_items(jobs: Sequence[InferenceJob], scored_at: int) -> list[InferenceOutcome]:
    """Run one inference for jobs whose lists may name new items; each outcome also has the list without them."""
    snapshot, table = jobs[0].snapshot, jobs[0].table
    predictor = snapshot.predictor
    if predictor is None:
        return [LiveUnavailable(LiveReason.NO_MODEL)] * len(jobs)

    def predict(batch_jobs: Sequence[InferenceJob], batch: Sequence[PreparedInput]) -> Sequence[ComputedRecord]:
        list_search, vectors = predictor.search(table), predictor.vectors(batch)
        metric, layout = list_search.searcher.metric, snapshot.manifest.tables[table].layout
        night_lists = list_search.lists(batch, vectors, snapshot.blocked_item_ordinals)
        records_without_new = predictor.lists(
            table, night_lists, [job.eligible_new_items.own_fingerprint for job in batch_jobs], scored_at
        )
        merged_night_lists = merge_new_items(
            night_lists, vectors, [job.eligible_new_items for job in batch_jobs], metric, layout
        )
        records = predictor.lists(table, merged_night_lists, [job.id_fingerprint for job in batch_jobs], scored_at)
        predicted_rows = zip(records, batch, records_without_new, strict=True)
        return [
            ComputedRecord(record, prepared.unknown_id_count, record_without_new_items=record_without_new)
            for record, prepared, record_without_new in predicted_rows
        ]

    return run_in_halves(jobs, lambda: _prepare_inputs(predictor, jobs), predict)


def _prepare_inputs(
    predictor: Predictor, jobs: Sequence[InferenceJob]
) -> Sequence[PreparedInput | InvalidInput | None]:
    """Prepare callers' inputs; lists also leave out the users' past items known to the night."""
    prepared_inputs = predictor.prepare_all(jobs[0].table, [job.live_input for job in jobs])
    return [
        replace(prepared, excluded_ordinals=np.union1d(prepared.excluded_ordinals, job.seen_item_ordinals))
        if isinstance(prepared, PreparedInput) and len(job.seen_item_ordinals)
        else prepared
        for job, prepared in zip(jobs, prepared_inputs, strict=True)
    ]


def run_in_halves(
    jobs: Sequence[InferenceJob], prepare_inputs: _PrepareInputs, predict_records: _PredictRecords
) -> list[InferenceOutcome]:
    """Return the outcomes of jobs whose inputs are prepared and predicted in one batch.

    If that raises, each half is tried by itself: a faulty job is found after about 2 log2(n) runs.
    """
    job_outcomes: list[InferenceOutcome] = [LiveUnavailable(LiveReason.NO_USABLE_INPUT)] * len(jobs)
    try:
        prepared_inputs = prepare_inputs()
    except Exception as error:  # the model is foreign code: the ladder goes on whatever it raises
        return [without_frames(error)] * len(jobs)
    indexed_inputs: list[tuple[int, PreparedInput]] = []
    for job_index, prepared in enumerate(prepared_inputs):
        if isinstance(prepared, PreparedInput):
            indexed_inputs.append((job_index, prepared))
        elif prepared is not None:
            job_outcomes[job_index] = prepared
    remaining_runs = [indexed_inputs] if indexed_inputs else []
    while remaining_runs:
        input_run = remaining_runs.pop()
        try:
            computed_records = predict_records(
                [jobs[job_index] for job_index, _ in input_run], [prepared_input for _, prepared_input in input_run]
            )
        except Exception as error:
            if len(input_run) == 1:
                job_outcomes[input_run[0][0]] = without_frames(error)
            else:
                remaining_runs += [input_run[len(input_run) // 2 :], input_run[: len(input_run) // 2]]
            continue
        for (job_index, _), job_result in zip(input_run, computed_records, strict=True):
            job_outcomes[job_index] = job_result
    return job_outcomes

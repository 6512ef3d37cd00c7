"""Inference from newer events, beside that from what callers send."""

import functools
import time
from collections.abc import Callable, Sequence

from cache.events.event_predictor import EventPredictor
from cache.model.predictor import Prepared
from serving.lookup.micro_batcher import (
    Compute,
    Computed,
    Job,
    LiveUnavailable,
    Outcome,
    compute,
    without_frames,
)
from serving.near.near_matches import NearMatches


def compute_of(near: NearMatches | None = None, clock: Callable[[], float] = time.time) -> Compute:
    """Function that runs one inference for jobs of one snapshot, table and kind; `near` may reuse answers."""
    plain = functools.partial(compute, near=near, clock=clock)

    def run(jobs: Sequence[Job]) -> list[Outcome]:
        return plain(jobs) if jobs[0].newer is None else with_events(jobs, int(clock()))

    return run


def with_events(jobs: Sequence[Job], scored_at: int) -> list[Outcome]:
    """Runs one inference for jobs with newer events; a job that fails costs the others nothing."""
    snapshot, table = jobs[0].snapshot, jobs[0].table
    predictor = None if snapshot.events is None else snapshot.events.predictor
    if predictor is None:
        return [LiveUnavailable("no_model")] * len(jobs)
    outcomes: list[Outcome] = [LiveUnavailable("no_usable_input")] * len(jobs)
    try:
        found = predictor.prepare_all(
            table, [each.newer for each in jobs if each.newer is not None]
        )
    except Exception as error:  # the model is a guest: whatever it raises, the ladder goes on
        return [without_frames(error)] * len(jobs)
    ready: list[tuple[int, Prepared]] = []
    for place, prepared in enumerate(found):
        if isinstance(prepared, Prepared):
            ready.append((place, prepared))
        elif prepared is not None:
            outcomes[place] = prepared
    _predict(predictor, jobs, ready, outcomes, scored_at)
    return outcomes


def _predict(
    predictor: EventPredictor,
    jobs: Sequence[Job],
    ready: Sequence[tuple[int, Prepared]],
    outcomes: list[Outcome],
    scored_at: int,
) -> None:
    if not ready:
        return
    batch, prints = [each for _, each in ready], [jobs[place].fingerprint for place, _ in ready]
    try:
        records = predictor.predict(jobs[0].table, batch, prints, scored_at)
    except Exception as error:
        if len(ready) == 1:
            outcomes[ready[0][0]] = without_frames(error)
            return
        for one in ready:
            _predict(predictor, jobs, [one], outcomes, scored_at)
        return
    for (place, _), record in zip(ready, records, strict=True):
        outcomes[place] = Computed(record, 0)

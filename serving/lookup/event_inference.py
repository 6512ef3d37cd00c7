"""Inference from newer events and with new items, beside that from what callers send."""

import functools
import time
from collections.abc import Callable, Sequence

from cache.errors import InvalidInput
from cache.events.new_items import merged_lists
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

_Prepare = Callable[[], Sequence[Prepared | InvalidInput | None]]
_Predict = Callable[[Sequence[Job], Sequence[Prepared]], Sequence[Computed]]


def compute_of(near: NearMatches | None = None, clock: Callable[[], float] = time.time) -> Compute:
    """Function that runs one inference for jobs of one snapshot, table and kind; `near` may reuse answers."""
    plain = functools.partial(compute, near=near, clock=clock)

    def run(jobs: Sequence[Job]) -> list[Outcome]:
        if jobs[0].newer is not None:
            return with_events(jobs, int(clock()))
        return with_new_items(jobs, int(clock())) if jobs[0].new.items else plain(jobs)

    return run


def with_events(jobs: Sequence[Job], scored_at: int) -> list[Outcome]:
    """Runs one inference for jobs with newer events; a job that fails costs the others nothing."""
    snapshot, table = jobs[0].snapshot, jobs[0].table
    predictor = None if snapshot.events is None else snapshot.events.predictor
    if predictor is None:
        return [LiveUnavailable("no_model")] * len(jobs)

    def predict(some: Sequence[Job], batch: Sequence[Prepared]) -> Sequence[Computed]:
        prints, new = [each.fingerprint for each in some], [each.new for each in some]
        records = predictor.predict(table, batch, prints, scored_at, new)
        return [Computed(record, 0) for record in records]

    inputs = [each.newer for each in jobs if each.newer is not None]
    return _outcomes(jobs, lambda: predictor.prepare_all(table, inputs), predict)


def with_new_items(jobs: Sequence[Job], scored_at: int) -> list[Outcome]:
    """Runs one inference for jobs whose lists may name new items; each comes with the list without them as well."""
    snapshot, table = jobs[0].snapshot, jobs[0].table
    predictor = snapshot.predictor
    if predictor is None:
        return [LiveUnavailable("no_model")] * len(jobs)

    def predict(some: Sequence[Job], batch: Sequence[Prepared]) -> Sequence[Computed]:
        search, vectors = predictor.search(table), predictor.vectors(batch)
        metric, layout = search.searcher.metric, snapshot.manifest.tables[table].layout
        best = search.lists(batch, vectors, snapshot.blocked_ordinals)
        own = predictor.lists(table, best, [each.new.own_print for each in some], scored_at)
        merged = merged_lists(best, vectors, [each.new for each in some], metric, layout)
        records = predictor.lists(table, merged, [each.fingerprint for each in some], scored_at)
        found = zip(records, batch, own, strict=True)
        return [
            Computed(record, prepared.dropped, own=without) for record, prepared, without in found
        ]

    sources = [each.source for each in jobs]
    return _outcomes(jobs, lambda: predictor.prepare_all(table, sources), predict)


def _outcomes(jobs: Sequence[Job], prepare: _Prepare, predict: _Predict) -> list[Outcome]:
    outcomes: list[Outcome] = [LiveUnavailable("no_usable_input")] * len(jobs)
    try:
        found = prepare()
    except Exception as error:  # the model is a guest: whatever it raises, the ladder goes on
        return [without_frames(error)] * len(jobs)
    ready: list[tuple[int, Prepared]] = []
    for place, prepared in enumerate(found):
        if isinstance(prepared, Prepared):
            ready.append((place, prepared))
        elif prepared is not None:
            outcomes[place] = prepared
    _put(jobs, ready, outcomes, predict)
    return outcomes


def _put(
    jobs: Sequence[Job],
    ready: Sequence[tuple[int, Prepared]],
    outcomes: list[Outcome],
    predict: _Predict,
) -> None:
    if not ready:
        return
    try:
        found = predict([jobs[place] for place, _ in ready], [each for _, each in ready])
    except Exception as error:
        if len(ready) == 1:
            outcomes[ready[0][0]] = without_frames(error)
            return
        half = len(ready) // 2
        for part in (ready[:half], ready[half:]):
            _put(jobs, part, outcomes, predict)
        return
    for (place, _), computed in zip(ready, found, strict=True):
        outcomes[place] = computed

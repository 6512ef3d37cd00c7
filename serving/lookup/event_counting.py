"""Newer events taken into account, whoever asks: the one place where a case becomes one that counts them."""

from collections.abc import Sequence

from cache.tiers.results import MissReason
from serving.fresh.newer_events import NO_LIMIT, NewerEvents
from serving.generations.snapshot import Snapshot
from serving.lookup.entity import Case, YieldPacer
from serving.requests.models import RequestOptions


async def count_newer(
    newer: NewerEvents, snapshot: Snapshot, cases: Sequence[Case], options: RequestOptions
) -> None:
    """Has cases count the events that their users have and the generation lacks, unless none are wanted.

    Where that cannot be computed (no model, vectors that users brought along, events that are yet to be read again),
    they start settled for what the night stored.
    """
    if options.max_events == 0:
        return
    packed, pace = newer.packed, YieldPacer()
    as_of = NO_LIMIT if options.as_of is None else options.as_of
    for case in cases:
        raw = case.entity.raw
        if raw is None or raw not in packed or case.counted is not None:
            continue
        await pace.step(case.entity)
        sent = (case.source, case.digest) if case.entity.has_input else None
        counted = newer.counted(snapshot, case.table, raw, case.want.position, sent, as_of)
        if counted is None or snapshot.events is None:
            continue
        is_computed = counted.is_whole and snapshot.events.computes(
            case.table, counted.input.position
        )
        case.count(counted, is_settled=not is_computed)
        if counted.is_past and is_computed:
            case.reason = MissReason.NEWER_EVENTS  # never one that is stored
        if snapshot.predictor is None:
            case.live_reason = "no_model"

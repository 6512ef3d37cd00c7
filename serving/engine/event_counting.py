"""Newer events and new items: adds them to pending answers, for all kinds of requests."""

from collections.abc import Awaitable, Callable, Sequence

import xxhash

from cache.events.new_items import ITEM_VECTORS
from cache.model.new_items import NO_ELIGIBLE_NEW_ITEMS, EligibleNewItems
from cache.tiers.reads import Hit, MissReason, ReadResult, RecordKey
from serving.admission.work_pacer import YieldPacer
from serving.engine.entity import PendingAnswer
from serving.engine.newer_events import NO_LIMIT, CountedEvents, NewerEvents
from serving.generations.snapshot import Snapshot
from serving.requests.models import RequestOptions
from serving.requests.reasons import LiveReason

ReadRecords = Callable[[Sequence[RecordKey]], Awaitable[Sequence[ReadResult]]]
"""Reader of nightly records: one outcome per record key, in order."""


def new_items_of(snapshot: Snapshot, case: PendingAnswer) -> EligibleNewItems:
    """Return the new items that an answer may name, without its exclusions."""
    if not case.new_items:
        return NO_ELIGIBLE_NEW_ITEMS
    raws = list(case.entity.history or ())
    # Whoever settles leaves them out at the answer: the record is everybody's who sends this input.
    if case.counted_events is not None and not case.is_settled:
        raws += case.counted_events.items
    excluded_numbers = {case.new_items.numbers.get(raw, -1) for raw in raws} | snapshot.blocked
    return EligibleNewItems(
        case.new_items, frozenset(excluded_numbers), case.nightly_key.fingerprint
    )


async def count_newer(
    newer_events: NewerEvents,
    snapshot: Snapshot,
    cases: Sequence[PendingAnswer],
    options: RequestOptions,
    read_records: ReadRecords,
) -> None:
    """Add to pending answers the newer events of their users, and the new items, unless the request declines them.

    Where that cannot be computed (no model, vectors that users brought along, events that are yet to be read again),
    they start settled for the nightly record.

    Records are read here only where the answer depends on whether there is one: a user whom the night knows has events
    and sent an input, and the night's input and the events do not suffice for the model. Then the sent input counts
    unless a record is read.
    """
    if options.max_events == 0:
        return
    _answer_with_new(snapshot, cases, options)
    packed, pace = newer_events.packed, YieldPacer()
    undecided = []
    for case in cases:
        raw = case.entity.raw
        if raw is None or raw not in packed or case.counted_events is not None:
            continue
        await pace.step(case.entity)
        counted_events = _find_counted_events(
            newer_events, snapshot, case, raw, options, takes_sent=case.entity.has_input
        )
        if counted_events is None:
            continue
        counts_sent = (
            case.record_key.position >= 0 and counted_events.input.caller_input is not None
        )
        if counts_sent and _is_computed(snapshot, case, counted_events):
            undecided.append((case, raw))
        else:
            _count(snapshot, case, counted_events)
    if not undecided:
        return
    record_keys = [case.record_key._replace(table=case.table, digest=None) for case, _ in undecided]
    outcomes = await read_records(record_keys)
    for (case, raw), outcome in zip(undecided, outcomes, strict=True):
        await pace.step(case.entity)
        has_record = isinstance(outcome, Hit)
        counted_events = _find_counted_events(
            newer_events, snapshot, case, raw, options, takes_sent=not has_record
        )
        if counted_events is not None:
            _count(snapshot, case, counted_events)


def count_as(snapshot: Snapshot, case: PendingAnswer, sibling_pending: PendingAnswer) -> None:
    """Make a pending answer count exactly the events of another table's: both are parts of one answer.

    Events that were accepted in between would make a list of one history, and leave out the items of another.
    """
    events, counted_events = snapshot.events, sibling_pending.counted_events
    if events is None or counted_events is None:
        return
    if events.changes(case.table, counted_events.input.position, snapshot.seen_items):
        _count(snapshot, case, counted_events)


def _find_counted_events(
    newer_events: NewerEvents,
    snapshot: Snapshot,
    case: PendingAnswer,
    raw: bytes,
    options: RequestOptions,
    *,
    takes_sent: bool,
) -> CountedEvents | None:
    """Return the newer events of a user that an answer counts, with the new items among them; None without any."""
    as_of = NO_LIMIT if options.as_of is None else options.as_of
    sent_input = (case.live_input, case.digest) if takes_sent else None
    counted_events = newer_events.find_counted_events(
        snapshot, case.table, raw, case.record_key.position, sent_input, as_of
    )
    if counted_events is None:
        return None
    counted_events = _with_new(snapshot, counted_events, options.as_of)
    if new_items := case.new_items:
        digest = xxhash.xxh3_128_digest(counted_events.digest + new_items.digest)
        counted_events = counted_events._replace(digest=digest)
    if snapshot.new_items.newest_number > as_of:  # some may have been others then, or gone since
        counted_events = counted_events._replace(is_approximate=True)
    return counted_events


def _is_computed(snapshot: Snapshot, case: PendingAnswer, counted_events: CountedEvents) -> bool:
    """True if a model is to compute the answer from the events."""
    events = snapshot.events
    return (
        events is not None
        and counted_events.is_whole
        and events.computes(case.table, counted_events.input.position)
    )


def _count(snapshot: Snapshot, case: PendingAnswer, counted_events: CountedEvents) -> None:
    is_computed = _is_computed(snapshot, case, counted_events)
    case.include_counted_events(counted_events, is_settled=not is_computed)
    if counted_events.is_past and is_computed:
        case.reason = MissReason.NEWER_EVENTS  # never one that is stored
    if snapshot.predictor is None:
        case.live_reason = LiveReason.NO_MODEL


def _with_new(
    snapshot: Snapshot, counted_events: CountedEvents, as_of: int | None
) -> CountedEvents:
    """Return the events with the new items among them, counted as the next night counts them.

    If items are a table of vectors, the next night's models know them as well, so the answer is approximate.
    """
    new_items = snapshot.new_items
    if not new_items or new_items.numbers.keys().isdisjoint(counted_events.items):
        return counted_events
    if as_of is not None:
        new_items = new_items.up_to(as_of)
    among = sorted({*counted_events.items} & new_items.numbers.keys())
    if not among:
        return counted_events
    named = b"".join([len(raw).to_bytes(4, "little") + raw for raw in among])
    return counted_events._replace(
        input=counted_events.input._replace(new_items=new_items),
        digest=xxhash.xxh3_128_digest(counted_events.digest + named),
        is_approximate=counted_events.is_approximate
        or bool(snapshot.manifest.facts.get(ITEM_VECTORS)),
    )


def _answer_with_new(
    snapshot: Snapshot, cases: Sequence[PendingAnswer], options: RequestOptions
) -> None:
    """Make computed lists of users name the new items of a generation.

    Not for re-ranked lists, which need more of an item than is known of a new one.
    """
    new_items = snapshot.new_items
    if not new_items or options.rerank is not None:
        return
    if options.as_of is not None:
        new_items = new_items.up_to(options.as_of)
    for case in cases:
        if case.table.kind == "topk" and case.table.entity == "user":
            case.include_new_items(new_items)

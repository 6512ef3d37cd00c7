"""Newer events of users, and new items: selection of those that an answer counts, and inference from them."""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash

from cache.events.event import Event
from cache.events.event_predictor import EventInput, GenerationEvents
from cache.events.new_items import ITEM_VECTORS_FACT, NewItemEvents
from cache.events.newer_events import AttributeEvents, UserEvent, UserEvents, takes_any_attribute
from cache.format.manifest import Table
from cache.format.stream_position import Position
from cache.model.input_preparation import LiveInput, PreparedInput
from cache.tiers.reads import Hit, MissReason
from serving.admission.work_pacer import YieldPacer
from serving.engine.batch_inference import run_in_halves
from serving.engine.entity import NewerInput, PendingAnswer
from serving.engine.hooks import NewerInputs, ReadRecords
from serving.engine.micro_batcher import ComputedRecord, InferenceJob, InferenceOutcome, LiveUnavailable
from serving.engine.rendering.answer_fields import iso_time
from serving.generations.snapshot import Snapshot
from serving.requests.options import RequestOptions
from serving.requests.reasons import LiveReason

NO_LIMIT = (1 << 64) - 1
"""Number above that of every position."""


class CountedEvents(NamedTuple):
    """Newer events that an answer counts, newest last; `inputs_digest` covers all inputs of the answer.

    Unless `has_all_events`, some events may be missing, and nothing is computed from the known ones.
    `is_as_of_earlier`: an earlier position was requested; the answer is computed and not stored. `is_approximate`:
    attributes are newer than the position.
    """

    event_input: EventInput
    inputs_digest: bytes
    has_all_events: bool = True
    is_as_of_earlier: bool = False
    is_approximate: bool = False

    @property
    def directory_position(self) -> int:
        """Position of the user in the directory; -1 if the night did not know them."""
        return self.event_input.user_position

    @property
    def counts_sent_input(self) -> bool:
        """True if the caller's input counts in addition to the events."""
        return self.event_input.caller_input is not None

    @property
    def event_count(self) -> int:
        """Number of events."""
        return len(self.event_input.events)

    @property
    def newest_accepted_at(self) -> str:
        """Time when the newest event was accepted, RFC 3339, UTC."""
        return iso_time(Position.from_number(self.event_input.events[-1].position_number).ms / 1000)

    @property
    def event_item_ids(self) -> tuple[bytes, ...]:
        """Ids of the events' items."""
        return tuple([event.item for event in self.event_input.events if event.item])


@dataclass(frozen=True, slots=True, eq=False)
class NewerEvents(NewerInputs):
    """Events of users since the oldest held generation; for the event loop of one process only."""

    users: UserEvents = field(default_factory=UserEvents)
    values: AttributeEvents = field(default_factory=AttributeEvents)
    """Attribute values of events."""
    items: NewItemEvents = field(default_factory=NewItemEvents)
    """New items of events."""

    @property
    def size_bytes(self) -> int:
        """Approximate bytes of memory in use."""
        return self.users.size_bytes + self.values.size_bytes + self.items.size_bytes

    @property
    def packed_input_by_id(self) -> dict[bytes, bytes]:
        """Events by user; always the same dictionary, without users that have no events.

        Each event replaces the user's object: while the object is the same, an answer made from it counts all events.
        """
        return self.users.packed_events_by_user

    def add(self, position: Position, event: Event) -> None:
        """Add the next event."""
        self.users.add(position, event)
        self.values.add(position, event)
        self.items.add(position, event)

    def become_in_turns(self, replacement: "NewerEvents") -> Iterator[None]:
        """Take over the contents of `replacement`, which must not be used afterwards; yield after every few users."""
        yield from self.users.replace_in_turns(replacement.users)
        self.values.replace_contents(replacement.values)
        self.items.replace_contents(replacement.items)

    def forget(self, user_ids: Iterable[bytes], item_ids: frozenset[bytes]) -> None:
        """Forget events of users, and new items and item values, also those of items that nights know."""
        for raw_id in user_ids:
            self.users.forget(raw_id)
            self.values.forget("user", raw_id)
        for raw_id in item_ids:
            if raw_id in self.items:
                self.items.forget(raw_id)
        for raw_id in self.values.items_with_values(item_ids):
            self.values.forget("item", raw_id)

    def changes_answer(self, snapshot: Snapshot, table: Table, user_id: bytes) -> bool:
        """True if the user has events that the generation lacks and that change this table's answers."""
        generation_events = snapshot.part(GenerationEvents)
        if (
            generation_events is None
            or (model_features := generation_events.features_by_changed_table.get(table.name)) is None
        ):
            return False
        if not self.users.has_newer_event(user_id, generation_events.until_position_number):
            return False
        return self.users.has_newer_item(user_id, generation_events.until_position_number) or takes_any_attribute(
            self.values.values_of_user(user_id, generation_events.until_position_number), model_features
        )

    def find_counted_events(
        self,
        snapshot: Snapshot,
        table: Table,
        user_id: bytes,
        directory_position: int,
        sent_input_and_digest: tuple[LiveInput, bytes] | None = None,
        as_of_position_number: int = NO_LIMIT,
    ) -> CountedEvents | None:
        """Return the user's events, up to `as_of_position_number`, that the table's answer counts; None without any.

        `directory_position` is the user's position in the directory (-1: unknown to the night). `sent_input_and_digest`
        is the caller's input with its digest. It counts only for users for whom the night and these events have no
        input that the model can use, and is None for a user with a record in the table.
        """
        events_of_night = snapshot.part(GenerationEvents)
        if events_of_night is None or not events_of_night.changes_answer(
            table, directory_position, snapshot.seen_items
        ):
            return None
        if snapshot.blocks_entity(table, user_id):
            return None
        model_features = events_of_night.features_by_changed_table[table.name]
        newer_events = self.users.list_events_after(user_id, events_of_night.until_position_number)
        user_values = self.values.values_of_user(user_id, events_of_night.until_position_number)
        uses_event_values = takes_any_attribute(user_values, model_features)
        events = tuple(
            [
                event
                for event in newer_events
                if event.position_number <= as_of_position_number
                and (event.item or uses_event_values)
                # The stream has them no longer, and no night counts them.
                and event.item not in snapshot.blocklist.erased_items
            ]
        )
        if not events:
            return None
        event_input, sent_input_digest = EventInput(directory_position, events, None, user_values), b""
        if sent_input_and_digest is not None and not events_of_night.has_input(table, event_input):
            caller_input, sent_input_digest = sent_input_and_digest
            event_input = event_input._replace(caller_input=caller_input)
        is_whole = events_of_night.until_position_number >= self.users.complete_after_number
        is_past = as_of_position_number < NO_LIMIT
        is_approximate = uses_event_values and self.values.user_newest_position_number(user_id) > as_of_position_number
        return CountedEvents(
            event_input, _inputs_digest(user_id, events, sent_input_digest), is_whole, is_past, is_approximate
        )

    async def count_newer(
        self, snapshot: Snapshot, cases: Sequence[PendingAnswer], options: RequestOptions, read_records: ReadRecords
    ) -> None:
        """Add the users' newer events, and the new items, to pending answers, unless the request declines them.

        If answers cannot be computed from them (no model, users with imported vectors, events that must be read again),
        the pending answers settle for the nightly record from the start.

        Records are read here only if the answer depends on their existence: the night knows the user, there are events
        and a sent input, and the night's input with the events does not suffice for the model. Then the sent input
        counts unless there is a record.
        """
        if options.max_events == 0:
            return
        if options.as_of is not None and (events_of_night := snapshot.part(GenerationEvents)) is not None:
            for case in cases:
                case.is_as_of_before_night = options.as_of < events_of_night.until_position_number
        _include_new_items(snapshot, cases, options)
        packed, pacer = self.packed_input_by_id, YieldPacer()
        undecided_answers = []
        for pending_answer in cases:
            user_id = pending_answer.entity.raw_id
            if user_id is None or user_id not in packed or pending_answer.counted_events is not None:
                continue
            await pacer.count_entity(pending_answer.entity)
            counted_events = _find_counted_events(
                self, snapshot, pending_answer, user_id, options, counts_sent_input=pending_answer.entity.has_input
            )
            if counted_events is None:
                continue
            counts_sent = pending_answer.record_key.directory_position >= 0 and counted_events.counts_sent_input
            if counts_sent and _is_computed(snapshot, pending_answer, counted_events):
                undecided_answers.append((pending_answer, user_id))
            else:
                _include_counted_events(snapshot, pending_answer, counted_events)
        if not undecided_answers:
            return
        record_keys = [case.record_key._replace(table=case.table, input_digest=None) for case, _ in undecided_answers]
        outcomes = await read_records(record_keys)
        for (pending_answer, user_id), outcome in zip(undecided_answers, outcomes, strict=True):
            await pacer.count_entity(pending_answer.entity)
            has_record = isinstance(outcome, Hit)
            counted_events = _find_counted_events(
                self, snapshot, pending_answer, user_id, options, counts_sent_input=not has_record
            )
            if counted_events is not None:
                _include_counted_events(snapshot, pending_answer, counted_events)

    def copy_newer_input(self, snapshot: Snapshot, case: PendingAnswer, sibling_pending: PendingAnswer) -> None:
        """Make a pending answer count exactly another one's events (of another table): both are parts of one answer.

        Otherwise events accepted in between could make the list's history differ from its excluded items.
        """
        generation_events, counted_events = (snapshot.part(GenerationEvents), sibling_pending.counted_events)
        if generation_events is None or counted_events is None:
            return
        if generation_events.changes_answer(case.table, counted_events.directory_position, snapshot.seen_items):
            _include_counted_events(snapshot, case, counted_events)


def _inputs_digest(user_id: bytes, events: Sequence[UserEvent], sent_input_digest: bytes) -> bytes:
    # All events: a digest of only the newest could not tell an answer that lacks earlier events from a complete one.
    packed_numbers = struct.pack(
        f"<II{len(events)}Q", len(user_id), len(events), *[event.position_number for event in events]
    )
    return xxhash.xxh3_128_digest(packed_numbers + user_id + sent_input_digest)


def _find_counted_events(
    newer_events: NewerEvents,
    snapshot: Snapshot,
    case: PendingAnswer,
    user_id: bytes,
    options: RequestOptions,
    *,
    counts_sent_input: bool,
) -> CountedEvents | None:
    """Return the user's newer events that an answer counts, including new items; None without any."""
    as_of_position_number = NO_LIMIT if options.as_of is None else options.as_of
    sent_input_and_digest = (case.live_input, case.input_digest) if counts_sent_input else None
    counted_events = newer_events.find_counted_events(
        snapshot, case.table, user_id, case.record_key.directory_position, sent_input_and_digest, as_of_position_number
    )
    if counted_events is None:
        return None
    counted_events = _with_new_items(snapshot, counted_events, options.as_of)
    if new_items := case.new_items:
        digest = xxhash.xxh3_128_digest(counted_events.inputs_digest + new_items.digest)
        counted_events = counted_events._replace(inputs_digest=digest)
    if (
        snapshot.new_items.newest_position_number > as_of_position_number
    ):  # the new items of that position may have been different
        counted_events = counted_events._replace(is_approximate=True)
    return counted_events


def _is_computed(snapshot: Snapshot, case: PendingAnswer, newer_input: NewerInput) -> bool:
    """True if a model can compute the answer from the events."""
    generation_events = snapshot.part(GenerationEvents)
    return (
        generation_events is not None
        and newer_input.has_all_events
        and generation_events.can_compute_answer(case.table, newer_input.directory_position)
    )


def _include_counted_events(snapshot: Snapshot, case: PendingAnswer, newer_input: NewerInput) -> None:
    is_computed = _is_computed(snapshot, case, newer_input)
    case.include_counted_events(newer_input, is_settled_for_stored=not is_computed)
    if newer_input.is_as_of_earlier and is_computed:
        case.reason = MissReason.NEWER_EVENTS  # never a stored answer
    if snapshot.predictor is None:
        case.live_failure_reason = LiveReason.NO_MODEL


def _with_new_items(
    snapshot: Snapshot, counted_events: CountedEvents, as_of_position_number: int | None
) -> CountedEvents:
    """Return the events with new items included, as the next night will count them.

    If items are given as a table of vectors, the next night's models will know the new items, so the answer is
    approximate.
    """
    new_items = snapshot.new_items
    if not new_items or new_items.item_number_by_id.keys().isdisjoint(counted_events.event_item_ids):
        return counted_events
    if as_of_position_number is not None:
        new_items = new_items.up_to(as_of_position_number)
    new_items_in_events = sorted({*counted_events.event_item_ids} & new_items.item_number_by_id.keys())
    if not new_items_in_events:
        return counted_events
    packed_item_ids = b"".join([len(item_id).to_bytes(4, "little") + item_id for item_id in new_items_in_events])
    return counted_events._replace(
        event_input=counted_events.event_input._replace(new_items=new_items),
        inputs_digest=xxhash.xxh3_128_digest(counted_events.inputs_digest + packed_item_ids),
        is_approximate=counted_events.is_approximate or bool(snapshot.manifest.facts.get(ITEM_VECTORS_FACT)),
    )


def _include_new_items(snapshot: Snapshot, cases: Sequence[PendingAnswer], options: RequestOptions) -> None:
    """Allow computed lists of users to name the new items of a generation.

    Not for re-ranked lists, which need attributes that new items may lack.
    """
    new_items = snapshot.new_items
    if not new_items or options.rerank is not None:
        return
    if options.as_of is not None:
        new_items = new_items.up_to(options.as_of)
    for pending_answer in cases:
        if pending_answer.table.kind == "topk" and pending_answer.table.entity == "user":
            pending_answer.include_new_items(new_items)


def compute_from_events(jobs: Sequence[InferenceJob], scored_at: int) -> list[InferenceOutcome]:
    """Run one inference for jobs with newer events; a failing job does not affect the others."""
    snapshot, table = jobs[0].snapshot, jobs[0].table
    generation_events = snapshot.part(GenerationEvents)
    predictor = None if generation_events is None else generation_events.predictor
    if predictor is None:
        return [LiveUnavailable(LiveReason.NO_MODEL)] * len(jobs)

    def predict(
        batch_jobs: Sequence[InferenceJob], prepared_inputs: Sequence[PreparedInput]
    ) -> Sequence[ComputedRecord]:
        fingerprints, new_items = (
            [job.id_fingerprint for job in batch_jobs],
            [job.eligible_new_items for job in batch_jobs],
        )
        records = predictor.predict(table, prepared_inputs, fingerprints, scored_at, new_items)
        return [ComputedRecord(record) for record in records]

    event_inputs = [job.newer_input for job in jobs if isinstance(job.newer_input, EventInput)]
    return run_in_halves(jobs, lambda: predictor.prepare_all(table, event_inputs), predict)

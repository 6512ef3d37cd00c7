"""Cases of users with newer events, on their way down the ladder."""

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any, cast

import numpy as np
import pytest

from cache.errors import InvalidInput
from cache.events.event import Event
from cache.events.event_predictor import EventInput, GenerationEvents
from cache.filters.expression import read_filter
from cache.format.ids import fingerprint, fingerprints, hash_id
from cache.format.stream_position import Position
from cache.l2.commands import OverlayRead, PageRead
from cache.model.filter_mask import FilterMask
from cache.model.input_preparation import LiveInput, PreparedInput
from cache.model.new_items import NewItem, NewItems
from cache.model.tower_spec import InputSpec
from cache.records import FLAG_APPROXIMATE, FLAG_LIVE, absent_records, decode_record, encode_topk
from cache.store.blocklist import Blocklist
from cache.tiers.reads import ReadResult, RecordKey
from serving.engine.answer_builder import RequestContext
from serving.engine.answer_observer import AnswerSampler
from serving.engine.batch_inference import compute_with_new_items
from serving.engine.entity import build_pending_answers
from serving.engine.micro_batcher import ComputedRecord, InferenceJob, LiveUnavailable
from serving.events.newer_events import NewerEvents, compute_from_events
from serving.generations.served_set import ServedGenerations
from serving.generations.snapshot import Snapshot
from serving.requests.answers import Source
from serving.requests.options import RequestOptions
from serving.requests.reasons import LiveReason
from tests.unit.serving.world import GENERATION, ITEMS, SCORED_AT, FakePredictor, World, ask, entity, ids


class EventWorld(World):
    """A world whose answers count events."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.newer_events = self.ladder.newer_inputs = NewerEvents()


@pytest.fixture
def world() -> EventWorld:
    return EventWorld()


def with_events(world: World, *features: InputSpec, until: int = 0) -> Snapshot:
    """A generation with the events up to a position's number; its model takes these features, and is not here."""
    return world.snapshot(part_by_class={GenerationEvents: GenerationEvents(until, {"user_topk": features})})


def clicks(world: EventWorld, user: str, item: str, at: int = 1) -> None:
    """An event of a user, at a position."""
    event = Event(f"e{at}", 0, user.encode(), item.encode())
    assert world.newer_events.users.add(Position(at, 0), event)


async def test_who_settles_is_computed_from_what_was_sent_and_not_by_the_model_for_events(world: EventWorld) -> None:
    snapshot = with_events(world)
    clicks(world, "stranger", "i3")

    requested_entity = entity("stranger", history=ids("i1"))
    (answer,) = await world.ladder.lookup(ServedGenerations(snapshot), ask(requested_entity), monotonic())

    (job,) = world.jobs
    assert job.newer_input is None and answer["source"] == "live"
    assert "i3" not in answer["items"] and answer["approximate"] is True


@pytest.mark.parametrize(("has_model", "reason"), [(False, "newer_events"), (True, None)])
async def test_a_stored_answer_that_lacks_events_for_want_of_a_model_has_a_reason(
    world: EventWorld, has_model: bool, reason: str | None
) -> None:
    # Given a user with a record and a click, in a generation without models, or in one where events change no computed
    # answer
    snapshot = with_events(world)
    clicks(world, "u1", "i3")
    snapshot = snapshot if has_model else dataclasses.replace(snapshot, predictor=None)

    # When a list is asked for
    (answer,) = await world.ladder.lookup(ServedGenerations(snapshot), ask(entity("u1")), monotonic())

    # Then the night's list answers, with a reason only if events are missing for lack of a model
    assert (answer["source"], answer.get("reason")) == ("l2", reason)
    assert answer["approximate"] is True and "i3" not in answer["items"]


@pytest.mark.parametrize("run", [compute_from_events, compute_with_new_items])
def test_without_a_model_every_job_of_a_batch_is_unavailable(world: EventWorld, run: Any) -> None:
    snapshot = world.snapshot(predictor=None)
    jobs = [InferenceJob(snapshot, "user_topk", LiveInput(history=ids("i1")), 7, 10) for _ in range(2)]

    outcomes = run(jobs, SCORED_AT)

    assert [type(outcome) for outcome in outcomes] == [LiveUnavailable] * 2
    assert {outcome.reason for outcome in outcomes} == {LiveReason.NO_MODEL}


def test_events_change_nothing_where_the_generation_takes_none_for_the_table(world: EventWorld) -> None:
    clicks(world, "u1", "i3")
    without, events_snapshot = world.snapshot(), with_events(world)
    lists, vectors = (events_snapshot.manifest.tables[name] for name in ("user_topk", "user_vector"))

    assert world.newer_events.find_counted_events(events_snapshot, lists, b"u1", -1) is not None
    assert world.newer_events.find_counted_events(events_snapshot, vectors, b"u1", -1) is None
    assert world.newer_events.find_counted_events(without, lists, b"u1", -1) is None


async def test_who_has_only_later_events_gets_what_the_night_stored(world: EventWorld) -> None:
    # Given a user whose only event is after the requested position
    snapshot = with_events(world)
    clicks(world, "u1", "i3", at=5)

    # When an answer as of an earlier position is requested
    lookup = ask(entity("u1"), as_of=Position(4, 0).number)
    (answer,) = await world.ladder.lookup(ServedGenerations(snapshot), lookup, monotonic())

    # Then it is the night's answer, and no event is counted
    assert answer["source"] == "l2" and answer.get("events", 0) == 0


@pytest.mark.parametrize(("at", "is_marked"), [(4, True), (9, False)])
async def test_an_answer_as_of_a_position_before_the_newest_event_of_the_night_says_so(
    world: EventWorld, at: int, is_marked: bool
) -> None:
    # Given a night with events up to 9-0, and a user without newer ones
    snapshot = with_events(world, until=Position(9, 0).number)

    # When an answer as of a position is asked for
    lookup = ask(entity("u1"), as_of=Position(at, 0).number)
    (answer,) = await world.ladder.lookup(ServedGenerations(snapshot), lookup, monotonic())

    # Then the night's list is marked if it may count later events
    assert answer["source"] == "l2" and answer.get("approximate", False) is is_marked


def new_items(*ids: str) -> NewItems:
    items = tuple(NewItem(id_.encode(), at) for at, id_ in enumerate(ids, 1))
    vectors = np.ones((len(ids), 4), np.float32)
    return NewItems(len(ITEMS), items, vectors, tuple(new_item.raw_id for new_item in items))


async def test_events_of_who_settles_take_no_new_item_out_of_a_record_that_others_share(world: EventWorld) -> None:
    snapshot = dataclasses.replace(with_events(world), new_items=new_items("new-0", "new-1"))
    clicks(world, "stranger", "new-0")

    requested_entity = entity("stranger", history=ids("i1", "new-1"))
    await world.ladder.lookup(ServedGenerations(snapshot), ask(requested_entity), monotonic())

    (job,) = world.jobs
    assert job.newer_input is None and job.eligible_new_items.excluded_item_numbers - {-1} == {len(ITEMS) + 1}


async def test_a_blocked_stranger_gets_no_stored_list_where_new_items_are_known(world: EventWorld) -> None:
    # Given a stored live answer to an unknown user who is blocked afterwards, and an item that came after the night
    snapshot, stranger_entity = with_events(world), entity("stranger", history=ids("i1"))
    await world.ladder.lookup(ServedGenerations(snapshot), ask(stranger_entity), monotonic())
    blocked_snapshot = dataclasses.replace(
        snapshot, new_items=new_items("new-0"), blocklist=Blocklist(users=frozenset([b"stranger"]))
    )

    # When that user's list is requested
    (answer,) = await world.ladder.lookup(ServedGenerations(blocked_snapshot), ask(stranger_entity), monotonic())

    # Then it is the default one, with the reason
    assert (answer["source"], answer["reason"]) == ("default", "entity_blocked")


async def test_what_the_night_stored_is_sampled_whatever_new_items_are_known(world: EventWorld) -> None:
    snapshot = dataclasses.replace(with_events(world), new_items=new_items("new-0"))
    sampler = world.ladder.observer.sampler = AnswerSampler(1_000)

    stranger_entity = entity("stranger", history=ids("i1"))
    sources = []
    for requested_entity in (entity("u1"), stranger_entity, stranger_entity):
        (answer,) = await world.ladder.lookup(ServedGenerations(snapshot), ask(requested_entity), monotonic())
        sources.append(answer["source"])

    assert sources == ["l2", "live", "l1"]
    sample = sampler.next()
    assert sample is not None and sample.raw_id == b"u1" and sampler.next() is None


def test_an_attribute_that_no_model_takes_changes_nothing_for_its_user(world: EventWorld) -> None:
    event = Event("e1", 0, b"u1", attributes={"country": "nl"})
    newer_events, plain_snapshot = world.newer_events, with_events(world)
    country_snapshot = with_events(world, InputSpec("home", "feature", "int64", column="country"))
    age_snapshot = with_events(world, InputSpec("years", "feature", "int64", column="age"))
    table = plain_snapshot.manifest.tables["user_topk"]
    newer_events.users.add(Position(1, 0), event)
    newer_events.values.add(Position(1, 0), event)

    for snapshot in (plain_snapshot, age_snapshot):
        assert not newer_events.changes_answer(snapshot, table, b"u1")
        assert newer_events.find_counted_events(snapshot, table, b"u1", -1) is None
    assert newer_events.changes_answer(country_snapshot, table, b"u1")

    clicks(world, "u1", "i3", 2)
    counts = {
        snapshot: newer_events.find_counted_events(snapshot, table, b"u1", -1)
        for snapshot in (plain_snapshot, country_snapshot)
    }
    assert newer_events.changes_answer(plain_snapshot, table, b"u1")
    assert [counted_events and counted_events.event_count for counted_events in counts.values()] == [1, 2]


def test_attributes_that_are_newer_than_what_is_asked_for_make_it_approximate(world: EventWorld) -> None:
    newer_events = world.newer_events
    home = InputSpec("home", "feature", "int64", column="country")
    country_snapshot, plain_snapshot = with_events(world, home), with_events(world)
    table = country_snapshot.manifest.tables["user_topk"]
    clicks(world, "u1", "i3")
    event = Event("e2", 0, b"u1", attributes={"country": "nl"})
    newer_events.users.add(Position(2, 0), event)
    newer_events.values.add(Position(2, 0), event)

    then, counted_now = (
        newer_events.find_counted_events(
            country_snapshot, table, b"u1", -1, as_of_position_number=Position(at, 0).number
        )
        for at in (1, 2)
    )
    counted_without_features = newer_events.find_counted_events(
        plain_snapshot, table, b"u1", -1, as_of_position_number=Position(1, 0).number
    )

    assert then is not None and counted_now is not None and counted_without_features is not None
    assert (then.is_as_of_earlier, then.is_approximate, then.event_count) == (True, True, 1)
    assert (counted_now.is_as_of_earlier, counted_now.is_approximate, counted_now.event_count) == (True, False, 2)
    assert (counted_without_features.is_as_of_earlier, counted_without_features.is_approximate) == (True, False)


async def test_part_of_a_list_that_is_approximate_says_so_under_a_filter(world: EventWorld) -> None:
    snapshot = world.snapshot()
    (case,) = await build_pending_answers(snapshot, ask(entity("u1")))
    rows = encode_topk(
        case.table.layout, fingerprints([b"u1"]), np.arange(5, dtype=np.uint32)[None],
        np.ones((1, 5), np.float32), SCORED_AT, flags=FLAG_LIVE | FLAG_APPROXIMATE,
    )  # fmt: skip
    passes = np.zeros(len(ITEMS), np.bool_)
    passes[[1, 9]] = True
    options = RequestOptions(1.0, filter=read_filter({"==": ["stock", True]}))
    context = RequestContext.of(options, 0.0)
    context.set_filter_mask(snapshot, FilterMask.of(passes))

    record = decode_record(case.table.layout, rows.tobytes(), len(ITEMS))
    world.ladder.answer_builder.answer_from_record(case, snapshot, record, Source.LIVE, context)
    assert case.partial_list is not None
    world.ladder.answer_builder.answer_partial(case, snapshot, context)

    assert case.answer is not None and case.answer["items"] == world.ids([1])
    assert case.answer["approximate"] is True


async def read_nothing(record_keys: Sequence[RecordKey]) -> Sequence[ReadResult]:
    raise AssertionError(f"no record was to be read: {record_keys}")


async def test_others_have_their_turn_while_events_of_many_are_counted(world: EventWorld) -> None:
    snapshot = with_events(world)
    users = [f"stranger-{number}" for number in range(640)]
    for at, user in enumerate(users, 1):
        clicks(world, user, "i3", at)
    cases = await build_pending_answers(snapshot, ask(*map(entity, users)))
    iterations = 0

    async def count_iterations() -> None:
        nonlocal iterations
        while True:
            iterations += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(count_iterations())
    await world.newer_events.count_newer(snapshot, cases, RequestOptions(1.0), read_nothing)
    task.cancel()

    assert iterations >= 9 and all(case.counted_events is not None for case in cases)


VALUES = "user_affinity"
AGE = InputSpec("age", "feature", "int64", column="age")
STORED_VALUES, COMPUTED = [1.0] * 3, [0.5] * 3


@dataclasses.dataclass
class TakesWhatIsSent:
    """Model for events whose input the night publishes of no user."""

    predictor: FakePredictor

    def supports(self, table: str) -> bool:
        """All tables of the world."""
        return self.predictor.supports(table)

    def has_input(self, table: str, of_user: EventInput) -> bool:
        """As the real one."""
        return isinstance(self.prepare_all(table, [of_user])[0], PreparedInput)

    def prepare_all(self, table: str, inputs: Sequence[EventInput]) -> list[PreparedInput | InvalidInput | None]:
        """What callers sent, prepared; None of who sent nothing."""
        return self.predictor.prepare_all(table, [event_input.caller_input or LiveInput() for event_input in inputs])

    def predict(
        self, table: str, batch: Sequence[PreparedInput], prints: Sequence[int], scored_at: int, new: Sequence[Any]
    ) -> list[bytes]:
        """One record each."""
        no_ordinals = np.empty(0, np.int64)
        return self.predictor.predict(table, batch, prints, scored_at, blocked_ordinals=no_ordinals)


class WorldOfValues(EventWorld):
    """A world that computes from events."""

    async def infer(self, job: InferenceJob) -> ComputedRecord:
        """Inference on the spot, by the model that the job is for."""
        if job.newer_input is None:
            return await super().infer(job)
        self.jobs.append(job)
        (outcome,) = compute_from_events([job], SCORED_AT)
        if not isinstance(outcome, ComputedRecord):
            raise outcome
        return outcome


@pytest.fixture
def values() -> WorldOfValues:
    """World in which values come from an age, and all of u1 to u4 have clicked."""
    world = WorldOfValues()
    for at in range(1, 5):
        clicks(world, f"u{at}", "i3", at)
    return world


def with_values(world: World, *without_record: str) -> Snapshot:
    """A generation without the record of some users in the table of values."""
    model = cast(Any, TakesWhatIsSent(world.predictor))
    events = GenerationEvents(0, {VALUES: (AGE,)}, model)
    snapshot = world.snapshot(part_by_class={GenerationEvents: events})
    layout = snapshot.manifest.tables[VALUES].layout
    page = bytearray(world.remote.pages[GENERATION, VALUES, 0])
    for user in without_record:
        raw = user.encode()
        start = world.users.find_position(hash_id(raw, world.users.seed)) * layout.size_bytes
        row = absent_records(layout, np.array([fingerprint(raw)], np.uint64), SCORED_AT).tobytes()
        page[start : start + layout.size_bytes] = row
    world.remote.pages[GENERATION, VALUES, 0] = bytes(page)
    return snapshot


def values_of(answer: Mapping[str, Any]) -> list[float]:
    """Values of an answer, which come as an array."""
    return np.asarray(answer["values"]).tolist()  # type: ignore[no-any-return]


def reads(world: World) -> list[tuple[int, int]]:
    """Numbers of records and of overlays that were read from Redis, for all trips to it."""
    return [
        (sum(isinstance(read, PageRead) for read in trip), sum(isinstance(read, OverlayRead) for read in trip))
        for trip in world.remote.calls
    ]


@pytest.mark.parametrize("fresh", [False, True])
async def test_a_user_with_a_record_and_events_gets_the_record_whatever_is_sent(
    values: WorldOfValues, fresh: bool
) -> None:
    # Given a user with a record and a click, for whom the night publishes nothing that the model takes
    served = ServedGenerations(with_values(values))
    entities = [entity("u1", VALUES), entity("u1", VALUES, features={"age": 40})]

    # When values are requested without features, and with them
    plain_answer, features_answer = [
        (await values.ladder.lookup(served, ask(requested_entity, fresh=fresh), monotonic()))[0]
        for requested_entity in entities
    ]

    # Then both are the stored ones, and both answers say so
    assert values_of(plain_answer) == values_of(features_answer) == STORED_VALUES
    assert features_answer["live"] == LiveReason.NO_USABLE_INPUT and features_answer["approximate"] is True
    assert (features_answer["events"], features_answer["producer"]) == (1, "batch")
    assert {**plain_answer, "source": None, "values": None} == {**features_answer, "source": None, "values": None}


@pytest.mark.parametrize("fresh", [False, True])
async def test_what_a_user_without_a_record_sends_counts_before_the_events(values: WorldOfValues, fresh: bool) -> None:
    # Given a user with a click whom the night knows and has no values for, and an unknown user with a click
    snapshot = with_values(values, "u1")
    clicks(values, "stranger", "i3", 9)
    entities = [entity(user, VALUES, features={"age": 40}) for user in ("u1", "stranger")]

    # When both send features
    answers = await values.ladder.lookup(ServedGenerations(snapshot), ask(*entities, fresh=fresh), monotonic())

    # Then their values are computed from these features
    for answer in answers:
        assert values_of(answer) == COMPUTED and answer["source"] == "live"
        assert answer["events"] == 1 and "approximate" not in answer and "live" not in answer
    assert [
        isinstance(job.newer_input, EventInput) and job.newer_input.caller_input is not None for job in values.jobs
    ] == [True] * 2


async def test_a_live_answer_in_place_of_a_missing_record_is_no_record(values: WorldOfValues) -> None:
    # Given a user without a record, and a live answer without the events that stands in for it
    served = ServedGenerations(with_values(values, "u1"))
    requested_entity = entity("u1", VALUES, features={"age": 40})
    await values.ladder.lookup(served, ask(requested_entity, max_events=0), monotonic())

    # When features are sent again, and the events count
    (answer,) = await values.ladder.lookup(served, ask(requested_entity), monotonic())

    # Then the answer is computed from the features
    assert (values_of(answer), answer["source"], answer["events"]) == (COMPUTED, "live", 1)
    assert "live" not in answer and "approximate" not in answer


async def test_records_of_a_batch_are_looked_for_in_one_trip(values: WorldOfValues) -> None:
    # Given two users with a record and two without one
    snapshot = with_values(values, "u2", "u4")

    # When all of them send features
    entities = [entity(f"u{number}", VALUES, features={"age": 40}) for number in range(1, 5)]
    answers = await values.ladder.lookup(ServedGenerations(snapshot), ask(*entities), monotonic())

    # Then one read asks Redis for the four records, the next one for computed answers, and there is no other
    assert [values_of(answer) for answer in answers] == [STORED_VALUES, COMPUTED] * 2
    assert reads(values) == [(4, 0), (0, 4)]


async def test_a_record_out_of_reach_leaves_the_answer_to_what_is_sent(values: WorldOfValues) -> None:
    # Given a user with a record whose page is not in Redis
    snapshot = with_values(values)
    page = values.remote.pages.pop((GENERATION, VALUES, 0))
    requested_entity = entity("u1", VALUES, features={"age": 40})

    # When features are sent, once now and once after the page is back
    (missed,) = await values.ladder.lookup(ServedGenerations(snapshot), ask(requested_entity), monotonic())
    values.remote.pages[GENERATION, VALUES, 0] = page
    (stored_answer,) = await values.ladder.lookup(ServedGenerations(snapshot), ask(requested_entity), monotonic())

    # Then the first answer is computed from the features, and the second one is the record
    assert (values_of(missed), missed["source"]) == (COMPUTED, "live")
    assert (values_of(stored_answer), stored_answer["producer"]) == (STORED_VALUES, "batch")


@pytest.mark.parametrize(
    ("user", "fields", "trips"),
    [
        ("u1", {}, [(0, 1), (1, 0)]),
        ("u9", {}, [(1, 0)]),
        ("u9", {"features": {"age": 40}}, [(1, 0)]),
        ("stranger", {"features": {"age": 40}}, [(0, 1)]),
    ],
    ids=["events alone", "nothing", "sent alone", "stranger"],
)
async def test_no_record_is_read_before_it_is_needed(
    values: WorldOfValues, user: str, fields: dict[str, Any], trips: list[tuple[int, int]]
) -> None:
    # Given users who have events, or send something, but not both; and an unknown user with both
    clicks(values, "stranger", "i3", 9)
    snapshot = with_values(values)

    # When one is answered
    await values.ladder.lookup(ServedGenerations(snapshot), ask(entity(user, VALUES, **fields)), monotonic())

    # Then Redis is asked for a record and for an answer at most once
    assert reads(values) == trips

"""Events as they are sent, read or rejected one by one."""

from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.config.events import EventsConfig
from cache.errors import ConfigError
from cache.events.event import Event
from cache.format.redis_keys import Keyspace
from cache.store.blocklist import Blocklist
from serving.events.counts import REJECTION_REASONS
from serving.events.reading import EventReader, read_time_us
from serving.requests.errors import Problem

NOW_S = 1_800_000_000.0
READER = EventReader(Keyspace("test"), EventsConfig(batch=5, event_bytes=256, ahead_s=10.0))
EMPTY_BLOCKLIST = Blocklist()
COMPLETE_EVENT = {"user": "u-1", "item": "i-1", "id": "e-1"}


def read(*events: Any, blocklist: Blocklist = EMPTY_BLOCKLIST) -> Any:
    return READER.parse_body_events(events, NOW_S, blocklist)


def reasons(*events: Any, blocklist: Blocklist = EMPTY_BLOCKLIST) -> list[str]:
    return [rejection.rejection_reason for rejection in read(*events, blocklist=blocklist).rejected_events]


def the_event(event_json: Any) -> Event:
    read_events = read(event_json)
    assert not read_events.rejected_events
    return Event.from_bytes(read_events.packed_events[0].event_bytes)


def test_an_event_without_a_time_happened_now() -> None:
    assert the_event(COMPLETE_EVENT) == Event("e-1", round(NOW_S * 1e6), b"u-1", b"i-1")


def test_whole_numbers_are_ids_as_everywhere() -> None:
    event = the_event({"user": 7, "item": 8, "id": 9, "time": 1.5, "type": "buy", "weight": 2})

    assert event == Event("9", 1_500_000, b"7", b"8", "buy", 2.0)


def test_a_user_alone_and_an_item_alone_tell_values() -> None:
    user = the_event({"user": "u", "id": "1", "attributes": {"country": "NL", "adult": True}})
    item = the_event({"item": "i", "id": "1", "vector": [0.5, 1], "features": {"price": 2.5},
                      "attributes": {"tags": ["a", "b"]}})  # fmt: skip

    assert (user.kind, user.attributes) == ("user", {"country": "NL", "adult": True})
    assert (item.kind, item.vector, item.features) == ("item", (0.5, 1.0), {"price": 2.5})
    assert item.attributes == {"tags": ["a", "b"]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"id": None}, "missing_field"),
        ({"id": ""}, "invalid_id"),
        ({"id": "x" * 129}, "invalid_id"),
        ({"id": 1.5}, "invalid_id"),
        ({"user": None, "item": None}, "missing_field"),
        ({"user": True}, "invalid_id"),
        ({"item": "x" * 257}, "invalid_id"),
        ({"usr": "u"}, "unknown_field"),
        ({"time": "yesterday"}, "invalid_field"),
        ({"time": True}, "invalid_field"),
        ({"time": -1}, "invalid_field"),
        ({"time": "1969-12-31T23:59:59Z"}, "invalid_field"),
        ({"time": NOW_S * 1000}, "invalid_field"),
        ({"time": NOW_S + 10.001}, "in_future"),
        ({"time": "2999-01-01"}, "in_future"),
        ({"type": ""}, "invalid_field"),
        ({"type": "x" * 65}, "invalid_field"),
        ({"type": 1}, "invalid_field"),
        ({"weight": "1"}, "invalid_field"),
        ({"weight": 1e39}, "invalid_field"),
        ({"attributes": {"a": 1}}, "invalid_field"),
        ({"vector": [1]}, "invalid_field"),
        ({"item": None}, "missing_field"),
        ({"user": None}, "missing_field"),
        ({"item": None, "attributes": {"a": 1}, "weight": 1}, "invalid_field"),
        ({"item": None, "vector": [1.0]}, "invalid_field"),
        ({"item": None, "attributes": {}}, "invalid_field"),
        ({"item": None, "attributes": {"": 1}}, "invalid_field"),
        ({"item": None, "attributes": {"a": [None]}}, "invalid_field"),
        ({"item": None, "attributes": {"a": {"b": 1}}}, "invalid_field"),
        ({"item": None, "attributes": {"a": ["x", 1]}}, "invalid_field"),
        ({"item": None, "attributes": {"a": [["x"]]}}, "invalid_field"),
        ({"user": None, "vector": []}, "invalid_field"),
        ({"user": None, "vector": [1, True]}, "invalid_field"),
        ({"user": None, "vector": [0.123456789] * 40}, "too_large"),
        ({"user": None, "features": {"a": True}}, "invalid_feature"),
    ],
)  # fmt: skip
def test_what_is_no_event_is_rejected_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    assert reasons(COMPLETE_EVENT | changes) == [reason] and reason in REJECTION_REASONS


@pytest.mark.parametrize("event_id", ["", "x" * 129, "x" * 300])
def test_the_bytes_that_an_event_id_may_have_are_told(event_id: str) -> None:
    rejected = read(COMPLETE_EVENT | {"id": event_id}).rejected_events

    assert f"{len(event_id)} bytes of UTF-8, 1 to 128 are allowed" in rejected[0].rejection_detail


def test_null_clears_an_attribute() -> None:
    assert reasons(COMPLETE_EVENT | {"item": None, "attributes": {"a": None}}) == []


def test_others_of_the_request_are_read_all_the_same() -> None:
    read_events = read("no object", COMPLETE_EVENT, COMPLETE_EVENT | {"id": None}, COMPLETE_EVENT | {"id": "e-2"})

    assert read_events.event_indices == [1, 3] and [
        rejection.event_index for rejection in read_events.rejected_events
    ] == [0, 2]
    assert "events[2].id" in read_events.rejected_events[1].rejection_detail


def test_events_of_erased_or_blocked_users_are_rejected_without_naming_them() -> None:
    for blocklist in (Blocklist(users=frozenset([b"u-1"])), Blocklist(entities=frozenset([b"u-1"]))):
        read_events = read(COMPLETE_EVENT, blocklist=blocklist)

        assert [rejection.rejection_reason for rejection in read_events.rejected_events] == ["erased"]
        assert "u-1" not in read_events.rejected_events[0].rejection_detail
    assert reasons(COMPLETE_EVENT, blocklist=Blocklist(items=frozenset([b"i-1", b"u-1"]))) == []


@pytest.mark.parametrize(
    "text",
    [
        "2026-01-31T12:00:00",
        "2026-01-31T12:00:00Z",
        "2026-01-31T13:00:00+01:00",
        "2026-01-31 12:00:00 UTC",
        "2026-01-31 12:00:00.000000 UTC",
    ],
)
def test_a_time_without_a_zone_is_utc(text: str) -> None:
    assert read_time_us(text, "time") == 1_769_860_800_000_000


@given(st.integers(0, 99_999_999_999_999_999))
def test_microseconds_of_iso_times_are_kept(at_us: int) -> None:
    text = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=at_us)).isoformat()

    assert read_time_us(text, "time") == at_us


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ([], "invalid_field"),
        ({}, "missing_field"),
        ({"events": {}}, "invalid_field"),
        ({"events": []}, "batch_too_long"),
        ({"events": [{}] * 6}, "batch_too_long"),
        ({"events": [], "k": 1}, "unknown_field"),
    ],
)
def test_a_body_without_a_list_of_events_is_refused(content: Any, code: str) -> None:
    with pytest.raises(Problem) as caught:
        READER.extract_events(content)

    assert caught.value.reason == code


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
FIELDS = st.dictionaries(
    st.sampled_from(["user", "item", "id", "time", "type", "weight", "attributes", "features", "vector"]),
    JSON | st.text(max_size=8) | st.floats(0, 2e9),
)  # fmt: skip


@settings(deadline=None)  # beside other work a first example may take long
@given(st.lists(FIELDS | st.just(COMPLETE_EVENT) | JSON, max_size=8))
def test_every_event_is_read_or_rejected_and_read_events_come_back(events: list[Any]) -> None:
    decoded_events = orjson.loads(orjson.dumps(events))

    read_events = READER.parse_body_events(decoded_events, NOW_S, EMPTY_BLOCKLIST)

    assert sorted(
        [*read_events.event_indices, *(rejection.event_index for rejection in read_events.rejected_events)]
    ) == [*range(len(decoded_events))]
    assert {rejection.rejection_reason for rejection in read_events.rejected_events} <= {*REJECTION_REASONS}
    for event_index, packed in zip(read_events.event_indices, read_events.packed_events, strict=True):
        event = Event.from_bytes(packed.event_bytes)
        assert event.to_bytes() == packed.event_bytes and len(packed.event_bytes) <= 256
        assert str(decoded_events[event_index]["id"]) == event.id


def test_the_same_id_of_two_users_is_two_events_and_of_one_user_one() -> None:
    first, second, third = read(
        COMPLETE_EVENT, COMPLETE_EVENT | {"user": "u-2"}, COMPLETE_EVENT | {"item": "i-2"}
    ).packed_events

    assert first.event_id_key != second.event_id_key and first.event_source_key != second.event_source_key
    assert first.event_id_key == third.event_id_key and first.event_source_key == third.event_source_key


def of_inbox(**fields: str) -> Event:
    inbox_entry = {name.encode(): text.encode() for name, text in fields.items()}
    return Event.from_bytes(
        READER.parse_inbox_entry(inbox_entry, "1700000000000-3", NOW_S, EMPTY_BLOCKLIST).event_bytes
    )


def test_an_entry_of_the_inbox_has_texts_and_its_own_id_if_no_other() -> None:
    assert of_inbox(user="u", item="i", time="1.5", weight="0.5", type="buy") == Event(
        "1700000000000-3", 1_500_000, b"u", b"i", "buy", 0.5
    )
    assert of_inbox(user="7", item="8", id="9", time="1970-01-01T00:00:01Z") == Event("9", 1_000_000, b"7", b"8")


def test_an_entry_of_the_inbox_may_hold_json_as_a_body_does() -> None:
    assert of_inbox(e='{"user":"u","item":8,"time":1}') == Event("1700000000000-3", 1_000_000, b"u", b"8")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"e": "{"}, "invalid_json"),
        ({"e": "[]"}, "invalid_field"),
        ({"user": "u", "item": "i", "weight": "nan"}, "invalid_field"),
        ({"user": "u", "item": "i", "weight": "1_0"}, "invalid_field"),
        ({"user": "u", "item": "i", "more": "x"}, "unknown_field"),
        ({"user": "", "item": "i"}, "invalid_id"),
    ],
)
def test_an_entry_that_is_no_event_is_rejected(fields: dict[str, str], reason: str) -> None:
    with pytest.raises(Problem) as caught:
        of_inbox(**fields)

    assert caught.value.reason == reason and reason in REJECTION_REASONS


def test_an_entry_that_is_no_utf8_is_rejected() -> None:
    with pytest.raises(Problem, match="not an event"):
        READER.parse_inbox_entry({b"user": b"\xff"}, "1-0", NOW_S, EMPTY_BLOCKLIST)


def test_events_are_no_larger_than_a_sample_of_the_stream_judges_well() -> None:
    with pytest.raises(ConfigError, match="event_bytes"):
        EventsConfig(event_bytes=4_097)

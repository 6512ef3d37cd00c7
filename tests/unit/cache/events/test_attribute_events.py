"""The newest value by position counts, since any position; what one entity has too much of is counted."""

from typing import Any
from unittest import mock

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cache.events.event import Event
from cache.events.newer_events import VALUES_PER_ENTITY_MAX, AttributeEvents, merge_features, takes_any_attribute
from cache.format.stream_position import Position
from cache.model.tower_spec import InputSpec

COUNTRY = InputSpec("home", "feature", "int64", column="country")
TASTE = InputSpec("taste", "feature", "float32", column="taste", width=2)
VALUE = st.sampled_from([None, True, -5, 2.5, "", "é", [], ["a", "b"]])
EVENT_ROWS = st.lists(
    st.tuples(
        st.sampled_from(["item", "user"]),
        st.sampled_from([b"a", b"b", b"c"]),
        st.dictionaries(st.sampled_from(["price", "stock", "brand"]), VALUE, min_size=1, max_size=2),
    ),
    max_size=20,
)


def event(kind: str, raw: bytes, attributes: dict[str, Any] | None) -> Event:
    """An event of an item or a user alone, or with `both` of both."""
    user = raw if kind in ("user", "both") else None
    item = raw if kind in ("item", "both") else None
    return Event("id", 0, user, item, attributes=attributes)


def added(event_rows: list[tuple[str, bytes, dict[str, Any]]]) -> AttributeEvents:
    """What is known after these, at the positions 1-0, 2-0 and so on."""
    attribute_events = AttributeEvents()
    for ms, event_row in enumerate(event_rows, 1):
        assert attribute_events.add(Position(ms, 0), event(*event_row))
    return attribute_events


@pytest.mark.parametrize("recent_items_max", [1, 2, 4_096])
@given(EVENT_ROWS, st.integers(0, 21))
def test_the_newest_value_behind_any_position_is_known(recent_items_max: int, told: Any, ms: int) -> None:
    attribute_events = added(told)
    expected_by_kind: dict[str, dict[tuple[bytes, str], Any]] = {"item": {}, "user": {}}
    for kind, raw, attributes in told[ms:]:
        expected_by_kind[kind] |= {(raw, name): value for name, value in attributes.items()}

    with mock.patch("cache.events.newer_events._RECENT_ITEMS_MAX", recent_items_max):
        newer_values = attribute_events.item_values_since(Position(ms, 0).number)
    users = {
        (raw, name): value
        for raw in (b"a", b"b", b"c")
        for name, value in attribute_events.values_of_user(raw, Position(ms, 0).number).items()
    }

    assert {(raw, name): value for raw, name, value in newer_values.iterate_values()} == expected_by_kind["item"]
    assert users == expected_by_kind["user"]
    if expected_by_kind["item"]:
        assert (
            newer_values.until_position_number
            == attribute_events.newest_item_number
            > newer_values.after_position_number
        )


@given(EVENT_ROWS, st.integers(0, 21))
def test_what_all_generations_have_is_forgotten_and_nothing_else(told: Any, ms: int) -> None:
    attribute_events, number = added(told), Position(ms, 0).number
    values_before = (
        attribute_events.item_values_since(number),
        [attribute_events.values_of_user(raw, number) for raw in (b"a", b"b", b"c")],
    )

    attribute_events.drop_until(number)

    after = (
        attribute_events.item_values_since(number),
        [attribute_events.values_of_user(raw, number) for raw in (b"a", b"b", b"c")],
    )
    assert after == values_before
    assert len(attribute_events) == len({(kind, raw) for kind, raw, _ in told[ms:]})
    for kind, raw, _ in told:
        attribute_events.forget(kind, raw)
    assert (attribute_events.size_bytes, len(attribute_events)) == (0, 0)


def test_a_position_is_taken_once_and_an_interaction_sets_nothing() -> None:
    attribute_events = added([("item", b"a", {"price": 1})])

    assert not attribute_events.add(Position(1, 0), event("item", b"a", {"price": 2}))
    assert attribute_events.add(Position(2, 0), event("both", b"a", {"price": 3}))
    assert attribute_events.add(Position(3, 0), event("item", b"b", None))

    assert [
        attribute_value.new_value for attribute_value in attribute_events.item_values_since(0).iterate_values()
    ] == [1]
    assert (
        attribute_events.newest_item_number == Position(1, 0).number
        and attribute_events.last_number == Position(3, 0).number
    )


def test_one_entity_has_a_bound_on_its_attributes_and_keeps_those_set_last() -> None:
    event_rows = [("user", b"u", {f"a{number}": 1}) for number in range(VALUES_PER_ENTITY_MAX + 10)]
    attribute_events = added(event_rows)

    assert attribute_events.values_of_user(b"u", 0).keys() == {
        f"a{number}" for number in range(10, VALUES_PER_ENTITY_MAX + 10)
    }
    assert attribute_events.refusal_count == 10
    assert attribute_events.user_newest_position_number(b"u") == Position(VALUES_PER_ENTITY_MAX + 10, 0).number
    assert attribute_events.user_newest_position_number(b"nobody") == 0


@given(st.lists(st.integers(0, VALUES_PER_ENTITY_MAX + 20), max_size=300), st.integers(0, 300))
@example(list(range(VALUES_PER_ENTITY_MAX + 20)), 10)
def test_replicas_that_read_the_stream_from_other_positions_on_hold_the_same_values(
    names: list[int], skipped: int
) -> None:
    event_rows = [("item", b"i", {f"a{number}": at}) for at, number in enumerate(names)]
    complete_events, late = added(event_rows), AttributeEvents()
    for at, event_row in enumerate(event_rows[skipped:], skipped + 1):
        late.add(Position(at, 0), event(*event_row))

    since_number = Position(skipped, 0).number
    assert late.values_set_after("item", since_number) == complete_events.values_set_after("item", since_number)
    assert [*late.item_values_since(since_number).iterate_values()] == [
        *complete_events.item_values_since(since_number).iterate_values()
    ]


def test_many_values_are_put_in_front_in_turns() -> None:
    earlier = added([("item", b"%d" % at, {"a": at}) for at in range(2_000)])
    later = AttributeEvents()
    later.add(Position(5_000, 0), event("item", b"7", {"b": 1}))

    yield_count = sum(1 for _ in later.prepend_in_turns(earlier))

    assert yield_count >= 2_000 // 256
    assert later.values_set_after("item", 0)[b"7"] == {"a": 7, "b": 1} and len(later) == 2_000


def test_a_stored_value_is_a_copy_of_the_attribute() -> None:
    attributes = {"tags": ["a"]}
    attribute_events = added([("item", b"i", attributes)])
    attributes["tags"].append("b")

    assert next(attribute_events.item_values_since(0).iterate_values()).new_value == ["a"]
    assert attribute_events.values_set_after("item", 0) == {b"i": {"tags": ["a"]}}
    assert attribute_events.values_set_after("item", Position(1, 0).number) == {}


def test_a_users_features_are_those_of_the_night_with_what_events_set() -> None:
    inputs, row = (COUNTRY, TASTE), {"country": 3, "taste": [0.5, 1.0]}

    assert merge_features(row, {}, inputs) == {"country": 3, "taste": (0.5, 1.0)}
    assert merge_features(row, {"country": 4, "other": "x"}, inputs) == {"country": 4, "taste": (0.5, 1.0)}
    assert merge_features({}, {"country": 4, "taste": [1, 2]}, inputs) == {"country": 4, "taste": (1, 2)}
    for country in (None, "4", 4.5, True):
        assert merge_features(row, {"country": country}, inputs) is None
    for taste in ([1], ["a", "b"], [], 1.0):
        assert merge_features(row, {"taste": taste}, inputs) is None
    assert merge_features({"country": None}, {}, (COUNTRY,)) is None
    assert takes_any_attribute({"country": None}, inputs) and not takes_any_attribute({"other": 1}, inputs)


def test_values_survive_the_bytes_of_the_stream() -> None:
    attribute_event = event("item", b"i", {"price": 1.5, "tags": ["a"], "stock": False, "brand": None})

    assert orjson.loads(attribute_event.to_bytes())["attributes"]["brand"] is None
    assert Event.from_bytes(attribute_event.to_bytes()) == attribute_event


def test_old_ones_are_forgotten_some_at_a_time() -> None:
    attribute_events = added([(kind, b"%d" % at, {"a": at}) for at in range(10) for kind in ("item", "user")])
    until_number = Position(16, 0).number

    assert [attribute_events.drop_until(until_number, 7) for _ in range(4)] == [7, 7, 2, 0]

    assert len(attribute_events) == 4 and attribute_events.complete_after_number == until_number


@given(EVENT_ROWS, st.integers(0, 21))
def test_earlier_values_put_in_front_are_as_if_they_had_come_first(told: Any, ms: int) -> None:
    complete_events, earlier, later = added(told), added(told[:ms]), AttributeEvents()
    for at, event_row in enumerate(told[ms:], ms + 1):
        later.add(Position(at, 0), event(*event_row))

    later.prepend(earlier)

    for number in [Position(position_ms, 0).number for position_ms in range(len(told) + 1)]:
        assert later.item_values_since(number) == complete_events.item_values_since(number)
        for kind in ("item", "user"):
            assert later.values_set_after(kind, number) == complete_events.values_set_after(kind, number)
    assert later.size_bytes == complete_events.size_bytes
    assert later.drop_until(Position(ms, 0).number) == complete_events.drop_until(Position(ms, 0).number)

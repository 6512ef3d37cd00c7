"""The newest value by position counts, since any position; what one entity has too much of is counted."""

from typing import Any
from unittest import mock

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cache.events.attribute_events import VALUES_MAX, AttributeEvents
from cache.events.event import Event
from cache.events.position import Position
from cache.events.user_features import features_with, takes_any
from cache.model.tower_spec import InputSpec

COUNTRY = InputSpec("home", "feature", "int64", column="country")
TASTE = InputSpec("taste", "feature", "float32", column="taste", width=2)
VALUE = st.sampled_from([None, True, -5, 2.5, "", "é", [], ["a", "b"]])
TOLD = st.lists(
    st.tuples(
        st.sampled_from(["item", "user"]),
        st.sampled_from([b"a", b"b", b"c"]),
        st.dictionaries(
            st.sampled_from(["price", "stock", "brand"]), VALUE, min_size=1, max_size=2
        ),
    ),
    max_size=20,
)


def event(kind: str, raw: bytes, attributes: dict[str, Any] | None) -> Event:
    """An event of an item or a user alone, or with `both` of both."""
    user = raw if kind in ("user", "both") else None
    item = raw if kind in ("item", "both") else None
    return Event("id", 0, user, item, attributes=attributes)


def added(told: list[tuple[str, bytes, dict[str, Any]]]) -> AttributeEvents:
    """What is known after these, at the positions 1-0, 2-0 and so on."""
    found = AttributeEvents()
    for ms, each in enumerate(told, 1):
        assert found.add(Position(ms, 0), event(*each))
    return found


@pytest.mark.parametrize("few", [1, 2, 4_096])
@given(TOLD, st.integers(0, 21))
def test_the_newest_value_behind_any_position_is_known(few: int, told: Any, ms: int) -> None:
    found = added(told)
    wanted: dict[str, dict[tuple[bytes, str], Any]] = {"item": {}, "user": {}}
    for kind, raw, attributes in told[ms:]:
        wanted[kind] |= {(raw, name): value for name, value in attributes.items()}

    with mock.patch("cache.events.attribute_events._FEW", few):
        newer = found.items_since(Position(ms, 0).number)
    users = {
        (raw, name): value
        for raw in (b"a", b"b", b"c")
        for name, value in found.of_user(raw, Position(ms, 0).number).items()
    }

    assert {(raw, name): value for raw, name, value in newer.values()} == wanted["item"]
    assert users == wanted["user"]
    if wanted["item"]:
        assert newer.until == found.newest_item > newer.after


@given(TOLD, st.integers(0, 21))
def test_what_all_generations_have_is_forgotten_and_nothing_else(told: Any, ms: int) -> None:
    found, number = added(told), Position(ms, 0).number
    before = found.items_since(number), [found.of_user(raw, number) for raw in (b"a", b"b", b"c")]

    found.drop_until(number)

    after = found.items_since(number), [found.of_user(raw, number) for raw in (b"a", b"b", b"c")]
    assert after == before
    assert len(found) == len({(kind, raw) for kind, raw, _ in told[ms:]})
    for kind, raw, _ in told:
        found.forget(kind, raw)
    assert (found.size_bytes, len(found)) == (0, 0)


def test_a_position_is_taken_once_and_an_interaction_sets_nothing() -> None:
    found = added([("item", b"a", {"price": 1})])

    assert not found.add(Position(1, 0), event("item", b"a", {"price": 2}))
    assert found.add(Position(2, 0), event("both", b"a", {"price": 3}))
    assert found.add(Position(3, 0), event("item", b"b", None))

    assert [each.value for each in found.items_since(0).values()] == [1]
    assert found.newest_item == Position(1, 0).number and found.last == Position(3, 0).number


def test_one_entity_has_a_bound_on_its_attributes_and_keeps_those_set_last() -> None:
    told = [("user", b"u", {f"a{number}": 1}) for number in range(VALUES_MAX + 10)]
    found = added(told)

    assert found.of_user(b"u", 0).keys() == {f"a{number}" for number in range(10, VALUES_MAX + 10)}
    assert found.refusals == 10
    assert found.newest_of_user(b"u") == Position(VALUES_MAX + 10, 0).number
    assert found.newest_of_user(b"nobody") == 0


@given(st.lists(st.integers(0, VALUES_MAX + 20), max_size=300), st.integers(0, 300))
@example(list(range(VALUES_MAX + 20)), 10)
def test_replicas_that_read_the_stream_from_other_positions_on_hold_the_same_values(
    names: list[int], skipped: int
) -> None:
    told = [("item", b"i", {f"a{number}": at}) for at, number in enumerate(names)]
    whole, late = added(told), AttributeEvents()
    for at, each in enumerate(told[skipped:], skipped + 1):
        late.add(Position(at, 0), event(*each))

    since = Position(skipped, 0).number
    assert late.all_values("item", since) == whole.all_values("item", since)
    assert [*late.items_since(since).values()] == [*whole.items_since(since).values()]


def test_many_values_are_put_in_front_in_turns() -> None:
    earlier = added([("item", b"%d" % at, {"a": at}) for at in range(2_000)])
    later = AttributeEvents()
    later.add(Position(5_000, 0), event("item", b"7", {"b": 1}))

    turns = sum(1 for _ in later.put_before_in_turns(earlier))

    assert turns >= 2_000 // 256
    assert later.all_values("item", 0)[b"7"] == {"a": 7, "b": 1} and len(later) == 2_000


def test_what_is_kept_is_a_copy_of_what_was_told() -> None:
    sent = {"tags": ["a"]}
    found = added([("item", b"i", sent)])
    sent["tags"].append("b")

    assert next(found.items_since(0).values()).value == ["a"]
    assert found.all_values("item", 0) == {b"i": {"tags": ["a"]}}
    assert found.all_values("item", Position(1, 0).number) == {}


def test_a_users_features_are_those_of_the_night_with_what_events_set() -> None:
    inputs, row = (COUNTRY, TASTE), {"country": 3, "taste": [0.5, 1.0]}

    assert features_with(row, {}, inputs) == {"country": 3, "taste": (0.5, 1.0)}
    assert features_with(row, {"country": 4, "other": "x"}, inputs) == {
        "country": 4,
        "taste": (0.5, 1.0),
    }
    assert features_with({}, {"country": 4, "taste": [1, 2]}, inputs) == {
        "country": 4,
        "taste": (1, 2),
    }
    for country in (None, "4", 4.5, True):
        assert features_with(row, {"country": country}, inputs) is None
    for taste in ([1], ["a", "b"], [], 1.0):
        assert features_with(row, {"taste": taste}, inputs) is None
    assert features_with({"country": None}, {}, (COUNTRY,)) is None
    assert takes_any({"country": None}, inputs) and not takes_any({"other": 1}, inputs)


def test_values_survive_the_bytes_of_the_stream() -> None:
    sent = event("item", b"i", {"price": 1.5, "tags": ["a"], "stock": False, "brand": None})

    assert orjson.loads(sent.to_bytes())["attributes"]["brand"] is None
    assert Event.from_bytes(sent.to_bytes()) == sent


def test_old_ones_are_forgotten_some_at_a_time() -> None:
    found = added([(kind, b"%d" % at, {"a": at}) for at in range(10) for kind in ("item", "user")])
    newest = Position(16, 0).number

    assert [found.drop_until(newest, 7) for _ in range(4)] == [7, 7, 2, 0]

    assert len(found) == 4 and found.since == newest


@given(TOLD, st.integers(0, 21))
def test_earlier_values_put_in_front_are_as_if_they_had_come_first(told: Any, ms: int) -> None:
    whole, earlier, later = added(told), added(told[:ms]), AttributeEvents()
    for at, each in enumerate(told[ms:], ms + 1):
        later.add(Position(at, 0), event(*each))

    later.put_before(earlier)

    for number in [Position(each, 0).number for each in range(len(told) + 1)]:
        assert later.items_since(number) == whole.items_since(number)
        for kind in ("item", "user"):
            assert later.all_values(kind, number) == whole.all_values(kind, number)
    assert later.size_bytes == whole.size_bytes
    assert later.drop_until(Position(ms, 0).number) == whole.drop_until(Position(ms, 0).number)

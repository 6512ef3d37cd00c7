"""Events of users in memory: what is kept, what a probe costs, and that each new event gives another object."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from cache.events.event import Event
from cache.events.newer_events import UserEvents
from cache.format.stream_position import Position

USERS = ("u", "v", "w")
DRAWN = st.lists(st.tuples(st.sampled_from(USERS), st.text(min_size=1, max_size=8), st.integers(0, 9)), max_size=30)


def filled(rows: Sequence[tuple[str, str, int]]) -> UserEvents:
    """Events in the order of their positions, 1, 2, ..."""
    users = UserEvents()
    for number, (user, item, at_us) in enumerate(rows, 1):
        event = Event(str(number), at_us, user.encode(), item.encode())
        assert users.add(Position(0, number), event)
    return users


def size_of(users: UserEvents) -> int:
    """Bytes as they are counted, from what is there."""
    return sum(180 + len(user) + len(packed) for user, packed in users.packed_events_by_user.items())


@given(DRAWN, st.integers(0, 31))
def test_newer_events_are_those_behind_a_position_in_its_order(rows: list[tuple[str, str, int]], until: int) -> None:
    users = filled(rows)
    for user in USERS:
        expected = [
            (item.encode(), at_us, number)
            for number, (name, item, at_us) in enumerate(rows, 1)
            if name == user and number > until
        ]
        assert list(map(tuple, users.list_events_after(user.encode(), until))) == expected
        assert users.has_newer_event(user.encode(), until) == bool(expected)


@given(DRAWN, st.integers(0, 31))
def test_what_is_dropped_is_gone_and_the_rest_is_as_it_was(rows: list[tuple[str, str, int]], until: int) -> None:
    users, complete_events = filled(rows), filled(rows)
    packed_before = dict(users.packed_events_by_user)

    users.drop_until(until, [b"u"])
    users.drop_until(until, [b"v", b"nobody"])

    for user in (b"u", b"v"):
        assert users.list_events_after(user, 0) == complete_events.list_events_after(user, until)
    assert users.list_events_after(b"w", 0) == complete_events.list_events_after(b"w", 0)
    assert users.size_bytes == size_of(users) and users.last_number == complete_events.last_number
    for user, packed in users.packed_events_by_user.items():
        assert (packed is packed_before[user]) == (packed == packed_before[user])


def test_an_event_replaces_the_packed_object_of_its_user_only() -> None:
    users = filled([("u", "a", 1), ("v", "b", 2)])
    mine, packed_of_v = users.packed_events_by_user[b"u"], users.packed_events_by_user[b"v"]
    assert not users.add(Position(0, 2), Event("again", 3, b"u", b"c"))  # not behind the last one
    assert users.packed_events_by_user[b"u"] is mine

    users.add(Position(0, 3), Event("new", 3, b"u", b"c"))

    assert users.packed_events_by_user[b"u"] is not mine and users.packed_events_by_user[b"v"] is packed_of_v


@given(DRAWN, DRAWN)
def test_becoming_another_one_keeps_the_dictionary(
    rows: list[tuple[str, str, int]], others: list[tuple[str, str, int]]
) -> None:
    users, replacement = filled(rows), filled(others)
    packed, expected = users.packed_events_by_user, dict(replacement.packed_events_by_user)

    users.replace_contents(replacement)

    assert users.packed_events_by_user is packed and packed == expected
    assert (users.size_bytes, users.last_number) == (size_of(users), len(others))


@given(DRAWN, st.integers(0, 31))
def test_earlier_events_put_in_front_are_as_if_they_had_come_first(
    rows: list[tuple[str, str, int]], until: int
) -> None:
    complete_events, earlier, later = filled(rows), filled(rows[:until]), filled(rows)
    later.drop_until(until)
    packed_before = dict(later.packed_events_by_user)

    later.prepend(earlier, list(earlier.packed_events_by_user))

    assert (
        later.packed_events_by_user == complete_events.packed_events_by_user
        and later.size_bytes == complete_events.size_bytes
    )
    untouched = packed_before.keys() - earlier.packed_events_by_user.keys()
    assert all(later.packed_events_by_user[user] is packed_before[user] for user in untouched)


def test_who_is_read_again_and_has_what_was_known_keeps_the_very_object() -> None:
    rows = [("u", "a", 1), ("v", "b", 2)]
    users, replacement = filled(rows), filled([*rows, ("v", "c", 3)])
    probed, packed = users.packed_events_by_user, users.packed_events_by_user[b"u"]

    users.replace_contents(replacement)

    assert users.packed_events_by_user is probed and users.packed_events_by_user[b"u"] is packed
    assert [user_event.item for user_event in users.list_events_after(b"v", 0)] == [b"b", b"c"]
    assert users.size_bytes == size_of(users)


def test_becoming_another_one_is_done_in_turns() -> None:
    users, replacement = (filled([("gone", "a", 1)]), filled([(f"u{at}", "a", at) for at in range(2_000)]))

    yield_count = sum(1 for _ in users.replace_in_turns(replacement))

    assert yield_count >= 2_000 // 256
    assert users.packed_events_by_user == replacement.packed_events_by_user and users.size_bytes == size_of(users)

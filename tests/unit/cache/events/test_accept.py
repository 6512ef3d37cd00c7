"""Keys under which events are told apart and counted."""

from hypothesis import given
from hypothesis import strategies as st

from cache.events.event import Event
from cache.events.stream import pack_event
from cache.format.redis_keys import Keyspace

KEYS = Keyspace("test")
_IDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=4)
_EVENTS = st.tuples(st.sampled_from(["user", "item"]), _IDS, _IDS)


def keys(kind: str, source: str, id_: str) -> tuple[bytes, bytes]:
    raw = source.encode()
    event = Event(id_, 0, user=raw) if kind == "user" else Event(id_, 0, item=raw)
    return pack_event(KEYS, event)[:2]


def test_a_user_and_an_item_of_one_id_are_two_sources() -> None:
    user, item = keys("user", "7", "e"), keys("item", "7", "e")

    assert user[0] != item[0] and user[1] != item[1]


def test_an_interaction_is_its_users() -> None:
    packed_event = pack_event(KEYS, Event("e", 0, b"7", b"8"))

    assert packed_event[:2] == keys("user", "7", "e")


def test_what_stands_between_two_ids_is_in_neither() -> None:
    assert keys("user", "a\0b", "c")[0] != keys("user", "a", "b\0c")[0]


@given(_EVENTS, _EVENTS)
def test_keys_are_equal_only_for_the_same_source_and_id(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    assert (keys(*one)[0] == keys(*other)[0]) == (one == other)
    assert (keys(*one)[1] == keys(*other)[1]) == (one[:2] == other[:2])

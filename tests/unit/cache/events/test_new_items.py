"""New items: the newest are held, in the order of their positions, and stand in lists as if a night had had them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.events.event import Event
from cache.events.new_items import NewItemEvents
from cache.format.stream_position import Position
from cache.model.new_items import NO_NEW_ITEMS, EligibleNewItems, NewItem, NewItems, merge_new_items
from cache.model.ranking import Metric, rank
from cache.records import NO_ITEM, Layout, encode_topk

IDS = st.sampled_from([b"a", b"b", b"c", b"d", b"e"])


def brings(item: bytes, vector: tuple[float, ...] | None = (1.0, 2.0)) -> Event:
    """An event that brings an item, with a vector or with features."""
    features = {"size": 1} if vector is None else None
    return Event("id", 0, item=item, vector=vector, features=features)


def list_raws_and_numbers(items: NewItemEvents, after: int = 0) -> list[tuple[bytes, int]]:
    return [(item.raw_id, item.position_number) for item in items.list_items_after(after)]


@given(st.lists(IDS, max_size=30), st.integers(1, 4), st.integers(0, 31))
def test_the_newest_items_are_held_in_the_order_of_their_positions(told: list[bytes], most: int, after: int) -> None:
    new_item_events = NewItemEvents(most)
    number_by_id: dict[bytes, int] = {}
    for ms, raw in enumerate(told, 1):
        assert new_item_events.add(Position(ms, 0), brings(raw))
        number_by_id.pop(raw, None)
        number_by_id[raw] = Position(ms, 0).number
        while len(number_by_id) > most:
            del number_by_id[next(iter(number_by_id))]

    expected_items = list(number_by_id.items())
    assert list_raws_and_numbers(new_item_events) == expected_items and len(new_item_events) == len(expected_items)
    number = Position(after, 0).number
    assert list_raws_and_numbers(new_item_events, number) == [item for item in expected_items if item[1] > number]
    assert new_item_events.size_bytes == sum(180 + 1 + 8 for _ in expected_items)
    assert new_item_events.drop_until(number) == len(expected_items) - len(list_raws_and_numbers(new_item_events))
    assert list_raws_and_numbers(new_item_events) == [item for item in expected_items if item[1] > number]


@given(st.lists(IDS, max_size=20), st.integers(0, 20), st.integers(1, 6))
def test_what_is_read_again_stands_before_what_is_held(told: list[bytes], cut: int, most: int) -> None:
    complete_events, later, aside = NewItemEvents(most), NewItemEvents(most), NewItemEvents()
    for ms, raw in enumerate(told, 1):
        complete_events.add(Position(ms, 0), brings(raw))
        (later if ms > cut else aside).add(Position(ms, 0), brings(raw))

    later.prepend(aside)

    assert (
        list_raws_and_numbers(later) == list_raws_and_numbers(complete_events)
        and later.size_bytes == complete_events.size_bytes
    )


def test_an_event_counts_once_and_only_one_that_brings_an_item() -> None:
    new_item_events = NewItemEvents()
    assert new_item_events.add(Position(1, 0), brings(b"a")) and new_item_events.version == 1
    assert not new_item_events.add(Position(1, 0), brings(b"b"))
    for ms, event in enumerate(
        (
            Event("id", 0, item=b"b", attributes={"price": 1}),
            Event("id", 0, b"u", b"b"),
            Event("id", 0, b"u", attributes={"age": 1}),
        ),
        2,
    ):
        assert new_item_events.add(Position(ms, 0), event)
    assert list_raws_and_numbers(new_item_events) == [(b"a", Position(1, 0).number)] and new_item_events.version == 1
    # Features that arrive later do not change the vector.
    new_item_events.add(Position(9, 0), brings(b"a", None))
    (item,) = new_item_events.list_items_after(0)
    assert item.position_number == Position(9, 0).number and item.vector is not None
    new_item_events.forget(b"a")
    new_item_events.forget(b"a")
    assert (list_raws_and_numbers(new_item_events), new_item_events.size_bytes, new_item_events.version) == ([], 0, 3)


def new_items(vectors: Any, first: int) -> NewItems:
    rows = np.array(vectors, np.float32)
    items = tuple(NewItem(f"new-{at}".encode(), at + 1) for at in range(len(rows)))
    return NewItems(first, items, rows, tuple(row.tobytes() for row in rows))


LAYOUT = Layout("topk", 2, "f2")


def test_a_list_that_a_record_would_not_hold_stays_without_new_items() -> None:
    ranked_lists = np.array([[3, 1], [3, 1]], np.uint32), np.array([[2e-5, 1e-5]] * 2, np.float32)
    items = EligibleNewItems(new_items([[6e4, 0]], 7))
    users = np.array([[1e3, 0], [1e-9, 0]], np.float32)

    lists_with_new_items = merge_new_items(ranked_lists, users, [items, items], "inner_product", LAYOUT)

    assert lists_with_new_items[0].tolist() == [[3, 1], [7, 3]]
    np.testing.assert_array_equal(lists_with_new_items[1][0], ranked_lists[1][0])
    encode_topk(LAYOUT, np.zeros(2, np.uint64), *lists_with_new_items, 0)


@pytest.mark.parametrize("metric", ["inner_product", "cosine"])
@given(st.integers(0, 12), st.integers(0, 6), st.integers(1, 8), st.integers(0, 2**31))
def test_lists_are_those_of_a_night_whose_last_items_these_are(
    metric: Metric, own: int, new: int, width: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    # Few different values, so that many scores are equal
    vectors = rng.integers(-1, 2, size=(own + new, 3)).astype(np.float32)
    users = rng.integers(-1, 2, size=(2, 3)).astype(np.float32)
    exclusions = [rng.choice(own + new + 1, rng.integers(0, 4)).astype(np.int64) for _ in users]
    every = np.tile(np.arange(own + new), (2, 1))

    expected_lists = rank(users, vectors, every, exclusions, width, metric=metric)
    ranked_lists = rank(users, vectors[:own], every[:, :own], exclusions, width, metric=metric)
    ranked_lists_copy = ranked_lists[0].copy(), ranked_lists[1].copy()
    items = new_items(vectors[own:].reshape(new, 3), own)
    new_items_of_users = [
        EligibleNewItems(items, frozenset(user_exclusions.tolist())) for user_exclusions in exclusions
    ]
    lists_with_new_items = merge_new_items(ranked_lists, users, new_items_of_users, metric, Layout("topk", width, "f2"))

    np.testing.assert_array_equal(lists_with_new_items[0], expected_lists[0])
    np.testing.assert_array_equal(lists_with_new_items[1], expected_lists[1])
    np.testing.assert_array_equal(ranked_lists[0], ranked_lists_copy[0])
    np.testing.assert_array_equal(ranked_lists[1], ranked_lists_copy[1])


def test_lists_without_new_items_are_what_they_were() -> None:
    ranked_lists = np.array([[3, NO_ITEM]], np.uint32), np.array([[1.0, 0.0]], np.float32)
    assert merge_new_items(ranked_lists, np.ones((1, 2), np.float32), [], "cosine", LAYOUT) is ranked_lists
    none = [EligibleNewItems()]
    assert merge_new_items(ranked_lists, np.ones((1, 2), np.float32), none, "cosine", LAYOUT) is ranked_lists


def test_a_digest_names_items_positions_and_what_vectors_were_made_of() -> None:
    items = new_items([[1, 2], [3, 4]], 7)
    assert items.digest == new_items([[1, 2], [3, 4]], 7).digest and NO_NEW_ITEMS.digest == b""
    variants = [
        new_items([[1, 2]], 7), new_items([[1, 2], [3, 5]], 7), items.up_to(1),
        NewItems(7, tuple(item._replace(position_number=9) for item in items.items), items.vectors, items.input_keys),
    ]  # fmt: skip
    assert items.digest not in {variant.digest for variant in variants}
    assert items.up_to(2) is items and items.up_to(1).digest == variants[0].digest
    assert items.item_number_by_id == {b"new-0": 7, b"new-1": 8} and items.newest_position_number == 2
    assert (len(items.up_to(0)), items.up_to(0).digest) == (0, b"")

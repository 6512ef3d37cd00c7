"""New items: the newest are held, in the order of their positions, and stand in lists as if a night had had them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.events.event import Event
from cache.events.new_items import (
    NO_NEW_ITEMS,
    NewItem,
    NewItemEvents,
    NewItems,
    NewItemsOf,
    merged_lists,
)
from cache.events.position import Position
from cache.format.records.codec import encode_topk
from cache.format.records.layout import NO_ITEM, Layout
from cache.model.ranking import Metric, rank

IDS = st.sampled_from([b"a", b"b", b"c", b"d", b"e"])


def brings(item: bytes, vector: tuple[float, ...] | None = (1.0, 2.0)) -> Event:
    """An event that brings an item, with a vector or with features."""
    features = {"size": 1} if vector is None else None
    return Event("id", 0, item=item, vector=vector, features=features)


def held(items: NewItemEvents, after: int = 0) -> list[tuple[bytes, int]]:
    return [(each.raw, each.number) for each in items.newer(after)]


@given(st.lists(IDS, max_size=30), st.integers(1, 4), st.integers(0, 31))
def test_the_newest_items_are_held_in_the_order_of_their_positions(
    told: list[bytes], most: int, after: int
) -> None:
    found = NewItemEvents(most)
    newest: dict[bytes, int] = {}
    for ms, raw in enumerate(told, 1):
        assert found.add(Position(ms, 0), brings(raw))
        newest.pop(raw, None)
        newest[raw] = Position(ms, 0).number
        while len(newest) > most:
            del newest[next(iter(newest))]

    wanted = list(newest.items())
    assert held(found) == wanted and len(found) == len(wanted)
    number = Position(after, 0).number
    assert held(found, number) == [each for each in wanted if each[1] > number]
    assert found.size_bytes == sum(180 + 1 + 8 for _ in wanted)
    assert found.drop_until(number) == len(wanted) - len(held(found))
    assert held(found) == [each for each in wanted if each[1] > number]


@given(st.lists(IDS, max_size=20), st.integers(0, 20), st.integers(1, 6))
def test_what_is_read_again_stands_before_what_is_held(
    told: list[bytes], cut: int, most: int
) -> None:
    whole, later, aside = NewItemEvents(most), NewItemEvents(most), NewItemEvents()
    for ms, raw in enumerate(told, 1):
        whole.add(Position(ms, 0), brings(raw))
        (later if ms > cut else aside).add(Position(ms, 0), brings(raw))

    later.put_before(aside)

    assert held(later) == held(whole) and later.size_bytes == whole.size_bytes


def test_an_event_counts_once_and_only_one_that_brings_an_item() -> None:
    found = NewItemEvents()
    assert found.add(Position(1, 0), brings(b"a")) and found.version == 1
    assert not found.add(Position(1, 0), brings(b"b"))
    for ms, other in enumerate(
        (
            Event("id", 0, item=b"b", attributes={"price": 1}),
            Event("id", 0, b"u", b"b"),
            Event("id", 0, b"u", attributes={"age": 1}),
        ),
        2,
    ):
        assert found.add(Position(ms, 0), other)
    assert held(found) == [(b"a", Position(1, 0).number)] and found.version == 1
    # Features that come later leave the vector what it was.
    found.add(Position(9, 0), brings(b"a", None))
    (item,) = found.newer(0)
    assert item.number == Position(9, 0).number and item.vector is not None
    found.forget(b"a")
    found.forget(b"a")
    assert (held(found), found.size_bytes, found.version) == ([], 0, 3)


def new_items(vectors: Any, first: int) -> NewItems:
    rows = np.array(vectors, np.float32)
    items = tuple(NewItem(f"new-{at}".encode(), at + 1) for at in range(len(rows)))
    return NewItems(first, items, rows, tuple(row.tobytes() for row in rows))


LAYOUT = Layout("topk", 2, "f2")


def test_a_list_that_a_record_would_not_hold_stays_without_new_items() -> None:
    best = np.array([[3, 1], [3, 1]], np.uint32), np.array([[2e-5, 1e-5]] * 2, np.float32)
    items = NewItemsOf(new_items([[6e4, 0]], 7))
    users = np.array([[1e3, 0], [1e-9, 0]], np.float32)

    found = merged_lists(best, users, [items, items], "inner_product", LAYOUT)

    assert found[0].tolist() == [[3, 1], [7, 3]]
    np.testing.assert_array_equal(found[1][0], best[1][0])
    encode_topk(LAYOUT, np.zeros(2, np.uint64), *found, 0)


@pytest.mark.parametrize("metric", ["inner_product", "cosine"])
@given(st.integers(0, 12), st.integers(0, 6), st.integers(1, 8), st.integers(0, 2**31))
def test_lists_are_those_of_a_night_whose_last_items_these_are(
    metric: Metric, own: int, new: int, width: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    # Few values, so that many scores are equal
    vectors = rng.integers(-1, 2, size=(own + new, 3)).astype(np.float32)
    users = rng.integers(-1, 2, size=(2, 3)).astype(np.float32)
    gone = [rng.choice(own + new + 1, rng.integers(0, 4)).astype(np.int64) for _ in users]
    every = np.tile(np.arange(own + new), (2, 1))

    wanted = rank(users, vectors, every, gone, width, metric=metric)
    best = rank(users, vectors[:own], every[:, :own], gone, width, metric=metric)
    before = best[0].copy(), best[1].copy()
    items = new_items(vectors[own:].reshape(new, 3), own)
    of_each = [NewItemsOf(items, frozenset(each.tolist())) for each in gone]
    found = merged_lists(best, users, of_each, metric, Layout("topk", width, "f2"))

    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(found[1], wanted[1])
    np.testing.assert_array_equal(best[0], before[0])
    np.testing.assert_array_equal(best[1], before[1])


def test_lists_without_new_items_are_what_they_were() -> None:
    best = np.array([[3, NO_ITEM]], np.uint32), np.array([[1.0, 0.0]], np.float32)
    assert merged_lists(best, np.ones((1, 2), np.float32), [], "cosine", LAYOUT) is best
    none = [NewItemsOf()]
    assert merged_lists(best, np.ones((1, 2), np.float32), none, "cosine", LAYOUT) is best


def test_a_digest_names_items_positions_and_what_vectors_were_made_of() -> None:
    items = new_items([[1, 2], [3, 4]], 7)
    assert items.digest == new_items([[1, 2], [3, 4]], 7).digest and NO_NEW_ITEMS.digest == b""
    others = [
        new_items([[1, 2]], 7), new_items([[1, 2], [3, 5]], 7), items.up_to(1),
        NewItems(7, tuple(each._replace(number=9) for each in items.items), items.vectors, items.inputs),
    ]  # fmt: skip
    assert items.digest not in {each.digest for each in others}
    assert items.up_to(2) is items and items.up_to(1).digest == others[0].digest
    assert items.numbers == {b"new-0": 7, b"new-1": 8} and items.newest == 2
    assert (len(items.up_to(0)), items.up_to(0).digest) == (0, b"")

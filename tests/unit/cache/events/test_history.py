"""Histories with newer events, many at once, beside one written down by hand."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cache.events.event_predictor import TimedItems, merge_histories

Row = tuple[int, int]
"""Item, and when."""

ITEMS = st.integers(0, 6)
TIMES = st.integers(-3, 3)
EVENTS = st.lists(st.tuples(st.integers(-1, 6), TIMES), max_size=8)


@st.composite
def published(draw: st.DrawFn) -> list[Row]:
    """Rows as a night publishes them: oldest first, each item once."""
    items = draw(st.lists(ITEMS, unique=True, max_size=6))
    times = sorted(draw(st.lists(TIMES, min_size=len(items), max_size=len(items))))
    return list(zip(items, times, strict=True))


def by_hand(published_rows: Sequence[Row], events: Sequence[Row]) -> list[int]:
    rows = sorted([*published_rows, *(row for row in events if row[0] >= 0)], key=lambda row: row[1])
    history: list[int] = []
    for item, _ in rows:
        if item in history:
            history.remove(item)
        history.append(item)
    return history


def rows_of(rows: Sequence[Row]) -> TimedItems:
    return TimedItems(*np.array(rows, np.int64).reshape(-1, 2).T)


@given(st.lists(st.tuples(published(), EVENTS), max_size=5), st.integers(1, 8))
def test_every_history_is_merged_as_if_it_were_alone(users: list[tuple[list[Row], list[Row]]], limit: int) -> None:
    merged_histories = merge_histories(
        [rows_of(published_rows) for published_rows, _ in users], [rows_of(new) for _, new in users], limit
    )

    assert [merged_history.seen_items.tolist() for merged_history in merged_histories] == [
        by_hand(*user) for user in users
    ]
    for merged_history in merged_histories:
        assert merged_history.model_history.tolist() == merged_history.seen_items[-limit:].tolist()


def test_of_one_time_what_came_later_stands_later() -> None:
    published_history, events = rows_of([(1, 5), (2, 5)]), rows_of([(3, 5), (1, 5), (9, 4)])

    (merged_history,) = merge_histories([published_history], [events], 2)

    assert merged_history.seen_items.tolist() == [9, 2, 3, 1]
    assert merged_history.model_history.tolist() == [3, 1]

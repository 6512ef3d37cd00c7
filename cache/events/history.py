"""Histories of users with newer events, in the night's order and truncation. Pure."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TimedItems(NamedTuple):
    """Rows of a user: ordinals int64, -1 for an item that the generation does not know, and when each happened, µs."""

    items: NDArray[np.int64]
    times: NDArray[np.int64]


class MergedHistory(NamedTuple):
    """History int64, oldest first, as models are given it, and all items int64 that the user ever had."""

    model_history: NDArray[np.int64]
    seen_items: NDArray[np.int64]


def merge(
    published_histories: Sequence[TimedItems], events: Sequence[TimedItems], limit: int
) -> list[MergedHistory]:
    """History of each user as a night groups rows, from what one published of them and the events behind its position.

    Of each user `published_histories` has the items oldest first, each once, with when it happened last; `events` are
    in the order of their positions. Rows are ordered by time, those of one time as they came; of an item that comes
    again the last row counts; models are given the newest `limit` items. Many users at once pay the fixed cost of
    numpy's calls once.
    """
    parts = [
        timed_items
        for pair in zip(published_histories, events, strict=True)
        for timed_items in pair
    ]
    if not parts:
        return []
    items = np.concatenate([timed_items.items for timed_items in parts])
    times = np.concatenate([timed_items.times for timed_items in parts])
    lengths = [
        len(history.items) + len(after.items)
        for history, after in zip(published_histories, events, strict=True)
    ]
    users = np.repeat(np.arange(len(lengths)), lengths)
    order = np.lexsort((times, users))
    items, users = items[order], users[order]
    # So wide that -1 is nobody else's item either.
    pairs = users * (int(items.max(initial=0)) + 2) + items
    # Not by `np.unique`: for one user its fixed cost is that of everything else here.
    alike = pairs.argsort(kind="stable")
    placed = pairs[alike]
    is_last = np.ones(len(placed), np.bool_)
    np.not_equal(placed[1:], placed[:-1], out=is_last[:-1])
    latest_rows = alike[is_last]
    latest_rows.sort()
    latest_rows = latest_rows[items[latest_rows] >= 0]
    items, ends = (
        items[latest_rows],
        users[latest_rows].searchsorted(np.arange(len(lengths) + 1)).tolist(),
    )
    return [
        MergedHistory(items[max(start, end - limit) : end], items[start:end])
        for start, end in pairwise(ends)
    ]

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


class Merged(NamedTuple):
    """History int64, oldest first, as models are given it, and all items int64 that the user ever had."""

    newest: NDArray[np.int64]
    had: NDArray[np.int64]


def merge(had: Sequence[TimedItems], events: Sequence[TimedItems], limit: int) -> list[Merged]:
    """History of each user as a night groups rows, from what one published of them and the events behind its position.

    Of each user `had` has the items oldest first, each once, with when it happened last; `events` are in the order of
    their positions. Rows are ordered by time, those of one time as they came; of an item that comes again the last row
    counts; models are given the newest `limit` items. Many users at once pay the fixed cost of numpy's calls once.
    """
    parts = [each for pair in zip(had, events, strict=True) for each in pair]
    if not parts:
        return []
    items = np.concatenate([each.items for each in parts])
    times = np.concatenate([each.times for each in parts])
    lengths = [
        len(before.items) + len(after.items) for before, after in zip(had, events, strict=True)
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
    kept = alike[is_last]
    kept.sort()
    kept = kept[items[kept] >= 0]
    items, ends = items[kept], users[kept].searchsorted(np.arange(len(lengths) + 1)).tolist()
    return [
        Merged(items[max(start, end - limit) : end], items[start:end])
        for start, end in pairwise(ends)
    ]

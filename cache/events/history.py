"""History of a user with newer events, in the night's order and truncation. Pure."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Merged(NamedTuple):
    """History int64, oldest first, as models are given it, and all items int64 that the user ever had."""

    newest: NDArray[np.int64]
    had: NDArray[np.int64]


def merge(
    had: NDArray[np.int64],
    had_us: NDArray[np.int64],
    events: NDArray[np.int64],
    events_us: NDArray[np.int64],
    limit: int,
) -> Merged:
    """History as a night groups a user's rows, from what one published of them and the events behind its position.

    `had` are ordinals oldest first, each once, with when each happened last; `events` ordinals in the order of their
    positions, -1 for an item that the generation does not know. Rows are ordered by time, those of one time as they
    came; of an item that comes again the last row counts; models are given the newest `limit` items.
    """
    known = events >= 0
    ordinals = np.concatenate([had, events[known]])
    times = np.concatenate([had_us, events_us[known]])
    ordered = ordinals[np.argsort(times, kind="stable")]
    # The first in reverse is the last that counts.
    _, first = np.unique(ordered[::-1], return_index=True)
    kept = ordered[np.sort(len(ordered) - 1 - first)]
    return Merged(kept[max(0, len(kept) - limit) :], kept)

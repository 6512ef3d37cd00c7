"""Keys of work that is under way: many enter a dictionary, and leave it, in one pass."""

from collections import deque
from collections.abc import Collection, Hashable
from itertools import repeat
from typing import TypeVar

from cache import compiled

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def board(under_way: dict[K, V], keys: list[K], work: V) -> list[int]:
    """Puts `work` under each key that is not there yet; the places of the others."""
    if (columns := compiled.columns()) is not None:
        return columns.board(under_way, keys, work)
    new = dict.fromkeys(keys, work)
    if len(new) == len(keys) and under_way.keys().isdisjoint(new):
        under_way.update(new)
        return []
    rest: list[int] = []
    for place, key in enumerate(keys):
        if key in under_way:
            rest.append(place)
        else:
            under_way[key] = work
    return rest


def leave(under_way: dict[K, V], keys: Collection[K]) -> None:
    """Takes away each key that is there."""
    columns = compiled.columns()
    if columns is not None and type(keys) is list:
        columns.leave(under_way, keys)
    else:
        deque(map(under_way.pop, keys, repeat(None)), maxlen=0)

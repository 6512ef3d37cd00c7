"""Eviction policies as short references: each `get` says whether the key was there, and takes it in if it was not."""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Protocol

import numpy as np


class Policy(Protocol):
    """A cache of a number of keys."""

    def get(self, key: int) -> bool:
        """Return whether the key was there; add it if not."""


class Lru:
    """Least recently used goes first; what L1 does."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[int, None] = OrderedDict()

    def get(self, key: int) -> bool:
        """See `Policy.get`."""
        if key in self._keys:
            self._keys.move_to_end(key)
            return True
        self._keys[key] = None
        if len(self._keys) > self._capacity:
            self._keys.popitem(last=False)
        return False


class Sieve:
    """SIEVE (Zhang et al., NSDI '24): a FIFO with one bit per key and a hand that stays where it stopped."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._nodes: dict[int, list[int]] = {}  # key: [visited, newer key, older key]; -1: none
        self._head = self._tail = self._hand = -1

    def get(self, key: int) -> bool:
        """See `Policy.get`."""
        nodes = self._nodes
        if (node := nodes.get(key)) is not None:
            node[0] = 1
            return True
        if len(nodes) >= self._capacity:
            self._evict()
        nodes[key] = [0, -1, self._head]
        if self._head >= 0:
            nodes[self._head][1] = key
        else:
            self._tail = key
        self._head = key
        return False

    def _evict(self) -> None:
        nodes = self._nodes
        at = self._hand if self._hand >= 0 else self._tail
        while (node := nodes[at])[0]:
            node[0] = 0
            at = node[1] if node[1] >= 0 else self._tail
        _, newer_key, older = nodes.pop(at)
        self._hand = newer_key
        if newer_key >= 0:
            nodes[newer_key][2] = older
        else:
            self._head = older
        if older >= 0:
            nodes[older][1] = newer_key
        else:
            self._tail = newer_key


class S3Fifo:
    """S3-FIFO (Yang et al., SOSP '23): a small FIFO of a tenth, a main one with second chances, ghosts of the small."""

    def __init__(self, capacity: int) -> None:
        self._small_max = max(1, capacity // 10)
        self._capacity = capacity
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._counts: dict[int, int] = {}

    def get(self, key: int) -> bool:
        """See `Policy.get`."""
        counts = self._counts
        if (count := counts.get(key)) is not None:
            if count < 3:
                counts[key] = count + 1
            return True
        while len(counts) >= self._capacity:
            if len(self._small) >= self._small_max or not self._main:
                self._evict_small()
            else:
                self._evict_main()
        counts[key] = 0
        if key in self._ghosts:
            del self._ghosts[key]
            self._main.append(key)
        else:
            self._small.append(key)
        return False

    def _evict_small(self) -> None:
        key = self._small.popleft()
        if self._counts[key] > 1:
            self._counts[key] = 0
            self._main.append(key)
            return
        del self._counts[key]
        self._ghosts[key] = None
        if len(self._ghosts) > self._capacity - self._small_max:
            self._ghosts.popitem(last=False)

    def _evict_main(self) -> None:
        while count := self._counts[self._main[0]]:
            self._counts[self._main[0]] = count - 1
            self._main.rotate(-1)
        del self._counts[self._main.popleft()]


class WTinyLfu:
    """W-TinyLFU (Einziger et al., 2017): a window of 1 %, then admission by frequency to a segmented LRU of 20 / 80."""

    def __init__(self, capacity: int) -> None:
        self._window_max = max(1, capacity // 100)
        self._main_max = max(1, capacity - self._window_max)
        self._protected_max = self._main_max * 8 // 10
        self._window: OrderedDict[int, None] = OrderedDict()
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._mask = (1 << max(6, (4 * capacity - 1).bit_length())) - 1
        self._rows = [bytearray(self._mask + 1) for _ in range(4)]
        self._added, self._added_max = 0, 10 * capacity

    def get(self, key: int) -> bool:
        """See `Policy.get`."""
        self._add(key)
        if key in self._window:
            self._window.move_to_end(key)
        elif key in self._protected:
            self._protected.move_to_end(key)
        elif key in self._probation:
            del self._probation[key]
            self._protected[key] = None
            if len(self._protected) > self._protected_max:
                self._probation[self._protected.popitem(last=False)[0]] = None
        else:
            self._window[key] = None
            if len(self._window) > self._window_max:
                self._admit(self._window.popitem(last=False)[0])
            return False
        return True

    def _admit(self, candidate: int) -> None:
        if len(self._probation) + len(self._protected) >= self._main_max:
            segment = self._probation or self._protected
            victim = next(iter(segment))
            if self._count(candidate) <= self._count(victim):
                return
            del segment[victim]
        self._probation[candidate] = None

    def _sketch_columns(self, key: int) -> tuple[int, int, int, int]:
        spread = key * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        mask = self._mask
        return spread >> 40 & mask, spread >> 28 & mask, spread >> 16 & mask, spread >> 4 & mask

    def _count(self, key: int) -> int:
        return min([row[at] for row, at in zip(self._rows, self._sketch_columns(key), strict=True)])

    def _add(self, key: int) -> None:
        for row, at in zip(self._rows, self._sketch_columns(key), strict=True):
            if row[at] < 15:
                row[at] += 1
        self._added += 1
        if self._added >= self._added_max:
            self._added //= 2
            self._rows = [bytearray(np.frombuffer(row, np.uint8) // 2) for row in self._rows]


POLICIES: dict[str, Callable[[int], Policy]] = {"lru": Lru, "sieve": Sieve, "s3-fifo": S3Fifo, "w-tinylfu": WTinyLfu}

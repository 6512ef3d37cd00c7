"""A bounded number of recent vectors, each with what belongs to it; the nearest one of a query is found exactly."""

from typing import Any, Generic, NamedTuple, TypeVar

import faiss as faiss_module
import numpy as np
from numpy.typing import NDArray

faiss: Any = faiss_module  # its type stubs lag behind what the module has
Entry = TypeVar("Entry")

_QUERIES_PER_CALL = 16
"""Queries per FAISS call: more would change its kernel, and the library that does the sums."""


class Nearest(NamedTuple, Generic[Entry]):
    """The nearest of the recent vectors: its place, what belongs to it, and the distance in lengths of the query."""

    slot: int
    entry: Entry
    distance: float


class RecentVectors(Generic[Entry]):
    """The `capacity` vectors float32 [dims] that were added or touched last; not thread-safe.

    A scan of them all: at 4,096 x 128 it takes some 60 us, a hundredth of a search among a hundred times as many items.
    """

    def __init__(self, capacity: int, dims: int) -> None:
        self._capacity = capacity
        self._dims = dims
        self._index = faiss.IndexFlatL2(dims)
        self._rows: NDArray[np.float32] | None = None
        self._entries: list[Entry] = []
        self._used = np.zeros(capacity, np.int64)
        self._tick = 0

    def __len__(self) -> int:
        return len(self._entries)

    def nearest(self, queries: NDArray[np.float32]) -> list[Nearest[Entry] | None]:
        """The nearest vector of each query [n, dims]; None for a query of no length, or while there is none."""
        if not self._entries:
            return [None] * len(queries)
        faiss.omp_set_num_threads(1)
        nearest_entries: list[Nearest[Entry] | None] = []
        lengths = np.sqrt(np.einsum("nd,nd->n", queries, queries)).tolist()
        for start in range(0, len(queries), _QUERIES_PER_CALL):
            part = np.ascontiguousarray(queries[start : start + _QUERIES_PER_CALL], np.float32)
            squares, slots = self._index.search(part, 1)
            pairs = zip(squares[:, 0].tolist(), slots[:, 0].tolist(), strict=True)
            for length, (square, slot) in zip(lengths[start:], pairs, strict=False):
                usable = length > 0 and slot >= 0
                distance = square**0.5 / length if usable else 0.0
                nearest_entries.append(
                    Nearest(slot, self._entries[slot], distance) if usable else None
                )
        return nearest_entries

    def mark_used(self, slot: int) -> None:
        """Counts the entry as used: what was not used for longest is replaced first."""
        self._tick += 1
        self._used[slot] = self._tick

    def add(self, vector: NDArray[np.float32], entry: Entry) -> None:
        """Adds a vector with what belongs to it; once all places are taken, in that of the one longest unused."""
        slot = len(self._entries)
        if slot < self._capacity:
            self._index.add(vector[None])
            self._entries.append(entry)
        else:
            if self._rows is None:  # FAISS' own memory, which grows no more
                flat = faiss.rev_swig_ptr(self._index.get_xb(), self._capacity * self._dims)
                self._rows = flat.reshape(self._capacity, self._dims)
            slot = int(self._used.argmin())
            self._rows[slot] = vector
            self._entries[slot] = entry
        self.mark_used(slot)

    def clear(self) -> None:
        """Forgets all of them."""
        self._index = faiss.IndexFlatL2(self._dims)
        self._rows = None
        self._entries.clear()
        self._used[:] = 0

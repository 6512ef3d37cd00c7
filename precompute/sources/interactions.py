"""Interactions as pairs of numbers: ids are numbered batch by batch, so no step holds the texts of all rows."""

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from precompute.sources.columns import Ids

MERGED_AT_ONCE: Final = 64
"""Batches whose names wait to be merged."""


@dataclass(slots=True, eq=False)
class NumberedIds:
    """Ids in the order in which they first came; 4 bytes for each row, and each text once."""

    names: Any = field(default_factory=lambda: pa.array([], pa.large_string()))
    _codes: list[NDArray[np.int32]] = field(default_factory=list)
    _waiting: list[Any] = field(default_factory=list)

    def add(self, ids: Ids) -> None:
        """The next rows."""
        first = np.empty(len(ids.names), np.int64)
        first[ids.codes[::-1]] = np.arange(len(ids))[::-1]
        order = np.argsort(first)
        rank_by_code = np.empty(len(order), np.int32)
        rank_by_code[order] = np.arange(len(order), dtype=np.int32)
        names = ids.names.take(pa.array(order)).cast(pa.large_string())
        self._waiting.append(
            pa.DictionaryArray.from_arrays(pa.array(rank_by_code[ids.codes]), names)
        )
        if len(self._waiting) >= MERGED_AT_ONCE:
            self._merge()

    def codes(self) -> NDArray[np.int64]:
        """int64[rows]: the place of each row's id among `names`."""
        self._merge()
        return np.concatenate([np.empty(0, np.int64), *self._codes])

    def _merge(self) -> None:
        no_codes = pa.array([], pa.int32())
        names_chunk = pa.DictionaryArray.from_arrays(no_codes, self.names)
        chunks = pa.chunked_array([names_chunk, *self._waiting]).unify_dictionaries().chunks
        self.names = chunks[-1].dictionary
        self._codes += [np.asarray(chunk.indices) for chunk in chunks[1:]]
        self._waiting = []


@dataclass(slots=True, eq=False)
class HashedIds:
    """Ids told apart by their hashes alone: enough to group rows, where nobody asks for a name."""

    _hashes: list[NDArray[np.uint64]] = field(default_factory=list)
    _codes: list[NDArray[np.int32]] = field(default_factory=list)

    def add(self, ids: Ids) -> None:
        """The next rows."""
        self._hashes.append(ids.hashes(0))
        self._codes.append(ids.codes)

    def codes(self) -> tuple[NDArray[np.int64], int]:
        """(int64[rows]: a number of each row's id, from 0; how many ids there are)."""
        distinct, distinct_positions = np.unique(np.concatenate(self._hashes), return_inverse=True)
        ends = np.cumsum([0, *map(len, self._hashes)])
        rows = [
            distinct_positions[start:][codes]
            for start, codes in zip(ends, self._codes, strict=False)
        ]
        return np.concatenate(rows).astype(np.int64, copy=False), len(distinct)

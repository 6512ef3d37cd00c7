"""Vocabularies: ids as numbers, in a given order or by first occurrence, and counts of distinct ids."""

from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.format.ids import FINGERPRINT_SEED
from precompute.sources.columns import Ids, text_hashes

CHUNK_ROWS_MAX = 1 << 18
"""Ids processed at once, so that their texts fit 32-bit offsets."""

SMALLEST_HASHES_MAX = 1 << 16
"""Smallest hashes that a count of distinct hashes keeps."""

WAITING_BATCHES_MAX: Final = 64
"""Batches whose names wait to be merged, at most."""


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """Distinct ids in a given order: `id_texts` is a chunked Arrow array of strings.

    Ids are compared by 128-bit hashes, as in `Ids.of`; 24 bytes each besides the texts.
    """

    id_texts: Any
    _hash_seed: int
    _hashes: NDArray[np.uint64]
    _fingerprints: NDArray[np.uint64]
    _position_by_rank: NDArray[np.int64]

    @classmethod
    def of(cls, id_texts: Any, seed: int = 0) -> Self | None:
        """Build a vocabulary of Arrow strings, None if an id is repeated."""
        hashes, fingerprints = text_hashes(id_texts, seed), text_hashes(id_texts, FINGERPRINT_SEED)
        position_by_rank = np.argsort(hashes)
        hashes, fingerprints = hashes[position_by_rank], fingerprints[position_by_rank]
        has_equal_hash = hashes[1:] == hashes[:-1]
        if (fingerprints[1:] == fingerprints[:-1])[has_equal_hash].any():
            return None
        if has_equal_hash.any():
            return cls.of(id_texts, seed + 1)
        return cls(id_texts, seed, hashes, fingerprints, position_by_rank)

    def __len__(self) -> int:
        return len(self.id_texts)

    def find_positions(self, id_texts: Any) -> NDArray[np.int64]:
        """Return int64[n], the position of each Arrow string in the vocabulary, -1 if it is not in it."""
        if not len(self):
            return np.full(len(id_texts), -1, np.int64)
        hashes = text_hashes(id_texts, self._hash_seed)
        sorted_positions = np.minimum(self._hashes.searchsorted(hashes), len(self) - 1)
        is_match = self._hashes[sorted_positions] == hashes
        is_match &= self._fingerprints[sorted_positions] == text_hashes(id_texts, FINGERPRINT_SEED)
        return np.where(is_match, self._position_by_rank[sorted_positions], -1)


def repeated_text_rows(arrow_texts: Any) -> NDArray[np.int64]:
    """Return the rows, ascending, of Arrow strings that repeat the text of an earlier row."""
    hashes, fingerprints = text_hashes(arrow_texts, 0), text_hashes(arrow_texts, FINGERPRINT_SEED)
    order = np.lexsort((fingerprints, hashes))  # stable, so an earlier row comes first
    is_repeat = (hashes[order][1:] == hashes[order][:-1]) & (fingerprints[order][1:] == fingerprints[order][:-1])
    return np.sort(order[1:][is_repeat])


def to_string_chunks(id_column: Any) -> Any:
    """Convert a column to strings, in chunks of at most CHUNK_ROWS_MAX with 32-bit offsets."""
    chunks = [
        chunk.slice(start, CHUNK_ROWS_MAX).cast(pa.string())
        for chunk in id_column.chunks
        for start in range(0, len(chunk), CHUNK_ROWS_MAX)
    ]
    return pa.chunked_array(chunks, pa.string())


class DistinctCounter:
    """Count of distinct 64-bit hashes from the smallest ones: exact up to SMALLEST_HASHES_MAX, then within 0.4 %.

    The estimator is that of k minimum values (Beyer et al., SIGMOD 2007).
    """

    def __init__(self, hashes_max: int = SMALLEST_HASHES_MAX) -> None:
        self._hashes_max = hashes_max
        self.smallest_hashes: NDArray[np.uint64] = np.empty(0, np.uint64)

    def add(self, hashes: NDArray[np.uint64]) -> None:
        """Add hashes, repeated ones allowed."""
        if len(self.smallest_hashes) == self._hashes_max:
            hashes = hashes[hashes < self.smallest_hashes[-1]]
        self.smallest_hashes = np.union1d(self.smallest_hashes, hashes)[: self._hashes_max]

    @property
    def distinct_count(self) -> int:
        """Estimated number of distinct hashes."""
        hash_count = len(self.smallest_hashes)
        if hash_count < self._hashes_max:
            return hash_count
        return round((hash_count - 1) / (float(self.smallest_hashes[-1]) / 2.0**64))


@dataclass(slots=True, eq=False)
class NumberedIds:
    """Ids numbered by first occurrence; memory is 4 bytes per row, and each text once."""

    distinct_ids: Any = field(default_factory=lambda: pa.array([], pa.large_string()))
    _codes: list[NDArray[np.int32]] = field(default_factory=list)
    _waiting_batches: list[Any] = field(default_factory=list)

    def add(self, ids: Ids) -> None:
        """Add the next rows."""
        first_row_by_code = np.empty(len(ids.distinct_ids), np.int64)
        first_row_by_code[ids.id_codes[::-1]] = np.arange(len(ids))[::-1]
        codes_by_first_row = np.argsort(first_row_by_code)
        rank_by_code = np.empty(len(codes_by_first_row), np.int32)
        rank_by_code[codes_by_first_row] = np.arange(len(codes_by_first_row), dtype=np.int32)
        ordered_names = ids.distinct_ids.take(pa.array(codes_by_first_row)).cast(pa.large_string())
        self._waiting_batches.append(
            pa.DictionaryArray.from_arrays(pa.array(rank_by_code[ids.id_codes]), ordered_names)
        )
        if len(self._waiting_batches) >= WAITING_BATCHES_MAX:
            self._merge()

    def codes(self) -> NDArray[np.int64]:
        """Return int64[rows], the position of each row's id among `distinct_ids`."""
        self._merge()
        return np.concatenate([np.empty(0, np.int64), *self._codes])

    def _merge(self) -> None:
        no_codes = pa.array([], pa.int32())
        names_chunk = pa.DictionaryArray.from_arrays(no_codes, self.distinct_ids)
        chunks = pa.chunked_array([names_chunk, *self._waiting_batches]).unify_dictionaries().chunks
        self.distinct_ids = chunks[-1].dictionary
        self._codes += [np.asarray(chunk.indices) for chunk in chunks[1:]]
        self._waiting_batches = []


@dataclass(slots=True, eq=False)
class HashedIds:
    """Ids distinguished only by their hashes, for grouping rows without their names."""

    _hashes: list[NDArray[np.uint64]] = field(default_factory=list)
    _codes: list[NDArray[np.int32]] = field(default_factory=list)

    def add(self, ids: Ids) -> None:
        """Add the next rows."""
        self._hashes.append(ids.distinct_hashes(0))
        self._codes.append(ids.id_codes)

    def codes(self) -> tuple[NDArray[np.int64], int]:
        """Return (int64[rows], the number of each row's id, from 0; the number of distinct ids)."""
        distinct_hashes, distinct_positions = np.unique(np.concatenate(self._hashes), return_inverse=True)
        batch_starts = np.cumsum([0, *map(len, self._hashes)])
        code_batches = [
            distinct_positions[batch_start:][batch_codes]
            for batch_start, batch_codes in zip(batch_starts, self._codes, strict=False)
        ]
        return np.concatenate(code_batches).astype(np.int64, copy=False), len(distinct_hashes)

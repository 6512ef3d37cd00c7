"""Directory: sorted hashes of entities; the position of a hash is the position of its record."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cache.errors import CorruptArtefact
from cache.format.manifest import EntitySet
from cache.native import loader, pure


def map_file(path: Path, dtype: str, shape: tuple[int, ...] | None = None) -> NDArray[Any]:
    """Map a file as a read-only array in shared memory.

    Returns a plain array, because every access to numpy's memmap class costs more. For an empty file, which cannot be
    mapped, returns an empty array if no shape is given.
    """
    if shape is None and not path.stat().st_size:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r", shape=shape))


class Directory:
    """All hashes of an entity set, one memory-mapped array per shard, shared by every process of a host."""

    def __init__(self, hash_seed: int, first_hashes: Sequence[int], hash_parts: Sequence[NDArray[np.uint64]]) -> None:
        self.seed = hash_seed
        self.hash_parts = tuple(hash_parts)
        # bisect is faster than numpy for one number
        self._first_hashes = list(map(int, first_hashes))
        self._part_starts = list(accumulate(map(len, hash_parts), initial=0))
        self.count = self._part_starts[-1]
        self._hashes = (loader.kernels if hash_parts else pure).HashParts(tuple(self._first_hashes), self.hash_parts)

    @classmethod
    def open(cls, generation_folder: Path, entities: EntitySet) -> Self:
        """Map the parts listed in a manifest; raise CorruptArtefact if a file's size does not fit its count."""
        parts = []
        for part in entities.parts:
            hash_file = generation_folder / part.file.path
            if hash_file.stat().st_size != part.count * 8:
                raise CorruptArtefact(
                    f"{part.file.path} holds {hash_file.stat().st_size} bytes, {part.count} hashes need "
                    f"{part.count * 8}"
                )
            parts.append(map_file(hash_file, "<u8"))
        return cls(entities.seed, [part.first_hash for part in entities.parts], parts)

    def find_position(self, entity_hash: int) -> int:
        """Return the position of a hash, or -1."""
        shard = bisect_right(self._first_hashes, entity_hash) - 1
        hash_part = self.hash_parts[shard]
        part_position = int(hash_part.searchsorted(np.uint64(entity_hash)))
        if part_position < len(hash_part) and hash_part.item(part_position) == entity_hash:
            return self._part_starts[shard] + part_position
        return -1

    def find_positions(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the positions int64[n] of hashes, -1 for an absent one."""
        if hashes.dtype != np.uint64:
            raise TypeError(f"hashes must be uint64, not {hashes.dtype}")
        return np.frombuffer(self._hashes.find(np.ascontiguousarray(hashes)), np.int64)

    def locate_in_part(self, position: int) -> tuple[int, int]:
        """Return (part, position within the part) for a global position."""
        part_index = bisect_right(self._part_starts, position) - 1
        return part_index, position - self._part_starts[part_index]

    def page_locations(
        self,
        positions: NDArray[np.int64],
        first_pages: NDArray[np.int64],
        records_per_page: int,
        record_size_bytes: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the pages int64[n] and byte offsets int64[n] of records of `record_size_bytes` bytes."""
        page_numbers, offsets = self._hashes.locate(positions, first_pages, records_per_page, record_size_bytes)
        return np.frombuffer(page_numbers, np.int64), np.frombuffer(offsets, np.int64)

    def hashes(self) -> NDArray[np.uint64]:
        """Return all hashes in order, as one array in memory."""
        return np.concatenate(self.hash_parts) if self.hash_parts else np.empty(0, np.uint64)

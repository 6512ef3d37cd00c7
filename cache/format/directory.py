"""The directory: sorted entity hashes; the position of a hash is the position of its record."""

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
    """Map a file as a read-only array in shared memory; a plain array, since every access to a memmap costs more.

    Without a shape, an empty file, which cannot be mapped, gives an empty array.
    """
    if shape is None and not path.stat().st_size:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r", shape=shape))


class Directory:
    """All hashes of an entity set, one memory-mapped array per shard, shared by every process of a host."""

    def __init__(
        self, seed: int, firsts: Sequence[int], parts: Sequence[NDArray[np.uint64]]
    ) -> None:
        self.seed = seed
        self.parts = tuple(parts)
        # bisect beats numpy on one number
        self._firsts = list(map(int, firsts))
        self._starts = list(accumulate(map(len, parts), initial=0))
        self.count = self._starts[-1]
        self._hashes = (loader.kernels if parts else pure).HashParts(
            tuple(self._firsts), self.parts
        )

    @classmethod
    def open(cls, root: Path, entities: EntitySet) -> Self:
        """Maps the parts listed in a manifest; raises CorruptArtefact when a file's length does not fit its count."""
        parts = []
        for part in entities.parts:
            path = root / part.file.path
            if path.stat().st_size != part.count * 8:
                raise CorruptArtefact(
                    f"{part.file.path} holds {path.stat().st_size} bytes, {part.count} hashes need {part.count * 8}"
                )
            parts.append(map_file(path, "<u8"))
        return cls(entities.seed, [part.first_hash for part in entities.parts], parts)

    def find(self, hash_: int) -> int:
        """The position of a hash, or -1."""
        shard = bisect_right(self._firsts, hash_) - 1
        part = self.parts[shard]
        part_position = int(part.searchsorted(np.uint64(hash_)))
        if part_position < len(part) and part.item(part_position) == hash_:
            return self._starts[shard] + part_position
        return -1

    def find_many(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """int64[n] positions, -1 where a hash is absent."""
        if hashes.dtype != np.uint64:
            raise TypeError(f"hashes are uint64, not {hashes.dtype}")
        return np.frombuffer(self._hashes.find(np.ascontiguousarray(hashes)), np.int64)

    def locate(self, position: int) -> tuple[int, int]:
        """(part, position within the part) of a global position."""
        part = bisect_right(self._starts, position) - 1
        return part, position - self._starts[part]

    def pages(
        self, positions: NDArray[np.int64], first_pages: NDArray[np.int64], per_page: int, size: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Places of records of `size` bytes, `per_page` of them in a page: int64[n] pages, int64[n] offsets in them."""
        pages, offsets = self._hashes.locate(positions, first_pages, per_page, size)
        return np.frombuffer(pages, np.int64), np.frombuffer(offsets, np.int64)

    def hashes(self) -> NDArray[np.uint64]:
        """All hashes in order, as one array in memory."""
        return np.concatenate(self.parts) if self.parts else np.empty(0, np.uint64)

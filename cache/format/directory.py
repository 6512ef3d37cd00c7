"""The directory: sorted entity hashes; the position of a hash is the position of its record."""

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cache.errors import CorruptArtefact
from cache.format.manifest import EntitySet
from cache.native import loader


def map_file(path: Path, dtype: str, shape: tuple[int, ...] | None = None) -> NDArray[Any]:
    """A file as a read-only array in shared memory; a plain array, since every access to a memmap costs more."""
    return np.asarray(np.memmap(path, dtype, "r", shape=shape))


class Directory:
    """All hashes of an entity set, one memory-mapped array per shard, shared by every process of a host."""

    def __init__(
        self, seed: int, firsts: Sequence[int], parts: Sequence[NDArray[np.uint64]]
    ) -> None:
        self.seed = seed
        self.parts = tuple(parts)
        # A Python int makes numpy compare in float64 (wrong above 2**53): uint64 throughout.
        self._firsts = np.array(firsts, np.uint64)
        self._starts = np.concatenate(
            [[0], np.cumsum([len(part) for part in parts], dtype=np.int64)]
        )
        # bisect beats numpy on one number
        self._starts_list: list[int] = self._starts.tolist()
        self._firsts_list: list[int] = self._firsts.tolist()
        self.count = self._starts_list[-1]
        columns = loader.columns()
        self._compiled = None
        if columns is not None and parts:
            self._compiled = columns.Parts(tuple(self._firsts_list), self.parts)

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
            parts.append(map_file(path, "<u8") if part.count else np.empty(0, np.uint64))
        return cls(entities.seed, [part.first_hash for part in entities.parts], parts)

    def find(self, hash_: int) -> int:
        """The position of a hash, or -1."""
        shard = bisect_right(self._firsts_list, hash_) - 1
        part = self.parts[shard]
        place = int(part.searchsorted(np.uint64(hash_)))
        if place < len(part) and part.item(place) == hash_:
            return self._starts_list[shard] + place
        return -1

    def find_many(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """int64[n] positions, -1 where a hash is absent."""
        if hashes.dtype != np.uint64:
            raise TypeError(f"hashes are uint64, not {hashes.dtype}")
        if self._compiled is not None:
            return np.frombuffer(self._compiled.find(np.ascontiguousarray(hashes)), np.int64)
        if len(self.parts) == 1 and len(part := self.parts[0]):
            return _found(part, hashes)
        order = hashes.argsort()
        wanted = hashes[order]
        ends = [*wanted.searchsorted(self._firsts[1:]).tolist(), len(wanted)]
        found = np.full(len(hashes), -1, np.int64)
        start = 0
        for shard, end in enumerate(ends):
            part = self.parts[shard]
            if start < end and len(part):
                places = _found(part, wanted[start:end])
                places[places >= 0] += self._starts_list[shard]
                found[order[start:end]] = places
            start = end
        return found

    def place(self, position: int) -> tuple[int, int]:
        """(part, position within the part) of a global position."""
        part = bisect_right(self._starts_list, position) - 1
        return part, position - self._starts_list[part]

    def places(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Parts and positions within them of int64[n] global positions."""
        parts = self._starts.searchsorted(positions, "right") - 1
        return parts, positions - self._starts[parts]

    def pages(
        self, positions: NDArray[np.int64], first_pages: NDArray[np.int64], per_page: int, size: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Places of records of `size` bytes, `per_page` of them in a page: int64[n] pages, int64[n] offsets in them."""
        if self._compiled is not None:
            both = self._compiled.places(positions, first_pages, per_page, size)
            return np.frombuffer(both[0], np.int64), np.frombuffer(both[1], np.int64)
        parts, within = self.places(positions)
        pages, slots = np.divmod(within, per_page)
        return pages + first_pages[parts], slots * size

    def hashes(self) -> NDArray[np.uint64]:
        """All hashes in order, as one array in memory."""
        return np.concatenate(self.parts) if self.parts else np.empty(0, np.uint64)


def _found(part: NDArray[np.uint64], hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Positions in one part that is not empty, -1 where a hash is absent."""
    places = part.searchsorted(hashes)
    found: NDArray[np.uint64] = part.take(places, mode="clip")
    places[found != hashes] = -1
    return places

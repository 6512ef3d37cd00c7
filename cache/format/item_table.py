"""The item table: an item's ordinal is the position of its hash in the item directory."""

from collections.abc import Sequence
from functools import partial
from operator import eq
from pathlib import Path
from typing import NamedTuple, NewType, Self

import numpy as np
from numpy.typing import NDArray

from cache.format.directory import Directory, map_file
from cache.format.ids import hash_id, hash_ids
from cache.format.item_json import ItemJsonTexts
from cache.format.manifest import Manifest

Ordinals = NewType("Ordinals", NDArray[np.int64])
"""Positions in a generation's item table; -1 = unknown."""

ModelIndices = NewType("ModelIndices", NDArray[np.int64])
"""Positions in a bundle's own vocabulary; -1 = the model does not know the item."""


_AT_ONCE = 1 << 18


class Lent(NamedTuple):
    """The bytes of all ids, and where each begins and the last one ends."""

    ids: NDArray[np.uint8]
    offsets: NDArray[np.uint64]


class ItemTable:
    """Ids, vectors and model indices of all items of a generation, memory-mapped."""

    def __init__(
        self,
        directory: Directory,
        ids: NDArray[np.uint8],
        offsets: NDArray[np.uint64],
        vectors: NDArray[np.float32],
        model_index: NDArray[np.int64],
    ) -> None:
        self.directory = directory
        self.count = directory.count
        self.vectors = vectors
        self._model_index = model_index
        self._offsets = offsets
        self._ids = ids.data
        # Not a method of this very table: nothing here may wait for the collector of cycles, which passes over what
        # was frozen, so every flip would leave a catalogue behind.
        ids_of = partial(_ids_of, self._ids, offsets)
        longest = _longest(offsets)
        self.texts = ItemJsonTexts(self.count, ids_of, longest=longest)
        """Ids as JSON strings."""
        self.lent = Lent(ids, offsets)
        """Raw id bytes and offsets, for the compiled code."""

    @classmethod
    def open(cls, root: Path, manifest: Manifest) -> Self:
        """Maps the item files of a generation."""
        files = manifest.items
        return cls(
            Directory.open(root, manifest.entity_sets["item"]),
            map_file(root / files.ids.path, "u1"),
            map_file(root / files.offsets.path, "<u8"),
            map_file(root / files.vectors.path, "<f4", (files.count, files.dims)),
            map_file(root / files.model_index.path, "<i8"),
        )

    def raw_id(self, ordinal: int) -> bytes:
        """The id's bytes."""
        return bytes(self._ids[int(self._offsets[ordinal]) : int(self._offsets[ordinal + 1])])

    def id_of(self, ordinal: int) -> str:
        """The external id."""
        return self.raw_id(ordinal).decode()

    def ids_of(self, ordinals: NDArray[np.uint32] | Ordinals) -> list[str]:
        """External ids in the order of `ordinals`."""
        return _ids_of(self._ids, self._offsets, ordinals)

    def ordinal_of(self, raw: bytes) -> int:
        """The ordinal of an id, or -1; the id itself is compared, not only its hash."""
        ordinal = self.directory.find(hash_id(raw, self.directory.seed))
        return ordinal if ordinal >= 0 and self.raw_id(ordinal) == raw else -1

    def ordinals_of(self, raws: Sequence[bytes]) -> Ordinals:
        """int64[n] ordinals, -1 where an id is unknown."""
        if len(raws) < 8:  # below that, numpy's fixed cost per call exceeds the searches
            return Ordinals(np.array([self.ordinal_of(raw) for raw in raws], np.int64))
        ordinals = self.directory.find_many(hash_ids(raws, self.directory.seed))
        hit_indexes = np.flatnonzero(ordinals >= 0)
        named = ordinals[hit_indexes]
        hit_raws = [raws[at] for at in hit_indexes.tolist()]
        starts, ends = (
            self._offsets[named].astype(np.int64),
            self._offsets[named + 1].astype(np.int64),
        )
        if not self._are(hit_raws, starts, ends):
            stored_ids = [
                bytes(self._ids[start:end]) for start, end in zip(starts, ends, strict=True)
            ]
            is_equal = np.fromiter(map(eq, stored_ids, hit_raws), np.bool_, len(stored_ids))
            ordinals[hit_indexes[~is_equal]] = -1
        return Ordinals(ordinals)

    def _are(
        self, raws: Sequence[bytes], starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> bool:
        """True if each of `raws` equals the id bytes between its start and its end; all are compared at once."""
        if not raws:
            return True
        lengths = ends - starts
        if not np.array_equal(np.fromiter(map(len, raws), np.int64, len(raws)), lengths):
            return False
        firsts = np.cumsum(lengths) - lengths
        byte_indexes = np.arange(lengths.sum()) + np.repeat(starts - firsts, lengths)
        id_bytes = np.frombuffer(self._ids, np.uint8)[byte_indexes]
        joined: bytes = id_bytes.tobytes()
        return joined == b"".join(raws)

    def to_model(self, ordinals: Ordinals) -> ModelIndices:
        """Maps ordinals to the model's own indices, the only place that does; -1 stays -1."""
        is_known = ordinals >= 0
        return ModelIndices(
            np.where(is_known, self._model_index[np.where(is_known, ordinals, 0)], -1)
        )


def _ids_of(
    ids: memoryview, offsets: NDArray[np.uint64], ordinals: NDArray[np.uint32] | Ordinals
) -> list[str]:
    starts = offsets[ordinals].tolist()
    ends = offsets[np.asarray(ordinals, np.int64) + 1].tolist()
    return [str(ids[start:end], "utf-8") for start, end in zip(starts, ends, strict=True)]


def _longest(offsets: NDArray[np.uint64]) -> int:
    starts = range(0, len(offsets) - 1, _AT_ONCE)
    return max((int(np.diff(offsets[at : at + _AT_ONCE + 1]).max()) for at in starts), default=0)

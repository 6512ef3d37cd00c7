"""Item table: ids, vectors and model indices by ordinal (the position of an item's hash), and ids as JSON."""

from collections.abc import Callable, Sequence
from functools import partial
from operator import eq
from pathlib import Path
from typing import NamedTuple, NewType, Self

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.format.directory import Directory, map_file
from cache.format.ids import hash_id, hash_ids
from cache.format.manifest import Manifest

Ordinals = NewType("Ordinals", NDArray[np.int64])
"""Positions in a generation's item table; -1: unknown."""

ModelIndices = NewType("ModelIndices", NDArray[np.int64])
"""Positions in a bundle's own vocabulary; -1: unknown to the model."""

ONE_WIDTH_BYTES_MAX = 61
"""Largest id size in bytes for which texts are stored at one width; with longer ids most of the bytes would be
padding."""

TEXT_ROWS_MAX = 1 << 18
"""Largest number of texts in a TextTable (at most 16 MB); when it is exceeded, the table is emptied and filled
again."""

JSON_TEXTS_MAX = 1 << 18
"""Largest number of ids in ItemJsonTexts (about 25 MB); when it is exceeded, the cache is emptied and filled again."""

_OFFSETS_AT_ONCE = 1 << 18

_JSON_PAD, _JSON_END = b"\0", b"\n"
"""Bytes that no JSON string contains unescaped."""


class IdBytes(NamedTuple):
    """Ids of ordinals uint32[n, k], joined, and their offsets int32[n * k + 1] as bytes."""

    joined_ids: bytes
    offset_bytes: bytes
    ids_per_row: int

    @classmethod
    def of(cls, joined_ids: bytes, id_sizes: NDArray[np.int32]) -> Self:
        """Build from joined ids and the size of each id in bytes, int32[n, k]."""
        offsets = np.zeros(id_sizes.size + 1, np.int32)
        np.add.accumulate(id_sizes.ravel(), dtype=np.int32, out=offsets[1:])
        return cls(joined_ids, offsets.tobytes(), id_sizes.shape[-1])

    @property
    def id_sizes(self) -> NDArray[np.int32]:
        """Size of each id in bytes, int32[n, k]."""
        offsets = np.frombuffer(self.offset_bytes, np.int32)
        id_sizes: NDArray[np.int32] = offsets[1:] - offsets[:-1]
        return id_sizes.reshape(-1, self.ids_per_row) if self.ids_per_row else id_sizes.reshape(0, 0)


class SharedIdArrays(NamedTuple):
    """Bytes of all ids, and the offsets at which they start, with the end of the last one."""

    joined_ids: NDArray[np.uint8]
    id_offsets: NDArray[np.uint64]


class ItemTable:
    """Ids, vectors and model indices of all items of a generation, memory-mapped."""

    def __init__(
        self,
        directory: Directory,
        joined_ids: NDArray[np.uint8],
        id_offsets: NDArray[np.uint64],
        item_vectors: NDArray[np.float32],
        model_indices: NDArray[np.int64],
    ) -> None:
        self.directory = directory
        self.count = directory.count
        self.vectors = item_vectors
        self._model_index = model_indices
        self._offsets = id_offsets
        self._ids = joined_ids.data
        # Not a bound method: it would form a reference cycle with this table. The garbage collector ignores frozen
        # objects, so every flip would leak a catalogue.
        ids_of = partial(_ids_of, self._ids, id_offsets)
        longest_id_bytes = _longest_id_bytes(id_offsets)
        self.json_texts = ItemJsonTexts(self.count, ids_of, longest_id_bytes=longest_id_bytes)
        """Ids as JSON strings."""
        self.shared_ids = SharedIdArrays(joined_ids, id_offsets)
        """Raw id bytes and offsets, for the compiled code."""

    @classmethod
    def open(cls, generation_folder: Path, manifest: Manifest) -> Self:
        """Map the item files of a generation."""
        files = manifest.items
        return cls(
            Directory.open(generation_folder, manifest.entity_sets["item"]),
            map_file(generation_folder / files.ids.path, "u1"),
            map_file(generation_folder / files.offsets.path, "<u8"),
            map_file(generation_folder / files.vectors.path, "<f4", (files.count, files.dims)),
            map_file(generation_folder / files.model_index.path, "<i8"),
        )

    def raw_id(self, ordinal: int) -> bytes:
        """Return the bytes of the id."""
        return bytes(self._ids[int(self._offsets[ordinal]) : int(self._offsets[ordinal + 1])])

    def id_of(self, ordinal: int) -> str:
        """Return the external id."""
        return self.raw_id(ordinal).decode()

    def ids_of(self, ordinals: NDArray[np.uint32] | Ordinals) -> list[str]:
        """Return external ids in the order of `ordinals`."""
        return _ids_of(self._ids, self._offsets, ordinals)

    def ordinal_of(self, id_bytes: bytes) -> int:
        """Return the ordinal of an id, or -1; compares the id itself in addition to its hash."""
        ordinal = self.directory.find_position(hash_id(id_bytes, self.directory.seed))
        return ordinal if ordinal >= 0 and self.raw_id(ordinal) == id_bytes else -1

    def ordinals_of(self, raw_ids: Sequence[bytes]) -> Ordinals:
        """Return ordinals int64[n], -1 for an unknown id."""
        if len(raw_ids) < 8:  # with fewer ids, numpy's fixed cost per call exceeds that of single searches
            return Ordinals(np.array([self.ordinal_of(raw) for raw in raw_ids], np.int64))
        ordinals = self.directory.find_positions(hash_ids(raw_ids, self.directory.seed))
        hit_indexes = np.flatnonzero(ordinals >= 0)
        hit_ordinals = ordinals[hit_indexes]
        hit_ids = [raw_ids[hit_index] for hit_index in hit_indexes.tolist()]
        starts, ends = (self._offsets[hit_ordinals].astype(np.int64), self._offsets[hit_ordinals + 1].astype(np.int64))
        if not self._equals_stored_ids(hit_ids, starts, ends):
            stored_ids = [bytes(self._ids[start:end]) for start, end in zip(starts, ends, strict=True)]
            is_equal = np.fromiter(map(eq, stored_ids, hit_ids), np.bool_, len(stored_ids))
            ordinals[hit_indexes[~is_equal]] = -1
        return Ordinals(ordinals)

    def _equals_stored_ids(
        self, raw_ids: Sequence[bytes], id_starts: NDArray[np.int64], id_ends: NDArray[np.int64]
    ) -> bool:
        """Return whether each of `raw_ids` equals the stored bytes between its start and end.

        Compares all of them at once.
        """
        if not raw_ids:
            return True
        lengths = id_ends - id_starts
        if not np.array_equal(np.fromiter(map(len, raw_ids), np.int64, len(raw_ids)), lengths):
            return False
        joined_starts = np.cumsum(lengths) - lengths
        byte_indexes = np.arange(lengths.sum()) + np.repeat(id_starts - joined_starts, lengths)
        id_bytes = np.frombuffer(self._ids, np.uint8)[byte_indexes]
        stored_id_bytes: bytes = id_bytes.tobytes()
        return stored_id_bytes == b"".join(raw_ids)

    def model_indices_of(self, ordinals: Ordinals) -> ModelIndices:
        """Map ordinals to the model's own indices; -1 stays -1. Nothing else does this mapping."""
        is_known = ordinals >= 0
        return ModelIndices(np.where(is_known, self._model_index[np.where(is_known, ordinals, 0)], -1))


def _ids_of(
    joined_ids: memoryview, id_offsets: NDArray[np.uint64], ordinals: NDArray[np.uint32] | Ordinals
) -> list[str]:
    starts = id_offsets[ordinals].tolist()
    ends = id_offsets[np.asarray(ordinals, np.int64) + 1].tolist()
    return [str(joined_ids[start:end], "utf-8") for start, end in zip(starts, ends, strict=True)]


def _longest_id_bytes(id_offsets: NDArray[np.uint64]) -> int:
    starts = range(0, len(id_offsets) - 1, _OFFSETS_AT_ONCE)
    return max(
        (
            int(np.diff(id_offsets[first_offset_index : first_offset_index + _OFFSETS_AT_ONCE + 1]).max())
            for first_offset_index in starts
        ),
        default=0,
    )


class ItemJsonTexts:
    """Cache of ids as JSON strings by ordinal; `ids_of_ordinals` reads ids that are not cached.

    If `longest_id_bytes` is small enough, the texts are stored at one width.
    """

    def __init__(
        self,
        item_count: int,
        ids_of_ordinals: Callable[[NDArray[np.uint32]], Sequence[str]],
        longest_id_bytes: int | None = None,
    ) -> None:
        self._count = item_count
        self._ids_of = ids_of_ordinals
        self._json_by_ordinal: NDArray[np.object_] | None = None
        self._is_known = np.zeros(0, np.bool_)
        self._cached_count = 0
        self._json_rows = None
        if longest_id_bytes is not None and longest_id_bytes <= ONE_WIDTH_BYTES_MAX:
            self._json_rows = ItemJsonRows(item_count, longest_id_bytes, ids_of_ordinals)

    def json_lines(self, ordinals: NDArray[np.uint32]) -> list[bytes]:
        """Return one comma-separated line of texts per row of ordinals uint32[n, k]."""
        if self._json_rows is not None and (lines := self._json_rows.of(ordinals)) is not None:
            return lines
        return [b",".join(row) for row in self.json_rows(ordinals)]

    def json_rows(self, ordinals: NDArray[np.uint32]) -> list[list[bytes]]:
        """Return texts[n][k] for ordinals uint32[n, k], all of them below the table's count."""
        json_by_ordinal = self._json_by_ordinal
        if json_by_ordinal is None:
            json_by_ordinal = self._json_by_ordinal = np.full(self._count, None, object)
            self._is_known = np.zeros(self._count, np.bool_)
        if not self._is_known[ordinals].all():
            self._cache_new(json_by_ordinal, np.unique(ordinals))
        json_rows: list[list[bytes]] = json_by_ordinal[ordinals].tolist()
        if self._cached_count > JSON_TEXTS_MAX:
            self._json_by_ordinal, self._cached_count = None, 0
        return json_rows

    def _cache_new(self, json_by_ordinal: NDArray[np.object_], ordinals: NDArray[np.uint32]) -> None:
        new_ordinals = ordinals[~self._is_known[ordinals]]
        for ordinal, text in zip(new_ordinals.tolist(), self._ids_of(new_ordinals), strict=True):
            json_by_ordinal[ordinal] = orjson.dumps(text)
        self._is_known[new_ordinals] = True
        self._cached_count += len(new_ordinals)


class ItemJsonRows:
    """Cache that joins many lists of ids as JSON.

    The longest id has `longest_id_bytes` bytes, `ids_of_ordinals` reads missing ids.
    """

    def __init__(
        self, item_count: int, longest_id_bytes: int, ids_of_ordinals: Callable[[NDArray[np.uint32]], Sequence[str]]
    ) -> None:
        self._text_table = TextTable(item_count, longest_id_bytes + len('"",'), _JSON_PAD, _id_json, ids_of_ordinals)

    def of(self, ordinals: NDArray[np.uint32]) -> list[bytes] | None:
        """Return one comma-separated line per row of uint32[n, k], k > 0.

        Returns None if any id's JSON is longer than the id.
        """
        text_slots = self._text_table.text_slots(ordinals)
        if text_slots is None:
            return None
        row_bytes = ordinals.shape[1] * self._text_table.width
        padded_lines = np.empty((len(ordinals), row_bytes + 1), np.uint8)
        padded_texts = np.frombuffer(self._text_table.joined_texts(text_slots), np.uint8)
        padded_lines[:, :-1] = padded_texts.reshape(-1, row_bytes)
        padded_lines[:, 0] = _JSON_PAD[0]  # remove the comma before the first text
        padded_lines[:, -1] = _JSON_END[0]
        return padded_lines.tobytes().translate(None, _JSON_PAD).split(_JSON_END)[:-1]


def _id_json(item_id: str) -> bytes:
    return b"," + orjson.dumps(item_id)


class TextTable:
    """Cache of texts by item, stored at one width, so that numpy can gather many at once.

    A text has at most `text_width_bytes` bytes and is padded with `pad_byte`, which no text contains; `ids_of_ordinals`
    reads missing ids.
    """

    def __init__(
        self,
        item_count: int,
        text_width_bytes: int,
        pad_byte: bytes,
        encode_id: Callable[[str], bytes],
        ids_of_ordinals: Callable[[NDArray[np.uint32]], Sequence[str]],
    ) -> None:
        self.width = text_width_bytes
        self._pad_byte = pad_byte
        self._encode = encode_id
        self._ids_of = ids_of_ordinals
        self._capacity = min(item_count, TEXT_ROWS_MAX)
        self._slots = np.zeros(item_count, np.int32)
        """Slot of each ordinal in `_texts`; 0: not cached."""
        self._texts = np.zeros(self._capacity + 1, f"V{text_width_bytes}")
        self._filled_count = 0

    def text_slots(self, ordinals: NDArray[np.uint32]) -> NDArray[np.int32] | None:
        """Return slots of the ordinals' texts, valid until the next call.

        Returns None if a text is too long or there are too many.
        """
        found_slots = self._slots.take(ordinals)
        if np.count_nonzero(found_slots) == found_slots.size:
            return found_slots
        self._cache_new(np.unique(ordinals))
        found_slots = self._slots.take(ordinals)
        return found_slots if np.count_nonzero(found_slots) == found_slots.size else None

    def joined_texts(self, text_slots: NDArray[np.int32]) -> bytes:
        """Return the texts in these slots, joined, each with its padding."""
        return self._texts.take(text_slots).tobytes()

    def _cache_new(self, ordinals: NDArray[np.uint32]) -> None:
        new_ordinals = ordinals[self._slots[ordinals] == 0]
        if self._filled_count + len(new_ordinals) > self._capacity:
            self._slots[:], self._filled_count = 0, 0
            new_ordinals = ordinals
        for ordinal, id_ in zip(new_ordinals.tolist(), self._ids_of(new_ordinals[: self._capacity]), strict=False):
            text = self._encode(id_)
            if len(text) <= self.width:
                self._filled_count += 1
                self._texts[self._filled_count] = np.void(text.ljust(self.width, self._pad_byte))
                self._slots[ordinal] = self._filled_count

"""Memory-mapped inputs of users as of the night (histories, times, features), by position in the user directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.format.directory import Directory, map_file
from cache.format.manifest import Manifest, SeenPart


class UserInput(NamedTuple):
    """Input of a user as of the night: item ordinals int64 oldest first, their latest times, and features by column.

    Times are int64 microseconds since 1970; 0: unknown.
    """

    item_ordinals: NDArray[np.int64]
    times_us: NDArray[np.int64]
    features: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class _ShardHistories:
    history_ends: NDArray[np.uint64]
    item_ordinals: NDArray[np.uint32]
    item_times_us: NDArray[np.int64] | None
    feature_ends: NDArray[np.uint64] | None
    feature_bytes: NDArray[np.uint8] | None
    has_own_vector: NDArray[np.uint8] | None

    @classmethod
    def open(cls, generation_folder: Path, seen_part: SeenPart) -> "_ShardHistories":
        times, feature_ends, features, vector_flags = (
            seen_part.times,
            seen_part.feature_ends,
            seen_part.features,
            seen_part.brought,
        )
        return cls(
            map_file(generation_folder / seen_part.ends.path, "<u8"),
            map_file(generation_folder / seen_part.items.path, "<u4"),
            None if times is None else map_file(generation_folder / times.path, "<i8"),
            None if feature_ends is None else map_file(generation_folder / feature_ends.path, "<u8"),
            None if features is None else map_file(generation_folder / features.path, "u1"),
            None if vector_flags is None else map_file(generation_folder / vector_flags.path, "u1"),
        )


def _row_slice(row_ends: NDArray[np.uint64], shard_row: int) -> slice:
    return slice(int(row_ends[shard_row - 1]) if shard_row else 0, int(row_ends[shard_row]))


class SeenItems:
    """Item ordinals of each user's history, and other inputs if events are accepted: arrays mapped per shard."""

    def __init__(self, directory: Directory, parts: list[_ShardHistories]) -> None:
        self._directory = directory
        self._parts = parts

    @classmethod
    def open(cls, generation_folder: Path, manifest: Manifest, users: Directory) -> Self | None:
        """Map the parts that a manifest lists; None if it lists none."""
        if not manifest.seen:
            return None
        return cls(users, [_ShardHistories.open(generation_folder, part) for part in manifest.seen])

    def ordinals_of(self, user_position: int) -> NDArray[np.int64]:
        """Return the item ordinals int64 of the user at a position of the directory."""
        shard, shard_row = self._directory.locate_in_part(user_position)
        part = self._parts[shard]
        return part.item_ordinals[_row_slice(part.history_ends, shard_row)].astype(np.int64)

    def has_brought_vector(self, user_position: int) -> bool:
        """Return whether the vector of the user at a position of the directory came from a source."""
        shard, shard_row = self._directory.locate_in_part(user_position)
        vector_flags = self._parts[shard].has_own_vector
        return vector_flags is not None and bool(vector_flags[shard_row])

    def input_of(self, user_position: int) -> UserInput:
        """Return the input of the user at a position of the directory; the manifest must include events."""
        shard, shard_row = self._directory.locate_in_part(user_position)
        part = self._parts[shard]
        history_slice = _row_slice(part.history_ends, shard_row)
        item_ordinals = part.item_ordinals[history_slice].astype(np.int64)
        times_us = (
            np.zeros(len(item_ordinals), np.int64)
            if part.item_times_us is None
            else part.item_times_us[history_slice].copy()
        )
        features: dict[str, Any] = {}
        if part.feature_ends is not None and part.feature_bytes is not None:
            features_json = part.feature_bytes[_row_slice(part.feature_ends, shard_row)].tobytes()
            features = orjson.loads(features_json) if features_json else {}
        return UserInput(item_ordinals, times_us, features)

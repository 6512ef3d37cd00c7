"""Items that users had when the night was made, which leaves them out of lists; mapped, by directory position."""

from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cache.format.directory import Directory, map_file
from cache.format.manifest import Manifest


class SeenItems:
    """Ordinals that each user had, one pair of mapped arrays per shard."""

    def __init__(
        self,
        directory: Directory,
        parts: list[tuple[NDArray[np.uint64], NDArray[np.uint32]]],
    ) -> None:
        self._directory = directory
        self._parts = parts

    @classmethod
    def open(cls, root: Path, manifest: Manifest, users: Directory) -> Self | None:
        """Maps the parts that a manifest lists; None where it lists none."""
        if not manifest.seen:
            return None
        parts = [
            (map_file(root / part.ends.path, "<u8"), map_file(root / part.items.path, "<u4"))
            for part in manifest.seen
        ]
        return cls(users, parts)

    def of(self, position: int) -> NDArray[np.int64]:
        """Ordinals of the user at a position of the directory, int64."""
        shard, place = self._directory.place(position)
        ends, items = self._parts[shard]
        start = int(ends[place - 1]) if place else 0
        return items[start : int(ends[place])].astype(np.int64)

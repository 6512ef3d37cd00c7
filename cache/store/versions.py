"""Write-once versions of one value, `<folder>/<number>.json`, of which the newest is in force for every replica."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from cache.errors import Conflict
from cache.store.artefacts import ArtefactStore

WRITE_TRIES = 16

# Whatever else somebody leaves in the folder (notes, an editor's copy) is no version.
_FILE = re.compile(r"([0-9]{12})\.json")


@dataclass(frozen=True, slots=True)
class Versioned:
    """Value that is kept in versions; its number is 0 where none was written yet."""

    version: int = 0

    def to_bytes(self) -> bytes:
        """JSON, as it is stored."""
        raise NotImplementedError


Value = TypeVar("Value", bound=Versioned)


@dataclass(frozen=True, slots=True)
class Versions(Generic[Value]):
    """Versions of one kind of value in a folder; `first` is in force before any, `read` undoes `to_bytes`."""

    folder: str
    first: Value
    read: Callable[[bytes], Value]

    def read_newest_number(self, store: ArtefactStore) -> int:
        """Number of the version in force, 0 while there never was one; one listing, so cheap to poll."""
        names = store.names(self.folder)
        return max(
            (int(file_match[1]) for name in names if (file_match := _FILE.fullmatch(name))),
            default=0,
        )

    def latest(self, store: ArtefactStore) -> Value:
        """The version in force."""
        version = self.read_newest_number(store)
        raw = store.read(self._path(version)) if version else None
        return self.first if raw is None else self.read(raw)

    def change(self, store: ArtefactStore, change: Callable[[Value], Value]) -> Value:
        """Writes what `change` makes of the newest version as the next one; again on that of whoever was faster.

        What changes nothing is not written. Raises Conflict when others were faster each time.
        """
        for _ in range(WRITE_TRIES):
            latest_value = self.latest(store)
            new_value = replace(change(latest_value), version=latest_value.version)
            if new_value == latest_value:
                return latest_value
            new_value = replace(new_value, version=latest_value.version + 1)
            if store.write_once(self._path(new_value.version), new_value.to_bytes()):
                return new_value
        raise Conflict(
            f"{self.folder} changed {WRITE_TRIES} times while a version was being written; try again"
        )

    def _path(self, version: int) -> str:
        return f"{self.folder}/{version:012d}.json"

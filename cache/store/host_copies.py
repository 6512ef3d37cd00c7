"""This host's copies of a remote store's generations, and the records in the store by which others know of them.

What was erased is gone only when no host holds a copy of it. Hosts share the store and nothing else, so each records
there of which generations it has files, before the first of them comes and until the last of them is gone.
"""

import contextlib
import logging
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import orjson

from cache.errors import StoreError
from cache.format.manifest import GENERATION
from cache.store.local_files import last_change, open_draft, put_in_place
from cache.store.object_store import ObjectStore

log = logging.getLogger(__name__)

FOLDER = "copies"
_RECORDED = ".recorded"
_HOST = ".host"


class HostCopies:
    """Copies under `root`; a state folder that ends with its program is `ephemeral`, and nobody is told of it."""

    def __init__(self, root: Path, objects: ObjectStore, *, is_ephemeral: bool) -> None:
        self._root = root
        self._objects = objects
        self._is_ephemeral = is_ephemeral
        self._unrecorded: set[str] = set()

    @property
    def host(self) -> str:
        """Name of the host with an id of its state folder, stable for as long as that folder lasts."""
        path = self._root / _HOST
        if not path.exists():
            name = "".join(c if c.isalnum() or c in "._" else "-" for c in socket.gethostname())
            with open_draft(path, put_in_place) as draft_path:
                draft_path.write_text(f"{name}-{secrets.token_hex(4)}")
        return path.read_text()

    def generations(self) -> list[str]:
        """Generations of which this host has files."""
        folder = self._root / "generations"
        if not folder.is_dir():
            return []
        return sorted(
            generation_folder.name
            for generation_folder in folder.iterdir()
            if GENERATION.fullmatch(generation_folder.name)
        )

    def record(self, generation: str) -> None:
        """Tell the store that this host has, or is about to have, files of a generation; once for each."""
        marker_path = self._root / "generations" / generation / _RECORDED
        if self._is_ephemeral or marker_path.exists():
            return
        copy_record = {"host": self.host, "at": time.time()}
        self._objects.write(record_path(generation, self.host), orjson.dumps(copy_record))
        marker_path.parent.mkdir(parents=True, exist_ok=True)
        marker_path.touch()

    def try_to_record(self, generation: str) -> None:
        """Records copies for callers that may only read the store, or can wait: tried once per program if it fails."""
        if generation in self._unrecorded:
            return
        try:
            self.record(generation)
        except (StoreError, OSError) as error:
            self._unrecorded.add(generation)
            log.warning("copies of %s on this host stay unrecorded: %s", generation, error)

    def sweep(
        self, list_stored: Callable[[], Iterable[str]], in_use: Collection[str], *, cutoff_at: float
    ) -> list[str]:
        """Remove copies of generations that are not `list_stored` any more; the generations removed.

        Never one `in_use`, nor one that changed since `cutoff_at` (Unix seconds): it may be in the making here. A store
        that shows no generation at all proves nothing and loses no copy. Mapped files live on until they are closed.
        """
        copies = [generation for generation in self.generations() if generation not in in_use]
        stored_generations = set(list_stored()) if copies else set()
        removed_generations = []
        for generation in copies:
            is_needed = not stored_generations or generation in stored_generations
            if is_needed or last_change(self._root / "generations" / generation) >= cutoff_at:
                self.try_to_record(generation)
            elif self.drop(generation):
                removed_generations.append(generation)
        return removed_generations

    def drop(self, generation: str) -> bool:
        """Remove the copies of a generation, then their record; False when something of it stays for another time."""
        folder = self._root / "generations" / generation
        if not folder.is_dir():
            return True
        for path in _files(folder):
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if _files(folder):
            return False
        # The mark goes last: where a sweep dies, or may not write, the record is taken back by the next.
        if (folder / _RECORDED).exists() and not self._unrecord(generation):
            return False
        shutil.rmtree(folder, ignore_errors=True)
        return True

    def _unrecord(self, generation: str) -> bool:
        try:
            self._objects.delete(record_path(generation, self.host))
        except FileNotFoundError:
            pass
        except StoreError as error:
            log.warning("copies of %s are gone, their record is not: %s", generation, error)
            return False
        return True


def _files(folder: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError):  # another program of this host sweeps, too
        return [path for path in folder.iterdir() if path.name != _RECORDED]
    return []


def record_path(generation: str, host: str) -> str:
    """Store path of the record that a host has copies of a generation."""
    return f"{FOLDER}/{generation}/{host}.json"

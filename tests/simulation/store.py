"""The artefact store in memory: it may be slow, hang, or give half of a file, to whoever reads it in a thread."""

import random

from cache.errors import StoreError
from tests.memory import MemoryStore
from tests.simulation.threads import TAKES_S, Threads
from tests.simulation.virtual_loop import HOST

HANGS_S = 5.0
"""Seconds between two looks of who waits for a store that hangs."""


class SimulatedStore(MemoryStore):
    """One store that all hosts share."""

    def __init__(self, threads: Threads, rng: random.Random) -> None:
        super().__init__(self._take_time)
        self.hung: list[str] = []
        """Hosts for which it hangs; an empty name: for all."""
        self.is_failing = False
        self.torn = 0.0
        """Chance that a file is read while it is being written: only its beginning is there."""
        self._threads = threads
        self._rng = rng
        self.url = "memory"

    def read(self, path: str) -> bytes | None:
        """A file's bytes, perhaps not all."""
        found = super().read(path)
        if found and self.torn and self._rng.random() < self.torn:
            return found[: self._rng.randrange(len(found))]
        return found

    def names(self, path: str) -> list[str]:
        """Children of a folder, the root among them."""
        if path:
            return super().names(path)
        self._take_time("names", path)
        return sorted({each.split("/", 1)[0] for each in self.files})

    def host_copies(self) -> list[str]:
        """None: there are no hosts' folders."""
        return []

    def _take_time(self, _what: str, _path: str) -> None:
        if self._threads.current is None:
            raise AssertionError("the event loop waits for the store")
        if self._rng.random() < 0.3:
            self._threads.sleep(self._rng.random() * TAKES_S)
        host = HOST.get()
        while self.hung and ("" in self.hung or (host is not None and host.name in self.hung)):
            self._threads.sleep(HANGS_S)
        if self.is_failing:
            raise StoreError("the store does not answer")

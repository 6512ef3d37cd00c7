"""The artefact store in memory: it may be slow, hang, or return half a file to a reader in a thread."""

import random
from dataclasses import dataclass, field

from cache.errors import StoreError
from tests.memory import MemoryStore
from tests.simulation.threads import TAKES_S, Threads
from tests.simulation.virtual_loop import HOST

HANGS_S = 5.0
"""Seconds between two looks of who waits for a store that hangs."""


@dataclass
class StoreTrouble:
    """Faults of the store, for all namespaces unless one is named."""

    hung: list[str] = field(default_factory=list)
    """Hosts for which it hangs; an empty name: for all."""
    hung_namespaces: list[str] = field(default_factory=list)
    """Namespaces of which nothing can be read or written."""
    is_failing: bool = False
    torn: float = 0.0
    """Chance that a file is read while it is being written: only its beginning is there."""


class SimulatedStore(MemoryStore):
    """One namespace's part of the store that all hosts share."""

    def __init__(self, namespace: str, threads: Threads, rng: random.Random, trouble: StoreTrouble) -> None:
        super().__init__(self._take_time)
        self.trouble = trouble
        self._namespace = namespace
        self._threads = threads
        self._rng = rng
        self.url = f"memory/{namespace}"

    def read(self, path: str) -> bytes | None:
        """Return a file's bytes, or a part of them under a fault."""
        content = super().read(path)
        torn = self.trouble.torn
        if content and torn and self._rng.random() < torn:
            return content[: self._rng.randrange(len(content))]
        return content

    def names(self, path: str) -> list[str]:
        """Return the children of a folder, which may be the root."""
        if path:
            return super().names(path)
        self._take_time("names", path)
        return sorted({file_path.split("/", 1)[0] for file_path in self.files})

    def host_copy_generations(self) -> list[str]:
        """Return nothing: there are no hosts' folders."""
        return []

    def _take_time(self, _command: str, _path: str) -> None:
        if self._threads.current is None:
            raise AssertionError("the event loop waits for the store")
        if self._rng.random() < 0.3:
            self._threads.sleep(self._rng.random() * TAKES_S)
        while self._hangs():
            self._threads.sleep(HANGS_S)
        if self.trouble.is_failing:
            raise StoreError("the store does not answer")

    def _hangs(self) -> bool:
        trouble, host = self.trouble, HOST.get()
        is_of_host = host is not None and host.name in trouble.hung
        return "" in trouble.hung or is_of_host or self._namespace in trouble.hung_namespaces

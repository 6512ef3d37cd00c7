"""Memory and disk that a replica's host has left, as its heartbeat tells it."""

from collections.abc import Mapping
from pathlib import Path

from cache.process.host import disk_free_bytes, memory_available_bytes
from serving.generations.store_threads import InThread

LOOK_S = 5.0
"""Seconds between looks."""


class Host:
    """Memory and disk left, asked now and then; `left` is what was found last, empty before the first look."""

    def __init__(self, folder: Path, in_thread: InThread) -> None:
        self.left: Mapping[str, int] = {}
        self._folder = folder
        self._in_thread = in_thread

    async def look(self) -> None:
        """Looks once, beside the loop: a file system over a network may take its time."""
        self.left = await self._in_thread(_look, self._folder)


def _look(folder: Path) -> dict[str, int]:
    return {
        "memory_available_bytes": memory_available_bytes(),
        "disk_free_bytes": disk_free_bytes(folder),
    }

"""Memory and disk that a replica's host has left, as its heartbeat tells it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cache.process.host import disk_free_bytes, memory_available_bytes
from serving.generations.store_threads import InThread

LOOK_S = 5.0
"""Seconds between looks."""


@dataclass(slots=True, eq=False)
class HostHeadroom:
    """Memory and disk left, asked now and then; `headroom` is what was found last, empty before the first look."""

    folder: Path
    in_thread: InThread
    headroom: Mapping[str, int] = field(init=False, default_factory=dict)

    async def refresh(self) -> None:
        """Looks once, beside the loop: a file system over a network may take its time."""
        self.headroom = await self.in_thread(_read_headroom, self.folder)


def _read_headroom(folder: Path) -> dict[str, int]:
    return {
        "memory_available_bytes": memory_available_bytes(),
        "disk_free_bytes": disk_free_bytes(folder),
    }

"""Reads of L2 in the form that its callers use."""

from collections.abc import Sequence

from cache.l2.commands import L2Result, Read
from cache.l2.data_plane import DataPlane


async def answers_of(remote: DataPlane, reads: Sequence[Read]) -> list[L2Result]:
    """Return the answers of at least one read, one for each."""
    return await remote.submit(reads, list)

"""Reads of L2 as its callers make them."""

from collections.abc import Sequence

from cache.l2.commands import L2Result, Read
from cache.l2.data_plane import DataPlane


async def answers_of(remote: DataPlane, reads: Sequence[Read]) -> list[L2Result]:
    """Answers, one per read, of which there is at least one."""
    return await remote.submit(reads, list)

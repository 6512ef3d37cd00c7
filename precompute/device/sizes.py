"""Sizes of the kernels' work: tiles of a program, room for entries, and the stages in which users see all blocks."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from precompute.device.columns import ABREAST, LANES

FETCH_MOST = 1 << 11
"""Groups of a user that are scored: for longer lists torch's operators do."""
SPLITS = 8
"""Programs that share the items of the same users."""
SEGMENTS = SPLITS * ABREAST
"""Parts of a user's entries, each written by threads of one program."""
_RATIO, _LAST_RATIO = 6, 4
"""Blocks that have been looked at after a stage, of those before it: five times as many groups reach the limit, and
fewer in the last, which has most of the blocks."""


@dataclass(frozen=True, slots=True)
class BlockStage:
    """`blocks` blocks, multiples of `stride`; with `skip` the first of every skip + 1 was looked at before."""

    blocks: int
    stride: int
    skip: int = 0

    def block(self, at: int) -> int:
        """The block that is looked at as the `at`-th."""
        return (at + at // self.skip + 1 if self.skip else at) * self.stride


def stages_of(blocks: int, room: int) -> Iterator[BlockStage]:
    """Stages that look at every block once: first at no more than have room if all their groups are written."""
    ratios: list[int] = []
    stride, first = 1, SEGMENTS * room // LANES
    while -(-blocks // stride) > first:
        ratios.append(_RATIO if ratios else _LAST_RATIO)
        stride *= ratios[-1]
    seen = -(-blocks // stride)
    yield BlockStage(seen, stride)
    for ratio in reversed(ratios):
        stride //= ratio
        yield BlockStage(-(-blocks // stride) - seen, stride, ratio - 1)
        seen = -(-blocks // stride)


_REGISTERS = 1 << 16
"""Registers of a multiprocessor."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shares of one program: `users` by `columns` of a product, `selected` users' bounds or keys, `scored` groups.

    The first in so many `warps`, while `stages` tiles of items are on their way; `resident` of them on a multiprocessor
    at once: one multiplies while another looks at what it found.
    """

    users: int
    columns: int
    warps: int
    stages: int
    resident: int
    selected: int = 1
    scored: int = 64

    @property
    def registers(self) -> int:
        """Registers that a thread of a product may have, so that `resident` programs fit."""
        return min(255, _REGISTERS // (32 * self.warps * self.resident))


def tiles_of(users: int, width: int, device: torch.device) -> Tiles:
    """Tiles for codes of some width: users stay in registers, wide ones in shared memory, while all items pass."""
    if device.type == "cpu":  # the interpreter takes the same time for many users as for one
        few = power(min(64, users))
        return Tiles(max(16, few), 256, 4, 1, 4, selected=few, scored=1 << 15)
    if width <= 128:
        return Tiles(128, 128, 8, 3, 2)
    return Tiles(128, 128, 8, 3, 1) if width <= 256 else Tiles(64, 64, 4, 2, 1)


def units_of(device: torch.device) -> int:
    """Multiprocessors of a device."""
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def capacity_of(fetch: int) -> int:
    """Groups of a user that are kept: with room for a quarter more, where a history has the best."""
    return min(FETCH_MOST, power(fetch + fetch // 4))


def room_of(capacity: int) -> int:
    """Entries of a segment: a stage is expected to write less than half as many."""
    return max(32, capacity // 4)


def power(count: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << (max(1, count) - 1).bit_length()

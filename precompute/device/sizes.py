"""Sizes of the kernels' work: tiles of a program, room for entries, and the stages in which users see all blocks."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from precompute.device import hopper
from precompute.device.columns import ABREAST, LANES, SPLITS, BlockStage
from precompute.device.hopper import HopperKernels

FETCH_MOST = 1 << 11
"""Groups of a user that are scored: for longer lists torch's operators do."""
SEGMENTS = SPLITS * ABREAST
"""Parts of a user's entries, each written by threads of one program."""
_RATIO, _LAST_RATIO = 6, 4
"""Blocks that have been looked at after a stage, of those before it: five times as many groups reach the limit, and
fewer in the last, which has most of the blocks."""
_ESTIMATING_RATIO = 16
"""The most that such a ratio is where limits are estimated."""


def stages_of(blocks: int, room: int) -> Iterator[BlockStage]:
    """Stages that look at every block once: first at no more than have room if all their groups are written."""
    ratios: list[int] = []
    while -(-blocks // math.prod(ratios)) > _first_of(room):
        ratios.insert(0, _RATIO if ratios else _LAST_RATIO)
    return _stages(blocks, ratios, [0] * len(ratios))


def estimating_stages_of(blocks: int, room: int) -> Iterator[BlockStage]:
    """As `stages_of`, for limits that are estimated: fewer stages, and a first one that writes fewer entries.

    Blocks are ordered by the length of their items. Each stage takes the middle one of so many, so that what it finds
    is neither better nor worse than what is left.
    """
    if blocks <= _first_of(room):
        return _stages(blocks, [], [])
    part = max(2, -(-blocks // SPLITS))
    count = max(1, math.ceil(math.log(part, _ESTIMATING_RATIO)))
    ratios = [math.ceil(part ** (1 / count))] * count
    return _stages(blocks, ratios, [ratio // 2 for ratio in ratios])


def _first_of(room: int) -> int:
    """Blocks of which all groups have room."""
    return SEGMENTS * room // LANES


def _stages(blocks: int, ratios: list[int], holes: list[int]) -> Iterator[BlockStage]:
    """Yield the stages of a search, each of which looks at `ratio` - 1 times as many blocks as all before it.

    Of every `ratio` blocks the `hole`-th was looked at by an earlier stage.
    """
    stride = math.prod(ratios)
    offset = sum(math.prod(ratios[at + 1 :]) * hole for at, hole in enumerate(holes))
    searched_block_count = max(0, -(-(blocks - offset) // stride))
    yield BlockStage(searched_block_count, stride, offset)
    for ratio, hole in zip(ratios, holes, strict=True):
        stride //= ratio
        offset -= stride * hole
        count = -(-(blocks - offset) // stride)
        yield BlockStage(count - searched_block_count, stride, offset, ratio - 1, hole)
        searched_block_count = count


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
    hopper: HopperKernels | None = None
    """Kernels in CUDA C++ for some of the work, where the device has them."""

    @property
    def registers(self) -> int:
        """Registers that a thread of a product may have, so that `resident` programs fit."""
        return min(255, _REGISTERS // (32 * self.warps * self.resident))


def tiles_of(users: int, width: int, device: torch.device) -> Tiles:
    """Tiles for codes of some width: users stay in registers, wide ones in shared memory, while all items pass."""
    if device.type == "cpu":  # the interpreter takes the same time for many users as for one
        tile_users = power(min(64, users))
        return Tiles(max(16, tile_users), 256, 4, 1, 4, selected=tile_users, scored=1 << 15)
    if (kernels := hopper.kernels_for(width, device)) is not None:
        return Tiles(hopper.USERS, hopper.TILE, 12, 1, 1, hopper=kernels)
    return triton_tiles_of(width)


def triton_tiles_of(width: int) -> Tiles:
    """Tiles of the Triton kernels on a GPU."""
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


def room_of(capacity: int, *, estimating: bool = False) -> int:
    """Entries of a segment: a stage is expected to write less than half as many."""
    return max(32, capacity // (8 if estimating else 4))


def power(count: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << (max(1, count) - 1).bit_length()

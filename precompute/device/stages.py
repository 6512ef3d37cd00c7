"""Stages in which users see the blocks of all columns: few of them first, and then four times as many."""

from collections.abc import Iterator
from dataclasses import dataclass

from precompute.device.columns import ABREAST, LANES

SPLITS = 16
"""Programs that share the items of the same users."""
SEGMENTS = SPLITS * ABREAST
"""Parts of a user's entries, each written by threads of one program."""
_RATIO = 4
"""Blocks that have been looked at after a stage, of those before it: three times as many groups reach the limit."""


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
    stride, first = 1, SEGMENTS * room // LANES
    while -(-blocks // stride) > first:
        stride *= _RATIO
    seen = -(-blocks // stride)
    yield BlockStage(seen, stride)
    while stride > 1:
        stride //= _RATIO
        yield BlockStage(-(-blocks // stride) - seen, stride, _RATIO - 1)
        seen = -(-blocks // stride)

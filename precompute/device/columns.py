"""Columns and queries: items as the columns of a product, in groups that share a bound, and users as its rows."""

from dataclasses import dataclass

import numpy as np
import torch

LANES = 64
"""Groups of a block."""

ABREAST, PAIR = 4, 2
"""Neighbouring columns are a pair of one group, then of the next, four groups in turn: what a thread of a GPU holds of
a row of a product is then of one group, whose largest needs no other thread."""

SPLITS = 8
"""Programs that share the items of the same users."""

_GROUP_MOST, _GROUP_LEAST = 64, 4
_CANDIDATES = 128


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Some items, longest first, as the columns of a product, in groups of `size` that share a bound.

    Four groups have `4 * size` columns, pair by pair in turn (`columns_of`), and `LANES` groups are a block.
    `ordinals` int64 [columns], `column_by_ordinal` int64 [items + 1] the other way round (-1 where left out; the last
    entry is nobody's); `longest` and `residual` float32 [groups], rounded up; `padding` are the columns that are no
    items.
    """

    codes: torch.Tensor
    ordinals: torch.Tensor
    column_by_ordinal: torch.Tensor
    longest: torch.Tensor
    residual: torch.Tensor
    padding: torch.Tensor
    size: int
    block_longest: torch.Tensor
    """The largest `longest` of each block, float32 [blocks]."""
    block_residual: torch.Tensor
    """The largest `residual` of each block, float32 [blocks]."""

    @property
    def block(self) -> int:
        """Columns of one block: a product covers whole ones."""
        return self.size * LANES

    def columns_of(self, groups: torch.Tensor) -> torch.Tensor:
        """int64 [..., size]: the columns of some groups [...]."""
        member = torch.arange(self.size, device=groups.device)
        inside = member // PAIR * (ABREAST * PAIR) + member % PAIR
        first = groups // ABREAST * (ABREAST * self.size) + groups % ABREAST * PAIR
        return first[..., None] + inside

    def largest(self, product: torch.Tensor) -> torch.Tensor:
        """The largest of each group, [n, groups], of a product [n, columns] of whole blocks."""
        rows = product.view(len(product), -1, self.size // PAIR, ABREAST * PAIR).amax(2)
        return rows.view(len(product), -1, PAIR).amax(2)


def columns_by_rank(
    codes: torch.Tensor, length: torch.Tensor, residual: torch.Tensor, order: torch.Tensor, items: int, size: int,
) -> Columns:  # fmt: skip
    """Columns of all the given items by rank; `items` counts all there are."""
    count, device = len(order), codes.device
    total = _count_for(count, size)
    ranks = torch.arange(total, device=device).view(-1, ABREAST, size // PAIR, PAIR)
    ranks = ranks.transpose(1, 2).reshape(-1)
    is_item = ranks < count
    laid = torch.zeros((total, codes.shape[1]), dtype=codes.dtype, device=device)
    laid[is_item] = codes[ranks[is_item]]
    ordinals = torch.full((total,), items, device=device)
    ordinals[is_item] = order[ranks[is_item]]
    column_by_ordinal = torch.full((items + 1,), -1, device=device)
    column_by_ordinal[ordinals[is_item]] = is_item.nonzero()[:, 0]
    pad = (0, total - count)
    longest, group_residual = (
        torch.nn.functional.pad(item_values, pad).view(-1, size).amax(1)
        for item_values in (length, residual)
    )
    return Columns(
        laid, ordinals, column_by_ordinal, longest, group_residual, (~is_item).nonzero()[:, 0], size,
        *(group_values.view(-1, LANES).amax(1) for group_values in (longest, group_residual)),
    )  # fmt: skip


def group_of(count: int) -> int:
    """Items of a group, of so many: reading a group's K best costs about as much as its column is wide."""
    ideal_size = max(1, count // _CANDIDATES) ** 0.5  # where both are small
    return min(_GROUP_MOST, max(_GROUP_LEAST, 1 << round(float(np.log2(ideal_size)))))


def _count_for(count: int, size: int) -> int:
    """Columns of so many items, in whole blocks."""
    block = size * LANES
    return -(-max(1, count) // block) * block


@dataclass(frozen=True, slots=True)
class BlockStage:
    """Blocks that one stage of a search visits: `blocks` of those at `offset`, `offset + stride` and so on.

    If `skip` is not 0, of every skip + 1 of them the `hole`-th was visited by an earlier stage, and is left out.
    """

    blocks: int
    stride: int
    offset: int = 0
    skip: int = 0
    hole: int = 0

    def block(self, at: int) -> int:
        """Return the block that is visited as the `at`-th."""
        if self.skip:
            full, remainder = divmod(at, self.skip)
            at = full * (self.skip + 1) + remainder + (remainder >= self.hole)
        return at * self.stride + self.offset


@dataclass(frozen=True, slots=True, eq=False)
class Queries:
    """Users [n, ...] in the units of the items: `codes` half, `length` and `residual` float32 [n], rounded up.

    `size` float64 [n] are the lengths of the vectors as they came.
    """

    exact: torch.Tensor
    cosine_lengths: torch.Tensor | None
    codes: torch.Tensor
    length: torch.Tensor
    residual: torch.Tensor
    scale: torch.Tensor
    size: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of these users."""
        always = (self.exact, self.codes, self.length, self.residual, self.scale, self.size)
        return always if self.cosine_lengths is None else (*always, self.cosine_lengths)

"""Columns and queries: items as the columns of a product, in groups that share a bound, and users as its rows."""

from dataclasses import dataclass

import numpy as np
import torch

BLOCK_GROUPS = 64
"""Number of groups in a block."""

GROUPS_ABREAST, PAIR_COLUMNS = 4, 2
"""Number of groups whose columns are interleaved, and number of neighbouring columns of one group.
Columns are a pair of one group, then a pair of the next, and so on for four groups. A thread of a GPU then holds only
columns of one group in its part of a product's row, and finds their maximum without other threads."""

SPLITS = 8
"""Number of programs that share the items of the same users."""

_GROUP_ITEMS_MAX, _GROUP_ITEMS_MIN = 64, 4
_CANDIDATES = 128


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Some items, longest first, as the columns of a product, in groups of `size` that share a bound.

    The columns of four groups are interleaved (`columns_of`), and `BLOCK_GROUPS` groups are a block. `ordinals` int64
    [columns] are the items of the columns; `column_by_ordinal` int64 [items + 1] is the inverse (-1 for items that are
    left out; the last entry stands for invalid ordinals). `longest` and `residual` float32 [groups] are the largest
    length and residual of a group, rounded up; `padding` are the columns without an item.
    """

    codes: torch.Tensor
    ordinals: torch.Tensor
    column_by_ordinal: torch.Tensor
    longest: torch.Tensor
    residual: torch.Tensor
    padding: torch.Tensor
    size: int
    block_longest: torch.Tensor
    """Largest `longest` of each block, float32 [blocks]."""
    block_residual: torch.Tensor
    """Largest `residual` of each block, float32 [blocks]."""

    @property
    def block(self) -> int:
        """Number of columns of a block: a product covers whole blocks."""
        return self.size * BLOCK_GROUPS

    def columns_of(self, groups: torch.Tensor) -> torch.Tensor:
        """Return the columns int64 [..., size] of some groups [...]."""
        item_index = torch.arange(self.size, device=groups.device)
        column_offset = item_index // PAIR_COLUMNS * (GROUPS_ABREAST * PAIR_COLUMNS) + item_index % PAIR_COLUMNS
        first_column = groups // GROUPS_ABREAST * (GROUPS_ABREAST * self.size) + groups % GROUPS_ABREAST * PAIR_COLUMNS
        return first_column[..., None] + column_offset

    def largest(self, product: torch.Tensor) -> torch.Tensor:
        """Return the largest product of each group, [n, groups], from products [n, columns] of whole blocks."""
        pair_maxima = product.view(len(product), -1, self.size // PAIR_COLUMNS, GROUPS_ABREAST * PAIR_COLUMNS).amax(2)
        return pair_maxima.view(len(product), -1, PAIR_COLUMNS).amax(2)


def columns_by_rank(
    codes: torch.Tensor, length: torch.Tensor, residual: torch.Tensor, order: torch.Tensor,
    item_count: int, group_size: int,
) -> Columns:  # fmt: skip
    """Return the columns of all given items, in the order of their ranks; `item_count` is the number of all items."""
    ranked_count, device = len(order), codes.device
    column_count = _count_columns(ranked_count, group_size)
    ranks = torch.arange(column_count, device=device).view(-1, GROUPS_ABREAST, group_size // PAIR_COLUMNS, PAIR_COLUMNS)
    ranks = ranks.transpose(1, 2).reshape(-1)
    is_item = ranks < ranked_count
    laid_codes = torch.zeros((column_count, codes.shape[1]), dtype=codes.dtype, device=device)
    laid_codes[is_item] = codes[ranks[is_item]]
    ordinals = torch.full((column_count,), item_count, device=device)
    ordinals[is_item] = order[ranks[is_item]]
    column_by_ordinal = torch.full((item_count + 1,), -1, device=device)
    column_by_ordinal[ordinals[is_item]] = is_item.nonzero()[:, 0]
    pad = (0, column_count - ranked_count)
    longest, group_residual = (
        torch.nn.functional.pad(item_values, pad).view(-1, group_size).amax(1) for item_values in (length, residual)
    )
    return Columns(
        laid_codes, ordinals, column_by_ordinal, longest, group_residual, (~is_item).nonzero()[:, 0], group_size,
        *(group_values.view(-1, BLOCK_GROUPS).amax(1) for group_values in (longest, group_residual)),
    )  # fmt: skip


def choose_group_size(item_count: int) -> int:
    """Return the number of items in a group, which balances the number of groups and that of scored candidates."""
    ideal_size = max(1, item_count // _CANDIDATES) ** 0.5  # minimizes items / size + candidates * size
    return min(_GROUP_ITEMS_MAX, max(_GROUP_ITEMS_MIN, 1 << round(float(np.log2(ideal_size)))))


def _count_columns(item_count: int, group_size: int) -> int:
    """Return the number of columns for these items, in whole blocks."""
    block_columns = group_size * BLOCK_GROUPS
    return -(-max(1, item_count) // block_columns) * block_columns


@dataclass(frozen=True, slots=True)
class BlockStage:
    """Blocks that one stage of a search visits: `blocks` of those at `offset`, `offset + stride` and so on.

    If `skip` is not 0, an earlier stage visited the `hole`-th of every skip + 1 of these blocks, so it is left out.
    """

    blocks: int
    stride: int
    offset: int = 0
    skip: int = 0
    hole: int = 0

    def block(self, visit_index: int) -> int:
        """Return the `visit_index`-th block that is visited."""
        if self.skip:
            full_rounds, remainder = divmod(visit_index, self.skip)
            visit_index = full_rounds * (self.skip + 1) + remainder + (remainder >= self.hole)
        return visit_index * self.stride + self.offset


@dataclass(frozen=True, slots=True, eq=False)
class Queries:
    """Users [n, ...], scaled for the products: `codes` half, `length` and `residual` float32 [n], rounded up.

    `size` float64 [n] are the lengths of the unscaled vectors.
    """

    exact: torch.Tensor
    cosine_lengths: torch.Tensor | None
    codes: torch.Tensor
    length: torch.Tensor
    residual: torch.Tensor
    scale: torch.Tensor
    size: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors of these users."""
        required_tensors = (self.exact, self.codes, self.length, self.residual, self.scale, self.size)
        return required_tensors if self.cosine_lengths is None else (*required_tensors, self.cosine_lengths)

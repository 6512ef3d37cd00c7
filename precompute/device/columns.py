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
    """Some items, longest first, as the columns of a product, in groups of `group_size` that share a bound.

    The columns of four groups are interleaved (`columns_of`), and `BLOCK_GROUPS` groups are a block. `item_ordinals`
    int64 [columns] are the items of the columns; `column_by_ordinal` int64 [items + 1] is the inverse (-1 for items
    that are left out; the last entry stands for invalid ordinals). `longest_by_group` and `residual_by_group` float32
    [groups] are the largest length and residual of a group, rounded up; `padding_columns` are the columns without an
    item.
    """

    item_codes: torch.Tensor
    item_ordinals: torch.Tensor
    column_by_ordinal: torch.Tensor
    longest_by_group: torch.Tensor
    residual_by_group: torch.Tensor
    padding_columns: torch.Tensor
    group_size: int
    longest_by_block: torch.Tensor
    """Largest `longest_by_group` of each block, float32 [blocks]."""
    residual_by_block: torch.Tensor
    """Largest `residual_by_group` of each block, float32 [blocks]."""

    @property
    def block_column_count(self) -> int:
        """Number of columns of a block: a product covers whole blocks."""
        return self.group_size * BLOCK_GROUPS

    def columns_of(self, group_numbers: torch.Tensor) -> torch.Tensor:
        """Return the columns int64 [..., size] of some groups [...]."""
        item_index = torch.arange(self.group_size, device=group_numbers.device)
        column_offset = item_index // PAIR_COLUMNS * (GROUPS_ABREAST * PAIR_COLUMNS) + item_index % PAIR_COLUMNS
        first_column = (
            group_numbers // GROUPS_ABREAST * (GROUPS_ABREAST * self.group_size)
            + group_numbers % GROUPS_ABREAST * PAIR_COLUMNS
        )
        return first_column[..., None] + column_offset

    def largest_by_group(self, products: torch.Tensor) -> torch.Tensor:
        """Return the largest product of each group, [n, groups], from products [n, columns] of whole blocks."""
        pair_maxima = products.view(
            len(products), -1, self.group_size // PAIR_COLUMNS, GROUPS_ABREAST * PAIR_COLUMNS
        ).amax(2)
        return pair_maxima.view(len(products), -1, PAIR_COLUMNS).amax(2)


def columns_by_rank(
    item_codes: torch.Tensor, item_lengths: torch.Tensor, item_residuals: torch.Tensor, ordinals_by_rank: torch.Tensor,
    item_count: int, group_size: int,
) -> Columns:  # fmt: skip
    """Return the columns of all given items, in the order of their ranks; `item_count` is the number of all items."""
    ranked_count, device = len(ordinals_by_rank), item_codes.device
    column_count = _count_columns(ranked_count, group_size)
    ranks = torch.arange(column_count, device=device).view(-1, GROUPS_ABREAST, group_size // PAIR_COLUMNS, PAIR_COLUMNS)
    ranks = ranks.transpose(1, 2).reshape(-1)
    is_item = ranks < ranked_count
    laid_codes = torch.zeros((column_count, item_codes.shape[1]), dtype=item_codes.dtype, device=device)
    laid_codes[is_item] = item_codes[ranks[is_item]]
    ordinals = torch.full((column_count,), item_count, device=device)
    ordinals[is_item] = ordinals_by_rank[ranks[is_item]]
    column_by_ordinal = torch.full((item_count + 1,), -1, device=device)
    column_by_ordinal[ordinals[is_item]] = is_item.nonzero()[:, 0]
    pad = (0, column_count - ranked_count)
    longest, group_residual = (
        torch.nn.functional.pad(item_values, pad).view(-1, group_size).amax(1)
        for item_values in (item_lengths, item_residuals)
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
    """Blocks that one stage of a search visits: `block_count` of them, from `first_block` on, `block_stride` apart.

    If `skip` is not 0, an earlier stage visited the `hole`-th of every skip + 1 of these blocks, so it is left out.
    """

    block_count: int
    block_stride: int
    first_block: int = 0
    skip: int = 0
    hole: int = 0

    def block(self, visit_index: int) -> int:
        """Return the `visit_index`-th block that is visited."""
        if self.skip:
            full_rounds, remainder = divmod(visit_index, self.skip)
            visit_index = full_rounds * (self.skip + 1) + remainder + (remainder >= self.hole)
        return visit_index * self.block_stride + self.first_block


@dataclass(frozen=True, slots=True, eq=False)
class Queries:
    """Users [n, ...], scaled for the products: codes half, lengths and residual lengths float32 [n], rounded up.

    `unscaled_lengths` float64 [n] are the lengths of the unscaled vectors.
    """

    exact_vectors: torch.Tensor
    cosine_lengths: torch.Tensor | None
    user_codes: torch.Tensor
    scaled_lengths: torch.Tensor
    residual_lengths: torch.Tensor
    user_scales: torch.Tensor
    unscaled_lengths: torch.Tensor

    def all_tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors of these users."""
        required_tensors = (
            self.exact_vectors,
            self.user_codes,
            self.scaled_lengths,
            self.residual_lengths,
            self.user_scales,
            self.unscaled_lengths,
        )
        return required_tensors if self.cosine_lengths is None else (*required_tensors, self.cosine_lengths)

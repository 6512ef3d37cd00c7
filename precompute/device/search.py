"""Search of some users against all columns: half-precision products select candidates, float32 scores decide.

Items are ordered by falling length, in groups. A group's largest product plus its rounding error bounds all its scores,
so the groups with the best bounds have the best items. Every omitted item has a bound: a list is certain if its last
exact score is above all of them. Later tiles are multiplied only for users whose list a shorter item can still enter
(as LEMP and FEXIPRO prune by length: Teflioudi et al. 2015, Li et al. 2017).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from precompute.device.columns import Columns, Queries
from precompute.device.items import WORST, DeviceItems, exact_dots, pack_keys, unpack_scores

_FIRST_TILE_DIVISOR = 8
"""Divisor of the number of items for the first tile, with the longest items; each further tile doubles the number."""
_ROWS_MAX, _ROWS_MIN = 4096, 256
_SPLIT_BLOCKS = 32
_NUMBERS_AT_ONCE_BY_DEVICE = {"cuda": 1 << 26, "cpu": 1 << 20}
"""Number of float32 numbers of candidates gathered at once: much work for a GPU, little enough for a processor's
caches."""
_NO_SCORE = float("-inf")


@dataclass(frozen=True, slots=True)
class SearchShape:
    """Size of one piece of work: rows of users by columns of products, and the candidates for each user."""

    user_count: int
    column_count: int
    candidates_per_user: int
    is_estimating: bool = False
    """True if the kernels estimate the last candidate's score.
    That is faster, and nearly all lists are certain if good items are spread over all lengths at random."""


@dataclass(slots=True, eq=False)
class _BestCandidates:
    """Best candidates so far, [n, fetch], and the highest bound of all omitted ones, [n]."""

    upper_bounds: torch.Tensor
    lower_bounds: torch.Tensor
    column_numbers: torch.Tensor
    highest_omitted_bounds: torch.Tensor

    def merge(
        self,
        user_rows: torch.Tensor,
        upper_bounds: torch.Tensor,
        lower_bounds: torch.Tensor,
        column_numbers: torch.Tensor,
    ) -> None:
        """Add candidates [rows, any number] to those of some rows, and drop those with the lowest bounds."""
        uppers = torch.cat([self.upper_bounds[user_rows], upper_bounds], 1)
        best_uppers, best_indices = uppers.topk(self.upper_bounds.shape[1], 1)
        self.upper_bounds[user_rows] = best_uppers
        self.lower_bounds[user_rows] = torch.cat([self.lower_bounds[user_rows], lower_bounds], 1).gather(
            1, best_indices
        )
        self.column_numbers[user_rows] = torch.cat([self.column_numbers[user_rows], column_numbers], 1).gather(
            1, best_indices
        )
        self.leave_out(user_rows, best_uppers[:, -1])

    def leave_out(self, user_rows: torch.Tensor, omitted_bounds: torch.Tensor) -> None:
        """Raise the bounds of omitted candidates of some rows to these [rows], if they are higher."""
        self.highest_omitted_bounds[user_rows] = torch.maximum(self.highest_omitted_bounds[user_rows], omitted_bounds)


def split_into_tiles(columns: Columns, tile_columns_max: int) -> Iterator[slice]:
    """Yield whole blocks of at most `tile_columns_max` columns; with many columns the first tiles are small."""
    column_count, block_columns = len(columns.item_ordinals), columns.block_column_count
    first_column = 0
    while first_column < column_count:
        width = tile_columns_max // block_columns * block_columns or block_columns
        if column_count >= _SPLIT_BLOCKS * block_columns:
            width = min(width, max(first_column, column_count // _FIRST_TILE_DIVISOR // block_columns * block_columns))
        yield slice(first_column, min(first_column + width, column_count))
        first_column += width


def shape_of(items: DeviceItems, columns: Columns, fetch: int, room_bytes: int) -> SearchShape:
    """Return the shape of a search: the widest product that fits into memory, with as many users as fill the device."""
    column_count, block_columns = len(columns.item_ordinals), columns.block_column_count
    bytes_per_column = items.item_codes.element_size() + 16 / columns.group_size
    fetch = min(fetch, column_count)
    bytes_per_user = min(fetch * columns.group_size, column_count) * 28 + fetch * 64
    full_width_users = int(room_bytes // (bytes_per_user + column_count * bytes_per_column))
    if full_width_users >= _ROWS_MIN:
        return SearchShape(min(full_width_users, _ROWS_MAX), column_count, fetch)
    width = int((room_bytes / _ROWS_MIN - bytes_per_user) / bytes_per_column) // block_columns * block_columns
    if width >= block_columns:
        return SearchShape(_ROWS_MIN, width, fetch)
    return SearchShape(
        max(1, int(room_bytes // (bytes_per_user + block_columns * bytes_per_column))), block_columns, fetch
    )


def search(
    items: DeviceItems,
    columns: Columns,
    queries: Queries,
    excluded_pairs: tuple[torch.Tensor, torch.Tensor],
    k: int,
    shape: SearchShape,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (keys int64 [n, k] descending, WORST if there is no item; certain bool [n]).

    `excluded_pairs` are pairs (row, ordinal) that must not appear; len(items.order) stands for an invalid ordinal.
    """
    user_count, device = len(queries.user_codes), queries.user_codes.device
    fetch = min(shape.candidates_per_user, len(columns.item_ordinals))
    candidates = _BestCandidates(
        torch.full((user_count, fetch), _NO_SCORE, device=device),
        torch.full((user_count, fetch), _NO_SCORE, device=device),
        torch.zeros((user_count, fetch), dtype=torch.int64, device=device),
        torch.full((user_count,), _NO_SCORE, device=device),
    )
    excluded_rows, excluded_columns = (excluded_pairs[0], columns.column_by_ordinal[excluded_pairs[1]])
    user_rows = torch.arange(user_count, device=device)
    for tile in split_into_tiles(columns, shape.column_count):
        if tile.start:
            user_rows = user_rows[_can_still_change(items, columns, queries, candidates, user_rows, tile, k)]
        if not len(user_rows):
            break
        _scan_tile(items, columns, queries, candidates, user_rows, (excluded_rows, excluded_columns), tile)
    best_keys = select_best_keys(_compute_exact_keys(items, columns, queries, candidates), k)
    return best_keys, find_certain_lists(items, queries, best_keys, candidates.highest_omitted_bounds)


def select_best_keys(sort_keys: torch.Tensor, k: int) -> torch.Tensor:
    """Return the best k of keys int64 [n, any number], descending, padded with WORST."""
    best_keys = sort_keys.topk(min(k, sort_keys.shape[1]), 1)[0]
    return torch.nn.functional.pad(best_keys, (0, k - best_keys.shape[1]), value=WORST)


def find_certain_lists(
    items: DeviceItems, queries: Queries, best_keys: torch.Tensor, left_out: torch.Tensor
) -> torch.Tensor:
    """Return bool [n]: True if no omitted item (`highest_omitted_bounds` [n]) can be as good as the last best key."""
    last_scores = unpack_scores(best_keys[:, -1]) * queries.user_scales * items.vector_scale
    return (left_out == _NO_SCORE) | ((best_keys[:, -1] != WORST) & (last_scores > left_out))


def _can_still_change(
    items: DeviceItems,
    columns: Columns,
    queries: Queries,
    candidates: _BestCandidates,
    user_rows: torch.Tensor,
    tile: slice,
    k: int,
) -> torch.Tensor:
    """Return a mask of the rows [m] whose lists an item of this tile or a later one can still enter."""
    if candidates.lower_bounds.shape[1] < k:
        return torch.ones(len(user_rows), dtype=torch.bool, device=user_rows.device)
    group = tile.start // columns.group_size
    first_group = slice(group, group + 1)  # groups are ordered by falling length
    length, residual = queries.scaled_lengths[user_rows], queries.residual_lengths[user_rows]
    reachable_scores = (
        length * columns.longest_by_group[group] + items.score_margins(columns, first_group, length, residual)[:, 0]
    )
    kth_scores = candidates.lower_bounds[user_rows].topk(k, 1)[0][:, -1]
    return kth_scores <= reachable_scores


def _scan_tile(
    items: DeviceItems,
    columns: Columns,
    queries: Queries,
    candidates: _BestCandidates,
    user_rows: torch.Tensor,
    hidden_pairs: tuple[torch.Tensor, torch.Tensor],
    tile: slice,
) -> None:
    """Multiply some rows by a tile's columns, and keep the candidates that may be among the best."""
    group_size, fetch = columns.group_size, candidates.upper_bounds.shape[1]
    product = queries.user_codes[user_rows] @ columns.item_codes[tile].T
    _hide(product, columns, hidden_pairs, user_rows, len(queries.user_codes), tile)
    groups = slice(tile.start // group_size, tile.stop // group_size)
    margin = items.score_margins(
        columns, groups, queries.scaled_lengths[user_rows], queries.residual_lengths[user_rows]
    )
    bounds = columns.largest_by_group(product).to(torch.float32) + margin
    best_bounds, group_indices = bounds.topk(min(fetch, bounds.shape[1]), 1)
    if best_bounds.shape[1] < bounds.shape[1]:
        candidates.leave_out(user_rows, best_bounds[:, -1])
    column = columns.columns_of(group_indices).view(len(user_rows), -1)
    scores = product.gather(1, column).to(torch.float32)
    slack = margin.gather(1, group_indices).repeat_interleave(group_size, 1)
    upper, candidate_index = (scores + slack).topk(min(fetch, column.shape[1]), 1)
    if upper.shape[1] < column.shape[1]:
        candidates.leave_out(user_rows, upper[:, -1])
    lower = upper - 2 * slack.gather(1, candidate_index)
    candidates.merge(user_rows, upper, lower, column.gather(1, candidate_index) + tile.start)


def _hide(
    products: torch.Tensor,
    columns: Columns,
    hidden_pairs: tuple[torch.Tensor, torch.Tensor],
    user_rows: torch.Tensor,
    user_count: int,
    tile: slice,
) -> None:
    """Set the scores of exclusions and of padding to minus infinity."""
    excluded_rows, excluded_columns = hidden_pairs
    product_row_by_user = torch.full((user_count,), -1, device=user_rows.device)
    product_row_by_user[user_rows] = torch.arange(len(user_rows), device=user_rows.device)
    excluded_rows = product_row_by_user[excluded_rows]
    is_in_tile = (excluded_columns >= tile.start) & (excluded_columns < tile.stop) & (excluded_rows >= 0)
    products[excluded_rows[is_in_tile], excluded_columns[is_in_tile] - tile.start] = _NO_SCORE
    padding = columns.padding_columns
    padding = padding[(padding >= tile.start) & (padding < tile.stop)]
    products.index_fill_(1, padding - tile.start, _NO_SCORE)


def _compute_exact_keys(
    items: DeviceItems, columns: Columns, queries: Queries, candidates: _BestCandidates
) -> torch.Tensor:
    """Return the keys of all candidates, int64 [n, fetch], by their exact scores."""
    user_count, fetch = candidates.column_numbers.shape
    keys = torch.empty((user_count, fetch), dtype=torch.int64, device=candidates.column_numbers.device)
    numbers_at_once = _NUMBERS_AT_ONCE_BY_DEVICE[candidates.column_numbers.device.type]
    rows_at_once = max(1, numbers_at_once // (fetch * queries.exact_vectors[0].numel()))
    for first_row in range(0, user_count, rows_at_once):
        user_rows = slice(first_row, first_row + rows_at_once)
        ordinals = columns.item_ordinals[candidates.column_numbers[user_rows]]
        ordinals = ordinals.clamp(
            max=len(items.ordinals_by_length) - 1
        )  # columns of padding have an ordinal beyond the items
        scores = exact_dots(queries.exact_vectors[user_rows], items.exact_vectors[ordinals])
        if items.cosine_lengths is not None and queries.cosine_lengths is not None:
            length_products = items.cosine_lengths[ordinals] * queries.cosine_lengths[user_rows, None]
            scores = torch.where(length_products > 0, scores / length_products, torch.zeros_like(scores))
        keys[user_rows] = pack_keys(scores, ordinals)
    return keys.masked_fill_(candidates.upper_bounds == _NO_SCORE, WORST)

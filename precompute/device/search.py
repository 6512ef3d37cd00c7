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
    """Size of one piece of work: `users` rows by `columns` of products, `fetch` candidates for each user."""

    users: int
    columns: int
    fetch: int
    estimating: bool = False
    """True if the kernels estimate the last candidate's score.
    That is faster, and nearly all lists are certain if good items are spread over all lengths at random."""


@dataclass(slots=True, eq=False)
class _BestCandidates:
    """Best candidates so far, [n, fetch], and the highest bound of all omitted ones, [n]."""

    upper: torch.Tensor
    lower: torch.Tensor
    column: torch.Tensor
    left_out: torch.Tensor

    def merge(self, rows: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor, column: torch.Tensor) -> None:
        """Add candidates [rows, any number] to those of some rows, and drop those with the lowest bounds."""
        uppers = torch.cat([self.upper[rows], upper], 1)
        best_uppers, best_indices = uppers.topk(self.upper.shape[1], 1)
        self.upper[rows] = best_uppers
        self.lower[rows] = torch.cat([self.lower[rows], lower], 1).gather(1, best_indices)
        self.column[rows] = torch.cat([self.column[rows], column], 1).gather(1, best_indices)
        self.leave_out(rows, best_uppers[:, -1])

    def leave_out(self, rows: torch.Tensor, bounds: torch.Tensor) -> None:
        """Raise the bounds of omitted candidates of some rows to these [rows], if they are higher."""
        self.left_out[rows] = torch.maximum(self.left_out[rows], bounds)


def split_into_tiles(columns: Columns, max_columns: int) -> Iterator[slice]:
    """Yield whole blocks of columns, at most `max_columns` at a time; with many columns the first tiles are small."""
    column_count, block_columns = len(columns.ordinals), columns.block
    first_column = 0
    while first_column < column_count:
        width = max_columns // block_columns * block_columns or block_columns
        if column_count >= _SPLIT_BLOCKS * block_columns:
            width = min(width, max(first_column, column_count // _FIRST_TILE_DIVISOR // block_columns * block_columns))
        yield slice(first_column, min(first_column + width, column_count))
        first_column += width


def shape_of(items: DeviceItems, columns: Columns, fetch: int, room_bytes: int) -> SearchShape:
    """Return the shape of a search: the widest product that fits into memory, with as many users as fill the device."""
    column_count, block_columns = len(columns.ordinals), columns.block
    bytes_per_column = items.codes.element_size() + 16 / columns.size
    fetch = min(fetch, column_count)
    bytes_per_user = min(fetch * columns.size, column_count) * 28 + fetch * 64
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
    user_count, device = len(queries.codes), queries.codes.device
    fetch = min(shape.fetch, len(columns.ordinals))
    candidates = _BestCandidates(
        torch.full((user_count, fetch), _NO_SCORE, device=device),
        torch.full((user_count, fetch), _NO_SCORE, device=device),
        torch.zeros((user_count, fetch), dtype=torch.int64, device=device),
        torch.full((user_count,), _NO_SCORE, device=device),
    )
    excluded_rows, excluded_columns = (excluded_pairs[0], columns.column_by_ordinal[excluded_pairs[1]])
    user_rows = torch.arange(user_count, device=device)
    for tile in split_into_tiles(columns, shape.columns):
        if tile.start:
            user_rows = user_rows[_can_still_change(items, columns, queries, candidates, user_rows, tile, k)]
        if not len(user_rows):
            break
        _scan_tile(items, columns, queries, candidates, user_rows, (excluded_rows, excluded_columns), tile)
    best_keys = select_best_keys(_compute_exact_keys(items, columns, queries, candidates), k)
    return best_keys, find_certain_lists(items, queries, best_keys, candidates.left_out)


def select_best_keys(keys: torch.Tensor, k: int) -> torch.Tensor:
    """Return the best k of keys int64 [n, any number], descending, padded with WORST."""
    best_keys = keys.topk(min(k, keys.shape[1]), 1)[0]
    return torch.nn.functional.pad(best_keys, (0, k - best_keys.shape[1]), value=WORST)


def find_certain_lists(
    items: DeviceItems, queries: Queries, best_keys: torch.Tensor, left_out: torch.Tensor
) -> torch.Tensor:
    """Return bool [n]: True if no omitted item, bounded by `left_out` [n], can be as good as the last best key."""
    last_scores = unpack_scores(best_keys[:, -1]) * queries.scale * items.scale
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
    if candidates.lower.shape[1] < k:
        return torch.ones(len(user_rows), dtype=torch.bool, device=user_rows.device)
    group = tile.start // columns.size
    first_group = slice(group, group + 1)  # groups are ordered by falling length
    length, residual = queries.length[user_rows], queries.residual[user_rows]
    reachable_scores = length * columns.longest[group] + items.margin(columns, first_group, length, residual)[:, 0]
    kth_scores = candidates.lower[user_rows].topk(k, 1)[0][:, -1]
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
    group_size, fetch = columns.size, candidates.upper.shape[1]
    product = queries.codes[user_rows] @ columns.codes[tile].T
    _hide(product, columns, hidden_pairs, user_rows, len(queries.codes), tile)
    groups = slice(tile.start // group_size, tile.stop // group_size)
    margin = items.margin(columns, groups, queries.length[user_rows], queries.residual[user_rows])
    bounds = columns.largest(product).to(torch.float32) + margin
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
    product: torch.Tensor,
    columns: Columns,
    hidden_pairs: tuple[torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    user_count: int,
    tile: slice,
) -> None:
    """Set the scores of exclusions and of padding to minus infinity."""
    excluded_rows, excluded_columns = hidden_pairs
    product_row_by_user = torch.full((user_count,), -1, device=rows.device)
    product_row_by_user[rows] = torch.arange(len(rows), device=rows.device)
    excluded_rows = product_row_by_user[excluded_rows]
    is_in_tile = (excluded_columns >= tile.start) & (excluded_columns < tile.stop) & (excluded_rows >= 0)
    product[excluded_rows[is_in_tile], excluded_columns[is_in_tile] - tile.start] = _NO_SCORE
    padding = columns.padding
    padding = padding[(padding >= tile.start) & (padding < tile.stop)]
    product.index_fill_(1, padding - tile.start, _NO_SCORE)


def _compute_exact_keys(
    items: DeviceItems, columns: Columns, queries: Queries, candidates: _BestCandidates
) -> torch.Tensor:
    """Return the keys of all candidates, int64 [n, fetch], by their exact scores."""
    user_count, fetch = candidates.column.shape
    keys = torch.empty((user_count, fetch), dtype=torch.int64, device=candidates.column.device)
    numbers_at_once = _NUMBERS_AT_ONCE_BY_DEVICE[candidates.column.device.type]
    rows_at_once = max(1, numbers_at_once // (fetch * queries.exact[0].numel()))
    for first_row in range(0, user_count, rows_at_once):
        user_rows = slice(first_row, first_row + rows_at_once)
        ordinals = columns.ordinals[candidates.column[user_rows]]
        ordinals = ordinals.clamp(max=len(items.order) - 1)  # columns of padding have an ordinal beyond the items
        scores = exact_dots(queries.exact[user_rows], items.exact[ordinals])
        if items.cosine_lengths is not None and queries.cosine_lengths is not None:
            length_products = items.cosine_lengths[ordinals] * queries.cosine_lengths[user_rows, None]
            scores = torch.where(length_products > 0, scores / length_products, torch.zeros_like(scores))
        keys[user_rows] = pack_keys(scores, ordinals)
    return keys.masked_fill_(candidates.upper == _NO_SCORE, WORST)

"""Some users against all columns: half-precision products choose candidates, float32 decides, and it is certified.

Items lie longest first in groups; a group's largest product plus what rounding may hide bounds all its scores, so the
best groups hold the best items. What was left out anywhere has a bound: a list is certain where its last exact score
is above all of them. Later tiles are multiplied only for users whose list a shorter item can still enter (as LEMP and
FEXIPRO prune by length: Teflioudi et al. 2015, Li et al. 2017).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from precompute.device.columns import Columns, Queries
from precompute.device.items import WORST, DeviceItems, exact_dots, keys_of, scores_of

_FIRST = 8
"""Fraction of the items, the longest ones, that is multiplied first; each tile then doubles the number."""
_ROWS_MOST, _ROWS_LEAST = 4096, 256
_SPLIT_BLOCKS = 32
_EXACT_NUMBERS = {"cuda": 1 << 26, "cpu": 1 << 20}
"""Count of float32 numbers of candidates gathered at once: a GPU wants long steps, a processor what its caches hold."""
_NO_SCORE = float("-inf")


@dataclass(frozen=True, slots=True)
class SearchShape:
    """Size of one piece of work: `users` rows by `columns` of products, `fetch` candidates for each user."""

    users: int
    columns: int
    fetch: int
    estimating: bool = False
    """True if the kernels estimate what the last candidate's score will be: faster, and certain of nearly all lists
    where good items are spread over all lengths as by chance."""


@dataclass(slots=True, eq=False)
class _BestCandidates:
    """Best candidates so far, [n, fetch], and the highest bound of all omitted ones, [n]."""

    upper: torch.Tensor
    lower: torch.Tensor
    column: torch.Tensor
    left_out: torch.Tensor

    def merge(
        self, rows: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor, column: torch.Tensor
    ) -> None:
        """New candidates [rows, any number] join those of some rows; the worst bounds go."""
        uppers = torch.cat([self.upper[rows], upper], 1)
        best_uppers, at = uppers.topk(self.upper.shape[1], 1)
        self.upper[rows] = best_uppers
        self.lower[rows] = torch.cat([self.lower[rows], lower], 1).gather(1, at)
        self.column[rows] = torch.cat([self.column[rows], column], 1).gather(1, at)
        self.leave_out(rows, best_uppers[:, -1])

    def leave_out(self, rows: torch.Tensor, bounds: torch.Tensor) -> None:
        """Raise the bounds of omitted candidates of some rows to these [rows], where they are higher."""
        self.left_out[rows] = torch.maximum(self.left_out[rows], bounds)


def tiles(columns: Columns, max_columns: int) -> Iterator[slice]:
    """Whole blocks of columns, at most `max_columns` at a time; small ones first where there are many."""
    total, block = len(columns.ordinals), columns.block
    start = 0
    while start < total:
        width = max_columns // block * block or block
        if total >= _SPLIT_BLOCKS * block:
            width = min(width, max(start, total // _FIRST // block * block))
        yield slice(start, min(start + width, total))
        start += width


def shape_of(items: DeviceItems, columns: Columns, fetch: int, room_bytes: int) -> SearchShape:
    """Shape of a search: the widest product that has room, of as many users as fill the device."""
    total, block = len(columns.ordinals), columns.block
    per_column = items.codes.element_size() + 16 / columns.size
    fetch = min(fetch, total)
    per_user = min(fetch * columns.size, total) * 28 + fetch * 64
    full_width_users = int(room_bytes // (per_user + total * per_column))
    if full_width_users >= _ROWS_LEAST:
        return SearchShape(min(full_width_users, _ROWS_MOST), total, fetch)
    width = int((room_bytes / _ROWS_LEAST - per_user) / per_column) // block * block
    if width >= block:
        return SearchShape(_ROWS_LEAST, width, fetch)
    return SearchShape(max(1, int(room_bytes // (per_user + block * per_column))), block, fetch)


def search(
    items: DeviceItems,
    columns: Columns,
    queries: Queries,
    excluded_pairs: tuple[torch.Tensor, torch.Tensor],
    k: int,
    shape: SearchShape,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys int64 [n, k] descending, WORST where there is no item; certain bool [n]).

    `excluded_pairs` are pairs (row, ordinal) that may not appear; an ordinal that is not one is len(items.order).
    """
    users, device = len(queries.codes), queries.codes.device
    fetch = min(shape.fetch, len(columns.ordinals))
    candidates = _BestCandidates(
        torch.full((users, fetch), _NO_SCORE, device=device),
        torch.full((users, fetch), _NO_SCORE, device=device),
        torch.zeros((users, fetch), dtype=torch.int64, device=device),
        torch.full((users,), _NO_SCORE, device=device),
    )
    owners, hidden = excluded_pairs[0], columns.column_by_ordinal[excluded_pairs[1]]
    rows = torch.arange(users, device=device)
    for tile in tiles(columns, shape.columns):
        if tile.start:
            rows = rows[_still_open(items, columns, queries, candidates, rows, tile, k)]
        if not len(rows):
            break
        _scan_tile(items, columns, queries, candidates, rows, (owners, hidden), tile)
    best_keys = best_of(_exact(items, columns, queries, candidates), k)
    return best_keys, certain(items, queries, best_keys, candidates.left_out)


def best_of(keys: torch.Tensor, k: int) -> torch.Tensor:
    """The best k of keys int64 [n, any number], descending, WORST where there are no more."""
    best_keys = keys.topk(min(k, keys.shape[1]), 1)[0]
    return torch.nn.functional.pad(best_keys, (0, k - best_keys.shape[1]), value=WORST)


def certain(
    items: DeviceItems, queries: Queries, best_keys: torch.Tensor, left_out: torch.Tensor
) -> torch.Tensor:
    """bool [n]: nothing left out, no score above `left_out` [n], is as good as the last of the best keys [n, k]."""
    last = scores_of(best_keys[:, -1]) * queries.scale * items.scale
    return (left_out == _NO_SCORE) | ((best_keys[:, -1] != WORST) & (last > left_out))


def _still_open(
    items: DeviceItems,
    columns: Columns,
    queries: Queries,
    candidates: _BestCandidates,
    rows: torch.Tensor,
    tile: slice,
    k: int,
) -> torch.Tensor:
    """Mask of the rows [m] that an item of this tile, or of one behind it, can still enter."""
    if candidates.lower.shape[1] < k:
        return torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    group = tile.start // columns.size
    first = slice(group, group + 1)  # no later group is longer
    length, residual = queries.length[rows], queries.residual[rows]
    reach = length * columns.longest[group] + items.margin(columns, first, length, residual)[:, 0]
    kth = candidates.lower[rows].topk(k, 1)[0][:, -1]
    return kth <= reach


def _scan_tile(
    items: DeviceItems,
    columns: Columns,
    queries: Queries,
    candidates: _BestCandidates,
    rows: torch.Tensor,
    hidden_pairs: tuple[torch.Tensor, torch.Tensor],
    tile: slice,
) -> None:
    """Multiply some rows by a tile's columns, and keep the candidates that may be among the best."""
    size, fetch = columns.size, candidates.upper.shape[1]
    product = queries.codes[rows] @ columns.codes[tile].T
    _hide(product, columns, hidden_pairs, rows, len(queries.codes), tile)
    groups = slice(tile.start // size, tile.stop // size)
    margin = items.margin(columns, groups, queries.length[rows], queries.residual[rows])
    bounds = columns.largest(product).to(torch.float32) + margin
    best_bounds, at = bounds.topk(min(fetch, bounds.shape[1]), 1)
    if best_bounds.shape[1] < bounds.shape[1]:
        candidates.leave_out(rows, best_bounds[:, -1])
    column = columns.columns_of(at).view(len(rows), -1)
    scores = product.gather(1, column).to(torch.float32)
    slack = margin.gather(1, at).repeat_interleave(size, 1)
    upper, candidate_index = (scores + slack).topk(min(fetch, column.shape[1]), 1)
    if upper.shape[1] < column.shape[1]:
        candidates.leave_out(rows, upper[:, -1])
    lower = upper - 2 * slack.gather(1, candidate_index)
    candidates.merge(rows, upper, lower, column.gather(1, candidate_index) + tile.start)


def _hide(
    product: torch.Tensor,
    columns: Columns,
    hidden_pairs: tuple[torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    users: int,
    tile: slice,
) -> None:
    """Set the scores of exclusions and of padding to those of no item."""
    owners, hidden = hidden_pairs
    where = torch.full((users,), -1, device=rows.device)
    where[rows] = torch.arange(len(rows), device=rows.device)
    owners = where[owners]
    inside = (hidden >= tile.start) & (hidden < tile.stop) & (owners >= 0)
    product[owners[inside], hidden[inside] - tile.start] = _NO_SCORE
    padding = columns.padding
    padding = padding[(padding >= tile.start) & (padding < tile.stop)]
    product.index_fill_(1, padding - tile.start, _NO_SCORE)


def _exact(
    items: DeviceItems, columns: Columns, queries: Queries, candidates: _BestCandidates
) -> torch.Tensor:
    """The keys of all candidates, int64 [n, fetch], by their exact scores."""
    users, fetch = candidates.column.shape
    keys = torch.empty((users, fetch), dtype=torch.int64, device=candidates.column.device)
    numbers = _EXACT_NUMBERS[candidates.column.device.type]
    step = max(1, numbers // (fetch * queries.exact[0].numel()))
    for start in range(0, users, step):
        rows = slice(start, start + step)
        ordinals = columns.ordinals[candidates.column[rows]]
        ordinals = ordinals.clamp(max=len(items.order) - 1)  # of columns that are no items
        scores = exact_dots(queries.exact[rows], items.exact[ordinals])
        if items.cosine_lengths is not None and queries.cosine_lengths is not None:
            lengths = items.cosine_lengths[ordinals] * queries.cosine_lengths[rows, None]
            scores = torch.where(lengths > 0, scores / lengths, torch.zeros_like(scores))
        keys[rows] = keys_of(scores, ordinals)
    return keys.masked_fill_(candidates.upper == _NO_SCORE, WORST)

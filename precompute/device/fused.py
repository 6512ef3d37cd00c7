"""Search of all columns for some users by the kernels: as `precompute.device.search`, the product never written.

For every group of a few items a bound is kept in half precision, rounded up; a user's best groups are found through the
highest bound of each block, their items scored in float32, and what was left out has the last group's bound. The few
lists that this does not make certain (masses of ties, scores too close for half precision) are left to `search`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cache.model.ranking import Metric, unit
from cache.topk.flat import Compared
from precompute.device import kernels
from precompute.device import search as operators
from precompute.device.items import LANES, UNDERFLOW, Columns, DeviceItems, Queries
from precompute.device.search import SearchShape, judged

FETCH_MOST = 1 << 11
"""Groups of a user that are scored: for longer lists torch's operators do."""
BLOCKS_MOST = 1 << 14
WIDTH_MOST = 512
_ROWS_MOST = 1 << 13
_PROGRAMS = 1 << 13
"""Programs of a large product, many times those under way at once: the last to end then wait for few."""
_NO_ITEMS = -3e4
"""Weight of a group of padding: within half precision, and below every bound."""
_NOTHING = float("-inf")
_PROBED = 1500
_ROUNDED = 2.0**-9
"""More than rounding up adds to a bound of at most one and a little."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shares of one program: `users` of a product, `selected` users' groups in steps of `step`, `scored` pairs.

    The first in so many `warps`, while `stages` tiles of items are on their way.
    """

    users: int
    warps: int
    stages: int
    selected: int = 1
    step: int = 1024
    scored: int = 128


def tiles_of(users: int, width: int, device: torch.device) -> Tiles:
    """Tiles for codes of some width: users stay in shared memory while all items pass."""
    if device.type == "cpu":  # the interpreter takes the same time for many users as for one
        return Tiles(
            min(64, max(16, _power(users))), 4, 1, min(64, _power(users)), 1 << 13, 1 << 15
        )
    return Tiles(128, 8, 3) if width <= 256 else Tiles(64, 4, 2)


def group_of(items: int) -> int:
    """Items of a group: few, as all of a chosen group are scored, but no more blocks than are looked at."""
    return max(4, _power(-(-items // (BLOCKS_MOST * LANES))))


def fits(items: DeviceItems, columns: Columns, fetch: int) -> bool:
    """True if the kernels are made for products of this width, in so many blocks, with so many candidates."""
    blocks = len(columns.ordinals) // columns.block
    return (
        items.codes.dtype == torch.float16
        and items.codes.shape[1] <= WIDTH_MOST
        and blocks <= BLOCKS_MOST
        and fetch <= FETCH_MOST
    )


def shape_of(items: DeviceItems, columns: Columns, fetch: int, room_bytes: int) -> SearchShape:
    """Shape of a search: all columns, and as many users as have room."""
    total = len(columns.ordinals)
    capacity = _power(fetch)
    bounds = total // columns.size * 2 + total // columns.block * 2
    candidates = capacity * (8 + columns.size * 8 * 2)
    vectors = items.exact[0].numel() * 4 * 3
    users = max(1, min(_ROWS_MOST, room_bytes // (bounds + candidates + vectors)))
    return SearchShape(users, total, fetch)


def search(
    items: DeviceItems,
    columns: Columns,
    queries: Queries,
    gone: tuple[torch.Tensor, torch.Tensor],
    k: int,
    shape: SearchShape,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys int64 [n, k] descending, WORST where there is no item; certain bool [n]), as `search.search` gives them."""
    users, width = queries.codes.shape
    tiles = tiles_of(users, width, queries.codes.device)
    hidden = hidden_of(gone, users, len(items.order))
    # An item that is excluded lifts its group's bound like any other.
    capacity = _power(shape.fetch)
    wanted = (hidden[0].diff() + shape.fetch).clamp(max=capacity).to(torch.int32)
    bounds, blockwise = bounds_of(items, columns, queries, tiles)
    chosen, left_out = chosen_of(bounds, blockwise, wanted, capacity, tiles)
    keys = keys_of(items, columns, queries, hidden, chosen, tiles)
    return judged(items, queries, keys, left_out, k)


def bounds_of(
    items: DeviceItems, columns: Columns, queries: Queries, tiles: Tiles
) -> tuple[torch.Tensor, torch.Tensor]:
    """(bounds half [n, groups], the highest of each block half [n, blocks]): no score of an item there is higher."""
    users, width = queries.codes.shape
    device = queries.codes.device
    blocks = len(columns.ordinals) // columns.block
    bounds = torch.empty((users, blocks * LANES), dtype=torch.float16, device=device)
    blockwise = torch.empty((users, blocks), dtype=torch.float16, device=device)
    longest, rest = columns.longest, columns.residual
    weight = rest + items.error * (longest + rest)
    weight = torch.where(longest > 0, weight, _NO_ITEMS)
    rows = -(-users // tiles.users)
    each = max(1, -(-blocks * rows // _PROGRAMS))
    kernels.maxima[rows, -(-blocks // each)](
        queries.codes, queries.length + queries.residual, queries.residual, columns.codes, weight, longest,
        bounds, blockwise, users, blocks, each, UNDERFLOW,
        width=width, depth=max(16, _power(width)), height=tiles.users, lanes=LANES, size=columns.size,
        stages=tiles.stages, num_warps=tiles.warps,
    )  # fmt: skip
    return bounds, blockwise


def chosen_of(
    bounds: torch.Tensor, blockwise: torch.Tensor, wanted: torch.Tensor, capacity: int, tiles: Tiles
) -> tuple[torch.Tensor, torch.Tensor]:
    """(groups int32 [n, capacity] in no order, -1 where there are no more; the highest bound left out float32 [n]).

    The `wanted` [n] highest, through the blocks that have any of them; ties beside them while there is room.
    """
    users, blocks = blockwise.shape
    left_out = torch.full((users,), _NOTHING, device=bounds.device)
    limits = torch.zeros((users,), dtype=torch.int32, device=bounds.device)
    parents, chosen = (
        torch.empty((users, capacity), dtype=torch.int32, device=bounds.device) for _ in range(2)
    )
    for values, out, wide, span in (
        (blockwise, parents, blocks, 0),
        (bounds, chosen, min(capacity, blocks) * LANES, LANES),
    ):
        kernels.best_of[-(-users // tiles.selected),](
            values, parents, wanted, limits, out, left_out, users, wide, values.shape[1],
            height=tiles.selected, capacity=capacity, span=span, step=min(tiles.step, _power(wide)), num_warps=4,
        )  # fmt: skip
    return chosen, left_out


def keys_of(
    items: DeviceItems,
    columns: Columns,
    queries: Queries,
    hidden: tuple[torch.Tensor, torch.Tensor],
    chosen: torch.Tensor,
    tiles: Tiles,
) -> torch.Tensor:
    """Exact keys int64 [n, capacity * size] of the items of chosen groups int32 [n, capacity]; WORST if hidden."""
    users, capacity = chosen.shape
    keys = torch.empty((users, capacity * columns.size), dtype=torch.int64, device=chosen.device)
    part = min(tiles.scored, _power(keys.numel()))
    nobody = queries.exact  # where there are no lengths none are read
    kernels.exact[-(-keys.numel() // part),](
        queries.exact, nobody if queries.own is None else queries.own,
        items.exact, nobody if items.own is None else items.own,
        chosen, columns.ordinals, *hidden, keys, keys.numel(), len(items.order), len(hidden[1]).bit_length(),
        steps=items.exact.shape[1], lanes=LANES, size=columns.size, capacity=capacity, part=part,
        cosine=items.own is not None, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return keys


def agrees(dims: int, device: torch.device) -> bool:
    """True if on this device the kernels' bounds hold, and their lists have the bits of the operators'.

    Tried on positive numbers, whose partial sums are as large as they get.
    """
    rng = np.random.default_rng(dims)
    vectors = rng.random((_PROBED, dims), np.float32)
    vectors *= np.exp(rng.standard_normal((_PROBED, 1))).astype(np.float32)
    users = rng.random((8, dims), np.float32)
    pairs = torch.arange(8, device=device), torch.arange(8, device=device) * 3
    metrics: tuple[tuple[Metric, NDArray[np.float32]], ...] = (
        ("inner_product", users),
        ("cosine", unit(users)),
    )
    for metric, compared in metrics:
        of_metric = Compared.of(vectors, metric)
        held = DeviceItems.of(of_metric, device, torch.float16, group_of(_PROBED))
        queries = held.queries(users, compared)
        shape = SearchShape(len(users), len(held.whole.ordinals), 48)
        keys, certain = search(held, held.whole, queries, pairs, 16, shape)
        wanted, also = operators.search(held, held.whole, queries, pairs, 16, shape)
        both = certain & also
        if not (certain.any() and torch.equal(keys[both], wanted[both]) and _hold(held, queries)):
            return False
    return True


def _hold(items: DeviceItems, queries: Queries) -> bool:
    columns, users, device = items.whole, len(queries.codes), queries.codes.device
    found, _ = bounds_of(items, columns, queries, tiles_of(users, queries.codes.shape[1], device))
    products = queries.codes.double() @ columns.codes.double().T
    highest = products.view(users, -1, columns.size, LANES).amax(2).view(users, -1)
    margin = items.margin(columns, slice(None), queries.length, queries.residual)
    allowed = items.error * queries.length[:, None] * columns.longest
    over = found.double() - highest - margin
    return bool(((over >= -allowed) & (over <= allowed + _ROUNDED))[:, columns.longest > 0].all())


def hidden_of(
    gone: tuple[torch.Tensor, torch.Tensor], users: int, items: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(starts int64 [users + 1], ordinals int64 ascending in each row) of pairs (row, ordinal up to `items`)."""
    pairs = (gone[0] * (items + 1) + gone[1]).sort()[0]
    edges = torch.arange(users + 1, device=pairs.device) * (items + 1)
    return torch.searchsorted(pairs, edges), pairs % (items + 1)


def _power(count: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << (max(1, count) - 1).bit_length()

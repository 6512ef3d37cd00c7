"""Search of all columns for some users by the kernels: as `precompute.device.search`, the product never written.

For every group of a few items a product has a bound. Users first see few of all blocks, and what they find there is the
limit that groups of the next, larger share have to reach to be written down at all; so a user keeps a few hundred of
them. Their items are scored in float32, and what was left out has the last limit as its bound. The few lists that this
does not make certain (masses of ties, scores too close for half precision) are left to `search`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cache.model.ranking import Metric, unit
from cache.topk.flat import Compared
from precompute.device import kernels
from precompute.device import search as operators
from precompute.device.columns import ABREAST, LANES, Columns
from precompute.device.items import UNDERFLOW, DeviceItems, Queries
from precompute.device.search import SearchShape, best_of, certain
from precompute.device.stages import SEGMENTS, SPLITS, BlockStage, stages_of

FETCH_MOST = 1 << 11
"""Groups of a user that are scored: for longer lists torch's operators do."""
GROUP = 4
"""Items of a group: few, as all of a kept group are scored."""
WIDTH_MOST = 512
_ROWS_MOST = 1 << 14
_LEADING_MOST = 1 << 10
"""Keys that the kernel sorts: for more torch is as fast."""
_HALVINGS = 14
"""Halvings of a span of bounds, after which few groups are left between its ends."""
NONE = -1
"""Entry of nothing."""
_NOTHING = float("-inf")
_PROBED = 9000
"""Items, of two stages."""
_ROUNDED = 2.0**-9
"""More than a bound of at most one and a little may be above its product and the margin."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shares of one program: `users` by `columns` of a product, `selected` users' bounds or keys, `scored` pairs.

    The first in so many `warps`, while `stages` tiles of items are on their way; `resident` of them on a multiprocessor
    at once: one multiplies while another looks at what it found.
    """

    users: int
    columns: int
    warps: int
    stages: int
    resident: int
    selected: int = 1
    scored: int = 128


def tiles_of(users: int, width: int, device: torch.device) -> Tiles:
    """Tiles for codes of some width: users stay in shared memory while all items pass."""
    if device.type == "cpu":  # the interpreter takes the same time for many users as for one
        few = _power(min(64, users))
        return Tiles(max(16, few), 256, 4, 1, 4, selected=few, scored=1 << 15)
    if width <= 128:
        return Tiles(128, 128, 8, 2, 2)
    return Tiles(128, 64, 8, 3, 1) if width <= 256 else Tiles(64, 64, 4, 2, 1)


def fits(items: DeviceItems, columns: Columns, fetch: int) -> bool:
    """True if the kernels are made for products of this width, in groups of this size, with so many candidates."""
    return (
        items.codes.dtype == torch.float16
        and items.codes.shape[1] <= WIDTH_MOST
        and columns.size == GROUP
        and fetch <= FETCH_MOST
    )


def shape_of(items: DeviceItems, columns: Columns, fetch: int, room_bytes: int) -> SearchShape:
    """Shape of a search: all columns, and as many users as have room, or are under way at once."""
    capacity, device = _power(fetch), items.codes.device
    entries = SEGMENTS * room_of(capacity) * 8
    candidates = capacity * (8 + columns.size * 8 * 2)
    vectors = columns.exact[0, :, 0].numel() * 4 * 3
    tiles = tiles_of(_ROWS_MOST, items.codes.shape[1], device)
    most = max(1, units_of(device) * tiles.resident // 4) * tiles.users  # whole rounds of programs
    users = max(1, min(_ROWS_MOST, most, room_bytes // (entries + candidates + vectors)))
    return SearchShape(users, len(columns.ordinals), fetch)


def units_of(device: torch.device) -> int:
    """Multiprocessors of a device."""
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


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
    kept, left_out = kept_of(items, columns, queries, wanted, capacity, tiles)
    best = leading_of(keys_of(items, columns, queries, hidden, kept, tiles), k, tiles)
    return best, certain(items, queries, best, left_out)


def kept_of(
    items: DeviceItems,
    columns: Columns,
    queries: Queries,
    wanted: torch.Tensor,
    capacity: int,
    tiles: Tiles,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(bounds and groups int64 [n, capacity] in no order, NONE where there are no more; the highest left out [n]).

    The `wanted` [n] highest, and what is close to the last of them while there is room.
    """
    users, room = len(queries.codes), room_of(capacity)
    device = queries.codes.device
    entries = torch.empty((users, SEGMENTS, room), dtype=torch.int64, device=device)
    counts = torch.empty((users, SEGMENTS), dtype=torch.int32, device=device)
    kept = torch.full((users, capacity), NONE, device=device)
    limits, left_out = (torch.full((users,), _NOTHING, device=device) for _ in range(2))
    weight = items.weight(columns.block_longest, columns.block_residual)
    for stage in stages_of(len(columns.ordinals) // columns.block, room):
        above(columns, weight, queries, limits, stage, (entries, counts), tiles)
        kernels.keep[-(-users // tiles.selected),](
            entries, counts, wanted, kept, limits, left_out, users,
            height=tiles.selected, segments=SEGMENTS, room=room, capacity=capacity,
            halvings=_HALVINGS, num_warps=max(4, room // 16),
        )  # fmt: skip
    return kept, left_out


def room_of(capacity: int) -> int:
    """Entries of a segment: a stage is expected to write less than half as many."""
    return max(32, capacity // 8)


def above(
    columns: Columns,
    weight: torch.Tensor,
    queries: Queries,
    limits: torch.Tensor,
    stage: BlockStage,
    out: tuple[torch.Tensor, torch.Tensor],
    tiles: Tiles,
) -> None:
    """Writes the bounds of one stage that reach the users' limits [n], as (entries, counts): see `kernels.above`.

    `weight` float32 [blocks] is that of the blocks (`DeviceItems.weight`).
    """
    entries, counts = out
    users, width = queries.codes.shape
    real = len(columns.longest) - len(columns.padding) // columns.size
    kernels.above[-(-users // tiles.users), SPLITS](
        queries.codes, queries.length + queries.residual, queries.residual, limits, columns.codes, weight,
        columns.block_longest, entries, counts, users, real, stage.blocks, stage.stride, UNDERFLOW,
        width=width, depth=max(16, _power(width)), height=tiles.users, lanes=LANES, size=columns.size,
        tile=max(ABREAST * columns.size, min(tiles.columns, columns.block)), splits=SPLITS, room=entries.shape[2],
        stages=tiles.stages, skip=stage.skip, inline=queries.codes.device.type == "cuda", num_warps=tiles.warps,
    )  # fmt: skip


def keys_of(
    items: DeviceItems,
    columns: Columns,
    queries: Queries,
    hidden: tuple[torch.Tensor, torch.Tensor],
    kept: torch.Tensor,
    tiles: Tiles,
) -> torch.Tensor:
    """Exact keys int64 [n, capacity * size] of the items of kept groups int64 [n, capacity]; WORST if hidden."""
    users, capacity = kept.shape
    keys = torch.empty((users, capacity * columns.size), dtype=torch.int64, device=kept.device)
    part = min(tiles.scored, _power(keys.numel()))
    nobody = queries.exact  # where there are no lengths none are read
    kernels.exact[-(-keys.numel() // part),](
        queries.exact, nobody if queries.own is None else queries.own,
        columns.exact, nobody if items.own is None else items.own,
        kept, columns.ordinals, *hidden, keys, keys.numel(), len(items.order), len(hidden[1]).bit_length(),
        steps=columns.exact.shape[1], size=columns.size, capacity=capacity, part=part,
        cosine=items.own is not None, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return keys


def leading_of(keys: torch.Tensor, k: int, tiles: Tiles) -> torch.Tensor:
    """The best k of keys int64 [n, a power of two], descending, WORST where there are no more."""
    users, wide = keys.shape
    is_slow = keys.device.type == "cpu" and wide > 64  # the interpreter sorts for half a minute
    if wide > _LEADING_MOST or k > wide or is_slow:
        return best_of(keys, k)
    best = torch.empty((users, k), dtype=torch.int64, device=keys.device)
    kernels.leading[-(-users // tiles.selected),](
        keys, best, users, k, height=tiles.selected, wide=wide, most=max(2, _power(k)), num_warps=1
    )
    return best


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
        held = DeviceItems.of(of_metric, device, torch.float16, GROUP)
        queries = held.queries(users, compared)
        shape = SearchShape(len(users), len(held.whole.ordinals), 48)
        keys, sure = search(held, held.whole, queries, pairs, 16, shape)
        wanted, also = operators.search(held, held.whole, queries, pairs, 16, shape)
        both = sure & also
        if not (sure.any() and torch.equal(keys[both], wanted[both]) and _hold(held, queries)):
            return False
    return True


def bounds_of(items: DeviceItems, columns: Columns, queries: Queries, tiles: Tiles) -> torch.Tensor:
    """Bounds float32 [n, groups] of few columns, in one stage; minus infinity for groups of padding."""
    users, device = len(queries.codes), queries.codes.device
    blocks = len(columns.ordinals) // columns.block
    room = -(-blocks // SPLITS) * LANES // ABREAST
    (stage,) = stages_of(blocks, room)
    entries = torch.empty((users, SEGMENTS, room), dtype=torch.int64, device=device)
    counts = torch.empty((users, SEGMENTS), dtype=torch.int32, device=device)
    limits = torch.full((users,), _NOTHING, device=device)
    weight = items.weight(columns.block_longest, columns.block_residual)
    above(columns, weight, queries, limits, stage, (entries, counts), tiles)
    found = torch.full((users, len(columns.longest)), _NOTHING, device=device)
    user, segment, slot = (torch.arange(room, device=device) < counts[..., None]).nonzero(
        as_tuple=True
    )
    written = entries[user, segment, slot]
    found[user, written & 0xFFFFFFFF] = (written >> 32).to(torch.int32).view(torch.float32)
    return found


def _hold(items: DeviceItems, queries: Queries) -> bool:
    columns, users, device = items.whole, len(queries.codes), queries.codes.device
    found = bounds_of(items, columns, queries, tiles_of(users, queries.codes.shape[1], device))
    highest = columns.largest(queries.codes.double() @ columns.codes.double().T)
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

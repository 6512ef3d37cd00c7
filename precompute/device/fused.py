"""Fused search of all columns by the kernels, which never write the product, with the sizes of their work.

For every group of a few items a product has a bound. A first pass over few items of each user sets a limit that groups
of the next, larger pass have to reach to be written at all; so a user keeps a few hundred of them. Their items are
scored in float32, and all omitted groups have the last limit as their bound. The few lists that this does not make
certain (masses of ties, scores too close for half precision) are left to `precompute.device.search`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from triton.tools.tensor_descriptor import TensorDescriptor

from cache.model.ranking import Metric, unit_rows
from cache.topk.flat import ComparableItems
from precompute.device import hopper
from precompute.device import search as operators
from precompute.device.columns import ABREAST, LANES, SPLITS, BlockStage, Columns, Queries
from precompute.device.hopper import HopperKernels
from precompute.device.items import UNDERFLOW, DeviceItems
from precompute.device.kernels import above, keep
from precompute.device.kernels import keys as kernels_of_keys
from precompute.device.search import SearchShape, best_of, certain

GROUP = 4
"""Items of a group: few, as all of a kept group are scored."""

NO_GROUP = -1
"""Number of a missing group."""

FETCH_MOST = 1 << 11
"""Largest number of a user's scored groups: longer lists use torch's operators."""

WIDTH_MOST = 512

SEGMENTS = SPLITS * ABREAST
"""Parts of a user's entries, each written by threads of one program."""

HALVINGS = 12
"""Halvings of a span of bounds, after which few groups are left between its ends."""

EXACT_REGISTERS = 64
"""Registers of a thread that adds exact sums: with more the compiler reads all ahead, and keeps most in memory."""

_STAGE_RATIO, _LAST_STAGE_RATIO = 6, 4
"""Blocks checked by the end of a stage, as a ratio of those before it: five times as many groups reach the limit, and
fewer in the last, which has most of the blocks."""

_ESTIMATING_RATIO = 16
"""Largest such ratio with estimated limits."""

_REGISTERS = 1 << 16
"""Registers of a multiprocessor."""

_NEAR_MOST = 256
"""Largest number of a user's code that stays in registers."""

_ROWS_MOST = 1 << 16
_ROUNDS = 4
"""Programs of a search as a multiple of those that run at once: preparing the next one takes less than running it."""

_LEADING_MOST = 1 << 10
"""Largest number of keys that the kernel sorts: for more torch is as fast."""

_UNROLLED = 8
"""Steps of an exact sum whose numbers are read at once."""

_ROUND_UP = 1 + 1e-6
_DEVIATIONS = 3
"""Standard deviations by which the rank of an estimated limit exceeds the number expected in the sample."""

_ENTRY_BYTES = 16
_NO_SCORE = float("-inf")
_PROBED = 9000
"""Number of items of the probe: two stages."""

_SHORTEST = 0.25
"""Smallest length of a scaled user."""

_ROUNDED = 2.0**-9
"""Largest difference between a bound, which is at most a little above one, and its product plus margin."""


def fits(items: DeviceItems, columns: Columns, fetch: int) -> bool:
    """True if the kernels support products of this width, groups of this size, and so many candidates."""
    return (
        items.codes.dtype == torch.float16
        and items.codes.shape[1] <= WIDTH_MOST
        and columns.size == GROUP
        and fetch <= FETCH_MOST
    )


def shape_of(items: DeviceItems, columns: Columns, fetch: int, room_bytes: int) -> SearchShape:
    """Return the shape of a search: all columns, and as many users as fit into memory, or run at once."""
    capacity, device = capacity_of(fetch), items.codes.device
    entries = SEGMENTS * room_of(capacity) * _ENTRY_BYTES
    candidates = capacity * (_ENTRY_BYTES + columns.size * 8 * 2)
    vectors = items.exact[0].numel() * 4 * 3
    tiles = tiles_of(_ROWS_MOST, items.codes.shape[1], device)
    max_users = max(1, _ROUNDS * units_of(device) * tiles.resident // SPLITS) * tiles.users
    users = max(1, min(_ROWS_MOST, max_users, room_bytes // (entries + candidates + vectors)))
    return SearchShape(users, len(columns.ordinals), fetch)


def search(
    items: DeviceItems,
    columns: Columns,
    queries: Queries,
    excluded_pairs: tuple[torch.Tensor, torch.Tensor],
    k: int,
    shape: SearchShape,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (keys int64 [n, k] descending, padded with WORST; certain bool [n]), like `search.search`."""
    users, width = queries.codes.shape
    tiles = tiles_of(users, width, queries.codes.device)
    hidden = hidden_of(excluded_pairs, users, len(items.order))
    # An item that is excluded lifts its group's bound like any other. A quarter is for what is close to the last.
    capacity = capacity_of(shape.fetch)
    required_counts = (
        (hidden[0].diff() + shape.fetch).clamp(max=capacity - capacity // 4).to(torch.int32)
    )
    kept_entries, left_out = kept_of(
        items, columns, queries, required_counts, capacity, tiles, estimating=shape.estimating
    )
    best_keys = leading_of(
        keys_of(items, columns, queries, hidden, kept_entries, left_out, tiles), k, tiles
    )
    return best_keys, certain(items, queries, best_keys, left_out)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes of one program: `users` by `columns` of a product, `selected` users' bounds or keys, `scored` groups.

    A product runs in `warps` warps, while `stages` tiles of items are on their way; `resident` programs fit a
    multiprocessor at once: one multiplies while another checks its bounds.
    """

    users: int
    columns: int
    warps: int
    stages: int
    resident: int
    selected: int = 1
    scored: int = 64
    hopper: HopperKernels | None = None
    """Kernels in CUDA C++ for some of the work, if the device supports them."""

    @property
    def registers(self) -> int:
        """Registers that a thread of a product may have, so that `resident` programs fit."""
        return min(255, _REGISTERS // (32 * self.warps * self.resident))


def kept_of(
    items: DeviceItems,
    columns: Columns,
    queries: Queries,
    required_counts: torch.Tensor,
    capacity: int,
    tiles: Tiles,
    *,
    estimating: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (entries of `kernels.above` int32 [n, capacity, 4], unordered; the highest omitted bound [n]).

    The `required_counts` [n] highest, and those close to the last of them while there is room. With estimated limits,
    fewer may be found of items that are not spread over the blocks as by chance: the omitted bound shows it.
    """
    users, device = len(queries.codes), queries.codes.device
    room = room_of(capacity, estimating=estimating)
    blocks, searched_block_count = len(columns.ordinals) // columns.block, 0
    entries = torch.empty((users, SEGMENTS, room, 4), dtype=torch.int32, device=device)
    kept_entries = torch.full((users, capacity, 4), NO_GROUP, dtype=torch.int32, device=device)
    counts = torch.empty((users, SEGMENTS), dtype=torch.int32, device=device)
    limits, left_out = (torch.full((users,), _NO_SCORE, device=device) for _ in range(2))
    weight = weight_of(items, columns, queries)
    for stage in (estimating_stages_of if estimating else stages_of)(blocks, room):
        write_entries(columns, weight, queries, limits, stage, entries, counts, tiles)
        searched_block_count += stage.blocks
        rank = (
            rank_of(required_counts, searched_block_count / blocks)
            if estimating
            else required_counts
        )
        if tiles.hopper is not None and room == hopper.KEEP_ROOM and capacity <= hopper.KEEP_MOST:
            tiles.hopper.keep(entries, counts, rank, kept_entries, limits, left_out, HALVINGS)
            continue
        keep.keep[-(-users // tiles.selected),](
            entries, counts, rank, kept_entries, limits, left_out, users,
            height=tiles.selected, segments=SEGMENTS, room=room, capacity=capacity,
            halvings=HALVINGS, num_warps=max(1, min(16, capacity // 32)),
        )  # fmt: skip
    return kept_entries, left_out


def rank_of(required_counts: torch.Tensor, sample_fraction: float) -> torch.Tensor:
    """Return ranks int32 [n] in a sample of all groups whose better part has the `required_counts` [n] best of all.

    Of those the sample has a Poisson number, seldom more than `_DEVIATIONS` standard deviations above its mean.
    """
    mean = required_counts * sample_fraction
    rank = torch.ceil(mean + _DEVIATIONS * mean.sqrt() + _DEVIATIONS).to(torch.int32)
    return torch.minimum(rank, required_counts)


def weight_of(items: DeviceItems, columns: Columns, queries: Queries) -> torch.Tensor:
    """Return float32 [blocks] which, times a user's length and residual, is at least the user's margin.

    Except for underflow. The margin is `DeviceItems.margin`, with the largest share of residual of any of the users.
    Users too short to be scaled like all others are left out: their products are zero, or their lists are not
    certain.
    """
    parts = queries.residual / (queries.length + queries.residual)
    part = torch.where(queries.length >= _SHORTEST, parts, 0.0).amax()
    weight = items.weight(columns.block_longest, columns.block_residual)
    return (weight + part * columns.block_longest) * _ROUND_UP


def write_entries(
    columns: Columns,
    weight: torch.Tensor,
    queries: Queries,
    limits: torch.Tensor,
    stage: BlockStage,
    entries: torch.Tensor,
    counts: torch.Tensor,
    tiles: Tiles,
) -> None:
    """Write the bounds of one stage that reach the users' limits [n], as entries and counts: see `kernels.above`.

    `weight` float32 [blocks] is that of the blocks (`weight_of`).
    """
    users, width = queries.codes.shape
    reach = queries.length + queries.residual
    if tiles.hopper is not None:
        tiles.hopper.write_entries(
            queries.codes, reach, limits, columns, weight, stage, entries, counts, UNDERFLOW
        )
        return
    real = len(columns.longest) - len(columns.padding) // columns.size
    tile, depth = (
        max(ABREAST * columns.size, min(tiles.columns, columns.block)),
        max(16, power_of_two(width)),
    )
    is_gpu = queries.codes.device.type == "cuda"
    writing, constraints = (
        above.entry_instructions(tile // (ABREAST * columns.size)) if is_gpu else (None, None)
    )
    above.above[-(-users // tiles.users), SPLITS](
        queries.codes, reach, limits,
        TensorDescriptor.from_tensor(columns.codes, [tile, depth]), weight,
        entries, counts, users, real, stage.blocks, stage.stride, stage.offset, UNDERFLOW,
        width=width, depth=depth, height=tiles.users, lanes=LANES, size=columns.size,
        tile=tile, splits=SPLITS, room=entries.shape[2],
        stages=tiles.stages, skip=stage.skip, hole=stage.hole, near=depth <= _NEAR_MOST,
        writing=writing, constraints=constraints,
        num_warps=tiles.warps, maxnreg=tiles.registers,
    )  # fmt: skip


def keys_of(
    items: DeviceItems,
    columns: Columns,
    queries: Queries,
    hidden: tuple[torch.Tensor, torch.Tensor],
    kept_entries: torch.Tensor,
    left_out: torch.Tensor,
    tiles: Tiles,
) -> torch.Tensor:
    """Return exact keys int64 [n, size, capacity], unordered, of items that may be better than the omitted ones [n].

    WORST if hidden.
    """
    users, capacity = kept_entries.shape[:2]
    keys = torch.empty(
        (users, columns.size, capacity), dtype=torch.int64, device=kept_entries.device
    )
    if tiles.hopper is not None:
        tiles.hopper.write_keys(
            items.exact,
            items.cosine_lengths,
            columns,
            queries,
            hidden,
            kept_entries,
            left_out,
            keys,
        )
        return keys
    part = min(
        tiles.scored,
        capacity if kept_entries.device.type == "cuda" else power_of_two(users * capacity),
    )
    steps = items.exact.shape[1]
    placeholder_lengths = queries.exact  # where there are no lengths none are read
    kernels_of_keys.exact[-(-users * capacity // part),](
        queries.exact, placeholder_lengths if queries.cosine_lengths is None else queries.cosine_lengths,
        items.exact, placeholder_lengths if items.cosine_lengths is None else items.cosine_lengths,
        kept_entries, left_out, columns.ordinals, *hidden, keys, users * capacity, len(items.order),
        steps=steps, unroll=min(_UNROLLED, steps & -steps), size=columns.size, capacity=capacity, part=part,
        cosine=items.cosine_lengths is not None, num_warps=max(1, min(4, part // 32)), enable_fp_fusion=False,
        maxnreg=EXACT_REGISTERS,
    )  # fmt: skip
    return keys


def leading_of(keys: torch.Tensor, k: int, tiles: Tiles) -> torch.Tensor:
    """Return the best k of keys int64 [n, size, a power of two], descending, padded with WORST."""
    users, size, wide = keys.shape
    is_slow = keys.device.type == "cpu" and wide > 64  # the interpreter sorts for half a minute
    if wide > _LEADING_MOST or k > wide or is_slow:
        return best_of(keys.flatten(1), k)
    best_keys = torch.empty((users, k), dtype=torch.int64, device=keys.device)
    kernels_of_keys.leading[-(-users // tiles.selected),](
        keys, best_keys, users, k, height=tiles.selected, size=size, wide=wide,
        padded_k=max(2, power_of_two(k)), num_warps=1,
    )  # fmt: skip
    return best_keys


def hidden_of(
    excluded_pairs: tuple[torch.Tensor, torch.Tensor], users: int, items: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (starts int64 [users + 1], ordinals int64 ascending in each row) of pairs (row, ordinal up to `items`)."""
    pairs = (excluded_pairs[0] * (items + 1) + excluded_pairs[1]).sort()[0]
    edges = torch.arange(users + 1, device=pairs.device) * (items + 1)
    return torch.searchsorted(pairs, edges), pairs % (items + 1)


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
        ("cosine", unit_rows(users)),
    )
    for metric, compared in metrics:
        of_metric = ComparableItems.of(vectors, metric)
        device_items = DeviceItems.of(of_metric, device, torch.float16, GROUP)
        queries = device_items.queries(users, compared)
        shape = SearchShape(len(users), len(device_items.all_columns.ordinals), 48, estimating=True)
        keys, sure = search(device_items, device_items.all_columns, queries, pairs, 16, shape)
        expected_keys, also = operators.search(
            device_items, device_items.all_columns, queries, pairs, 16, shape
        )
        is_certain_in_both = sure & also
        if not (
            sure.any()
            and torch.equal(keys[is_certain_in_both], expected_keys[is_certain_in_both])
            and _has_valid_bounds(device_items, queries)
        ):
            return False
    return True


def bounds_of(items: DeviceItems, columns: Columns, queries: Queries, tiles: Tiles) -> torch.Tensor:
    """Return bounds float32 [n, groups] of few columns, in one stage; minus infinity for groups of padding."""
    users, device = len(queries.codes), queries.codes.device
    block_count = len(columns.ordinals) // columns.block
    room = -(-block_count // SPLITS) * LANES // ABREAST
    (stage,) = stages_of(block_count, room)
    entries = torch.empty((users, SEGMENTS, room, 4), dtype=torch.int32, device=device)
    counts = torch.empty((users, SEGMENTS), dtype=torch.int32, device=device)
    limits = torch.full((users,), _NO_SCORE, device=device)
    write_entries(
        columns, weight_of(items, columns, queries), queries, limits, stage, entries, counts, tiles
    )
    bounds = torch.full((users, len(columns.longest)), _NO_SCORE, device=device)
    written = torch.arange(room, device=device) < counts[..., None]
    user = written.nonzero()[:, 0]
    bounds[user, entries[..., 1][written]] = entries[..., 0][written].view(torch.float32)
    return bounds


def _has_valid_bounds(items: DeviceItems, queries: Queries) -> bool:
    columns, users, device = items.all_columns, len(queries.codes), queries.codes.device
    bounds = bounds_of(items, columns, queries, tiles_of(users, queries.codes.shape[1], device))
    highest = columns.largest(queries.codes.double() @ columns.codes.double().T)
    margin = items.margin(columns, slice(None), queries.length, queries.residual)
    allowed = items.error * queries.length[:, None] * columns.longest
    over = bounds.double() - highest - margin
    return bool(((over >= -allowed) & (over <= allowed + _ROUNDED))[:, columns.longest > 0].all())


def stages_of(blocks: int, room: int) -> Iterator[BlockStage]:
    """Yield stages that visit every block once: the first only as many as fit if all their groups are written."""
    ratios: list[int] = []
    while -(-blocks // math.prod(ratios)) > _first_stage_blocks(room):
        ratios.insert(0, _STAGE_RATIO if ratios else _LAST_STAGE_RATIO)
    return _stages(blocks, ratios, [0] * len(ratios))


def estimating_stages_of(blocks: int, room: int) -> Iterator[BlockStage]:
    """Yield stages like `stages_of` for estimated limits: fewer stages, and a first one with fewer entries.

    Blocks are ordered by the length of their items. Each stage takes every n-th block, from the middle, so that its
    items are neither better nor worse than the remaining ones.
    """
    if blocks <= _first_stage_blocks(room):
        return _stages(blocks, [], [])
    part = max(2, -(-blocks // SPLITS))
    count = max(1, math.ceil(math.log(part, _ESTIMATING_RATIO)))
    ratios = [math.ceil(part ** (1 / count))] * count
    return _stages(blocks, ratios, [ratio // 2 for ratio in ratios])


def _first_stage_blocks(room: int) -> int:
    """Return the number of blocks all of whose groups fit."""
    return SEGMENTS * room // LANES


def _stages(blocks: int, ratios: list[int], holes: list[int]) -> Iterator[BlockStage]:
    """Yield the stages of a search, each of which visits `ratio` - 1 times as many blocks as all before it.

    Of every `ratio` blocks the `hole`-th was visited by an earlier stage.
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


def tiles_of(users: int, width: int, device: torch.device) -> Tiles:
    """Return tiles for codes of some width: users stay in registers, wide ones in shared memory, items stream by."""
    if device.type == "cpu":  # the interpreter takes the same time for many users as for one
        tile_users = power_of_two(min(64, users))
        return Tiles(max(16, tile_users), 256, 4, 1, 4, selected=tile_users, scored=1 << 15)
    if (kernels := hopper.kernels_for(width, device)) is not None:
        return Tiles(hopper.USERS, hopper.TILE, 12, 1, 1, hopper=kernels)
    return triton_tiles_of(width)


def triton_tiles_of(width: int) -> Tiles:
    """Return tiles of the Triton kernels on a GPU."""
    if width <= 128:
        return Tiles(128, 128, 8, 3, 2)
    return Tiles(128, 128, 8, 3, 1) if width <= 256 else Tiles(64, 64, 4, 2, 1)


def units_of(device: torch.device) -> int:
    """Return the number of multiprocessors of a device."""
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def capacity_of(fetch: int) -> int:
    """Return the number of a user's kept groups: with room for a quarter more, where a history has the best."""
    return min(FETCH_MOST, power_of_two(fetch + fetch // 4))


def room_of(capacity: int, *, estimating: bool = False) -> int:
    """Return the entries of a segment: a stage is expected to write less than half as many."""
    return max(32, capacity // (8 if estimating else 4))


def power_of_two(count: int) -> int:
    """Return the least power of two that is no smaller than `count`."""
    return 1 << (max(1, count) - 1).bit_length()

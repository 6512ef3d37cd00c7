"""Fused search of all columns by kernels that never write the products to memory, with the sizes of their work.

For every group of a few items a bound is computed from the products. A first stage over few items gives each user a
limit; only groups that reach it are written in the next, larger stage. So a user keeps a few hundred groups. Their
items are scored in float32, and the last limit bounds all omitted groups. The few lists that this cannot certify (many
ties, scores too close for half precision) are left to `precompute.device.search`.
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
from precompute.device.columns import BLOCK_GROUPS, GROUPS_ABREAST, SPLITS, BlockStage, Columns, Queries
from precompute.device.hopper import HopperKernels
from precompute.device.items import UNDERFLOW_ERROR, DeviceItems
from precompute.device.kernels import above, keep
from precompute.device.kernels import keys as kernels_of_keys
from precompute.device.search import SearchShape, find_certain_lists, select_best_keys

GROUP = 4
"""Items of a group: few, since all items of a kept group are scored."""

NO_GROUP = -1
"""Number that stands for a missing group."""

FETCH_MAX = 1 << 11
"""Maximum number of a user's scored groups: torch's operators make longer lists."""

WIDTH_MAX = 512

SEGMENTS = SPLITS * GROUPS_ABREAST
"""Number of parts of a user's entries, each written by threads of one program."""

HALVINGS = 12
"""Number of bisections of the range of bounds, after which few groups remain between its ends."""

EXACT_REGISTERS = 64
"""Maximum registers of a thread that adds exact sums: with more the compiler reads far ahead, and spills to memory."""

_STAGE_RATIO, _LAST_STAGE_RATIO = 6, 4
"""Ratios of blocks checked by the end of a stage to those before it.
The limit of a stage lets about ratio - 1 times as many groups pass as are kept. The last stage, which has most of the
blocks, has the smaller ratio, so that fewer groups pass."""

_ESTIMATING_RATIO = 16
"""Largest such ratio with estimated limits."""

_REGISTERS = 1 << 16
"""Number of registers of a multiprocessor."""

_REGISTER_WIDTH_MAX = 256
"""Maximum width of a user's code that stays in registers."""

_ROWS_MAX = 1 << 16
_PROGRAM_ROUNDS = 4
"""Number of programs of a search, as a multiple of those that run at once: more programs hide their preparation."""

_SORTED_KEYS_MAX = 1 << 10
"""Maximum number of keys that the kernel sorts: with more keys torch is as fast."""

_UNROLLED_STEPS = 8
"""Number of steps of an exact sum whose numbers are read at once."""

_ROUND_UP = 1 + 1e-6
_DEVIATIONS = 3
"""Standard deviations by which the rank of an estimated limit exceeds the expected number in the sample."""

_ENTRY_BYTES = 16
_NO_SCORE = float("-inf")
_PROBE_ITEMS = 9000
"""Number of items of the self-test, enough for two stages."""

_SCALED_LENGTH_MIN = 0.25
"""Smallest length of a scaled user vector."""

_BOUND_ROUNDING = 2.0**-9
"""Largest difference between a bound, which is at most slightly above one, and product plus margin."""


def supports_search(items: DeviceItems, columns: Columns, candidates_per_user: int) -> bool:
    """True if the kernels support products of this width, groups of this size, and this number of candidates."""
    return (
        items.item_codes.dtype == torch.float16
        and items.item_codes.shape[1] <= WIDTH_MAX
        and columns.group_size == GROUP
        and candidates_per_user <= FETCH_MAX
    )


def shape_of(items: DeviceItems, columns: Columns, candidates_per_user: int, room_bytes: int) -> SearchShape:
    """Return the shape of a search: all columns, and as many users as fit into memory or run at once."""
    capacity, device = kept_capacity(candidates_per_user), items.item_codes.device
    entry_bytes = SEGMENTS * segment_capacity(capacity) * _ENTRY_BYTES
    candidate_bytes = capacity * (_ENTRY_BYTES + columns.group_size * 8 * 2)
    vector_bytes = items.exact_vectors[0].numel() * 4 * 3
    tiles = choose_tiles(_ROWS_MAX, items.item_codes.shape[1], device)
    max_users = (
        max(1, _PROGRAM_ROUNDS * count_multiprocessors(device) * tiles.resident_programs // SPLITS) * tiles.tile_users
    )
    user_count = max(1, min(_ROWS_MAX, max_users, room_bytes // (entry_bytes + candidate_bytes + vector_bytes)))
    return SearchShape(user_count, len(columns.item_ordinals), candidates_per_user)


def search(
    items: DeviceItems,
    columns: Columns,
    queries: Queries,
    excluded_pairs: tuple[torch.Tensor, torch.Tensor],
    k: int,
    shape: SearchShape,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (keys int64 [n, k] descending, padded with WORST; certain bool [n]), like `search.search`."""
    user_count, width = queries.user_codes.shape
    tiles = choose_tiles(user_count, width, queries.user_codes.device)
    hidden_rows = sort_hidden_ordinals(excluded_pairs, user_count, len(items.ordinals_by_length))
    # An excluded item raises its group's bound like any other. A quarter of the room is for bounds close to the last
    # one.
    capacity = kept_capacity(shape.candidates_per_user)
    required_counts = (
        (hidden_rows[0].diff() + shape.candidates_per_user).clamp(max=capacity - capacity // 4).to(torch.int32)
    )
    kept_entries, left_out_bounds = select_entries(
        items, columns, queries, required_counts, capacity, tiles, estimating=shape.is_estimating
    )
    best_keys = select_leading_keys(
        compute_exact_keys(items, columns, queries, hidden_rows, kept_entries, left_out_bounds, tiles), k, tiles
    )
    return best_keys, find_certain_lists(items, queries, best_keys, left_out_bounds)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes of one program: users by columns of a product, users whose bounds or keys are selected, groups scored.

    A product runs in `warp_count` warps, while `pipeline_stages` tiles of items are being copied. `resident_programs`
    programs fit on a multiprocessor: one multiplies while another checks its bounds.
    """

    tile_users: int
    tile_columns: int
    warp_count: int
    pipeline_stages: int
    resident_programs: int
    selected_users: int = 1
    scored_groups: int = 64
    hopper: HopperKernels | None = None
    """Kernels in CUDA C++ for some of the work, if the device supports them."""

    @property
    def thread_registers_max(self) -> int:
        """Maximum registers of a thread of a product with which `resident_programs` fit."""
        return min(255, _REGISTERS // (32 * self.warp_count * self.resident_programs))


def select_entries(
    items: DeviceItems,
    columns: Columns,
    queries: Queries,
    required_counts: torch.Tensor,
    entry_capacity: int,
    tiles: Tiles,
    *,
    estimating: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (entries of `kernels.above` int32 [n, capacity, 4], unordered; the highest omitted bound [n]).

    The entries have the `required_counts` [n] highest bounds, and bounds close to the last of them if there is room.
    With estimated limits fewer entries may be found if items are not spread over the blocks at random: the omitted
    bound then makes the list uncertain.
    """
    user_count, device = len(queries.user_codes), queries.user_codes.device
    room = segment_capacity(entry_capacity, estimating=estimating)
    block_count, searched_block_count = len(columns.item_ordinals) // columns.block_column_count, 0
    entries = torch.empty((user_count, SEGMENTS, room, 4), dtype=torch.int32, device=device)
    kept_entries = torch.full((user_count, entry_capacity, 4), NO_GROUP, dtype=torch.int32, device=device)
    entry_counts = torch.empty((user_count, SEGMENTS), dtype=torch.int32, device=device)
    limits, left_out_bounds = (torch.full((user_count,), _NO_SCORE, device=device) for _ in range(2))
    block_weights = compute_block_weights(items, columns, queries)
    for stage in (plan_estimating_stages if estimating else plan_stages)(block_count, room):
        write_entries(columns, block_weights, queries, limits, stage, entries, entry_counts, tiles)
        searched_block_count += stage.block_count
        rank_limits = (
            estimate_ranks(required_counts, searched_block_count / block_count) if estimating else required_counts
        )
        if tiles.hopper is not None and room == hopper.KEEP_ROOM and entry_capacity <= hopper.KEEP_MAX:
            tiles.hopper.keep(entries, entry_counts, rank_limits, kept_entries, limits, left_out_bounds, HALVINGS)
            continue
        keep.keep[-(-user_count // tiles.selected_users),](
            entries, entry_counts, rank_limits, kept_entries, limits, left_out_bounds, user_count,
            height=tiles.selected_users, segments=SEGMENTS, room=room, capacity=entry_capacity,
            halvings=HALVINGS, num_warps=max(1, min(16, entry_capacity // 32)),
        )  # fmt: skip
    return kept_entries, left_out_bounds


def estimate_ranks(required_counts: torch.Tensor, sample_fraction: float) -> torch.Tensor:
    """Return ranks int32 [n] in a sample of groups, up to which the sample has all of the `required_counts` [n] best.

    The sample has a Poisson number of the best groups, seldom more than `_DEVIATIONS` standard deviations above its
    mean.
    """
    expected_counts = required_counts * sample_fraction
    rank_limits = torch.ceil(expected_counts + _DEVIATIONS * expected_counts.sqrt() + _DEVIATIONS).to(torch.int32)
    return torch.minimum(rank_limits, required_counts)


def compute_block_weights(items: DeviceItems, columns: Columns, queries: Queries) -> torch.Tensor:
    """Return float32 [blocks]: the factor of a user's length plus residual in an upper bound of the margin.

    The bound excludes underflow. The margin is that of `DeviceItems.margin`, with the largest share of the residual of
    any user. Users too short to be scaled like all others are left out: their products are zero, or their lists are not
    certain.
    """
    residual_shares = queries.residual_lengths / (queries.scaled_lengths + queries.residual_lengths)
    residual_share_max = torch.where(queries.scaled_lengths >= _SCALED_LENGTH_MIN, residual_shares, 0.0).amax()
    weight = items.margin_weights(columns.longest_by_block, columns.residual_by_block)
    return (weight + residual_share_max * columns.longest_by_block) * _ROUND_UP


def write_entries(
    columns: Columns,
    block_weights: torch.Tensor,
    queries: Queries,
    user_limits: torch.Tensor,
    stage: BlockStage,
    entries: torch.Tensor,
    entry_counts: torch.Tensor,
    tiles: Tiles,
) -> None:
    """Write the bounds of one stage that reach the users' limits [n], as entries and counts: see `kernels.above`.

    `block_weights` float32 [blocks] is the result of `compute_block_weights`.
    """
    user_count, width = queries.user_codes.shape
    reach = queries.scaled_lengths + queries.residual_lengths
    if tiles.hopper is not None:
        tiles.hopper.write_entries(
            queries.user_codes,
            reach,
            user_limits,
            columns,
            block_weights,
            stage,
            entries,
            entry_counts,
            UNDERFLOW_ERROR,
        )
        return
    real_group_count = len(columns.longest_by_group) - len(columns.padding_columns) // columns.group_size
    tile, depth = (
        max(GROUPS_ABREAST * columns.group_size, min(tiles.tile_columns, columns.block_column_count)),
        max(16, power_of_two(width)),
    )
    is_gpu = queries.user_codes.device.type == "cuda"
    writing, constraints = (
        above.entry_instructions(tile // (GROUPS_ABREAST * columns.group_size)) if is_gpu else (None, None)
    )
    above.above[-(-user_count // tiles.tile_users), SPLITS](
        queries.user_codes, reach, user_limits,
        TensorDescriptor.from_tensor(columns.item_codes, [tile, depth]), block_weights,
        entries, entry_counts, user_count, real_group_count, stage.block_count, stage.block_stride,
        stage.first_block, UNDERFLOW_ERROR,
        width=width, depth=depth, height=tiles.tile_users, lanes=BLOCK_GROUPS, size=columns.group_size,
        tile=tile, splits=SPLITS, room=entries.shape[2],
        stages=tiles.pipeline_stages, skip=stage.skip, hole=stage.hole, near=depth <= _REGISTER_WIDTH_MAX,
        writing=writing, constraints=constraints,
        num_warps=tiles.warp_count, maxnreg=tiles.thread_registers_max,
    )  # fmt: skip


def compute_exact_keys(
    items: DeviceItems,
    columns: Columns,
    queries: Queries,
    hidden_rows: tuple[torch.Tensor, torch.Tensor],
    kept_entries: torch.Tensor,
    left_out_bounds: torch.Tensor,
    tiles: Tiles,
) -> torch.Tensor:
    """Return exact keys int64 [n, size, capacity], unordered, of items that may be better than the omitted ones [n].

    Excluded items have the key WORST.
    """
    user_count, capacity = kept_entries.shape[:2]
    keys = torch.empty((user_count, columns.group_size, capacity), dtype=torch.int64, device=kept_entries.device)
    if tiles.hopper is not None:
        tiles.hopper.write_keys(
            items.exact_vectors,
            items.cosine_lengths,
            columns,
            queries,
            hidden_rows,
            kept_entries,
            left_out_bounds,
            keys,
        )
        return keys
    part = min(
        tiles.scored_groups, capacity if kept_entries.device.type == "cuda" else power_of_two(user_count * capacity)
    )
    steps = items.exact_vectors.shape[1]
    placeholder_lengths = queries.exact_vectors  # without lengths the kernel does not read this argument
    kernels_of_keys.exact[-(-user_count * capacity // part),](
        queries.exact_vectors, placeholder_lengths if queries.cosine_lengths is None else queries.cosine_lengths,
        items.exact_vectors, placeholder_lengths if items.cosine_lengths is None else items.cosine_lengths,
        kept_entries, left_out_bounds, columns.item_ordinals, *hidden_rows, keys, user_count * capacity,
        len(items.ordinals_by_length),
        steps=steps, unroll=min(_UNROLLED_STEPS, steps & -steps), size=columns.group_size, capacity=capacity, part=part,
        cosine=items.cosine_lengths is not None, num_warps=max(1, min(4, part // 32)), enable_fp_fusion=False,
        maxnreg=EXACT_REGISTERS,
    )  # fmt: skip
    return keys


def select_leading_keys(sort_keys: torch.Tensor, k: int, tiles: Tiles) -> torch.Tensor:
    """Return the best k of keys int64 [n, size, a power of two], descending, padded with WORST."""
    user_count, group_size, keys_per_slot = sort_keys.shape
    is_slow = sort_keys.device.type == "cpu" and keys_per_slot > 64  # Triton's interpreter takes half a minute to sort
    if keys_per_slot > _SORTED_KEYS_MAX or k > keys_per_slot or is_slow:
        return select_best_keys(sort_keys.flatten(1), k)
    best_keys = torch.empty((user_count, k), dtype=torch.int64, device=sort_keys.device)
    kernels_of_keys.leading[-(-user_count // tiles.selected_users),](
        sort_keys, best_keys, user_count, k, height=tiles.selected_users, size=group_size, wide=keys_per_slot,
        padded_k=max(2, power_of_two(k)), num_warps=1,
    )  # fmt: skip
    return best_keys


def sort_hidden_ordinals(
    excluded_pairs: tuple[torch.Tensor, torch.Tensor], user_count: int, item_count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (starts int64 [users + 1], ordinals int64 ascending in each row) of pairs (row, ordinal)."""
    row_ordinal_codes = (excluded_pairs[0] * (item_count + 1) + excluded_pairs[1]).sort()[0]
    row_bounds = torch.arange(user_count + 1, device=row_ordinal_codes.device) * (item_count + 1)
    return torch.searchsorted(row_ordinal_codes, row_bounds), row_ordinal_codes % (item_count + 1)


def agrees_with_torch(dims: int, device: torch.device) -> bool:
    """True if on this device the kernels' bounds hold, and their lists are bit-identical to those of torch's operators.

    Tested on positive numbers, which have the largest partial sums.
    """
    rng = np.random.default_rng(dims)
    vectors = rng.random((_PROBE_ITEMS, dims), np.float32)
    vectors *= np.exp(rng.standard_normal((_PROBE_ITEMS, 1))).astype(np.float32)
    user_vectors = rng.random((8, dims), np.float32)
    excluded_pairs = torch.arange(8, device=device), torch.arange(8, device=device) * 3
    metrics: tuple[tuple[Metric, NDArray[np.float32]], ...] = (
        ("inner_product", user_vectors),
        ("cosine", unit_rows(user_vectors)),
    )
    for metric, compared_users in metrics:
        comparable_items = ComparableItems.of(vectors, metric)
        device_items = DeviceItems.of(comparable_items, device, torch.float16, GROUP)
        queries = device_items.encode_queries(user_vectors, compared_users)
        shape = SearchShape(len(user_vectors), len(device_items.all_columns.item_ordinals), 48, is_estimating=True)
        keys, is_certain = search(device_items, device_items.all_columns, queries, excluded_pairs, 16, shape)
        expected_keys, is_expected_certain = operators.search(
            device_items, device_items.all_columns, queries, excluded_pairs, 16, shape
        )
        is_certain_in_both = is_certain & is_expected_certain
        if not (
            is_certain.any()
            and torch.equal(keys[is_certain_in_both], expected_keys[is_certain_in_both])
            and _has_valid_bounds(device_items, queries)
        ):
            return False
    return True


def compute_bounds(items: DeviceItems, columns: Columns, queries: Queries, tiles: Tiles) -> torch.Tensor:
    """Return bounds float32 [n, groups] of few columns, from one stage; minus infinity for groups of padding."""
    user_count, device = len(queries.user_codes), queries.user_codes.device
    block_count = len(columns.item_ordinals) // columns.block_column_count
    room = -(-block_count // SPLITS) * BLOCK_GROUPS // GROUPS_ABREAST
    (stage,) = plan_stages(block_count, room)
    entries = torch.empty((user_count, SEGMENTS, room, 4), dtype=torch.int32, device=device)
    entry_counts = torch.empty((user_count, SEGMENTS), dtype=torch.int32, device=device)
    limits = torch.full((user_count,), _NO_SCORE, device=device)
    write_entries(
        columns, compute_block_weights(items, columns, queries), queries, limits, stage, entries, entry_counts, tiles
    )
    bounds = torch.full((user_count, len(columns.longest_by_group)), _NO_SCORE, device=device)
    is_written = torch.arange(room, device=device) < entry_counts[..., None]
    written_users = is_written.nonzero()[:, 0]
    bounds[written_users, entries[..., 1][is_written]] = entries[..., 0][is_written].view(torch.float32)
    return bounds


def _has_valid_bounds(items: DeviceItems, queries: Queries) -> bool:
    columns, user_count, device = items.all_columns, len(queries.user_codes), queries.user_codes.device
    bounds = compute_bounds(items, columns, queries, choose_tiles(user_count, queries.user_codes.shape[1], device))
    highest_products = columns.largest_by_group(queries.user_codes.double() @ columns.item_codes.double().T)
    margin = items.score_margins(columns, slice(None), queries.scaled_lengths, queries.residual_lengths)
    allowed_errors = items.relative_rounding_error * queries.scaled_lengths[:, None] * columns.longest_by_group
    excess = bounds.double() - highest_products - margin
    return bool(
        ((excess >= -allowed_errors) & (excess <= allowed_errors + _BOUND_ROUNDING))[
            :, columns.longest_by_group > 0
        ].all()
    )


def plan_stages(block_count: int, entry_room: int) -> Iterator[BlockStage]:
    """Yield stages that visit every block once; all groups of the first stage's blocks have room as entries."""
    ratios: list[int] = []
    while -(-block_count // math.prod(ratios)) > _first_stage_blocks(entry_room):
        ratios.insert(0, _STAGE_RATIO if ratios else _LAST_STAGE_RATIO)
    return _build_stages(block_count, ratios, [0] * len(ratios))


def plan_estimating_stages(block_count: int, entry_room: int) -> Iterator[BlockStage]:
    """Yield stages like `plan_stages` for estimated limits: fewer stages, with fewer entries in the first one.

    Blocks are ordered by the length of their items. Each stage takes every n-th block, starting in the middle of the
    first n, so that its items are neither better nor worse than the remaining ones.
    """
    if block_count <= _first_stage_blocks(entry_room):
        return _build_stages(block_count, [], [])
    growth_target = max(2, -(-block_count // SPLITS))
    stage_count = max(1, math.ceil(math.log(growth_target, _ESTIMATING_RATIO)))
    ratios = [math.ceil(growth_target ** (1 / stage_count))] * stage_count
    return _build_stages(block_count, ratios, [ratio // 2 for ratio in ratios])


def _first_stage_blocks(entry_room: int) -> int:
    """Return the number of blocks for which the room suffices even if all their groups are written."""
    return SEGMENTS * entry_room // BLOCK_GROUPS


def _build_stages(block_count: int, ratios: list[int], holes: list[int]) -> Iterator[BlockStage]:
    """Yield the stages of a search, each of which visits `ratio` - 1 times as many blocks as all before it.

    An earlier stage visited the `hole`-th of every `ratio` blocks.
    """
    stride = math.prod(ratios)
    offset = sum(math.prod(ratios[ratio_index + 1 :]) * hole for ratio_index, hole in enumerate(holes))
    searched_block_count = max(0, -(-(block_count - offset) // stride))
    yield BlockStage(searched_block_count, stride, offset)
    for ratio, hole in zip(ratios, holes, strict=True):
        stride //= ratio
        offset -= stride * hole
        visited_block_count = -(-(block_count - offset) // stride)
        yield BlockStage(visited_block_count - searched_block_count, stride, offset, ratio - 1, hole)
        searched_block_count = visited_block_count


def choose_tiles(user_count: int, code_width: int, device: torch.device) -> Tiles:
    """Return tiles for codes of this width: users stay in registers, wide ones in shared memory; items are streamed."""
    if device.type == "cpu":  # Triton's interpreter takes the same time for many users as for one
        tile_users = power_of_two(min(64, user_count))
        return Tiles(max(16, tile_users), 256, 4, 1, 4, selected_users=tile_users, scored_groups=1 << 15)
    if (kernels := hopper.kernels_for(code_width, device)) is not None:
        return Tiles(hopper.PROGRAM_USERS, hopper.TILE_ITEMS, 12, 1, 1, hopper=kernels)
    return choose_triton_tiles(code_width)


def choose_triton_tiles(code_width: int) -> Tiles:
    """Return tiles of the Triton kernels on a GPU."""
    if code_width <= 128:
        return Tiles(128, 128, 8, 3, 2)
    return Tiles(128, 128, 8, 3, 1) if code_width <= 256 else Tiles(64, 64, 4, 2, 1)


def count_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device."""
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def kept_capacity(candidates_per_user: int) -> int:
    """Return the number of a user's kept groups: a quarter more than fetched, for excluded items."""
    return min(FETCH_MAX, power_of_two(candidates_per_user + candidates_per_user // 4))


def segment_capacity(entry_capacity: int, *, estimating: bool = False) -> int:
    """Return the number of entries of a segment: a stage is expected to write less than half as many."""
    return max(32, entry_capacity // (8 if estimating else 4))


def power_of_two(minimum: int) -> int:
    """Return the least power of two that is no smaller than `minimum`."""
    return 1 << (max(1, minimum) - 1).bit_length()

"""Kernel `above`: products of users and items, of which only groups that may be among a user's best are written."""

from itertools import product

import triton
import triton.language as tl

ROWS_OF_THREAD = 2
"""Number of rows of a tile of which a thread holds a part."""


@triton.jit(do_not_specialize=("count", "real", "blocks", "stride", "offset"))
def above(
    users, reach, limits, items, weight, entries, counts,
    count, real, blocks, stride, offset, slack,
    width: tl.constexpr, depth: tl.constexpr, height: tl.constexpr, lanes: tl.constexpr, size: tl.constexpr,
    tile: tl.constexpr, splits: tl.constexpr, room: tl.constexpr, stages: tl.constexpr, skip: tl.constexpr,
    hole: tl.constexpr, near: tl.constexpr, writing: tl.constexpr, constraints: tl.constexpr,
):  # fmt: skip
    """Write groups whose bounds reach the limits of `height` users, as entries int32 [n, splits, 4, room, 4].

    An entry is a bound (float32, at least every score of the group), the group, and its products in half precision. The
    kernel visits `blocks` blocks of `lanes` groups, of which the first `real` groups have items: those of a
    `BlockStage` (`stride`, `offset`, `skip`, `hole`), each in one of a user's `splits` programs. Four groups have
    sixteen neighbouring columns (`Columns.columns_of`), so that one thread has all columns of a group. `counts` int32
    [n, splits, 4] count all groups that reach the limit, although only `room` are written. `items` is a descriptor of
    the codes in tiles; if `near`, the users' codes stay in registers; `writing` is PTX (`entry_instructions`), used on
    GPUs. A margin is a user's `reach` times the block's `weight`, plus `slack`.
    """
    rows = tl.program_id(0) * height + tl.arange(0, height)
    split = tl.program_id(1)
    k = tl.arange(0, depth)
    user_mask = rows < count
    rows = rows.to(tl.int64)
    inside = user_mask[:, None] & (k < width)[None, :]
    u = tl.load(users + rows[:, None] * width + k[None, :], mask=inside, other=0.0)
    if near:  # the result of a product is in registers and stays there
        u = tl.dot(u, (k[:, None] == k[None, :]).to(u.dtype)).to(u.dtype)
    far = tl.load(reach + rows, mask=user_mask, other=0.0)
    limit = tl.load(limits + rows, mask=user_mask, other=float("inf"))
    groups: tl.constexpr = tile // size
    tiles_per_block: tl.constexpr = lanes // groups
    group_offset = tl.arange(0, 4)
    segment = (rows[:, None] * splits + split) * 4 + group_offset[None, :]
    free = entries + segment * (room * 4)
    entry_count = tl.zeros([height, 4], tl.int32)
    steps = (blocks - split + splits - 1) // splits * tiles_per_block
    heavy = tl.load(weight + _block(split, stride, offset, skip, hole), mask=steps > 0, other=0.0)
    for step in tl.range(0, steps, num_stages=stages):
        at = split + step // tiles_per_block * splits
        group = _block(at, stride, offset, skip, hole) * lanes + step % tiles_per_block * groups
        product = tl.dot(u, tl.trans(items.load([group * size, 0])))
        margin = far * heavy + slack
        # The weight for the next step is loaded during this one.
        at = tl.minimum(split + (step + 1) // tiles_per_block * splits, blocks - 1)
        heavy = tl.load(weight + _block(at, stride, offset, skip, hole))
        scores = _members(tl.reshape(product, [height, groups // 4, 2, 4, 2]), groups // 4)
        low, over, number = ((limit - margin)[:, None], margin[:, None], (group + group_offset)[None, :])
        if writing is not None:
            asm_operands = (low, over, entry_count, free.to(tl.int64), number, real, room)
            entry_count = tl.inline_asm_elementwise(
                writing, constraints, scores + asm_operands, dtype=tl.int32, is_pure=False, pack=2
            )
        else:
            entry_count = _reaching(scores, low, over, free, entry_count, number, real, groups // 4, room)
    tl.store(counts + segment, entry_count, mask=user_mask[:, None])


@triton.jit
def _block(at, stride, offset, skip: tl.constexpr, hole: tl.constexpr):
    """Return the `at`-th block that a `BlockStage` visits."""
    if skip:
        remainder = at % skip
        at = at // skip * (skip + 1) + remainder + (remainder >= hole).to(tl.int32)
    return at * stride + offset


@triton.jit
def _members(scores, group_count: tl.constexpr):
    """Return, group by group, the four scores [n, 4] of `group_count` groups, from scores [n, many, 2, 4, 2]."""
    if group_count > 1:
        halves = tl.reshape(scores, [scores.shape[0], 2, group_count // 2, 2, 4, 2])
        first, second = tl.split(tl.permute(halves, (0, 2, 3, 4, 5, 1)))
        return _members(first, group_count // 2) + _members(second, group_count // 2)
    else:  # noqa: RET505 - Triton compiles what stands behind a return
        even, odd = tl.split(tl.reshape(scores, [scores.shape[0], 2, 4, 2]))
        zero, two = tl.split(tl.permute(even, (0, 2, 1)))
        score_one, three = tl.split(tl.permute(odd, (0, 2, 1)))
        return zero, score_one, two, three


@triton.jit
def _reaching(
    members, limit, margin, entries, entry_count, number, real, group_count: tl.constexpr, room: tl.constexpr
):
    """Write the groups of `members` (`_members`) that reach the limit; return the new counts of entries int32 [n, 4].

    It does the same as `entry_instructions`, for Triton's interpreter.
    """
    for group in tl.static_range(group_count):
        zero, score_one = members[4 * group], members[4 * group + 1]
        two, three = members[4 * group + 2], members[4 * group + 3]
        highest = tl.maximum(tl.maximum(zero, score_one), tl.maximum(two, three))
        hit = (highest >= limit) & (number + 4 * group < real)
        written = hit & (entry_count < room)
        to = entries + entry_count * 4
        tl.store(to, (highest + margin).to(tl.int32, bitcast=True), mask=written)
        tl.store(to + 1, number + 4 * group, mask=written)
        tl.store(to + 2, _halves(zero, score_one), mask=written)
        tl.store(to + 3, _halves(two, three), mask=written)
        entry_count += hit.to(tl.int32)
    return entry_count


@triton.jit
def _halves(first, second):
    """Return int32 with the bits of two numbers in half precision, the first in its lower half."""
    low = first.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    high = second.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return (high << 16) | (low & 0xFFFF)


def entry_instructions(groups: int) -> tuple[str, str]:
    """Return (PTX, its constraints) for `above`, if a thread has this many groups of four scores in two rows.

    Triton's operators would compile to 30 instructions for every group, most of which move zeros.

    The inputs are the scores of each group, one after the other for both rows each, then limit, margin, entry count,
    address, number of the first group, number of real groups, and room; the output is the new entry count. The next
    group of the same rows has a number higher by four. An entry is a bound, the group's number, and its scores in
    halves.
    """
    after = ROWS_OF_THREAD + 4 * ROWS_OF_THREAD * groups
    limit, margin, entry_counts, address, number, real, room = (
        [f"${after + ROWS_OF_THREAD * operand_index + row}" for row in range(ROWS_OF_THREAD)]
        for operand_index in range(7)
    )
    lines = [f"mov.b32 ${row}, {entry_counts[row]};" for row in range(ROWS_OF_THREAD)]
    for group, row in product(range(groups), range(ROWS_OF_THREAD)):
        zero, score_one, two, three = (f"${ROWS_OF_THREAD + 8 * group + 2 * member + row}" for member in range(4))
        if row == 0:
            lines += [f"add.s32 group, {number[row]}, {4 * group};", f"setp.lt.s32 known, group, {real[row]};"]
        lines += [
            f"max.f32 highest, {zero}, {score_one};",
            f"max.f32 other, {two}, {three};",
            "max.f32 highest, highest, other;",
            f"setp.ge.and.f32 hit, highest, {limit[row]}, known;",
            f"setp.lt.and.s32 written, ${row}, {room[row]}, hit;",
            f"add.f32 highest, highest, {margin[row]};",
            f"cvt.rn.f16x2.f32 low, {score_one}, {zero};",
            f"cvt.rn.f16x2.f32 high, {three}, {two};",
            "mov.b32 bound, highest;",
            f"mad.wide.s32 to, ${row}, 16, {address[row]};",
            "@written st.global.v4.b32 [to], {bound, group, low, high};",
            f"@hit add.s32 ${row}, ${row}, 1;",
        ]
    head = [
        "{",
        ".reg .pred known, hit, written;",
        ".reg .f32 highest, other;",
        ".reg .b32 bound, group, low, high;",
        ".reg .b64 to;",
    ]
    kinds = (
        ["=&r"] * ROWS_OF_THREAD
        + ["f"] * (4 * ROWS_OF_THREAD * groups + 2 * ROWS_OF_THREAD)
        + ["r"] * ROWS_OF_THREAD
        + ["l"] * ROWS_OF_THREAD
        + ["r"] * (3 * ROWS_OF_THREAD)
    )
    return "\n".join([*head, *lines, "}"]), ",".join(kinds)

"""Kernels of the fused top-K, in Triton: bounds of groups, each user's best groups, exact keys of their items.

Nothing of the product is written, only a half for each group of items. Run by `precompute.device.fused`, which knows
shapes and sizes; without a GPU by Triton's interpreter (TRITON_INTERPRET=1 before triton is imported).
"""

import triton
import triton.language as tl

_UP = tl.constexpr(2.0**-11 * (1 + 2.0**-8))
_LEAST = tl.constexpr(2.0**-24)
"""More than half a last place of half precision, relative and absolute: with both added, rounding never ends below."""
_WORST = tl.constexpr(-(2**63))


@triton.jit(do_not_specialize=("count", "blocks", "per_program"))
def maxima(
    users, reach, residual, items, weight, longest, bounds, blockwise,
    count, blocks, per_program, slack,
    width: tl.constexpr, depth: tl.constexpr, height: tl.constexpr, lanes: tl.constexpr, size: tl.constexpr,
    stages: tl.constexpr,
):  # fmt: skip
    """Bounds of all groups for `height` users, half, no lower than a score there, and the highest of each block.

    A block is `size` rows of `lanes` columns, a column a group: their running maximum needs no shuffle. `reach` is
    a user's length with its residual; `weight` and `longest` are the groups' (`DeviceItems.margin`).
    """
    rows = tl.program_id(0) * height + tl.arange(0, height)
    lane = tl.arange(0, lanes)
    k = tl.arange(0, depth)
    own = rows < count
    rows = rows.to(tl.int64)
    inside = (k < width)[None, :]
    u = tl.load(users + rows[:, None] * width + k[None, :], mask=own[:, None] & inside, other=0.0)
    far = tl.load(reach + rows, mask=own, other=0.0)
    rest = tl.load(residual + rows, mask=own, other=0.0)
    first = tl.program_id(1) * per_program
    last = tl.minimum(first + per_program, blocks)
    column = first.to(tl.int64) * (size * lanes) + lane
    at = items + column[:, None] * width + k[None, :]
    best = tl.full([height, lanes], float("-inf"), tl.float32)
    for tile in tl.range(first * size, last * size, num_stages=stages):
        v = tl.load(at) if depth == width else tl.load(at, mask=inside, other=0.0)
        at += lanes * width
        best = tl.maximum(best, tl.dot(u, tl.trans(v)))
        if tile % size == size - 1:
            block = tile // size
            group = block * lanes + lane
            heavy = tl.load(weight + group)[None, :]
            long = tl.load(longest + group)[None, :]
            bound = best + far[:, None] * heavy + rest[:, None] * long + slack
            bound += tl.abs(bound) * _UP + _LEAST
            half = bound.to(tl.float16)
            where = bounds + rows[:, None] * (blocks * lanes) + group[None, :]
            tl.store(where, half, mask=own[:, None])
            tl.store(blockwise + rows * blocks + block, tl.max(half, 1), mask=own)
            best = tl.full([height, lanes], float("-inf"), tl.float32)


@triton.jit
def _keys_at(
    values, parents, rows, own, start, wide, total,
    capacity: tl.constexpr, span: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """(keys int32 that sort like the values, -1 where there is none; their places in the row), of one step."""
    at = start + tl.arange(0, step)[None, :]
    known = own[:, None] & (at < wide)
    if span:
        parent = tl.load(parents + rows * capacity + at // span, mask=known, other=-1)
        known = parent >= 0
        at = parent * span + at % span
    bits = tl.load(values + rows * total + at, mask=known, other=0.0).to(tl.int16, bitcast=True)
    bits = bits.to(tl.int32)
    return tl.where(known, (bits ^ ((bits >> 15) & 0x7FFF)) + 0x8000, -1), at


@triton.jit(do_not_specialize=("count", "wide", "total"))
def best_of(
    values, parents, wanted, limits, chosen, left_out, count, wide, total,
    height: tl.constexpr, capacity: tl.constexpr, span: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """Places of each user's values (half, `total` a row) from a limit on, int32 [n, capacity]; -1: no more.

    The limit is that of `limits` where there is room for so many, else the `wanted` largest, found bit by bit; ties
    beside it are taken while there is room. Where `span` is 0 the first `wide` are looked at, else the `span` behind
    each of the user's `parents`. What is left out anywhere is no larger than `left_out` (minus infinity: nothing is),
    which is raised like `limits`.
    """
    users = tl.program_id(0) * height + tl.arange(0, height)
    own = users < count
    rows = users[:, None].to(tl.int64)
    limit = tl.load(limits + users, mask=own, other=0)
    reached = limit * 0
    over = limit * 0
    known = limit * 0
    for start in range(0, wide, step):
        keys, _ = _keys_at(values, parents, rows, own, start, wide, total, capacity, span, step)
        known += tl.sum((keys >= 0).to(tl.int32), 1)
        reached += tl.sum((keys >= limit[:, None]).to(tl.int32), 1)
        over += tl.sum((keys > limit[:, None]).to(tl.int32), 1)
    full = reached > capacity
    if tl.max(full.to(tl.int32), 0) > 0:
        needed = tl.load(wanted + users, mask=own, other=1)
        found = limit * 0
        for bit in range(16):
            tried = found + (0x8000 >> bit)
            enough = limit * 0
            for start in range(0, wide, step):
                keys, _ = _keys_at(
                    values, parents, rows, own, start, wide, total, capacity, span, step
                )
                enough += tl.sum((keys >= tried[:, None]).to(tl.int32), 1)
            found = tl.where(enough >= needed, tried, found)
        limit = tl.where(full, found, limit)
        over = limit * 0
        for start in range(0, wide, step):
            keys, _ = _keys_at(values, parents, rows, own, start, wide, total, capacity, span, step)
            over += tl.sum((keys > limit[:, None]).to(tl.int32), 1)
    first = limit * 0
    second = over
    for start in range(0, wide, step):
        keys, at = _keys_at(values, parents, rows, own, start, wide, total, capacity, span, step)
        above = (keys > limit[:, None]).to(tl.int32)
        equal = (keys == limit[:, None]).to(tl.int32)
        place = (
            tl.where(
                above > 0,
                first[:, None] + tl.cumsum(above, 1),
                second[:, None] + tl.cumsum(equal, 1),
            )
            - 1
        )
        taken = (above + equal > 0) & (place < capacity)
        tl.store(chosen + rows * capacity + place, at, mask=taken)
        first += tl.sum(above, 1)
        second += tl.sum(equal, 1)
    slot = tl.arange(0, capacity)[None, :]
    unused = own[:, None] & (slot >= second[:, None])
    tl.store(
        chosen + rows * capacity + slot, tl.full([height, capacity], -1, tl.int32), mask=unused
    )
    signed = limit - 0x8000
    value = (signed ^ ((signed >> 15) & 0x7FFF)).to(tl.int16).to(tl.float16, bitcast=True)
    bound = tl.where(known > tl.minimum(second, capacity), value.to(tl.float32), float("-inf"))
    old = tl.load(left_out + users, mask=own, other=0.0)
    tl.store(left_out + users, tl.maximum(old, bound), mask=own)
    tl.store(limits + users, limit, mask=own)


@triton.jit(do_not_specialize=("count", "items", "halvings"))
def exact(
    users, own, vectors, lengths, chosen, ordinals, starts, gone, keys,
    count, items, halvings,
    steps: tl.constexpr, lanes: tl.constexpr, size: tl.constexpr, capacity: tl.constexpr, part: tl.constexpr,
    cosine: tl.constexpr,
):  # fmt: skip
    """Keys of the items of each user's chosen groups, as by `precompute.device.exact`: its sums, in its order.

    To be compiled without fused multiply-adds. What stands in the user's `gone` (ascending from `starts` on) and what
    is no item gets the key of no pair. A program has `part` of `count` pairs, on a GPU of one user.
    """
    at = tl.program_id(0).to(tl.int64) * part + tl.arange(0, part)
    own_pair = at < count
    user = at // (capacity * size)
    group = tl.load(chosen + at // size, mask=own_pair, other=-1)
    known = group >= 0
    if tl.max(group, 0) < 0:
        tl.store(keys + at, tl.full([part], _WORST, tl.int64), mask=own_pair)
    else:
        block = (group // lanes).to(tl.int64)
        column = (block * size + at % size) * lanes + group % lanes
        ordinal = tl.load(ordinals + column, mask=known, other=items)
        known = ordinal < items
        lane = tl.arange(0, 4)[None, :]
        theirs = vectors + ordinal[:, None] * (steps * 4) + lane
        ours = users + user[:, None] * (steps * 4) + lane
        sums = tl.zeros([part, 4], tl.float32)
        for step in tl.static_range(steps):
            left = tl.load(theirs + step * 4, mask=known[:, None], other=0.0)
            sums += left * tl.load(ours + step * 4, mask=known[:, None], other=0.0)
        even, odd = tl.split(tl.reshape(sums, [part, 2, 2]))
        low_sum, high_sum = tl.split(even + odd)
        score = low_sum + high_sum
        if cosine:
            length = tl.load(lengths + ordinal, mask=known, other=0.0)
            length = length * tl.load(own + user, mask=known, other=0.0)
            divisible = length > 0
            score = tl.where(divisible, tl.div_rn(score, tl.where(divisible, length, 1.0)), 0.0)
        low = tl.load(starts + user, mask=known, other=0)
        end = tl.load(starts + user + 1, mask=known, other=0)
        high = end
        for _ in range(halvings):
            middle = (low + high) // 2
            open_ = low < high
            less = tl.load(gone + middle, mask=open_, other=0) < ordinal
            low = tl.where(open_ & less, middle + 1, low)
            high = tl.where(open_ & (less == 0), middle, high)
        known = known & (tl.load(gone + low, mask=low < end, other=-1) != ordinal)
        bits = (score + 0.0).to(tl.int32, bitcast=True)
        ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
        found = (ordered << 32) | (0xFFFFFFFF - ordinal)
        tl.store(keys + at, tl.where(known, found, _WORST), mask=own_pair)

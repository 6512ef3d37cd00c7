"""Kernels of the fused top-K, in Triton: bounds of groups above a limit, the best of them, exact keys, the best keys.

Nothing of the product is written but what may be among a user's best. Run by `precompute.device.fused`, which knows
shapes and sizes; without a GPU by Triton's interpreter (TRITON_INTERPRET=1 before triton is imported).
"""

import triton
import triton.language as tl

_WORST = tl.constexpr(-(2**63))
_NONE = tl.constexpr(-1)
"""Entry of nothing: its bound is not a number."""


@triton.jit(do_not_specialize=("count", "real", "blocks", "stride"))
def above(
    users, reach, residual, limits, items, weight, longest, entries, counts,
    count, real, blocks, stride, slack,
    width: tl.constexpr, depth: tl.constexpr, height: tl.constexpr, lanes: tl.constexpr, size: tl.constexpr,
    tile: tl.constexpr, splits: tl.constexpr, room: tl.constexpr, stages: tl.constexpr, skip: tl.constexpr,
    inline: tl.constexpr,
):  # fmt: skip
    """Bounds of groups that reach the limits of `height` users, with the groups, int64 [n, splits, 4, room].

    An entry's higher half is the bound (float32, no lower than a score of the group), the lower one the group. Looked
    at are `blocks` blocks of `lanes` groups (`real` of all groups have items): multiples of `stride`, and of those with
    `skip` only what lies between each skip + 1; each by one of a user's `splits` programs. Four groups have `4 * size`
    neighbouring columns (`Columns.columns_of`), so that a group's are in one thread: neither their maximum nor what is
    written needs another. `counts` int32 [n, splits, 4] are what there was, though only `room` fit. `reach` is a user's
    length with its residual; `weight` and `longest` are the blocks' (`DeviceItems.margin`).
    """
    rows = tl.program_id(0) * height + tl.arange(0, height)
    split = tl.program_id(1)
    k = tl.arange(0, depth)
    own = rows < count
    rows = rows.to(tl.int64)
    inside = (k < width)[None, :]
    u = tl.load(users + rows[:, None] * width + k[None, :], mask=own[:, None] & inside, other=0.0)
    far = tl.load(reach + rows, mask=own, other=0.0)
    rest = tl.load(residual + rows, mask=own, other=0.0)
    limit = tl.load(limits + rows, mask=own, other=float("inf"))[:, None]
    groups: tl.constexpr = tile // size
    turns: tl.constexpr = lanes // groups
    lane = tl.arange(0, 4)
    segment = (rows[:, None] * splits + split) * 4 + lane[None, :]
    taken = tl.zeros([height, 4], tl.int32)
    inner = items + tl.arange(0, tile)[:, None] * width + k[None, :]
    number = (tl.arange(0, groups // 4)[:, None] * 4 + lane[None, :])[None, :, :]
    steps = (blocks - split + splits - 1) // splits * turns
    block = _block(split, stride, skip)
    heavy = tl.load(weight + block, mask=steps > 0, other=0.0)
    long = tl.load(longest + block, mask=steps > 0, other=0.0)
    for step in tl.range(0, steps, num_stages=stages):
        at = split + step // turns * splits
        group = _block(at, stride, skip) * lanes + step % turns * groups
        source = inner + group.to(tl.int64) * (size * width)
        v = tl.load(source) if depth == width else tl.load(source, mask=inside, other=0.0)
        margin = far * heavy + rest * long + slack
        # What the next step needs is on its way during this one.
        at = tl.minimum(split + (step + 1) // turns * splits, blocks - 1)
        block = _block(at, stride, skip)
        heavy = tl.load(weight + block)
        long = tl.load(longest + block)
        product = tl.reshape(tl.dot(u, tl.trans(v)), [height, groups // 4, size // 2, 4, 2])
        bound = tl.max(tl.max(product, 4), 2) + margin[:, None, None]
        if group + groups > real:
            bound = tl.where(group + number < real, bound, float("nan"))
        bound = tl.permute(bound, (0, 2, 1))
        free = entries + segment * room
        taken = _reaching(bound, limit, free, taken, group + lane, 4, groups // 4, room, inline)
    tl.store(counts + segment, taken, mask=own[:, None])


@triton.jit
def _block(at, stride, skip: tl.constexpr):
    """The block that is looked at as the `at`-th: with `skip` the first of every skip + 1 was looked at before."""
    if skip:
        at += at // skip + 1
    return at * stride


@triton.jit
def _reaching(
    bounds, limit, free, taken, group,
    apart: tl.constexpr, many: tl.constexpr, room: tl.constexpr, inline: tl.constexpr,
):  # fmt: skip
    """Number taken int32 [n, 4], after those of `bounds` [n, 4, many] that reach the limit [n, 1] are written.

    The groups of the first are `group` [4], those of the next `apart` further on.
    """
    if many > 1:
        even, odd = tl.split(tl.reshape(bounds, [bounds.shape[0], 4, many // 2, 2]))
        taken = _reaching(even, limit, free, taken, group, apart * 2, many // 2, room, inline)
        return _reaching(odd, limit, free, taken, group + apart, apart * 2, many // 2, room, inline)
    else:  # noqa: RET505 - Triton compiles what stands behind a return
        bound = tl.reshape(bounds, [bounds.shape[0], 4])
        hit = bound >= limit
        bits = bound.to(tl.int32, bitcast=True).to(tl.int64)
        entry = (bits << 32) | group.to(tl.int64)[None, :]
        written = hit & (taken < room)
        if inline:  # else Triton carries all of a tile through shared memory first, for the few that are written
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b64 [$1], $2; mov.b32 $0, 0; }",
                "=r,l,l,r", [(free + taken).to(tl.int64), entry, written.to(tl.int32)],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        else:
            tl.store(free + taken, entry, mask=written)
        return taken + hit.to(tl.int32)


@triton.jit(do_not_specialize=("count",))
def keep(
    entries, counts, wanted, kept, limits, left_out, count,
    height: tl.constexpr, segments: tl.constexpr, room: tl.constexpr, capacity: tl.constexpr, halvings: tl.constexpr,
):  # fmt: skip
    """Adds entries to what is `kept` of each user, int64 [n, capacity]: the `wanted` best stay; and the next limit.

    Kept are entries; `_NONE` where there are no more. The limit is at most the bound of the last that is wanted, found
    by `halvings` of where it can be: all that reach it are kept, or where they have no room those that are surely
    better than the last. What is left out anywhere is below `left_out`: minus infinity if nothing is, infinity if
    entries had no room.
    """
    users = tl.program_id(0) * height + tl.arange(0, height)
    own = users < count
    rows = users[:, None].to(tl.int64)
    mine = own[:, None]
    slot = tl.arange(0, segments * room)[None, :]
    there = tl.load(counts + rows * segments + slot // room, mask=mine, other=0)
    is_full = tl.max(there, 1) > room
    at = entries + rows * (segments * room) + slot
    known = slot % room < there
    new = _bound_of(tl.load(at, mask=known, other=_NONE))
    place = tl.arange(0, capacity)[None, :]
    old_at = kept + rows * capacity + place
    old = _bound_of(tl.load(old_at, mask=mine, other=_NONE))
    needed = tl.load(wanted + users, mask=own, other=1)
    # At least `needed` reach the lower limit, or all there are; fewer reach the upper one.
    low = tl.minimum(_least(new), _least(old))
    high = tl.maximum(-_least(-new), -_least(-old))
    enough = _reach(new, old, low) >= needed
    high += (tl.abs(high) + tl.abs(low)) * 2.0**-20 + 2.0**-100
    for _ in range(halvings):
        middle = low + (high - low) * 0.5
        reached = _reach(new, old, middle) >= needed
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    low = tl.where(enough, low, float("-inf"))
    edge = tl.where(_reach(new, old, low) <= capacity, low, high)
    stays, comes = (old >= edge[:, None]).to(tl.int32), (new >= edge[:, None]).to(tl.int32)
    before = tl.load(old_at, mask=mine, other=_NONE)
    tl.debug_barrier()  # all is read before any is written
    out = kept + rows * capacity
    first = tl.sum(stays, 1)[:, None]
    tl.store(out + tl.cumsum(stays, 1) - 1, before, mask=stays > 0)
    tl.store(
        out + first + tl.cumsum(comes, 1) - 1, tl.load(at, mask=known, other=_NONE), mask=comes > 0
    )
    unused = tl.full([height, capacity], _NONE, tl.int64)
    tl.store(out + place, unused, mask=mine & (place >= first + tl.sum(comes, 1)[:, None]))
    tl.store(limits + users, edge, mask=own)
    rest = tl.maximum(tl.load(left_out + users, mask=own, other=0.0), edge)
    tl.store(left_out + users, tl.where(is_full, float("inf"), rest), mask=own)


@triton.jit
def _bound_of(entry):
    """float32 bounds of entries; that of no entry is not a number, and reaches nothing."""
    return (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _least(bounds):
    """float32 [n]: the least of the bounds, infinity if there is none."""
    return tl.min(tl.where(bounds == bounds, bounds, float("inf")), 1)


@triton.jit
def _reach(new, old, limit):
    """int32 [n]: how many bounds reach a limit."""
    found = tl.sum((new >= limit[:, None]).to(tl.int32), 1)
    return found + tl.sum((old >= limit[:, None]).to(tl.int32), 1)


@triton.jit(do_not_specialize=("count", "items", "halvings"))
def exact(
    users, own, vectors, lengths, kept, ordinals, starts, gone, keys,
    count, items, halvings,
    steps: tl.constexpr, size: tl.constexpr, capacity: tl.constexpr, part: tl.constexpr, cosine: tl.constexpr,
):  # fmt: skip
    """Keys of the items of each user's kept groups, as by `precompute.device.exact`: its sums, in its order.

    To be compiled without fused multiply-adds. What stands in the user's `gone` (ascending from `starts` on) and what
    is no item gets the key of no pair. A program has `part` of `count` pairs, on a GPU of one user.
    """
    at = tl.program_id(0).to(tl.int64) * part + tl.arange(0, part)
    own_pair = at < count
    user = tl.minimum(at, count - 1) // (capacity * size)
    entry = tl.load(kept + at // size, mask=own_pair, other=_NONE)
    known = entry != _NONE
    if tl.max(known.to(tl.int32), 0) == 0:
        tl.store(keys + at, tl.full([part], _WORST, tl.int64), mask=own_pair)
    else:
        group = tl.where(known, entry & 0xFFFFFFFF, 0)
        member = at % size
        column = group // 4 * (4 * size) + member // 2 * 8 + group % 4 * 2 + member % 2
        ordinal = tl.load(ordinals + column, mask=known, other=items)
        known = ordinal < items
        lane = tl.arange(0, 4)[None, :]
        theirs = vectors + (group * (steps * size * 4) + member * 4)[:, None] + lane
        ours = users + user[:, None] * (steps * 4) + lane
        sums = tl.zeros([part, 4], tl.float32)
        for step in tl.static_range(steps):
            sums += tl.load(theirs + step * (size * 4)) * tl.load(ours + step * 4)
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


@triton.jit(do_not_specialize=("count", "k"))
def leading(keys, best, count, k, height: tl.constexpr, wide: tl.constexpr, most: tl.constexpr):
    """The best `k` of each user's keys int64 [n, wide], descending; `most` is the power of two that is no smaller."""
    users = tl.program_id(0) * height + tl.arange(0, height)
    own = (users < count)[:, None]
    rows = users[:, None].to(tl.int64)
    found = tl.load(keys + rows * wide + tl.arange(0, wide)[None, :], mask=own, other=_WORST)
    slot = tl.arange(0, most)[None, :]
    tl.store(best + rows * k + slot, tl.topk(found, most), mask=own & (slot < k))

"""Exact keys of the items of groups, and the best keys."""

import triton
import triton.language as tl

_WORST = tl.constexpr(-(2**63))
_NONE = tl.constexpr(-1)
"""Number of no group."""


@triton.jit(do_not_specialize=("count", "items"))
def exact(
    users, own, vectors, lengths, kept, left_out, ordinals, starts, gone, keys,
    count, items,
    steps: tl.constexpr, unroll: tl.constexpr, size: tl.constexpr, capacity: tl.constexpr, part: tl.constexpr,
    cosine: tl.constexpr,
):  # fmt: skip
    """Keys of the items of kept groups that may be better than what was left out, as by `precompute.device.exact`.

    Its sums, in its order, so to be compiled without fused multiply-adds. int64 [n, size, capacity]: first of each
    group its first such item. What stands in the user's `gone` (ascending from `starts` on) and what is no item gets
    the key of no pair. A program has `part` of `count` entries, on a GPU of one user.
    """
    at = tl.program_id(0).to(tl.int64) * part + tl.arange(0, part)
    user = tl.minimum(at, count - 1) // capacity
    here = at < count
    group = tl.load(kept + at * 4 + 1, mask=here, other=_NONE)
    bound = tl.load(kept + at * 4, mask=here, other=_NONE).to(tl.float32, bitcast=True)
    zero, one = _both(tl.load(kept + at * 4 + 2, mask=here, other=0))
    two, three = _both(tl.load(kept + at * 4 + 3, mask=here, other=0))
    # An item's bound is as much below its group's as its product is below the highest, but for the rounding of halves.
    highest = tl.maximum(tl.maximum(zero, one), tl.maximum(two, three))
    limit = tl.load(left_out + user) - bound + highest - tl.abs(highest) * 2.0**-9 - 2.0**-20
    marks = _may_reach(zero, limit) + _may_reach(one, limit) * 2
    marks += _may_reach(two, limit) * 4 + _may_reach(three, limit) * 8
    marks = tl.where(group == _NONE, 0, marks)
    group = tl.where(group == _NONE, 0, group)
    out = keys + user * (size * capacity) + at % capacity
    start = tl.load(starts + user)
    end = tl.load(starts + user + 1)
    longest = tl.max(end - start, 0)
    lane = tl.arange(0, 4)[None, :]
    ours = users + user[:, None] * (steps * 4) + lane
    for turn in range(size):
        found = tl.full([part], _WORST, tl.int64)
        known = marks != 0
        if tl.max(marks, 0) != 0:
            mark = marks & -marks
            marks -= mark
            member = (mark >> 1) - (mark >> 3)  # 0 to 3 for 1, 2, 4, 8
            column = group // 4 * (4 * size) + member // 2 * 8 + group % 4 * 2 + member % 2
            ordinal = tl.load(ordinals + column, mask=known, other=items)
            known = known & (ordinal < items)
            row = tl.where(known, ordinal, 0)
            theirs = vectors + row[:, None] * (steps * 4) + lane
            sums = tl.zeros([part, 4], tl.float32)
            for first in range(0, steps, unroll):
                for step in tl.static_range(unroll):
                    number = tl.load(theirs + (first + step) * 4, mask=known[:, None], other=0.0)
                    sums += number * tl.load(ours + (first + step) * 4)
            even, odd = tl.split(tl.reshape(sums, [part, 2, 2]))
            low_sum, high_sum = tl.split(even + odd)
            score = low_sum + high_sum
            if cosine:
                length = tl.load(lengths + row) * tl.load(own + user)
                divisible = length > 0
                score = tl.where(divisible, tl.div_rn(score, tl.where(divisible, length, 1.0)), 0.0)
            low, high, between = start, end, longest
            while between > 0:
                middle = (low + high) // 2
                open_ = low < high
                less = tl.load(gone + middle, mask=open_, other=0) < ordinal
                low = tl.where(open_ & less, middle + 1, low)
                high = tl.where(open_ & (less == 0), middle, high)
                between = between >> 1
            known = known & (tl.load(gone + low, mask=low < end, other=-1) != ordinal)
            bits = (score + 0.0).to(tl.int32, bitcast=True)
            ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
            found = tl.where(known, (ordered << 32) | (0xFFFFFFFF - ordinal), _WORST)
        tl.store(out + turn * capacity, found, mask=at < count)


@triton.jit
def _both(halves):
    """float32 of the two numbers in half precision that an entry has in 32 bits."""
    low, high = halves.to(tl.int16), (halves >> 16).to(tl.int16)
    low, high = low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _may_reach(score, limit):
    """int32: 1 for a score that may reach a limit, before it was rounded to half precision."""
    return (score + tl.abs(score) * 2.0**-10 >= limit).to(tl.int32)


@triton.jit(do_not_specialize=("count", "k"))
def leading(
    keys, best, count, k,
    height: tl.constexpr, size: tl.constexpr, wide: tl.constexpr, most: tl.constexpr,
):  # fmt: skip
    """The best `k` of each user's keys int64 [n, size, wide], descending; `most` is the power of two no smaller than k.

    Behind the first `wide` there mostly are none.
    """
    users = tl.program_id(0) * height + tl.arange(0, height)
    own = (users < count)[:, None]
    rows = users[:, None].to(tl.int64)
    at = keys + rows * (size * wide) + tl.arange(0, wide)[None, :]
    found = tl.topk(tl.load(at, mask=own, other=_WORST), most)
    for turn in range(1, size):
        more = tl.load(at + turn * wide, mask=own, other=_WORST)
        if tl.max(tl.max(more, 1), 0) != _WORST:
            both = tl.permute(tl.join(found, tl.topk(more, most)), (0, 2, 1))
            found = tl.topk(tl.reshape(both, [height, 2 * most]), most)
    slot = tl.arange(0, most)[None, :]
    tl.store(best + rows * k + slot, found, mask=own & (slot < k))

"""Kernels of exact keys of the items of groups, and of the best keys."""

import triton
import triton.language as tl

_WORST = tl.constexpr(-(2**63))
_NONE = tl.constexpr(-1)
"""Number that stands for no group."""


@triton.jit(do_not_specialize=("count", "items"))
def exact(
    users, user_lengths, vectors, lengths, kept_entries, left_out, ordinals, starts, excluded_ordinals, keys,
    count, items,
    steps: tl.constexpr, unroll: tl.constexpr, size: tl.constexpr, capacity: tl.constexpr, part: tl.constexpr,
    cosine: tl.constexpr,
):  # fmt: skip
    """Write keys of the items of kept groups that may be better than omitted ones, as `precompute.device.items` does.

    The sums have the same order, so the kernel must be compiled without fused multiply-adds. The keys are int64 [n,
    size, capacity]: first the first such item of each group, then the second ones. The user's `excluded_ordinals`
    (ascending from `starts` on) and columns without an item get the key of no pair. A program handles `part` of `count`
    entries, on a GPU those of one user.
    """
    at = tl.program_id(0).to(tl.int64) * part + tl.arange(0, part)
    user = tl.minimum(at, count - 1) // capacity
    entry_mask = at < count
    group = tl.load(kept_entries + at * 4 + 1, mask=entry_mask, other=_NONE)
    bound = tl.load(kept_entries + at * 4, mask=entry_mask, other=_NONE).to(tl.float32, bitcast=True)
    zero, score_one = _unpack_halves(tl.load(kept_entries + at * 4 + 2, mask=entry_mask, other=0))
    two, three = _unpack_halves(tl.load(kept_entries + at * 4 + 3, mask=entry_mask, other=0))
    # An item's bound is below its group's as far as its product is below the highest, but for the rounding to halves.
    highest = tl.maximum(tl.maximum(zero, score_one), tl.maximum(two, three))
    limit = tl.load(left_out + user) - bound + highest - tl.abs(highest) * 2.0**-9 - 2.0**-20
    candidate_bits = _may_reach(zero, limit) + _may_reach(score_one, limit) * 2
    candidate_bits += _may_reach(two, limit) * 4 + _may_reach(three, limit) * 8
    candidate_bits = tl.where(group == _NONE, 0, candidate_bits)
    group = tl.where(group == _NONE, 0, group)
    key_pointer = keys + user * (size * capacity) + at % capacity
    start = tl.load(starts + user)
    end = tl.load(starts + user + 1)
    longest = tl.max(end - start, 0)
    step_offset = tl.arange(0, 4)[None, :]
    user_pointers = users + user[:, None] * (steps * 4) + step_offset
    for item_slot in range(size):
        exact_keys = tl.full([part], _WORST, tl.int64)
        item_mask = candidate_bits != 0
        if tl.max(candidate_bits, 0) != 0:
            lowest_bit = candidate_bits & -candidate_bits
            candidate_bits -= lowest_bit
            member = (lowest_bit >> 1) - (lowest_bit >> 3)  # the bits 1, 2, 4, 8 become 0 to 3
            column = group // 4 * (4 * size) + member // 2 * 8 + group % 4 * 2 + member % 2
            ordinal = tl.load(ordinals + column, mask=item_mask, other=items)
            item_mask = item_mask & (ordinal < items)
            row = tl.where(item_mask, ordinal, 0)
            theirs = vectors + row[:, None] * (steps * 4) + step_offset
            sums = tl.zeros([part, 4], tl.float32)
            for first in range(0, steps, unroll):
                for step in tl.static_range(unroll):
                    number = tl.load(theirs + (first + step) * 4, mask=item_mask[:, None], other=0.0)
                    sums += number * tl.load(user_pointers + (first + step) * 4)
            even, odd = tl.split(tl.reshape(sums, [part, 2, 2]))
            low_sum, high_sum = tl.split(even + odd)
            score = low_sum + high_sum
            if cosine:
                length = tl.load(lengths + row) * tl.load(user_lengths + user)
                divisible = length > 0
                score = tl.where(divisible, tl.div_rn(score, tl.where(divisible, length, 1.0)), 0.0)
            low, high, between = start, end, longest
            while between > 0:
                middle = (low + high) // 2
                open_ = low < high
                less = tl.load(excluded_ordinals + middle, mask=open_, other=0) < ordinal
                low = tl.where(open_ & less, middle + 1, low)
                high = tl.where(open_ & (less == 0), middle, high)
                between = between >> 1
            item_mask = item_mask & (tl.load(excluded_ordinals + low, mask=low < end, other=-1) != ordinal)
            bits = (score + 0.0).to(tl.int32, bitcast=True)
            ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
            exact_keys = tl.where(item_mask, (ordered << 32) | (0xFFFFFFFF - ordinal), _WORST)
        tl.store(key_pointer + item_slot * capacity, exact_keys, mask=at < count)


@triton.jit
def _unpack_halves(halves):
    """Return the two half-precision numbers, as float32, that an entry has in 32 bits."""
    low, high = halves.to(tl.int16), (halves >> 16).to(tl.int16)
    low, high = (low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True))
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _may_reach(score, limit):
    """Return int32: 1 for a score that might have reached a limit before it was rounded to half precision."""
    return (score + tl.abs(score) * 2.0**-10 >= limit).to(tl.int32)


@triton.jit(do_not_specialize=("count", "k"))
def leading(
    keys, best_keys, count, k,
    height: tl.constexpr, size: tl.constexpr, wide: tl.constexpr, padded_k: tl.constexpr,
):  # fmt: skip
    """Write the best `k` of each user's keys int64 [n, size, wide], descending; `padded_k` is a power of two.

    Mostly there are no keys after the first `wide`.
    """
    users = tl.program_id(0) * height + tl.arange(0, height)
    user_mask = (users < count)[:, None]
    rows = users[:, None].to(tl.int64)
    at = keys + rows * (size * wide) + tl.arange(0, wide)[None, :]
    top_keys = tl.topk(tl.load(at, mask=user_mask, other=_WORST), padded_k)
    for item_slot in range(1, size):
        more = tl.load(at + item_slot * wide, mask=user_mask, other=_WORST)
        if tl.max(tl.max(more, 1), 0) != _WORST:
            merged_keys = tl.permute(tl.join(top_keys, tl.topk(more, padded_k)), (0, 2, 1))
            top_keys = tl.topk(tl.reshape(merged_keys, [height, 2 * padded_k]), padded_k)
    slot = tl.arange(0, padded_k)[None, :]
    tl.store(best_keys + rows * k + slot, top_keys, mask=user_mask & (slot < k))

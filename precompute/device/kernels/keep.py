"""Kernel `keep`: keeps the best entries that `above` wrote, and raises the limit for its next call."""

import triton
import triton.language as tl

_NONE = tl.constexpr(-1)
"""Number that stands for no group; as a float, the bound of such an entry is NaN."""


@triton.jit(do_not_specialize=("count",))
def keep(
    entries, counts, required_counts, kept_entries, limits, left_out, count,
    height: tl.constexpr, segments: tl.constexpr, room: tl.constexpr, capacity: tl.constexpr, halvings: tl.constexpr,
):  # fmt: skip
    """Merge entries of `above` into each user's `kept_entries`, int32 [n, capacity, 4], and set the user's next limit.

    The `required_counts` best entries stay; missing ones have the number `_NONE`. The limit is at most the bound of the
    last required entry, found by `halvings` bisections; it does not change while there are fewer entries. All entries
    that reach the limit are kept; if they exceed the capacity, only those that are certainly better than the last.
    `left_out` is at least the bound of every omitted entry: minus infinity if there is none, infinity if `above` had no
    room for entries.
    """
    users = tl.program_id(0) * height + tl.arange(0, height)
    user_mask = users < count
    rows = users.to(tl.int64)[:, None]
    mine = user_mask[:, None]
    position = tl.arange(0, capacity)[None, :]
    at = entries + (rows * (segments * room) + position) * 4
    old_at = kept_entries + (rows * capacity + position) * 4
    old = _bound_at(old_at, mine)
    layers: tl.constexpr = segments * room // capacity
    new = ()  # as many entries at once as are kept
    max_counts = tl.zeros([height, capacity], tl.int32)
    for layer in tl.static_range(layers):
        slot = layer * capacity + position
        segment_counts = tl.load(counts + rows * segments + slot // room, mask=mine, other=0)
        max_counts = tl.maximum(max_counts, segment_counts)
        layer_bounds = _bound_at(at + layer * (capacity * 4), slot % room < segment_counts)
        new = new + (layer_bounds,)  # noqa: RUF005 - Triton unpacks nothing
    needed = tl.load(required_counts + users, mask=user_mask, other=1)
    # At least `needed` entries (or all, if there are fewer) reach the lower limit; fewer reach the upper one.
    lowest, highest = old, old
    for layer in tl.static_range(layers):
        is_none = new[layer] != new[layer]
        lowest = tl.where(is_none | (new[layer] >= lowest), lowest, new[layer])
        highest = tl.where(is_none | (new[layer] <= highest), highest, new[layer])
    low = tl.min(tl.where(lowest == lowest, lowest, float("inf")), 1)
    high = tl.max(tl.where(highest == highest, highest, float("-inf")), 1)
    enough = _reach(new, old, low, layers) >= needed
    high += (tl.abs(high) + tl.abs(low)) * 2.0**-20 + 2.0**-100
    for _ in range(halvings):
        middle = low + (high - low) * 0.5
        reached = _reach(new, old, middle, layers) >= needed
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    low = tl.where(enough, low, tl.load(limits + users, mask=user_mask, other=0.0))
    edge = tl.where(_reach(new, old, low, layers) <= capacity, low, high)
    limit = edge[:, None]
    stays = (old >= limit).to(tl.int32)
    first, second, third = _rest_at(old_at, stays > 0)
    tl.debug_barrier()  # all entries are read before any is written
    kept_counts = stays
    for layer in tl.static_range(layers):
        kept_counts += (new[layer] >= limit).to(tl.int32)
    # Each position writes its kept entry, then its new ones, after those of the positions before it.
    to = kept_entries + (rows * capacity + tl.cumsum(kept_counts, 1) - kept_counts) * 4
    _write(to, old, first, second, third, stays > 0)
    to += stays * 4
    for layer in tl.static_range(layers):
        entering_mask = new[layer] >= limit
        first, second, third = _rest_at(at + layer * (capacity * 4), entering_mask)
        _write(to, new[layer], first, second, third, entering_mask)
        to += entering_mask.to(tl.int32) * 4
    free = mine & (position >= tl.sum(kept_counts, 1)[:, None])
    none_values = tl.full([height, capacity], _NONE, tl.int32)
    _write(old_at, none_values.to(tl.float32, bitcast=True), none_values, none_values, none_values, free)
    tl.store(limits + users, edge, mask=user_mask)
    left_out_bounds = tl.maximum(tl.load(left_out + users, mask=user_mask, other=0.0), edge)
    tl.store(left_out + users, tl.where(tl.max(max_counts, 1) > room, float("inf"), left_out_bounds), mask=user_mask)


@triton.jit
def _bound_at(entry, entry_mask):
    """Return the bounds of entries, float32; NaN for missing entries."""
    return tl.load(entry, mask=entry_mask, other=_NONE).to(tl.float32, bitcast=True)


@triton.jit
def _rest_at(entry, entry_mask):
    """Return the other three numbers of entries."""
    first = tl.load(entry + 1, mask=entry_mask, other=_NONE)
    return (first, tl.load(entry + 2, mask=entry_mask, other=0), tl.load(entry + 3, mask=entry_mask, other=0))


@triton.jit
def _write(entry, bound, first, second, third, entry_mask):
    """Write entries to these addresses."""
    tl.store(entry, bound.to(tl.int32, bitcast=True), mask=entry_mask)
    tl.store(entry + 1, first, mask=entry_mask)
    tl.store(entry + 2, second, mask=entry_mask)
    tl.store(entry + 3, third, mask=entry_mask)


@triton.jit
def _reach(new, old, limit, layers: tl.constexpr):
    """Return int32 [n]: the number of bounds, from `layers` arrays [n, m] and one more, that reach a limit [n]."""
    reach_counts = (old >= limit[:, None]).to(tl.int32)
    for layer in tl.static_range(layers):
        reach_counts += (new[layer] >= limit[:, None]).to(tl.int32)
    return tl.sum(reach_counts, 1)

"""The best of what `above` wrote, and the limit that it has to reach next time."""

import triton
import triton.language as tl

_NONE = tl.constexpr(-1)
"""Number of no group: that entry's bound is not a number."""


@triton.jit(do_not_specialize=("count",))
def keep(
    entries, counts, wanted, kept, limits, left_out, count,
    height: tl.constexpr, segments: tl.constexpr, room: tl.constexpr, capacity: tl.constexpr, halvings: tl.constexpr,
):  # fmt: skip
    """Adds entries of `above` to what is `kept` of each user, int32 [n, capacity, 4]; and the next limit.

    The `wanted` best stay; the number is `_NONE` where there are no more. The limit is at most the bound of the last
    that is wanted, found by `halvings` of where it can be, and stays as it is while there are fewer: all that reach it
    are kept, or where they have no room those that are surely better than the last. What is left out anywhere is below
    `left_out`: minus infinity if nothing is, infinity if entries had no room.
    """
    users = tl.program_id(0) * height + tl.arange(0, height)
    own = users < count
    rows = users.to(tl.int64)[:, None]
    mine = own[:, None]
    place = tl.arange(0, capacity)[None, :]
    at = entries + (rows * (segments * room) + place) * 4
    old_at = kept + (rows * capacity + place) * 4
    old = _bound_at(old_at, mine)
    layers: tl.constexpr = segments * room // capacity
    new = ()  # as many entries at once as are kept
    most = tl.zeros([height, capacity], tl.int32)
    for layer in tl.static_range(layers):
        slot = layer * capacity + place
        there = tl.load(counts + rows * segments + slot // room, mask=mine, other=0)
        most = tl.maximum(most, there)
        found = _bound_at(at + layer * (capacity * 4), slot % room < there)
        new = new + (found,)  # noqa: RUF005 - Triton unpacks nothing
    needed = tl.load(wanted + users, mask=own, other=1)
    # At least `needed` reach the lower limit, or all there are; fewer reach the upper one.
    least, highest = old, old
    for layer in tl.static_range(layers):
        is_none = new[layer] != new[layer]
        least = tl.where(is_none | (new[layer] >= least), least, new[layer])
        highest = tl.where(is_none | (new[layer] <= highest), highest, new[layer])
    low = tl.min(tl.where(least == least, least, float("inf")), 1)
    high = tl.max(tl.where(highest == highest, highest, float("-inf")), 1)
    enough = _reach(new, old, low, layers) >= needed
    high += (tl.abs(high) + tl.abs(low)) * 2.0**-20 + 2.0**-100
    for _ in range(halvings):
        middle = low + (high - low) * 0.5
        reached = _reach(new, old, middle, layers) >= needed
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    low = tl.where(enough, low, tl.load(limits + users, mask=own, other=0.0))
    edge = tl.where(_reach(new, old, low, layers) <= capacity, low, high)
    limit = edge[:, None]
    stays = (old >= limit).to(tl.int32)
    first, second, third = _rest_at(old_at, stays > 0)
    tl.debug_barrier()  # all is read before any is written
    many = stays
    for layer in tl.static_range(layers):
        many += (new[layer] >= limit).to(tl.int32)
    # Behind those of the places before it comes what stays of a place, then what is new there.
    to = kept + (rows * capacity + tl.cumsum(many, 1) - many) * 4
    _write(to, old, first, second, third, stays > 0)
    to += stays * 4
    for layer in tl.static_range(layers):
        comes = new[layer] >= limit
        first, second, third = _rest_at(at + layer * (capacity * 4), comes)
        _write(to, new[layer], first, second, third, comes)
        to += comes.to(tl.int32) * 4
    free = mine & (place >= tl.sum(many, 1)[:, None])
    nothing = tl.full([height, capacity], _NONE, tl.int32)
    _write(old_at, nothing.to(tl.float32, bitcast=True), nothing, nothing, nothing, free)
    tl.store(limits + users, edge, mask=own)
    rest = tl.maximum(tl.load(left_out + users, mask=own, other=0.0), edge)
    tl.store(left_out + users, tl.where(tl.max(most, 1) > room, float("inf"), rest), mask=own)


@triton.jit
def _bound_at(entry, known):
    """float32: the bounds of entries, not a number where none is known."""
    return tl.load(entry, mask=known, other=_NONE).to(tl.float32, bitcast=True)


@triton.jit
def _rest_at(entry, known):
    """The other three numbers of entries."""
    first = tl.load(entry + 1, mask=known, other=_NONE)
    return first, tl.load(entry + 2, mask=known, other=0), tl.load(entry + 3, mask=known, other=0)


@triton.jit
def _write(entry, bound, first, second, third, known):
    """Writes entries where they are known."""
    tl.store(entry, bound.to(tl.int32, bitcast=True), mask=known)
    tl.store(entry + 1, first, mask=known)
    tl.store(entry + 2, second, mask=known)
    tl.store(entry + 3, third, mask=known)


@triton.jit
def _reach(new, old, limit, layers: tl.constexpr):
    """int32 [n]: how many bounds, `layers` times [n, m] and [n, m], reach a limit [n]."""
    found = (old >= limit[:, None]).to(tl.int32)
    for layer in tl.static_range(layers):
        found += (new[layer] >= limit[:, None]).to(tl.int32)
    return tl.sum(found, 1)

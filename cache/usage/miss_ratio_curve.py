"""Miss-ratio curve of LRU from a sample of keys: SHARDS (Waldspurger et al., FAST 2015), of fixed size."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate, islice

from cache.format.ids import HASH_SPACE

_THRESHOLD_STEP = 1 << 32
"""Granularity of the threshold: the upper half of a spot decides, the lower half only tells keys apart."""

_BLOCK_BITS = 7
_BLOCK = 1 << _BLOCK_BITS


class MissRatioCurve:
    """Estimate of the hit ratios of LRU caches with the given `capacities` (ascending), in the unit of the sizes.

    A key is known by its spot, a uniform hash in [0, 2^64): it is in the sample if its spot is at most `last`. At the
    beginning every key is; when there are more than `keys_max`, the one with the greatest spot leaves, and the
    threshold falls to it. A distance is the touched size of the sample divided by its rate, and each read counts for as
    many as the sample stands for. SHARDS-adj: reads that the sample has too few or too many of, compared with all,
    count as ones of the shortest distance. Keys deeper than the largest capacity are dropped: no cache would hold them.
    """

    def __init__(self, capacities: Sequence[int], keys_max: int) -> None:
        self.last = HASH_SPACE - 1
        self.sampled = 0
        self._capacities = tuple(capacities)
        self._keys_max = keys_max
        self._stack = RecencyStack(keys_max)
        self._greatest: list[int] = []  # a heap of negated spots
        self.rate = 1.0
        """Share of all keys that is sampled."""
        self._hits = [0.0] * (len(capacities) + 1)
        self._weight = self._answerable_reads = 0.0
        self.reads = 0.0
        """Number of counted reads, aged."""

    @property
    def keys(self) -> int:
        """Number of keys in the sample."""
        return len(self._stack)

    def count(self, hit_count: int, reads: int) -> None:
        """Count reads of sampled and other keys; `hit_count` of them the largest capacity would answer."""
        self._answerable_reads += hit_count
        self.reads += reads

    def record_accesses(self, touches: Sequence[tuple[int, int]], slot_bytes: int = 0) -> None:
        """Record touches in order, at most `keys_max`: a key's spot and its size, to which `slot_bytes` is added.

        A size is negative if the key was stored, or moved, without a counted read.
        Keys that are not in the sample are ignored; a store moves its key, and counts for nothing.
        """
        stack = self._stack
        if len(touches) > stack.remaining_slots:
            self._close_up()
        hits, capacities, touch_key = self._hits, self._capacities, stack.move_to_top
        last, weight, weights, sampled = self.last, 1 / self.rate, 0.0, 0
        for spot, size in touches:
            if spot > last:
                continue
            if size < 0:
                above = touch_key(spot, slot_bytes - size)
            else:
                above = touch_key(spot, size + slot_bytes)
                weights += weight
                sampled += 1
                if above is not None:
                    hits[bisect_left(capacities, above * weight + size + slot_bytes)] += weight
            if above is None:
                heappush(self._greatest, -spot)
                if len(stack) > self._keys_max:
                    self._fall(-self._greatest[0])
                    last, weight = self.last, 1 / self.rate
        self.sampled += sampled
        self._weight += weights

    def age(self, factor: float) -> None:
        """Multiply the weight of all reads so far by `factor`, in [0, 1]."""
        self._hits = [count * factor for count in self._hits]
        self._weight *= factor
        self._answerable_reads *= factor
        self.reads *= factor

    def lower(self, rate: float) -> None:
        """Lower the sampled share of keys to at most `rate`."""
        if rate < self.rate:
            self._fall(int(rate * HASH_SPACE))

    def restart(self) -> None:
        """Forget the keys and sample all new ones; the reads so far stay counted."""
        self._stack = RecencyStack(self._keys_max)
        self._greatest = []
        self.last, self.rate = HASH_SPACE - 1, 1.0

    def hit_ratios(self) -> list[float]:
        """Return the hit ratio of all reads for each capacity; 0 before the first read."""
        if not self.reads:
            return [0.0] * len(self._capacities)
        hits = accumulate(self._hits[:-1], initial=self._answerable_reads - self._weight)
        next(hits)
        return [min(1.0, max(0.0, hit_count / self.reads)) for hit_count in hits]

    def entries(self) -> list[int]:
        """Return the number of recently read keys that each capacity holds."""
        depths = [capacity * self.rate for capacity in self._capacities]
        return [round(count / self.rate) for count in self._stack.within(depths)]

    def _fall(self, spot: int) -> None:
        """Lower the threshold to the spot's multiple of `_THRESHOLD_STEP`, and forget the keys above it."""
        self.last = max(_THRESHOLD_STEP, spot // _THRESHOLD_STEP * _THRESHOLD_STEP) - 1
        self.rate = (self.last + 1) / HASH_SPACE
        greatest = self._greatest
        while greatest and -greatest[0] > self.last:
            self._stack.forget(-heappop(greatest))

    def _close_up(self) -> None:
        previous_count = len(self._stack)
        self._stack.close_up(self._capacities[-1] * self.rate)
        if len(self._stack) < previous_count:
            self._greatest = [-spot for spot in self._stack]
            heapify(self._greatest)


class RecencyStack:
    """LRU stack (Mattson et al., 1970) of at most `keys_max` keys, each with its bytes.

    A touch takes the next of `2 * keys_max` slots, whose bytes are also summed by blocks: so the bytes above a key cost
    two short sums, near the top of the stack almost nothing. When no slots are `remaining_slots`, `close_up` moves the
    keys together; it takes 0.2 us per key.
    """

    def __init__(self, keys_max: int) -> None:
        blocks = max(2, -(-2 * keys_max // _BLOCK))
        self._slots: dict[int, int] = {}  # oldest touch first
        self._sizes = [0] * (blocks * _BLOCK)
        self._blocks = [0] * blocks
        self._next = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    @property
    def remaining_slots(self) -> int:
        """Number of touches until the next `close_up`."""
        return len(self._sizes) - self._next

    def move_to_top(self, key: int, size: int) -> int | None:
        """Move the key to the top; return the bytes that were above it, without its own, or None if it is new."""
        slots, sizes, blocks, at = self._slots, self._sizes, self._blocks, self._next
        slot, above = slots.pop(key, None), None
        if slot is not None:
            block = slot >> _BLOCK_BITS
            if block == at >> _BLOCK_BITS:
                above = sum(sizes[slot + 1 : at])
            else:
                above = sum(sizes[slot + 1 : (block + 1) << _BLOCK_BITS])
                above += sum(blocks[block + 1 : (at >> _BLOCK_BITS) + 1])
            blocks[block] -= sizes[slot]
            sizes[slot] = 0
        slots[key] = at
        sizes[at] = size
        blocks[at >> _BLOCK_BITS] += size
        self._next = at + 1
        return above

    def forget(self, key: int) -> None:
        """Remove a key that is in the stack."""
        slot = self._slots.pop(key)
        self._blocks[slot >> _BLOCK_BITS] -= self._sizes[slot]
        self._sizes[slot] = 0

    def close_up(self, depth: float) -> None:
        """Free the slots of old touches; drop keys with more than `depth` bytes above them."""
        sizes = list(map(self._sizes.__getitem__, self._slots.values()))
        start = 0
        if sum(self._blocks) > depth:
            through = list(accumulate(reversed(sizes)))
            start = max(0, len(sizes) - bisect_right(through, depth) - 1)
        kept_sizes = sizes[start:]
        self._slots = dict(
            zip(islice(self._slots, start, None), range(len(kept_sizes)), strict=True)
        )
        self._sizes = kept_sizes + [0] * (len(self._sizes) - len(kept_sizes))
        self._blocks = [
            sum(self._sizes[at : at + _BLOCK]) for at in range(0, len(self._sizes), _BLOCK)
        ]
        self._next = len(kept_sizes)

    def within(self, depths: Sequence[float]) -> list[int]:
        """Return the number of keys from the top that fit within each number of bytes."""
        newest_first = [self._sizes[slot] for slot in reversed(self._slots.values())]
        through = list(accumulate(newest_first))
        return [bisect_right(through, depth) for depth in depths]

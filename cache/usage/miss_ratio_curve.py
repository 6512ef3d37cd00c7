"""Miss-ratio curve of an LRU cache from a fixed-size sample of keys: SHARDS (Waldspurger et al., FAST 2015)."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate, islice

from cache.format.ids import HASH_SPACE

_THRESHOLD_STEP = 1 << 32
"""Granularity of the threshold: the upper half of a spot decides about sampling, the lower half identifies the key."""

_BLOCK_BITS = 7
_SLOTS_PER_BLOCK = 1 << _BLOCK_BITS


class MissRatioCurve:
    """Estimate of the hit ratios of LRU caches with the given `capacities` (ascending), in the unit of the keys' sizes.

    A key is identified by its spot, a uniform hash in [0, 2^64), and sampled if its spot is at most
    `greatest_sampled_spot`. At first all keys are sampled; when there are more than `sampled_keys_max`, the key with
    the greatest spot is removed, and the threshold is lowered to it. A reuse distance is the size of the sampled keys
    touched since, divided by the sampling rate, and each sampled read has the weight 1 / rate. SHARDS-adj: the
    difference between the number of reads and the weight of the sampled reads is added to the shortest distance. Keys
    deeper than the largest capacity are dropped, since no cache would hold them.
    """

    def __init__(self, capacities: Sequence[int], sampled_keys_max: int) -> None:
        self.greatest_sampled_spot = HASH_SPACE - 1
        self.sampled_reads = 0
        self._capacities = tuple(capacities)
        self._keys_max = sampled_keys_max
        self._stack = RecencyStack(sampled_keys_max)
        self._negated_spot_heap: list[int] = []  # negated, because heapq provides min-heaps
        self.rate = 1.0
        """Sampled share of all keys."""
        self._hit_weights = [0.0] * (len(capacities) + 1)
        self._sampled_weight = self._answerable_reads = 0.0
        self.reads = 0.0
        """Number of counted reads, reduced by `age`."""

    @property
    def sampled_key_count(self) -> int:
        """Number of keys in the sample."""
        return len(self._stack)

    def count(self, hit_count: int, read_count: int) -> None:
        """Count reads of sampled and other keys; the largest capacity would answer `hit_count` of them."""
        self._answerable_reads += hit_count
        self.reads += read_count

    def record_touches(self, spots_and_sizes: Sequence[tuple[int, int]], slot_bytes: int = 0) -> None:
        """Record at most `keys_max` touches in order: a key's spot and its size, to which `slot_bytes` is added.

        A size is negative if the key was stored, or moved, without a counted read. Keys outside the sample are ignored;
        storing a key moves it to the top without counting a read.
        """
        stack = self._stack
        if len(spots_and_sizes) > stack.remaining_slots:
            self._close_up()
        hit_weights, capacities, move_to_top = (self._hit_weights, self._capacities, stack.move_to_top)
        last, weight, added_weight, sampled_count = (self.greatest_sampled_spot, 1 / self.rate, 0.0, 0)
        for spot, size_bytes in spots_and_sizes:
            if spot > last:
                continue
            if size_bytes < 0:
                bytes_above = move_to_top(spot, slot_bytes - size_bytes)
            else:
                bytes_above = move_to_top(spot, size_bytes + slot_bytes)
                added_weight += weight
                sampled_count += 1
                if bytes_above is not None:
                    hit_weights[bisect_left(capacities, bytes_above * weight + size_bytes + slot_bytes)] += weight
            if bytes_above is None:
                heappush(self._negated_spot_heap, -spot)
                if len(stack) > self._keys_max:
                    self._lower_threshold(-self._negated_spot_heap[0])
                    last, weight = self.greatest_sampled_spot, 1 / self.rate
        self.sampled_reads += sampled_count
        self._sampled_weight += added_weight

    def age(self, weight_factor: float) -> None:
        """Multiply the weight of all reads so far by `weight_factor`, in [0, 1]."""
        self._hit_weights = [count * weight_factor for count in self._hit_weights]
        self._sampled_weight *= weight_factor
        self._answerable_reads *= weight_factor
        self.reads *= weight_factor

    def lower_rate(self, sampling_rate: float) -> None:
        """Lower the sampled share of keys to at most `sampling_rate`."""
        if sampling_rate < self.rate:
            self._lower_threshold(int(sampling_rate * HASH_SPACE))

    def restart(self) -> None:
        """Forget the keys and sample all keys again; counted reads are kept."""
        self._stack = RecencyStack(self._keys_max)
        self._negated_spot_heap = []
        self.greatest_sampled_spot, self.rate = HASH_SPACE - 1, 1.0

    def hit_ratio_by_capacity(self) -> list[float]:
        """Return the hit ratio of all reads for each capacity; 0 before the first read."""
        if not self.reads:
            return [0.0] * len(self._capacities)
        cumulative_hits = accumulate(self._hit_weights[:-1], initial=self._answerable_reads - self._sampled_weight)
        next(cumulative_hits)
        return [min(1.0, max(0.0, hit_count / self.reads)) for hit_count in cumulative_hits]

    def key_count_by_capacity(self) -> list[int]:
        """Return the number of recently read keys that each capacity holds."""
        depths = [capacity * self.rate for capacity in self._capacities]
        return [round(count / self.rate) for count in self._stack.key_counts_within(depths)]

    def _lower_threshold(self, spot: int) -> None:
        """Lower the threshold to a multiple of `_THRESHOLD_STEP` at or below the spot, and forget the keys above it."""
        self.greatest_sampled_spot = max(_THRESHOLD_STEP, spot // _THRESHOLD_STEP * _THRESHOLD_STEP) - 1
        self.rate = (self.greatest_sampled_spot + 1) / HASH_SPACE
        negated_spots = self._negated_spot_heap
        while negated_spots and -negated_spots[0] > self.greatest_sampled_spot:
            self._stack.forget(-heappop(negated_spots))

    def _close_up(self) -> None:
        previous_count = len(self._stack)
        self._stack.close_up(self._capacities[-1] * self.rate)
        if len(self._stack) < previous_count:
            self._negated_spot_heap = [-spot for spot in self._stack]
            heapify(self._negated_spot_heap)


class RecencyStack:
    """LRU stack (Mattson et al., 1970) of at most `keys_max` keys with their sizes in bytes.

    Each touch takes the next of `2 * keys_max` slots, whose bytes are also summed by blocks: the bytes above a key are
    two short sums, which near the top of the stack are almost free. When `remaining_slots` is 0, `close_up` moves the
    keys together, which takes 0.2 us per key.
    """

    def __init__(self, keys_max: int) -> None:
        block_count = max(2, -(-2 * keys_max // _SLOTS_PER_BLOCK))
        self._slot_by_key: dict[int, int] = {}  # oldest touch first
        self._bytes_by_slot = [0] * (block_count * _SLOTS_PER_BLOCK)
        self._bytes_by_block = [0] * block_count
        self._next_slot = 0

    def __len__(self) -> int:
        return len(self._slot_by_key)

    def __iter__(self) -> Iterator[int]:
        return iter(self._slot_by_key)

    @property
    def remaining_slots(self) -> int:
        """Number of touches until the next `close_up`."""
        return len(self._bytes_by_slot) - self._next_slot

    def move_to_top(self, key: int, size_bytes: int) -> int | None:
        """Move the key to the top; return the bytes that were above it, without its own, or None if it is new."""
        slot_by_key, bytes_by_slot, bytes_by_block, next_slot = (
            self._slot_by_key,
            self._bytes_by_slot,
            self._bytes_by_block,
            self._next_slot,
        )
        slot, bytes_above = slot_by_key.pop(key, None), None
        if slot is not None:
            block = slot >> _BLOCK_BITS
            if block == next_slot >> _BLOCK_BITS:
                bytes_above = sum(bytes_by_slot[slot + 1 : next_slot])
            else:
                bytes_above = sum(bytes_by_slot[slot + 1 : (block + 1) << _BLOCK_BITS])
                bytes_above += sum(bytes_by_block[block + 1 : (next_slot >> _BLOCK_BITS) + 1])
            bytes_by_block[block] -= bytes_by_slot[slot]
            bytes_by_slot[slot] = 0
        slot_by_key[key] = next_slot
        bytes_by_slot[next_slot] = size_bytes
        bytes_by_block[next_slot >> _BLOCK_BITS] += size_bytes
        self._next_slot = next_slot + 1
        return bytes_above

    def forget(self, key: int) -> None:
        """Remove a key from the stack, which must contain it."""
        slot = self._slot_by_key.pop(key)
        self._bytes_by_block[slot >> _BLOCK_BITS] -= self._bytes_by_slot[slot]
        self._bytes_by_slot[slot] = 0

    def close_up(self, depth_bytes: float) -> None:
        """Free the slots of old touches; drop keys with more than `depth_bytes` bytes above them."""
        slot_bytes = list(map(self._bytes_by_slot.__getitem__, self._slot_by_key.values()))
        first_kept_index = 0
        if sum(self._bytes_by_block) > depth_bytes:
            cumulative_bytes = list(accumulate(reversed(slot_bytes)))
            first_kept_index = max(0, len(slot_bytes) - bisect_right(cumulative_bytes, depth_bytes) - 1)
        kept_sizes = slot_bytes[first_kept_index:]
        self._slot_by_key = dict(
            zip(islice(self._slot_by_key, first_kept_index, None), range(len(kept_sizes)), strict=True)
        )
        self._bytes_by_slot = kept_sizes + [0] * (len(self._bytes_by_slot) - len(kept_sizes))
        self._bytes_by_block = [
            sum(self._bytes_by_slot[at : at + _SLOTS_PER_BLOCK])
            for at in range(0, len(self._bytes_by_slot), _SLOTS_PER_BLOCK)
        ]
        self._next_slot = len(kept_sizes)

    def key_counts_within(self, depths_bytes: Sequence[float]) -> list[int]:
        """Return the number of keys from the top that fit within each number of bytes."""
        newest_first_bytes = [self._bytes_by_slot[slot] for slot in reversed(self._slot_by_key.values())]
        cumulative_bytes = list(accumulate(newest_first_bytes))
        return [bisect_right(cumulative_bytes, depth) for depth in depths_bytes]

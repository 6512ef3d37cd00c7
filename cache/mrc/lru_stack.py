"""Keys in the order of their last touch, and how many bytes were touched since."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice

_BITS = 7
_BLOCK = 1 << _BITS


class RecencyStack:
    """An LRU stack (Mattson et al., 1970) of at most `keys_max` keys, each with its bytes.

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
        """Touches until the next `close_up`."""
        return len(self._sizes) - self._next

    def move_to_top(self, key: int, size: int) -> int | None:
        """Put the key on top; return the bytes that were above it, its own left out, or None if it was not there."""
        slots, sizes, blocks, at = self._slots, self._sizes, self._blocks, self._next
        slot, above = slots.pop(key, None), None
        if slot is not None:
            block = slot >> _BITS
            if block == at >> _BITS:
                above = sum(sizes[slot + 1 : at])
            else:
                above = sum(sizes[slot + 1 : (block + 1) << _BITS])
                above += sum(blocks[block + 1 : (at >> _BITS) + 1])
            blocks[block] -= sizes[slot]
            sizes[slot] = 0
        slots[key] = at
        sizes[at] = size
        blocks[at >> _BITS] += size
        self._next = at + 1
        return above

    def forget(self, key: int) -> None:
        """Take out a key that is there."""
        slot = self._slots.pop(key)
        self._blocks[slot >> _BITS] -= self._sizes[slot]
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
        """Number of keys that the top of the stack holds within each number of bytes."""
        newest_first = [self._sizes[slot] for slot in reversed(self._slots.values())]
        through = list(accumulate(newest_first))
        return [bisect_right(through, depth) for depth in depths]

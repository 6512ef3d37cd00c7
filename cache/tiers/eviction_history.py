"""Eviction history of L1, a bounded memory of what it let go: why it lacks what Redis then answers."""

import time
from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import numpy as np

Absence = Literal["cold_start", "evicted", "expired", "flipped"]
"""Absences: never here in this generation (or forgotten since); let go; its life was over; here, but in the generation
before."""

SLOTS = 1 << 17
"""Slots of 8 bytes, a mebibyte: the last hundred thousand entries or so that were let go."""

EXPIRED_SLOTS = 1 << 13

FLIPPED_S = 300.0
"""Seconds after a flip in which a record that the generation before had in L1 counts as `flipped`."""

_VECTORISE_KEYS_MIN = 16
"""Number of keys from which on numpy's fixed cost pays."""


class LossyKeySet:
    """Hashes of keys, one per slot: a later one takes the place of an earlier, so some are forgotten, none made up."""

    def __init__(self, slots: int = SLOTS) -> None:
        self.is_empty = True
        self._slots = array("q", bytes(8 * slots))
        self._view = np.frombuffer(self._slots, np.int64)
        self._mask = slots - 1

    def note(self, key: Hashable) -> None:
        """Records that this key is not held any more."""
        self.is_empty = False
        hash_ = hash(key)
        self._slots[hash_ & self._mask] = hash_

    def note_all(self, keys: Sequence[Hashable]) -> None:
        """Records that none of these keys is held any more, in this order."""
        if len(keys) < _VECTORISE_KEYS_MIN:
            for key in keys:
                self.note(key)
            return
        self.is_empty = False
        hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
        self._view[hashes & self._mask] = hashes

    def __contains__(self, key: Hashable) -> bool:
        hash_ = hash(key)
        return self._slots[hash_ & self._mask] == hash_

    def count(self, keys: Sequence[Hashable]) -> int:
        """Number of these keys that are remembered as let go."""
        if len(keys) < _VECTORISE_KEYS_MIN:
            return sum(map(self.__contains__, keys))
        hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
        return int(np.count_nonzero(self._view[hashes & self._mask] == hashes))


class EvictionHistory:
    """Judges keys that L1 did not hold; `holds` says what it holds.

    An end of life outweighs an eviction, both a flip.
    """

    def __init__(
        self,
        is_cached: Callable[[tuple[str, str, int | bytes]], bool] = lambda _key: False,
        timer: Callable[[], float] = time.monotonic,
        slots: int = SLOTS,
    ) -> None:
        self.evicted = LossyKeySet(slots)
        self.expired = LossyKeySet(min(slots, EXPIRED_SLOTS))
        self._is_in_l1 = is_cached
        self._timer = timer
        self._last_flip: tuple[str, float] | None = None

    def flipped(self, previous_generation: str) -> None:
        """Records a flip: another generation is live from now on; `previous_generation` is the one that was."""
        self._last_flip = previous_generation, self._timer() + FLIPPED_S

    def find_reason(self, generation: str, table: str, key: int | bytes) -> Absence:
        """The one reason why L1 lacked a key."""
        if self.expired.is_empty and self.evicted.is_empty and self._last_flip is None:
            return "cold_start"
        local_key = generation, table, key
        if local_key in self.expired:
            return "expired"
        if local_key in self.evicted:
            return "evicted"
        if (previous_generation := self._earlier(generation)) is not None:
            earlier = previous_generation, table, key
            if self._is_in_l1(earlier) or earlier in self.evicted:
                return "flipped"
        return "cold_start"

    def count(self, generation: str, table: str, keys: Sequence[int | bytes]) -> dict[Absence, int]:
        """Number of the keys that L1 lacked for each reason; each key has exactly one."""
        if self.expired.is_empty and self._earlier(generation) is None:
            if self.evicted.is_empty:
                return {"cold_start": len(keys)}
            evicted = self.evicted.count([(generation, table, key) for key in keys])
            return {"evicted": evicted, "cold_start": len(keys) - evicted}
        count_by_absence: dict[Absence, int] = {}
        for key in keys:
            absence = self.find_reason(generation, table, key)
            count_by_absence[absence] = count_by_absence.get(absence, 0) + 1
        return count_by_absence

    def is_over(self, generation: str, table: str, key: int | bytes) -> bool:
        """True if a record was here until its life was over."""
        return not self.expired.is_empty and (generation, table, key) in self.expired

    def _earlier(self, generation: str) -> str | None:
        previous_flip = self._last_flip
        if previous_flip is None:
            return None
        if self._timer() >= previous_flip[1]:
            self._last_flip = None
            return None
        return None if previous_flip[0] == generation else previous_flip[0]

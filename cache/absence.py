"""Why L1 lacks what Redis then answers: a bounded memory of what it let go."""

import time
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Literal

Absence = Literal["cold_start", "evicted", "expired", "flipped"]
ABSENCES: tuple[Absence, ...] = ("cold_start", "evicted", "expired", "flipped")
"""Never here in this generation (or forgotten since); here and let go; its life was over; here, but in the generation
before."""

SLOTS = 1 << 17
"""A mebibyte: the last hundred thousand entries or so that were let go."""

FLIPPED_S = 300.0
"""After a flip, until when a record that the generation before had in L1 counts as `flipped`."""


class LetGo:
    """Hashes of keys by what became of them, one per slot: a later one takes the place of an earlier.

    What was pushed out of its slot counts as `cold_start`, so `evicted` is never too high.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        self._slots = array("q", bytes(8 * slots))
        self._mask = slots - 1

    def note(self, key: Hashable, *, expired: bool = False) -> None:
        """This key is not held any more."""
        hash_ = hash(key)
        self._slots[hash_ >> 1 & self._mask] = hash_ & ~1 | expired

    def why(self, key: Hashable) -> Absence | None:
        """What became of it; None when that is not remembered."""
        hash_ = hash(key)
        found = self._slots[hash_ >> 1 & self._mask]
        if found ^ hash_ > 1 or found ^ hash_ < 0:
            return None
        return "expired" if found & 1 else "evicted"


class Absences:
    """Judges keys that L1 did not hold; `holds` says what it holds."""

    def __init__(
        self,
        let_go: LetGo,
        holds: Callable[[tuple[str, str, int | bytes]], bool],
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._let_go = let_go
        self._holds = holds
        self._timer = timer
        self._before: tuple[str, float] | None = None

    def flipped(self, before: str) -> None:
        """Another generation is live from now on; `before` is the one that was."""
        self._before = before, self._timer() + FLIPPED_S

    def is_over(self, generation: str, table: str, key: int | bytes) -> bool:
        """Whether a record was here until its life was over."""
        return self._let_go.why((generation, table, key)) == "expired"

    def count(self, generation: str, table: str, keys: Iterable[int | bytes]) -> Counter[Absence]:
        """How many of the keys L1 lacked for which reason; each has exactly one."""
        before = self._before
        if before is not None and (self._timer() >= before[1] or before[0] == generation):
            before = None
        found: Counter[Absence] = Counter()
        for key in keys:
            why = self._let_go.why((generation, table, key))
            if why is None:
                why = "cold_start"
                if before is not None:
                    earlier = before[0], table, key
                    if self._holds(earlier) or self._let_go.why(earlier) is not None:
                        why = "flipped"
            found[why] += 1
        return found

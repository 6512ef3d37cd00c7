"""Rules for a reader of the pointer: only a greater epoch is followed, and within a bound of time."""

from collections.abc import Callable
from typing import Literal

from cache.store.releases import Pointer, Release

Verdict = Literal["same", "newer", "vanished", "backwards", "conflicting"]


def judge(pointer: Pointer | None, seen_pointer: Pointer | None) -> Verdict:
    """Verdict on the pointer for a reader that has seen `seen_pointer`."""
    if pointer is None:
        return "vanished"
    if seen_pointer is None or pointer.epoch > seen_pointer.epoch:
        return "newer"
    if pointer.epoch < seen_pointer.epoch:
        return "backwards"
    return "same" if pointer.generation == seen_pointer.generation else "conflicting"


def as_pointer(release: Release) -> Pointer:
    """The pointer that a completed move wrote."""
    return Pointer(release.generation, release.epoch, release.previous, release.attempt, release.at)


class PointerProgress:
    """Lag of a replica; `bound_s`: seconds to load what was seen, retries included, before it should not be asked."""

    def __init__(self, bound_s: float, timer: Callable[[], float]) -> None:
        self.newest_pointer: Pointer | None = None
        self.followed: Pointer | None = None
        self.failed: str | None = None
        self._bound_s = bound_s
        self._timer = timer
        self._behind_since = 0.0

    @property
    def is_behind(self) -> bool:
        """True if the pointer that was seen is not the one that is served."""
        return self.newest_pointer is not self.followed

    def note_newer(self, pointer: Pointer) -> None:
        """Notes a newer pointer; one more while behind does not begin the bound anew."""
        if not self.is_behind:
            self._behind_since = self._timer()
        self.newest_pointer = pointer

    def note_served(self, pointer: Pointer) -> None:
        """Notes that the pointer's generation is served now."""
        self.followed, self.failed = pointer, None

    def overdue(self) -> str | None:
        """Reason why this replica should not be asked, or None; one that has served nothing yet has no time to lose."""
        if self.newest_pointer is None or not self.is_behind:
            return None
        is_first = self.followed is None and self.failed is not None
        if not is_first and self._timer() - self._behind_since < self._bound_s:
            return None
        return self.failed or f"generation {self.newest_pointer.generation} is still loading"

    def outside(self) -> str | None:
        """Failure as anybody may hear it: `failed` without what the error says."""
        if self.failed is None or self.newest_pointer is None:
            return None
        return f"generation {self.newest_pointer.generation} cannot be loaded"

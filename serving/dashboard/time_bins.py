"""The last hour of one worker: what it counted in each ten seconds."""

from collections.abc import Mapping

from serving.dashboard.counters import Counts, merged, pack, unpack

BIN_S = 10
HISTORY_S = 3_600
BINS_MAX = HISTORY_S // BIN_S + 2
"""Bins kept: an hour of whole ones, the one that runs, and one more for clocks that are apart."""


def start_of(at: float) -> int:
    """Start of the bin that a moment lies in, both in Unix seconds."""
    return int(at // BIN_S) * BIN_S


class TimeBins:
    """Bins of one worker, `BINS_MAX` at most, each packed (some hundred bytes); Redis may lack `unpublished_starts`."""

    def __init__(self) -> None:
        self.packed: dict[int, bytes] = {}
        self.unpublished_starts: set[int] = set()

    def add(self, at: float, delta: Mapping[str, int]) -> None:
        """Counts what came around a moment of Redis' clock; the oldest bin goes when there are too many."""
        if not delta:
            return
        start = start_of(at)
        earlier_counts: Counts = unpack(self.packed[start]) if start in self.packed else {}
        self.packed[start] = pack(merged((earlier_counts, delta)))
        self.unpublished_starts.add(start)
        while len(self.packed) > BINS_MAX:
            oldest = min(self.packed)
            del self.packed[oldest]
            self.unpublished_starts.discard(oldest)

    def mark_unpublished(self) -> None:
        """Marks all bins as untold: Redis may have lost all of them."""
        self.unpublished_starts = set(self.packed)

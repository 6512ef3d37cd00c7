"""Keys of reads under way: whole numbers, which a dictionary takes at a fraction of what names cost."""

import itertools

from cache.tiers.results import Want

FlightKey = int | tuple[int, bytes]

_KEPT_MAX = 4_096


class FlightKeys:
    """Numbers tables of generations, and the records in them from there on: no two records share a key."""

    def __init__(self) -> None:
        self._starts: dict[tuple[str, str], int] = {}
        self._numbers = itertools.count(1)

    def start(self, generation: str, table: str) -> int:
        """The number to add to a 64-bit hash; a table that was forgotten gets a new one, never that of another."""
        start = self._starts.get((generation, table))
        if start is None:
            if len(self._starts) >= _KEPT_MAX:
                self._starts.clear()
            start = self._starts[generation, table] = next(self._numbers) << 64
        return start

    def of(self, generation: str, want: Want) -> FlightKey:
        """The key of one record."""
        start, key = self.start(generation, want[0].name), want[1]
        return start + key if isinstance(key, int) else (start, key)

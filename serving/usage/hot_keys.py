"""Hot keys: counted in this process, reported to Redis every few seconds, and read from Redis at a cold start."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from cache.errors import TierUnavailable
from cache.usage.hot_keys import HOT_WINDOW, EntityName, HotKeyReport, SharedHotKeys, Window, window_number_of
from serving.engine.answer_observer import RecentNames
from serving.generations.snapshot import Snapshot

REPORTED_NAMES_MAX = 512
"""Number of entities in a report, the most requested ones."""
_NAMES_PER_CALL = 128
"""Number of entities in one script call, which blocks Redis for a third of a millisecond."""
_FETCH_TIMEOUT_S = 1.0


HELP_BY_EVENT: Mapping[str, str] = {
    "hot_reported": "Ids added to the sketch of the most requested ids",
    "hot_reports_failed": "Failed reports to that sketch",
}
"""Help text by event."""


@dataclass(slots=True, eq=False)
class HotKeySketch:
    """Reports of this replica to the sketch; if Redis fails, the report is lost and not retried."""

    shared: SharedHotKeys
    recent: RecentNames
    get_live_snapshot: Callable[[], Snapshot | None]
    clock: Callable[[], float]
    window: Window = HOT_WINDOW
    reported_count: int = field(init=False, default=0)
    failed_count: int = field(init=False, default=0)
    _reported_names: set[EntityName] = field(init=False, default_factory=set)

    async def report(self) -> None:
        """Report the entities requested since the last report; remove reported ones that were blocked since."""
        live_snapshot, new_names = self.get_live_snapshot(), self.recent.take_new()
        if live_snapshot is None:
            return
        hottest_counts = await asyncio.to_thread(_count_hottest, new_names)
        hottest_counts = [
            counted_name for counted_name in hottest_counts if counted_name[0][0] in live_snapshot.manifest.tables
        ]
        hottest_names = {name for name, _ in hottest_counts}
        blocked_names = list(
            islice(
                (
                    reported_name
                    for reported_name in hottest_names | self._reported_names
                    if _is_blocked(live_snapshot, reported_name)
                ),
                REPORTED_NAMES_MAX,
            )
        )
        reported_counts = [
            counted_name for counted_name in hottest_counts if not _is_blocked(live_snapshot, counted_name[0])
        ]
        self._reported_names = {name for name, _ in reported_counts}
        if not reported_counts and not blocked_names:
            return
        hour = window_number_of(self.clock(), self.window)
        try:
            for first_index in range(0, max(1, len(reported_counts)), _NAMES_PER_CALL):
                counts_chunk = reported_counts[first_index : first_index + _NAMES_PER_CALL]
                await self.shared.add_report(
                    HotKeyReport(hour, counts_chunk, () if first_index else blocked_names, self.window)
                )
                self.reported_count += len(counts_chunk)
        except TierUnavailable:
            self.failed_count += 1
            self._reported_names.update(blocked_names)

    def internal_counters(self) -> dict[str, float]:
        """Event counts by name."""
        return {"hot_reported": self.reported_count, "hot_reports_failed": self.failed_count}

    async def hottest_names(self) -> Sequence[EntityName]:
        """Return the recently most requested entities of all replicas, hottest first; empty if Redis is slow."""
        try:
            async with asyncio.timeout(_FETCH_TIMEOUT_S):
                return await self.shared.fetch_names(window_number_of(self.clock()))
        except (TierUnavailable, TimeoutError):
            return ()


def _count_hottest(entity_names: Sequence[EntityName]) -> list[tuple[EntityName, int]]:
    return Counter(entity_names).most_common(REPORTED_NAMES_MAX)


def _is_blocked(live: Snapshot, name: EntityName) -> bool:
    table = live.manifest.tables.get(name[0])
    return table is not None and live.blocks_entity(table, name[1])

"""Hot keys: counted in this process, reported to Redis every few seconds, and read from there at a cold start."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from cache.errors import TierUnavailable
from cache.usage.hot_keys import (
    HOT_WINDOW,
    EntityName,
    HotKeyReport,
    SharedHotKeys,
    Window,
    window_number_of,
)
from serving.engine.answer_observer import RecentNames
from serving.generations.snapshot import Snapshot

REPORTED = 512
"""Entities in a report, the most requested ones."""
_AT_ONCE = 128
"""Entities in one script call, which blocks Redis for a third of a millisecond."""
_HEAR_S = 1.0


HELP_BY_EVENT: Mapping[str, str] = {
    "hot_reported": "Ids added to the sketch of what is asked for most",
    "hot_reports_failed": "Reports to that sketch that failed",
}
"""Help text by event."""


@dataclass(slots=True, eq=False)
class HotKeySketch:
    """Reports of this replica to the sketch; a failing Redis costs a report, nothing is retried."""

    shared: SharedHotKeys
    recent: RecentNames
    live: Callable[[], Snapshot | None]
    clock: Callable[[], float]
    window: Window = HOT_WINDOW
    reported: int = field(init=False, default=0)
    failed: int = field(init=False, default=0)
    _reported_names: set[EntityName] = field(init=False, default_factory=set)

    async def report(self) -> None:
        """Report the entities requested since the last report; remove reported ones that were blocked since."""
        live, fresh = self.live(), self.recent.take_new()
        if live is None:
            return
        hottest = await asyncio.to_thread(_hottest, fresh)
        hottest = [
            counted_name for counted_name in hottest if counted_name[0][0] in live.manifest.tables
        ]
        hottest_names = {name for name, _ in hottest}
        blocked_names = list(
            islice(
                (
                    reported_name
                    for reported_name in hottest_names | self._reported_names
                    if _is_blocked(live, reported_name)
                ),
                REPORTED,
            )
        )
        counts = [
            counted_name for counted_name in hottest if not _is_blocked(live, counted_name[0])
        ]
        self._reported_names = {name for name, _ in counts}
        if not counts and not blocked_names:
            return
        hour = window_number_of(self.clock(), self.window)
        try:
            for at in range(0, max(1, len(counts)), _AT_ONCE):
                piece = counts[at : at + _AT_ONCE]
                await self.shared.add_report(
                    HotKeyReport(hour, piece, () if at else blocked_names, self.window)
                )
                self.reported += len(piece)
        except TierUnavailable:
            self.failed += 1
            self._reported_names.update(blocked_names)

    def internal_counters(self) -> dict[str, float]:
        """Event counts by name."""
        return {"hot_reported": self.reported, "hot_reports_failed": self.failed}

    async def hottest(self) -> Sequence[EntityName]:
        """Return the recently most requested entities of all replicas, hottest first; empty if Redis is slow."""
        try:
            async with asyncio.timeout(_HEAR_S):
                return await self.shared.fetch_names(window_number_of(self.clock()))
        except (TierUnavailable, TimeoutError):
            return ()


def _hottest(names: Sequence[EntityName]) -> list[tuple[EntityName, int]]:
    return Counter(names).most_common(REPORTED)


def _is_blocked(live: Snapshot, name: EntityName) -> bool:
    table = live.manifest.tables.get(name[0])
    return table is not None and live.blocks_entity(table, name[1])

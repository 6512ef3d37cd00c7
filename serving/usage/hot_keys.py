"""Hot keys: counted in this process, reported to Redis every few seconds, and read from there at a cold start."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat

from cache.errors import TierUnavailable
from cache.l2.control_plane import ControlPlane
from cache.usage.hot_keys import HOT_WINDOW, HotKeyReport, Name, Window, hour_of
from serving.generations.snapshot import Snapshot

RECENT = 4_096
"""Entities remembered, with repetitions."""
REPORTED = 512
"""Entities in a report, the most requested ones."""
_AT_ONCE = 128
"""Entities in one script call, which blocks Redis for a third of a millisecond."""
_HEAR_S = 1.0
_REPORT_BOUNDARY: Name = ("", b"")


class RecentNames(deque[Name]):
    """Requested entities, newest last; appending is all that a request pays for it.

    `flush_pending` adds pending entities of earlier requests.
    """

    def __init__(self) -> None:
        super().__init__(maxlen=RECENT)
        self.flush_pending: Callable[[], None] = lambda: None
        self._batches: deque[tuple[str, Sequence[bytes]]] = deque()
        self._waiting = 0

    def add(self, table: str, raws: Sequence[bytes]) -> None:
        """Add ids of one table at once, as a batch that is unpacked only when it is read."""
        self._batches.append((table, raws))
        self._waiting += len(raws)
        while self._waiting - len(self._batches[0][1]) >= RECENT:
            self._waiting -= len(self._batches.popleft()[1])

    def names(self) -> Sequence[Name]:
        """Return all entities that are remembered."""
        self.flush_pending()
        for table, raws in self._batches:
            self.extend(zip(repeat(table), raws))
        self._batches.clear()
        self._waiting = 0
        return self

    def take_new(self) -> list[Name]:
        """Return the entities added since the last call, as far as they are still remembered."""
        names = list(self.names())
        last = names[::-1].index(_REPORT_BOUNDARY) if _REPORT_BOUNDARY in names else len(names)
        if last:
            self.append(_REPORT_BOUNDARY)
        return names[len(names) - last :]


@dataclass(slots=True, eq=False)
class HotKeySketch:
    """Reports of this replica to the sketch; a failing Redis costs a report, nothing is retried."""

    control: ControlPlane
    recent: RecentNames
    live: Callable[[], Snapshot | None]
    clock: Callable[[], float]
    window: Window = HOT_WINDOW
    reported: int = field(init=False, default=0)
    failed: int = field(init=False, default=0)
    _reported_names: set[Name] = field(init=False, default_factory=set)

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
        hour = hour_of(self.clock(), self.window)
        try:
            for at in range(0, max(1, len(counts)), _AT_ONCE):
                piece = counts[at : at + _AT_ONCE]
                await self.control.report_hot(
                    HotKeyReport(hour, piece, () if at else blocked_names, self.window)
                )
                self.reported += len(piece)
        except TierUnavailable:
            self.failed += 1
            self._reported_names.update(blocked_names)

    async def hottest(self) -> Sequence[Name]:
        """Return the recently most requested entities of all replicas, hottest first; empty if Redis is slow."""
        try:
            async with asyncio.timeout(_HEAR_S):
                return await self.control.fetch_hot_names(hour_of(self.clock()))
        except (TierUnavailable, TimeoutError):
            return ()


def _hottest(names: Sequence[Name]) -> list[tuple[Name, int]]:
    return Counter(names).most_common(REPORTED)


def _is_blocked(live: Snapshot, name: Name) -> bool:
    table = live.manifest.tables.get(name[0])
    return table is not None and live.blocks(table, name[1])

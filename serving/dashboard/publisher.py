"""Publisher of this worker's counts to Redis every few seconds, so that any replica can show the whole."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from cache.errors import TierUnavailable
from cache.l2.control_plane import CommandArgument, ControlPlane
from serving.dashboard.counters import Counts, difference, totals
from serving.dashboard.time_bins import HISTORY_S, TimeBins

log = logging.getLogger(__name__)

LIFE_S = HISTORY_S + 300
"""Seconds that a key stays in Redis from its last change on."""
GONE_S = 60.0
"""Seconds without a telling after which a worker is taken out of the table of workers."""
AT_ONCE = 64
"""Bins told in one go: all of them are told again when Redis came back empty."""
_SWEEP = 30
"""Tellings between two looks for workers that are gone."""
TIMEOUT_S = 2.0


class MetricsPublisher:
    """Publisher of one worker. It writes the state as it is, under the worker's name: told twice it stays the same.

    `about` is what the worker says of itself beside its counts, JSON-able.
    """

    def __init__(
        self,
        control: ControlPlane,
        name: str,
        clock: Callable[[], float],
        read_counts: Callable[[], Counts],
        about: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.name = name
        self.bins = TimeBins()
        self.trouble: str | None = None
        self._control, self._keys, self._clock = control, control.keyspace, clock
        self._collect_counts, self._about = read_counts, about
        self._noted_at = self._started_at = clock()
        self._noted_counts: Counts = read_counts()
        self._is_known = False
        self._publish_count = 0

    def note(self) -> dict[str, Any]:
        """Counts what came since the last call into the bin of the time between; this worker's row as of now."""
        now_s, counts = self._clock(), self._collect_counts()
        self.bins.add((self._noted_at + now_s) / 2, difference(counts, self._noted_counts))
        self._noted_at, self._noted_counts = now_s, counts
        return {"at": now_s, "since": self._started_at, **self._about(), "counts": totals(counts)}

    async def publish(self) -> None:
        """Notes, and writes what Redis does not have yet; a Redis that is away is told later."""
        row, bins = self.note(), self.bins
        # A copy: what is noted while Redis answers is not told yet.
        starts = {
            start: bins.packed[start]
            for start in sorted(bins.unpublished_starts, reverse=True)[:AT_ONCE]
        }
        commands: list[tuple[CommandArgument, ...]] = [
            ("HSET", self._keys.workers, self.name, orjson.dumps(row)),
            ("EXPIRE", self._keys.workers, LIFE_S),
        ]
        for start, blob in starts.items():
            key = self._keys.bin(start)
            commands += ("HSET", key, self.name, blob), ("EXPIRE", key, LIFE_S)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                is_new = (await self._control.execute_all(commands))[0]
                await self._sweep(row["at"])
        except (TierUnavailable, TimeoutError) as error:
            self._failed(str(error) or f"no reply within {TIMEOUT_S} s")
            return
        bins.unpublished_starts -= {
            start for start, blob in starts.items() if bins.packed.get(start) is blob
        }
        if self.trouble is not None or (is_new and self._is_known):
            bins.mark_unpublished()  # it may be another Redis, or an emptied one
        self.trouble, self._is_known = None, True

    def _failed(self, trouble: str) -> None:
        if self.trouble is None:
            log.warning("the dashboard shows this worker alone: %s", trouble)
        self.trouble = trouble

    async def _sweep(self, now_s: float) -> None:
        self._publish_count += 1
        if self._publish_count % _SWEEP:
            return
        (rows,) = await self._control.execute_all([("HGETALL", self._keys.workers)])
        gone_workers = [name for name, raw in rows.items() if published_at(raw) < now_s - GONE_S]
        if gone_workers:
            await self._control.execute_all([("HDEL", self._keys.workers, *gone_workers)])

    async def sign_off(self) -> None:
        """Takes this worker out of the table: its counts leave `/metrics` as well."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._control.execute_all([("HDEL", self._keys.workers, self.name)])
        except (TierUnavailable, TimeoutError):
            log.debug("not signed off: readers leave out who tells nothing")


def published_at(raw: bytes) -> float:
    """Unix seconds at which a worker's row was told; 0 for one that cannot be read."""
    try:
        return float(orjson.loads(raw)["at"])
    except (ValueError, TypeError, KeyError):
        return 0.0

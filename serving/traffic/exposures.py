"""Exposure log of a process for the store: keys by arm and hour, with their counts.

Parts are JSON and small, as the service has no Parquet; nights make one file of an hour's parts, without repetitions.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import orjson
import xxhash

from cache.errors import LarderError
from cache.store.artefacts import ArtefactStore
from cache.traffic.experiments import exposure_part_path
from cache.usage.hot_keys import HOUR_S
from serving.process.resources import StoreThreads

log = logging.getLogger(__name__)

FLUSH_S = 60.0
"""Seconds between flushes; a killed process loses what it has not written."""

PENDING_MAX = 1 << 18
"""Exposures that wait to be written; more are dropped, and counted."""

PART_MAX = 1 << 15
"""Exposures in one part, some 3 MiB at most with keys of 64 bytes."""

PARTS_MAX = 1_024
"""Parts that wait for a store that cannot be written; counts also wait."""

SEEN_MAX = 1 << 18
"""Exposures remembered as written in this hour, some 20 MB; a repetition that is forgotten is dropped by the night."""

HELP_BY_EVENT: Mapping[str, str] = {
    "exposures_written": "Keys of experiments written into the exposure log",
    "exposures_dropped": "Keys of experiments not written down, because too many waited",
    "exposure_writes_failed": "Failed tries to write a part of the exposure log",
}
"""Help text by event."""

_Arm = tuple[str, str]


class Exposure(NamedTuple):
    """A key's first meeting with an arm in an hour, as far as this process knows; `at` in Unix seconds."""

    key: bytes
    at: float


@dataclass(slots=True)
class _Window:
    """Counts of one arm in one hour since the last flush."""

    requests: int = 0
    feedback: Counter[str] = field(default_factory=Counter)
    exposures: list[Exposure] = field(default_factory=list)


class ExposureLog:
    """Log of one process; a part that cannot be written is tried again under the same name, so none counts twice."""

    def __init__(
        self,
        store: ArtefactStore,
        name: str,
        *,
        clock: Callable[[], float],
        in_thread: StoreThreads,
    ) -> None:
        self.dropped_count = 0
        self.written_count = 0
        self.failed_count = 0
        self._store, self._name = store, name
        self._clock, self._in_thread = clock, in_thread
        self._windows: dict[int, dict[_Arm, _Window]] = {}
        self._waiting = 0
        self._logged_exposures: set[int] = set()
        self._seen_hour = 0
        self._parts: deque[tuple[str, bytes, int]] = deque()
        self._number = 0
        self._writing = asyncio.Lock()

    def request(self, experiment: str, arm: str, key: bytes | None) -> None:
        """Counts one request that an arm answered; without a `key` it is no exposure to be written down."""
        at = self._clock()
        window = self._window(at, experiment, arm)
        window.requests += 1
        if key is None:
            return
        exposure_hash = xxhash.xxh3_64_intdigest(
            b"%b\0%b\0%b" % (experiment.encode(), arm.encode(), key)
        )
        if exposure_hash in self._logged_exposures:
            return
        if self._waiting >= PENDING_MAX:
            self.dropped_count += 1
            return
        if len(self._logged_exposures) >= SEEN_MAX:
            self._logged_exposures.clear()
        self._logged_exposures.add(exposure_hash)
        self._waiting += 1
        window.exposures.append(Exposure(key, at))

    def heard(self, experiment: str, arm: str, event: str, count: int) -> None:
        """Count feedback for an arm."""
        self._window(self._clock(), experiment, arm).feedback[event] += count

    async def flush(self) -> None:
        """Write all waiting parts to the store; parts that cannot be written go on waiting."""
        async with self._writing:
            if len(self._parts) < PARTS_MAX:
                self._cut()
            while self._parts:
                path, body, count = self._parts[0]
                try:
                    # One that is there is this very part: an earlier try that seemed to fail.
                    await self._in_thread(self._store.write_once, path, body)
                except (LarderError, OSError) as error:
                    self.failed_count += 1
                    log.warning("exposures cannot be written, they wait: %s", error)
                    return
                self._parts.popleft()
                self._waiting -= count
                self.written_count += count

    def internal_counters(self) -> dict[str, float]:
        """Event counts by name."""
        return {
            "exposures_written": self.written_count,
            "exposures_dropped": self.dropped_count,
            "exposure_writes_failed": self.failed_count,
        }

    def _window(self, at: float, experiment: str, arm: str) -> _Window:
        hour = int(at // HOUR_S)
        if hour != self._seen_hour:
            self._seen_hour = hour
            self._logged_exposures.clear()
        arms = self._windows.setdefault(hour, {})
        window = arms.get((experiment, arm))
        if window is None:
            window = arms[experiment, arm] = _Window()
        return window

    def _cut(self) -> None:
        """Convert the counts since the last flush to parts."""
        windows, self._windows = self._windows, {}
        for hour, arms in windows.items():
            lines: list[dict[str, object]] = []
            room = PART_MAX
            for (experiment, arm), window in arms.items():
                arm_counts = {"requests": window.requests, "feedback": dict(window.feedback)}
                start = 0
                while start < max(1, len(window.exposures)):
                    exposures = window.exposures[start : start + room]
                    pairs = [
                        [exposure.key.decode(), round(exposure.at, 3)] for exposure in exposures
                    ]
                    named = {"experiment": experiment, "arm": arm}
                    lines.append({**named, **arm_counts, "exposures": pairs})
                    arm_counts = {"requests": 0, "feedback": {}}
                    start, room = start + max(1, len(exposures)), room - len(exposures)
                    if not room:
                        self._part(hour, lines)
                        lines, room = [], PART_MAX
            if lines:
                self._part(hour, lines)

    def _part(self, hour: int, arms: list[dict[str, object]]) -> None:
        self._number += 1
        count = sum(len(arm_line["exposures"]) for arm_line in arms)  # type: ignore[misc, arg-type]
        path = exposure_part_path(hour, self._name, self._number)
        self._parts.append((path, orjson.dumps({"arms": arms}), count))

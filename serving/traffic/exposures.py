"""Exposure log of a process, written to the store: keys by arm and hour, with counts.

Parts are small JSON files, since the service has no Parquet; nights merge an hour's parts into one file.
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
"""Seconds between flushes; a killed process loses unwritten exposures."""

WAITING_EXPOSURES_MAX = 1 << 18
"""Exposures that may wait to be written; further ones are dropped and counted."""

PART_EXPOSURES_MAX = 1 << 15
"""Exposures in one part, some 3 MiB at most with keys of 64 bytes."""

WAITING_PARTS_MAX = 1_024
"""Parts that may wait while the store cannot be written; counts wait, too."""

LOGGED_EXPOSURES_MAX = 1 << 18
"""Exposures remembered as written in this hour, about 20 MB; the night drops repetitions of forgotten ones."""

HELP_BY_EVENT: Mapping[str, str] = {
    "exposures_written": "Keys of experiments written into the exposure log",
    "exposures_dropped": "Keys of experiments not logged, because too many waited",
    "exposure_writes_failed": "Failed attempts to write a part of the exposure log",
}
"""Help text by event."""

_ExperimentAndArm = tuple[str, str]


class Exposure(NamedTuple):
    """First exposure of a key to an arm in an hour, as far as this process knows; `exposed_at` in Unix seconds."""

    exposed_key: bytes
    exposed_at: float


@dataclass(slots=True)
class _ArmHour:
    """Counts of one arm in one hour since the last flush."""

    request_count: int = 0
    feedback_count_by_event: Counter[str] = field(default_factory=Counter)
    exposures: list[Exposure] = field(default_factory=list)


class ExposureLog:
    """Log of one process; writes of a part are retried under the same name, so that none counts twice."""

    def __init__(
        self, store: ArtefactStore, replica_name: str, *, clock: Callable[[], float], in_thread: StoreThreads
    ) -> None:
        self.dropped_count = 0
        self.written_count = 0
        self.failed_count = 0
        self._store, self._replica_name = store, replica_name
        self._clock, self._in_thread = clock, in_thread
        self._arm_hours: dict[int, dict[_ExperimentAndArm, _ArmHour]] = {}
        self._waiting_count = 0
        self._logged_hashes: set[int] = set()
        self._logged_hour = 0
        self._waiting_parts: deque[tuple[str, bytes, int]] = deque()
        self._part_number = 0
        self._write_lock = asyncio.Lock()

    def count_request(self, experiment_name: str, arm_name: str, exposed_key: bytes | None) -> None:
        """Count one request that an arm answered; without an `exposed_key` no exposure is logged."""
        now_s = self._clock()
        arm_hour = self._arm_hour(now_s, experiment_name, arm_name)
        arm_hour.request_count += 1
        if exposed_key is None:
            return
        exposure_hash = xxhash.xxh3_64_intdigest(
            b"%b\0%b\0%b" % (experiment_name.encode(), arm_name.encode(), exposed_key)
        )
        if exposure_hash in self._logged_hashes:
            return
        if self._waiting_count >= WAITING_EXPOSURES_MAX:
            self.dropped_count += 1
            return
        if len(self._logged_hashes) >= LOGGED_EXPOSURES_MAX:
            self._logged_hashes.clear()
        self._logged_hashes.add(exposure_hash)
        self._waiting_count += 1
        arm_hour.exposures.append(Exposure(exposed_key, now_s))

    def count_feedback(self, experiment_name: str, arm_name: str, event_name: str, event_count: int) -> None:
        """Count feedback for an arm."""
        self._arm_hour(self._clock(), experiment_name, arm_name).feedback_count_by_event[event_name] += event_count

    async def flush(self) -> None:
        """Write all waiting parts to the store; parts that cannot be written wait for the next flush."""
        async with self._write_lock:
            if len(self._waiting_parts) < WAITING_PARTS_MAX:
                self._cut_parts()
            while self._waiting_parts:
                part_path, part_body, exposure_count = self._waiting_parts[0]
                try:
                    # An existing file is this part, from an earlier write that seemed to fail.
                    await self._in_thread(self._store.write_once, part_path, part_body)
                except (LarderError, OSError) as error:
                    self.failed_count += 1
                    log.warning("exposures cannot be written and stay queued: %s", error)
                    return
                self._waiting_parts.popleft()
                self._waiting_count -= exposure_count
                self.written_count += exposure_count

    def internal_counters(self) -> dict[str, float]:
        """Event counts by name."""
        return {
            "exposures_written": self.written_count,
            "exposures_dropped": self.dropped_count,
            "exposure_writes_failed": self.failed_count,
        }

    def _arm_hour(self, now_s: float, experiment_name: str, arm_name: str) -> _ArmHour:
        hour_number = int(now_s // HOUR_S)
        if hour_number != self._logged_hour:
            self._logged_hour = hour_number
            self._logged_hashes.clear()
        hour_by_arm = self._arm_hours.setdefault(hour_number, {})
        arm_hour = hour_by_arm.get((experiment_name, arm_name))
        if arm_hour is None:
            arm_hour = hour_by_arm[experiment_name, arm_name] = _ArmHour()
        return arm_hour

    def _cut_parts(self) -> None:
        """Convert the counts since the last flush to parts."""
        hours_by_arm, self._arm_hours = self._arm_hours, {}
        for hour_number, hour_by_arm in hours_by_arm.items():
            arm_lines: list[dict[str, object]] = []
            remaining_exposures = PART_EXPOSURES_MAX
            for (experiment, arm), arm_hour in hour_by_arm.items():
                requests_and_feedback = {
                    "requests": arm_hour.request_count,
                    "feedback": dict(arm_hour.feedback_count_by_event),
                }
                first_index = 0
                while first_index < max(1, len(arm_hour.exposures)):
                    exposures = arm_hour.exposures[first_index : first_index + remaining_exposures]
                    key_time_pairs = [
                        [exposure.exposed_key.decode(), round(exposure.exposed_at, 3)] for exposure in exposures
                    ]
                    experiment_and_arm = {"experiment": experiment, "arm": arm}
                    arm_lines.append({**experiment_and_arm, **requests_and_feedback, "exposures": key_time_pairs})
                    requests_and_feedback = {"requests": 0, "feedback": {}}
                    first_index, remaining_exposures = (
                        first_index + max(1, len(exposures)),
                        remaining_exposures - len(exposures),
                    )
                    if not remaining_exposures:
                        self._add_part(hour_number, arm_lines)
                        arm_lines, remaining_exposures = [], PART_EXPOSURES_MAX
            if arm_lines:
                self._add_part(hour_number, arm_lines)

    def _add_part(self, hour_number: int, arm_lines: list[dict[str, object]]) -> None:
        self._part_number += 1
        exposure_count = sum(len(arm_line["exposures"]) for arm_line in arm_lines)  # type: ignore[misc, arg-type]
        part_path = exposure_part_path(hour_number, self._replica_name, self._part_number)
        self._waiting_parts.append((part_path, orjson.dumps({"arms": arm_lines}), exposure_count))

"""Heartbeat of a replica: its generations, and its host's free memory and disk; times are those of Redis' clock."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cache.formats import HEARTBEAT, THIS_RELEASE, served_formats, version_stamp
from cache.process.host import disk_free_bytes, memory_available_bytes
from serving.generations.holder import LiveSwap
from serving.generations.pointer_follower import PointerFollower
from serving.metrics.registry import Metrics
from serving.process.resources import StoreThreads

HOST_MEASURE_INTERVAL_S = 5.0
"""Seconds between measurements of the host's memory and disk."""


class RedisClock:
    """Redis' clock in Unix seconds, shared by replicas and publishers on all hosts; initially this host's clock."""

    def __init__(
        self, monotonic_clock: Callable[[], float] = time.monotonic, clock: Callable[[], float] = time.time
    ) -> None:
        self._monotonic_clock = monotonic_clock
        self._offset_s = clock() - monotonic_clock()

    def __call__(self) -> float:
        """Return the current time in Redis' Unix seconds."""
        return self.to_redis_time_s(self._monotonic_clock())

    def to_redis_time_s(self, monotonic_s: float) -> float:
        """Convert a moment of this process's monotonic clock to Redis' time."""
        return monotonic_s + self._offset_s

    def set(self, redis_time_s: float, requested_at_s: float) -> None:
        """Set the clock: Redis' time is that of the middle between `requested_at_s` (monotonic) and now."""
        self._offset_s = redis_time_s - (requested_at_s + self._monotonic_clock()) / 2


@dataclass(slots=True, eq=False)
class HostHeadroom:
    """Free memory and disk of the host; `free_bytes_by_name` is the last measurement, empty before the first."""

    disk_folder: Path
    in_thread: StoreThreads
    free_bytes_by_name: Mapping[str, int] = field(init=False, default_factory=dict)

    async def refresh(self) -> None:
        """Measure once, in a thread: a network file system may block."""
        self.free_bytes_by_name = await self.in_thread(_read_headroom, self.disk_folder)


def _read_headroom(disk_folder: Path) -> dict[str, int]:
    return {"memory_available_bytes": memory_available_bytes(), "disk_free_bytes": disk_free_bytes(disk_folder)}


@dataclass(slots=True, eq=False)
class Heartbeat:
    """Builder of the heartbeat's payload; its times are of Redis' clock, comparable between hosts.

    `find_problems`: what is wrong with features, by name.
    """

    replica_id: str
    follower: PointerFollower
    clock: RedisClock
    metrics: Metrics
    get_l2_p99_ms: Callable[[], float | None] = lambda: None
    get_canary_report: Callable[[], Mapping[str, Any] | None] = lambda: None
    find_problems: Callable[[], Mapping[str, str]] = dict
    overlay_ttl_s: float | None = None
    host_headroom: HostHeadroom | None = None
    _stamped_swap: tuple[LiveSwap, float] | None = None

    def payload(self) -> dict[str, Any]:
        """Return the JSON-able payload: `holds` must not be retired, `ready` may be published, `failed` has reasons."""
        follower, holder = self.follower, self.follower.holder
        staged, served, failed = follower.staged, holder.served, follower.failure_by_generation
        swapped_at = self._swapped_at(holder.last_swap)
        if staged.warm_s is not None:
            self.metrics.warm_seconds.set(staged.warm_s)
        return {
            "replica": self.replica_id,
            "serving": None if served is None else served.live.generation,
            "holds": list(holder.generations),
            "epoch": follower.epoch,
            "ready": [generation for generation in holder.generations if generation not in failed],
            "failed": failed,
            "degraded": None if served is None else served.live.degraded_reason,
            "stale": follower.stale_reason,
            "problems": dict(self.find_problems()),
            "blocklist_version": holder.blocklist.version if holder.is_blocklist_known else None,
            "swapped_at": swapped_at,
            "warm_s": staged.warm_s,
            "l2_p99_ms": self.get_l2_p99_ms(),
            "canary": self.get_canary_report(),
            "overlay_ttl_s": self.overlay_ttl_s,
            **version_stamp(HEARTBEAT),
            "release": THIS_RELEASE,
            "reads": served_formats(),
            **({} if self.host_headroom is None else self.host_headroom.free_bytes_by_name),
        }

    def _swapped_at(self, swap: LiveSwap | None) -> float | None:
        if swap is None or not swap.is_flip:
            return None
        # Computed once per swap: later corrections of the clock must not move past times.
        if self._stamped_swap is None or self._stamped_swap[0] is not swap:
            self._stamped_swap = swap, self.clock.to_redis_time_s(swap.swapped_at)
            self.metrics.flip_skew.set(self._stamped_swap[1] - swap.published_at)
        return self._stamped_swap[1]

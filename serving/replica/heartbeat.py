"""Heartbeat of a replica, once a second: what it serves, holds and has ready."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cache.formats import HEARTBEAT, RELEASE, served_formats, stamp
from serving.generations.holder import LiveSwap
from serving.generations.pointer_follower import PointerFollower
from serving.generations.redis_clock import RedisClock
from serving.metrics.registry import Metrics
from serving.replica.host import HostHeadroom


@dataclass(slots=True, eq=False)
class Heartbeat:
    """Composes the payload; its times are Redis' own, so that those of several hosts can be compared."""

    replica_id: str
    follower: PointerFollower
    clock: RedisClock
    metrics: Metrics
    l2_p99_ms: Callable[[], float | None] = lambda: None
    canary: Callable[[], Mapping[str, Any] | None] = lambda: None
    overlay_ttl_s: float | None = None
    host: HostHeadroom | None = None
    _stamped: tuple[LiveSwap, float] | None = None

    def payload(self) -> dict[str, Any]:
        """JSON-able payload; `holds` must not be retired, `ready` may be published, `failed` says why not."""
        follower, holder = self.follower, self.follower.holder
        staged, served, failed = follower.staged, holder.served, follower.failures
        swapped_at = self._swapped_at(holder.swap)
        if staged.warm_s is not None:
            self.metrics.warm_seconds.set(staged.warm_s)
        return {
            "replica": self.replica_id,
            "serving": None if served is None else served.live.generation,
            "holds": list(holder.generations),
            "epoch": follower.epoch,
            "ready": [generation for generation in holder.generations if generation not in failed],
            "failed": failed,
            "swapped_at": swapped_at,
            "warm_s": staged.warm_s,
            "l2_p99_ms": self.l2_p99_ms(),
            "canary": self.canary(),
            "overlay_ttl_s": self.overlay_ttl_s,
            **stamp(HEARTBEAT),
            "release": RELEASE,
            "reads": served_formats(),
            **({} if self.host is None else self.host.headroom),
        }

    def _swapped_at(self, swap: LiveSwap | None) -> float | None:
        if swap is None or not swap.is_flip:
            return None
        # Once per swap: what the clock is told later must not move what has happened.
        if self._stamped is None or self._stamped[0] is not swap:
            self._stamped = swap, self.clock.at(swap.at)
            self.metrics.flip_skew.set(self._stamped[1] - swap.published_at)
        return self._stamped[1]

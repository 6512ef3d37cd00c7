"""Freshness: whether the served generation is the one that should exist by now, even if no night ever ran."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cache.control.schedule import Schedule
from serving.generations.pointer_follower import PointerFollower


@dataclass(frozen=True, slots=True)
class Nights:
    """Schedule's demand, compared with what is served; times are Unix seconds of this host's clock."""

    schedule: Schedule
    follower: PointerFollower
    clock: Callable[[], float] = time.time

    def due_at(self) -> float:
        """The tick that a generation must have followed by now."""
        return self.schedule.due(self.clock())

    def is_missing(self) -> bool:
        """True also after a rollback: what is live then is older than the last night."""
        return self.schedule.is_missing(self.clock(), self._created_at())

    def missed(self) -> int:
        """Number of nights that are due and not in what is served."""
        return self.schedule.missed(self.clock(), self._created_at())

    def _created_at(self) -> float | None:
        served = self.follower.served
        return None if served is None else float(served.live.manifest.created_at)

    def age_s(self) -> float | None:
        """Seconds, now minus `data_until` of what is served; None when that is nothing."""
        served = self.follower.served
        return None if served is None else self.clock() - served.live.manifest.data_until

    def body(self) -> dict[str, Any]:
        """Part of /readyz's body; it never makes a replica unready, which would not bring the night back."""
        due = datetime.fromtimestamp(self.due_at(), UTC)
        return {
            "missing": self.is_missing(),
            "due": due.isoformat(timespec="seconds").replace("+00:00", "Z"),
            "age_seconds": self.age_s(),
        }

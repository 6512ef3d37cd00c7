"""Events as a worker tells the dashboard of them, and as those of all workers are shown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cache.events.position import Position
from serving.events.counts import TEXTS as GAUGES
from serving.events.intake import EventIntake
from serving.fresh.event_follower import EventFollower
from serving.generations.holder import GenerationHolder

TEXTS: Final = ("durability", "demanded", "counted_until", "published_until")
"""Fields of a worker's row that are texts; positions are those of Redis."""
NUMBERS: Final = (*GAUGES, "lag_s", "users", "held_bytes", "held_max_bytes")
"""Fields of a worker's row that are numbers."""

_Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EventOverview:
    """Overview of one worker: what it takes in, what it counts, and what its live generation has."""

    intake: EventIntake
    follower: EventFollower
    holder: GenerationHolder

    def to_json(self) -> dict[str, Any]:
        """The worker's row; what was not looked at yet is left out."""
        redis, newer_events, served = (
            self.intake.redis,
            self.follower.newer_events,
            self.holder.served,
        )
        published = None if served is None else served.live.manifest.events
        return {
            **self.intake.counts.gauges,
            "durability": None
            if redis.found_durability is None
            else redis.found_durability.persistence,
            "demanded": redis.demanded,
            "lag_s": round(self.follower.lag_s(), 3),
            "users": len(newer_events.users),
            "held_bytes": newer_events.size_bytes,
            "held_max_bytes": self.follower.limit_bytes,
            "counted_until": str(Position.of_number(newer_events.users.last)),
            "published_until": None if published is None else published.until,
        }


def merge_rows(worker_rows: Sequence[_Row | None]) -> dict[str, Any] | None:
    """Events of all workers by their rows, each as bad and as far as the last of them; None where nobody tells any."""
    rows = [row for row in worker_rows if row]
    if not rows:
        return None
    worst = min(rows, key=lambda row: 1.0 if row.get("up") is None else float(row["up"]))
    numbers = {name: max(_present_values(rows, name), default=None) for name in NUMBERS}
    return numbers | {
        "up": None if worst.get("up") is None else bool(worst["up"]),
        "durability": worst.get("durability"),
        "demanded": worst.get("demanded"),
        **{
            name: min(_present_values(rows, name), key=Position.parse, default=None)
            for name in ("counted_until", "published_until")
        },
    }


def _present_values(rows: Sequence[_Row], name: str) -> list[Any]:
    return [row[name] for row in rows if row.get(name) is not None]

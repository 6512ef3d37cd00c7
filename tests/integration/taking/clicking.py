"""Random events in the stream of a night's namespace."""

from dataclasses import replace
from datetime import datetime, timedelta

import numpy as np
import redis

from cache.config.events import EventsConfig
from cache.events.event import Event
from cache.format.stream_position import Position
from precompute.config.settings import NightConfig
from precompute.steps import take_events
from tests.integration.changed.month import Month

HOUR_US = 3_600_000_000


def with_events(month: Month, redis_url: str) -> Month:
    """Return the month with events, which both kinds of nights take from one Redis."""
    # The gates' own tests cover int8: with so few users, its lists differ by chance.
    gates = replace(month.config.gates, skew_overlap=0.0)
    month.configure(events=EventsConfig(enabled=True), events_url=redis_url, gates=gates)
    return month


def microseconds(moment: datetime) -> int:
    return round(moment.timestamp() * 1e6)


def click(config: NightConfig, events: list[Event]) -> list[Position]:
    """Add events to the stream in this order; return their positions."""
    stream = config.keyspace().events
    with redis.Redis.from_url(config.events_redis_url, protocol=3) as client:
        return [Position.parse(client.xadd(stream, {"e": event.to_bytes()})) for event in events]


def drawn(
    rng: np.random.Generator, users: list[str], items: list[str], count: int, cut: datetime, *, name: str = "e"
) -> list[Event]:  # fmt: skip
    """Return events of some users on some items: late, out of order, some at equal times, some without weight."""
    hours = rng.integers(1, 48, size=count)
    last = microseconds(cut - timedelta(hours=1))
    return [
        Event(
            f"{name}-{number}", int(last - HOUR_US * hours[number]), str(rng.choice(users)).encode(),
            str(rng.choice(items)).encode(), weight=0.0 if rng.random() < 0.05 else 1.0,
        )
        for number in range(count)
    ]  # fmt: skip


def draw_mixed_events(month: Month, name: str, count: int = 150) -> list[Event]:
    """Return events of known and new users, on known and unknown items."""
    users = [*month.ids("user")[::2], "new-1", f"new-{name}"]
    return drawn(month.rng, users, [*month.ids("item"), "nowhere"], count, month.cut, name=name)


def take_all_events(config: NightConfig) -> NightConfig:
    """Let the store take all events; return the settings."""
    take_events.run(config)
    return config


def alone(config: NightConfig, name: str) -> NightConfig:
    """Return the same settings over a store without events."""
    return replace(config, artifacts=name, state=f"{name}-state", reuse="off")

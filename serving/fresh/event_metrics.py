"""Metrics of the stream of events: how far it is followed, and what is held of it."""

from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from cache.events.user_events import UserEvents


class EventMetrics(Collector):
    """Collector of what is followed."""

    def __init__(self, users: UserEvents, lag_s: Callable[[], float]) -> None:
        self._users = users
        self._lag_s = lag_s

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Metric families."""
        for name, text, value in (
            ("lag_seconds", "Since everything was counted that had been accepted", self._lag_s()),
            ("users", "Users with events in memory", len(self._users)),
            ("held_bytes", "Bytes of events in memory", self._users.size_bytes),
        ):
            yield GaugeMetricFamily(f"larder_events_{name}", text, value)

"""Metrics of the stream of events: how far it is followed, and what is held of it."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from serving.fresh.newer_events import NewerEvents


class EventMetrics(Collector):
    """Collector of what is followed."""

    def __init__(self, newer: NewerEvents, lag_s: Callable[[], float]) -> None:
        self._newer = newer
        self._lag_s = lag_s

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """Metric families."""
        users, values, items = self._newer.users, self._newer.values, self._newer.items
        for name, text, value in (
            ("lag_seconds", "Since everything was counted that had been accepted", self._lag_s()),
            ("users", "Users with events in memory", len(users)),
            ("held_bytes", "Bytes of events in memory", users.size_bytes),
            ("new_items", "Items in memory that events brought", len(items)),
        ):
            yield GaugeMetricFamily(f"larder_events_{name}", text, value)
        yield CounterMetricFamily(
            "larder_event_values_refused",
            "Events whose values were not taken in: their item or user has too many attributes",
            values.refusals,
        )
        yield CounterMetricFamily(
            "larder_event_new_items_evicted",
            "Items that events brought and that went for newer ones",
            items.evicted,
        )

"""Metrics of the stream of events: how far it is followed, and what is held of it."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from serving.fresh.event_follower import EventFollower


class EventMetrics(Collector):
    """Collector of what is followed."""

    def __init__(self, follower: EventFollower) -> None:
        self._follower = follower

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """Metric families."""
        follower, newer_events = self._follower, self._follower.newer_events
        for name, text, value in (
            (
                "lag_seconds",
                "Since everything was counted that had been accepted",
                follower.lag_s(),
            ),
            ("users", "Users with events in memory", len(newer_events.users)),
            ("held_bytes", "Bytes of events in memory", newer_events.size_bytes),
            ("new_items", "Items in memory that events brought", len(newer_events.items)),
            ("held_max_bytes", "Bytes of them that a worker may have", follower.limit_bytes),
        ):
            yield GaugeMetricFamily(f"larder_events_{name}", text, value)
        yield CounterMetricFamily(
            "larder_event_values_refused",
            "Events whose values were not taken in: their item or user has too many attributes",
            newer_events.values.refusals,
        )
        yield CounterMetricFamily(
            "larder_event_new_items_evicted",
            "Items that events brought and that went for newer ones",
            newer_events.items.evicted,
        )

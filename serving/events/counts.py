"""Counts of events by result, the time of acceptance, and sizes of the stream and the inbox."""

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cache.format.redis_keys import Keyspace
from serving.events.connection import EventsRedis, EventsUnavailable
from serving.metrics.collectors import SecondsHistogram, by_label

ACCEPTED, REPEATED, TOO_MANY = "accepted", "repeated", "too_many"
ERASED = "erased"
"""Reason for which no part of an event is stored, so that an erased id is not stored again."""
REFUSALS = ("events_full", "events_unavailable", "overloaded")
"""Reasons for which a request of events, or a batch of the inbox, is refused whole."""
REJECTIONS = (
    ERASED, TOO_MANY, "too_large", "in_future", "missing_field", "invalid_field", "unknown_field", "invalid_id",
    "invalid_json", "unfit_item", "fixed_items", "invalid_feature", "too_many_features", "feature_too_long",
    "not_finite",
)  # fmt: skip
"""Reasons for which an event is rejected."""

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_WAYS = ("http", "inbox")


class EventCounts(Collector):
    """Collector of this process's counts, and of the last known sizes of the stream and the inbox."""

    def __init__(self, redis: EventsRedis, keyspace: Keyspace, stream_bytes: int) -> None:
        """Create counts of zero; `stream_bytes`: bound of the stream."""
        # What first appears above 0 has no increase an alert could see.
        self.results: Counter[str] = Counter(dict.fromkeys((ACCEPTED, REPEATED, *REJECTIONS), 0))
        self.refusals: Counter[str] = Counter(dict.fromkeys(REFUSALS, 0))
        self.dropped_count = 0
        """Rejected events that were not stored, because too many waited to be written."""
        self.seconds = SecondsHistogram(
            "larder_events_accept_seconds", "Time until events were accepted, by the way they came", "by", _WAYS,
            _SECONDS,
        )  # fmt: skip
        self._redis, self._keyspace, self._stream_bytes = redis, keyspace, stream_bytes
        self.gauges: dict[str, float] = {}
        """Figures of the last refresh by name; empty before the first."""

    async def refresh(self) -> None:
        """Measure the stream and the inbox, and check the server's settings; if it is away, report only that."""
        stream, inbox = self._keyspace.events, self._keyspace.inbox
        try:
            durability = await self._redis.look_at_durability()
            size_bytes, length, waiting, first, redis_time = await self._redis.execute_all([
                ("MEMORY USAGE", stream, "SAMPLES", 5), ("XLEN", stream), ("XLEN", inbox),
                ("XRANGE", inbox, "-", "+", "COUNT", 1), ("TIME",),
            ])  # fmt: skip
        except EventsUnavailable:
            self.gauges = {"up": 0.0}
            return
        # Not a position: producers may write ids of their own, such as microseconds.
        oldest_s = int(first[0][0].split(b"-")[0]) / 1000 if first else float(redis_time[0])
        self.gauges = {
            "up": float(durability.suffices(self._redis.demanded)),
            "stream_bytes": float(size_bytes or 0),
            "stream_max_bytes": float(self._stream_bytes),
            "stream_length": float(length),
            "inbox_length": float(waiting),
            "inbox_lag_seconds": max(0.0, float(redis_time[0]) - oldest_s),
        }

    def collect(self) -> Iterable[Metric]:
        """Yield counter families, the histogram, and a gauge for each figure of the last refresh."""
        results = CounterMetricFamily(
            "larder_events", "Events, by what became of them", labels=["result"]
        )
        yield by_label(results, self.results)
        refusals = CounterMetricFamily(
            "larder_events_refused",
            "Requests of events and pieces of the inbox that were refused whole, by reason",
            labels=["reason"],
        )
        yield by_label(refusals, self.refusals)
        yield CounterMetricFamily(
            "larder_events_rejected_dropped",
            "Rejected events not kept with their reason",
            value=self.dropped_count,
        )
        yield from self.seconds.collect()
        for name, value in self.gauges.items():
            yield GaugeMetricFamily(f"larder_events_{name}", TEXTS[name], value=value)


TEXTS = {
    "up": "1 while the Redis of events answers and is as durable as demanded",
    "stream_bytes": "Bytes of the stream of accepted events",
    "stream_max_bytes": "Bytes that it may have; beyond them events are refused",
    "stream_length": "Events in the stream",
    "inbox_length": "Entries of the inbox that are not taken in yet",
    "inbox_lag_seconds": "Age of the oldest of them, by Redis' clock",
}
"""Help text by gauge."""

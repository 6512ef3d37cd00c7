"""Counts of events by result, the time of acceptance, and sizes of the stream and the inbox."""

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cache.format.redis_keys import Keyspace
from serving.events.connection import EventsRedis, EventsUnavailable, WritesRefused
from serving.metrics.collectors import ChangedAnswers, SecondsHistogram, add_samples_by_label

ACCEPTED, REPEATED, TOO_MANY = "accepted", "repeated", "too_many"
(RESULT_PREFIX, REFUSAL_PREFIX, NEWER_EVENT_ANSWERS_FIELD, COMPARED_LISTS_FIELD, CHANGED_PPM_FIELD) = (
    "v:",
    "y:",
    "w",
    "c",
    "d",
)
"""Fields, or prefixes of fields, of the counts that the dashboard adds up."""
ERASED = "erased"
"""Rejection reason for which no part of the event is stored, because an erased id must not be stored again."""
REFUSAL_REASONS = ("events_full", "events_unavailable", "overloaded")
"""Reasons for which a whole request of events, or a batch of the inbox, is refused."""
REJECTION_REASONS = (
    ERASED, TOO_MANY, "too_large", "in_future", "missing_field", "invalid_field", "unknown_field", "invalid_id",
    "invalid_json", "unfit_item", "fixed_items", "invalid_feature", "too_many_features", "feature_too_long",
    "not_finite",
)  # fmt: skip
"""Reasons for which an event is rejected."""

_BUCKET_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_INTAKE_WAYS = ("http", "inbox")


class EventCounts(Collector):
    """Collector of this process's counts, and of the last known sizes of the stream and the inbox."""

    def __init__(self, redis: EventsRedis, keyspace: Keyspace, stream_bytes_max: int) -> None:
        """Create counts of zero; `stream_bytes_max`: bound of the stream."""
        # Start series at 0: Prometheus sees no increase if a series first appears with a higher value.
        self.count_by_result: Counter[str] = Counter(dict.fromkeys((ACCEPTED, REPEATED, *REJECTION_REASONS), 0))
        self.refusal_count_by_reason: Counter[str] = Counter(dict.fromkeys(REFUSAL_REASONS, 0))
        self.dropped_count = 0
        """Rejected events that were not stored, because too many waited to be written."""
        self.accept_seconds = SecondsHistogram(
            "larder_events_accept_seconds", "Time until events were accepted, by the way they came", "by", _INTAKE_WAYS,
            _BUCKET_BOUNDS_S,
        )  # fmt: skip
        self._redis, self._keyspace, self._stream_bytes_max = redis, keyspace, stream_bytes_max
        self.value_by_gauge: dict[str, float] = {}
        """Measurements of the last refresh by name; empty before the first."""
        self.write_refusal: WritesRefused | None = None
        """Refusal of writes at the last refresh; None: the server accepts writes, or is unreachable."""

    async def refresh(self) -> None:
        """Measure the stream and the inbox; check the server's settings and that it writes.

        If it is unreachable, report only that.
        """
        stream_key, inbox_key = self._keyspace.events, self._keyspace.inbox
        write_refusal = None
        try:
            try:
                await self._redis.demand_writes(inbox_key)
            except WritesRefused as error:
                write_refusal = error
            durability = await self._redis.refresh_durability()
            size_bytes, stream_length, inbox_length, oldest_inbox_entries, redis_time = await self._redis.execute_all([
                ("MEMORY USAGE", stream_key, "SAMPLES", 5), ("XLEN", stream_key), ("XLEN", inbox_key),
                ("XRANGE", inbox_key, "-", "+", "COUNT", 1), ("TIME",),
            ])  # fmt: skip
        except EventsUnavailable:
            self.value_by_gauge, self.write_refusal = {"up": 0.0}, None
            return
        self.write_refusal = write_refusal
        # Not `Position`: producers may use ids of their own, such as microseconds.
        oldest_entry_s = (
            int(oldest_inbox_entries[0][0].split(b"-")[0]) / 1000 if oldest_inbox_entries else float(redis_time[0])
        )
        self.value_by_gauge = {
            "up": float(write_refusal is None and durability.suffices(self._redis.demanded_durability)),
            "stream_bytes": float(size_bytes or 0),
            "stream_max_bytes": float(self._stream_bytes_max),
            "stream_length": float(stream_length),
            "inbox_length": float(inbox_length),
            "inbox_lag_seconds": max(0.0, float(redis_time[0]) - oldest_entry_s),
        }

    def collect(self) -> Iterable[Metric]:
        """Yield counter families, the histogram, and a gauge for each measurement of the last refresh."""
        results_family = CounterMetricFamily("larder_events", "Events by result", labels=["result"])
        yield add_samples_by_label(results_family, self.count_by_result)
        refusals_family = CounterMetricFamily(
            "larder_events_refused",
            "Whole requests of events and batches of the inbox that were refused, by reason",
            labels=["reason"],
        )
        yield add_samples_by_label(refusals_family, self.refusal_count_by_reason)
        yield CounterMetricFamily(
            "larder_events_rejected_dropped",
            "Rejected events that were not stored with their reason",
            value=self.dropped_count,
        )
        yield from self.accept_seconds.collect()
        for gauge_name, gauge_value in self.value_by_gauge.items():
            yield GaugeMetricFamily(f"larder_events_{gauge_name}", HELP_TEXT_BY_GAUGE[gauge_name], value=gauge_value)


HELP_TEXT_BY_GAUGE = {
    "up": "1 while the Redis of events answers, writes, and is as durable as demanded",
    "stream_bytes": "Bytes of the stream of accepted events",
    "stream_max_bytes": "Limit of the stream's bytes; beyond it events are refused",
    "stream_length": "Events in the stream",
    "inbox_length": "Entries of the inbox that are not processed yet",
    "inbox_lag_seconds": "Age of the oldest entry of the inbox, by Redis' clock",
}
"""Help text by gauge."""


def counts_by_field(counts: EventCounts, changed_answers: ChangedAnswers) -> dict[str, int]:
    """Return the counts of events, and of answers with newer events, by the fields of the dashboard."""
    count_by_field = {
        f"{RESULT_PREFIX}{result_or_reason}": n for result_or_reason, n in counts.count_by_result.items() if n
    }
    count_by_field |= {
        f"{REFUSAL_PREFIX}{result_or_reason}": n for result_or_reason, n in counts.refusal_count_by_reason.items() if n
    }
    newer_event_answers, compared_lists, changed_share_sum = changed_answers.answers_lists_and_shares()
    changed_ppm = round(changed_share_sum * 1e6)
    return count_by_field | {
        NEWER_EVENT_ANSWERS_FIELD: newer_event_answers,
        COMPARED_LISTS_FIELD: compared_lists,
        CHANGED_PPM_FIELD: changed_ppm,
    }

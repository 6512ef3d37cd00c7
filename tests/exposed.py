"""Names and labels of every metric that the service may expose, without running it."""

from typing import Any, cast

from prometheus_client.metrics import MetricWrapperBase

from cache.config.timetable import Schedule
from cache.format.redis_keys import Keyspace
from cache.process.background_loops import BackgroundLoops
from cache.tiers.access_sample import AccessTrace
from cache.tiers.l1 import LocalTier
from cache.tiers.reads import Counters
from serving.access.callers import TokenWatch
from serving.access.quota import QuotaTable
from serving.admission.controller import Admission, OverloadCollector
from serving.config.tls import Certificate, TlsWatch
from serving.events.counts import HELP_TEXT_BY_GAUGE as EVENT_GAUGES
from serving.events.counts import EventCounts
from serving.events.follower import EventMetrics
from serving.events.newer_events import NewerEvents
from serving.generations.nights import NightMetrics, Nights, RedisMemory, ReleaseWatch
from serving.metrics import collectors
from serving.metrics.collectors import InternalCounters, LoopFailures
from serving.metrics.registry import Metrics
from serving.near.near_matches import NearMatches, NearMetrics
from serving.quality import monitor
from serving.quality.results import QualityResults
from serving.traffic import exposures
from serving.traffic.canary import CanaryMetrics
from serving.traffic.router import ExperimentMetrics
from serving.usage import hot_keys
from serving.usage.l1_advisor import L1Advisor
from serving.usage.table_usage import ReadHashes, TableUsage
from tests.fakes import THREADS

COUNTER_NAMES = (
    *collectors.HELP_BY_EVENT, *exposures.HELP_BY_EVENT, *hot_keys.HELP_BY_EVENT, *monitor.HELP_BY_EVENT,
)  # fmt: skip
_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "summary": ("_count", "_sum")}


def labels() -> dict[str, set[str]]:
    """Return the label names by series name, without those that Prometheus and histograms add."""
    admission = Admission(target_s=1.0, interval_s=1.0, requests_max=1)
    nights = Nights(Schedule(), cast(Any, _EmptyHolder))
    unused_dependency: Any = None
    figures = NightMetrics(
        lambda: None, nights, ReleaseWatch(unused_dependency, THREADS), RedisMemory(unused_dependency)
    )
    metrics, taken_in = Metrics(), EventCounts(unused_dependency, Keyspace("t"), 0)
    CanaryMetrics(metrics.registry)
    ExperimentMetrics(metrics.registry)
    taken_in.value_by_gauge = dict.fromkeys(EVENT_GAUGES, 0.0)
    custom_collectors = [
        InternalCounters(lambda: dict.fromkeys(COUNTER_NAMES, 0.0)),
        OverloadCollector(admission), figures,
        QualityResults(), TableUsage(unused_dependency, ReadHashes(), metrics, tuple, lambda: None),
        L1Advisor(cast(Any, _Tiers), lambda: None, 0), TokenWatch("t", "", QuotaTable.create_private()),
        TlsWatch(cast(Any, _Files)), LoopFailures(BackgroundLoops()), taken_in,
        EventMetrics(cast(Any, _Follower)), NearMetrics(NearMatches({})),
    ]  # fmt: skip
    label_names_by_series: dict[str, set[str]] = {}
    for collector in [*metrics.registry._collector_to_names, *custom_collectors]:
        if isinstance(collector, MetricWrapperBase):
            label_names_by_series |= _series(collector._name, str(collector._type), collector._labelnames)
            continue
        for family in collector.collect():
            label_names_by_series |= _series(family.name, family.type, family._labelnames)  # type: ignore[attr-defined]
    return label_names_by_series


def _series(name: str, kind: str, names: Any) -> dict[str, set[str]]:
    return {name + end: set(names) for end in _SUFFIXES.get(kind, ("",))}


class _EmptyHolder:
    served = None


class _Follower:
    newer_events, held_bytes_max, lag_s = NewerEvents(), 0, staticmethod(float)
    count_new_items_without_vector = staticmethod(int)


class _Files:
    file_versions = context = staticmethod(tuple[()])
    content_digest = staticmethod(bytes)
    certificate = staticmethod(lambda: Certificate(b"", 0.0, 4e9))


class _Tiers:
    local_tier, access_trace, counters = LocalTier(1), AccessTrace(), Counters()

"""Every series that the service may expose, with its labels and without running it."""

from typing import Any, cast

from prometheus_client.metrics import MetricWrapperBase

from cache.advisor.trace import Trace
from cache.local import LocalTier
from cache.outcomes import Counters
from cache.schedule import Schedule
from serving.admission import Admission
from serving.advisor import Advisor
from serving.chronicle import Chronicle
from serving.events import TEXTS, Events
from serving.figures import Figures
from serving.metrics import Metrics
from serving.nights import Nights
from serving.quality.reads import Reads
from serving.quality.results import Results
from serving.quality.usage import Usage
from serving.room import Room
from serving.tally import Overload

_SUFFIXES = {
    "counter": ("_total",),
    "histogram": ("_bucket", "_count", "_sum"),
    "summary": ("_count", "_sum"),
}


def labels() -> dict[str, set[str]]:
    """Series name -> its label names, without those that Prometheus and histograms add."""
    admission = Admission(target_s=1.0, interval_s=1.0, requests_max=1)
    nights = Nights(Schedule(), cast(Any, _Nothing))
    nothing: Any = None
    figures = Figures(lambda: None, nights, Chronicle(nothing), Room(nothing))
    metrics = Metrics()
    told = [
        Events(lambda: dict.fromkeys(TEXTS, 0.0)), Overload(admission), figures, Results(),
        Usage(nothing, Reads(), metrics, tuple, lambda: None),
        Advisor(cast(Any, _Tiers), lambda: None, 0),
    ]  # fmt: skip
    found: dict[str, set[str]] = {}
    for collector in [*metrics.registry._collector_to_names, *told]:
        if isinstance(collector, MetricWrapperBase):
            found |= _series(collector._name, str(collector._type), collector._labelnames)
            continue
        for family in collector.collect():
            found |= _series(family.name, family.type, family._labelnames)  # type: ignore[attr-defined]
    return found


def _series(name: str, kind: str, names: Any) -> dict[str, set[str]]:
    return {name + end: set(names) for end in _SUFFIXES.get(kind, ("",))}


class _Nothing:
    holding = None


class _Tiers:
    local, trace, counters = LocalTier(1), Trace(), Counters()

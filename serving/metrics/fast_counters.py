"""Plain numbers of the hot route: adding one costs nanoseconds, Prometheus hears of them when it asks."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from serving.admission.controller import Admission
from serving.metrics.log_buckets import finer

GET_ROUTE = "GET /v1/lookup/{table}"


@dataclass(slots=True)
class LabelHistogram:
    """Histogram of one label value, such as the answers of one source: how many by bucket, and seconds in all."""

    counts: list[int]
    sum: float = 0.0


class SecondsHistogram(Collector):
    """A histogram by one label, without a lock: only the event loop adds to it.

    Counted in finer buckets (`serving.metrics.log_buckets`) than Prometheus is told: one bisect serves both.
    """

    def __init__(
        self, name: str, text: str, label: str, values: Sequence[str], bounds: Sequence[float]
    ) -> None:
        self.bounds = finer(bounds)
        self._name, self._text, self._label = name, text, label
        self._exposed_bounds = [(bound, self.bounds.index(bound)) for bound in bounds]
        self.spent = {value: LabelHistogram([0] * (len(self.bounds) + 1)) for value in values}

    def observe(self, value: str, seconds: float, times: int = 1) -> None:
        """Adds `times` observations of the same length."""
        spent = self.spent[value]
        spent.counts[bisect_left(self.bounds, seconds)] += times
        spent.sum += seconds * times

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Histogram family with the buckets that Prometheus is told."""
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label])
        for value, spent in self.spent.items():
            sums = list(accumulate(spent.counts))
            buckets: list[tuple[str, float]] = []
            for bound, at in (*self._exposed_bounds, (float("inf"), len(sums) - 1)):
                name: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
                buckets.append((name, float(sums[at])))
            family.add_metric([value], buckets, spent.sum)
        yield family


class OverloadCollector(Collector):
    """Collector of how full the process is, and of what it did about it."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def collect(self) -> Iterable[Metric]:
        """Counter family of what was shed, and gauges of the state that decides it."""
        admission = self._admission
        shed = CounterMetricFamily(
            "larder_shed",
            "Left out under overload: inferences and whole requests",
            labels=["stage"],
        )
        for stage, count in admission.shed.items():
            shed.add_metric([stage], count)
        yield shed
        for name, text, value in (
            (
                "queue_seconds",
                "Shortest turn of the event loop in the last interval",
                admission.loop.wait,
            ),
            (
                "live_admitted_ratio",
                "Of the inputs, those that may go to the model",
                admission.live_share,
            ),
            (
                "costly_admitted_ratio",
                "Of the requests that are costly, those that may go on",
                admission.costly.admitted_share,
            ),
            ("requests_under_way", "Requests below L1", admission.under_way),
            ("requests_max", "Requests that may be below L1 at once", admission.requests_max),
        ):
            yield GaugeMetricFamily(f"larder_{name}", text, value)


class FastTally:
    """Answers and requests of the hot route not yet taken over; who counts elsewhere first adds here, by `flushes`."""

    def __init__(self) -> None:
        self.answers: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.requests: defaultdict[str, int] = defaultdict(int)
        self.flushes: list[Callable[[], None]] = []

    def drain(self) -> tuple[dict[tuple[str, str], int], dict[str, int]]:
        """Answers by (table, source), requests by route, each answered with 200; what is taken is counted no more."""
        for flush in self.flushes:
            flush()
        drained_counts = dict(self.answers), dict(self.requests)
        self.answers.clear()
        self.requests.clear()
        return drained_counts

"""Failures of background loops, as they are scraped."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cache.process.background_loops import BackgroundLoops


class LoopFailures(Collector):
    """Collector of failures by loop, those that never failed included, and of the loops that keep failing."""

    def __init__(self, loops: BackgroundLoops) -> None:
        self._loops = loops

    def collect(self) -> Iterable[Metric]:
        """Counter and gauge, one sample for each name of a loop."""
        failures = CounterMetricFamily(
            "larder_background_failures",
            "Errors that a background loop went on after",
            labels=["loop"],
        )
        failing = GaugeMetricFamily(
            "larder_background_failing", "1 while a background loop keeps failing", labels=["loop"]
        )
        now_failing = self._loops.failing
        for name, count in sorted(self._loops.failures.items()):
            failures.add_metric([name], count)
            failing.add_metric([name], float(name in now_failing))
        yield failures
        yield failing

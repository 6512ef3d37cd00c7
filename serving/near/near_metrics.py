"""Prometheus' view of near-match reuse: what became of inputs, and the error of what is reused."""

import math
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serving.near.near_matches import NearMatches


class NearMetrics(Collector):
    """Collector of what was counted since the start, and of the policies of the generation asked last."""

    def __init__(self, near: NearMatches) -> None:
        self._near = near

    def collect(self) -> Iterable[Metric]:
        """Metric families: inputs by outcome, whether anything is reused, the error of that with its interval."""
        inputs = CounterMetricFamily(
            "larder_near_inputs",
            "Inputs that no tier knew, by what became of them: far, proven, reuse, audit, learn, leave",
            labels=["table", "outcome"],
        )
        for table, counts in self._near.counts.items():
            for outcome, count in counts.copy().items():
                inputs.add_metric([table, outcome], count)
        labels = ["table", "input"]
        reusing = GaugeMetricFamily(
            "larder_near_reusing", "1 while the policy lets near answers be reused", labels=labels
        )
        off = GaugeMetricFamily(
            "larder_near_off",
            "1 once reuse has turned itself off: its error was shown to be above the bound",
            labels=labels,
        )
        error = GaugeMetricFamily(
            "larder_near_error_ratio",
            "Share of reused answers that differ from live's, by audits: measured, and the bounds of its interval",
            labels=[*labels, "bound"],
        )
        for table, kind, policy in self._near.policies():
            reusing.add_metric([table, kind], policy.is_reusing)
            off.add_metric([table, kind], policy.is_off)
            measured = policy.wrong_audits / policy.audits if policy.audits else math.nan
            bounds = (
                ("measured", measured),
                *zip(("lowest", "highest"), policy.interval, strict=True),
            )
            for bound, value in bounds:
                error.add_metric([table, kind, bound], value)
        yield from (inputs, reusing, off, error)

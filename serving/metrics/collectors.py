"""Collectors of plain numbers that the event loop adds to: counters, histograms, misses, overload, failed loops."""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cache.process.background_loops import BackgroundLoops
from cache.tiers.l1 import Absence
from cache.tiers.reads import MissReason

Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)

HELP_BY_EVENT: Mapping[str, str] = {
    "l2_reads": "Records asked of Redis",
    "l2_batches": "Pipelines sent to Redis",
    "l2_shed": "Reads not sent, because too much was under way",
    "breaker_opened": "How often Redis was left alone after failures in a row",
    "flights_shared": "Reads that joined one under way",
    "inferences_shared": "Inputs that joined an inference under way",
    "inferences_hopeless": "Inputs that could not have been answered in time",
    "overlays_spared": "Live answers not looked up in Redis, because inputs hardly come again",
    "overlays_stored": "Live answers written to Redis",
    "overlays_failed": "Live answers that Redis did not take",
    "overlays_dropped": "Live answers not written, because too many waited",
    "leases_led": "Cold answers computed here while others waited",
    "leases_waited": "Cold answers that another replica was computing",
    "leases_adopted": "Cold answers taken over from another replica",
    "leases_taken_over": "Leases of a replica that fell silent, taken over",
    "leases_timed_out": "Cold answers computed after waiting in vain",
    "leases_unavailable": "Cold answers computed without a lease",
}
"""Help text by event of the core; each is a family of its own: a sum over all of them would mean nothing."""

MISS_REASONS = tuple(
    [
        reason
        for reason in MissReason
        if not reason.traits.is_internal and not reason.traits.has_stored_answer
    ]
)
"""Reasons that are counted: no stored tier answered."""

GET_ROUTE = "GET /v1/lookup/{table}"

BUCKET_RATIO = 1.1
"""Ratio of neighbouring bounds at most: a quantile is the geometric middle of its bucket, so off by 4.9 % at most."""

LOWEST_BOUND_S = 1e-6
"""Lowest bound in seconds: shorter times count as this long, times above the last bound as that."""


@dataclass(slots=True)
class LabelHistogram:
    """Histogram of one label value, such as the answers of one source: how many by bucket, and seconds in all."""

    counts: list[int]
    sum: float = 0.0


class SecondsHistogram(Collector):
    """Histogram by one label, without a lock: only the event loop adds to it.

    Counted in finer buckets (`refine_bounds`) than Prometheus gets: one bisect serves both.
    """

    def __init__(
        self, name: str, text: str, label: str, values: Sequence[str], bounds: Sequence[float]
    ) -> None:
        self.bounds = refine_bounds(bounds)
        self._name, self._text, self._label = name, text, label
        self._exposed_bounds = [(bound, self.bounds.index(bound)) for bound in bounds]
        self.spent = {value: LabelHistogram([0] * (len(self.bounds) + 1)) for value in values}

    def observe(self, value: str, seconds: float, times: int = 1) -> None:
        """Add `times` observations of the same duration."""
        spent = self.spent[value]
        spent.counts[bisect_left(self.bounds, seconds)] += times
        spent.sum += seconds * times

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Yield the histogram family with Prometheus' buckets."""
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label])
        for value, spent in self.spent.items():
            sums = list(accumulate(spent.counts))
            buckets: list[tuple[str, float]] = []
            for bound, at in (*self._exposed_bounds, (float("inf"), len(sums) - 1)):
                name: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
                buckets.append((name, float(sums[at])))
            family.add_metric([value], buckets, spent.sum)
        yield family


def refine_bounds(
    bounds: Sequence[float], *, lowest: float = LOWEST_BOUND_S, ratio: float = BUCKET_RATIO
) -> tuple[float, ...]:
    """Bounds from `lowest` to the last of `bounds` (ascending, above `lowest`) that hold all of them exactly."""
    finer_bounds = [lowest]
    for bound in bounds:
        below = finer_bounds[-1]
        steps = max(1, math.ceil(math.log(bound / below) / math.log(ratio) - 1e-9))
        finer_bounds += [below * (bound / below) ** (step / steps) for step in range(1, steps)]
        finer_bounds.append(bound)
    return tuple(finer_bounds)


def bucket_middle(bounds: Sequence[float], bucket: int) -> float:
    """Value that a bucket's observations are taken for; bucket n ends at bound n, the one after the last has no end."""
    if bucket == 0 or bucket >= len(bounds):
        return bounds[min(bucket, len(bounds) - 1)]
    return math.sqrt(bounds[bucket - 1] * bounds[bucket])


def quantile(bounds: Sequence[float], counts: Mapping[int, int], fraction: float) -> float | None:
    """The value that `fraction` of the observations (counts by bucket) do not exceed; None without any."""
    total = sum(counts.values())
    rank, cumulative_count = max(1, math.ceil(fraction * total - 1e-9)), 0
    for bucket in sorted(counts):
        cumulative_count += counts[bucket]
        if cumulative_count >= rank:
            return bucket_middle(bounds, bucket)
    return None


class FastTally:
    """Counts of the hot route not yet in the metrics; functions in `flushes` first add counts kept elsewhere."""

    def __init__(self) -> None:
        self.answers: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.requests: defaultdict[str, int] = defaultdict(int)
        self.flushes: list[Callable[[], None]] = []

    def drain(self) -> tuple[dict[tuple[str, str], int], dict[str, int]]:
        """Return and clear the counts of answers by (table, source), and of requests with status 200 by route."""
        for flush in self.flushes:
            flush()
        drained_counts = dict(self.answers), dict(self.requests)
        self.answers.clear()
        self.requests.clear()
        return drained_counts


class L1Misses(Collector):
    """Counter of entities that Redis answered, by why L1 did not: plain numbers, which only the event loop adds to."""

    def __init__(self) -> None:
        self._counts: defaultdict[tuple[str, Absence], int] = defaultdict(int)

    def add(self, table: str, reasons: Mapping[Absence, int]) -> None:
        """Adds entities of a table, each counted under its one reason."""
        for reason, count in reasons.items():
            self._counts[table, reason] += count

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Counter family by table and reason."""
        family = CounterMetricFamily(
            "larder_l1_misses",
            "Entities Redis answered, by why L1 did not hold them",
            labels=["table", "reason"],
        )
        for (table, reason), count in self._counts.items():
            family.add_metric([table, reason], count)
        yield family


class ChangedAnswers(Collector):
    """Counter of answers by table, and summary of shares of lists: plain numbers, which only the event loop adds to."""

    def __init__(self) -> None:
        self.answers: Counter[str] = Counter()
        self._lists: Counter[str] = Counter()
        self._share_sums: defaultdict[str, float] = defaultdict(float)

    def compare(
        self, table: str, items: NDArray[np.uint32], of_the_night: NDArray[np.uint32]
    ) -> None:
        """Adds the share of a computed list that is not in the one of the night."""
        if len(items):
            self._lists[table] += 1
            self._share_sums[table] += float(1.0 - np.isin(items, of_the_night).mean())

    def totals(self) -> tuple[int, int, float]:
        """Answers, lists that were compared, and the sum of their shares, of all tables."""
        return self.answers.total(), self._lists.total(), sum(self._share_sums.values())

    def collect(self) -> Iterable[Metric]:
        """Metric families by table."""
        answers = CounterMetricFamily(
            "larder_event_answers", "Entities answered with newer events", labels=["table"]
        )
        for table, count in self.answers.items():
            answers.add_metric([table], count)
        yield answers
        changes = SummaryMetricFamily(
            "larder_event_list_change_ratio",
            "Share of a list computed from newer events that is not in the night's, where L1 has that",
            labels=["table"],
        )
        for table, count in self._lists.items():
            changes.add_metric([table], count, self._share_sums[table])
        yield changes


class InternalCounters(Collector):
    """Collector of counts of the tiers and features besides answers: `larder_<name>_total`."""

    def __init__(
        self,
        read: Callable[[], Mapping[str, float]],
        help_by_event: Mapping[str, str] = HELP_BY_EVENT,
    ) -> None:
        self._read, self._help_by_event = read, help_by_event

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Counter families, one for each event."""
        for event, count in self._read().items():
            yield CounterMetricFamily(
                f"larder_{event}", self._help_by_event.get(event, event), value=count
            )


def by_label(family: Family, samples: Mapping[str, float]) -> Family:
    """The family of one label, with a sample for each of its values."""
    for value, number in samples.items():
        family.add_metric([value], number)
    return family


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
        now_failing = self._loops.error_by_failing_loop
        for name, count in sorted(self._loops.failure_count_by_loop.items()):
            failures.add_metric([name], count)
            failing.add_metric([name], float(name in now_failing))
        yield failures
        yield failing

"""Collectors of plain numbers that the event loop updates: counters, histograms, misses, failed loops."""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cache.process.background_loops import BackgroundLoops
from cache.tiers.l1 import Absence
from cache.tiers.reads import MissReason

Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)

HELP_BY_EVENT: Mapping[str, str] = {
    "l2_reads": "Records requested from Redis",
    "l2_batches": "Pipelines sent to Redis",
    "l2_shed": "Reads not sent, because too many were under way",
    "breaker_opened": "Times that Redis was not used after failures in a row",
    "flights_shared": "Reads that joined a read under way",
    "inferences_shared": "Inputs that joined an inference under way",
    "inferences_hopeless": "Inputs that could not have been answered in time",
    "overlays_spared": "Live answers not looked up in Redis, because inputs hardly repeat",
    "overlays_stored": "Live answers written to Redis",
    "overlays_failed": "Live answers that Redis did not store",
    "overlays_dropped": "Live answers not written, because too many waited",
    "leases_led": "Cold answers computed here while others waited",
    "leases_waited": "Cold answers that another replica was computing",
    "leases_adopted": "Cold answers taken over from another replica",
    "leases_taken_over": "Leases taken over from a replica that stopped renewing them",
    "leases_timed_out": "Cold answers computed after a wait without result",
    "leases_unavailable": "Cold answers computed without a lease",
}
"""Help text by event of the core; each event is a separate family, because a sum over all would be meaningless."""

COUNTED_MISS_REASONS = tuple(
    [reason for reason in MissReason if not reason.traits.is_internal and not reason.traits.has_stored_answer]
)
"""Reasons that are counted as misses: no stored tier answered."""

GET_ROUTE = "GET /v1/lookup/{table}"

BUCKET_RATIO = 1.1
"""Largest ratio of neighbouring bounds: a quantile is the geometric middle of its bucket, so it is off by 4.9 % at
most."""

LOWEST_BOUND_S = 1e-6
"""Lowest bound in seconds; shorter times count as this bound, and times above the last bound as the last bound."""


@dataclass(slots=True)
class LabelHistogram:
    """Histogram of one label value, such as the answers of one source: counts by bucket, and the sum of seconds."""

    bucket_counts: list[int]
    seconds_sum: float = 0.0


class SecondsHistogram(Collector):
    """Histogram by one label, without a lock: only the event loop adds to it.

    It counts in finer buckets (`refine_bounds`) than Prometheus gets, so that one bisect serves both.
    """

    def __init__(
        self,
        metric_name: str,
        help_text: str,
        label_name: str,
        label_values: Sequence[str],
        bucket_bounds: Sequence[float],
    ) -> None:
        self.bounds = refine_bounds(bucket_bounds)
        self._metric_name, self._help_text, self._label_name = metric_name, help_text, label_name
        self._exposed_bounds = [(bound, self.bounds.index(bound)) for bound in bucket_bounds]
        self.histogram_by_label_value = {
            label_value: LabelHistogram([0] * (len(self.bounds) + 1)) for label_value in label_values
        }

    def observe(self, label_value: str, observed_seconds: float, observation_count: int = 1) -> None:
        """Add `observation_count` observations of the same duration."""
        label_histogram = self.histogram_by_label_value[label_value]
        label_histogram.bucket_counts[bisect_left(self.bounds, observed_seconds)] += observation_count
        label_histogram.seconds_sum += observed_seconds * observation_count

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Yield the histogram family with Prometheus' buckets."""
        family = HistogramMetricFamily(self._metric_name, self._help_text, labels=[self._label_name])
        for label_value, label_histogram in self.histogram_by_label_value.items():
            cumulative_counts = list(accumulate(label_histogram.bucket_counts))
            cumulative_buckets: list[tuple[str, float]] = []
            for bound, bucket_index in (*self._exposed_bounds, (float("inf"), len(cumulative_counts) - 1)):
                bound_text: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
                cumulative_buckets.append((bound_text, float(cumulative_counts[bucket_index])))
            family.add_metric([label_value], cumulative_buckets, label_histogram.seconds_sum)
        yield family


def refine_bounds(
    bucket_bounds: Sequence[float], *, lowest_bound: float = LOWEST_BOUND_S, bound_ratio: float = BUCKET_RATIO
) -> tuple[float, ...]:
    """Return bounds from `lowest_bound` up to the last of `bucket_bounds` (ascending) that include all of these."""
    finer_bounds = [lowest_bound]
    for bound in bucket_bounds:
        lower_bound = finer_bounds[-1]
        step_count = max(1, math.ceil(math.log(bound / lower_bound) / math.log(bound_ratio) - 1e-9))
        finer_bounds += [
            lower_bound * (bound / lower_bound) ** (step_number / step_count) for step_number in range(1, step_count)
        ]
        finer_bounds.append(bound)
    return tuple(finer_bounds)


def bucket_middle(bucket_bounds: Sequence[float], bucket_index: int) -> float:
    """Return the value assumed for a bucket's observations; bucket n ends at bound n, the last has no end."""
    if bucket_index == 0 or bucket_index >= len(bucket_bounds):
        return bucket_bounds[min(bucket_index, len(bucket_bounds) - 1)]
    return math.sqrt(bucket_bounds[bucket_index - 1] * bucket_bounds[bucket_index])


def quantile(
    bucket_bounds: Sequence[float], count_by_bucket: Mapping[int, int], observation_share: float
) -> float | None:
    """Return the value that `observation_share` of the observations do not exceed; None without any."""
    observation_count = sum(count_by_bucket.values())
    rank, cumulative_count = max(1, math.ceil(observation_share * observation_count - 1e-9)), 0
    for bucket_index in sorted(count_by_bucket):
        cumulative_count += count_by_bucket[bucket_index]
        if cumulative_count >= rank:
            return bucket_middle(bucket_bounds, bucket_index)
    return None


class FastTally:
    """Counts of the fast path that are not in the metrics yet; `flush_callbacks` first add counts kept elsewhere."""

    def __init__(self) -> None:
        self.answer_counts: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.request_count_by_route: defaultdict[str, int] = defaultdict(int)
        self.flush_callbacks: list[Callable[[], None]] = []

    def drain(self) -> tuple[dict[tuple[str, str], int], dict[str, int]]:
        """Return and clear the counts of answers by (table, source), and of requests with status 200 by route."""
        for flush in self.flush_callbacks:
            flush()
        drained_counts = dict(self.answer_counts), dict(self.request_count_by_route)
        self.answer_counts.clear()
        self.request_count_by_route.clear()
        return drained_counts


class L1Misses(Collector):
    """Counter of entities that Redis answered, by the reason why L1 did not; only the event loop adds to it."""

    def __init__(self) -> None:
        self._count_by_table_and_reason: defaultdict[tuple[str, Absence], int] = defaultdict(int)

    def add(self, table_name: str, count_by_reason: Mapping[Absence, int]) -> None:
        """Add entities of a table, each under one reason."""
        for reason, count in count_by_reason.items():
            self._count_by_table_and_reason[table_name, reason] += count

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Yield the counter family by table and reason."""
        family = CounterMetricFamily(
            "larder_l1_misses", "Entities that Redis answered, by the reason why L1 did not", labels=["table", "reason"]
        )
        for (table, reason), count in self._count_by_table_and_reason.items():
            family.add_metric([table, reason], count)
        yield family


class ChangedAnswers(Collector):
    """Counter of answers with newer events, and summary of how lists changed; only the event loop adds to it."""

    def __init__(self) -> None:
        self.answer_count_by_table: Counter[str] = Counter()
        self._list_count_by_table: Counter[str] = Counter()
        self._changed_shares_by_table: defaultdict[str, float] = defaultdict(float)

    def compare(self, table_name: str, computed_items: NDArray[np.uint32], night_items: NDArray[np.uint32]) -> None:
        """Add the share of a computed list that is not in the nightly list."""
        if len(computed_items):
            self._list_count_by_table[table_name] += 1
            self._changed_shares_by_table[table_name] += float(1.0 - np.isin(computed_items, night_items).mean())

    def answers_lists_and_shares(self) -> tuple[int, int, float]:
        """Return answers, compared lists, and the sum of their shares, over all tables."""
        return (
            self.answer_count_by_table.total(),
            self._list_count_by_table.total(),
            sum(self._changed_shares_by_table.values()),
        )

    def collect(self) -> Iterable[Metric]:
        """Yield the metric families by table."""
        answers_family = CounterMetricFamily(
            "larder_event_answers", "Entities answered with newer events", labels=["table"]
        )
        for table, count in self.answer_count_by_table.items():
            answers_family.add_metric([table], count)
        yield answers_family
        change_family = SummaryMetricFamily(
            "larder_event_list_change_ratio",
            "Share of a list computed from newer events that is not in the nightly list, if L1 has that",
            labels=["table"],
        )
        for table, count in self._list_count_by_table.items():
            change_family.add_metric([table], count, self._changed_shares_by_table[table])
        yield change_family


class InternalCounters(Collector):
    """Collector of counts of the tiers and features besides answers: `larder_<name>_total`."""

    def __init__(
        self, read_counts: Callable[[], Mapping[str, float]], help_by_event: Mapping[str, str] = HELP_BY_EVENT
    ) -> None:
        self._read_counts, self._help_by_event = read_counts, help_by_event

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Yield one counter family per event."""
        for event, count in self._read_counts().items():
            yield CounterMetricFamily(f"larder_{event}", self._help_by_event.get(event, event), value=count)


def add_samples_by_label(family: Family, number_by_label_value: Mapping[str, float]) -> Family:
    """Return the family with one sample per label value."""
    for label_value, number in number_by_label_value.items():
        family.add_metric([label_value], number)
    return family


class LoopFailures(Collector):
    """Collector of failures by background loop, including loops without failures, and of loops that keep failing."""

    def __init__(self, loops: BackgroundLoops) -> None:
        self._loops = loops

    def collect(self) -> Iterable[Metric]:
        """Yield counter and gauge, one sample per loop."""
        failures_family = CounterMetricFamily(
            "larder_background_failures", "Errors of a background loop, which then continued", labels=["loop"]
        )
        failing_family = GaugeMetricFamily(
            "larder_background_failing", "1 while a background loop keeps failing", labels=["loop"]
        )
        failing_names = self._loops.error_by_failing_loop
        for loop_name, count in sorted(self._loops.failure_count_by_loop.items()):
            failures_family.add_metric([loop_name], count)
            failing_family.add_metric([loop_name], float(loop_name in failing_names))
        yield failures_family
        yield failing_family

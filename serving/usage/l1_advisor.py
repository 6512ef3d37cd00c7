"""Advisor on the size of L1: estimates its hit ratio at smaller and larger sizes, from the traffic of all workers."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cache.tiers.access_sample import TRACED_READS_MAX
from cache.tiers.reads import Counters
from cache.tiers.tiered import TieredCache
from cache.usage.miss_ratio_curve import MissRatioCurve
from serving.generations.snapshot import Snapshot

STEPS_PER_DOUBLING = 4
"""Points of the curve per doubling."""

SMALLEST_DOUBLING, LARGEST_DOUBLING = -6, 3
"""Ends of the curve, in doublings of the budget."""

DOUBLINGS_BY_SIZE = {"half": -1, "now": 0, "double": 1}
"""Values of the label `size`, in doublings of the budget."""

_NOTICED_DIFFERENCE = 0.001
"""Differences below a tenth of a percentage point count as none."""

STEP_S = 0.25
"""Seconds between steps."""

HALF_LIFE_S = 3_600.0
"""Seconds after which a read counts for half as much."""

TOUCHES_PER_S = 8_000
"""Largest average number of touches of sampled keys per second: about 12 ms of processor time."""

TOUCHES_PER_READ = 0.02
"""Touches of sampled keys per read in a busy service: 0.04 of the 8 microseconds that a single L1 hit takes."""

FREE_TOUCHES_PER_S = 500
"""Touches of sampled keys per second that are always allowed: 0.8 ms of processor time."""

BUSY_SAMPLING_RATE = 0.25
"""Sampling rate after these bounds are first exceeded; each further time it is halved."""

SAMPLED_READS_MIN = 200
"""Sampled reads before results are shown: then a ratio is off by at most 7 percentage points with 95 % probability."""

_CREDIT_MAX = 10_000.0

_TOUCHES_PER_SLICE = 128
"""Touches processed before yielding to the event loop: about 0.2 ms."""


class HitRatioCurve(NamedTuple):
    """Curve of hit ratios by size of L1; `weighted_read_count` is the weighted number of reads behind it."""

    budget_bytes: int
    capacities_bytes: Sequence[int]
    hit_ratios: Sequence[float]
    entry_counts: Sequence[int]
    sampling_rate: float
    sampled_key_count: int
    weighted_read_count: float

    def to_json(self) -> dict[str, Any]:
        """Return the JSON-able form for the dashboard."""
        points = zip(self.capacities_bytes, self.entry_counts, self.hit_ratios, strict=True)
        return {
            "sampling_rate": self.sampling_rate,
            "sampled": self.sampled_key_count,
            "reads": round(self.weighted_read_count, 1),
            "budget_bytes": self.budget_bytes,
            "hit_ratio": self.hit_ratio(0),
            "sentence": self._hit_ratio_sentence(),
            "curve": [
                {"bytes": size_bytes, "entries": entries, "hit_ratio": ratio} for size_bytes, entries, ratio in points
            ],
        }

    def hit_ratio(self, budget_doublings: int) -> float:
        """Return the hit ratio of an L1 with the budget times 2**`budget_doublings`."""
        return self.hit_ratios[(budget_doublings - SMALLEST_DOUBLING) * STEPS_PER_DOUBLING]

    def _hit_ratio_sentence(self) -> str:
        current_ratio = self.hit_ratio(0)
        doubling_gain, halving_loss = self.hit_ratio(1) - current_ratio, current_ratio - self.hit_ratio(-1)
        sentence = f"L1 of {format_size(self.budget_bytes)} gives {100 * current_ratio:.1f} %"
        if doubling_gain >= _NOTICED_DIFFERENCE:
            sentence += f", doubling adds {100 * doubling_gain:.1f} points"
        else:
            sentence += ", doubling adds nothing"
        if halving_loss >= _NOTICED_DIFFERENCE:
            return f"{sentence}, halving costs {100 * halving_loss:.1f}"
        sufficient_bytes = next(
            size_bytes
            for size_bytes, ratio in zip(self.capacities_bytes, self.hit_ratios, strict=True)
            if current_ratio - ratio < _NOTICED_DIFFERENCE
        )
        return f"{sentence}, {format_size(sufficient_bytes)} gives as much"


class L1Advisor(Collector):
    """Maintains the curve of this worker's L1 in the background, from the access trace of the tiers.

    A generation is part of every key, so after a flip all keys are new, as they are in L1: the sample is restarted,
    counted reads age as before, and the curve includes the cost of the flip. Records read ahead for a flip count as
    absent until they are requested once. `sampled_keys_max` bounds the sample; 0 switches the advisor off.
    """

    def __init__(
        self,
        tiers: TieredCache,
        get_live_snapshot: Callable[[], Snapshot | None],
        sampled_keys_max: int,
        monotonic_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lost_step_count = 0
        self.step_s = STEP_S if sampled_keys_max else 0.0
        self._tiers = tiers
        self._get_live_snapshot = get_live_snapshot
        self._monotonic_clock = monotonic_clock
        self._budget_bytes = budget_bytes = tiers.local_tier.max_bytes
        doublings = [
            step_index / STEPS_PER_DOUBLING
            for step_index in range(SMALLEST_DOUBLING * STEPS_PER_DOUBLING, LARGEST_DOUBLING * STEPS_PER_DOUBLING + 1)
        ]
        self._capacities = [round(budget_bytes * 2**doubling) for doubling in doublings]
        self._miss_ratio_curve = MissRatioCurve(self._capacities, sampled_keys_max)
        self._curve_generation: str | None = None
        self._stepped_at = monotonic_clock()
        self._touch_credit = _CREDIT_MAX
        self._last_counts = _hit_and_read_counts(tiers.counters)
        if sampled_keys_max:
            tiers.access_trace.sample_up_to(self._miss_ratio_curve.greatest_sampled_spot)

    async def step(self) -> None:
        """Add the reads since the last step to the curve."""
        trace, miss_ratio_curve = self._tiers.access_trace, self._miss_ratio_curve
        self._tiers.counters.add_pending_ready_answers()
        now_s = self._monotonic_clock()
        elapsed_s, self._stepped_at = now_s - self._stepped_at, now_s
        touches, is_whole = list(trace), len(trace) < TRACED_READS_MAX
        trace.clear()
        earlier_counts, self._last_counts = (self._last_counts, _hit_and_read_counts(self._tiers.counters))
        miss_ratio_curve.age(0.5 ** (elapsed_s / HALF_LIFE_S))
        live = self._get_live_snapshot()
        trace.begin_generation(None if live is None else live.generation)
        if trace.generation != self._curve_generation:
            self._curve_generation = trace.generation
            miss_ratio_curve.restart()
        if is_whole:
            hit_count, reads = (
                new_count - earlier_count
                for new_count, earlier_count in zip(self._last_counts, earlier_counts, strict=True)
            )
            miss_ratio_curve.count(hit_count, reads)
        else:  # some reads were lost: the others keep the order of keys, but are not counted
            self.lost_step_count += 1
            self._lower_sampling_rate()
            touches = [(spot, -abs(size)) for spot, size in touches]
        for first_index in range(0, len(touches), _TOUCHES_PER_SLICE):
            if first_index:
                await asyncio.sleep(0)
                if trace.generation != self._curve_generation:  # after a flip the next step restarts
                    return
            miss_ratio_curve.record_touches(
                touches[first_index : first_index + _TOUCHES_PER_SLICE], self._tiers.local_tier.table_bytes_per_entry
            )
            trace.sample_up_to(miss_ratio_curve.greatest_sampled_spot)
        earned_credit = FREE_TOUCHES_PER_S * elapsed_s + TOUCHES_PER_READ * (self._last_counts[1] - earlier_counts[1])
        self._touch_credit += min(TOUCHES_PER_S * elapsed_s, earned_credit) - len(touches)
        self._touch_credit = min(_CREDIT_MAX, self._touch_credit)
        if self._touch_credit < 0:
            self._touch_credit = 0.0
            self._lower_sampling_rate()

    def _lower_sampling_rate(self) -> None:
        self._miss_ratio_curve.lower_rate(min(BUSY_SAMPLING_RATE, self._miss_ratio_curve.rate / 2))
        self._tiers.access_trace.sample_up_to(self._miss_ratio_curve.greatest_sampled_spot)

    def to_json(self) -> dict[str, Any] | None:
        """Return the JSON-able curve of this worker's L1; None before there was enough traffic."""
        if self._miss_ratio_curve.sampled_reads < SAMPLED_READS_MIN:
            return None
        return self._curve().to_json()

    def _curve(self) -> HitRatioCurve:
        miss_ratio_curve = self._miss_ratio_curve
        return HitRatioCurve(
            self._budget_bytes,
            self._capacities,
            miss_ratio_curve.hit_ratio_by_capacity(),
            miss_ratio_curve.key_count_by_capacity(),
            miss_ratio_curve.rate,
            miss_ratio_curve.sampled_key_count,
            miss_ratio_curve.reads,
        )

    def collect(self) -> Iterable[Metric]:
        """Yield metrics of three points of the curve, and of the sample's size."""
        miss_ratio_curve = self._miss_ratio_curve
        predicted_family = GaugeMetricFamily(
            "larder_l1_predicted_hit_ratio", "Estimated share of reads that L1 would answer, by size", labels=["size"]
        )
        if miss_ratio_curve.sampled_reads >= SAMPLED_READS_MIN:
            curve = self._curve()
            for size_label, doublings in DOUBLINGS_BY_SIZE.items():
                predicted_family.add_metric([size_label], curve.hit_ratio(doublings))
        yield predicted_family
        sampling_rate = self._tiers.access_trace.greatest_sampled_spot >= 0 and miss_ratio_curve.rate
        for gauge_name, help_text, gauge_value in (
            ("sampling_rate", "Share of keys that the advisor samples, 0 while it is off", sampling_rate),
            ("sampled_keys", "Keys in the advisor's sample", miss_ratio_curve.sampled_key_count),
        ):
            yield GaugeMetricFamily(f"larder_l1_advisor_{gauge_name}", help_text, float(gauge_value))
        yield CounterMetricFamily(
            "larder_l1_advisor_lost_steps",
            "Steps of the advisor without counts, because too many reads came",
            self.lost_step_count,
        )


def _hit_and_read_counts(counters: Counters) -> tuple[int, int]:
    """Return the number of reads that found a record, and of all reads."""
    return counters.l1_total + counters.l2_records, counters.result_total


def merge_curves(worker_reports: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Merge curves of `HitRatioCurve.to_json`, weighted by reads; None if all are empty.

    Each worker has its own L1, so sizes are per worker. If budgets differ, which happens only during a change of
    settings, the one with the most reads is returned.
    """
    curve_reports = [curve_report for curve_report in worker_reports if curve_report]
    reads_by_budget = Counter[int]()
    for curve_report in curve_reports:
        reads_by_budget[curve_report["budget_bytes"]] += curve_report["reads"]
    if not reads_by_budget:
        return None
    budget_bytes, total_reads = reads_by_budget.most_common(1)[0]
    same_budget_reports = [
        curve_report for curve_report in curve_reports if curve_report["budget_bytes"] == budget_bytes
    ]
    weights = [
        curve_report["reads"] / total_reads if total_reads else 1 / len(same_budget_reports)
        for curve_report in same_budget_reports
    ]
    points_by_size = list(zip(*(curve_report["curve"] for curve_report in same_budget_reports), strict=True))

    def weighted_mean(curve_points: Sequence[Mapping[str, Any]], field_name: str) -> float:
        return sum(weight * float(point[field_name]) for weight, point in zip(weights, curve_points, strict=True))

    return HitRatioCurve(
        budget_bytes,
        [column[0]["bytes"] for column in points_by_size],
        [weighted_mean(column, "hit_ratio") for column in points_by_size],
        [round(weighted_mean(column, "entries")) for column in points_by_size],
        min(curve_report["sampling_rate"] for curve_report in same_budget_reports),
        sum(curve_report["sampled"] for curve_report in same_budget_reports),
        total_reads,
    ).to_json()


def format_size(size_bytes: int) -> str:
    """Format a size, rounded, in the largest binary unit that it reaches."""
    for unit, unit_bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if (size_in_unit := size_bytes / (1 << unit_bits)) >= 1:
            return f"{size_in_unit:.0f} {unit}" if size_in_unit >= 100 else f"{size_in_unit:.3g} {unit}"
    return f"{size_bytes} B"

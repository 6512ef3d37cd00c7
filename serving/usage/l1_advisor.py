"""Advisor of L1's size: what L1 would answer if it were smaller or larger, from the traffic of all workers."""

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
"""Doublings from the budget to the ends of the curve."""

SIZES = {"half": -1, "now": 0, "double": 1}
"""Values of the label `size`, in doublings of the budget."""

_NOTICED_DIFFERENCE = 0.001
"""Differences below a tenth of a point are none."""

STEP_S = 0.25
"""Seconds between steps."""

HALF_LIFE_S = 3_600.0
"""Seconds after which a read counts for half as much."""

TOUCHES_PER_S = 8_000
"""Touches of sampled keys a second, on average, at any traffic: about 12 ms of processor time."""

TOUCHES_PER_READ = 0.02
"""Touches of sampled keys per read, where reads are many: 0.04 microseconds of the 8 that a single L1 hit takes."""

TOUCHES_FREE_PER_S = 500
"""Touches of sampled keys a second in a service with little to do: 0.8 ms of processor time."""

BUSY_RATE = 0.25
"""The sampling rate once these bounds are met; each further time it is halved."""

SAMPLED_MIN = 200
"""Reads of sampled keys before anything is said: then a ratio is off by 7 points at most, 19 times in 20."""

_BURST = 10_000.0

_SLICE = 128
"""Touches worked off before others may use the event loop: about 0.2 ms."""


class HitRatioCurve(NamedTuple):
    """Curve of hit ratios for L1s of one budget; `reads`: how many it rests on, lately."""

    budget_bytes: int
    capacities: Sequence[int]
    ratios: Sequence[float]
    entries: Sequence[int]
    sampling_rate: float
    sampled: int
    reads: float

    def to_json(self) -> dict[str, Any]:
        """JSON-able form for the dashboard."""
        points = zip(self.capacities, self.entries, self.ratios, strict=True)
        return {
            "sampling_rate": self.sampling_rate,
            "sampled": self.sampled,
            "reads": round(self.reads, 1),
            "budget_bytes": self.budget_bytes,
            "hit_ratio": self.ratio(0),
            "sentence": self._sentence(),
            "curve": [
                {"bytes": size_bytes, "entries": entries, "hit_ratio": ratio}
                for size_bytes, entries, ratio in points
            ],
        }

    def ratio(self, doublings: int) -> float:
        """Hit ratio of an L1 with the budget doubled so many times; below 0, halved."""
        return self.ratios[(doublings - SMALLEST_DOUBLING) * STEPS_PER_DOUBLING]

    def _sentence(self) -> str:
        current_ratio = self.ratio(0)
        more, less = self.ratio(1) - current_ratio, current_ratio - self.ratio(-1)
        sentence = f"L1 of {format_size(self.budget_bytes)} gives {100 * current_ratio:.1f} %"
        if more >= _NOTICED_DIFFERENCE:
            sentence += f", doubling adds {100 * more:.1f} points"
        else:
            sentence += ", doubling adds nothing"
        if less >= _NOTICED_DIFFERENCE:
            return f"{sentence}, halving costs {100 * less:.1f}"
        enough = next(
            size_bytes
            for size_bytes, ratio in zip(self.capacities, self.ratios, strict=True)
            if current_ratio - ratio < _NOTICED_DIFFERENCE
        )
        return f"{sentence}, {format_size(enough)} gives as much"


class L1Advisor(Collector):
    """Keeps the curve of the worker's L1 up to date in the background, from what `Tiers.trace` holds.

    A generation is part of every key, so after a flip all keys are new, as they are in L1: the sample starts again,
    the reads counted so far age as ever, and what the flip costs is in the curve. Records read ahead for a flip are
    not: until they are asked for once they count as absent. `keys_max` bounds the sample, 0 switches it off.
    """

    def __init__(
        self,
        tiers: TieredCache,
        live: Callable[[], Snapshot | None],
        keys_max: int,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lost_step_count = 0
        self.step_s = STEP_S if keys_max else 0.0
        self._tiers = tiers
        self._live = live
        self._timer = timer
        self._budget = budget = tiers.local_tier.max_bytes
        doublings = [
            at / STEPS_PER_DOUBLING
            for at in range(
                SMALLEST_DOUBLING * STEPS_PER_DOUBLING, LARGEST_DOUBLING * STEPS_PER_DOUBLING + 1
            )
        ]
        self._capacities = [round(budget * 2**doubling) for doubling in doublings]
        self._shards = MissRatioCurve(self._capacities, keys_max)
        self._of: str | None = None
        self._at = timer()
        self._credit = _BURST
        self._last_counts = _counts(tiers.counters)
        if keys_max:
            tiers.access_trace.sample_up_to(self._shards.greatest_sampled_spot)

    async def step(self) -> None:
        """Add the reads since the last step to the curve."""
        trace, shards = self._tiers.access_trace, self._shards
        self._tiers.counters.add_pending()
        now_s = self._timer()
        elapsed_s, self._at = now_s - self._at, now_s
        touches, is_whole = list(trace), len(trace) < TRACED_READS_MAX
        trace.clear()
        earlier_counts, self._last_counts = self._last_counts, _counts(self._tiers.counters)
        shards.age(0.5 ** (elapsed_s / HALF_LIFE_S))
        live = self._live()
        trace.begin_generation(None if live is None else live.generation)
        if trace.generation != self._of:
            self._of = trace.generation
            shards.restart()
        if is_whole:
            hit_count, reads = (
                after - old for after, old in zip(self._last_counts, earlier_counts, strict=True)
            )
            shards.count(hit_count, reads)
        else:  # nobody knows what was pushed out: these reads keep the order of keys, and count for nothing
            self.lost_step_count += 1
            self._lower()
            touches = [(spot, -abs(size)) for spot, size in touches]
        for start in range(0, len(touches), _SLICE):
            if start:
                await asyncio.sleep(0)
                if trace.generation != self._of:  # a flip: the next step begins anew
                    return
            shards.record_touches(
                touches[start : start + _SLICE], self._tiers.local_tier.table_bytes_per_entry
            )
            trace.sample_up_to(shards.greatest_sampled_spot)
        earned = TOUCHES_FREE_PER_S * elapsed_s + TOUCHES_PER_READ * (
            self._last_counts[1] - earlier_counts[1]
        )
        self._credit += min(TOUCHES_PER_S * elapsed_s, earned) - len(touches)
        self._credit = min(_BURST, self._credit)
        if self._credit < 0:
            self._credit = 0.0
            self._lower()

    def _lower(self) -> None:
        self._shards.lower_rate(min(BUSY_RATE, self._shards.rate / 2))
        self._tiers.access_trace.sample_up_to(self._shards.greatest_sampled_spot)

    def to_json(self) -> dict[str, Any] | None:
        """Curve of this worker's L1, JSON-able; None before there was enough traffic."""
        if self._shards.sampled_reads < SAMPLED_MIN:
            return None
        return self._curve().to_json()

    def _curve(self) -> HitRatioCurve:
        shards = self._shards
        return HitRatioCurve(
            self._budget,
            self._capacities,
            shards.hit_ratios(),
            shards.entries(),
            shards.rate,
            shards.keys,
            shards.reads,
        )

    def collect(self) -> Iterable[Metric]:
        """Metrics of three points of the curve, and of how far they can be trusted."""
        shards = self._shards
        predicted = GaugeMetricFamily(
            "larder_l1_predicted_hit_ratio",
            "Share of reads that L1 would answer at a size, by the advisor",
            labels=["size"],
        )
        if shards.sampled_reads >= SAMPLED_MIN:
            curve = self._curve()
            for size, doublings in SIZES.items():
                predicted.add_metric([size], curve.ratio(doublings))
        yield predicted
        rate = self._tiers.access_trace.greatest_sampled_spot >= 0 and shards.rate
        for name, text, value in (
            ("sampling_rate", "Share of keys that the advisor samples, 0 while it is off", rate),
            ("sampled_keys", "Keys in the advisor's sample", shards.keys),
        ):
            yield GaugeMetricFamily(f"larder_l1_advisor_{name}", text, float(value))
        yield CounterMetricFamily(
            "larder_l1_advisor_lost_steps",
            "Steps of the advisor whose reads came too fast to be counted",
            self.lost_step_count,
        )


def _counts(counters: Counters) -> tuple[int, int]:
    """Reads that found a record, and all reads."""
    return counters.l1 + counters.l2_records, counters.total


def merge_curves(parts: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Merge curves of `HitRatioCurve.to_json`, weighted by reads; None if all are empty.

    Each worker has an L1 of its own, so a size is that of one. Of several budgets, which occur only during a change of
    settings, the one with the most reads is returned.
    """
    curve_reports = [curve_report for curve_report in parts if curve_report]
    reads = Counter[int]()
    for curve_report in curve_reports:
        reads[curve_report["budget_bytes"]] += curve_report["reads"]
    if not reads:
        return None
    budget, total = reads.most_common(1)[0]
    same_budget_reports = [
        curve_report for curve_report in curve_reports if curve_report["budget_bytes"] == budget
    ]
    weights = [
        curve_report["reads"] / total if total else 1 / len(same_budget_reports)
        for curve_report in same_budget_reports
    ]
    columns = list(
        zip(*(curve_report["curve"] for curve_report in same_budget_reports), strict=True)
    )

    def mean(column: Sequence[Mapping[str, Any]], name: str) -> float:
        return sum(
            weight * float(point[name]) for weight, point in zip(weights, column, strict=True)
        )

    return HitRatioCurve(
        budget,
        [column[0]["bytes"] for column in columns],
        [mean(column, "hit_ratio") for column in columns],
        [round(mean(column, "entries")) for column in columns],
        min(curve_report["sampling_rate"] for curve_report in same_budget_reports),
        sum(curve_report["sampled"] for curve_report in same_budget_reports),
        total,
    ).to_json()


def format_size(size_bytes: int) -> str:
    """Size as text, rounded, in the largest binary unit that it fills."""
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if (size := size_bytes / (1 << bits)) >= 1:
            return f"{size:.0f} {unit}" if size >= 100 else f"{size:.3g} {unit}"
    return f"{size_bytes} B"

"""Curve of L1's hit ratio that the size advisors of all workers come to, and how it is said. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

STEPS = 4
"""Points of the curve per doubling."""
SMALLEST, LARGEST = -6, 3
"""Doublings from the budget to the ends of the curve."""
_NOTICED = 0.001
"""Differences below a tenth of a point are none."""


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
        return self.ratios[(doublings - SMALLEST) * STEPS]

    def _sentence(self) -> str:
        current_ratio = self.ratio(0)
        more, less = self.ratio(1) - current_ratio, current_ratio - self.ratio(-1)
        sentence = f"L1 of {format_size(self.budget_bytes)} gives {100 * current_ratio:.1f} %"
        if more >= _NOTICED:
            sentence += f", doubling adds {100 * more:.1f} points"
        else:
            sentence += ", doubling adds nothing"
        if less >= _NOTICED:
            return f"{sentence}, halving costs {100 * less:.1f}"
        enough = next(
            size_bytes
            for size_bytes, ratio in zip(self.capacities, self.ratios, strict=True)
            if current_ratio - ratio < _NOTICED
        )
        return f"{sentence}, {format_size(enough)} gives as much"


def merge_curves(parts: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Merged curve of many, each by `HitRatioCurve.to_json`: a worker counts by its reads; None where all are empty.

    Each worker has an L1 of its own, so a size is that of one. Of several budgets, which only a change of settings
    under way makes, the one that most reads were answered with is told.
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

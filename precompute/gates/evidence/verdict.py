"""A verdict: what one gate found out about a candidate. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FIRST = "the first generation has nothing to be compared with"
UNREADABLE = "live manifest cannot be read, so nothing can be compared with it"


@dataclass(frozen=True, slots=True)
class Measurement:
    """A value held against a threshold; `baseline` is the live generation that it was compared with."""

    passed: bool
    value: float | str | None
    threshold: float | str | None
    note: str = ""
    baseline: str | None = None

    def under(self, rule: str) -> "Verdict":
        """The verdict of the rule that measured this."""
        return Verdict(rule, self.passed, self.value, self.threshold, self.note, self.baseline)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict of one gate: what it measured; `overridden` is the reason for which a failure was let pass."""

    rule: str
    passed: bool
    value: float | str | None
    threshold: float | str | None
    note: str = ""
    baseline: str | None = None
    overridden: str | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON-able form for the manifest; what does not apply is left out."""
        fields: dict[str, Any] = {
            "rule": self.rule,
            "passed": self.passed,
            "value": self.value,
            "threshold": self.threshold,
            "note": self.note,
        }
        if self.baseline is not None:
            fields["baseline"] = self.baseline
        if self.overridden is not None:
            fields["overridden"] = self.overridden
        return fields


def at_least(
    value: float, threshold: float, note: str = "", baseline: str | None = None
) -> Measurement:
    """A value and its floor; NaN fails."""
    return Measurement(bool(value >= threshold), round(float(value), 6), threshold, note, baseline)


def at_most(
    value: float, threshold: float, note: str = "", baseline: str | None = None
) -> Measurement:
    """A value and its ceiling; NaN fails."""
    return Measurement(bool(value <= threshold), round(float(value), 6), threshold, note, baseline)


def none_of(count: int, note: str, baseline: str | None = None) -> Measurement:
    """A count of what must not occur even once; `note` says where it was seen."""
    return Measurement(not count, count, 0, note if count else "", baseline)


def not_measured(threshold: float | None, reason: str) -> Measurement:
    """A case in which a gate has nothing to measure, by definition and not by failure."""
    return Measurement(True, None, threshold, reason)


def worst_of(figures: Mapping[str, float]) -> tuple[str, float]:
    """The smallest with its name, or NaN if there is one (`min` alone would depend on the order)."""
    return min(
        figures.items(),
        key=lambda named_figure: -math.inf if math.isnan(named_figure[1]) else named_figure[1],
    )

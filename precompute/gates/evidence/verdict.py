"""A verdict: what one gate found out about a candidate. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

FIRST = "the first generation has nothing to be compared with"
UNREADABLE = "live manifest cannot be read, so nothing can be compared with it"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict of one gate; `threshold` is what `value` was held against.

    `baseline` is the live generation it was compared with, `overridden` the reason for which a failure was let pass.
    """

    rule: str
    passed: bool
    value: float | str | None
    threshold: float | str | None
    note: str = ""
    baseline: str | None = None
    overridden: str | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON-able form for the manifest; what does not apply is left out."""
        found: dict[str, Any] = {
            "rule": self.rule,
            "passed": self.passed,
            "value": self.value,
            "threshold": self.threshold,
            "note": self.note,
        }
        if self.baseline is not None:
            found["baseline"] = self.baseline
        if self.overridden is not None:
            found["overridden"] = self.overridden
        return found


def at_least(
    rule: str, value: float, threshold: float, note: str = "", baseline: str | None = None
) -> Verdict:
    """A verdict on a floor; NaN fails."""
    return Verdict(
        rule, bool(value >= threshold), round(float(value), 6), threshold, note, baseline
    )


def at_most(
    rule: str, value: float, threshold: float, note: str = "", baseline: str | None = None
) -> Verdict:
    """A verdict on a ceiling; NaN fails."""
    return Verdict(
        rule, bool(value <= threshold), round(float(value), 6), threshold, note, baseline
    )


def none_of(rule: str, count: int, note: str) -> Verdict:
    """A verdict on what must not occur even once; `note` says where it was seen."""
    return Verdict(rule, not count, count, 0, note if count else "")


def not_measured(rule: str, threshold: float | None, why: str) -> Verdict:
    """A case in which a gate has nothing to measure, by definition and not by failure."""
    return Verdict(rule, True, None, threshold, why)


def worst_of(values: Iterable[float]) -> float:
    """The smallest, or NaN if there is one (`min` would depend on the order)."""
    return min(values, key=lambda value: -math.inf if math.isnan(value) else value)

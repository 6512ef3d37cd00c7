"""A verdict: what a gate finds out about a candidate."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.items import ItemTable
from cache.manifest import Manifest
from precompute.config import GateThresholds
from precompute.control import Control


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one gate found; `threshold` is what `value` was held against."""

    rule: str
    passed: bool
    value: float | str | None
    threshold: float | str | None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "rule": self.rule,
            "passed": self.passed,
            "value": self.value,
            "threshold": self.threshold,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A loaded generation with what its gates may look at; `live` is None for the first one ever."""

    manifest: Manifest
    root: Path
    items: ItemTable
    control: Control
    live: Manifest | None
    thresholds: GateThresholds
    history_limit: int


Gate = Callable[[Candidate], Verdict]


def at_least(rule: str, value: float, threshold: float, note: str = "") -> Verdict:
    """A verdict on a floor; NaN fails."""
    return Verdict(rule, value >= threshold, round(value, 6), threshold, note)


def at_most(rule: str, value: float, threshold: float, note: str = "") -> Verdict:
    """A verdict on a ceiling; NaN fails."""
    return Verdict(rule, value <= threshold, round(value, 6), threshold, note)


def worst_of(values: Iterable[float]) -> float:
    """The smallest, or NaN if there is one (`min` would depend on the order)."""
    return min(values, key=lambda value: -math.inf if math.isnan(value) else value)

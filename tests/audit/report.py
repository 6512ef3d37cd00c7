"""What an audit covered and found."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

SHOWN_OF_A_KIND = 2


@dataclass(frozen=True)
class Violation:
    """A broken promise: the rule, the sentence of the documents, and how to see it."""

    rule: str
    promise: str
    expected: str
    observed: str
    recipe: tuple[str, ...]
    scenario: str = ""


@dataclass
class Report:
    """Counts of what was checked, and violations by rule."""

    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    violations: dict[str, list[Violation]] = field(default_factory=dict)
    scenario: str = ""

    def count(self, counter_name: str, number: int = 1) -> None:
        """Count something that was covered."""
        self.counts[counter_name] += number

    def violate(self, rule: str, promise: str, expected: object, observed: object, recipe: Iterable[str]) -> None:
        """Record a violation."""
        self.violations.setdefault(rule, []).append(
            Violation(rule, promise, _text(expected), _text(observed), tuple(recipe), self.scenario)
        )

    def require(
        self, is_fulfilled: bool, rule: str, promise: str, expected: object, observed: object, recipe: Iterable[str]
    ) -> bool:
        """Count a check, and record a violation if it does not hold."""
        self.counts["checks"] += 1
        self.counts[f"rule {rule}"] += 1
        if not is_fulfilled:
            self.violate(rule, promise, expected, observed, recipe)
        return is_fulfilled

    def add(self, partial_report: Report) -> None:
        """Take over what another report has."""
        self.counts.update(partial_report.counts)
        for rule, violations in partial_report.violations.items():
            self.violations.setdefault(rule, []).extend(violations)

    @property
    def is_clean(self) -> bool:
        """Whether nothing was violated."""
        return not self.violations

    def lines(self) -> list[str]:
        """Return the report as text: coverage, then each kind of violation with recipes."""
        lines = [f"seed {self.seed}", "covered:"]
        lines += [
            f"  {number:>8,} {counter_name}"
            for counter_name, number in sorted(
                self.counts.items(), key=lambda pair: (pair[0].startswith("rule "), pair[0])
            )
        ]
        for rule, violations in sorted(self.violations.items()):
            lines.append(f"VIOLATED {rule}: {len(violations)} times")
            for violation in violations[:SHOWN_OF_A_KIND]:
                lines += [
                    f"  scenario {violation.scenario}",
                    f"  promise  {violation.promise}",
                    f"  expected {violation.expected}",
                    f"  seen     {violation.observed}",
                    "  recipe",
                    *(f"    {line}" for line in violation.recipe),
                ]
        count = sum(map(len, self.violations.values()))
        lines.append(f"{count} violations of {len(self.violations)} rules; seed {self.seed}")
        return lines


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) < 1_500 else text[:1_500] + " ..."

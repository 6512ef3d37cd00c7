"""What a scenario is given."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.audit.report import Report
from tests.audit.shop import Servers


@dataclass
class Stage:
    """A folder, the Redis servers, the report, a seed, a deadline, and a reason to end earlier."""

    folder: Path
    servers: Servers
    report: Report
    seed: int
    deadline: float
    has_enough: Callable[[], bool] = lambda: False

    def is_over(self) -> bool:
        """Return whether the scenario's time is used up, or enough was seen."""
        return self.has_enough() or time.monotonic() > self.deadline

    def require(
        self,
        is_fulfilled: bool,
        rule: str,
        promise: str,
        expected: object,
        observed: object,
        recipe: Iterable[str] = (),
    ) -> bool:
        """Count a check, and record a violation if it does not hold."""
        return self.report.require(is_fulfilled, rule, promise, expected, observed, recipe)


Scenario = Callable[[Stage], None]

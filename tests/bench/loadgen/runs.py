"""Runs of LoadGen: what its log says of each, and the search for the highest rate that it calls valid."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.judges.environment import run_program
from tests.bench.loadgen import driver

SUMMARY = "mlperf_log_summary.txt"
_LINE = re.compile(r"^[ \t]*(?P<name>[^:\n]+?)[ \t]*:[ \t]*(?P<value>\S.*?)[ \t]*$", re.MULTILINE)
_PATIENCE_S = 120.0
_CONNECTIONS = {"Offline": 64, "MultiStream": 1}
"""Requests under way, where LoadGen does not say when they come."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One run: lines of LoadGen's summary by name, and what the driver saw that no log says."""

    lines: dict[str, str]
    driven: dict[str, Any]
    log: Path

    @property
    def is_valid(self) -> bool:
        """LoadGen says VALID, and every query was answered with 200."""
        return self.lines.get("Result is") == "VALID" and not self.driven["bad"]

    @property
    def per_s(self) -> float:
        """Samples per second, as LoadGen counts them."""
        for name in ("Completed samples per second", "Samples per second"):
            if name in self.lines:
                return float(self.lines[name])
        raise ValueError(f"{self.log} names no samples per second")

    def latency_ms(self, percentile: str) -> float:
        """Latency at a percentile as LoadGen writes it, as in "99.00"."""
        return float(self.lines[f"{percentile} percentile latency (ns)"]) / 1e6


def read_summary(text: str) -> dict[str, str]:
    """Lines of a summary by name; the first of a name counts."""
    value_by_name: dict[str, str] = {}
    for line_match in _LINE.finditer(text):
        value_by_name.setdefault(line_match["name"], line_match["value"])
    return value_by_name


@dataclass(slots=True)
class Target:
    """A server that LoadGen drives, always by a new process on the last core; logs lie in numbered folders."""

    name: str
    url: str
    samples: Path
    logs: Path
    path: str
    k: int
    bound_s: float = 0.01
    connections: int = 512
    runs: list[Judged] = field(default_factory=list)

    def run(self, scenario: str, rate: float, seconds: float, *, per_query: int = 8) -> Judged:
        """One performance run; `rate` is of queries per second, for Offline and MultiStream a guess."""
        number = len(self.runs)
        log = self.logs / f"{self.name}-{number:02d}-{scenario.lower()}-{rate:.0f}"
        log.mkdir(parents=True, exist_ok=True)
        job = {
            "scenario": scenario,
            "rate": rate,
            "seconds": seconds,
            "url": self.url,
            "samples": str(self.samples),
            "log": str(log.resolve()),
            "path": self.path,
            "k": self.k,
            "bound_s": self.bound_s,
            "connections": min(self.connections, _CONNECTIONS.get(scenario, self.connections)),
            "samples_per_query": per_query,
            "seed": number + 1,
            "first_stranger": number * 100_000_000,
        }
        driven = run_program(driver.__file__, job, 10 * seconds + _PATIENCE_S, last_core=True)
        judged = Judged(read_summary((log / SUMMARY).read_text()), driven, log)
        self.runs.append(judged)
        return judged


def highest_valid(is_valid: Callable[[float], bool], rate_max: float, *, steps: int, least_share: float = 0.1) -> float:
    """Highest rate found valid by bisection between a share of `rate_max` and it; 0 if none of those tried was.

    Steps divide the range by ratio, so that the resolution is the same share of any rate.
    """
    low, high, highest_rate = rate_max * least_share, rate_max, 0.0
    for _ in range(steps):
        rate = (low * high) ** 0.5
        if is_valid(rate):
            low = highest_rate = rate
        else:
            high = rate
    return highest_rate

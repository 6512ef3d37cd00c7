"""Shared code of all benches: alternating rounds, the baseline against itself, one table, one JSON line."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

Run = Callable[[], float]
"""One timed run; returns its figure (a rate unless the bench says otherwise)."""

AA_TOLERANCE = 0.05
ROUNDS_MIN = 5


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asked for; `quick` must end within 120 s."""

    json: bool
    quick: bool
    rounds: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """A candidate over its baseline: the median of the rounds, and the baseline over itself."""

    value: float
    aa: float
    rounds: int
    candidate: float
    baseline: float
    tolerance: float = AA_TOLERANCE

    @property
    def void(self) -> bool:
        """True if the baseline differs from itself by too much: the machine was too busy."""
        return not abs(self.aa - 1.0) <= self.tolerance


@dataclass(frozen=True, slots=True)
class Promise:
    """What the README says of a ratio, and why a quick run may not show it (empty: it has to)."""

    minimum: float = float("-inf")
    maximum: float = float("inf")
    quick: str = ""

    def is_kept(self, ratio: Ratio) -> bool:
        """Return whether a ratio that is not void is within the promise."""
        return self.minimum <= ratio.value <= self.maximum

    def __str__(self) -> str:
        bounds = (("at least", self.minimum), ("at most", self.maximum))
        return " and ".join(f"{bound_name} {bound:g}" for bound_name, bound in bounds if math.isfinite(bound))


@dataclass(slots=True)
class Report:
    """Figures and ratios of one bench, printed as a table and, if asked, as one JSON line."""

    bench: str
    packages: tuple[str, ...] = ()
    figures: dict[str, float | int | str] = field(default_factory=dict)
    ratios: dict[str, Ratio] = field(default_factory=dict)
    promises: dict[str, Promise] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    """What should have been measured and could not be: said loudly, and an error where a program reads it."""

    def to_json(self, *, quick: bool = False) -> dict[str, object]:
        """Keys of `ratios` are `<bench>.<name>`; a void ratio is null there, with its numbers in `rows`."""
        return {
            "bench": self.bench,
            "versions": versions(self.packages),
            "machine": machine(),
            "figures": self.figures,
            "ratios": {
                f"{self.bench}.{name}": None if r.void else round(r.value, 4) for name, r in self.ratios.items()
            },
            "rows": {
                f"{self.bench}.{name}": {
                    "measured": round(r.value, 4),
                    "aa": round(r.aa, 4),
                    "rounds": r.rounds,
                    "candidate": r.candidate,
                    "baseline": r.baseline,
                    "void": r.void,
                }
                for name, r in self.ratios.items()
            },
            "short_of": self.short_of(quick=quick),
            "absent": self.absent,
        }

    def short_of(self, *, quick: bool) -> list[str]:
        """A line for each ratio that is not what the README says."""
        return [
            f"{self.bench}.{name} is {ratio.value:.3g}, the README says {promise}"
            + (f": {promise.quick}" if quick and promise.quick else "")
            for name, promise in self.promises.items()
            if (ratio := self.ratios.get(name)) and not ratio.void and not promise.is_kept(ratio)
        ]

    def show(self, options: Options) -> None:
        """Print the tables; with `--json` the last line of stdout is the JSON object.

        Exits with 1 after `--json` where something is absent: a program that reads the line must not take it for all.
        Raises ValueError for a promise without its ratio, unless something is said to be absent.
        """
        for name in self.promises.keys() - self.ratios.keys():
            if not self.absent:
                raise ValueError(f"{self.bench} promises {name} and did not measure it")
        console = Console(width=max(100, Console().width))
        if self.figures:
            table = Table("figure", "value", title=self.bench)
            for name, value in self.figures.items():
                table.add_row(name, _format_figure(value))
            console.print(table)
        if self.ratios:
            table = Table("ratio", "value", "A/A", "rounds", "candidate", "baseline")
            for name, ratio in self.ratios.items():
                table.add_row(
                    f"{self.bench}.{name}",
                    "void" if ratio.void else f"{ratio.value:.3f}",
                    f"{ratio.aa:.3f}",
                    str(ratio.rounds),
                    _format_figure(ratio.candidate),
                    _format_figure(ratio.baseline),
                )
            console.print(table)
        facts = " · ".join(f"{name} {value}" for name, value in machine().items())
        console.print(facts, highlight=False)
        for line in self.short_of(quick=options.quick):
            console.print(f"[yellow]{line}[/yellow]", highlight=False)
        for absence in self.absent:
            console.print(f"[bold red]NOT MEASURED: {absence}[/bold red]", highlight=False)
        if options.json:
            print(json.dumps(self.to_json(quick=options.quick)), flush=True)
            if self.absent:
                sys.exit(1)


def parse(description: str, argv: Sequence[str] | None = None) -> Options:
    """Read `--json`, `--quick` and `--rounds`; a bench that is terminated ends the programs that it started."""
    if argv is None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, ends within 120 s")
    parser.add_argument("--rounds", type=int, default=ROUNDS_MIN, help="alternating rounds")
    arguments = parser.parse_args(argv)
    return Options(json=arguments.json, quick=arguments.quick, rounds=max(ROUNDS_MIN, arguments.rounds))


def alternate(
    baseline: Run,
    candidates: Mapping[str, Run],
    *,
    rounds: int = ROUNDS_MIN,
    rounds_max: int | None = None,
    tolerance: float = AA_TOLERANCE,
    warm: bool = True,
) -> dict[str, Ratio]:
    """Run baseline, candidates, baseline again in each round; the median over rounds, per candidate.

    Rounds go on beyond `rounds`, up to `rounds_max` (default twice as many), only while the
    baseline's own ratio is out of tolerance; the candidates' ratios have no say in it.
    """
    ratio_by_pair = compare(
        {"": baseline}, candidates, rounds=rounds, rounds_max=rounds_max, tolerance=tolerance, warm=warm
    )
    return {candidate: ratio for (_, candidate), ratio in ratio_by_pair.items()}


def compare(
    baselines: Mapping[str, Run],
    candidates: Mapping[str, Run],
    *,
    rounds: int = ROUNDS_MIN,
    rounds_max: int | None = None,
    tolerance: float = AA_TOLERANCE,
    warm: bool = True,
) -> dict[tuple[str, str], Ratio]:
    """Like `alternate` for several baselines in the same rounds; keys are (baseline, candidate)."""
    if warm:
        for run in (*baselines.values(), *candidates.values()):
            run()
    limit = max(rounds, 2 * rounds if rounds_max is None else rounds_max)
    figures_before: dict[str, list[float]] = {name: [] for name in baselines}
    after: dict[str, list[float]] = {name: [] for name in baselines}
    candidate_figures: dict[str, list[float]] = {name: [] for name in candidates}
    round_count = 0

    def restless() -> bool:
        return any(abs(_median_ratio(after[n], figures_before[n]) - 1) > tolerance for n in baselines)

    while round_count < rounds or (round_count < limit and restless()):
        round_count += 1
        for name, run in baselines.items():
            figures_before[name].append(run())
        # Every other round runs the candidates backwards, so that none always follows the baseline.
        for name in candidates if round_count % 2 else reversed(list(candidates)):
            candidate_figures[name].append(candidates[name]())
        for name, run in reversed(list(baselines.items())):
            after[name].append(run())
    ratios = {}
    for baseline in baselines:
        pairs = zip(figures_before[baseline], after[baseline], strict=True)
        middle = [(first + second) / 2 for first, second in pairs]
        for candidate, values in candidate_figures.items():
            ratios[baseline, candidate] = Ratio(
                value=_median_ratio(values, middle),
                aa=_median_ratio(after[baseline], figures_before[baseline]),
                rounds=round_count,
                candidate=statistics.median(values),
                baseline=statistics.median(middle),
                tolerance=tolerance,
            )
    return ratios


def versions(packages: Sequence[str] = ()) -> dict[str, str]:
    """Installed versions of Python and of the named packages; absent ones say so."""
    version_by_package = {"python": platform.python_version()}
    for name in ("numpy", *packages):
        try:
            version_by_package[name] = version(name)
        except PackageNotFoundError:
            version_by_package[name] = "absent"
    return version_by_package


def machine() -> dict[str, str | int | float]:
    """The facts that decide absolute figures: processor, cores, memory, load when asked."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _cores(),
        "memory_gb": round(_memory_bytes() / 1e9, 1),
        "load": round(os.getloadavg()[0], 2),
    }


def _cores() -> int:
    return os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def _median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return statistics.median(a / b if b else float("nan") for a, b in zip(over, under, strict=True))


def _format_figure(value: float | str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"

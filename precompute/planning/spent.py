"""Time spent, by the clock and by the processor, and what it would be for more of the same."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple, Self, TypeVar

Found = TypeVar("Found")


class Spent(NamedTuple):
    """Seconds by the clock, and of processor time of all threads."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    def and_(self, other_spent: Self) -> "Spent":
        """Time of both, one after the other."""
        return Spent(self.wall_s + other_spent.wall_s, self.cpu_s + other_spent.cpu_s)

    def times(self, factor: float) -> "Spent":
        """Time of `factor` times as much."""
        return Spent(self.wall_s * factor, self.cpu_s * factor)

    def beside(self, count: int, at_once: int) -> "Spent":
        """Time of `count` times as much, `at_once` at a time."""
        return Spent(self.wall_s * -(-count // at_once), self.cpu_s * count)


class Run(NamedTuple):
    """Time that a run over so many entities or bytes took."""

    amount: float
    spent: Spent


def timed(
    run: Callable[[], Found], other_cpu_s: Callable[[], float] = lambda: 0.0
) -> tuple[Spent, Found]:
    """Time of a run, and what it found; `other_cpu_s` is the processor time of another process that works for it."""
    wall, cpu = time.perf_counter(), time.process_time() + other_cpu_s()
    result = run()
    ended_at = time.perf_counter()
    return Spent(ended_at - wall, time.process_time() + other_cpu_s() - cpu), result


def middle(run_times: Sequence[Spent]) -> Spent:
    """The median of several runs of the same, each clock by itself."""
    return Spent(*(median(clock_seconds) for clock_seconds in zip(*run_times, strict=True)))


def grown(small: Run, large: Run, amount: float) -> Spent:
    """Extrapolation along the line through two runs, from the larger one on; fixed costs are in both."""
    step = large.amount - small.amount
    if step <= 0:
        return large.spent.times(amount / large.amount)

    def on_line(small_run_s: float, after: float) -> float:
        slope = max(0.0, after - small_run_s) / step
        return max(0.0, after + slope * (amount - large.amount))

    return Spent(*map(on_line, small.spent, large.spent))

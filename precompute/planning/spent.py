"""Time spent, by the clock and by the processor, and what it would be for more of the same."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple, Self, TypeVar

Result = TypeVar("Result")


class TimeSpent(NamedTuple):
    """Seconds by the clock, and of processor time of all threads."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    def and_(self, other_spent: Self) -> "TimeSpent":
        """Time of both, one after the other."""
        return TimeSpent(self.wall_s + other_spent.wall_s, self.cpu_s + other_spent.cpu_s)

    def times(self, factor: float) -> "TimeSpent":
        """Time of `factor` times as much."""
        return TimeSpent(self.wall_s * factor, self.cpu_s * factor)

    def in_parallel(self, count: int, at_once: int) -> "TimeSpent":
        """Time of `count` times as much, `at_once` at a time."""
        return TimeSpent(self.wall_s * -(-count // at_once), self.cpu_s * count)


class TimedRun(NamedTuple):
    """Time that a run over so many entities or bytes took."""

    amount: float
    spent: TimeSpent


def timed(
    run: Callable[[], Result], other_cpu_s: Callable[[], float] = lambda: 0.0
) -> tuple[TimeSpent, Result]:
    """Time of a run, and what it found; `other_cpu_s` is the processor time of another process that works for it."""
    wall, cpu = time.perf_counter(), time.process_time() + other_cpu_s()
    result = run()
    ended_at = time.perf_counter()
    return TimeSpent(ended_at - wall, time.process_time() + other_cpu_s() - cpu), result


def middle(run_times: Sequence[TimeSpent]) -> TimeSpent:
    """The median of several runs of the same, each clock by itself."""
    return TimeSpent(*(median(clock_seconds) for clock_seconds in zip(*run_times, strict=True)))


def grown(small: TimedRun, large: TimedRun, amount: float) -> TimeSpent:
    """Extrapolation along the line through two runs, from the larger one on; fixed costs are in both."""
    step = large.amount - small.amount
    if step <= 0:
        return large.spent.times(amount / large.amount)

    def on_line(small_run_s: float, after: float) -> float:
        slope = max(0.0, after - small_run_s) / step
        return max(0.0, after + slope * (amount - large.amount))

    return TimeSpent(*map(on_line, small.spent, large.spent))

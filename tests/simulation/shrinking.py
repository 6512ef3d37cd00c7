"""Shrinking of a failure to the fewest steps after which a rule still breaks."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tests.simulation.leftovers import Broken
from tests.simulation.scenarios import Step
from tests.simulation.simulation import Simulation
from tests.simulation.threads import TRACED_SHARE

CHANCES = 3
"""Seeds under which steps are tried: without some of them all else happens at slightly other times."""

GROUP_SIZE_MAX = 2
"""Size of the largest groups, of any steps, that are all left out in turn before a report is final."""


class Luck(NamedTuple):
    """Seed of a simulation, and the share of its threads that may pause between any two lines."""

    seed: int
    traced_share: float = TRACED_SHARE

    def nearby(self) -> Iterator["Luck"]:
        """Return this luck, those of the next seeds, and one in which all threads may pause (races show soonest)."""
        yield from (Luck(self.seed + more, self.traced_share) for more in range(CHANCES))
        if self.traced_share < 1:
            yield Luck(self.seed, 1.0)

    def __str__(self) -> str:
        return f"seed {self.seed}" + (", where every thread pauses" if self.traced_share == 1 else "")


class Report(NamedTuple):
    """Steps that break a rule, the luck under which they do, and the rule."""

    luck: Luck
    steps: list[Step]
    failure: str


def broken(luck: Luck, steps: Sequence[Step]) -> str | None:
    """Return the rule that the steps break under that luck, None without one."""
    try:
        Simulation(luck.seed, steps, traced_share=luck.traced_share).run()
    except Broken as error:
        return str(error)
    return None


def shrunk(seed: int, steps: Sequence[Step]) -> Report:
    """Return few of the steps, which break a rule, and with any one or two of them left out break none.

    Large blocks are left out first, then smaller ones, as in Zeller's delta debugging.
    """
    failure = broken(Luck(seed), steps)
    if failure is None:
        raise AssertionError(f"seed {seed} breaks no rule when it is repeated")
    report = Report(Luck(seed), list(steps), failure)
    block_size = len(steps) // 2
    while block_size > 1:
        report = _without_groups(report, _blocks(report.steps, block_size))
        block_size //= 2
    group_size = 1
    while group_size <= GROUP_SIZE_MAX:
        smaller_report = _without_groups(report, itertools.combinations(reversed(report.steps), group_size))
        group_size = 1 if len(smaller_report.steps) < len(report.steps) else group_size + 1
        report = smaller_report
    return report


def _blocks(steps: Sequence[Step], size: int) -> Iterator[Sequence[Step]]:
    """Return consecutive steps in groups of `size`, the last group first."""
    return (steps[max(0, end - size) : end] for end in range(len(steps), 0, -size))


def _without_groups(report: Report, groups: Iterable[Sequence[Step]]) -> Report:
    """Return the report without each of the groups of steps that the failure does not need."""
    for group in groups:
        candidate_steps = [step for step in report.steps if step not in group]
        if len(report.steps) - len(candidate_steps) < len(group):
            continue  # some of the group are left out already
        for luck in report.luck.nearby():
            if (failure := broken(luck, candidate_steps)) is not None:
                report = Report(luck, candidate_steps, failure)
                break
    return report


def format_failure(first: int, report: Report) -> str:
    """Return a failure as text: the seed that was run, and the remaining steps with their seed."""
    luck, steps, failure = report
    step_lines = "\n".join(map(str, steps))
    return f"seed {first} breaks a rule; {len(steps)} of its steps do so under {luck}: {failure}\n{step_lines}"

"""Shrinking of a failure to the fewest steps after which the same rule still breaks."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.simulation.leftovers import Broken
from tests.simulation.scenarios import Step
from tests.simulation.simulation import Simulation
from tests.simulation.threads import TRACED_SHARE

CHANCES = 3
"""Seeds under which steps are tried: without some of them all else happens at slightly other times."""

TRIES = 400


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


def broken(luck: Luck, steps: Sequence[Step]) -> str | None:
    """Return the rule that the steps break under that luck, None without one."""
    try:
        Simulation(luck.seed, steps, traced_share=luck.traced_share).run()
    except Broken as error:
        return str(error)
    return None


def shrunk(seed: int, steps: Sequence[Step]) -> tuple[Luck, list[Step], str]:
    """Return as few steps as found that break a rule, their luck, and how; after Zeller's delta debugging."""
    luck = Luck(seed)
    failure, smallest_steps, size, tries = (broken(luck, steps) or "", list(steps), max(1, len(steps) // 2), 0)
    while size and tries < TRIES:
        at = len(smallest_steps)
        is_smaller = False
        while at > 0 and tries < TRIES:
            candidate_steps = smallest_steps[: max(0, at - size)] + smallest_steps[at:]
            for chance in luck.nearby():
                tries += 1
                if (candidate_failure := broken(chance, candidate_steps)) is not None:
                    luck, smallest_steps, failure, is_smaller = (chance, candidate_steps, candidate_failure, True)
                    break
            at -= size
        size = size if is_smaller and size == 1 else size // 2
    return _without_pairs(luck, smallest_steps, failure)


def _without_pairs(luck: Luck, steps: list[Step], failure: str) -> tuple[Luck, list[Step], str]:
    """Return fewer steps by leaving out two at a time, if no single one can be left out."""
    for pair in itertools.combinations(range(len(steps)), 2):
        candidate_steps = [step for at, step in enumerate(steps) if at not in pair]
        for chance in luck.nearby():
            if (candidate_failure := broken(chance, candidate_steps)) is not None:
                return _without_pairs(chance, candidate_steps, candidate_failure)
    return luck, steps, failure


def format_failure(first: int, luck: Luck, steps: Sequence[Step], failure: str) -> str:
    """Return a failure as text: the seed that was run, and the remaining steps with their seed."""
    step_lines = "\n".join(map(str, steps))
    return f"seed {first} breaks a rule; {len(steps)} of its steps do so under {luck}: {failure}\n{step_lines}"

"""A failure made small: the fewest steps after which the same rule still breaks."""

import itertools
from collections.abc import Sequence

from tests.simulation.leftovers import Broken
from tests.simulation.scenarios import Step
from tests.simulation.simulation import Simulation

CHANCES = 3
"""Seeds under which steps are tried: without some of them all else happens at slightly other times."""

TRIES = 400


def broken(seed: int, steps: Sequence[Step]) -> str | None:
    """What breaks in the steps under that seed, None if nothing does."""
    try:
        Simulation(seed, steps).run()
    except Broken as error:
        return str(error)
    return None


def shrunk(seed: int, steps: Sequence[Step]) -> tuple[int, list[Step], str]:
    """Seed and steps, as few as can be found, that break a rule; and how. After Zeller's delta debugging."""
    why, kept, size, tries = broken(seed, steps) or "", list(steps), max(1, len(steps) // 2), 0
    while size and tries < TRIES:
        at = len(kept)
        is_smaller = False
        while at > 0 and tries < TRIES:
            rest = kept[: max(0, at - size)] + kept[at:]
            for chance in range(seed, seed + CHANCES):
                tries += 1
                if (found := broken(chance, rest)) is not None:
                    seed, kept, why, is_smaller = chance, rest, found, True
                    break
            at -= size
        size = size if is_smaller and size == 1 else size // 2
    return _without_pairs(seed, kept, why)


def _without_pairs(seed: int, kept: list[Step], why: str) -> tuple[int, list[Step], str]:
    """The same with fewer steps: where none can be left out alone, two of them sometimes can."""
    for pair in itertools.combinations(range(len(kept)), 2):
        rest = [step for at, step in enumerate(kept) if at not in pair]
        for chance in range(seed, seed + CHANCES):
            if (found := broken(chance, rest)) is not None:
                return _without_pairs(chance, rest, found)
    return seed, kept, why


def told(first: int, seed: int, steps: Sequence[Step], why: str) -> str:
    """A failure as it is printed: the seed that was run, and what is left of its steps, under another one perhaps."""
    listed = "\n".join(map(str, steps))
    return f"seed {first} breaks a rule; {len(steps)} of its steps do so under seed {seed}: {why}\n{listed}"

"""Short blocks of two variants in random order, so that other load on the machine affects both alike."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.bench.tools.harness import Ratio

TOLERANCE: Final = 0.03
DRAWS: Final = 2_000


class Cost(NamedTuple):
    """Seconds that a block of one way took: by the wall, and of this process' processor time."""

    wall_s: float
    processor_s: float


Block = Callable[[int], Cost]
"""One block of a way in a round of this number."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A median, and the bounds between which 95 % of the medians of drawn rounds lie."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"

    @classmethod
    def of(cls, values: NDArray[np.float64], rng: np.random.Generator) -> "Interval":
        """Interval of the median by drawing rounds again (Efron's bootstrap)."""
        drawn = [float(np.median(values[rng.integers(0, len(values), len(values))])) for _ in range(DRAWS)]
        low, high = np.quantile(drawn, [0.025, 0.975])
        return cls(median(values.tolist()), float(low), float(high))


@dataclass(frozen=True, slots=True)
class Paired:
    """Costs float64 [rounds, 2] (wall, processor) of the first way, of it once more, and of the other way."""

    first: NDArray[np.float64]
    first_repeated: NDArray[np.float64]
    candidate: NDArray[np.float64]
    requests: int
    seed: int

    def ratio(self, cost: int = 0) -> Ratio:
        """Rate of the other way over the first one's, median of the rounds; the first one over itself beside it."""
        middle = (self.first[:, cost] + self.first_repeated[:, cost]) / 2
        return Ratio(
            value=float(np.median(middle / self.candidate[:, cost])),
            aa=float(np.median(self.first[:, cost] / self.first_repeated[:, cost])),
            rounds=len(middle),
            candidate=self.requests / float(np.median(self.candidate[:, cost])),
            baseline=self.requests / float(np.median(middle)),
            tolerance=TOLERANCE,
        )

    def figures(self, name: str, candidate_name: str) -> dict[str, float | str]:
        """Intervals of the ratio and of the A/A, and milliseconds of paired differences, to be printed."""
        rng, figure_by_label = np.random.default_rng(self.seed), dict[str, float | str]()
        middle = (self.first + self.first_repeated) / 2
        for cost, kind in enumerate(("wall", "processor")):
            ratio = Interval.of(middle[:, cost] / self.candidate[:, cost], rng)
            aa_interval = Interval.of(self.first[:, cost] / self.first_repeated[:, cost], rng)
            figure_by_label[f"{name}, {kind}: ratio, 95 %"] = str(ratio)
            figure_by_label[f"{name}, {kind}: A/A, 95 %"] = str(aa_interval)
        for kind, over, under in ((candidate_name, self.candidate, middle), ("A/A", self.first_repeated, self.first)):
            apart_ms = 1e3 * (over[:, 0] - under[:, 0])
            for percent in (50, 99):
                value = float(np.percentile(apart_ms, percent))
                figure_by_label[f"{name}: difference of a block, {kind}, p{percent}, ms"] = round(value, 3)
        return figure_by_label


def interleave(first: Block, candidate: Block, *, rounds: int, requests: int, seed: int) -> Paired:
    """Run rounds of one block of the other variant and two of the first, in random order."""
    rng, warm = np.random.default_rng(seed), max(5, rounds // 20)
    costs = np.empty((warm + rounds, 3, 2))
    for number in range(warm + rounds):
        for block_index in rng.permutation(3).tolist():
            costs[number, block_index] = (first, first, candidate)[block_index](number)
    measured_costs = costs[warm:]
    return Paired(measured_costs[:, 0], measured_costs[:, 1], measured_costs[:, 2], requests, seed)

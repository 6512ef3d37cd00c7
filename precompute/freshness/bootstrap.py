"""Means over groups of targets with intervals, by drawing the users again (Efron's bootstrap, by clusters). Pure."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

ROUNDS: Final = 1_000
COVERED: Final = 0.95
_AT_ONCE: Final = 50


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean, and the bounds between which 95 % of the means of drawn users lie."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        """JSON-able form, rounded to five decimals."""
        return {
            name: round(statistic, 5)
            for name, statistic in (("value", self.value), ("low", self.low), ("high", self.high))
        }


def estimates(
    users: NDArray[np.int64],
    values: NDArray[np.float64],
    groups: NDArray[np.bool_],
    rng: np.random.Generator,
    rounds: int = ROUNDS,
) -> list[list[Estimate]]:
    """By group and column the mean of `values` [n, columns] over the rows of `groups` [groups, n].

    A row belongs to one of `users`, numbered from 0; all rows of a user are drawn together, with the same draws for all
    groups and columns. A group has a row at least.
    """
    count, columns = int(users.max()) + 1, values.shape[1]
    sums = np.zeros((count, len(groups), columns + 1))
    for group_index, rows in enumerate(groups):
        for column in range(columns):
            sums[:, group_index, column] = np.bincount(users[rows], values[rows, column], count)
        sums[:, group_index, columns] = np.bincount(users[rows], minlength=count)
    flat = sums.reshape(count, -1)
    drawn = np.empty((rounds, len(groups), columns + 1))
    for start in range(0, rounds, _AT_ONCE):
        size = min(_AT_ONCE, rounds - start)
        weights = rng.multinomial(count, np.full(count, 1 / count), size).astype(np.float64)
        drawn[start : start + size] = (weights @ flat).reshape(size, len(groups), -1)
    means = sums.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn_means = drawn[..., :columns] / drawn[..., columns:]
    bounds = np.nanquantile(drawn_means, [(1 - COVERED) / 2, (1 + COVERED) / 2], axis=0)
    value = means[:, :columns] / means[:, columns:]
    return [
        [
            Estimate(float(value[group_index, column]), *map(float, bounds[:, group_index, column]))
            for column in range(columns)
        ]
        for group_index in range(len(groups))
    ]

"""Sums of samples, and what they say with how much certainty. Pure."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.quality.comparison import AnswerComparison

Key = tuple[str, str, str, str]
"""Table, source, producer, band."""

ERRORS = (0.0, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Upper bounds of the score error's buckets; one more holds what is above."""

_Z = 1.959964  # of 95 %


@dataclass(slots=True)
class SampleTotals:
    """Samples that are counted together."""

    samples: int = 0
    exact: int = 0
    overlap: float = 0.0
    squares: float = 0.0
    error: float = 0.0
    age: float = 0.0
    errors: list[int] = field(default_factory=lambda: [0] * (len(ERRORS) + 1))

    def saw(self, sample: AnswerComparison) -> None:
        """Adds a sample to the sums."""
        self.samples += 1
        self.exact += sample.is_exact
        self.overlap += sample.overlap
        self.squares += sample.overlap**2
        self.error += sample.score_error
        self.age += sample.age_s
        self.errors[bisect_left(ERRORS, sample.score_error)] += 1

    def to_json(self) -> list[Any]:
        """JSON list of the sums and the error buckets, for Redis."""
        sums = (self.samples, self.exact, self.overlap, self.squares, self.error, self.age)
        return [*sums, self.errors]

    @classmethod
    def of(cls, cells: Iterable[Sequence[Any]]) -> "SampleTotals":
        """Sum of cells in the form that `to_json` gives them."""
        total_cell = cls()
        for samples, exact, overlap, squares, error, age, errors in cells:
            total_cell.samples += samples
            total_cell.exact += exact
            total_cell.overlap += overlap
            total_cell.squares += squares
            total_cell.error += error
            total_cell.age += age
            total_cell.errors = [a + b for a, b in zip(total_cell.errors, errors, strict=True)]
        return total_cell

    def exact_rate(self) -> dict[str, float]:
        """Rate of exact samples, and the bounds of its 95 % interval."""
        low, high = wilson(self.exact, self.samples)
        return {"rate": self.exact / max(1, self.samples), "low": low, "high": high}

    def mean_overlap(self) -> dict[str, float]:
        """Mean overlap, and the bounds of its 95 % interval."""
        mean = self.overlap / max(1, self.samples)
        half = half_width(self.overlap, self.squares, self.samples)
        return {"mean": mean, "low": max(0.0, mean - half), "high": min(1.0, mean + half)}

    def mean_error(self) -> dict[str, float]:
        """Mean score error, and the upper bound of the bucket that holds the 99th percentile."""
        rank, below = math.ceil(0.99 * self.samples), 0
        p99 = ERRORS[-1]
        for bound, count in zip(ERRORS, self.errors, strict=False):
            below += count
            if below >= rank:
                p99 = bound
                break
        return {"mean": self.error / max(1, self.samples), "p99": p99}


def wilson(hits: int, of: int) -> tuple[float, float]:
    """The 95 % score interval of a rate (Wilson, JASA 22, 1927): sound at 0, at 1 and for few."""
    if not of:
        return 0.0, 1.0
    rate, z2 = hits / of, _Z * _Z
    middle = rate + z2 / (2 * of)
    half = _Z * math.sqrt(rate * (1 - rate) / of + z2 / (4 * of * of))
    # At the ends the bound is the rate itself, but for the rounding of floats.
    low = (middle - half) / (1 + z2 / of) if hits else 0.0
    high = (middle + half) / (1 + z2 / of) if hits < of else 1.0
    return low, high


def half_width(total: float, squares: float, of: int) -> float:
    """Half-width of a mean's 95 % interval by the normal approximation (central limit theorem); 1 for fewer than two.

    Samples of one entity are not independent: where few are asked for very often the interval is too narrow.
    """
    if of < 2:
        return 1.0
    variance = max(0.0, squares - total * total / of) / (of - 1)
    return _Z * math.sqrt(variance / of)


def packed(cells: Mapping[Key, SampleTotals]) -> dict[str, list[Any]]:
    """Cells as JSON; no part of a key holds a tab."""
    return {"\t".join(key): cell.to_json() for key, cell in cells.items()}


def merged(parts: Iterable[Mapping[str, Sequence[Any]]]) -> dict[Key, SampleTotals]:
    """The cells of all parts, summed."""
    cells_by_name: dict[str, list[Sequence[Any]]] = {}
    for part in parts:
        for name, cell in part.items():
            cells_by_name.setdefault(name, []).append(cell)
    cell_by_key = {}
    for name, cells in cells_by_name.items():
        table, source, producer, band = name.split("\t")
        cell_by_key[table, source, producer, band] = SampleTotals.of(cells)
    return cell_by_key

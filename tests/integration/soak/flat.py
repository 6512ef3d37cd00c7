"""Growth of a series by Theil and Sen: the median slope between its points, which ignores a few outliers."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

POINTS_MAX = 400
"""Points that are compared with each other; of more, this many evenly spread ones."""


def slope(at: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    """Median slope over all pairs of points (Sen 1968), in units of `values` per unit of `at`.

    Raises ValueError for fewer than two points.
    """
    if len(at) < 2:
        raise ValueError(f"a slope needs two points, and there are {len(at)}")
    if len(at) > POINTS_MAX:
        sample_indices = np.linspace(0, len(at) - 1, POINTS_MAX).astype(int)
        at, values = at[sample_indices], values[sample_indices]
    first, second = np.triu_indices(len(at), 1)
    return float(np.median((values[second] - values[first]) / (at[second] - at[first])))


def growth(at: Sequence[float], values: Sequence[float]) -> float:
    """Return the growth over the second half of the time (slope times length), after caches and pools are full."""
    times, samples = np.asarray(at, np.float64), np.asarray(values, np.float64)
    is_later = times >= (times[0] + times[-1]) / 2
    times, samples = times[is_later], samples[is_later]
    return slope(times, samples) * float(times[-1] - times[0])

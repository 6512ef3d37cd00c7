"""Buckets of a histogram, log-spaced so that any quantile is known to a stated relative error. Pure."""

import math
from collections.abc import Mapping, Sequence

RATIO = 1.1
"""Ratio of neighbouring bounds at most: a quantile is the geometric middle of its bucket, so off by 4.9 % at most."""

LOWEST_S = 1e-6
"""Lowest bound in seconds: what is shorter counts as this long, what is longer than the last bound as that."""


def finer(
    bounds: Sequence[float], *, lowest: float = LOWEST_S, ratio: float = RATIO
) -> tuple[float, ...]:
    """Bounds from `lowest` to the last of `bounds` (ascending, above `lowest`) that hold all of them exactly."""
    finer_bounds = [lowest]
    for bound in bounds:
        below = finer_bounds[-1]
        steps = max(1, math.ceil(math.log(bound / below) / math.log(ratio) - 1e-9))
        finer_bounds += [below * (bound / below) ** (step / steps) for step in range(1, steps)]
        finer_bounds.append(bound)
    return tuple(finer_bounds)


def middle(bounds: Sequence[float], bucket: int) -> float:
    """Value that a bucket's observations are taken for; bucket n ends at bound n, the one after the last has no end."""
    if bucket == 0 or bucket >= len(bounds):
        return bounds[min(bucket, len(bounds) - 1)]
    return math.sqrt(bounds[bucket - 1] * bounds[bucket])


def quantile(bounds: Sequence[float], counts: Mapping[int, int], fraction: float) -> float | None:
    """The value that `fraction` of the observations (counts by bucket) do not exceed; None without any."""
    total = sum(counts.values())
    rank, cumulative_count = max(1, math.ceil(fraction * total - 1e-9)), 0
    for bucket in sorted(counts):
        cumulative_count += counts[bucket]
        if cumulative_count >= rank:
            return middle(bounds, bucket)
    return None

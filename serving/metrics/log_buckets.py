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
    found = [lowest]
    for bound in bounds:
        below = found[-1]
        steps = max(1, math.ceil(math.log(bound / below) / math.log(ratio) - 1e-9))
        found += [below * (bound / below) ** (step / steps) for step in range(1, steps)]
        found.append(bound)
    return tuple(found)


def middle(bounds: Sequence[float], bucket: int) -> float:
    """Value that a bucket's observations are taken for; bucket n ends at bound n, the one after the last has no end."""
    if bucket == 0 or bucket >= len(bounds):
        return bounds[min(bucket, len(bounds) - 1)]
    return math.sqrt(bounds[bucket - 1] * bounds[bucket])


def quantile(bounds: Sequence[float], counts: Mapping[int, int], share: float) -> float | None:
    """The value that `share` of the observations (counts by bucket) do not exceed; None without any."""
    total = sum(counts.values())
    rank, seen = max(1, math.ceil(share * total - 1e-9)), 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= rank:
            return middle(bounds, bucket)
    return None

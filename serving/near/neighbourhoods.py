"""Neighbourhoods: ranges of closeness, which a policy learns about one by one. Pure."""

import math

COUNT = 12
"""Number of ranges: each must be shown to be right by itself, so more of them learn more slowly."""

FARTHEST = 0.5
"""Distance, in lengths of the vector, from which on nothing is near."""

_LEAST = 1e-30


def neighbourhood_of(distance: float, margin: float) -> int:
    """Number of the range in which a distance over the margin of the answer there lies; each is half of the one before.

    How likely an answer changes goes by how far away it is and how far it is from changing, not by distance alone.
    """
    if distance <= 0:
        return COUNT - 1
    halvings = int(math.log2(max(margin, _LEAST) * FARTHEST / distance))
    return min(max(halvings, 0), COUNT - 1)

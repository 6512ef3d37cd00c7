"""Ranges of closeness, which a policy learns about: 0 is the farthest, each is half as wide as the one before. Pure."""

import math

RANGES = 12
FARTHEST = 0.5
"""Distance, in lengths of the vector, from which on nothing is near."""

_MARGIN_MIN = 1e-30


def range_of(distance: float, margin: float) -> int:
    """Number of the range in which a distance over the margin of the answer there lies.

    How likely an answer changes goes by how far away it is and how far it is from changing, not by distance alone.
    """
    if distance <= 0:
        return RANGES - 1
    halvings = int(math.log2(max(margin, _MARGIN_MIN) * FARTHEST / distance))
    return min(max(halvings, 0), RANGES - 1)

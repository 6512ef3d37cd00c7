"""Neighbourhoods: kinds of closeness, which a policy learns about one by one. Pure."""

import math

RANGES = 12
PER_HALVING = 1
COUNT = 2 * RANGES
"""Number of neighbourhoods: each must be shown to be right by itself, so more of them learn more slowly."""

FARTHEST = 0.5
"""Distance, in lengths of the vector, from which on nothing is near."""

_LEAST = 1e-30


def neighbourhood_of(distance: float, margin: float, *, was_right: bool) -> int:
    """Number of the neighbourhood: the range of the distance over the margin of the answer there, and what that has shown.

    How likely an answer changes goes by how far away it is and how far it is from changing: each range is half of the
    one before. One that was right for another input already says more of its surroundings than one that never was tried.
    """
    halvings = RANGES - 1
    if distance > 0:
        halvings = int(PER_HALVING * math.log2(max(margin, _LEAST) * FARTHEST / distance))
    return RANGES * was_right + min(max(halvings, 0), RANGES - 1)

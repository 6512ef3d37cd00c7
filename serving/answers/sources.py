"""Sources of an answer, listed once. Pure."""

from enum import StrEnum


class Source(StrEnum):
    """Source of an answer, in the order of the ladder: the tiers, live inference, and what is better than nothing."""

    L1 = "l1"
    L2 = "l2"
    LIVE = "live"
    PREVIOUS = "previous"
    DEFAULT = "default"


STORED_SOURCES = (Source.L1, Source.L2)
"""Sources that hold records of the live generation, ready to be read."""

FALLBACKS = tuple([source for source in Source if source not in (*STORED_SOURCES, Source.LIVE)])
"""Sources that answer when the live generation cannot."""

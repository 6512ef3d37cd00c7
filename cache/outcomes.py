"""Sources of an answer and reasons of a miss: every word that answers, counters and pages tell, listed once. Pure."""

from enum import StrEnum


class Source(StrEnum):
    """Source of an answer, in the order of the ladder: the tiers, live inference, and what is better than nothing."""

    L1 = "l1"
    L2 = "l2"
    LIVE = "live"
    PREVIOUS = "previous"
    DEFAULT = "default"


STORED = (Source.L1, Source.L2)
"""Sources that hold records of the live generation, ready to be read."""

FALLBACKS = (Source.PREVIOUS, Source.DEFAULT)
"""Sources that answer when the live generation cannot."""


class MissReason(StrEnum):
    """Reason why an answer is no plain hit; each miss has exactly one."""

    NOT_IN_GENERATION = "not_in_generation"
    NEGATIVE = "negative"
    UNREAD = "overlay_unread"
    EXPIRED = "expired"
    INPUT_CHANGED = "input_changed"
    PAGE_MISSING = "page_missing"
    CORRUPT = "corrupt"
    L2_TIMEOUT = "l2_timeout"
    L2_DOWN = "l2_down"
    BREAKER_OPEN = "breaker_open"

    FRESH = "fresh"
    TOO_OLD = "too_old"
    EXHAUSTED = "exhausted"
    """Too little of a list is left without what the caller has seen or excluded."""
    ENTITY_BLOCKED = "entity_blocked"
    INTERNAL_ERROR = "internal_error"
    """A defect of ours."""
    DEADLINE = "deadline"
    """Counted in place of `l2_timeout`."""

    NOTHING_TO_COMPUTE_FROM = "nothing_to_compute_from"
    FRESH_UNAVAILABLE = "fresh_unavailable"


OUTAGES = frozenset(
    {
        MissReason.PAGE_MISSING,
        MissReason.CORRUPT,
        MissReason.L2_TIMEOUT,
        MissReason.L2_DOWN,
        MissReason.BREAKER_OPEN,
    }
)
"""Reasons of a miss: what the night has computed is out of reach for a while."""

STANDS_IN = OUTAGES | {MissReason.NOT_IN_GENERATION}
"""Reasons of a miss where the night has a place for an entity, and a live answer kept beside it does for a while."""

TOLD_WITH_STORED = frozenset({MissReason.NOTHING_TO_COMPUTE_FROM, MissReason.FRESH_UNAVAILABLE})
"""Reasons that go with a stored answer where a fresh one was asked for: no miss."""

NOWHERE = frozenset({MissReason.NOT_IN_GENERATION, MissReason.NEGATIVE, MissReason.UNREAD})
"""Reasons of a miss: nothing is stored for an id that the night did not know."""

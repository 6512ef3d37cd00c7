"""Wants and outcomes: what a read asks for and how it can end."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from cache.errors import TierUnavailable
from cache.format.directory import Directory
from cache.format.manifest import Table
from cache.format.records.layout import is_absent

Tier = Literal["l1", "l2"]
"""Tiers: this process and Redis."""


class DescribedEnum(StrEnum):
    """Word of an answer's field, with its `meaning` in a sentence for whoever reads it."""

    meaning: str

    def __new__(cls, label: str, meaning: str) -> Self:
        """Make a member that equals its word."""
        member = str.__new__(cls, label)
        member._value_ = label
        member.meaning = meaning
        return member


class MissReason(DescribedEnum):
    """Reasons why an answer is no plain hit, the tiers' own first; each miss has exactly one."""

    NOT_IN_GENERATION = (
        "not_in_generation",
        "The generation has no record of this id in this table, and no live answer to it is stored",
    )
    NEGATIVE = "negative", "The same, remembered from another request"
    UNREAD = "overlay_unread", "The same, and a stored live answer was not looked for"
    EXPIRED = "expired", "The stored live answer to this id has ended"
    INPUT_CHANGED = "input_changed", "The stored live answer was computed from another input"
    PAGE_MISSING = "page_missing", "The page of its record is not in Redis"
    CORRUPT = "corrupt", "Its record in Redis is damaged"
    L2_TIMEOUT = "l2_timeout", "Redis did not answer in time, or the deadline left it none"
    L2_DOWN = "l2_down", "Redis cannot be reached"
    BREAKER_OPEN = "breaker_open", "Redis failed several times and is not asked for a moment"

    NEWER_EVENTS = (
        "newer_events",
        "The user has newer events, and no answer that counts them is stored yet",
    )
    FRESH = "fresh", "A fresh answer was demanded"
    TOO_OLD = "too_old", "What is stored is older than `max_age_seconds`"
    EXHAUSTED = (
        "exhausted",
        "Of the list of an item, or of a live answer, fewer than k (or none) are left without what is excluded",
    )
    FILTERED = (
        "filtered",
        "Fewer than k of the list pass the filter, and no vector to search by could be had, or no time was left",
    )
    ENTITY_BLOCKED = "entity_blocked", "The id itself is on the blocklist"
    INTERNAL_ERROR = "internal_error", "The service failed on this id, and has logged why"

    NOTHING_TO_COMPUTE_FROM = (
        "nothing_to_compute_from",
        "A fresh answer was demanded and nothing was sent to compute it from: this is what is stored",
    )
    FRESH_UNAVAILABLE = (
        "fresh_unavailable",
        "A fresh answer was demanded and live has none (`live` says why): this is what is stored",
    )


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


NOWHERE = frozenset({MissReason.NOT_IN_GENERATION, MissReason.NEGATIVE, MissReason.UNREAD})
"""Reasons of a miss: nothing is stored for an id that the night did not know."""

PUBLIC_BY_INTERNAL_REASON: Mapping[str, MissReason] = {
    MissReason.NEGATIVE: MissReason.NOT_IN_GENERATION,
    MissReason.UNREAD: MissReason.NOT_IN_GENERATION,
}
"""Reason that answers, metrics and explanations tell in place of another: none says how an absence was found out."""

REASONS_WITH_STORED_ANSWER = frozenset(
    {MissReason.NOTHING_TO_COMPUTE_FROM, MissReason.FRESH_UNAVAILABLE}
)
"""Reasons that go with a stored answer where a fresh one was asked for: no miss."""


class RecordKey(NamedTuple):
    """A request for one entity's record in one table.

    `key` is the hash of its id, or the 16-byte digest of an id-less input; `position` is -1 when the night did not
    know it; `digest` is that of the input the caller sent, None if it sent none; `skips_overlay` leaves the overlay
    unread, wherever L1 lacks it.
    """

    table: Table
    key: int | bytes
    fingerprint: int
    position: int
    digest: bytes | None = None
    skips_overlay: bool = False


class Hit(NamedTuple):
    """A record whose fingerprint is the wanted one; `expires_at` (monotonic) is None for what the night computed.

    `reason` is set when this stands in, for a while, for a record of the night that is out of reach.
    """

    record: bytes
    tier: Tier
    live: bool
    expires_at: float | None
    reason: MissReason | None = None


class Miss(NamedTuple):
    """A miss: no stored answer, and why."""

    reason: MissReason


ReadResult = Hit | Miss

MISS_BY_REASON = {reason: Miss(reason) for reason in MissReason}
_UNAVAILABLE = {
    "timeout": MISS_BY_REASON[MissReason.L2_TIMEOUT],
    "connection": MISS_BY_REASON[MissReason.L2_DOWN],
    "breaker_open": MISS_BY_REASON[MissReason.BREAKER_OPEN],
}


def unavailable(error: TierUnavailable) -> Miss:
    """The miss of a read that L2 could not answer."""
    return _UNAVAILABLE[str(error.details["reason"])]


def unsound(record: bytes, fingerprint: int) -> MissReason:
    """Reason why a page's record is no answer: the night had none for this entity, or it is not what it should be."""
    absent = is_absent(record, fingerprint)
    return MissReason.NOT_IN_GENERATION if absent else MissReason.CORRUPT


@dataclass(frozen=True, slots=True)
class View:
    """A snapshot as far as a read needs it, captured once per request."""

    generation: str
    directories: Mapping[str, Directory]


@dataclass(slots=True)
class Counters:
    """Counters of reads: every want that was asked for is counted once, in `l1`, `l2` or one of `missed`.

    `l1` are records found there, in `records`, and answers that were ready to be sent, in `ready`. Those are counted
    some at a time: `flush` adds what is still to be counted.
    """

    records: int = 0
    ready: int = 0
    l2: int = 0
    missed: dict[MissReason, int] = field(default_factory=lambda: dict.fromkeys(MissReason, 0))
    l2_reads: int = 0
    flush: Callable[[], None] = lambda: None

    def count(self, outcomes: Sequence[ReadResult]) -> None:
        """Adds one request's outcomes."""
        for outcome in outcomes:
            if type(outcome) is Miss:
                self.missed[outcome.reason] += 1
            elif outcome.tier == "l1":  # type: ignore[union-attr]
                self.records += 1
            else:
                self.l2 += 1

    def count_rows(
        self, is_l2: NDArray[np.bool_], result_by_index: Mapping[int, ReadResult]
    ) -> None:
        """Adds rows by the tier each is from, but those at the places of `result_by_index` by their outcomes."""
        l2 = int(np.count_nonzero(is_l2)) - sum(bool(is_l2[index]) for index in result_by_index)
        self.l2 += l2
        self.records += len(is_l2) - l2 - len(result_by_index)
        self.count(list(result_by_index.values()))

    @property
    def l1(self) -> int:
        """Number of wants that L1 answered."""
        return self.records + self.ready

    @property
    def total(self) -> int:
        """Number of all outcomes."""
        return self.l1 + self.l2 + sum(self.missed.values())

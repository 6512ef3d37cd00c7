"""Fact `reuse` of a manifest: how many users' records a night copied or computed, why, and the time saved."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

REUSE_FACT: Final = "reuse"
"""Name of the fact in a manifest."""
REUSE_NIGHTS_MAX: Final = 14
"""Number of nights in a manifest's reuse history, including its own, the last."""
REUSE_REASONS: Final = ("copied", "inputs", "lost", "entered", "computed")
"""Reasons in display order; `computed`: by a night, or a shard, that had nothing to copy from."""


@dataclass(frozen=True, slots=True)
class UsersByReason:
    """Number of users by reason, and seconds saved, of one night or of several."""

    user_count_by_reason: Mapping[str, int]
    spared_s: float

    @property
    def copied_share(self) -> float | None:
        """Share of the users whose records were copied; None without users."""
        total = sum(self.user_count_by_reason.values())
        return self.user_count_by_reason["copied"] / total if total else None

    def to_json(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return {"users": dict(self.user_count_by_reason), "share": self.copied_share, "spared_s": self.spared_s}


@dataclass(frozen=True, slots=True)
class Reuse:
    """Reuse of one night, and of the nights before it: `nights`, its own last."""

    night: UsersByReason
    base_generation: str | None
    lists_not_copied_because: str
    """Why lists could not be copied; empty if they could."""
    sources_read_because: str
    """Why all source files were read; empty if only new files were."""
    nights: tuple[UsersByReason, ...]

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self | None:
        """Read from a manifest's facts; None if the fact is missing or has another version."""
        try:
            fact = facts[REUSE_FACT]
            nights = tuple(map(_read_users_by_reason, fact["nights"]))[-REUSE_NIGHTS_MAX:]
            base = None if fact["base"] is None else str(fact["base"])
            return cls(_read_users_by_reason(fact), base, str(fact["why"]), str(fact["read_because"]), nights)
        except (AttributeError, KeyError, TypeError, ValueError):
            return None

    @property
    def recent_total(self) -> UsersByReason:
        """Sum of the users of all these nights, and the mean of the seconds saved per night."""
        spared_s = sum(night.spared_s for night in self.nights)
        return UsersByReason(
            _sum_users_by_reason(night.user_count_by_reason for night in self.nights),
            spared_s / max(1, len(self.nights)),
        )

    def to_json(self) -> dict[str, Any]:
        """Return a dict for JSON: the night, and `recent_total` with the number of its nights."""
        return {
            **self.night.to_json(), "base": self.base_generation, "why": self.lists_not_copied_because,
            "read_because": self.sources_read_because,
            "lately": {"nights": len(self.nights), **self.recent_total.to_json()},
        }  # fmt: skip


def _read_users_by_reason(night_fact: Mapping[str, Any]) -> UsersByReason:
    return UsersByReason(_sum_users_by_reason([night_fact["users"]]), float(night_fact["spared_s"]))


def _sum_users_by_reason(user_counts_by_reason: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    user_count_by_reason = dict.fromkeys(REUSE_REASONS, 0)
    for user_counts in user_counts_by_reason:
        for reason in REUSE_REASONS:
            user_count_by_reason[reason] += int(user_counts.get(reason, 0))
    return user_count_by_reason

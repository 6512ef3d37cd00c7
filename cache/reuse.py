"""The fact `reuse` of a manifest: how many users a night copied or computed, for which reason, and the time spared."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

REUSE_FACT: Final = "reuse"
"""Name of the fact in manifests."""
REUSE_NIGHTS_MAX: Final = 14
"""Number of nights in a manifest's history, its own the last."""
REUSE_REASONS: Final = ("copied", "inputs", "lost", "entered", "computed")
"""Reasons in the order in which they are shown; `computed`: of a night, or a shard, that had nothing to copy from."""


@dataclass(frozen=True, slots=True)
class UsersByReason:
    """Users by reason and seconds spared, of one night or of several."""

    users: Mapping[str, int]
    spared_s: float

    @property
    def copied_share(self) -> float | None:
        """Share of the users whose records were copied; None where there is no user."""
        total = sum(self.users.values())
        return self.users["copied"] / total if total else None

    def to_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return {"users": dict(self.users), "share": self.copied_share, "spared_s": self.spared_s}


@dataclass(frozen=True, slots=True)
class Reuse:
    """Copies of one night, and of the nights it follows from: `nights`, its own the last."""

    night: UsersByReason
    base: str | None
    not_copied_because: str
    """Reason why lists could not be copied; empty where they could."""
    read_because: str
    """Reason why all source files were read; empty where only new ones were."""
    nights: tuple[UsersByReason, ...]

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self | None:
        """Copies as a manifest's facts have them; None where they have none, or another version's."""
        try:
            fact = facts[REUSE_FACT]
            nights = tuple(map(_read_users_by_reason, fact["nights"]))[-REUSE_NIGHTS_MAX:]
            base = None if fact["base"] is None else str(fact["base"])
            return cls(_read_users_by_reason(fact), base, str(fact["why"]), str(fact["read_because"]), nights)
        except (AttributeError, KeyError, TypeError, ValueError):
            return None

    @property
    def recent_total(self) -> UsersByReason:
        """All of its nights as one: their users added up, and the mean of the seconds that each was spared."""
        spared_s = sum(night.spared_s for night in self.nights)
        return UsersByReason(
            _sum_users_by_reason(night.users for night in self.nights), spared_s / max(1, len(self.nights))
        )

    def to_json(self) -> dict[str, Any]:
        """JSON-able form: the night, and `recent_total` with the number of its nights."""
        return {
            **self.night.to_json(), "base": self.base, "why": self.not_copied_because,
            "read_because": self.read_because,
            "lately": {"nights": len(self.nights), **self.recent_total.to_json()},
        }  # fmt: skip


def _read_users_by_reason(night_fact: Mapping[str, Any]) -> UsersByReason:
    return UsersByReason(_sum_users_by_reason([night_fact["users"]]), float(night_fact["spared_s"]))


def _sum_users_by_reason(counts_by_reason: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    user_count_by_reason = dict.fromkeys(REUSE_REASONS, 0)
    for user_counts in counts_by_reason:
        for reason in REUSE_REASONS:
            user_count_by_reason[reason] += int(user_counts.get(reason, 0))
    return user_count_by_reason

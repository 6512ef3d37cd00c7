"""A canary held against the live generation by what replicas counted of both, and what follows from it. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from precompute.sections import CanaryConfig

Verdict = Literal["publish", "abandon"]

_BINS = 10
_SMOOTHING = 0.5


@dataclass(slots=True)
class Totals:
    """One arm over all replicas: requests, entities by source, top scores by bucket, feedback by event."""

    requests: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    scores: Counter[int] = field(default_factory=Counter)
    score_sum: float = 0.0
    feedback: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, counted: Iterable[Mapping[str, Any]]) -> Self:
        """The sum of what heartbeats carry of this arm."""
        total = cls()
        for each in counted:
            total.requests += int(each["requests"])
            total.sources.update(each["sources"])
            total.scores.update({int(at): count for at, count in each["scores"].items()})
            total.score_sum += float(each["score_sum"])
            total.feedback.update(each["feedback"])
        return total

    @property
    def mean_score(self) -> float | None:
        """Of the best score of each list."""
        lists = self.scores.total()
        return self.score_sum / lists if lists else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """`source_shift`: half the sum of the differences of shares, 0 to 1; `score_psi`: 0 = the same distribution.

    `feedback`: event -> its rate per request under the canary over that under live, None without any under live.
    """

    requests: Mapping[str, int]
    source_shift: float
    score_psi: float
    mean_scores: Mapping[str, float | None]
    feedback: Mapping[str, float | None]

    @classmethod
    def of(cls, live: Totals, canary: Totals) -> Self:
        """What the two arms come to."""
        return cls(
            {"live": live.requests, "canary": canary.requests},
            shift(live.sources, canary.sources),
            psi(live.scores, canary.scores),
            {"live": live.mean_score, "canary": canary.mean_score},
            {
                event: _ratio(event, live, canary)
                for event in sorted({*live.feedback, *canary.feedback})
            },
        )


def shift(one: Mapping[str, int], other: Mapping[str, int]) -> float:
    """Total variation distance of two mixes."""
    all_one, all_other = sum(one.values()), sum(other.values())
    if not all_one or not all_other:
        return 0.0 if all_one == all_other else 1.0
    names = {*one, *other}
    return 0.5 * sum(
        abs(one.get(name, 0) / all_one - other.get(name, 0) / all_other) for name in names
    )


def psi(expected: Mapping[int, int], found: Mapping[int, int]) -> float:
    """Population stability index over at most ten bins of about equal weight in `expected`; inf if one is empty."""
    all_expected, all_found = sum(expected.values()), sum(found.values())
    if not all_expected or not all_found:
        return 0.0 if all_expected == all_found else math.inf
    bins: list[list[float]] = [[0.0, 0.0]]
    for at in sorted({*expected, *found}):
        if bins[-1][0] >= all_expected / _BINS:
            bins.append([0.0, 0.0])
        bins[-1][0] += expected.get(at, 0)
        bins[-1][1] += found.get(at, 0)
    total = 0.0
    for one, other in bins:
        share = (one + _SMOOTHING) / (all_expected + _SMOOTHING * len(bins))
        share_found = (other + _SMOOTHING) / (all_found + _SMOOTHING * len(bins))
        total += (share_found - share) * math.log(share_found / share)
    return total


def _ratio(event: str, live: Totals, canary: Totals) -> float | None:
    if not live.feedback[event] or not live.requests or not canary.requests:
        return None
    return (canary.feedback[event] / canary.requests) / (live.feedback[event] / live.requests)


def decide(found: Comparison, limits: CanaryConfig) -> tuple[Verdict, list[str]]:
    """Publish only when every measure is there and within its limit; otherwise abandon, with every reason."""
    against = []
    for arm, requests in found.requests.items():
        if requests < limits.requests_min:
            against.append(
                f"{arm} answered {requests} requests, at least {limits.requests_min} are needed"
            )
    if not found.source_shift <= limits.source_shift_max:
        against.append(
            f"source_shift {found.source_shift:.4f} is above {limits.source_shift_max:g}"
        )
    if not found.score_psi <= limits.score_psi_max:
        against.append(f"score_psi {found.score_psi:.4f} is above {limits.score_psi_max:g}")
    if limits.feedback_event:
        ratio = found.feedback.get(limits.feedback_event)
        if ratio is None:
            against.append(f"nothing was reported as {limits.feedback_event}")
        elif not ratio >= limits.feedback_ratio_min:
            against.append(
                f"{limits.feedback_event} per request is {ratio:.4f} of live's, "
                f"at least {limits.feedback_ratio_min:g} is needed"
            )
    return ("abandon" if against else "publish"), against

"""Comparison of a canary's arm with live's: what both were counted to answer, bounds by chance, and the verdict."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, Literal, Self

from cache.config.night import CanaryConfig
from cache.control.control_keys import Replica
from cache.store.releases import Canary
from cache.traffic.key_sketch import KeySketch
from precompute.config.settings import NightConfig
from precompute.releases.release_log import open_releases

Verdict = Literal["publish", "abandon", "undecided"]

ALPHA = 1e-4
"""Highest probability that a difference between two arms of one generation counts as more than chance."""

KEYS_FOR_EVIDENCE = 100
"""Least number of keys for evidence: the approximations of `ArmComparison` need some."""

_Z = NormalDist().inv_cdf(1 - ALPHA)

_PSI_BINS = 10

_PSI_SMOOTHING = 0.5


@dataclass(slots=True)
class CanaryArmTotals:
    """Totals of one arm over all replicas: requests and feedback; per key, once, its source and top score's bucket.

    `keys`, `keys_by_answer_source`, `scores` and `score_sum` are estimates for the keys of each replica, added up;
    `different`: how many different keys these are; `certain`: how many independent keys they are worth.
    """

    requests: int = 0
    keys: float = 0.0
    keys_by_answer_source: Counter[str] = field(default_factory=Counter)
    scores: Counter[int] = field(default_factory=Counter)
    score_sum: float = 0.0
    feedback: Counter[str] = field(default_factory=Counter)
    different: float = 0.0
    _squares: float = 0.0
    _replicas: int = 0

    @classmethod
    def of(cls, heartbeat_counts: Iterable[Mapping[str, Any]]) -> Self:
        """Sum the heartbeats' counts of this arm."""
        total, sketches, most_of_one = cls(), list[KeySketch](), 0.0
        for replica_counts in heartbeat_counts:
            total.requests += int(replica_counts["requests"])
            total.feedback.update(replica_counts["feedback"])
            keys, weight = int(replica_counts["keys"]), int(replica_counts["weight"])
            if not keys:
                continue
            total._replicas += 1
            total._squares += weight * weight * keys
            total.keys += weight * keys
            most_of_one = max(most_of_one, weight * keys)
            if sketch_text := replica_counts.get("sketch"):
                sketches.append(KeySketch.from_text(sketch_text))
            total.keys_by_answer_source.update(
                {kind: weight * count for kind, count in replica_counts["kinds"].items()}
            )
            total.scores.update(
                {int(at): weight * count for at, count in replica_counts["scores"].items()}
            )
            total.score_sum += weight * float(replica_counts["score_sum"])
        if len(sketches) == total._replicas:
            united = KeySketch.unite(sketches).count()
            total.different = min(max(united, most_of_one), total.keys)
        else:  # a replica of an older release: its keys may be those of the others
            total.different = most_of_one
        return total

    @property
    def certain(self) -> float:
        """Effective number of keys, as if each had been counted once and with equal weight; at least so many.

        With N counts of U different keys, each counted by at most R replicas, the squares of their counts add up to
        U + (N - U)(R + 1) at most: N - U further counts, spread over as few keys as possible.
        """
        if not self.keys:
            return 0.0
        squares_of_counts = self.different + (self.keys - self.different) * (self._replicas + 1)
        return self.keys**2 / self._squares * self.keys / squares_of_counts

    @property
    def mean_score(self) -> float | None:
        """Mean over the best score of each key's first list; None without lists."""
        lists = self.scores.total()
        return self.score_sum / lists if lists else None


@dataclass(frozen=True, slots=True)
class ArmComparison:
    """Comparison of the canary's arm with live's, each measure with its bound by chance.

    `source_shift`: half the sum of the differences of shares, 0 to 1; `score_psi`: 0 = the same distribution.
    `chance`: how large each of them may be between two arms of one generation. `feedback`: event -> its rate per
    request under the canary over that under live, None without any under live; `feedback_chance`: how far below 1 that
    may be by chance.

    The split is over keys, so keys are counted: each once, by its first answer. Counted by request, a handful of busy
    keys would be most of either arm, and two arms of one generation would differ by their busy keys. A measure counts
    against the canary if it is above its limit and above the largest value of two arms of one generation by chance
    (`ALPHA` of all such canaries at most); above its limit only, it leaves the question open. With n and m keys,

    - score_psi by chance is (1/n + 1/m) times a chi-square with bins - 1 degrees of freedom (Yurdakul and Naranjo,
    "Statistical properties of the population stability index", 2020; its quantile after Wilson and Hilferty, 1931),
    - each share that source_shift sums differs by chance by at most what Bernstein's inequality allows,
    - events are a Poisson count given how often they came under live; events of one key that hang together vary more.

    n is smaller than the number of keys counted, as one key may have been counted by every replica and replicas keep
    samples of different rates (Kish's effective sample size). `keys` is the number of different keys over all replicas,
    from their sketches.
    """

    requests: Mapping[str, int]
    keys: Mapping[str, int]
    source_shift: float
    score_psi: float
    chance: Mapping[str, float]
    mean_scores: Mapping[str, float | None]
    feedback: Mapping[str, float | None]
    feedback_chance: Mapping[str, float]

    @classmethod
    def of(cls, live: CanaryArmTotals, canary: CanaryArmTotals) -> Self:
        """Compare the two arms, each measure with its bound by chance."""
        events = sorted({*live.feedback, *canary.feedback})
        ratios = {event: _feedback_ratio(event, live, canary) for event in events}
        return cls(
            {"live": live.requests, "canary": canary.requests},
            {"live": round(live.different), "canary": round(canary.different)},
            mix_shift(live.keys_by_answer_source, canary.keys_by_answer_source),
            population_stability_index(live.scores, canary.scores),
            {
                "source_shift": shift_by_chance(live, canary),
                "score_psi": psi_by_chance(live, canary),
            },
            {"live": live.mean_score, "canary": canary.mean_score},
            {event: ratio for event, (ratio, _) in ratios.items()},
            {event: chance for event, (_, chance) in ratios.items()},
        )


def compare(replicas: Sequence[Replica], canary: Canary) -> ArmComparison:
    """Compare both arms over the live replicas; those without counts add nothing."""
    arm_counts = [
        replica.canary["arms"]
        for replica in replicas
        if replica.canary is not None and replica.canary["since"] == canary.since
    ]
    return ArmComparison.of(
        *(CanaryArmTotals.of(arms[arm] for arms in arm_counts) for arm in ("live", "canary"))
    )


def decide(comparison: ArmComparison, limits: CanaryConfig) -> tuple[Verdict, list[str]]:
    """Decide: publish if every measure is within its limit, abandon on evidence against; return also the reasons.

    Too small counts leave it undecided, with the missing ones.
    """
    against: list[str] = []
    missing: list[str] = []
    for unit_name, count_by_arm, min_count in (
        ("requests", comparison.requests, limits.requests_min),
        ("keys", comparison.keys, limits.keys_min),
    ):
        missing += [
            f"{arm} answered {count} {unit_name}, at least {min_count} are needed"
            for arm, count in count_by_arm.items()
            if count < min_count
        ]
    for name, value, limit in (
        ("source_shift", comparison.source_shift, limits.source_shift_max),
        ("score_psi", comparison.score_psi, limits.score_psi_max),
    ):
        chance = comparison.chance[name]
        if value > limit:
            finding = f"{name} {value:.4f} is above {limit:g}"
            if value > chance:
                against.append(finding)
            else:
                missing.append(f"{finding}, but up to {chance:.4f} may be chance with so few keys")
        elif not value <= limit:
            missing.append(f"{name} is not known")
    if limits.feedback_event:
        _weigh_feedback(comparison, limits, against, missing)
    # Two keys can differ by anything.
    if against and min(comparison.keys.values()) >= min(limits.keys_min, KEYS_FOR_EVIDENCE):
        return "abandon", against
    return ("undecided", against + missing) if against or missing else ("publish", [])


def _weigh_feedback(
    comparison: ArmComparison, limits: CanaryConfig, against: list[str], missing: list[str]
) -> None:
    event, min_ratio = limits.feedback_event, limits.feedback_ratio_min
    ratio = comparison.feedback.get(event)
    if ratio is None:
        missing.append(f"nothing was reported as {event}")
    elif not ratio >= min_ratio:
        finding = f"{event} per request is {ratio:.4f} of live's, at least {min_ratio:g} is needed"
        chance = comparison.feedback_chance[event]
        if ratio < 1 - chance:
            against.append(finding)
        else:
            missing.append(f"{finding}, but it may be chance down to {max(0.0, 1 - chance):.4f}")


def mix_shift(first_counts: Mapping[str, int], second_counts: Mapping[str, int]) -> float:
    """Return the total variation distance of two mixes."""
    all_one, all_other = sum(first_counts.values()), sum(second_counts.values())
    if not all_one or not all_other:
        return 0.0 if all_one == all_other else 1.0
    names = {*first_counts, *second_counts}
    return 0.5 * sum(
        abs(first_counts.get(name, 0) / all_one - second_counts.get(name, 0) / all_other)
        for name in names
    )


def shift_by_chance(live: CanaryArmTotals, canary: CanaryArmTotals) -> float:
    """Return the source_shift that two arms of one generation exceed at most `ALPHA` of the time."""
    if not live.certain or not canary.certain:
        return math.inf
    kinds = {*live.keys_by_answer_source, *canary.keys_by_answer_source}
    deviation = math.log(2 * len(kinds) / ALPHA)
    apart = 1 / live.certain + 1 / canary.certain
    allowed = deviation / (3 * min(live.certain, canary.certain)) * len(kinds)
    for kind in kinds:
        pooled_share = (live.keys_by_answer_source[kind] + canary.keys_by_answer_source[kind]) / (
            live.keys + canary.keys
        )
        allowed += math.sqrt(2 * pooled_share * (1 - pooled_share) * deviation * apart)
    return min(1.0, 0.5 * allowed)


def population_stability_index(
    expected: Mapping[int, int], actual_counts: Mapping[int, int]
) -> float:
    """Return the population stability index over at most ten equal bins of `expected`; inf if one side is empty."""
    all_expected, all_found = sum(expected.values()), sum(actual_counts.values())
    if not all_expected or not all_found:
        return 0.0 if all_expected == all_found else math.inf
    bins: list[list[float]] = [[0.0, 0.0]]
    for at in sorted({*expected, *actual_counts}):
        if bins[-1][0] >= all_expected / _PSI_BINS:
            bins.append([0.0, 0.0])
        bins[-1][0] += expected.get(at, 0)
        bins[-1][1] += actual_counts.get(at, 0)
    total = 0.0
    for expected_count, actual_count in bins:
        expected_share = (expected_count + _PSI_SMOOTHING) / (
            all_expected + _PSI_SMOOTHING * len(bins)
        )
        share_found = (actual_count + _PSI_SMOOTHING) / (all_found + _PSI_SMOOTHING * len(bins))
        total += (share_found - expected_share) * math.log(share_found / expected_share)
    return total


def psi_by_chance(live: CanaryArmTotals, canary: CanaryArmTotals) -> float:
    """Return the score_psi that two arms of one generation exceed at most `ALPHA` of the time."""
    if not live.certain or not canary.certain:
        return math.inf
    apart = 0.0
    for arm in (live, canary):
        lists = (
            arm.scores.total() or arm.keys
        )  # an arm without a single list is as sure as its keys are many
        apart += arm.keys / (lists * arm.certain)
    free = _PSI_BINS - 1
    spread = 2 / (9 * free)
    quantile: float = free * (1 - spread + _Z * math.sqrt(spread)) ** 3
    return apart * quantile


def _feedback_ratio(
    event: str, live: CanaryArmTotals, canary: CanaryArmTotals
) -> tuple[float | None, float]:
    """Return (rate under the canary over that under live, how far below 1 that may be by chance)."""
    if not live.feedback[event] or not live.requests or not canary.requests:
        return None, math.inf
    expected = live.feedback[event] * canary.requests / live.requests
    chance = _Z * math.sqrt(1 / expected + 1 / live.feedback[event])
    under_live = live.feedback[event] / live.requests
    return canary.feedback[event] / canary.requests / under_live, chance


def ending_remark(config: NightConfig, generation: str) -> str:
    """Describe the canary that a publish of this generation ends; empty without one, or if it is the canary's own."""
    with open_releases(config) as releases:
        pointer, replicas = releases.control.read_pointer(), releases.control.replicas()
    canary = None if pointer is None else pointer.canary
    if canary is None or canary.generation == generation:
        return ""
    verdict, _ = decide(compare(replicas, canary), config.canary)
    return f"this ends the canary of {canary.generation} ({canary.percent:g} %, {verdict})"

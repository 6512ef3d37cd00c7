"""Comparison of a canary's arm with the live arm: their counts, bounds of chance differences, and the verdict."""

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

CHANCE_PROBABILITY_MAX = 1e-4
"""Largest probability that two arms of one generation show a difference that counts as more than chance."""

EVIDENCE_KEYS_MIN = 100
"""Fewest keys that count as evidence, since the approximations of `ArmComparison` need some."""

_NORMAL_QUANTILE = NormalDist().inv_cdf(1 - CHANCE_PROBABILITY_MAX)

_PSI_BINS = 10

_PSI_SMOOTHING = 0.5


@dataclass(slots=True)
class CanaryArmTotals:
    """Totals of one arm over all replicas: requests, feedback, and sources and top scores of keys' first answers.

    `key_estimate`, `keys_by_answer_source`, `keys_by_top_score` and `top_score_sum` are sums of the replicas'
    estimates. `distinct_key_estimate` is the number of distinct keys, `effective_key_count` the equivalent number of
    independent keys.
    """

    request_count: int = 0
    key_estimate: float = 0.0
    keys_by_answer_source: Counter[str] = field(default_factory=Counter)
    keys_by_top_score: Counter[int] = field(default_factory=Counter)
    top_score_sum: float = 0.0
    count_by_feedback_event: Counter[str] = field(default_factory=Counter)
    distinct_key_estimate: float = 0.0
    _weight_square_sum: float = 0.0
    _replica_count: int = 0

    @classmethod
    def of(cls, heartbeat_counts: Iterable[Mapping[str, Any]]) -> Self:
        """Sum the counts of this arm from the replicas' heartbeats."""
        arm_totals, sketches, replica_keys_max = cls(), list[KeySketch](), 0.0
        for replica_counts in heartbeat_counts:
            arm_totals.request_count += int(replica_counts["requests"])
            arm_totals.count_by_feedback_event.update(replica_counts["feedback"])
            key_count, key_weight = int(replica_counts["keys"]), int(replica_counts["weight"])
            if not key_count:
                continue
            arm_totals._replica_count += 1
            arm_totals._weight_square_sum += key_weight * key_weight * key_count
            arm_totals.key_estimate += key_weight * key_count
            replica_keys_max = max(replica_keys_max, key_weight * key_count)
            if sketch_text := replica_counts.get("sketch"):
                sketches.append(KeySketch.from_text(sketch_text))
            arm_totals.keys_by_answer_source.update(
                {answer_source: key_weight * count for answer_source, count in replica_counts["kinds"].items()}
            )
            arm_totals.keys_by_top_score.update(
                {int(bucket): key_weight * count for bucket, count in replica_counts["scores"].items()}
            )
            arm_totals.top_score_sum += key_weight * float(replica_counts["score_sum"])
        if len(sketches) == arm_totals._replica_count:
            united_key_count = KeySketch.unite(sketches).estimate_key_count()
            arm_totals.distinct_key_estimate = min(max(united_key_count, replica_keys_max), arm_totals.key_estimate)
        else:  # a replica of an older release sends no sketch: its keys may be the same as others'
            arm_totals.distinct_key_estimate = replica_keys_max
        return arm_totals

    @property
    def effective_key_count(self) -> float:
        """Lower bound on the effective number of keys, as if each had been counted once with equal weight.

        With N counts of U distinct keys, each counted by at most R replicas, the squared counts per key sum to at most
        U + (N - U)(R + 1): N - U further counts, spread over as few keys as possible.
        """
        if not self.key_estimate:
            return 0.0
        squares_of_counts = self.distinct_key_estimate + (self.key_estimate - self.distinct_key_estimate) * (
            self._replica_count + 1
        )
        return self.key_estimate**2 / self._weight_square_sum * self.key_estimate / squares_of_counts

    @property
    def mean_top_score(self) -> float | None:
        """Mean of the best score of each key's first list; None without lists."""
        list_count = self.keys_by_top_score.total()
        return self.top_score_sum / list_count if list_count else None


@dataclass(frozen=True, slots=True)
class ArmComparison:
    """Comparison of the canary's arm with the live arm; each measure has a bound on chance differences.

    `source_shift`: half the sum of the differences of shares, 0 to 1; `score_psi`: 0 = the same distribution.
    `chance`: how large both may be between two arms of one generation. `feedback`: event -> its rate per
    request of the canary divided by live's, None if live has none; `feedback_chance`: how far below 1 the ratio
    may be by chance.

    Requests are split by key, so each key is counted once, by its first answer. Counted by request, a few busy
    keys would be most of either arm, and two arms of one generation would differ by their busy keys. A measure counts
    against the canary if it is above its limit and above the largest value of two arms of one generation by chance
    (exceeded with probability `CHANCE_PROBABILITY_MAX`); if it is only above its limit, the question stays open.
    With n and m keys,

    - score_psi by chance is (1/n + 1/m) times a chi-square with bins - 1 degrees of freedom (Yurdakul and Naranjo,
    "Statistical properties of the population stability index", 2020; its quantile after Wilson and Hilferty, 1931),
    - the chance difference of each share in source_shift is bounded by Bernstein's inequality,
    - events are a Poisson count given live's count; dependent events of one key vary more.

    n is smaller than the number of keys counted, as one key may have been counted by every replica and replicas keep
    samples at different rates (Kish's effective sample size). `keys` is the number of distinct keys over all replicas,
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
        """Compare the two arms."""
        events = sorted({*live.count_by_feedback_event, *canary.count_by_feedback_event})
        feedback_ratio_by_event = {event: _feedback_ratio(event, live, canary) for event in events}
        return cls(
            {"live": live.request_count, "canary": canary.request_count},
            {"live": round(live.distinct_key_estimate), "canary": round(canary.distinct_key_estimate)},
            mix_shift(live.keys_by_answer_source, canary.keys_by_answer_source),
            population_stability_index(live.keys_by_top_score, canary.keys_by_top_score),
            {"source_shift": shift_by_chance(live, canary), "score_psi": psi_by_chance(live, canary)},
            {"live": live.mean_top_score, "canary": canary.mean_top_score},
            {event: feedback_ratio for event, (feedback_ratio, _) in feedback_ratio_by_event.items()},
            {event: chance for event, (_, chance) in feedback_ratio_by_event.items()},
        )


def compare(replicas: Sequence[Replica], canary: Canary) -> ArmComparison:
    """Compare both arms over the live replicas; replicas without counts are skipped."""
    arm_counts = [
        replica.canary_counts["arms"]
        for replica in replicas
        if replica.canary_counts is not None and replica.canary_counts["since"] == canary.since
    ]
    return ArmComparison.of(
        *(CanaryArmTotals.of(counts_by_arm[arm] for counts_by_arm in arm_counts) for arm in ("live", "canary"))
    )


def decide(comparison: ArmComparison, limits: CanaryConfig) -> tuple[Verdict, list[str]]:
    """Return the verdict and its reasons: publish if every measure is within its limit, abandon on counterevidence.

    If counts are too small, the verdict is undecided, and the reasons name them.
    """
    counterevidence: list[str] = []
    open_questions: list[str] = []
    for counted_name, count_by_arm, min_count in (
        ("requests", comparison.requests, limits.requests_min),
        ("keys", comparison.keys, limits.keys_min),
    ):
        open_questions += [
            f"{arm} answered {count} {counted_name}, at least {min_count} are needed"
            for arm, count in count_by_arm.items()
            if count < min_count
        ]
    for measure_name, measure, limit in (
        ("source_shift", comparison.source_shift, limits.source_shift_max),
        ("score_psi", comparison.score_psi, limits.score_psi_max),
    ):
        chance_bound = comparison.chance[measure_name]
        if measure > limit:
            finding = f"{measure_name} {measure:.4f} is above {limit:g}"
            if measure > chance_bound:
                counterevidence.append(finding)
            else:
                open_questions.append(f"{finding}, but up to {chance_bound:.4f} may be chance with so few keys")
        elif not measure <= limit:
            open_questions.append(f"{measure_name} is unknown")
    if limits.feedback_event:
        _judge_feedback(comparison, limits, counterevidence, open_questions)
    # A few keys prove nothing.
    if counterevidence and min(comparison.keys.values()) >= min(limits.keys_min, EVIDENCE_KEYS_MIN):
        return "abandon", counterevidence
    return ("undecided", counterevidence + open_questions) if counterevidence or open_questions else ("publish", [])


def _judge_feedback(
    comparison: ArmComparison, limits: CanaryConfig, counterevidence: list[str], open_questions: list[str]
) -> None:
    event, min_ratio = limits.feedback_event, limits.feedback_ratio_min
    ratio = comparison.feedback.get(event)
    if ratio is None:
        open_questions.append(f"no {event} was reported")
    elif not ratio >= min_ratio:
        finding = f"{event} per request is {ratio:.4f} of live's, at least {min_ratio:g} is needed"
        chance_bound = comparison.feedback_chance[event]
        if ratio < 1 - chance_bound:
            counterevidence.append(finding)
        else:
            open_questions.append(f"{finding}, but values down to {max(0.0, 1 - chance_bound):.4f} may be chance")


def mix_shift(first_counts: Mapping[str, int], second_counts: Mapping[str, int]) -> float:
    """Return the total variation distance of two distributions of counts."""
    first_total, second_total = sum(first_counts.values()), sum(second_counts.values())
    if not first_total or not second_total:
        return 0.0 if first_total == second_total else 1.0
    answer_sources = {*first_counts, *second_counts}
    return 0.5 * sum(
        abs(first_counts.get(answer_source, 0) / first_total - second_counts.get(answer_source, 0) / second_total)
        for answer_source in answer_sources
    )


def shift_by_chance(live: CanaryArmTotals, canary: CanaryArmTotals) -> float:
    """Return the source_shift that arms of one generation exceed with probability `CHANCE_PROBABILITY_MAX`."""
    if not live.effective_key_count or not canary.effective_key_count:
        return math.inf
    answer_sources = {*live.keys_by_answer_source, *canary.keys_by_answer_source}
    log_odds = math.log(2 * len(answer_sources) / CHANCE_PROBABILITY_MAX)
    inverse_size_sum = 1 / live.effective_key_count + 1 / canary.effective_key_count
    shift_bound = log_odds / (3 * min(live.effective_key_count, canary.effective_key_count)) * len(answer_sources)
    for answer_source in answer_sources:
        pooled_share = (live.keys_by_answer_source[answer_source] + canary.keys_by_answer_source[answer_source]) / (
            live.key_estimate + canary.key_estimate
        )
        shift_bound += math.sqrt(2 * pooled_share * (1 - pooled_share) * log_odds * inverse_size_sum)
    return min(1.0, 0.5 * shift_bound)


def population_stability_index(expected_counts: Mapping[int, int], actual_counts: Mapping[int, int]) -> float:
    """Return the population stability index over at most ten equal bins of `expected_counts`.

    It is infinite if only one side is empty.
    """
    expected_total, actual_total = sum(expected_counts.values()), sum(actual_counts.values())
    if not expected_total or not actual_total:
        return 0.0 if expected_total == actual_total else math.inf
    bins: list[list[float]] = [[0.0, 0.0]]
    for bucket in sorted({*expected_counts, *actual_counts}):
        if bins[-1][0] >= expected_total / _PSI_BINS:
            bins.append([0.0, 0.0])
        bins[-1][0] += expected_counts.get(bucket, 0)
        bins[-1][1] += actual_counts.get(bucket, 0)
    index = 0.0
    for expected_count, actual_count in bins:
        expected_share = (expected_count + _PSI_SMOOTHING) / (expected_total + _PSI_SMOOTHING * len(bins))
        actual_share = (actual_count + _PSI_SMOOTHING) / (actual_total + _PSI_SMOOTHING * len(bins))
        index += (actual_share - expected_share) * math.log(actual_share / expected_share)
    return index


def psi_by_chance(live: CanaryArmTotals, canary: CanaryArmTotals) -> float:
    """Return the score_psi that arms of one generation exceed with probability `CHANCE_PROBABILITY_MAX`."""
    if not live.effective_key_count or not canary.effective_key_count:
        return math.inf
    inverse_size_sum = 0.0
    for arm in (live, canary):
        list_count = (
            arm.keys_by_top_score.total() or arm.key_estimate
        )  # an arm without lists is as certain as its number of keys allows
        inverse_size_sum += arm.key_estimate / (list_count * arm.effective_key_count)
    freedom_degrees = _PSI_BINS - 1
    spread = 2 / (9 * freedom_degrees)
    chi_square_quantile: float = freedom_degrees * (1 - spread + _NORMAL_QUANTILE * math.sqrt(spread)) ** 3
    return inverse_size_sum * chi_square_quantile


def _feedback_ratio(feedback_event: str, live: CanaryArmTotals, canary: CanaryArmTotals) -> tuple[float | None, float]:
    """Return (canary's rate divided by live's, how far below 1 that may be by chance)."""
    if not live.count_by_feedback_event[feedback_event] or not live.request_count or not canary.request_count:
        return None, math.inf
    expected_events = live.count_by_feedback_event[feedback_event] * canary.request_count / live.request_count
    chance_bound = _NORMAL_QUANTILE * math.sqrt(1 / expected_events + 1 / live.count_by_feedback_event[feedback_event])
    live_rate = live.count_by_feedback_event[feedback_event] / live.request_count
    return canary.count_by_feedback_event[feedback_event] / canary.request_count / live_rate, chance_bound


def ending_remark(config: NightConfig, generation: str) -> str:
    """Describe the canary that publishing this generation ends; empty without one, or if it is of this generation."""
    with open_releases(config) as releases:
        pointer, replicas = releases.control.read_pointer(), releases.control.replicas()
    canary = None if pointer is None else pointer.canary
    if canary is None or canary.generation == generation:
        return ""
    verdict, _ = decide(compare(replicas, canary), config.canary)
    return f"this ends the canary of {canary.generation} ({canary.percent:g} %, {verdict})"

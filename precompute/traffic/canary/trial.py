"""Canary: a verified generation answers a share of the requests, is compared with live, and published or abandoned."""

import argparse
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import NormalDist
from typing import Any, Literal, Self

from cache.config.night import CanaryConfig
from cache.control.control_keys import Control, Replica
from cache.control.states import State, demand
from cache.errors import ConfigError, Conflict, Refused
from cache.store.releases import Canary, Release
from precompute.builds.build import Build
from precompute.bulk.governor import open_governor
from precompute.config.progress import Progress, Step, quiet
from precompute.config.settings import NightConfig
from precompute.releases import moves
from precompute.releases.moves import new_attempt
from precompute.releases.release_log import Releases, demand_reason, open_releases
from precompute.releases.staging import StagingNote, staged
from precompute.steps import publish as publish_step

Verdict = Literal["publish", "abandon", "undecided"]

ALPHA = 1e-4
"""Highest probability that a difference between two arms of one generation counts as more than chance."""

KEYS_FOR_EVIDENCE = 100
"""Least number of keys for evidence: the approximations of `ArmComparison` need some."""

_Z = NormalDist().inv_cdf(1 - ALPHA)

_PSI_BINS = 10

_PSI_SMOOTHING = 0.5


def command(
    config: NightConfig, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    """Run `canary start|status|publish|abandon`."""
    attempt: str = arguments.attempt or new_attempt()
    match arguments.action:
        case "start":
            return start(
                config, arguments.generation, percent=arguments.percent, attempt=attempt,
                progress=progress,
            )  # fmt: skip
        case "publish":
            return publish(config, arguments.generation, attempt=attempt, progress=progress)
        case "abandon":
            reason = arguments.reason
            return abandon(config, arguments.generation, reason=reason, attempt=attempt)
    return status(config)


def start(
    config: NightConfig,
    generation: str | None,
    *,
    percent: float | None = None,
    attempt: str,
    progress: Progress = quiet,
) -> Step:
    """Let a verified generation (by default the newest) answer a share of the requests, once replicas hold it ready.

    A canary that runs keeps its share unless another one is named, which starts its counts anew.

    Raises Conflict if there is none, if it may not be published either, or if replicas do not become ready.
    """
    if percent is not None and not 0 < percent <= 100:
        raise ConfigError(f"percent is above 0 and at most 100, not {percent:g}", field="percent")
    with (
        open_releases(config) as releases,
        open_governor(config.governor, releases.control) as governor,
    ):
        generation_id = generation or _newest_verified(releases.control)
        canary = _canary(releases.control)
        traffic_percent, changes = config.canary.percent if percent is None else percent, None
        if canary is not None and canary.generation == generation_id:
            traffic_percent = canary.percent if percent is None else percent
            changes = canary.percent if traffic_percent != canary.percent else None
        if canary is None or (canary.generation, canary.percent) != (
            generation_id,
            traffic_percent,
        ):
            state = releases.state(generation_id)
            if state is not State.LIVE:
                demand("canary", generation_id, state)
            # What may not be published is not tried out either; pages that Redis has lost are streamed again.
            report = Build.of(config, {"generation": generation_id}).read_report("verified") or {}
            moved = moves.prepare_publish(
                releases, generation_id, attempt=attempt, verified=report, governor=governor
            )
            if moved is not None:
                raise Conflict(f"{generation_id} is live already", generation=generation_id)
            with staged(
                releases.control, generation_id, config.flip, attempt=attempt, progress=progress
            ):
                moves.start_canary(releases,
                    generation_id, traffic_percent, attempt, verified=report, event=config.canary.feedback_event,
                    governor=governor,
                )  # fmt: skip
        else:
            StagingNote(releases.control).clear(attempt, generation_id)
    restarted = f"the share was {changes:g} %, so counting starts anew" if changes else None
    return {
        "generation": generation_id,
        "percent": traffic_percent,
        **({"note": restarted} if restarted else {}),
    }


def status(config: NightConfig) -> Step:
    """Return the running canary, the comparison of both arms, and the current verdict."""
    with open_releases(config) as releases:
        canary = _running(releases.control)
        replicas = releases.control.replicas()
        comparison, seconds = compare(replicas, canary), releases.clock() - canary.since
    verdict, against = decide(comparison, config.canary)
    return {
        "generation": canary.generation,
        "percent": canary.percent,
        "seconds": round(seconds, 1),
        "replicas": len(replicas),
        "holding": sum(canary.generation in replica.ready for replica in replicas),
        **asdict(comparison),
        "verdict": verdict,
        "against": against,
    }


def publish(
    config: NightConfig,
    generation: str | None = None,
    *,
    attempt: str,
    progress: Progress = quiet,
) -> Step:
    """Publish the canary's generation like any other; return also its current verdict.

    Raises Conflict if another canary than the named one runs.
    """
    with open_releases(config) as releases:
        canary = _running(releases.control, generation)
        verdict, against = decide(compare(releases.control.replicas(), canary), config.canary)
    build = {"generation": canary.generation}
    published = publish_step.run(config, build, attempt=attempt, progress=progress)
    return {**published, "verdict": verdict, "against": against}


def abandon(
    config: NightConfig, generation: str | None = None, *, reason: str | None, attempt: str
) -> Step:
    """End the canary: live answers every request again, and the canary's generation is never published.

    Raises ConfigError without a reason, Conflict if another canary than the named one runs.
    """
    reason = demand_reason("abandoning a canary", reason)
    with open_releases(config) as releases:
        # Whoever was killed right after ending it asks again, and finds its own work.
        if (abandonment := _ended_by(releases, attempt, generation)) is not None:
            moves.end_canary(
                releases, attempt, reason, abandon=True
            )  # a Conflict unless it still stands
            return {"generation": abandonment.generation, "abandoned": abandonment.reason}
        generation_id = _running(releases.control, generation).generation
        moves.end_canary(releases, attempt, reason, abandon=True)
    return {"generation": generation_id, "abandoned": reason}


def is_over(config: NightConfig, generation: str) -> bool:
    """True if the canary has run for `wait_s` and can be decided about, or `wait_max_s`, or does not run any more."""
    with open_releases(config) as releases:
        canary = _canary(releases.control)
        if canary is None or canary.generation != generation:
            return True
        seconds, replicas = releases.clock() - canary.since, releases.control.replicas()
    if seconds < config.canary.wait_s:
        return False
    decided = decide(compare(replicas, canary), config.canary)[0] != "undecided"
    return decided or seconds >= config.canary.wait_max_s


def conclude(config: NightConfig, generation: str, *, attempt: str) -> Step:
    """Publish the canary, or abandon it and raise Refused with the reasons.

    Raises Conflict, and leaves it running, while the counts are too small to decide.
    """
    with open_releases(config) as releases:
        pointer = releases.control.pointer()
        if pointer is not None and pointer.generation == generation:
            return {"generation": generation, "published": True}
        canary = None if pointer is None else pointer.canary
        is_over = canary is None or canary.generation != generation
        if is_over and (abandonment := _ended_by(releases, attempt, generation)) is not None:
            raise Refused(f"{generation} was abandoned: {abandonment.reason}", rule="canary")
        comparison = compare(releases.control.replicas(), _running(releases.control, generation))
        verdict, against = decide(comparison, config.canary)
        if verdict == "undecided":
            raise Conflict(
                f"{generation} goes on as a canary, for nothing decides about it yet: {'; '.join(against)}. Conclude "
                "again later, or end it by `canary publish` or `canary abandon`",
                **asdict(comparison),
            )
        if verdict == "abandon":
            reason = "canary: " + "; ".join(against)
            moves.end_canary(releases, attempt, reason, abandon=True)
            raise Refused(
                f"{generation} was abandoned, the live generation goes on: {'; '.join(against)}",
                rule="canary",
                **asdict(comparison),
            )
    publish_step.run(config, {"generation": generation}, attempt=attempt)
    return {"generation": generation, "published": True, **asdict(comparison)}


def has_live(config: NightConfig) -> bool:
    """True if a generation is live that a canary could be compared with."""
    with open_releases(config) as releases:
        return releases.ledger().live is not None


def _newest_verified(control: Control) -> str:
    if (canary := _canary(control)) is not None:
        return canary.generation  # a retry of the start
    rows = control.rows()
    verified = sorted(
        generation_id for generation_id, row in rows.items() if row.state is State.VERIFIED
    )
    if not verified:
        raise Conflict("no generation is verified and waiting: run the night up to `verify` first")
    return verified[-1]


def _canary(control: Control) -> Canary | None:
    pointer = control.pointer()
    return None if pointer is None else pointer.canary


def _running(control: Control, generation: str | None = None) -> Canary:
    if (canary := _canary(control)) is None:
        generation_clause = "" if generation is None else f" of {generation}"
        raise Conflict(
            f"no canary{generation_clause} is running: start one with `canary start GENERATION`"
        )
    if generation not in (None, canary.generation):
        raise Conflict(
            f"no canary of {generation} is running: the one that runs is {canary.generation}",
            generation=canary.generation,
        )
    return canary


def _ended_by(releases: Releases, attempt: str, generation: str | None) -> Release | None:
    """Return the record of the canary that this attempt abandoned."""
    return next(
        (
            release
            for release in reversed(releases.settle())
            if release.action == "end_canary" and release.attempt == attempt and release.is_done
            and release.abandoned and generation in (None, release.generation)
        ),
        None,
    )  # fmt: skip


@dataclass(slots=True)
class CanaryArmTotals:
    """Totals of one arm over all replicas: requests and feedback; per key, once, its source and top score's bucket.

    `keys`, `kinds`, `scores` and `score_sum` are estimates for all keys; `certain`: how many independent keys they
    are worth.
    """

    requests: int = 0
    keys: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    scores: Counter[int] = field(default_factory=Counter)
    score_sum: float = 0.0
    feedback: Counter[str] = field(default_factory=Counter)
    _squares: float = 0.0
    _replicas: int = 0

    @classmethod
    def of(cls, heartbeat_counts: Iterable[Mapping[str, Any]]) -> Self:
        """Sum the heartbeats' counts of this arm."""
        total = cls()
        for replica_counts in heartbeat_counts:
            total.requests += int(replica_counts["requests"])
            total.feedback.update(replica_counts["feedback"])
            keys, weight = int(replica_counts["keys"]), int(replica_counts["weight"])
            if not keys:
                continue
            total._replicas += 1
            total._squares += weight * weight * keys
            total.keys += weight * keys
            total.kinds.update(
                {kind: weight * count for kind, count in replica_counts["kinds"].items()}
            )
            total.scores.update(
                {int(at): weight * count for at, count in replica_counts["scores"].items()}
            )
            total.score_sum += weight * float(replica_counts["score_sum"])
        return total

    @property
    def certain(self) -> float:
        """Effective number of keys, as if each had been counted once and with equal weight."""
        return self.keys**2 / self._squares / self._replicas if self.keys else 0.0

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
    samples of different rates (Kish's effective sample size).
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
            {"live": int(live.certain), "canary": int(canary.certain)},
            mix_shift(live.kinds, canary.kinds),
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
    kinds = {*live.kinds, *canary.kinds}
    deviation = math.log(2 * len(kinds) / ALPHA)
    apart = 1 / live.certain + 1 / canary.certain
    allowed = deviation / (3 * min(live.certain, canary.certain)) * len(kinds)
    for kind in kinds:
        pooled_share = (live.kinds[kind] + canary.kinds[kind]) / (live.keys + canary.keys)
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

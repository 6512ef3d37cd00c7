"""Canary: a verified generation answers a share of the requests, is compared with live, and published or abandoned."""

import argparse
from dataclasses import asdict
from typing import Any

from cache.control.control_keys import Control
from cache.control.states import GenerationState, demand_allowed
from cache.errors import ConfigError, Conflict, Refused
from cache.store.audit import audited
from cache.store.releases import Canary, Release
from precompute.builds.build import Build
from precompute.builds.reports import VERIFY_REPORT, BuildId
from precompute.bulk.governor import open_governor
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig
from precompute.releases import moves
from precompute.releases.moves import new_attempt
from precompute.releases.release_log import Releases, demand_reason, open_releases
from precompute.releases.staging import StagingNote, staged
from precompute.steps import publish as publish_step
from precompute.traffic.arm_comparison import compare, decide


def command(config: NightConfig, arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
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
) -> dict[str, Any]:
    """Let a verified generation (by default the newest) answer a share of the requests, once replicas hold it ready.

    A running canary keeps its share unless another one is given, which restarts its counts.

    Raises Conflict if there is no such generation, if it may not be published, or if replicas do not become ready.
    """
    if percent is not None and not 0 < percent <= 100:
        raise ConfigError(f"percent must be above 0 and at most 100, not {percent:g}", field="percent")
    with open_releases(config) as releases, open_governor(config.governor, releases.control) as governor:
        generation_id = generation or _newest_verified(releases.control)
        canary = _pointer_canary(releases.control)
        traffic_percent, former_percent = (config.canary.percent if percent is None else percent, None)
        if canary is not None and canary.generation == generation_id:
            traffic_percent = canary.percent if percent is None else percent
            former_percent = canary.percent if traffic_percent != canary.percent else None
        if canary is None or (canary.generation, canary.percent) != (generation_id, traffic_percent):
            state = releases.state(generation_id)
            if state is not GenerationState.LIVE:
                demand_allowed("canary", generation_id, state)
            # A canary must meet the conditions of a publish; pages that Redis has lost are streamed again.
            verify_report = Build.of(config, {"generation": generation_id}).read_report(VERIFY_REPORT) or {}
            move_result = moves.prepare_publish(
                releases, generation_id, attempt=attempt, verified=verify_report, governor=governor
            )
            if move_result is not None:
                raise Conflict(f"{generation_id} is live already", generation=generation_id)
            with staged(releases.control, generation_id, config.flip, attempt=attempt, progress=progress):
                moves.start_canary(releases,
                    generation_id, traffic_percent, attempt, verified=verify_report,
                    feedback_event=config.canary.feedback_event,
                    governor=governor,
                )  # fmt: skip
        else:
            StagingNote(releases.control).clear(attempt, generation_id)
    restart_note = f"the share was {former_percent:g} %, so counting restarts" if former_percent else None
    return {"generation": generation_id, "percent": traffic_percent, **({"note": restart_note} if restart_note else {})}


def status(config: NightConfig) -> dict[str, Any]:
    """Return the running canary, the comparison of both arms, and the current verdict."""
    with open_releases(config) as releases:
        canary = _demand_running_canary(releases.control)
        replicas = releases.control.replicas()
        comparison, running_s = compare(replicas, canary), releases.clock() - canary.since
    verdict, reasons = decide(comparison, config.canary)
    return {
        "generation": canary.generation,
        "percent": canary.percent,
        "seconds": round(running_s, 1),
        "replicas": len(replicas),
        "holding": sum(canary.generation in replica.ready_generations for replica in replicas),
        **asdict(comparison),
        "verdict": verdict,
        "against": reasons,
    }


def publish(
    config: NightConfig, generation: str | None = None, *, attempt: str, progress: Progress = quiet
) -> dict[str, Any]:
    """Publish the canary's generation like any other; return also its current verdict.

    Raises Conflict if another canary than the given one runs.
    """
    with open_releases(config) as releases:
        canary = _demand_running_canary(releases.control, generation)
        verdict, reasons = decide(compare(releases.control.replicas(), canary), config.canary)
    build: BuildId = {"generation": canary.generation}
    publish_result = publish_step.run(config, build, attempt=attempt, progress=progress)
    return {**publish_result, "verdict": verdict, "against": reasons}


def abandon(config: NightConfig, generation: str | None = None, *, reason: str | None, attempt: str) -> dict[str, Any]:
    """End the canary: live answers every request again, and the generation needs another verification.

    Raises ConfigError without a reason, Conflict if another canary than the given one runs.
    """
    reason = demand_reason("abandoning a canary", reason)
    with open_releases(config) as releases:
        # A retry after a crash right after the end of the canary finds its own record.
        if (abandonment := _abandonment_by(releases, attempt, generation)) is not None:
            moves.end_canary(releases, attempt, reason, is_abandoned=True)  # Conflict if undone since
            return {"generation": abandonment.generation, "abandoned": abandonment.reason}
        generation_id = _demand_running_canary(releases.control, generation).generation
        with audited(
            releases.store, "canary_abandon", generation_id, actor=config.actor, reason=reason, attempt=attempt
        ):
            moves.end_canary(releases, attempt, reason, is_abandoned=True)
    return {"generation": generation_id, "abandoned": reason}


def is_over(config: NightConfig, generation: str) -> bool:
    """True if the canary ran for `wait_s` and is decided, or for `wait_max_s`, or does not run."""
    with open_releases(config) as releases:
        canary = _pointer_canary(releases.control)
        if canary is None or canary.generation != generation:
            return True
        running_s, replicas = releases.clock() - canary.since, releases.control.replicas()
    if running_s < config.canary.wait_s:
        return False
    is_decided = decide(compare(replicas, canary), config.canary)[0] != "undecided"
    return is_decided or running_s >= config.canary.wait_max_s


def publish_or_abandon(config: NightConfig, generation: str, *, attempt: str) -> dict[str, Any]:
    """Publish the canary, or abandon it and raise Refused with the reasons.

    Raises Conflict, and leaves the canary running, while the counts are too small to decide.
    """
    with open_releases(config) as releases:
        pointer = releases.control.read_pointer()
        if pointer is not None and pointer.generation == generation:
            return {"generation": generation, "published": True}
        canary = None if pointer is None else pointer.canary
        has_ended = canary is None or canary.generation != generation
        if has_ended and (abandonment := _abandonment_by(releases, attempt, generation)) is not None:
            raise Refused(f"{generation} was abandoned: {abandonment.reason}", rule="canary")
        comparison = compare(releases.control.replicas(), _demand_running_canary(releases.control, generation))
        verdict, reasons = decide(comparison, config.canary)
        if verdict == "undecided":
            raise Conflict(
                f"{generation} stays a canary, since it is undecided: {'; '.join(reasons)}. Conclude "
                "again later, or end it by `canary publish` or `canary abandon`",
                **asdict(comparison),
            )
        if verdict == "abandon":
            reason = "canary: " + "; ".join(reasons)
            with audited(
                releases.store, "canary_abandon", generation, actor=config.actor, reason=reason, attempt=attempt
            ):
                moves.end_canary(releases, attempt, reason, is_abandoned=True)
            raise Refused(
                f"{generation} was abandoned, the live generation stays: {'; '.join(reasons)}",
                rule="canary",
                **asdict(comparison),
            )
    publish_step.run(config, {"generation": generation}, attempt=attempt)
    return {"generation": generation, "published": True, **asdict(comparison)}


def has_live(config: NightConfig) -> bool:
    """True if there is a live generation to compare a canary with."""
    with open_releases(config) as releases:
        return releases.ledger().live_generation is not None


def _newest_verified(control: Control) -> str:
    if (canary := _pointer_canary(control)) is not None:
        return canary.generation  # `start` is retried
    rows = control.rows()
    verified_ids = sorted(generation_id for generation_id, row in rows.items() if row.state is GenerationState.VERIFIED)
    if not verified_ids:
        raise Conflict("no generation is verified and waiting: run the night up to `verify` first")
    return verified_ids[-1]


def _pointer_canary(control: Control) -> Canary | None:
    pointer = control.read_pointer()
    return None if pointer is None else pointer.canary


def _demand_running_canary(control: Control, generation: str | None = None) -> Canary:
    if (canary := _pointer_canary(control)) is None:
        generation_clause = "" if generation is None else f" of {generation}"
        raise Conflict(f"no canary{generation_clause} is running: start one with `canary start GENERATION`")
    if generation not in (None, canary.generation):
        raise Conflict(
            f"no canary of {generation} is running: the running one is {canary.generation}",
            generation=canary.generation,
        )
    return canary


def _abandonment_by(releases: Releases, attempt: str, generation: str | None) -> Release | None:
    """Return the record of the canary that this attempt abandoned, None without one."""
    return next(
        (
            release
            for release in reversed(releases.settle())
            if release.action == "end_canary" and release.attempt == attempt and release.is_done
            and release.abandoned and generation in (None, release.generation)
        ),
        None,
    )  # fmt: skip

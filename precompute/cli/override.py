"""Command `override`: a person lets a generation pass a gate, for a recorded reason."""

import argparse
from typing import Any

from cache.errors import Conflict, UnknownGeneration
from cache.store.artefacts import read_manifest
from cache.store.audit import audited
from precompute.config.progress import Progress
from precompute.config.settings import NightConfig
from precompute.gates.judge import demand_overridable
from precompute.releases.moves import new_attempt
from precompute.releases.release_log import Releases, open_releases


def override(config: NightConfig, generation: str, *, rule: str, reason: str, attempt: str) -> None:
    """Record that `rule` may fail for this generation; its next `verify` passes the rule and stores the reason.

    Raises Refused for an integrity rule or an unknown one, ConfigError without a reason, Conflict for a generation that
    is published, retired or unknown, or that this rule has not refused.
    """
    demand_overridable(rule)
    subject = f"{generation}, rule {rule}"
    with (
        audited(config.store(), "override", subject, actor=config.actor, reason=reason, attempt=attempt),
        open_releases(config) as releases,
    ):
        _demand_refusal(releases, generation, rule)
        releases.override(generation, rule=rule, reason=reason, attempt=attempt)


def _demand_refusal(releases: Releases, generation: str, rule: str) -> None:
    """Raise Conflict unless the rule has failed in a verification: only a known failure can be overridden."""
    try:
        gates = read_manifest(releases.store, generation).gates
    except UnknownGeneration:
        gates = ()
    failed_rules = {str(gate["rule"]) for gate in gates if not gate["passed"] or gate.get("overridden")}
    refusals = (
        release for release in releases.history() if release.action == "refuse" and release.generation == generation
    )
    if rule in failed_rules or any(_has_named_rule(release.reason, rule) for release in refusals):
        return
    failures_text = (
        f"the failed rules are {', '.join(sorted(failed_rules))}" if failed_rules else "no rule of it failed"
    )
    raise Conflict(
        f"{rule} has not refused {generation}, so there is nothing to override: {failures_text}; `verify` shows the "
        "values",
        generation=generation,
        rule=rule,
    )


def _has_named_rule(reasons_text: str, rule: str) -> bool:
    """True if the reasons of a refusal, as `verify` writes them, name the rule."""
    return any(reason.startswith(f"{rule} is ") for reason in reasons_text.split("; "))


def command(config: NightConfig, arguments: argparse.Namespace, _progress: Progress) -> dict[str, Any]:
    """Override one rule; return its record and the next command."""
    generation, rule = arguments.generation, arguments.rule
    override(config, generation, rule=rule, reason=arguments.reason, attempt=new_attempt())
    return {"generation": generation, "overridden": rule, "next": f"larder verify {generation}"}

"""Override: a person lets a generation pass a gate, and says why; the reason is kept with it."""

import argparse
import uuid
from typing import Any

from precompute.build import Progress
from precompute.config import NightConfig
from precompute.gates import demand_overridable
from precompute.registry import open_releases


def override(config: NightConfig, generation: str, *, rule: str, reason: str, attempt: str) -> None:
    """Record that `rule` may fail for this generation; its next `verify` passes it and keeps the reason.

    Raises Refused for a rule that protects integrity or is none, ConfigError without a reason, Conflict for a
    generation that is published, retired or unknown.
    """
    demand_overridable(rule)
    with open_releases(config) as releases:
        releases.override(generation, rule=rule, reason=reason, attempt=attempt)


def command(
    config: NightConfig, arguments: argparse.Namespace, _progress: Progress
) -> dict[str, Any]:
    """One rule overridden; what to run next."""
    attempt = f"shell-{uuid.uuid4().hex[:12]}"
    generation, rule = arguments.generation, arguments.rule
    override(config, generation, rule=rule, reason=arguments.reason, attempt=attempt)
    return {
        "generation": generation,
        "overridden": rule,
        "next": f"python -m precompute verify {generation}",
    }

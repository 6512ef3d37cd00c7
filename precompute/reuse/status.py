"""Shares of copied users per generation, for the command `status`."""

from collections.abc import Mapping
from typing import Any

from cache.format.manifest import Manifest
from cache.reuse import Reuse
from precompute.reuse.reasons import users_in_words


def reuse_field(manifest: Manifest) -> dict[str, Any] | None:
    """Return the fact of copies as JSON; None if the manifest has none, or one of another version."""
    reuse = Reuse.of(manifest.facts)
    return None if reuse is None else reuse.to_json()


def copied_share_text(reuse_fact: Mapping[str, Any] | None) -> str:
    """Format the share of users whose records were copied; "-" if unknown."""
    copied_fraction = None if reuse_fact is None else reuse_fact["share"]
    return "-" if copied_fraction is None else f"{copied_fraction:.1%}"


def copy_lines(namespace_status: Mapping[str, Any]) -> list[str]:
    """Return lines on the copies of the live generation, and of the latest nights up to it."""
    reuse = next(
        (
            generation_status["reuse"]
            for generation_status in namespace_status["generations"]
            if "live" in generation_status["roles"]
        ),
        None,
    )
    if reuse is None:
        return []
    recent_nights, reuse_line = (reuse["lately"], f"users of the live generation: {users_in_words(reuse['users'])}")
    if reuse["base"] is None:
        reuse_line += f": {reuse['why']}" if reuse["why"] else ""
    else:
        reuse_line += f"; {reuse['spared_s']:,.1f} s spared"
    if recent_nights["nights"] > 1 and recent_nights["share"] is not None:
        reuse_line += (
            f"; of the last {recent_nights['nights']} nights {recent_nights['share']:.1%} copied, "
            f"{recent_nights['spared_s']:,.1f} s spared a night"
        )
    return [reuse_line]

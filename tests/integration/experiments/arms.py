"""Namespaces for the arms of one experiment: one store, one Redis, and a night with a different cut each."""

from dataclasses import replace
from pathlib import Path

from precompute.config.settings import NightConfig
from tests.integration.fleet import control_of
from tests.integration.nights import build_night, publish_night

CUTS = ("2026-01-28T00:00:00Z", "2026-01-27T00:00:00Z", "2026-01-26T00:00:00Z")


def arms(folder: Path, redis_url: str, count: int = 1, *, users: int = 60, items: int = 40) -> tuple[NightConfig, ...]:
    """Return the service's own namespace and more; no generation is live in two of them."""
    own_config = build_night(folder, redis_url, users=users, items=items)
    arm_configs = [replace(own_config, namespace=f"{own_config.namespace}-{letter}") for letter in "bcd"[:count]]
    for arm_config, cut in zip(arm_configs, CUTS, strict=False):
        publish_night(arm_config, cut)
    assert len({live_of(config) for config in (own_config, *arm_configs)}) == count + 1
    return own_config, *arm_configs


def live_of(config: NightConfig) -> str:
    """The live generation of a namespace."""
    with control_of(config) as control:
        pointer = control.read_pointer()
    assert pointer is not None
    return pointer.generation

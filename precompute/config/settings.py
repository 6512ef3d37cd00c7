"""Settings of this process's night, and how many generations it keeps; their model is `cache.config.night`."""

import os
from collections.abc import Mapping
from typing import Any

from cache.config.night import (
    FacetConfig,
    FilterConfig,
    GateThresholds,
    GovernorConfig,
    NightConfig,
    ReferenceConfig,
    Sources,
    TableConfig,
    parse_time,
)
from cache.config.variables import demand_spelled_variables

__all__ = [
    "FacetConfig",
    "FilterConfig",
    "GateThresholds",
    "GovernorConfig",
    "NightConfig",
    "ReferenceConfig",
    "Sources",
    "TableConfig",
    "night_config",
    "parse_time",
    "peak_generation_count",
    "retained_count",
]


def night_config(path: str | None = None, environment: Mapping[str, str] = os.environ, **overrides: Any) -> NightConfig:
    """Return the configuration of this process: a file, then the environment, then the command line."""
    demand_spelled_variables(environment)
    return NightConfig.configured(environment, path, **overrides)


def retained_count(kept_generations: int) -> int:
    """Return the number of superseded generations that a sweep keeps; it includes the newest one, for a roll back."""
    return max(1, kept_generations)


def peak_generation_count(kept_generations: int) -> int:
    """Return the largest number of generations in Redis and on each host at one time.

    They are the live one, the retained ones, one that is being built, and one unpublished. The unpublished one is a
    canary, or a generation of a refused or failed night that must not be swept yet.
    """
    return 1 + retained_count(kept_generations) + 1 + 1

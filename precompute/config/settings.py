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
    """Return the configuration of this process: file, then environment, then command line."""
    return NightConfig.configured(environment, path, **overrides)


def retained_count(keep: int) -> int:
    """Superseded generations that a sweep leaves; the newest one, where a roll back lands, is always among them."""
    return max(1, keep)


def peak_generation_count(keep: int) -> int:
    """Return the number of generations in Redis and on each host: live, retained, one in the making, one unpublished.

    The last is a canary, or a refused or broken night's generation that no sweep may touch yet.
    """
    return 1 + retained_count(keep) + 1 + 1

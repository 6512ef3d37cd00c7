"""Settings of this process' night; their model is `cache.config.night`."""

import os
from collections.abc import Mapping
from typing import Any

from cache.config.gates import GateThresholds
from cache.config.night import NightConfig, parse_time
from cache.config.sections import (
    FacetConfig,
    FilterConfig,
    GovernorConfig,
    ReferenceConfig,
    Sources,
    TableConfig,
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
]


def night_config(
    path: str | None = None, environment: Mapping[str, str] = os.environ, **overrides: Any
) -> NightConfig:
    """The configuration of this process: file, then environment, then what the command line said."""
    return NightConfig.configured(environment, path, **overrides)

"""Settings of `larder`'s own commands, as nights and the service read them."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cache.config.night import NightConfig

FILE = "larder.toml"
"""Settings in the current folder, where neither --config nor LARDER_CONFIG names another file."""


def night_settings() -> "NightConfig":
    """Settings of the night from LARDER_CONFIG, which `larder` has set, and the environment; raises ConfigError."""
    from cache.config.night import NightConfig  # pydantic: not for --help

    return NightConfig.configured(os.environ)

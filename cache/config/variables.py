"""Names of all environment variables that Larder reads, and a check for misspelled ones."""

import difflib
import re
from collections.abc import Mapping

from cache.config.events import EventsConfig
from cache.config.night import NightConfig
from cache.config.section import nested_section_classes, variables_by_setting
from cache.config.serving import ServingConfig
from cache.config.timetable import DagConfig
from cache.errors import ConfigError

OTHER_VARIABLES = frozenset({
    "LARDER_CA", "LARDER_COLUMNS", "LARDER_CONFIG", "LARDER_DATA", "LARDER_EVENTS_FSYNC", "LARDER_EVENTS_MAXMEMORY",
    "LARDER_GPU_SLOTS", "LARDER_KERNEL", "LARDER_LOADER_PASSWORD", "LARDER_PARALLELISM", "LARDER_PRODUCER_PASSWORD",
    "LARDER_READER_PASSWORD", "LARDER_REDIS_MAXMEMORY", "LARDER_REDIS_SERVER", "LARDER_SCORE_QUEUE",
    "LARDER_UPGRADE_FROM", "LARDER_WITHOUT_FROZEN_COMMIT",
})  # fmt: skip
"""Variables that are no settings: of commands, compose files and tests."""

_PREFIX = "LARDER_"
_TEST_PREFIX = "LARDER_TEST_"

_KUBERNETES_PATTERN = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP)")
"""Variables that Kubernetes sets in each pod for a Service whose name begins with `larder`."""

_SIMILARITY_MIN = 0.85
"""`difflib`'s ratio from which a name counts as a misspelling of a known one."""


def setting_variables() -> frozenset[str]:
    """Return the names of the variables of all settings."""
    section_classes = [
        NightConfig,
        ServingConfig,
        EventsConfig,
        DagConfig,
        *nested_section_classes(NightConfig).values(),
    ]
    return frozenset(name for section_class in section_classes for name in variables_by_setting(section_class).values())


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the names that begin with `LARDER_`, have a value, and are read by nothing; sorted."""
    known_names = OTHER_VARIABLES | setting_variables()
    return sorted(
        name
        for name, text in environ.items()
        if name.startswith(_PREFIX)
        and text
        and name not in known_names
        and not name.startswith(_TEST_PREFIX)
        and not _KUBERNETES_PATTERN.search(name)
    )


def demand_spelled_variables(environ: Mapping[str, str]) -> None:
    """Raise ConfigError for an unknown variable whose name is nearly that of a known one.

    Without what it sets, a tokens file for instance, the service would start open. Other unknown names are accepted:
    they may belong to a team's own deployment.
    """
    known_names = OTHER_VARIABLES | setting_variables()
    for name in unknown_variables(environ):
        if similar_names := difflib.get_close_matches(name, known_names, n=1, cutoff=_SIMILARITY_MIN):
            raise ConfigError(
                f"{name}: there is no such variable; did you mean {similar_names[0]}? Unset it if it is not "
                "Larder's, or give it another prefix than LARDER_"
            )

"""Table of the `larder` commands with their modules and extras, the help page, and the night's settings."""

import os
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

from cache.process.command_line import PRECOMPUTE_MODULES, SERVING_MODULES, missing_extra

if TYPE_CHECKING:
    from cache.config.night import NightConfig

MODULES_BY_EXTRA: Final[Mapping[str, tuple[str, ...]]] = {
    "precompute": PRECOMPUTE_MODULES,
    "serving": SERVING_MODULES,
    "airflow": ("airflow", *PRECOMPUTE_MODULES),
    "client": ("httpx",),
    "completion": ("shtab",),
    "top": ("rich",),
}
"""Extra -> modules whose presence shows that it is installed."""

DEMO_EXTRAS: Final = ("airflow", "client", "serving")
PRECOMPUTE_EXTRAS: Final = ("precompute",)

NIGHT_COMMANDS_MODULE: Final = "infra.cli.night_commands"
"""Module of all commands that `python -m precompute` has under the same names."""

SETTINGS_FILE = "larder.toml"
"""Settings file in the current folder, read if neither --config nor LARDER_CONFIG is given."""

GROUPS: Final = ("Start", "Night", "Day", "Releases", "Care", "Steps")
"""Groups of commands, in the order of the help page."""

HELP_COLUMNS = 79
_GROUP_COLUMNS, _NAME_COLUMNS = 10, 9
_HELP_START_TEXT = "usage: larder [--config FILE] COMMAND ...      larder COMMAND --help has more"

_HELP_END_TEXT = """\
Settings: --config, else LARDER_CONFIG, else larder.toml in this folder.
larder --version; larder completion bash, zsh or fish."""


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """One command; its `module_name` defines `main(argv, *, prog) -> int` and `argument_parser(prog)`.

    Commands without a `help_text` are listed together at the end of their group in the help.
    """

    name: str
    group_title: str
    module_name: str = NIGHT_COMMANDS_MODULE
    help_text: str = ""
    optional_extras: tuple[str, ...] = ()

    @property
    def reads_settings(self) -> bool:
        """True if a missing settings file deserves a warning: the command may have been run in the wrong folder."""
        return self.module_name in (NIGHT_COMMANDS_MODULE, "serving.__main__")

    @property
    def required_extras(self) -> tuple[str, ...]:
        """Extras that the command requires."""
        return ("precompute",) if self.module_name == NIGHT_COMMANDS_MODULE else self.optional_extras


ENTRIES: Final = (
    CommandEntry("init", "Start", "infra.cli.init.command",
                 "write larder.toml after inspecting your files", PRECOMPUTE_EXTRAS),
    CommandEntry("check", "Start", "infra.cli.check", "sources, bundle, Redis, Airflow: ok, or the remedy"),
    CommandEntry("import", "Start", "infra.cli.import_model",
                 "convert a model that another library fitted", PRECOMPUTE_EXTRAS),
    CommandEntry("demo", "Start", "infra.demo.__main__",
                 "a night, the service and a roll back, on synthetic data", DEMO_EXTRAS),
    CommandEntry("redis", "Start", "infra.cli.redis", "run a server for trials, until Ctrl-C"),
    CommandEntry("completion", "Start", "infra.cli.completion", optional_extras=("completion",)),
    CommandEntry("train", "Night", help_text="train the reference bundle, without a model of your own"),
    CommandEntry("night", "Night", help_text="compute, check and publish a generation"),
    CommandEntry("plan", "Night", help_text="estimate sizes and times of a night from a sample"),
    CommandEntry("hand-over", "Night"),
    CommandEntry("freshness", "Night"),
    CommandEntry("dags", "Night", "infra.cli.dags"),
    CommandEntry("serve", "Day", "serving.__main__", "answer over HTTP", ("serving",)),
    CommandEntry("lookup", "Day", "serving.cli.lookup", "ask a running service for one answer"),
    CommandEntry("explain", "Day", "serving.explain.cli", "explain why the service gives that answer"),
    CommandEntry("top", "Day", "serving.dashboard.terminal", "the dashboard in a terminal", ("top",)),
    CommandEntry("status", "Day", help_text="state of generations, replicas and the next night"),
    CommandEntry("publish", "Releases"),
    CommandEntry("roll-back", "Releases"),
    CommandEntry("canary", "Releases"),
    CommandEntry("experiment", "Releases"),
    CommandEntry("override", "Releases"),
    CommandEntry("pin", "Releases"),
    CommandEntry("unpin", "Releases"),
    CommandEntry("retire", "Releases"),
    CommandEntry("restore", "Releases"),
    CommandEntry("block", "Care"),
    CommandEntry("unblock", "Care"),
    CommandEntry("erase", "Care"),
    CommandEntry("audit", "Care"),
    CommandEntry("tokens", "Care", "serving.cli.tokens"),
    CommandEntry("worklist", "Care"),
    CommandEntry("take-events", "Steps"),
    CommandEntry("begin", "Steps"),
    CommandEntry("score", "Steps"),
    CommandEntry("index", "Steps"),
    CommandEntry("quantize", "Steps"),
    CommandEntry("load", "Steps"),
    CommandEntry("verify", "Steps"),
    CommandEntry("warm", "Steps"),
)  # fmt: skip
"""All commands, in the order of the help."""

ENTRY_BY_NAME: Final = {entry.name: entry for entry in ENTRIES}


def missing_extras_line(entry: CommandEntry) -> str | None:
    """Return a message that names a command's missing extras and how to install them; None if none is missing."""
    command_name, extras = f"larder {entry.name}", entry.required_extras
    missing_extras = [extra for extra in extras if missing_extra(command_name, extra, *MODULES_BY_EXTRA[extra])]
    module_names = (module_name for extra in missing_extras for module_name in MODULES_BY_EXTRA[extra])
    return missing_extra(command_name, ",".join(missing_extras), *module_names)


def help_page() -> str:
    """Return the help of all commands, which fits 24 lines by 80 columns."""
    entries_by_group = {
        group: list(group_entries) for group, group_entries in groupby(ENTRIES, lambda entry: entry.group_title)
    }
    help_lines = [help_line for group in GROUPS for help_line in _group_lines(group, entries_by_group[group])]
    return "\n".join([_HELP_START_TEXT, "", *help_lines, "", _HELP_END_TEXT])


def _group_lines(group: str, entries: list[CommandEntry]) -> Iterator[str]:
    help_rows = [f"{entry.name:<{_NAME_COLUMNS}} {entry.help_text}" for entry in entries if entry.help_text]
    if names_without_text := ", ".join(entry.name for entry in entries if not entry.help_text):
        help_rows += textwrap.wrap(names_without_text, HELP_COLUMNS - _GROUP_COLUMNS, break_on_hyphens=False)
    for row_index, help_row in enumerate(help_rows):
        yield f"{'' if row_index else group:<{_GROUP_COLUMNS}}{help_row}"


def read_night_settings() -> "NightConfig":
    """Return the night's settings from LARDER_CONFIG, which `larder` sets, and the environment; raise ConfigError."""
    from cache.config.night import NightConfig  # imports pydantic, which would slow down --help
    from cache.config.variables import demand_spelled_variables

    demand_spelled_variables(os.environ)
    return NightConfig.configured(os.environ)

"""Commands of `larder`: a line for each, with its module and extras; the help of all, and their settings."""

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
"""Extra -> modules that show whether it is installed."""

DEMO_EXTRAS: Final = ("airflow", "client", "serving")
PRECOMPUTE_EXTRAS: Final = ("precompute",)

NIGHT_COMMANDS_MODULE: Final = "infra.cli.night_commands"
"""Module of the commands that are those of `python -m precompute`, under the same names."""

SETTINGS_FILE = "larder.toml"
"""Settings in the current folder, where neither --config nor LARDER_CONFIG names another file."""

GROUPS: Final = ("Start", "Night", "Day", "Releases", "Care", "Steps")
"""Groups of the help, in its order."""

HELP_COLUMNS = 79
_GROUP_COLUMNS, _NAME_COLUMNS = 10, 9
_HELP_START_TEXT = "usage: larder [--config FILE] COMMAND ...      larder COMMAND --help tells more"

_HELP_END_TEXT = """\
Settings: --config, else LARDER_CONFIG, else larder.toml in this folder.
larder --version; larder completion bash, zsh or fish."""


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """Command of the table; `module` has `main(words, prog=...) -> int` and `argument_parser(prog)`.

    A command without a `text` shares the last line of its group in the help.
    """

    name: str
    group: str
    module: str = NIGHT_COMMANDS_MODULE
    text: str = ""
    extras: tuple[str, ...] = ()

    @property
    def reads_settings(self) -> bool:
        """True if the command follows the settings: without any it may run in the wrong folder."""
        return self.module in (NIGHT_COMMANDS_MODULE, "serving.__main__")

    @property
    def needs(self) -> tuple[str, ...]:
        """Extras without which it does not run."""
        return ("precompute",) if self.module == NIGHT_COMMANDS_MODULE else self.extras


ENTRIES: Final = (
    CommandEntry("init", "Start", "infra.cli.init.command",
                 "write larder.toml from a look at your files", PRECOMPUTE_EXTRAS),
    CommandEntry("check", "Start", "infra.cli.check", "sources, bundle, Redis, Airflow: ok, or what to do"),
    CommandEntry("import", "Start", "infra.cli.import_model", "a model that another library fitted", PRECOMPUTE_EXTRAS),
    CommandEntry("demo", "Start", "infra.demo.__main__",
                 "a night, the service and a roll back, on made-up data", DEMO_EXTRAS),
    CommandEntry("redis", "Start", "infra.cli.redis", "a server for trying things out, until Ctrl-C"),
    CommandEntry("completion", "Start", "infra.cli.completion", extras=("completion",)),
    CommandEntry("train", "Night", text="train the reference bundle, without a model of your own"),
    CommandEntry("night", "Night", text="compute, check and publish a generation"),
    CommandEntry("plan", "Night", text="sizes and times of a night, foretold from a sample"),
    CommandEntry("hand-over", "Night"),
    CommandEntry("freshness", "Night"),
    CommandEntry("dags", "Night", "infra.cli.dags"),
    CommandEntry("serve", "Day", "serving.__main__", "answer over HTTP", ("serving",)),
    CommandEntry("lookup", "Day", "serving.cli.lookup", "ask a running service for one answer"),
    CommandEntry("explain", "Day", "serving.explain.cli", "why it is that one"),
    CommandEntry("top", "Day", "serving.dashboard.terminal", "the dashboard in a terminal", ("top",)),
    CommandEntry("status", "Day", text="generations, replicas and the next night: is all well?"),
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
"""All commands, in the order of the help; one more is one more line."""

ENTRY_BY_NAME: Final = {entry.name: entry for entry in ENTRIES}


def missing_extras_line(entry: CommandEntry) -> str | None:
    """Line about the extras that a command needs and that are not installed; None if all are."""
    command_name, extras = f"larder {entry.name}", entry.needs
    missing_extras = [extra for extra in extras if missing_extra(command_name, extra, *MODULES_BY_EXTRA[extra])]
    module_names = (module_name for extra in missing_extras for module_name in MODULES_BY_EXTRA[extra])
    return missing_extra(command_name, ",".join(missing_extras), *module_names)


def help_page() -> str:
    """The help as text; it fits a screen of 24 lines by 80 columns, and each command has a longer one of its own."""
    entries_by_group = {
        group: list(group_entries) for group, group_entries in groupby(ENTRIES, lambda entry: entry.group)
    }
    help_lines = [help_line for group in GROUPS for help_line in _group_lines(group, entries_by_group[group])]
    return "\n".join([_HELP_START_TEXT, "", *help_lines, "", _HELP_END_TEXT])


def _group_lines(group: str, entries: list[CommandEntry]) -> Iterator[str]:
    help_rows = [f"{entry.name:<{_NAME_COLUMNS}} {entry.text}" for entry in entries if entry.text]
    if names_without_text := ", ".join(entry.name for entry in entries if not entry.text):
        help_rows += textwrap.wrap(names_without_text, HELP_COLUMNS - _GROUP_COLUMNS, break_on_hyphens=False)
    for row_index, help_row in enumerate(help_rows):
        yield f"{'' if row_index else group:<{_GROUP_COLUMNS}}{help_row}"


def read_night_settings() -> "NightConfig":
    """Settings of the night from LARDER_CONFIG, which `larder` has set, and the environment; raises ConfigError."""
    from cache.config.night import NightConfig  # pydantic: not for --help

    return NightConfig.configured(os.environ)

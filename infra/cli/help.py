"""The help of `larder`, which fits a screen of 24 lines by 80 columns; each command has a longer one of its own."""

import textwrap
from collections.abc import Iterator
from itertools import groupby

from infra.cli.commands import ENTRIES, GROUPS, CommandEntry

COLUMNS = 79
_GROUP, _NAME = 10, 9

_START = "usage: larder [--config FILE] COMMAND ...      larder COMMAND --help tells more"
_END = """\
Settings: --config, else LARDER_CONFIG, else larder.toml in this folder.
larder --version; larder completion bash, zsh or fish."""


def page() -> str:
    """The help as text."""
    groups = {
        name: list(group_entries)
        for name, group_entries in groupby(ENTRIES, lambda entry: entry.group)
    }
    lines = [line for name in GROUPS for line in _lines(name, groups[name])]
    return "\n".join([_START, "", *lines, "", _END])


def _lines(group: str, entries: list[CommandEntry]) -> Iterator[str]:
    rows = [f"{entry.name:<{_NAME}} {entry.text}" for entry in entries if entry.text]
    if names_without_text := ", ".join(entry.name for entry in entries if not entry.text):
        rows += textwrap.wrap(names_without_text, COLUMNS - _GROUP, break_on_hyphens=False)
    for number, row in enumerate(rows):
        yield f"{'' if number else group:<{_GROUP}}{row}"

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
    groups = {name: list(found) for name, found in groupby(ENTRIES, lambda each: each.group)}
    lines = [line for name in GROUPS for line in _lines(name, groups[name])]
    return "\n".join([_START, "", *lines, "", _END])


def _lines(group: str, entries: list[CommandEntry]) -> Iterator[str]:
    rows = [f"{each.name:<{_NAME}} {each.text}" for each in entries if each.text]
    if rest := ", ".join(each.name for each in entries if not each.text):
        rows += textwrap.wrap(rest, COLUMNS - _GROUP, break_on_hyphens=False)
    for number, row in enumerate(rows):
        yield f"{'' if number else group:<{_GROUP}}{row}"

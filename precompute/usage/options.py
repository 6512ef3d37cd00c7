"""Row of the command `worklist`, in a module without the command's imports."""

import argparse

from precompute.config.commands import CommandRow, absolute_path
from precompute.config.console import CommandPlace

IDS_SHOWN_DEFAULT = 50
"""Ids shown without a limit in the command."""


def _add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--limit", type=int, default=IDS_SHOWN_DEFAULT, help="shown (default: %(default)s)")
    command.add_argument(
        "--export", metavar="FILE", type=absolute_path, help="all of them as CSV: table, entity, reads, standing"
    )


WORKLIST = CommandRow(
    "worklist",
    CommandPlace("usage.worklist.worklist"),
    "ids that callers ask for and that no night knows, most asked first",
    _add_options,
    redis="if running",
    store="reads",
)

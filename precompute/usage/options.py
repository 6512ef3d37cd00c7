"""Row of the command `worklist`, in a module without the command's imports."""

import argparse

from precompute.config.commands import CommandRow, absolute_path
from precompute.config.console import CommandPlace

IDS_SHOWN_DEFAULT = 50
"""Ids that the command shows without --limit."""


def _add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--limit", type=int, default=IDS_SHOWN_DEFAULT, help="ids shown (default: %(default)s)")
    command.add_argument(
        "--export", metavar="FILE", type=absolute_path, help="write all ids as CSV: table, entity, reads, standing"
    )


WORKLIST = CommandRow(
    "worklist",
    CommandPlace("usage.worklist.worklist"),
    "ids that callers request and no night knows, most requested first",
    _add_options,
    needed_redis="if running",
    store_access="reads",
)

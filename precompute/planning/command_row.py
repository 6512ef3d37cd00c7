"""Row of the command `plan`; its options are in a module of their own, which imports few libraries."""

import argparse

from precompute.config.commands import CommandRow
from precompute.config.console import CommandPlace
from precompute.planning.options import DESCRIPTION, add_options


def _add_options(command: argparse.ArgumentParser) -> None:
    add_options(command, CommandPlace("planning.options.plan_on_card"))


PLAN = CommandRow(
    "plan",
    CommandPlace("planning.command.plan"),
    DESCRIPTION,
    _add_options,
    needed_redis="if running",
    store_access="reads",
)

"""Row of the command `erase`, in a module without the command's imports."""

import argparse

from precompute.config.commands import CommandRow
from precompute.config.console import CommandPlace


def _add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("entity", nargs="?", metavar="ENTITY", help="its id")
    command.add_argument("--as", dest="kind", choices=("user", "item"), default="user", help="default: user")
    command.add_argument("--list", action="store_true", help="list all erasures, pending and done")
    command.add_argument("--status", action="store_true", help="only show the status of this erasure")
    command.add_argument("--forget", action="store_true", help="re-admit the entity to later nights and to answers")
    command.add_argument(
        "--reason",
        help="reason of the erasure or re-admission; recorded in the audit log, for a re-admission also in its record",
    )
    command.add_argument(
        "--gone",
        metavar="HOST",
        help="a host, or a pattern of hosts, that will never run again: erasures no longer wait for its copies",
    )


ERASE = CommandRow(
    "erase",
    CommandPlace("erasure.command.erase"),
    "block an entity at once, leave it out of all nights from now on, and report when nothing holds it any more",
    _add_options,
    needed_redis="if running",
)

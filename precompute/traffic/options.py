"""Row of the command `experiment`, in a module without the command's imports."""

import argparse

from precompute.config.commands import CommandRow
from precompute.config.console import CommandPlace


def _add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("action", choices=("start", "status", "share", "stop", "exposures", "retire"))
    command.add_argument("name", nargs="?", help="name of the experiment: a-z, 0-9, - and _")
    command.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="NAME=NAMESPACE:SHARE",
        help="an arm; repeat for each. One arm has the service's own namespace; shares sum to 1. "
        "For `share`: NAME=SHARE",
    )
    command.add_argument("--share", type=float, help="share of all keys, above 0 and at most 1 (default for start: 1)")
    command.add_argument("--holdout", type=float, help="share of all keys that no experiment may take")
    command.add_argument(
        "--sample", type=float, default=1.0, help="share of its keys whose exposures are logged (default: all)"
    )
    command.add_argument("--reason", default="", help="reason of stop, kept in the audit log")


EXPERIMENT = CommandRow(
    "experiment",
    CommandPlace("traffic.experiment_command.command"),
    "run bundles side by side for weeks, each answering the keys of its arm",
    _add_options,
)

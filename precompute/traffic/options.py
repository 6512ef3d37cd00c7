"""Row of the command `experiment`, in a module without the command's imports."""

import argparse

from precompute.config.commands import CommandRow
from precompute.config.console import CommandPlace


def _add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("action", choices=("start", "status", "share", "stop", "exposures", "retire"))
    command.add_argument("name", nargs="?", help="of the experiment: a-z, 0-9, - and _")
    command.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="NAME=NAMESPACE:SHARE",
        help="arm, as often as there are arms, one of them with the service's own namespace; shares sum to 1. "
        "For `share`: NAME=SHARE",
    )
    command.add_argument("--share", type=float, help="share of all keys, above 0 to 1 (start: default 1)")
    command.add_argument("--holdout", type=float, help="share of all keys that no experiment may take")
    command.add_argument(
        "--sample", type=float, default=1.0, help="share of its keys whose exposures are written down (default: all)"
    )
    command.add_argument("--reason", default="", help="of stop; kept in the audit log")


EXPERIMENT = CommandRow(
    "experiment",
    CommandPlace("traffic.experiment_command.command"),
    "let bundles live beside each other for weeks, each answering the keys of its arm",
    _add_options,
)

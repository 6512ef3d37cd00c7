"""Row of the command `canary`, in a module without the command's imports."""

import argparse

from precompute.config.commands import CommandRow
from precompute.config.console import CommandPlace


def _add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("action", choices=("start", "status", "publish", "abandon"))
    command.add_argument(
        "generation",
        nargs="?",
        help="generation to start (default: the newest verified), or that publish or abandon must find running",
    )
    command.add_argument(
        "--percent",
        type=float,
        help="share of the requests in %% (default: that of the running canary, else percent of [canary]); a change "
        "restarts the counts",
    )
    command.add_argument("--reason", help="reason of abandon, kept in the release record")
    command.add_argument("--attempt")


CANARY = CommandRow(
    "canary",
    CommandPlace("traffic.canary.trial.command"),
    "try a verified generation on a share of the requests, then publish or abandon it",
    _add_options,
)

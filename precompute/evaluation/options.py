"""Row and options of the command `freshness`, in a module without the command's imports."""

import argparse
from dataclasses import dataclass

from precompute.config.commands import CommandRow
from precompute.config.console import CommandPlace


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of a replay: number of days at the log's end, length of lists, and maximum number of users."""

    days: int = 7
    k: int = 20
    users: int = 10_000
    seed: int = 0
    configured_bundle: bool = False


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    default_options = ReplayOptions()
    command.add_argument(
        "--data", nargs="+", metavar="FILE",
        help="log to use instead of sources.interactions; its columns are those of [sources]",
    )  # fmt: skip
    for option_name, help_text in (
        ("days", "number of days (UTC) at the log's end to replay; the model is trained on earlier days"),
        ("k", "length of the lists"),
        ("users", "maximum number of replayed users; drawn at random if more have new interactions"),
        ("seed", "seed of the model, of the drawn users and of the intervals"),
    ):
        command.add_argument(
            f"--{option_name}", type=int, metavar="N", default=getattr(default_options, option_name),
            help=f"{help_text} (default: %(default)s)",
        )  # fmt: skip
    command.add_argument(
        "--configured-bundle", action="store_true",
        help=(
            "replay lists of the configured bundle, which must not be trained on the replayed days (default: a "
            "reference model trained on earlier days)"
        ),
    )  # fmt: skip


FRESHNESS = CommandRow(
    "freshness",
    CommandPlace("evaluation.freshness.command"),
    "compare how many of users' next items nights, hourly nights and events find, replayed from the end of a log with "
    "times, and what their lists cost",
    add_options,
    needed_redis="none",
    store_access="reads",
)

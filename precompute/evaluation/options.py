"""Row and options of the command `freshness`, in a module without the command's imports."""

import argparse
from dataclasses import dataclass

from precompute.config.commands import CommandRow
from precompute.config.console import CommandPlace


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of a replay: how much of the log's end, lists of which length, and of how many users at most."""

    days: int = 7
    k: int = 20
    users: int = 10_000
    seed: int = 0
    configured_bundle: bool = False


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    default_options = ReplayOptions()
    command.add_argument(
        "--data", nargs="+", metavar="FILE",
        help="the log, in place of sources.interactions; its columns are those of [sources]",
    )  # fmt: skip
    for option_name, help_text in (
        ("days", "days (UTC) of the log's end that are replayed; the model knows what is before"),
        ("k", "length of the lists"),
        ("users", "users who are replayed, drawn where more did something new"),
        ("seed", "seed of the model, of the users drawn and of the intervals"),
    ):
        command.add_argument(
            f"--{option_name}", type=int, metavar="N", default=getattr(default_options, option_name),
            help=f"{help_text} (default: %(default)s)",
        )  # fmt: skip
    command.add_argument(
        "--configured-bundle", action="store_true",
        help="lists of the configured bundle, which must not have seen what is replayed (default: a reference model "
        "trained on what is before)",
    )  # fmt: skip


FRESHNESS = CommandRow(
    "freshness",
    CommandPlace("evaluation.freshness.command"),
    "what nights, hourly nights and events find of users' next items, replayed from the end of a log with times, and "
    "what their lists cost",
    add_options,
    redis="none",
    store="reads",
)

"""Rows of the table of commands: data for the parser, and the name of a function that is not imported yet."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from precompute.config.console import CommandPlace
from precompute.config.progress import Progress
from precompute.config.settings import NightConfig

PrepareRedis = Callable[[NightConfig, argparse.Namespace, Progress], None]


def _no_options(_command: argparse.ArgumentParser) -> None:
    return None


def prepare_nothing(_config: NightConfig, _arguments: argparse.Namespace, _progress: Progress) -> None:
    """Prepare nothing: most commands need only published data in a new server."""


@dataclass(frozen=True, slots=True)
class CommandRow:
    """Command of the shell: its name, function and text, the Redis that it needs, and how a new one is prepared.

    If `takes_generation`, its first argument is a generation id; `argument_defaults` are set in addition to its
    options. `store_access`: whether it only reads the artefact store, writes into it, or may create a new one.
    """

    name: str
    place: CommandPlace
    help_text: str
    add_options: Callable[[argparse.ArgumentParser], None] = _no_options
    needed_redis: Literal["own", "if running", "running", "none"] = "own"
    prepare: PrepareRedis = prepare_nothing
    takes_generation: bool = False
    store_access: Literal["reads", "writes", "makes"] = "writes"
    argument_defaults: Mapping[str, Any] = field(default_factory=dict)


def add_cut_options(command: argparse.ArgumentParser, default_cut_text: str) -> None:
    """Add the options of a command that uses data up to a cut; `default_cut_text` describes the default cut."""
    command.add_argument(
        "--data-until", metavar="TIME", help=f"cut of the data, ISO 8601 (default: {default_cut_text})"
    )
    command.add_argument("--attempt", help="name of this attempt; the same name marks a repeat")


def absolute_path(path_or_url: str) -> str:
    """Return a path of the command line relative to the current folder as an absolute one; URLs stay."""
    return path_or_url if "://" in path_or_url else str(Path(path_or_url).absolute())

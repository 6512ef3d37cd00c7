"""Row of the command `train`, in a module without the command's imports."""

import argparse

from precompute.config.commands import CommandRow, add_cut_options
from precompute.config.console import CommandPlace


def _add_options(command: argparse.ArgumentParser) -> None:
    add_cut_options(command, "data_until of the settings, else use all")


TRAIN = CommandRow(
    "train",
    CommandPlace("reference.command.train", ("reference.train",)),
    "train the reference bundle on the configured sources",
    _add_options,
    needed_redis="none",
    store_access="makes",
)

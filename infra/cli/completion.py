"""`larder completion`: a script for bash, zsh or fish, made by shtab from the commands' own parsers."""

import argparse
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Final

from infra.cli.commands import ENTRIES, CommandEntry, lacking

SHELLS: Final = {
    "bash": 'eval "$(larder completion bash)"   # in ~/.bashrc',
    "zsh": "larder completion zsh > FOLDER/_larder   # a folder of $fpath",
    "fish": "larder completion fish > ~/.config/fish/completions/larder.fish",
}
"""Shells, and the line that puts a script to use."""


def main(words: Sequence[str], *, prog: str) -> int:
    """Prints the script; 0."""
    sent = argument_parser(prog).parse_args(words)
    import shtab

    print(shtab.complete(whole_parser(), sent.shell))
    return 0


def argument_parser(prog: str) -> argparse.ArgumentParser:
    """Parser of this command's arguments."""
    parser = argparse.ArgumentParser(
        prog=prog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Print a script that completes commands and options. To use it:\n\n"
        + "\n".join(f"  {each}" for each in SHELLS.values()),
    )
    parser.add_argument("shell", choices=list(SHELLS))
    return parser


def whole_parser() -> argparse.ArgumentParser:
    """Parser of all commands together; those whose extra is missing stand in it without options."""
    import shtab

    whole = argparse.ArgumentParser(prog="larder")
    whole.add_argument("--config", metavar="FILE", help="settings")
    whole.add_argument("--version", action="store_true", help="print the version")
    commands = whole.add_subparsers()
    for entry in ENTRIES:
        given = None if lacking(entry) else _parser_of(entry)
        about = entry.text if given is None else entry.text or (given.description or "")
        commands.add_parser(entry.name, help=about.partition(";")[0].replace("\n", " "))
        if given is not None:
            commands.choices[entry.name] = given
    _complete_paths(whole, {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY, "FOLDER": shtab.DIRECTORY})
    return whole


def _parser_of(entry: CommandEntry) -> argparse.ArgumentParser:
    found: argparse.ArgumentParser = import_module(entry.module).argument_parser(
        f"larder {entry.name}"
    )
    return found


def _complete_paths(parser: argparse.ArgumentParser, kinds: Mapping[str, object]) -> None:
    """Has values completed as paths where a parser's help says that they are some."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _complete_paths(each, kinds)
        elif action.metavar in kinds:
            action.complete = kinds[str(action.metavar)]  # type: ignore[attr-defined]

"""`larder completion`: prints a completion script for bash, zsh or fish, which shtab makes from the parsers."""

import argparse
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Final

from infra.cli.commands import ENTRIES, CommandEntry, missing_extras_line

INSTALL_LINE_BY_SHELL: Final = {
    "bash": 'eval "$(larder completion bash)"   # in ~/.bashrc',
    "zsh": "larder completion zsh > FOLDER/_larder   # a folder of $fpath",
    "fish": "larder completion fish > ~/.config/fish/completions/larder.fish",
}
"""Shell -> the line that installs the script."""


def main(argv: Sequence[str], *, prog: str) -> int:
    """Print the script; return 0."""
    args = argument_parser(prog).parse_args(argv)
    import shtab

    print(shtab.complete(build_root_parser(), args.shell))
    return 0


def argument_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = argparse.ArgumentParser(
        prog=prog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Print a script that completes commands and options. To use it:\n\n"
        + "\n".join(f"  {setup_line}" for setup_line in INSTALL_LINE_BY_SHELL.values()),
    )
    parser.add_argument("shell", choices=list(INSTALL_LINE_BY_SHELL))
    return parser


def build_root_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands; a command whose extra is missing is listed without its options."""
    import shtab

    root_parser = argparse.ArgumentParser(prog="larder")
    root_parser.add_argument("--config", metavar="FILE", help="settings")
    root_parser.add_argument("--version", action="store_true", help="print the version")
    commands = root_parser.add_subparsers()
    for entry in ENTRIES:
        command_parser = None if missing_extras_line(entry) else _build_command_parser(entry)
        help_text = entry.help_text if command_parser is None else entry.help_text or (command_parser.description or "")
        commands.add_parser(entry.name, help=help_text.partition(";")[0].replace("\n", " "))
        if command_parser is not None:
            commands.choices[entry.name] = command_parser
    _complete_paths(root_parser, {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY, "FOLDER": shtab.DIRECTORY})
    return root_parser


def _build_command_parser(entry: CommandEntry) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = import_module(entry.module_name).argument_parser(f"larder {entry.name}")
    return parser


def _complete_paths(parser: argparse.ArgumentParser, completion_by_metavar: Mapping[str, object]) -> None:
    """Set the completion of arguments by their metavar, also in subparsers."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                _complete_paths(subparser, completion_by_metavar)
        elif action.metavar in completion_by_metavar:
            action.complete = completion_by_metavar[str(action.metavar)]  # type: ignore[attr-defined]

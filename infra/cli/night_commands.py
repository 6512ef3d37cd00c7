"""Commands of `python -m precompute`, each under its name."""

import argparse
import functools
from collections.abc import Sequence

from precompute.planning.options import quick_answer


def main(argv: Sequence[str], *, prog: str) -> int:
    """Runs the command that is the last word of `prog`, and ends the program with its exit code."""
    larder, _, name = prog.partition(" ")
    if name != "plan" or (answer := quick_answer(argv)) is None:
        # The libraries of the commands take a second to load.
        from precompute.__main__ import leave
        from precompute.__main__ import main as run

        leave(run([name, *argv], prog=larder))
    print(answer)
    return 0


def argument_parser(prog: str) -> argparse.ArgumentParser:
    """Parser of the command that is the last word of `prog`."""
    larder, _, name = prog.partition(" ")
    return commands_of(larder)[name]


@functools.cache
def commands_of(prog: str) -> dict[str, argparse.ArgumentParser]:
    """Parsers of all commands by name."""
    from precompute.cli.parser import parser_of_commands

    (action,) = (
        parser_action
        for parser_action in parser_of_commands(prog)._actions
        if isinstance(parser_action, argparse._SubParsersAction)
    )
    parser_by_name: dict[str, argparse.ArgumentParser] = dict(action.choices)
    return parser_by_name

"""Commands of `larder` that call the command of the same name in `python -m precompute`."""

import argparse
import functools
from collections.abc import Sequence

from precompute.planning.options import quick_answer


def main(argv: Sequence[str], *, prog: str) -> int:
    """Run the command that is the last word of `prog`, and exit the process with its exit code.

    Return 0 instead for options of `plan` that `quick_answer` answers without the libraries of precompute.
    """
    program_name, _, command_name = prog.partition(" ")
    if command_name != "plan" or (quick_answer_text := quick_answer(argv)) is None:
        # Imported only here, because the libraries of the commands take a second to load.
        from precompute.__main__ import end_program
        from precompute.__main__ import main as run

        end_program(run([command_name, *argv], prog=program_name))
    print(quick_answer_text)
    return 0


def argument_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command that is the last word of `prog`."""
    program_name, _, command_name = prog.partition(" ")
    return parsers_by_command(program_name)[command_name]


@functools.cache
def parsers_by_command(prog: str) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of all commands by name."""
    from precompute.cli.parser import build_command_parser

    (action,) = (
        parser_action
        for parser_action in build_command_parser(prog)._actions
        if isinstance(parser_action, argparse._SubParsersAction)
    )
    parser_by_name: dict[str, argparse.ArgumentParser] = dict(action.choices)
    return parser_by_name

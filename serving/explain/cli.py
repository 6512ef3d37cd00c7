"""`python -m serving explain`: asks a running service why it answers an entity as it does, and shows what it says."""

import argparse
from collections.abc import Sequence

from serving.explain.asking import answer_to, question_parser
from serving.explain.console import show

PROG = "python -m serving explain"


def main(arguments: Sequence[str], *, prog: str = PROG) -> int:
    """Exit code: 0 explained, 1 not (the reason goes to standard error), 2 wrong usage."""
    parser = argument_parser(prog)
    return answer_to(parser.parse_args(arguments), parser, "explain", show)


def argument_parser(prog: str = PROG) -> argparse.ArgumentParser:
    """Parser of this command's arguments."""
    return question_parser(
        prog,
        "Why a running service answers an entity as it does: which rung would answer, what each holds, the "
        "record with its page and checksums, what the model says now, and the difference. Nothing is changed by "
        "asking. Exit code: 0 explained, 1 the service could not be asked or refused, 2 wrong usage.",
    )

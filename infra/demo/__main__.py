"""`python -m infra.demo`: the whole loop on this machine, from data to served and rolled back."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from cache.process.command_line import interrupts_never_swallowed

PROG = "python -m infra.demo"


def main(argv: Sequence[str] | None = None, *, prog: str = PROG) -> int:
    """Exit code: 0 everything held, 1 something broke, 130 interrupted."""
    args = argument_parser(prog).parse_args(argv)
    console = Console()
    # SIGINT too: a shell that starts this in the background has it ignored.
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.default_int_handler)
    try:
        with interrupts_never_swallowed():
            return _run(args, console)
    except KeyboardInterrupt:
        _say_stopped(console)
        return 130


def _run(args: argparse.Namespace, console: Console) -> int:
    # Here, since these imports take a second, in which Ctrl-C is to end with a line as well.
    from cache.errors import LarderError
    from infra.demo.checks import InvariantViolation
    from infra.demo.console import Steps
    from infra.demo.dataset import Plan
    from infra.demo.run import Demo
    from infra.local.airflow import AirflowFailed
    from infra.local.service import ServiceFailed

    try:
        Demo(Plan(args.data, args.state, args.quick, args.serve), Steps(console)).run()
    except (AirflowFailed, InvariantViolation, ServiceFailed, LarderError) as error:
        console.print(Text.assemble(("demo failed: ", "red bold"), str(error)))
        return 1
    if args.serve:
        _say_stopped(console)
    return 0


def _say_stopped(console: Console) -> None:
    console.control(Control(ControlType.CARRIAGE_RETURN))  # over the ^C of the terminal
    console.print("stopped; nothing is left running")


def argument_parser(prog: str = PROG) -> argparse.ArgumentParser:
    """Parser of this command's arguments."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Train, precompute through a real Airflow, serve, swap and roll back under traffic, and check it.",
    )
    parser.add_argument(
        "--data", type=Path, metavar="PATH",
        help="your interactions: train.txt[.gz] with test.txt[.gz], or Parquet/CSV with user,item[,timestamp]",
    )  # fmt: skip
    parser.add_argument("--state", type=Path, metavar="DIR", default=Path(".larder"))
    parser.add_argument("--serve", action="store_true", help="keep serving until Ctrl-C")
    parser.add_argument("--quick", action="store_true", help="fewer users and requests")
    return parser


if __name__ == "__main__":
    sys.exit(main())

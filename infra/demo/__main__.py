"""`python -m infra.demo`: trains, runs nights, serves and rolls back on this machine, and checks all answers."""

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from cache.process.command_line import interrupts_never_swallowed

PROG = "python -m infra.demo"


def main(argv: Sequence[str] | None = None, *, prog: str = PROG) -> int:
    """Run the demo; return 0 if all checks passed, 1 if something failed, 130 if interrupted."""
    args = argument_parser(prog).parse_args(argv)
    console = Console()
    # Set SIGINT too: a shell starts background commands with SIGINT ignored.
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.default_int_handler)
    exit_code = 130
    with suppress(KeyboardInterrupt), interrupts_never_swallowed():
        exit_code = _run(args, console)
    if exit_code == 130 or (exit_code == 0 and args.serve):
        console.control(Control(ControlType.CARRIAGE_RETURN))  # over the ^C of the terminal
        console.print("stopped; nothing is left running")
    return exit_code


def _run(args: argparse.Namespace, console: Console) -> int:
    # These imports take a second; here, Ctrl-C during them is handled as well.
    from httpx import HTTPError

    from cache.errors import LarderError
    from infra.demo.run import Demo
    from serving.client import Unanswered

    try:
        Demo(console, args.data, args.state, args.quick, args.serve).run()
    except (RuntimeError, HTTPError, LarderError, Unanswered) as error:
        console.print(Text.assemble(("demo failed: ", "red bold"), str(error)))
        return 1
    return 0


def argument_parser(prog: str = PROG) -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Train, precompute through a real Airflow, serve, swap and roll back under traffic, and check it.",
    )
    about_data = "your interactions: train.txt[.gz] and test.txt[.gz], or Parquet/CSV with user,item[,timestamp]"
    parser.add_argument("--data", type=Path, metavar="PATH", help=about_data)
    parser.add_argument("--state", type=Path, metavar="DIR", default=Path(".larder"))
    parser.add_argument("--serve", action="store_true", help="keep serving until Ctrl-C")
    parser.add_argument("--quick", action="store_true", help="fewer users and requests")
    return parser


if __name__ == "__main__":
    sys.exit(main())

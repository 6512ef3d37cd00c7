"""`python -m precompute`: every step of a night, and the whole night, from a shell."""

import os
import signal
import sys
from collections.abc import Mapping

from cache.process.command_line import PRECOMPUTE_MODULES, missing_extra

if __name__ == "__main__":
    if line := missing_extra("precompute", "precompute", *PRECOMPUTE_MODULES):
        print(f"larder: {line}", file=sys.stderr)
        sys.exit(2)
    # The libraries of a command take up to two seconds to load; until then an interrupt has nothing to undo.
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"interrupted; nothing was begun\n"), os._exit(130)))

import argparse
import atexit
import threading
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from cache.control.store_problems import demand_own_store
from cache.errors import LarderError
from cache.process.command_line import interrupts_never_swallowed, json_text
from precompute.cli.parser import PROG, build_command_parser
from precompute.cli.temporary_redis import open_redis_for_command
from precompute.config.console import CommandOutput, err_console, out_console, print_output, progress_bars
from precompute.config.settings import NightConfig, night_config


def main(argv: Sequence[str] | None = None, *, prog: str = PROG) -> int:
    """Run a command and return its exit code.

    0: done; 1: refused or failed; 2: wrong usage; 3: `status` found a problem; 130: interrupted.
    """
    arguments = build_command_parser(prog).parse_args(argv)
    try:
        run_command = arguments.run.import_command()
        _set_interrupt_handler(_raise_interrupt)
        overrides = {name: getattr(arguments, name) for name in ("namespace", "artifacts", "state", "bundle", "shards")}
        config = night_config(arguments.config, **overrides)
        with (
            interrupts_never_swallowed(_raise_interrupt),
            progress_bars(err_console, is_quiet=arguments.quiet) as progress,
            open_redis_for_command(config, arguments, progress) as config,
        ):
            _check_store(config, arguments)
            command_result = run_command(config, arguments, progress)
        command_output = command_result if isinstance(command_result, CommandOutput) else CommandOutput(command_result)
        is_mapping = isinstance(command_output.content, Mapping)
        print_output(
            json_text(command_output.content) if arguments.json and is_mapping else command_output.content, out_console
        )
    except KeyboardInterrupt:
        err_console.print("interrupted; run the same command again to continue")
        return 130
    except Exception as error:
        _set_interrupt_handler(_exit_interrupted)
        _explain(error, shows_traceback=arguments.debug)
        return 1
    return command_output.exit_code


def _check_store(config: NightConfig, arguments: argparse.Namespace) -> None:
    """Raise Conflict before a command writes into the store of another Redis; warn if it would create a new store."""
    # `restore --adopt` handles such a pointer.
    # `--list` only reads, also a store that was replaced by the one of this Redis.
    if arguments.store == "reads" or getattr(arguments, "adopt", False) or getattr(arguments, "list", False):
        return
    demand_own_store(config, config.redis_url, config.redis_timeout_s)
    store = config.store()
    if arguments.store == "writes" and not store.names(""):
        err_console.print(
            f"the artefact store {store.url} is empty or new: if your nights use another one, correct artifacts "
            "(LARDER_ARTIFACTS)",
            markup=False,
        )


def _explain(error: Exception, *, shows_traceback: bool) -> None:
    if shows_traceback:
        traceback.print_exception(error)
    match error:
        case LarderError():
            err_console.print(f"[red]{error.code}[/red]: ", end="")
            err_console.print(error.message, markup=False, highlight=False)
        case OSError():
            err_console.print(f"the operating system refused: {error}", markup=False)
        case _:
            text = f"internal error: {type(error).__name__}: {error}".rstrip(": ")
            debug_hint = "" if shows_traceback else "; run with --debug for the traceback"
            err_console.print(f"{text}{debug_hint}", markup=False, highlight=False)


def _raise_interrupt(_signal: int, _frame: FrameType | None) -> None:
    # While the first interrupt is handled (a tile finishes, the server stops), a second one ends the program at once;
    # the server's guard process then ends the server.
    _set_interrupt_handler(_exit_interrupted)
    raise KeyboardInterrupt


def _exit_interrupted(_signal: int, _frame: FrameType | None) -> None:
    os._exit(130)


def _set_interrupt_handler(interrupt_handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, interrupt_handler)


def end_program(exit_code: int) -> NoReturn:
    """End the program after `main`; a further interrupt ends it at once."""
    _set_interrupt_handler(_exit_interrupted)  # a thread may still hang
    if any(thread.daemon for thread in threading.enumerate()):
        # An interrupted gate may still run in ONNX Runtime: at exit Python would end such a thread within C++ code,
        # which aborts the process.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    atexit.register(_set_interrupt_handler, signal.SIG_IGN)  # the remaining work takes a moment
    sys.exit(exit_code)


if __name__ == "__main__":
    end_program(main())

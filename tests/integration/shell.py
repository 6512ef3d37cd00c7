"""The command line within this process, for tests of output and effects that need no process of their own."""

import contextlib
import io
import os
import signal
from collections.abc import Mapping
from subprocess import CompletedProcess
from unittest.mock import patch

from precompute.__main__ import main


def shell(*arguments: str, environ: Mapping[str, str]) -> "CompletedProcess[str]":
    """Run `python -m precompute` with these words and only this environment; return exit code and output."""
    stdout, err = io.StringIO(), io.StringIO()
    handler_by_signal = {
        signal_number: signal.getsignal(signal_number) for signal_number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        with (
            patch.dict(os.environ, environ, clear=True),
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(err),
        ):
            code = main(arguments)
    except SystemExit as system_exit:  # words that are none
        code = int(system_exit.code or 0)
    finally:
        for signal_number, handler in handler_by_signal.items():
            signal.signal(signal_number, handler)
    return CompletedProcess(arguments, code, stdout.getvalue(), err.getvalue())

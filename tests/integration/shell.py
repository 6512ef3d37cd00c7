"""The command line within this process: for what commands say and do, where no process of their own is looked at."""

import contextlib
import io
import os
import signal
from collections.abc import Mapping
from subprocess import CompletedProcess
from unittest.mock import patch

from precompute.__main__ import main


def shell(*words: str, environ: Mapping[str, str]) -> "CompletedProcess[str]":
    """Exit code and output of `python -m precompute` with these words and this environment alone."""
    out, err = io.StringIO(), io.StringIO()
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with (
            patch.dict(os.environ, environ, clear=True),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            code = main(words)
    except SystemExit as ended:  # words that are none
        code = int(ended.code or 0)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    return CompletedProcess(words, code, out.getvalue(), err.getvalue())

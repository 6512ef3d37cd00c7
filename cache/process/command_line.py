"""Functions shared by all commands: safe text for a terminal, missing extras, interrupts, exit codes, JSON.

The module itself imports only the standard library, so that `larder --help` is fast.
"""

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import FrameType
from typing import Any, Final

FOUND_PROBLEM_EXIT_CODE: Final = 3
"""Exit code of a command that succeeded but found a problem."""

DISTRIBUTION: Final = "larder-predictions"
"""Distribution name for pip; `larder` on the package index is another project."""

PRECOMPUTE_MODULES: Final = ("onnx", "pyarrow", "rich", "scipy")
"""Modules required by the extra `precompute`."""

SERVING_MODULES: Final = ("fastapi", "httptools", "prometheus_client", "uvicorn")
"""Modules required by the extra `serving`."""

INTERRUPT_AGAIN_S = 0.001
"""Seconds after which a swallowed interrupt is raised again."""

# Control characters (C0 and C1), surrogates, line and paragraph separators, and characters that change the text
# direction.
_STEERING_CHARACTERS: Final = "\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"

_STEERING_PATTERN: Final = re.compile(f"[{_STEERING_CHARACTERS}]")
_STEERING_IN_LINES_PATTERN: Final = re.compile(f"(?![\t\n])[{_STEERING_CHARACTERS}]")


def json_text(document: Any) -> str:
    """Return a command's result as indented JSON."""
    import orjson  # not needed by `larder --help`

    return orjson.dumps(document, option=orjson.OPT_INDENT_2).decode()


def install_command(extra: str) -> str:
    """Return the shell command that installs Larder with an extra, or several joined by commas."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def missing_extra(dependent: str, extra: str, *modules: str) -> str | None:
    """Return the message about top-level `modules` that `dependent` needs and that are missing.

    Returns None if all are installed.
    """
    absent_modules = [module for module in modules if find_spec(module) is None]
    if not absent_modules:
        return None
    return f"{dependent} needs {', '.join(absent_modules)}, not installed here: {install_command(extra)}"


@contextmanager
def interrupts_never_swallowed(
    interrupt_handler: Callable[[int, FrameType | None], object] = signal.default_int_handler,
) -> Iterator[None]:
    """Raise an ignored KeyboardInterrupt again, through the handler, while the block runs; for the main thread only.

    Python ignores exceptions in `__del__`, in weak reference callbacks and in garbage collector callbacks
    (`sys.unraisablehook`): Ctrl-C at such a moment would print a traceback, and the process would continue.
    """
    previous_hook, previous_alarm_handler = (sys.unraisablehook, signal.signal(signal.SIGALRM, interrupt_handler))

    def handle_unraisable(ignored: "sys.UnraisableHookArgs") -> None:
        if issubclass(ignored.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, INTERRUPT_AGAIN_S)
        else:
            previous_hook(ignored)

    sys.unraisablehook = handle_unraisable
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous_alarm_handler)
        sys.unraisablehook = previous_hook


def printable(text: str) -> str:
    """Escape control characters in an id or another text within a line, in JSON's notation such as `\u001b`."""
    return _STEERING_PATTERN.sub(_escape, text)


def printable_lines(text: str) -> str:
    """Escape control characters in text for a terminal, except line breaks and tabs. JSON keeps its meaning."""
    return _STEERING_IN_LINES_PATTERN.sub(_escape, text)


def _escape(character_match: re.Match[str]) -> str:
    return f"\\u{ord(character_match[0]):04x}"

"""Parts that all commands share: text that cannot steer a terminal, missing extras, interrupts, exit code, JSON.

At its top it imports the standard library alone: `larder --help` waits for nothing else.
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
"""Exit code of a command that succeeded and found a problem."""

DISTRIBUTION: Final = "larder-predictions"
"""Name by which pip installs Larder; `larder` on the package index is another project."""

PRECOMPUTE_MODULES: Final = ("onnx", "pyarrow", "rich", "scipy")
"""Modules of the extra `precompute`."""

SERVING_MODULES: Final = ("fastapi", "httptools", "prometheus_client", "uvicorn")
"""Modules of the extra `serving`."""

INTERRUPT_AGAIN_S = 0.001
"""Seconds until a swallowed interrupt is raised again."""

# Controls (C0 and C1), halves of surrogate pairs, the two separators of lines and of paragraphs, and what turns the
# direction of writing round.
_STEERING_CHARACTERS: Final = "\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"

_STEERING_PATTERN: Final = re.compile(f"[{_STEERING_CHARACTERS}]")
_STEERING_IN_LINES_PATTERN: Final = re.compile(f"(?![\t\n])[{_STEERING_CHARACTERS}]")


def json_text(document: Any) -> str:
    """Return JSON of a command's result, for programs, indented for people."""
    import orjson  # `larder --help` needs it for nothing

    return orjson.dumps(document, option=orjson.OPT_INDENT_2).decode()


def install_command(extra: str) -> str:
    """Return the shell command that installs Larder with an extra, or several joined by commas."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def missing_extra(dependent: str, extra: str, *modules: str) -> str | None:
    """Message for an installation that lacks top-level `modules` which `dependent` needs; None if all are there."""
    absent_modules = [module for module in modules if find_spec(module) is None]
    if not absent_modules:
        return None
    return f"{dependent} needs {', '.join(absent_modules)}, not installed here: {install_command(extra)}"


@contextmanager
def interrupts_never_swallowed(
    handler: Callable[[int, FrameType | None], object] = signal.default_int_handler,
) -> Iterator[None]:
    """Raises an ignored KeyboardInterrupt again, by `handler`, while the block runs. For the main thread.

    Python ignores what is raised in `__del__`, in callbacks of weak references and in those of its collector
    (`sys.unraisablehook`); whoever pressed Ctrl-C just then would see a traceback and a process that goes on.
    """
    previous_hook, previous_alarm_handler = (sys.unraisablehook, signal.signal(signal.SIGALRM, handler))

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
    """An id, or another text within a line: steering characters as JSON writes them, `\\u001b`."""
    return _STEERING_PATTERN.sub(_escape, text)


def printable_lines(text: str) -> str:
    """Escape control characters in text for a terminal, except line breaks and tabs. JSON stays the same JSON."""
    return _STEERING_IN_LINES_PATTERN.sub(_escape, text)


def _escape(character_match: re.Match[str]) -> str:
    return f"\\u{ord(character_match[0]):04x}"

"""Interrupts that Python swallows: what a signal's handler raises inside a destructor is told and forgotten."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_S = 0.001
"""Seconds until a swallowed interrupt is raised again."""


@contextmanager
def never_swallowed(
    handler: Callable[[int, FrameType | None], object] = signal.default_int_handler,
) -> Iterator[None]:
    """Raises an ignored KeyboardInterrupt again, by `handler`, while the block runs. For the main thread.

    Python ignores what is raised in `__del__`, in callbacks of weak references and in those of its collector
    (`sys.unraisablehook`); whoever pressed Ctrl-C just then would see a traceback and a process that goes on.
    """
    tell_before, alarm_before = sys.unraisablehook, signal.signal(signal.SIGALRM, handler)

    def handle_unraisable(ignored: "sys.UnraisableHookArgs") -> None:
        if issubclass(ignored.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        else:
            tell_before(ignored)

    sys.unraisablehook = handle_unraisable
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, alarm_before)
        sys.unraisablehook = tell_before

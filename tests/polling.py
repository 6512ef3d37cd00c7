"""Bounded waiting for what another process does."""

import time
from collections.abc import Callable


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    """Poll `condition` up to `timeout_s`; the outcome of the last look."""
    give_up = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < give_up:
        time.sleep(0.01)
    return condition()

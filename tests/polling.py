"""Bounded waiting for another process."""

import time
from collections.abc import Callable


def poll_until(condition: Callable[[], bool], timeout_s: float = 30.0, *, every_s: float = 0.01) -> bool:
    """Poll `condition` for up to `timeout_s`; return its last result."""
    give_up = time.monotonic() + timeout_s
    while not (is_met := condition()) and time.monotonic() < give_up:
        time.sleep(every_s)
    return is_met

"""Bounded waiting for what another process does."""

import time
from collections.abc import Callable


def poll_until(condition: Callable[[], bool], timeout_s: float = 30.0, *, every_s: float = 0.01) -> bool:
    """Poll `condition` up to `timeout_s`; the outcome of the last look."""
    give_up = time.monotonic() + timeout_s
    while not (is_met := condition()) and time.monotonic() < give_up:
        time.sleep(every_s)
    return is_met

"""The circuit breaker in front of L2."""

import time
from collections.abc import Callable
from typing import Literal

State = Literal["closed", "open", "half_open"]


class Breaker:
    """Opens after `threshold` failures in a row; after `cooldown_s` lets one probe through at a time.

    Whoever was allowed reports `success` or `failure`. A probe that never reports holds its turn for one cooldown.
    """

    def __init__(
        self,
        threshold: int = 5,
        cooldown_s: float = 1.0,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        if threshold < 1:
            raise ValueError(f"a breaker opens after at least one failure, not {threshold}")
        self.state: State = "closed"
        self.opened = 0
        self._threshold = threshold
        self._cooldown_s = cooldown_s
        self._timer = timer
        self._failures = 0
        self._next_probe_at = 0.0

    def allow(self) -> bool:
        """Returns whether a call may be made now; True after the cooldown takes the turn of a probe."""
        if self.state == "closed":
            return True
        now_s = self._timer()
        if now_s < self._next_probe_at:
            return False
        self.state = "half_open"
        self._next_probe_at = now_s + self._cooldown_s
        return True

    def success(self) -> None:
        """Records an answered call: closes the breaker and forgets the failures."""
        self.state = "closed"
        self._failures = 0

    def failure(self) -> None:
        """Records a call without an answer; opens the breaker at the threshold or when a probe fails."""
        self._failures += 1
        # A straggler from before the opening must not prolong it, or steady traffic would postpone every probe.
        if self.state == "half_open" or (
            self.state == "closed" and self._failures >= self._threshold
        ):
            self.state = "open"
            self.opened += 1
            self._next_probe_at = self._timer() + self._cooldown_s

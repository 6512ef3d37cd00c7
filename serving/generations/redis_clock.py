"""Redis' clock as this process knows it: what replicas and publishers on several hosts agree on."""

import time
from collections.abc import Callable


class RedisClock:
    """Unix seconds; this host's own clock until Redis has told its time."""

    def __init__(
        self,
        timer: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._timer = timer
        self._offset_s = clock() - timer()

    def __call__(self) -> float:
        """Now."""
        return self.at(self._timer())

    def at(self, monotonic: float) -> float:
        """A moment of this process's monotonic clock in Redis' time."""
        return monotonic + self._offset_s

    def set(self, told: float, asked_at: float) -> None:
        """Redis said `told` to a question asked at the monotonic time `asked_at`: half-way to its answer."""
        self._offset_s = told - (asked_at + self._timer()) / 2

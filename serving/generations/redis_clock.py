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
        """Current time in Redis' Unix seconds."""
        return self.at(self._timer())

    def at(self, monotonic: float) -> float:
        """A moment of this process's monotonic clock in Redis' time."""
        return monotonic + self._offset_s

    def set(self, redis_time_s: float, asked_at: float) -> None:
        """Sets the clock: Redis said `redis_time_s` half-way between the question, at monotonic `asked_at`, and now."""
        self._offset_s = redis_time_s - (asked_at + self._timer()) / 2

"""The answer of `/metrics`: made anew for each who scrapes, but for a flood, which hears the last one again."""

import time
from collections.abc import Awaitable, Callable

BURST = 20.0
PER_S = 5.0
"""Expositions per second at most, a few milliseconds of the event loop each; nobody scrapes more than once a second."""


class Exposition:
    """Rate limit: `make` is asked `BURST` times at once and `PER_S` times a second from then on, however many ask."""

    def __init__(
        self, make: Callable[[], Awaitable[bytes]], timer: Callable[[], float] = time.monotonic
    ) -> None:
        self._make = make
        self._timer = timer
        self._tokens, self._at = BURST, timer()
        self._body = b""

    async def __call__(self) -> bytes:
        """The text, at most a moment old."""
        now_s = self._timer()
        self._tokens = min(BURST, self._tokens + (now_s - self._at) * PER_S)
        self._at = now_s
        if self._tokens >= 1 or not self._body:
            self._tokens -= 1
            self._body = await self._make()
        return self._body

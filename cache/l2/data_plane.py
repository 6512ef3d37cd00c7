"""Interface of L2's data plane (records, overlays, leases), with its counts and its circuit breaker."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from cache.errors import TierUnavailable
from cache.l2.commands import Command, L2Result, Lease, OverlayWrite, PageRead
from cache.l2.control_plane import ControlPlane

BreakerState = Literal["closed", "open", "half_open"]
_STATES_BY_SEVERITY: tuple[BreakerState, ...] = ("closed", "half_open", "open")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DataPlaneStats:
    """Counts of pipelines and commands since the start, of commands shed under load, and the breaker's state.

    For several servers, counts are summed and `breaker_state` is the worst state.
    """

    sent_pipelines: int = 0
    sent_commands: int = 0
    shed_commands: int = 0
    breaker_openings: int = 0
    breaker_state: BreakerState = "closed"

    def __add__(self, addend: "DataPlaneStats") -> "DataPlaneStats":
        """Return the sums, and the worse of both breaker states."""
        return DataPlaneStats(
            self.sent_pipelines + addend.sent_pipelines,
            self.sent_commands + addend.sent_commands,
            self.shed_commands + addend.shed_commands,
            self.breaker_openings + addend.breaker_openings,
            max(self.breaker_state, addend.breaker_state, key=_STATES_BY_SEVERITY.index),
        )


class DataPlane(Protocol):
    """Data plane for one event loop: commands of one loop iteration are batched and have a deadline; no retries."""

    @property
    def control(self) -> ControlPlane:
        """Control plane of the same Redis."""
        ...

    @property
    def stats(self) -> DataPlaneStats:
        """Counts since the start, and the breaker's current state."""
        ...

    def submit(
        self, commands: Sequence[Command], convert_answers: Callable[[Sequence[L2Result]], T]
    ) -> asyncio.Future[T]:
        """Send at least one command; return a future of `convert_answers` applied to the answers, one per command.

        `convert_answers` runs as soon as the answers arrive, without a task. An answer is the record or overlay, None
        if there is none, or the error that prevented the read.
        """
        ...

    def lease(self, command: Lease) -> asyncio.Future[bytes | TierUnavailable | None]:
        """Send a lease command with the reads of this loop iteration; return a future of the answer."""
        ...

    async def write_overlays(self, writes: Sequence[OverlayWrite]) -> list[TierUnavailable | None]:
        """Store each overlay with its expiry; return None for each success, else the error."""
        ...

    async def page(self, read: PageRead) -> bytes | None:
        """Read a page or a part of it, on a connection without readers' commands; None if there is none.

        Raises TierUnavailable.
        """
        ...

    async def connect_ahead(self) -> None:
        """Open a connection to each server before the first read, whose deadline may be too short for connecting.

        Raises nothing: later reads report an unavailable server.
        """
        ...

    def bound_s(self) -> float:
        """Return the bound in seconds for a read sent now, including the commands sent with it and before it."""
        ...

    def p99_ms(self, window_s: float = 5.0) -> float | None:
        """Return the 99th percentile of round trips in ms in the last `window_s`, failures included; None without any.

        For several servers, return the highest.
        """
        ...

    async def aclose(self) -> None:
        """Close every connection; pending reads end with TierUnavailable."""
        ...


class Breaker:
    """Circuit breaker: opens after `failure_threshold` failures in a row, and allows single probes after `cooldown_s`.

    Callers report `note_success` or `note_failure` for each allowed call; an unreported probe blocks others for one
    cooldown.
    """

    def __init__(
        self, failure_threshold: int = 5, cooldown_s: float = 1.0, monotonic_clock: Callable[[], float] = time.monotonic
    ) -> None:
        if failure_threshold < 1:
            raise ValueError(f"the threshold of a breaker must be at least 1, not {failure_threshold}")
        self.state: BreakerState = "closed"
        self.opened = 0
        self._threshold = failure_threshold
        self._cooldown_s = cooldown_s
        self._timer = monotonic_clock
        self._failures_in_a_row = 0
        self._next_probe_at = 0.0

    def allow_call(self) -> bool:
        """Return whether a call may be made now; after the cooldown, returning True starts a probe."""
        if self.state == "closed":
            return True
        now_s = self._timer()
        if now_s < self._next_probe_at:
            return False
        self.state = "half_open"
        self._next_probe_at = now_s + self._cooldown_s
        return True

    def note_success(self) -> None:
        """Record an answered call: close the breaker and reset the count of failures."""
        self.state = "closed"
        self._failures_in_a_row = 0

    def note_failure(self) -> None:
        """Record a call without an answer; open the breaker at the threshold or if the call was a probe."""
        self._failures_in_a_row += 1
        # A call sent before the breaker opened must not prolong it, or steady traffic would postpone every probe.
        if self.state == "half_open" or (self.state == "closed" and self._failures_in_a_row >= self._threshold):
            self.state = "open"
            self.opened += 1
            self._next_probe_at = self._timer() + self._cooldown_s

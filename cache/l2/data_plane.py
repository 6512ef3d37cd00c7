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
    """Counts of pipelines and commands since the start, of commands `shed` under load, and the breaker's state.

    Of several servers the counts add up; `breaker` is the worst state.
    """

    batches: int = 0
    commands: int = 0
    shed: int = 0
    breaker_opened: int = 0
    breaker: BreakerState = "closed"

    def __add__(self, addend: "DataPlaneStats") -> "DataPlaneStats":
        """Return the sums, and the worse of both breaker states."""
        return DataPlaneStats(
            self.batches + addend.batches,
            self.commands + addend.commands,
            self.shed + addend.shed,
            self.breaker_opened + addend.breaker_opened,
            max(self.breaker, addend.breaker, key=_STATES_BY_SEVERITY.index),
        )


class DataPlane(Protocol):
    """Data plane for one event loop: reads and writes are batched by loop iteration and bounded in time; no retries."""

    @property
    def control(self) -> ControlPlane:
        """Control plane of the same Redis."""
        ...

    @property
    def stats(self) -> DataPlaneStats:
        """Counts since the start, and the breaker's current state."""
        ...

    def submit(self, commands: Sequence[Command], keep: Callable[[Sequence[L2Result]], T]) -> asyncio.Future[T]:
        """Send at least one command; return a future of `keep` applied to the answers, one per command.

        `keep` runs the moment they land; it needs no task. An answer is the record or overlay, None where there is
        none, or why it is not known.
        """
        ...

    def lease(self, command: Lease) -> asyncio.Future[bytes | TierUnavailable | None]:
        """Send a lease command with the reads of this loop iteration; return a future of the answer."""
        ...

    async def write_overlays(self, writes: Sequence[OverlayWrite]) -> list[TierUnavailable | None]:
        """Store each overlay with its expiry; return None for each success, else the error."""
        ...

    async def page(self, read: PageRead) -> bytes | None:
        """Read a page or a part of it, None if there is none, on a connection that no reader waits for.

        Raises TierUnavailable.
        """
        ...

    async def connect_ahead(self) -> None:
        """Open a connection to each server before the first read, whose deadline would be too short for it.

        Raises nothing: reads report a server that is away.
        """
        ...

    def bound_s(self) -> float:
        """Return the bound in seconds for a read sent now, including the commands sent with it and before it."""
        ...

    def p99_ms(self, within_s: float = 5.0) -> float | None:
        """Return the 99th percentile in ms of round trips in the last `within_s`, failures included; None without any.

        Of several servers the slowest one's.
        """
        ...

    async def aclose(self) -> None:
        """Close every connection; pending reads end as unavailable."""
        ...


class Breaker:
    """Circuit breaker: opens after `threshold` failures in a row; after `cooldown_s` allows one probe at a time.

    Callers report `note_success` or `note_failure` of each allowed call; an unreported probe blocks others for one
    cooldown.
    """

    def __init__(
        self, threshold: int = 5, cooldown_s: float = 1.0, timer: Callable[[], float] = time.monotonic
    ) -> None:
        if threshold < 1:
            raise ValueError(f"a breaker opens after at least one failure, not {threshold}")
        self.state: BreakerState = "closed"
        self.opened = 0
        self._threshold = threshold
        self._cooldown_s = cooldown_s
        self._timer = timer
        self._failures_in_a_row = 0
        self._next_probe_at = 0.0

    def allow(self) -> bool:
        """Return whether a call may be made now; True after the cooldown starts a probe."""
        if self.state == "closed":
            return True
        now_s = self._timer()
        if now_s < self._next_probe_at:
            return False
        self.state = "half_open"
        self._next_probe_at = now_s + self._cooldown_s
        return True

    def note_success(self) -> None:
        """Record an answered call: close the breaker and forget the failures."""
        self.state = "closed"
        self._failures_in_a_row = 0

    def note_failure(self) -> None:
        """Record a call without an answer; open the breaker at the threshold or if it was a probe."""
        self._failures_in_a_row += 1
        # A straggler from before the opening must not prolong it, or steady traffic would postpone every probe.
        if self.state == "half_open" or (self.state == "closed" and self._failures_in_a_row >= self._threshold):
            self.state = "open"
            self.opened += 1
            self._next_probe_at = self._timer() + self._cooldown_s

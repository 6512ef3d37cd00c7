"""Data plane of L2: records, overlays and leases as the read path asks for them, its counts and its circuit breaker."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from cache.errors import TierUnavailable
from cache.l2.commands import Command, L2Result, Lease, OverlayWrite, PageRead
from cache.l2.control_plane import ControlPlane

BreakerState = Literal["closed", "open", "half_open"]
_WORST_LAST: tuple[BreakerState, ...] = ("closed", "half_open", "open")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DataPlaneStats:
    """Pipelines and commands sent since the start, commands `shed` because too many were under way, and the breaker.

    Of several servers these add up; `breaker` is the state of the one that is worst off.
    """

    batches: int = 0
    commands: int = 0
    shed: int = 0
    breaker_opened: int = 0
    breaker: BreakerState = "closed"

    def __add__(self, addend: "DataPlaneStats") -> "DataPlaneStats":
        """Stats of both."""
        return DataPlaneStats(
            self.batches + addend.batches,
            self.commands + addend.commands,
            self.shed + addend.shed,
            self.breaker_opened + addend.breaker_opened,
            max(self.breaker, addend.breaker, key=_WORST_LAST.index),
        )


class DataPlane(Protocol):
    """Reads and writes of one event loop, coalesced by turn and bounded in time; nothing is retried."""

    @property
    def control(self) -> ControlPlane:
        """The control plane of the same Redis."""
        ...

    @property
    def stats(self) -> DataPlaneStats:
        """Counts since the start, and the breaker's state now."""
        ...

    def submit(
        self, commands: Sequence[Command], keep: Callable[[Sequence[L2Result]], T]
    ) -> asyncio.Future[T]:
        """A future of what `keep` makes of the answers to at least one command, one answer per command.

        `keep` runs the moment they land; it needs no task. An answer is the record or overlay, None where there is
        none, or why it is not known.
        """
        ...

    def lease(self, command: Lease) -> asyncio.Future[bytes | TierUnavailable | None]:
        """A future of the answer to `command`, which travels with the reads of this turn."""
        ...

    async def write_overlays(self, writes: Sequence[OverlayWrite]) -> list[TierUnavailable | None]:
        """Stores each overlay with its expiry; returns None for each that was stored, else why it was not."""
        ...

    async def page(self, read: PageRead) -> bytes | None:
        """A page or a part of it, None where there is none; at leisure, so on no connection that readers wait for.

        Raises TierUnavailable.
        """
        ...

    async def connect_ahead(self) -> None:
        """Opens a connection to each server before the first read comes, whose time would not suffice for it.

        Raises nothing: a server that is away is for the reads to find.
        """
        ...

    def bound_s(self) -> float:
        """Bound in seconds for a read that is sent now, whatever travels along and lies before it."""
        ...

    def p99_ms(self, within_s: float = 5.0) -> float | None:
        """99th percentile in ms of round trips of the last `within_s`, failed ones included; None without any.

        Of several servers the slowest one's.
        """
        ...

    async def aclose(self) -> None:
        """Closes every connection; reads under way end as unavailable."""
        ...


class Breaker:
    """Circuit breaker: opens after `threshold` failures in a row; after `cooldown_s` lets one probe through at a time.

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
        self.state: BreakerState = "closed"
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

"""Quotas: requests a second, entities a second, requests in flight. The arithmetic is pure, its state is `quota_table`.

Rates are GCRA (ITU-T I.371): all that was taken is paid for by a moment that lies in the past of whoever may go on.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from serving.requests.errors import Problem

BURST_S = 1.0
"""Seconds of its rate that a token may take at once after it has rested; over T seconds it gets rate x (T + this)."""

Kind = Literal["requests_per_s", "entities_per_s", "in_flight"]

_SLACK_S = 1e-9
"""Seconds: sums of binary fractions must not cost whoever asks exactly at its rate every other request."""
_SLOT_WAIT_S = 1.0
"""Seconds that whoever has too many requests in flight is told to wait: nobody knows when one of them ends."""


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """Limits of one token over all workers of a service; None: no limit."""

    requests_per_s: float | None = None
    entities_per_s: float | None = None
    in_flight: int | None = None

    def __bool__(self) -> bool:
        return (self.requests_per_s, self.entities_per_s, self.in_flight) != (None, None, None)


class Shortage(NamedTuple):
    """Quota that has no room, its limit, and the seconds after which there may be."""

    kind: Kind
    limit: float
    wait_s: float


class QuotaState(NamedTuple):
    """Amounts that a token has taken: moments (monotonic) until which its rates are paid for, requests in flight."""

    requests_until: float = 0.0
    entities_until: float = 0.0
    in_flight: int = 0

    def is_fresh(self, now_s: float) -> bool:
        """True if nobody could tell it from that of a token never used."""
        return not self.in_flight and max(self.requests_until, self.entities_until) <= now_s


class QuotaRows(Protocol):
    """State of quotas, shared by the workers of a service."""

    def charge(
        self, key: bytes, limits: QuotaLimits, now_s: float, requests: int, entities: int
    ) -> Shortage | None:
        """Takes from the standing under `key`, or tells why not; requests stay in flight until given back."""

    def give_back(self, key: bytes, limits: QuotaLimits, requests: int, entities: int) -> None:
        """Takes back what was taken in vain; the requests are no longer in flight."""

    def leave(self, key: bytes) -> None:
        """Ends one request in flight."""


def after_taking(
    standing: QuotaState, limits: QuotaLimits, now_s: float, requests: int, entities: int
) -> QuotaState | Shortage:
    """The standing after so much more was taken; all of it or nothing.

    What alone is more than a burst is taken once a whole burst is there, and is paid for afterwards.
    """
    in_flight_max = limits.in_flight
    if in_flight_max is not None and requests and standing.in_flight + requests > in_flight_max:
        return Shortage("in_flight", in_flight_max, _SLOT_WAIT_S)
    for_requests = _paid(standing.requests_until, now_s, requests, limits.requests_per_s)
    if isinstance(for_requests, _Wait):
        return Shortage("requests_per_s", limits.requests_per_s or 0.0, for_requests.seconds)
    for_entities = _paid(standing.entities_until, now_s, entities, limits.entities_per_s)
    if isinstance(for_entities, _Wait):
        return Shortage("entities_per_s", limits.entities_per_s or 0.0, for_entities.seconds)
    return QuotaState(for_requests, for_entities, standing.in_flight + requests)


class _Wait(NamedTuple):
    seconds: float


def burst_s(per_s: float) -> float:
    """Seconds of a rate that may be taken at once: one that is below one a second has room for one."""
    return max(BURST_S, 1.0 / per_s)


def _paid(paid_until_s: float, now_s: float, amount: int, per_s: float | None) -> float | _Wait:
    if not amount or per_s is None:
        return paid_until_s
    begin, burst_limit_s = max(paid_until_s, now_s), burst_s(per_s)
    cost = amount / per_s
    late_s = begin + min(cost, burst_limit_s) - (now_s + burst_limit_s)
    return _Wait(late_s) if late_s > _SLACK_S else begin + cost


class Quota:
    """Quota of one token, counted in `rows`."""

    __slots__ = ("_key", "_rows", "_timer", "limits")

    def __init__(
        self, key: bytes, limits: QuotaLimits, rows: QuotaRows, timer: Callable[[], float]
    ) -> None:
        self.limits = limits
        self._key, self._rows, self._timer = key, rows, timer

    def enter(self, entities: int) -> Shortage | None:
        """Takes one request, and the entities known so far; in flight until `close` or `give_back`."""
        return self._rows.charge(self._key, self.limits, self._timer(), 1, entities)

    def spend(self, entities: int) -> Shortage | None:
        """Takes entities of a request that has entered."""
        if self.limits.entities_per_s is None:
            return None
        return self._rows.charge(self._key, self.limits, self._timer(), 0, entities)

    def close(self) -> None:
        """Ends a request in flight."""
        self._rows.leave(self._key)

    def give_back(self, entities: int) -> None:
        """Undoes `enter` of a request that goes another way, where it enters again."""
        self._rows.give_back(self._key, self.limits, 1, entities)


def exceeded(short: Shortage) -> Problem:
    """Refusal (429) of a request that its quota has no room for."""
    return Problem(
        429, "quota_exceeded",
        f"the quota {short.kind} of this token ({short.limit:g}) has no room; come again after Retry-After",
        quota=short.kind, limit=short.limit, retry_after_seconds=math.ceil(short.wait_s * 1_000) / 1_000,
    )  # fmt: skip

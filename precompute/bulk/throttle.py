"""The control law: how fast to work on Redis, given what its readers feel. Pure.

Work rests for a part of every step, so that what a reader feels under load and what it feels at rest are known of the
same moments: a host that is noisy by itself slows both, and only the difference is the work's doing. Congestion is not
a lost packet here but probes later than the limit that are more frequent under work than at rest. Steps are compared
as batches (batch means: Law and Carson, "A sequential procedure for determining the length of a steady-state
simulation", 1979), because late probes come in bursts and would count for more than they prove one by one.

The rate follows CUBIC (RFC 9438, without its TCP-friendly region): it falls by a factor when there is congestion, comes
back quickly to just below where that was, stays there for a while, and then looks further. Before the first decrease
it grows by slow start (Jacobson, "Congestion avoidance and control", 1988).
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MIB = float(1 << 20)
QUANTILE = 0.99
AIM = 0.4
"""Share of the allowed slow-down that is aimed at: the rest is for what the probes did not see."""

IDLE = 4_000
"""Round trips at rest that are kept: a p99 of a few hundred is little more than a guess."""

JUDGED_MIN = 50
STEPS_MIN = 10
STEPS = 32
SIGMAS = 2.0
"""Steps that are compared, and by how many standard errors of their mean they must differ for the rate to fall."""

UNHURT = 0.003
"""Margin of the share of late probes above the allowed one, error included; above it the rate does not rise."""

CLEARLY = 0.2
"""Excess of the share of late probes over that at rest that, in two steps after each other, needs no statistics."""

START_FLOORS = 4.0
START_GROWTH = 1.17
BACK_OFF = 0.7
PLATEAU_STEPS = 10
"""Clean steps after a decrease until the rate is back at where it was."""

USED_MIN = 0.7
BUSY_MAX = 0.9
REPLICA_FACTOR = 1.5
"""A heartbeat's p99 stands for few reads, so it counts only when it is clearly above."""


@dataclass(frozen=True, slots=True)
class Signals:
    """Signals seen since the last step: round trips of probes in seconds (inf: none came back), and the rest.

    `worked`: while pieces were sent, `rested`: while none were; `replicas_ms`: the p99 that replicas report; `busy`:
    share of Redis' main thread in use; `lag_bytes`: how far the slowest replica of Redis is behind; `done_bytes` in
    `spent_s`: the work itself.
    """

    worked: Sequence[float] = ()
    rested: Sequence[float] = ()
    replicas_ms: Mapping[str, float] = field(default_factory=dict)
    busy: float = 0.0
    lag_bytes: int = 0
    done_bytes: int = 0
    spent_s: float = 0.0


def p99(round_trips: Sequence[float]) -> float:
    """The 99th percentile (nearest rank), inf of nothing."""
    ordered = sorted(round_trips)
    return ordered[math.ceil(QUANTILE * len(ordered)) - 1] if ordered else math.inf


class Throttle:
    """A rate in bytes per second that follows its signals."""

    def __init__(
        self, *, p99_factor: float, floor: float, ceiling: float, lag_bytes_max: float
    ) -> None:
        self.floor = floor
        self.ceiling = ceiling or math.inf
        self.rate = min(floor * START_FLOORS, self.ceiling)
        self.idle_p99_s: float | None = None
        self.reason = "start"
        self._factor = 1 + (p99_factor - 1) * AIM
        self._replica_factor = p99_factor * REPLICA_FACTOR
        self._lag_bytes_max = lag_bytes_max
        self._replicas_idle_ms: dict[str, float] = {}
        self._idle: deque[float] = deque(maxlen=IDLE)
        self._late: deque[tuple[float, float]] = deque(maxlen=STEPS)
        self._congested: float | None = None
        self._clean = 0

    def calibrate(
        self, rested: Sequence[float], replicas_ms: Mapping[str, float] | None = None
    ) -> None:
        """Takes in what readers feel while nothing is being done; nothing is concluded from too few round trips."""
        self._idle.extend(round_trip_s for round_trip_s in rested if math.isfinite(round_trip_s))
        if len(self._idle) >= JUDGED_MIN:
            self.idle_p99_s = p99(self._idle)
        for name, p99_ms in (replicas_ms or {}).items():
            # A heartbeat looks back some seconds, so after the first one only a lower value is news about idling.
            self._replicas_idle_ms[name] = min(p99_ms, self._replicas_idle_ms.get(name, math.inf))

    @property
    def limit_s(self) -> float | None:
        """The p99 that is aimed at."""
        return None if self.idle_p99_s is None else self.idle_p99_s * self._factor

    def step(self, signals: Signals, *, readers: bool) -> float:
        """The next rate. Without `readers` only Redis' own replicas are spared; without evidence the rate falls."""
        self.reason = self._objection(signals, readers)
        if readers:
            self.calibrate(signals.rested)
        if self.reason:
            self._congested, self._clean = self.rate, 0
            self.rate = max(self.floor, self.rate * BACK_OFF)
            self._late.clear()
        elif self._is_used(signals) and not (readers and self._is_open()):
            self.rate = min(self.ceiling, self._grown())
        return self.rate

    def _grown(self) -> float:
        if self._congested is None:
            return self.rate * START_GROWTH
        self._clean += 1
        beyond = (self._clean - PLATEAU_STEPS) / PLATEAU_STEPS
        return max(self.rate, self._congested * (1 + (1 - BACK_OFF) * beyond**3))

    def _objection(self, signals: Signals, readers: bool) -> str:
        if signals.lag_bytes > self._lag_bytes_max:
            return "replica lag"
        if not readers:
            return ""
        if not signals.worked or self.limit_s is None:
            return "no probe"
        worked, rested = (
            sum(round_trip_s > self.limit_s for round_trip_s in trips) / max(1, len(trips))
            for trips in (signals.worked, signals.rested)
        )
        self._late.append((worked, rested))
        if self._is_late():
            return "probe p99"
        if signals.busy > BUSY_MAX:
            return "Redis busy"
        for name, p99_ms in signals.replicas_ms.items():
            if p99_ms > self._replica_factor * self._replicas_idle_ms.setdefault(name, p99_ms):
                return f"p99 of {name}"
        return ""

    def _is_late(self) -> bool:
        more = [worked - rested for worked, rested in self._late]
        if len(more) > 1 and min(more[-2:]) > CLEARLY:
            return True
        above, error = self._excess()
        return above > SIGMAS * error

    def _is_open(self) -> bool:
        """True if it is too early to say that readers are unhurt: the rate stays until it is known."""
        above, error = self._excess()
        return len(self._late) >= STEPS_MIN and above + error > UNHURT

    def _excess(self) -> tuple[float, float]:
        """Excess of the share of late probes over what is allowed, and the standard error of that."""
        if len(self._late) < STEPS_MIN:
            return 0.0, math.inf
        worked, rested = (
            statistics.fmean(late_shares) for late_shares in zip(*self._late, strict=True)
        )
        spread = statistics.stdev([worked - rested for worked, rested in self._late])
        return worked - max(1 - QUANTILE, rested), spread / math.sqrt(len(self._late))

    def _is_used(self, signals: Signals) -> bool:
        # A rate that is not reached says nothing about a higher one.
        return signals.spent_s > 0 and signals.done_bytes >= USED_MIN * self.rate * signals.spent_s

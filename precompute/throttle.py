"""The control law: how fast to work on Redis, given what its readers feel. Pure.

Additive increase, multiplicative decrease (Chiu and Jain, "Analysis of the increase and decrease algorithms for
congestion avoidance in computer networks", 1989), with Jacobson's slow start ("Congestion avoidance and control", 1988)
until the first decrease. Congestion is not a lost packet here but a reader's p99 above its limit: of n round trips
about n/100 may lie above; the rate falls once they are more than that by `SIGMAS` standard deviations of such a count,
that of the idle sample included, so that neither one late reply nor a small sample of either kind moves it. After a
decrease only round trips made since are judged, as TCP halves at most once per round trip.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MIB = float(1 << 20)
QUANTILE = 0.99
SIGMAS = 2.0
AIM = 0.6
"""Share of the allowed slow-down that is aimed at: the rest is for what the probes did not see."""

JUDGED = 1_000
JUDGED_MIN = 50
IDLE = 3_000
"""Round trips of the latest calibrations that are kept: a p99 of a few hundred is little more than a guess."""

START_FLOORS = 4.0
START_GROWTH = 1.3
STEP = 0.05
"""The additive step, as a share of the rate at the last decrease: a fixed number would be a leap for a slow Redis."""

BACK_OFF = 0.7
CLEAN_STEPS = 16
CLEAN_GROWTH = 1.1
"""After so many steps without objection the world has changed, so the rate grows by a factor again."""

USED_MIN = 0.7
BUSY_MAX = 0.9
REPLICA_FACTOR = 1.5
"""A heartbeat's p99 stands for few reads, so it counts only when it is clearly above."""


@dataclass(frozen=True, slots=True)
class Signals:
    """What was seen since the last step: round trips of probes in seconds (inf: none came back), and the rest.

    `replicas_ms`: the p99 that replicas report; `busy`: share of Redis' main thread in use; `lag_bytes`: how far the
    slowest replica of Redis is behind; `done_bytes` in `spent_s`: the work itself.
    """

    round_trips: Sequence[float] = ()
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
        self._judged: deque[float] = deque(maxlen=JUDGED)
        self._idle: deque[float] = deque(maxlen=IDLE)
        self._growth = START_GROWTH
        self._step = 0.0
        self._clean = 0

    def calibrate(
        self, round_trips: Sequence[float], replicas_ms: Mapping[str, float] | None = None
    ) -> None:
        """What readers feel while nothing is being done; nothing new is learned from too few round trips."""
        answered = [each for each in round_trips if math.isfinite(each)]
        if len(answered) >= JUDGED_MIN:
            self._idle.extend(answered)
            self.idle_p99_s = p99(self._idle)
        for name, found in (replicas_ms or {}).items():
            # A heartbeat looks back some seconds, so after the first one only a lower value is news about idling.
            self._replicas_idle_ms[name] = min(found, self._replicas_idle_ms.get(name, math.inf))
        self._judged.clear()

    @property
    def limit_s(self) -> float | None:
        """The p99 that is aimed at."""
        return None if self.idle_p99_s is None else self.idle_p99_s * self._factor

    def step(self, signals: Signals, *, readers: bool) -> float:
        """The next rate. Without `readers` only Redis' own replicas are spared; without evidence the rate falls."""
        self._judged.extend(signals.round_trips)
        self.reason = self._objection(signals, readers)
        if self.reason:
            self._step, self._growth, self._clean = STEP * self.rate, 1.0, 0
            self.rate = max(self.floor, self.rate * BACK_OFF)
            self._judged.clear()
        elif self._is_used(signals) and not (readers and len(self._judged) < JUDGED_MIN):
            self._clean += 1
            if self._clean == CLEAN_STEPS:
                self._growth = max(self._growth, CLEAN_GROWTH)
            self.rate = min(self.ceiling, max(self.rate * self._growth, self.rate + self._step))
        return self.rate

    def _objection(self, signals: Signals, readers: bool) -> str:
        if signals.lag_bytes > self._lag_bytes_max:
            return "replica lag"
        if not readers:
            return ""
        if not signals.round_trips or self.limit_s is None:
            return "no probe"
        late = sum(each > self.limit_s for each in self._judged)
        allowed = (1 - QUANTILE) * len(self._judged)
        spread = math.sqrt(allowed * (1 + len(self._judged) / len(self._idle)))
        if late > allowed + SIGMAS * spread + 1:
            return "probe p99"
        if signals.busy > BUSY_MAX:
            return "Redis busy"
        for name, found in signals.replicas_ms.items():
            if found > self._replica_factor * self._replicas_idle_ms.setdefault(name, found):
                return f"p99 of {name}"
        return ""

    def _is_used(self, signals: Signals) -> bool:
        # A rate that is not reached says nothing about a higher one.
        return signals.spent_s > 0 and signals.done_bytes >= USED_MIN * self.rate * signals.spent_s

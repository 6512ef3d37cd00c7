"""Governor of all bulk work on Redis: its control law, its pace, and its priority below readers.

With no readers (no live replica, no reads by others) work runs flat out and nothing here waits. With readers it is cut
into pieces that are sent one by one at the rate of a `Throttle`, which learns from probes how slow reads are during
work and during rests, which are a part of every step.
"""

import hashlib
import logging
import math
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from cache.config.night import GovernorConfig
from cache.control.control_keys import Control
from precompute.bulk.watch import FOREIGN_READS_S, RedisObservation, Watcher

_log = logging.getLogger(__name__)

MIB = float(1 << 20)
QUANTILE = 0.99
AIM_SHARE = 0.4
"""Share of the allowed slow-down that is aimed at: the margin is for readers that the probes did not meet."""

IDLE_ROUND_TRIPS = 4_000
"""Number of idle round trips kept: a p99 of a few hundred is little more than a guess."""

JUDGED_MIN = 50
STEPS_MIN = 10
STEPS_COMPARED = 32
SIGMAS = 2.0
"""Steps that are compared, and by how many standard errors of their mean they must differ for the rate to fall."""

UNHURT_EXCESS = 0.003
"""Margin of the share of late probes above the allowed one, error included; above it the rate does not rise."""

CLEAR_EXCESS = 0.2
"""Excess of the share of late probes over that at rest that, in two steps after each other, needs no statistics."""

START_FLOORS = 4.0
START_GROWTH = 1.17
BACK_OFF = 0.7
PLATEAU_STEPS = 10
"""Clean steps after a decrease until the rate is back at its former value."""

USED_MIN = 0.7
BUSY_MAX = 0.9
REPLICA_FACTOR = 1.5
"""Factor above which a heartbeat's p99 counts, since it is based on few reads."""

STEP_S = 0.25
REST_S = 0.045
SETTLE_S = 0.005
"""Seconds for Redis to finish the last pieces before a rest is measured."""

WORK_S = STEP_S - REST_S - SETTLE_S

STALE_S = 5.0
BURST_S = 0.0005
"""Seconds of the rate that may be sent at once to make up for a sleep that took too long."""

NAP_S = 0.02
CATCH_UP = 1.25
"""Multiple of the floor for making up for a pause: the floor is promised over pauses too."""

_SPUN = bytes(1 << 15)


def _spin() -> None:
    """Keep the core busy for some 40 us without holding the GIL, which probes need."""
    hashlib.blake2b(_SPUN)


class Governor:
    """Governor that paces one thread's work; the work only calls `pace` before each piece."""

    def __init__(
        self,
        config: GovernorConfig,
        watch: Watcher,
        *,
        timer: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        spin: Callable[[], None] = _spin,
        yielding: Callable[[bool], bool] = lambda _on: False,
        awake: bool = True,
    ) -> None:
        self.throttle = Throttle(
            p99_factor=config.p99_factor,
            floor=config.floor_mib_s * MIB,
            ceiling=config.ceiling_mib_s * MIB,
            lag_bytes_max=config.replica_lag_mib * MIB,
        )
        self.slept_s = 0.0
        self._config, self._watch = config, watch
        self._timer, self._sleep, self._spin, self._yielding = timer, sleep, spin, yielding
        self._awake = awake
        self._opened_at = self._stepped_at = self._due = timer()
        self._calibrated = self._is_reader_state_known = False
        self._done_bytes = 0
        self._owed_bytes = 0.0
        self._yields, self._starved = False, False
        self._governed, self._readers = self._detect_readers()

    @property
    def piece_bytes(self) -> int | None:
        """Bytes that may be sent at once; None if there are no readers to hold up."""
        return self._config.piece_bytes if self._governed else None

    @property
    def readers(self) -> bool:
        """True if this Redis has readers, as far as known."""
        return self._readers

    def pace(self, size_bytes: int) -> None:
        """Wait until this many more bytes may be sent or requested."""
        now_s = self._timer()
        if not self._is_reader_state_known:
            self._governed, self._readers = self._detect_readers()
        if now_s - self._stepped_at >= self._due_s:
            self._step(now_s)
        self._done_bytes += size_bytes
        if not self._governed:
            return
        now_s = self._timer()
        if now_s < self._due:
            self._sleep_for(self._due - now_s)
            now_s = self._timer()
        self._due = max(self._due, now_s - BURST_S) + size_bytes / self._allow(size_bytes)

    def _allow(self, size_bytes: int) -> float:
        """Return the rate for these bytes."""
        rate, floor = self.throttle.rate, self.throttle.floor
        if self._owed_bytes > 0:
            rate = max(rate, min(CATCH_UP * floor, self.throttle.ceiling))
            self._owed_bytes = max(0.0, self._owed_bytes - size_bytes * (1 - floor / rate))
        return rate * STEP_S / WORK_S if self._readers else rate

    @property
    def _due_s(self) -> float:
        """Seconds after a step until the next one is due."""
        if not self._readers:
            return STEP_S
        return WORK_S if self._calibrated else 0.0

    def own_reads(self, count: int) -> None:
        """Subtract this many of the work's own reads from those that Redis counts."""
        self._watch.own_reads(count)

    def close(self) -> None:
        """End the watch and restore the thread's priority."""
        self._yield(False)
        self._watch.close()

    def _step(self, now_s: float) -> None:
        observation = self._fresh(now_s)
        was, (self._governed, self._readers) = self._governed, self._detect_readers()
        if self._governed:
            if not was:
                self._done_bytes, self._stepped_at = 0, now_s
            if self._readers and not self._calibrated:
                self._yield(True)
                self._calibrate(observation)
            else:
                self._adapt(observation)
        self._yield(self._readers and self._governed and not self._starved)
        self._done_bytes, self._stepped_at = 0, self._timer()

    def _adapt(self, observation: RedisObservation | None) -> None:
        worked, rested = (
            (self._watch.round_trips(), self._measure_idle(REST_S)) if self._readers else ([], [])
        )
        spent_s = self._timer() - self._stepped_at
        self.throttle.step(
            Signals(
                worked=worked,
                rested=rested,
                replicas_ms=observation.replicas_ms if observation else {},
                busy=observation.busy if observation else 0.0,
                lag_bytes=observation.lag_bytes if observation else 0,
                done_bytes=self._done_bytes,
                spent_s=spent_s,
            ),
            readers=self._readers,
        )
        # A thread that gives way to all others may get nothing on a busy host; the floor is a promise.
        if self._yields and self._done_bytes < self.throttle.floor * spent_s / 2:
            self._starved = True
        _log.debug(
            "%.0f MiB/s done, %.0f MiB/s allowed %s",
            self._done_bytes / MIB / max(spent_s, 1e-9), self.throttle.rate / MIB, self.throttle.reason,
        )  # fmt: skip

    def _calibrate(self, observation: RedisObservation | None) -> None:
        """Measure idle round trips before the first piece."""
        started_at = self._timer()
        self._watch.round_trips()
        rested = self._measure_idle(self._config.idle_s)
        self.throttle.calibrate(rested, observation.replicas_ms if observation else {})
        self._calibrated = True
        self._owed_bytes += self.throttle.floor * (self._timer() - started_at)

    def _measure_idle(self, seconds: float) -> list[float]:
        """Measure round trips during an idle period."""
        self._pause(SETTLE_S)
        self._watch.round_trips()
        self._pause(seconds)
        self._due = self._timer()
        return self._watch.round_trips()

    def _pause(self, seconds: float) -> None:
        """Rest; this core and Redis' stay awake: one that halts wakes slowly, and rest would look slower than work.

        Only where the thread gives way to everything else, and for a fifth of the time; never during work that must
        not be disturbed (`awake` False).
        """
        rest_ends_at = self._timer() + seconds
        while (left_s := rest_ends_at - self._timer()) > 0:
            if self._yields and self._awake:
                self._watch.stir()
                self._spin()
            else:
                self._sleep_for(min(left_s, NAP_S))

    def _detect_readers(self) -> tuple[bool, bool]:
        """Return flags (whether to hold back, whether there are readers)."""
        if self._config.readers != "auto":
            self._is_reader_state_known, always = True, self._config.readers == "always"
            return always, always
        now_s = self._timer()
        observation = self._fresh(now_s)
        self._is_reader_state_known = observation is not None and (
            observation.replicas > 0 or observation.foreign_s is not None
        )
        if observation is None:
            # Nothing is known of readers, so they are taken to be there; the first look gets a moment to arrive.
            return True, now_s - self._opened_at >= STEP_S
        readers = observation.replicas > 0 or (observation.foreign_s or 0.0) > FOREIGN_READS_S
        is_held_back = readers or observation.followers > 0 or self._config.ceiling_mib_s > 0
        return is_held_back or not self._is_reader_state_known, readers

    def _fresh(self, now_s: float) -> RedisObservation | None:
        observation = self._watch.get_latest_observation()
        return (
            observation if observation is not None and now_s - observation.at <= STALE_S else None
        )

    def _yield(self, on: bool) -> None:
        if on != self._yields and self._config.yield_cpu:
            self._yields = self._yielding(on) and on

    def _sleep_for(self, sleep_s: float) -> None:
        self.slept_s += sleep_s
        self._sleep(sleep_s)


@contextmanager
def open_governor(
    config: GovernorConfig, control: Control, *, awake: bool = True
) -> Iterator[Governor]:
    """Open the governor of one step's work in its thread; `awake`: rests keep the cores from halting."""
    watch = Watcher(control, probe_ms=config.probe_ms)
    governor = Governor(config, watch, yielding=IdlePriority(), awake=awake)
    try:
        yield governor
    finally:
        governor.close()


@dataclass(frozen=True, slots=True)
class Signals:
    """Signals of one step: round trips of probes in seconds (inf: none came back), and load figures.

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


class Throttle:
    """Control law: a rate in bytes per second that follows its signals.

    Work rests for a part of every step, so that latencies under load and at rest are known of the same moments: a
    host that is noisy by itself slows both, and only the difference is the work's doing. Congestion is not a lost
    packet here but probes later than the limit that are more frequent under work than at rest. Steps are compared as
    batches (batch means: Law and Carson, "A sequential procedure for determining the length of a steady-state
    simulation", 1979), because late probes come in bursts and would count for more than they prove one by one.

    The rate follows CUBIC (RFC 9438, without its TCP-friendly region): it falls by a factor when there is congestion,
    comes back quickly to just below its former value, stays there for a while, and then probes further. Before the
    first decrease it grows by slow start (Jacobson, "Congestion avoidance and control", 1988).
    """

    def __init__(
        self, *, p99_factor: float, floor: float, ceiling: float, lag_bytes_max: float
    ) -> None:
        self.floor = floor
        self.ceiling = ceiling or math.inf
        self.rate = min(floor * START_FLOORS, self.ceiling)
        self.idle_p99_s: float | None = None
        self.reason = "start"
        self._factor = 1 + (p99_factor - 1) * AIM_SHARE
        self._replica_factor = p99_factor * REPLICA_FACTOR
        self._lag_bytes_max = lag_bytes_max
        self._replicas_idle_ms: dict[str, float] = {}
        self._idle: deque[float] = deque(maxlen=IDLE_ROUND_TRIPS)
        self._late: deque[tuple[float, float]] = deque(maxlen=STEPS_COMPARED)
        self._congested: float | None = None
        self._clean = 0

    def calibrate(
        self, rested: Sequence[float], replicas_ms: Mapping[str, float] | None = None
    ) -> None:
        """Add idle round trips; too few of them set no p99."""
        self._idle.extend(round_trip_s for round_trip_s in rested if math.isfinite(round_trip_s))
        if len(self._idle) >= JUDGED_MIN:
            self.idle_p99_s = p99(self._idle)
        for name, p99_ms in (replicas_ms or {}).items():
            # A heartbeat looks back some seconds, so after the first one only a lower value is news about idling.
            self._replicas_idle_ms[name] = min(p99_ms, self._replicas_idle_ms.get(name, math.inf))

    @property
    def limit_s(self) -> float | None:
        """Target p99 in seconds."""
        return None if self.idle_p99_s is None else self.idle_p99_s * self._factor

    def step(self, signals: Signals, *, readers: bool) -> float:
        """Return the next rate. Without `readers` only Redis' replicas are spared; without evidence the rate falls."""
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
        if len(more) > 1 and min(more[-2:]) > CLEAR_EXCESS:
            return True
        above, error = self._excess()
        return above > SIGMAS * error

    def _is_open(self) -> bool:
        """True if it is too early to judge whether readers are unhurt; the rate stays meanwhile."""
        above, error = self._excess()
        return len(self._late) >= STEPS_MIN and above + error > UNHURT_EXCESS

    def _excess(self) -> tuple[float, float]:
        """Return the excess of the share of late probes over the allowed one, and its standard error."""
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


def p99(round_trips: Sequence[float]) -> float:
    """Return the 99th percentile (nearest rank), inf of an empty sequence."""
    ordered = sorted(round_trips)
    return ordered[math.ceil(QUANTILE * len(ordered)) - 1] if ordered else math.inf


class IdlePriority:
    """Switch of the calling thread into Linux's idle class (it runs only on idle cores) and back.

    Only where there is a way back: without the right to leave that class again, the thread would stay in it for good.
    """

    def __init__(self) -> None:
        self._thread: int | None = None

    def __call__(self, on: bool) -> bool:
        """Enter or leave the idle class for the calling thread; return whether it is in the class now."""
        if not on:
            thread, self._thread = self._thread, None
            if thread is not None:
                _set_scheduling(thread, idle=False)
            return False
        if self._thread is None and _can_leave_idle_class():
            thread = threading.get_native_id()
            self._thread = thread if _set_scheduling(thread, idle=True) else None
        return self._thread is not None


def _set_scheduling(thread: int, *, idle: bool) -> bool:
    if not hasattr(os, "SCHED_IDLE"):
        return False
    try:
        os.sched_setscheduler(thread, os.SCHED_IDLE if idle else os.SCHED_OTHER, os.sched_param(0))
    except OSError:  # not permitted, or the thread has ended
        return False
    return True


def _can_leave_idle_class() -> bool:
    """True if a thread can enter the idle class and leave it, tried on a thread of its own."""
    trial_results: list[bool] = []

    def there_and_back() -> None:
        thread = threading.get_native_id()
        trial_results.append(
            _set_scheduling(thread, idle=True) and _set_scheduling(thread, idle=False)
        )

    trial = threading.Thread(target=there_and_back, name="larder-give-way")
    trial.start()
    trial.join()
    return trial_results[0]

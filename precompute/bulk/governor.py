"""Governor of all bulk work on Redis: its control law, its pace, and its priority below readers.

Without readers (no live replica, no reads by other clients) work runs at full speed and never waits. With readers it is
cut into pieces, which are sent one by one at the rate of a `Throttle`. The throttle compares probes of read latency
during work with probes during rests, which are a part of every step.
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
from precompute.bulk.watch import FOREIGN_READS_PER_S_MIN, RedisObservation, Watcher

_log = logging.getLogger(__name__)

MIB = float(1 << 20)
QUANTILE = 0.99
SLOWDOWN_AIM_SHARE = 0.4
"""Target share of the allowed slow-down: the margin is for readers whose reads the probes did not measure."""

IDLE_ROUND_TRIPS_MAX = 4_000
"""Number of idle round trips kept: a p99 of a few hundred is imprecise."""

IDLE_ROUND_TRIPS_MIN = 50
COMPARED_STEPS_MIN = 10
COMPARED_STEPS_MAX = 32
STANDARD_ERRORS_MIN = 2.0
"""Standard errors of the mean by which late shares under work must exceed those at rest for the rate to fall."""

UNHURT_LATE_EXCESS_MAX = 0.003
"""Limit of the excess share of late probes, standard error included; above it the rate does not rise."""

CLEAR_LATE_EXCESS = 0.2
"""Excess of late probes over those at rest that lowers the rate without statistics, if two successive steps have it."""

START_RATE_IN_FLOORS = 4.0
START_GROWTH_FACTOR = 1.17
BACK_OFF_FACTOR = 0.7
PLATEAU_STEPS = 10
"""Number of clean steps after a decrease until the rate is back at its former value."""

USED_RATE_SHARE_MIN = 0.7
BUSY_SHARE_MAX = 0.9
REPLICA_FACTOR = 1.5
"""Factor by which a heartbeat's p99 must rise to count, larger than for probes since few reads are behind it."""

STEP_S = 0.25
REST_S = 0.045
SETTLE_S = 0.005
"""Seconds for Redis to finish the last pieces before round trips at rest are measured."""

WORK_S = STEP_S - REST_S - SETTLE_S

OBSERVATION_AGE_S_MAX = 5.0
BURST_S = 0.0005
"""Seconds of sending at the current rate that may be made up at once after a sleep that took too long."""

NAP_S = 0.02
CATCH_UP_FACTOR = 1.25
"""Multiple of the floor at which a pause is made up for: the promised floor includes pauses."""

_SPIN_INPUT = bytes(1 << 15)


def _spin() -> None:
    """Keep the core busy for some 40 us without holding the GIL, which the probes need."""
    hashlib.blake2b(_SPIN_INPUT)


class Governor:
    """Pacing of one thread's bulk work, which calls `pace` before each piece."""

    def __init__(
        self,
        config: GovernorConfig,
        watcher: Watcher,
        *,
        monotonic_clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        spin_core: Callable[[], None] = _spin,
        set_idle_priority: Callable[[bool], bool] = lambda _on: False,
        keeps_cores_awake: bool = True,
    ) -> None:
        self.throttle = Throttle(
            p99_factor=config.p99_factor,
            floor_bytes_per_s=config.floor_mib_s * MIB,
            ceiling_bytes_per_s=config.ceiling_mib_s * MIB,
            redis_lag_bytes_max=config.replica_lag_mib * MIB,
        )
        self.slept_s = 0.0
        self._config, self._watcher = config, watcher
        self._timer, self._sleep, self._spin, self._set_yielding = monotonic_clock, sleep, spin_core, set_idle_priority
        self._keeps_cores_awake = keeps_cores_awake
        self._opened_at = self._stepped_at = self._next_piece_at = monotonic_clock()
        self._is_calibrated = self._is_reader_state_known = False
        self._done_bytes = 0
        self._bytes_to_make_up = 0.0
        self._is_yielding, self._is_starved = False, False
        self._is_governed, self._has_readers = self._detect_readers()

    @property
    def piece_bytes(self) -> int | None:
        """Maximum bytes of one piece; None if there are no readers whom larger pieces could delay."""
        return self._config.piece_bytes if self._is_governed else None

    @property
    def has_readers(self) -> bool:
        """True if this Redis has readers, as far as known."""
        return self._has_readers

    def pace(self, bytes_to_send: int) -> None:
        """Wait until this number of bytes may be sent or requested."""
        now_s = self._timer()
        if not self._is_reader_state_known:
            self._is_governed, self._has_readers = self._detect_readers()
        if now_s - self._stepped_at >= self._step_interval_s:
            self._step(now_s)
        self._done_bytes += bytes_to_send
        if not self._is_governed:
            return
        now_s = self._timer()
        if now_s < self._next_piece_at:
            self._sleep_for(self._next_piece_at - now_s)
            now_s = self._timer()
        self._next_piece_at = max(self._next_piece_at, now_s - BURST_S) + bytes_to_send / self._allowed_rate(
            bytes_to_send
        )

    def _allowed_rate(self, bytes_to_send: int) -> float:
        """Return the rate for sending this number of bytes."""
        rate, floor = self.throttle.rate, self.throttle.floor
        if self._bytes_to_make_up > 0:
            rate = max(rate, min(CATCH_UP_FACTOR * floor, self.throttle.ceiling))
            self._bytes_to_make_up = max(0.0, self._bytes_to_make_up - bytes_to_send * (1 - floor / rate))
        return rate * STEP_S / WORK_S if self._has_readers else rate

    @property
    def _step_interval_s(self) -> float:
        """Seconds after a step until the next one is due."""
        if not self._has_readers:
            return STEP_S
        return WORK_S if self._is_calibrated else 0.0

    def own_reads(self, own_read_count: int) -> None:
        """Subtract this many of the work's own reads from those that Redis counts."""
        self._watcher.own_reads(own_read_count)

    def close(self) -> None:
        """Stop watching readers and restore the thread's priority."""
        self._yield(False)
        self._watcher.close()

    def _step(self, now_s: float) -> None:
        observation = self._fresh_observation(now_s)
        was_governed, (self._is_governed, self._has_readers) = (self._is_governed, self._detect_readers())
        if self._is_governed:
            if not was_governed:
                self._done_bytes, self._stepped_at = 0, now_s
            if self._has_readers and not self._is_calibrated:
                self._yield(True)
                self._calibrate(observation)
            else:
                self._adapt(observation)
        self._yield(self._has_readers and self._is_governed and not self._is_starved)
        self._done_bytes, self._stepped_at = 0, self._timer()

    def _adapt(self, observation: RedisObservation | None) -> None:
        working_round_trips_s, resting_round_trips_s = (
            (self._watcher.take_round_trips_s(), self._measure_idle(REST_S)) if self._has_readers else ([], [])
        )
        spent_s = self._timer() - self._stepped_at
        self.throttle.adapt_rate(
            Signals(
                working_round_trips_s=working_round_trips_s,
                resting_round_trips_s=resting_round_trips_s,
                p99_ms_by_replica=observation.p99_ms_by_replica if observation else {},
                redis_busy_share=observation.redis_busy_share if observation else 0.0,
                redis_lag_bytes=observation.redis_lag_bytes if observation else 0,
                work_bytes=self._done_bytes,
                work_s=spent_s,
            ),
            has_readers=self._has_readers,
        )
        # A thread in the idle class may get no time on a busy host, but the floor is guaranteed.
        if self._is_yielding and self._done_bytes < self.throttle.floor * spent_s / 2:
            self._is_starved = True
        _log.debug(
            "%.0f MiB/s done, %.0f MiB/s allowed %s",
            self._done_bytes / MIB / max(spent_s, 1e-9), self.throttle.rate / MIB, self.throttle.reason,
        )  # fmt: skip

    def _calibrate(self, observation: RedisObservation | None) -> None:
        """Measure idle round trips before the first piece."""
        started_at = self._timer()
        self._watcher.take_round_trips_s()
        resting_round_trips_s = self._measure_idle(self._config.idle_s)
        self.throttle.calibrate(resting_round_trips_s, observation.p99_ms_by_replica if observation else {})
        self._is_calibrated = True
        self._bytes_to_make_up += self.throttle.floor * (self._timer() - started_at)

    def _measure_idle(self, idle_period_s: float) -> list[float]:
        """Measure round trips during an idle period."""
        self._pause(SETTLE_S)
        self._watcher.take_round_trips_s()
        self._pause(idle_period_s)
        self._next_piece_at = self._timer()
        return self._watcher.take_round_trips_s()

    def _pause(self, pause_s: float) -> None:
        """Wait without work, and keep this core and Redis' awake: a halted core wakes slowly, which adds latency.

        Cores are only kept awake if the thread has idle priority, for a fifth of the time, and never if
        `keeps_cores_awake` is False, during work that must not be disturbed.
        """
        rest_ends_at = self._timer() + pause_s
        while (left_s := rest_ends_at - self._timer()) > 0:
            if self._is_yielding and self._keeps_cores_awake:
                self._watcher.stir()
                self._spin()
            else:
                self._sleep_for(min(left_s, NAP_S))

    def _detect_readers(self) -> tuple[bool, bool]:
        """Return flags (whether to hold back, whether there are readers)."""
        if self._config.readers != "auto":
            self._is_reader_state_known, is_always = True, self._config.readers == "always"
            return is_always, is_always
        now_s = self._timer()
        observation = self._fresh_observation(now_s)
        self._is_reader_state_known = observation is not None and (
            observation.replica_count > 0 or observation.foreign_reads_per_s is not None
        )
        if observation is None:
            # Until readers are known they are assumed to exist; the first observation gets a moment to arrive.
            return True, now_s - self._opened_at >= STEP_S
        has_readers = (
            observation.replica_count > 0 or (observation.foreign_reads_per_s or 0.0) > FOREIGN_READS_PER_S_MIN
        )
        is_held_back = has_readers or observation.redis_replica_count > 0 or self._config.ceiling_mib_s > 0
        return is_held_back or not self._is_reader_state_known, has_readers

    def _fresh_observation(self, now_s: float) -> RedisObservation | None:
        observation = self._watcher.get_latest_observation()
        return (
            observation
            if observation is not None and now_s - observation.observed_at <= OBSERVATION_AGE_S_MAX
            else None
        )

    def _yield(self, is_yielding: bool) -> None:
        if is_yielding != self._is_yielding and self._config.yield_cpu:
            self._is_yielding = self._set_yielding(is_yielding) and is_yielding

    def _sleep_for(self, sleep_s: float) -> None:
        self.slept_s += sleep_s
        self._sleep(sleep_s)


@contextmanager
def open_governor(config: GovernorConfig, control: Control, *, keeps_cores_awake: bool = True) -> Iterator[Governor]:
    """Open the governor for a step's work in this thread; with `keeps_cores_awake` cores do not halt during rests."""
    watcher = Watcher(control, probe_interval_ms=config.probe_ms)
    governor = Governor(config, watcher, set_idle_priority=IdlePriority(), keeps_cores_awake=keeps_cores_awake)
    try:
        yield governor
    finally:
        governor.close()


@dataclass(frozen=True, slots=True)
class Signals:
    """Signals of one step: round trips of probes in seconds (inf: no reply), and load figures.

    `working_round_trips_s` were measured while pieces were sent, `resting_round_trips_s` while none were;
    `p99_ms_by_replica`: the p99 that replicas report; `redis_busy_share`: busy share of Redis' main thread;
    `redis_lag_bytes`: lag of the slowest replica of Redis; `work_bytes` in `work_s`: the work itself.
    """

    working_round_trips_s: Sequence[float] = ()
    resting_round_trips_s: Sequence[float] = ()
    p99_ms_by_replica: Mapping[str, float] = field(default_factory=dict)
    redis_busy_share: float = 0.0
    redis_lag_bytes: int = 0
    work_bytes: int = 0
    work_s: float = 0.0


class Throttle:
    """Control law: a rate in bytes per second that follows its signals.

    Work rests for a part of every step, so that latencies under load and at rest are measured at almost the same time:
    noise of the host raises both, and only their difference is caused by the work. Congestion means that probes later
    than the limit are more frequent under work than at rest. Steps are compared as batches (batch means: Law and
    Carson, "A sequential procedure for determining the length of a steady-state simulation", 1979): late probes come in
    bursts, so single ones are not independent.

    The rate follows CUBIC (RFC 9438, without its TCP-friendly region): it falls by a factor when there is congestion,
    comes back quickly to just below its former value, stays there for a while, and then probes further. Before the
    first decrease it grows by slow start (Jacobson, "Congestion avoidance and control", 1988).
    """

    def __init__(
        self, *, p99_factor: float, floor_bytes_per_s: float, ceiling_bytes_per_s: float, redis_lag_bytes_max: float
    ) -> None:
        self.floor = floor_bytes_per_s
        self.ceiling = ceiling_bytes_per_s or math.inf
        self.rate = min(floor_bytes_per_s * START_RATE_IN_FLOORS, self.ceiling)
        self.idle_p99_s: float | None = None
        self.reason = "start"
        self._p99_factor_aim = 1 + (p99_factor - 1) * SLOWDOWN_AIM_SHARE
        self._replica_p99_factor = p99_factor * REPLICA_FACTOR
        self._lag_bytes_max = redis_lag_bytes_max
        self._idle_p99_ms_by_replica: dict[str, float] = {}
        self._idle_round_trips_s: deque[float] = deque(maxlen=IDLE_ROUND_TRIPS_MAX)
        self._late_share_pairs: deque[tuple[float, float]] = deque(maxlen=COMPARED_STEPS_MAX)
        self._congested_rate: float | None = None
        self._clean_step_count = 0

    def calibrate(
        self, resting_round_trips_s: Sequence[float], p99_ms_by_replica: Mapping[str, float] | None = None
    ) -> None:
        """Add idle round trips; the p99 stays unknown while there are too few."""
        self._idle_round_trips_s.extend(
            round_trip_s for round_trip_s in resting_round_trips_s if math.isfinite(round_trip_s)
        )
        if len(self._idle_round_trips_s) >= IDLE_ROUND_TRIPS_MIN:
            self.idle_p99_s = p99(self._idle_round_trips_s)
        for replica_name, p99_ms in (p99_ms_by_replica or {}).items():
            # A heartbeat covers some seconds, so after the first one only a lower value can stem from idling.
            self._idle_p99_ms_by_replica[replica_name] = min(
                p99_ms, self._idle_p99_ms_by_replica.get(replica_name, math.inf)
            )

    @property
    def p99_limit_s(self) -> float | None:
        """Target p99 in seconds."""
        return None if self.idle_p99_s is None else self.idle_p99_s * self._p99_factor_aim

    def adapt_rate(self, signals: Signals, *, has_readers: bool) -> float:
        """Return the next rate.

        Without `has_readers` only the lag of Redis' replicas counts. With readers, but without probes, the rate falls.
        """
        self.reason = self._slow_down_reason(signals, has_readers)
        if has_readers:
            self.calibrate(signals.resting_round_trips_s)
        if self.reason:
            self._congested_rate, self._clean_step_count = self.rate, 0
            self.rate = max(self.floor, self.rate * BACK_OFF_FACTOR)
            self._late_share_pairs.clear()
        elif self._is_rate_reached(signals) and not (has_readers and self._is_unhurt_unknown()):
            self.rate = min(self.ceiling, self._grown_rate())
        return self.rate

    def _grown_rate(self) -> float:
        if self._congested_rate is None:
            return self.rate * START_GROWTH_FACTOR
        self._clean_step_count += 1
        plateau_excess = (self._clean_step_count - PLATEAU_STEPS) / PLATEAU_STEPS
        return max(self.rate, self._congested_rate * (1 + (1 - BACK_OFF_FACTOR) * plateau_excess**3))

    def _slow_down_reason(self, signals: Signals, has_readers: bool) -> str:
        if signals.redis_lag_bytes > self._lag_bytes_max:
            return "replica lag"
        if not has_readers:
            return ""
        if not signals.working_round_trips_s or self.p99_limit_s is None:
            return "no probe"
        working_late_share, resting_late_share = (
            sum(round_trip_s > self.p99_limit_s for round_trip_s in round_trips_s) / max(1, len(round_trips_s))
            for round_trips_s in (signals.working_round_trips_s, signals.resting_round_trips_s)
        )
        self._late_share_pairs.append((working_late_share, resting_late_share))
        if self._is_late():
            return "probe p99"
        if signals.redis_busy_share > BUSY_SHARE_MAX:
            return "Redis busy"
        for replica_name, p99_ms in signals.p99_ms_by_replica.items():
            if p99_ms > self._replica_p99_factor * self._idle_p99_ms_by_replica.setdefault(replica_name, p99_ms):
                return f"p99 of {replica_name}"
        return ""

    def _is_late(self) -> bool:
        late_share_differences = [
            working_late_share - resting_late_share for working_late_share, resting_late_share in self._late_share_pairs
        ]
        if len(late_share_differences) > 1 and min(late_share_differences[-2:]) > CLEAR_LATE_EXCESS:
            return True
        excess, standard_error = self._late_share_excess()
        return excess > STANDARD_ERRORS_MIN * standard_error

    def _is_unhurt_unknown(self) -> bool:
        """True if it is not yet proven that readers are unhurt; the rate then does not rise."""
        excess, standard_error = self._late_share_excess()
        return len(self._late_share_pairs) >= COMPARED_STEPS_MIN and excess + standard_error > UNHURT_LATE_EXCESS_MAX

    def _late_share_excess(self) -> tuple[float, float]:
        """Return the excess of the share of late probes over the allowed one, and its standard error."""
        if len(self._late_share_pairs) < COMPARED_STEPS_MIN:
            return 0.0, math.inf
        working_late_share, resting_late_share = (
            statistics.fmean(late_shares) for late_shares in zip(*self._late_share_pairs, strict=True)
        )
        deviation = statistics.stdev(
            [
                working_late_share - resting_late_share
                for working_late_share, resting_late_share in self._late_share_pairs
            ]
        )
        return working_late_share - max(1 - QUANTILE, resting_late_share), deviation / math.sqrt(
            len(self._late_share_pairs)
        )

    def _is_rate_reached(self, signals: Signals) -> bool:
        # A rate that is not reached says nothing about a higher one.
        return signals.work_s > 0 and signals.work_bytes >= USED_RATE_SHARE_MIN * self.rate * signals.work_s


def p99(round_trips_s: Sequence[float]) -> float:
    """Return the 99th percentile (nearest rank); inf for an empty sequence."""
    sorted_round_trips_s = sorted(round_trips_s)
    return (
        sorted_round_trips_s[math.ceil(QUANTILE * len(sorted_round_trips_s)) - 1] if sorted_round_trips_s else math.inf
    )


class IdlePriority:
    """Switch of the calling thread into Linux's idle class (it runs only on idle cores) and back.

    The thread only enters that class if it is permitted to leave it again.
    """

    def __init__(self) -> None:
        self._idle_thread_id: int | None = None

    def __call__(self, is_on: bool) -> bool:
        """Enter or leave the idle class for the calling thread; return whether it is in the class now."""
        if not is_on:
            thread_id, self._idle_thread_id = self._idle_thread_id, None
            if thread_id is not None:
                _set_scheduling(thread_id, is_idle=False)
            return False
        if self._idle_thread_id is None and _can_leave_idle_class():
            thread_id = threading.get_native_id()
            self._idle_thread_id = thread_id if _set_scheduling(thread_id, is_idle=True) else None
        return self._idle_thread_id is not None


def _set_scheduling(thread_id: int, *, is_idle: bool) -> bool:
    if not hasattr(os, "SCHED_IDLE"):
        return False
    try:
        os.sched_setscheduler(thread_id, os.SCHED_IDLE if is_idle else os.SCHED_OTHER, os.sched_param(0))
    except OSError:  # not permitted, or the thread has ended
        return False
    return True


def _can_leave_idle_class() -> bool:
    """True if a thread can enter the idle class and leave it; tried in a temporary thread."""
    trial_results: list[bool] = []

    def try_idle_class() -> None:
        thread = threading.get_native_id()
        trial_results.append(_set_scheduling(thread, is_idle=True) and _set_scheduling(thread, is_idle=False))

    trial_thread = threading.Thread(target=try_idle_class, name="larder-give-way")
    trial_thread.start()
    trial_thread.join()
    return trial_results[0]

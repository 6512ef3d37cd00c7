"""Governor of all bulk work on Redis: load, verify, warm, restore and retire never crowd out readers.

With no readers (no live replica, no reads by others) work runs flat out and nothing here waits. With readers it is cut
into pieces that are sent one by one at the rate of `throttle`, which learns from probes what readers feel while work
goes on and while it rests, a part of every step.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cache.config.sections import GovernorConfig
from precompute.bulk.priority import IdlePriority
from precompute.bulk.throttle import MIB, Signals, Throttle
from precompute.bulk.watch import FOREIGN_READS_S, RedisObservation, Watch, Watcher
from precompute.control.control_keys import Control

log = logging.getLogger(__name__)

STEP_S = 0.25
REST_S = 0.045
SETTLE_S = 0.005
"""Seconds in which what was sent last is worked off before a rest is measured."""

WORK_S = STEP_S - REST_S - SETTLE_S

STALE_S = 5.0
BURST_S = 0.0005
"""Seconds of the rate that may be sent at once to make up for a sleep that took too long."""

NAP_S = 0.02
CATCH_UP = 1.25
"""Multiple of the floor at which work may go to make up for a pause: the floor is a promise over pauses too."""

_SPUN = bytes(1 << 15)


def _spin() -> None:
    """Keep the core busy for some 40 us without holding the interpreter's lock, which probes need."""
    hashlib.blake2b(_SPUN)


class Governor:
    """Paces one thread's work; `pace` before each piece is all that the work needs to do."""

    def __init__(
        self,
        config: GovernorConfig,
        watch: Watch,
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
        """Bytes that may be sent at once; None when nobody is there to be held up."""
        return self._config.piece_bytes if self._governed else None

    @property
    def readers(self) -> bool:
        """True if somebody reads from this Redis, as far as can be told."""
        return self._readers

    def pace(self, size_bytes: int) -> None:
        """Wait until this much more may be sent or asked for."""
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
            self._nap(self._due - now_s)
            now_s = self._timer()
        self._due = max(self._due, now_s - BURST_S) + size_bytes / self._allow(size_bytes)

    def _allow(self, size_bytes: int) -> float:
        """The rate at which these bytes may go."""
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
        """Say that this many of the reads that Redis counts are the work's own."""
        self._watch.own_reads(count)

    def close(self) -> None:
        """End the watch and give the thread its priority back."""
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
        log.debug(
            "%.0f MiB/s done, %.0f MiB/s allowed %s",
            self._done_bytes / MIB / max(spent_s, 1e-9), self.throttle.rate / MIB, self.throttle.reason,
        )  # fmt: skip

    def _calibrate(self, observation: RedisObservation | None) -> None:
        """Measures what readers feel when nothing is done, before the first piece."""
        started_at = self._timer()
        self._watch.round_trips()
        rested = self._measure_idle(self._config.idle_s)
        self.throttle.calibrate(rested, observation.replicas_ms if observation else {})
        self._calibrated = True
        self._owed_bytes += self.throttle.floor * (self._timer() - started_at)

    def _measure_idle(self, seconds: float) -> list[float]:
        """Round trips while nothing is done for that long."""
        self._pause(SETTLE_S)
        self._watch.round_trips()
        self._pause(seconds)
        self._due = self._timer()
        return self._watch.round_trips()

    def _pause(self, seconds: float) -> None:
        """Rests; this core and Redis' stay awake: one that halts wakes slowly, and rest would look slower than work.

        Only where the thread gives way to everything else, and for a fifth of the time; never beside what matters
        more than how fast the work goes (`awake` False).
        """
        rest_ends_at = self._timer() + seconds
        while (left_s := rest_ends_at - self._timer()) > 0:
            if self._yields and self._awake:
                self._watch.stir()
                self._spin()
            else:
                self._nap(min(left_s, NAP_S))

    def _detect_readers(self) -> tuple[bool, bool]:
        """Flags (whether to hold back, whether there are readers)."""
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

    def _nap(self, seconds: float) -> None:
        self.slept_s += seconds
        self._sleep(seconds)


@contextmanager
def open_governor(
    config: GovernorConfig, control: Control, *, awake: bool = True
) -> Iterator[Governor]:
    """Governor of one step's work, for its length and in its thread; `awake`: rests keep the cores from halting."""
    watch = Watcher(control, probe_ms=config.probe_ms)
    governor = Governor(config, watch, yielding=IdlePriority(), awake=awake)
    try:
        yield governor
    finally:
        governor.close()

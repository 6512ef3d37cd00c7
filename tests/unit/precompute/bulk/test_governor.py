"""The governor against a simulated Redis: latency is a function of rate, time moves only when work or sleep does."""

import itertools
import math
import random
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.config.night import GovernorConfig
from cache.errors import ConfigError
from precompute.bulk.governor import (
    COMPARED_STEPS_MIN,
    IDLE_ROUND_TRIPS_MIN,
    MIB,
    REST_S,
    STEP_S,
    WORK_S,
    Governor,
    Signals,
    Throttle,
    p99,
)
from precompute.bulk.watch import RedisObservation, Watcher

PIECE = 128 * 1024
PROBE_S = 0.001
SMOOTHED_S = 0.004
IDLE_S = 100e-6
BURST_S = 0.01
SPIN_S = 50e-6


@dataclass
class Plant:
    """A Redis whose readers slow down with the rate of the work, and which can do no more than `most`.

    A round trip is 100 us with some noise; above `knee` bytes/s readers get slower in proportion. `restless` is how
    much of the time the host itself makes everything ten times slower, in bursts.
    """

    knee: float = 200 * MIB
    rate_max: float = 2_000 * MIB
    seed: int = 0
    now_s: float = 0.0
    readers: bool = True
    silent: bool = False
    restless: float = 0.0
    blind: bool = False
    followers: int = 0
    lag_bytes: int = 0
    closed: bool = False
    slept_s: float = 0.0
    stirred: int = 0
    felt_rate: float = 0.0
    trips: list[float] = field(default_factory=list)
    probed_at: float = 0.0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.is_burst = False

    def timer(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self._pass(seconds)

    def work(self, governor: Governor, seconds: float) -> float:
        """Send pieces for that long; bytes per second."""
        started_at, sent_bytes = self.now_s, 0
        while self.now_s - started_at < seconds:
            governor.pace(PIECE)
            self.felt_rate += PIECE / SMOOTHED_S
            sent_bytes += PIECE
            self._pass(PIECE / self.rate_max)
        return sent_bytes / (self.now_s - started_at)

    def _pass(self, seconds: float) -> None:
        self.now_s += seconds
        while self.probed_at < self.now_s:
            self.probed_at += PROBE_S
            self.felt_rate *= math.exp(-PROBE_S / SMOOTHED_S)
            slower = max(1.0, self.felt_rate / self.knee)
            if self.rng.random() < PROBE_S / BURST_S:
                self.is_burst = self.rng.random() < self.restless
            slower *= 10.0 if self.is_burst else 1.0
            if not self.silent:
                self.trips.append(IDLE_S * slower * self.rng.uniform(0.9, 1.1))

    def get_latest_observation(self) -> RedisObservation | None:
        if self.blind:
            return None
        return RedisObservation(self.now_s, {}, int(self.readers), 0.0, 0.0, self.followers, self.lag_bytes)

    def take_round_trips_s(self) -> list[float]:
        recent_trips, self.trips = self.trips, []
        return recent_trips

    def own_reads(self, count: int) -> None:
        pass

    def stir(self) -> None:
        self.stirred += 1

    def close(self) -> None:
        self.closed = True

    def felt(self, governor: Governor, seconds: float) -> float:
        """p99 of readers while work goes on for that long."""
        earlier_trip_count = len(self.trips)
        observed_trips: list[float] = []
        ends_at = self.now_s + seconds
        read_round_trips = self.take_round_trips_s
        self.take_round_trips_s = lambda: observed_trips.extend(found := read_round_trips()) or found  # type: ignore[method-assign,func-returns-value]
        while self.now_s < ends_at:
            self.work(governor, min(0.1, ends_at - self.now_s))
        observed_trips += self.trips[min(earlier_trip_count, len(self.trips)) :]
        self.take_round_trips_s = read_round_trips  # type: ignore[method-assign]
        return p99(observed_trips)


def governed(plant: Plant, **settings: object) -> Governor:
    return Governor(
        GovernorConfig(**{"piece_bytes": PIECE, **settings}),  # type: ignore[arg-type]
        cast(Watcher, plant),
        monotonic_clock=plant.timer,
        sleep=plant.sleep,
    )


def test_without_readers_nothing_waits_and_pages_go_whole():
    plant = Plant(readers=False)
    governor = governed(plant)

    rate = plant.work(governor, 5.0)

    assert plant.slept_s == 0 and governor.piece_bytes is None
    assert rate == pytest.approx(plant.rate_max, rel=0.01)


@settings(max_examples=15, deadline=None)
@given(knee=st.integers(60, 600), seed=st.integers(0, 2**31))
def test_with_readers_their_p99_stays_within_the_factor_and_the_rate_near_what_that_allows(knee, seed):
    plant = Plant(knee=knee * MIB, seed=seed)
    governor = governed(plant)
    plant.work(governor, 10.0)

    felt = plant.felt(governor, 10.0)
    rate = plant.work(governor, 5.0)

    assert felt <= 1.25 * 1.1 * IDLE_S
    assert rate > 0.5 * plant.knee


@pytest.mark.parametrize("awake", [True, False])
def test_while_it_rests_neither_core_halts_unless_that_would_be_felt(awake):
    plant = Plant()
    governor = Governor(
        GovernorConfig(piece_bytes=PIECE),
        cast(Watcher, plant),
        monotonic_clock=plant.timer,
        sleep=plant.sleep,
        spin_core=lambda: plant.sleep(SPIN_S),
        set_idle_priority=lambda on: on,
        keeps_cores_awake=awake,
    )
    plant.work(governor, 10 * STEP_S)
    rests = plant.stirred * SPIN_S

    if awake:
        assert rests > 5 * REST_S and governor.slept_s < rests
    else:
        assert rests == 0 and governor.slept_s > 5 * REST_S


@pytest.mark.parametrize("seed", range(5))
def test_a_host_that_is_restless_by_itself_does_not_slow_the_work_down(seed):
    plant = Plant(knee=300 * MIB, seed=seed, restless=0.05)
    governor = governed(plant)
    plant.work(governor, 20.0)

    assert plant.work(governor, 20.0) > 0.5 * plant.knee


def test_it_never_presses_for_long():
    """Slow start may pass the limit; within two steps the rate is below what hurt."""
    plant = Plant(knee=100 * MIB)
    governor = governed(plant)
    worst_s, above_since = 0.0, None
    while plant.now_s < 30:
        rate = plant.work(governor, 0.05)
        if rate > 1.5 * plant.knee:
            above_since = plant.now_s if above_since is None else above_since
            worst_s = max(worst_s, plant.now_s - above_since)
        else:
            above_since = None

    assert worst_s <= 3 * STEP_S


def test_when_readers_slow_down_it_falls_and_when_they_recover_it_rises_again():
    plant = Plant(knee=400 * MIB)
    governor = governed(plant)
    initial_rate = plant.work(governor, 8.0)

    plant.knee = 60 * MIB
    plant.work(governor, 6.0)
    during = plant.work(governor, 4.0)
    plant.knee = 400 * MIB
    plant.work(governor, 14.0)
    after = plant.work(governor, 4.0)

    assert during < 100 * MIB < 0.5 * initial_rate
    assert after > 0.7 * initial_rate


def test_readers_that_come_are_noticed_and_those_that_leave_forgotten():
    plant = Plant(readers=False, knee=100 * MIB)
    governor = governed(plant)
    plant.work(governor, 2.0)

    plant.readers = True
    plant.work(governor, 8.0)
    slowed = plant.work(governor, 2.0)
    plant.readers = False
    plant.work(governor, 2 * STEP_S)
    alone = plant.work(governor, 2.0)

    assert slowed < 200 * MIB and governor.piece_bytes is None
    assert alone == pytest.approx(plant.rate_max, rel=0.01)


def test_a_probe_that_brings_nothing_means_the_floor_not_a_stop():
    plant = Plant(silent=True)
    governor = governed(plant, floor_mib_s=16.0)
    plant.work(governor, 8.0)

    assert plant.work(governor, 4.0) == pytest.approx(16 * MIB, rel=0.2)


def test_a_redis_that_tells_nothing_is_taken_to_have_readers():
    plant = Plant(blind=True, silent=True)
    governor = governed(plant, floor_mib_s=16.0)
    plant.work(governor, 8.0)

    assert governor.has_readers and plant.work(governor, 4.0) == pytest.approx(16 * MIB, rel=0.2)


def test_a_rest_of_every_step_is_all_that_it_costs_to_know_what_idle_is():
    plant = Plant()
    governor = governed(plant, idle_s=0.5, ceiling_mib_s=64.0)
    plant.work(governor, 5.0)
    rests, was, ends_at = 0, plant.now_s, plant.now_s + 40 * STEP_S
    while plant.now_s < ends_at:
        governor.pace(PIECE)
        rests += plant.now_s - was > 0.9 * REST_S
        was = plant.now_s

    assert 38 <= rests <= 41
    # Pieces between the rests are written faster, so that the rate is kept.
    assert plant.work(governor, 10.0) == pytest.approx(64 * MIB, rel=0.05)
    assert WORK_S + REST_S < STEP_S


@pytest.mark.parametrize("seconds", [3.0, 70.0])
def test_the_floor_is_a_promise_that_counts_the_pauses_in(seconds):
    plant = Plant(silent=True)
    governor = governed(plant, floor_mib_s=16.0, idle_s=0.5)

    assert plant.work(governor, seconds) >= 0.995 * 16 * MIB
    plant.work(governor, 10.0)
    assert plant.work(governor, 5.0) <= 16 * MIB * 1.07


def test_replicas_of_redis_that_fall_behind_slow_even_a_load_without_readers():
    plant = Plant(readers=False, followers=1)
    governor = governed(plant, replica_lag_mib=32.0)
    fast = plant.work(governor, 10.0)

    plant.lag_bytes = int(64 * MIB)
    plant.work(governor, 10.0)

    assert plant.work(governor, 4.0) == pytest.approx(16 * MIB, rel=0.2) and fast > 100 * MIB


def test_a_ceiling_holds_with_and_without_readers():
    for readers in (True, False):
        plant = Plant(readers=readers, knee=1_000 * MIB)
        governor = governed(plant, ceiling_mib_s=50.0)
        plant.work(governor, 3.0)
        assert plant.work(governor, 3.0) <= 52 * MIB


def test_never_is_an_open_loop_and_always_paces_without_readers():
    plant = Plant(readers=True)
    assert plant.work(governed(plant, readers="never"), 2.0) == pytest.approx(plant.rate_max, rel=0.01)
    plant = Plant(readers=False)
    governor = governed(plant, readers="always")
    plant.work(governor, 1.0)
    assert governor.has_readers and governor.piece_bytes == PIECE


def throttle() -> Throttle:
    calibrated_throttle = Throttle(
        p99_factor=1.25, floor_bytes_per_s=MIB, ceiling_bytes_per_s=0, redis_lag_bytes_max=MIB
    )
    calibrated_throttle.calibrate([IDLE_S] * IDLE_ROUND_TRIPS_MIN, {"a": 1.0})
    return calibrated_throttle


def step(throttle: Throttle, worked: list[float], **more: Any) -> float:
    """One step in which the whole rate was used."""
    signal_fields = {"work_bytes": 10**9, "work_s": 0.1, "resting_round_trips_s": [IDLE_S] * 20, **more}
    return throttle.adapt_rate(Signals(worked, **signal_fields), has_readers=True)


def test_a_replicas_own_p99_counts_when_it_is_clearly_above_what_it_was():
    calibrated_throttle = throttle()
    rate = calibrated_throttle.rate

    assert step(calibrated_throttle, [IDLE_S] * IDLE_ROUND_TRIPS_MIN, p99_ms_by_replica={"a": 1.2}) > rate
    rate = calibrated_throttle.rate
    assert step(calibrated_throttle, [IDLE_S] * IDLE_ROUND_TRIPS_MIN, p99_ms_by_replica={"a": 3.0}) < rate
    assert calibrated_throttle.reason == "p99 of a"


def test_one_late_reply_of_many_moves_nothing_and_one_in_ten_is_enough_to_fall():
    calibrated_throttle = throttle()
    rates = [step(calibrated_throttle, [*[IDLE_S] * 99, 1.0]) for _ in range(2 * COMPARED_STEPS_MIN)]
    assert rates == sorted(rates) and rates[-1] > rates[0]

    for _ in range(2 * COMPARED_STEPS_MIN):
        step(calibrated_throttle, [*[IDLE_S] * 90, *[1.0] * 10])
        if calibrated_throttle.reason:
            break
    assert calibrated_throttle.reason == "probe p99"


def test_two_steps_of_nothing_but_late_replies_need_no_more():
    calibrated_throttle = throttle()
    reasons = []
    for _ in range(2):
        step(calibrated_throttle, [math.inf] * 100)
        reasons.append(calibrated_throttle.reason)
    assert reasons == ["", "probe p99"]


def test_what_is_as_late_at_rest_is_not_the_works_doing():
    calibrated_throttle = throttle()
    slow = [*[IDLE_S] * 14, *[1.0] * 6]

    for _ in range(4 * COMPARED_STEPS_MIN):
        step(calibrated_throttle, slow * 5, resting_round_trips_s=slow)
        assert not calibrated_throttle.reason


def test_after_a_decrease_the_rate_comes_back_fast_and_waits_below_where_it_was():
    """The shape of CUBIC: concave up to the last congestion, flat there, convex beyond."""
    calibrated_throttle = throttle()
    calibrated_throttle.rate = 100.0 * MIB
    for _ in range(2):
        step(calibrated_throttle, [1.0] * 100)
    rates = [calibrated_throttle.rate, *(step(calibrated_throttle, [IDLE_S] * 100) for _ in range(20))]

    grown = [after - previous_rate for previous_rate, after in itertools.pairwise(rates)]
    assert min(grown) >= 0 and grown[0] > 5 * grown[9] and grown[19] > 5 * grown[9]
    assert rates[10] == pytest.approx(rates[0] / 0.7)


def test_a_rate_that_is_not_reached_does_not_grow():
    calibrated_throttle = throttle()
    rate = calibrated_throttle.rate

    step(calibrated_throttle, [IDLE_S] * 100, work_bytes=int(rate / 10), work_s=1.0)

    assert calibrated_throttle.rate == rate


@pytest.mark.parametrize(
    "wrong",
    [
        {"p99_factor": 1.0}, {"readers": "maybe"}, {"floor_mib_s": 0.0}, {"piece_bytes": 100},
        {"ceiling_mib_s": 1.0}, {"ceiling_mib_s": -1.0}, {"probe_ms": 0.0}, {"idle_s": 0.0},
        {"replica_lag_mib": 0.0}, {"yield_cpu": "yes"},
    ],
    ids=str,
)  # fmt: skip
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        GovernorConfig(**wrong)

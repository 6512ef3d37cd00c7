"""Intervals of ratios: they hold at every look of a long run, and find an effect that is there."""

import math

import numpy as np
import pytest

from cache.traffic.experiments import RATE_RATIO_ALPHA, rate_ratio

LOOK_COUNT = 60
RUNS = 1_500


def runs(seed: int, rate: float, base: float, per_look: int) -> list[tuple[bool, bool]]:
    """For each run, whether the true ratio, and whether 1, was outside at any look."""
    rng = np.random.default_rng(seed)
    run_verdicts = []
    for _ in range(RUNS):
        events = rng.poisson(rate * per_look, LOOK_COUNT).cumsum().tolist()
        baseline_events = rng.poisson(base * per_look, LOOK_COUNT).cumsum().tolist()
        misses = excludes = False
        for look_number, (a, b) in enumerate(zip(events, baseline_events, strict=True), 1):
            interval = rate_ratio(a, look_number * per_look, b, look_number * per_look)
            if interval is not None:
                misses |= not interval.low <= rate / base <= interval.high
                excludes |= not interval.low <= 1 <= interval.high
        run_verdicts.append((misses, excludes))
    return run_verdicts


@pytest.mark.parametrize(("rate", "base"), [(0.05, 0.05), (0.06, 0.05), (0.02, 0.05)])
def test_the_true_ratio_leaves_the_interval_in_at_most_alpha_of_all_runs(rate: float, base: float) -> None:
    missed = sum(misses for misses, _ in runs(7, rate, base, 400))

    # Five standard deviations above what is allowed.
    assert missed <= RUNS * RATE_RATIO_ALPHA + 5 * math.sqrt(RUNS * RATE_RATIO_ALPHA * (1 - RATE_RATIO_ALPHA))


def test_an_effect_that_is_there_is_found_and_looking_on_is_no_way_to_find_one_that_is_not() -> None:
    detection_count = sum(excludes for _, excludes in runs(3, 0.06, 0.05, 4_000))

    assert detection_count > 0.99 * RUNS


def test_rates_without_events_bound_nothing_and_more_of_them_bound_more() -> None:
    assert rate_ratio(0, 10, 5, 10) is None and rate_ratio(5, 10, 0, 10) is None
    small_sample_ratio, large_sample_ratio = (
        rate_ratio(50, 1_000, 60, 1_000),
        rate_ratio(5_000, 100_000, 6_000, 100_000),
    )
    assert small_sample_ratio is not None and large_sample_ratio is not None
    assert small_sample_ratio.ratio == pytest.approx(5 / 6) == large_sample_ratio.ratio
    assert (
        small_sample_ratio.low
        < large_sample_ratio.low
        < large_sample_ratio.ratio
        < large_sample_ratio.high
        < 1
        < small_sample_ratio.high
    )

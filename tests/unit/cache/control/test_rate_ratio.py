"""Intervals of ratios: they hold at every look of a long run, and find an effect that is there."""

import math

import numpy as np
import pytest

from cache.control.rate_ratio import ALPHA, rate_ratio

LOOKS = 60
RUNS = 1_500


def runs(seed: int, rate: float, base: float, per_look: int) -> list[tuple[bool, bool]]:
    """For each run, whether the true ratio, and whether 1, was outside at any look."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(RUNS):
        events = rng.poisson(rate * per_look, LOOKS).cumsum().tolist()
        others = rng.poisson(base * per_look, LOOKS).cumsum().tolist()
        misses = excludes = False
        for look, (a, b) in enumerate(zip(events, others, strict=True), 1):
            each = rate_ratio(a, look * per_look, b, look * per_look)
            if each is not None:
                misses |= not each.low <= rate / base <= each.high
                excludes |= not each.low <= 1 <= each.high
        found.append((misses, excludes))
    return found


@pytest.mark.parametrize(("rate", "base"), [(0.05, 0.05), (0.06, 0.05), (0.02, 0.05)])
def test_the_true_ratio_leaves_the_interval_in_at_most_alpha_of_all_runs(
    rate: float, base: float
) -> None:
    missed = sum(misses for misses, _ in runs(7, rate, base, 400))

    # Five standard deviations above what is allowed.
    assert missed <= RUNS * ALPHA + 5 * math.sqrt(RUNS * ALPHA * (1 - ALPHA))


def test_an_effect_that_is_there_is_found_and_looking_on_is_no_way_to_find_one_that_is_not() -> (
    None
):
    found = sum(excludes for _, excludes in runs(3, 0.06, 0.05, 4_000))

    assert found > 0.99 * RUNS


def test_rates_without_events_bound_nothing_and_more_of_them_bound_more() -> None:
    assert rate_ratio(0, 10, 5, 10) is None and rate_ratio(5, 10, 0, 10) is None
    few, many = rate_ratio(50, 1_000, 60, 1_000), rate_ratio(5_000, 100_000, 6_000, 100_000)
    assert few is not None and many is not None
    assert few.ratio == pytest.approx(5 / 6) == many.ratio
    assert few.low < many.low < many.ratio < many.high < 1 < few.high

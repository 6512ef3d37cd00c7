"""Bounds of an error rate: they hold at every moment at once, and come close."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.metrics.sequential import highest_error_rate, lowest_error_rate

ALPHA = 0.05


def rates(name: str, rng: np.random.Generator, count: int) -> np.ndarray:
    """Chances of each sample, which may change, also by what was seen."""
    match name:
        case "rare":
            return np.full(count, 0.002)
        case "often":
            return np.full(count, 0.3)
        case "turning":
            return np.where(np.arange(count) < count // 2, 0.0, 0.2)
        case _:
            return rng.choice([0.0, 0.01, 0.5], count)


@pytest.mark.parametrize("name", ["rare", "often", "turning", "wild"])
def test_the_mean_chance_leaves_its_bounds_at_any_moment_as_rarely_as_they_say(name: str) -> None:
    runs, samples = 300, 1_200
    above = below = 0
    rng = np.random.default_rng(17)
    checkpoints = np.unique(np.geomspace(1, samples, 60).astype(int))
    for _ in range(runs):
        chances = rates(name, rng, samples)
        wrong = np.cumsum(rng.random(samples) < chances)
        mean = np.cumsum(chances) / np.arange(1, samples + 1)
        observations = [(int(at), int(wrong[at - 1]), mean[at - 1]) for at in checkpoints]
        above += any(mean > highest_error_rate(at, wrong_count, ALPHA) for at, wrong_count, mean in observations)
        below += any(mean < lowest_error_rate(at, wrong_count, ALPHA) for at, wrong_count, mean in observations)

    # Three standard deviations of a count whose chance is at most alpha.
    violations_max = ALPHA * runs + 3 * (ALPHA * (1 - ALPHA) * runs) ** 0.5
    assert above <= violations_max and below <= violations_max


@given(st.integers(1, 10**6), st.floats(0, 1), st.floats(1e-9, 0.5))
def test_bounds_lie_around_what_was_measured_and_widen_with_certainty(samples: int, share: float, alpha: float) -> None:
    wrong = round(share * samples)
    low, high = lowest_error_rate(samples, wrong, alpha), highest_error_rate(samples, wrong, alpha)

    assert 0 <= low <= wrong / samples + 1e-9 and wrong / samples - 1e-9 <= high <= 1
    assert lowest_error_rate(samples, wrong, alpha / 10) <= low and high <= highest_error_rate(
        samples, wrong, alpha / 10
    )


def test_no_error_in_n_samples_says_what_the_rule_of_three_says() -> None:
    assert highest_error_rate(0, 0, ALPHA) == 1 and lowest_error_rate(0, 0, ALPHA) == 0
    assert highest_error_rate(1_000, 0, ALPHA) == pytest.approx(np.log(5 / ALPHA) / 1_000, rel=0.01)


def test_evidence_of_a_rate_above_the_bound_comes_soon() -> None:
    assert lowest_error_rate(3, 3, ALPHA) > 0.01 and lowest_error_rate(1_000, 50, ALPHA) > 0.02
    assert lowest_error_rate(100, 1, ALPHA) < 0.01

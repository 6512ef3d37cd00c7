"""The test for drift, both sides by simulation: it finds what is bad within so many samples, and cries wolf rarely."""

from collections.abc import Callable

import numpy as np
import pytest

from serving.metrics.sequential import DRIFT_ALPHA, Drift

FLOOR = 0.85
Draw = Callable[[np.random.Generator], float]


def healthy(rng: np.random.Generator) -> float:
    return float(np.clip(rng.normal(0.96, 0.05), 0, 1))


def altered(altered_share: float) -> Draw:
    """So many of the answers have almost nothing in common with what the model says."""

    def draw(rng: np.random.Generator) -> float:
        return float(rng.choice([0.0, 0.05, 0.1])) if rng.random() < altered_share else healthy(rng)

    return draw


def found_after(draw: Draw, healthy_count: int, rng: np.random.Generator, samples_max: int) -> int:
    drift = Drift(FLOOR, DRIFT_ALPHA / 5)
    for _ in range(healthy_count):
        drift.add_overlap(healthy(rng))
    assert not drift.is_drift_found
    for count in range(1, samples_max + 1):
        if drift.add_overlap(draw(rng)):
            return count
    return samples_max + 1


@pytest.mark.parametrize(("altered_share", "within"), [(1.0, 25), (0.5, 120), (0.3, 600)])
@pytest.mark.parametrize("healthy_count", [0, 1_000, 20_000])
def test_drift_is_found_within_a_stated_number_of_samples(
    altered_share: float, within: int, healthy_count: int
) -> None:
    rng = np.random.default_rng(7)

    worst = max(found_after(altered(altered_share), healthy_count, rng, within) for _ in range(20))

    assert worst <= within


@pytest.mark.parametrize(
    "draw",
    [lambda rng: FLOOR, lambda rng: float(rng.random() < FLOOR), lambda rng: float(rng.beta(8.5, 1.5))],
    ids=["constant", "all or nothing", "spread"],
)
def test_a_false_alarm_is_as_rare_as_it_says_at_the_very_edge(draw: Draw) -> None:
    alpha, runs, samples = 0.05, 400, 500
    rng = np.random.default_rng(11)
    alarms = 0
    for _ in range(runs):
        drift = Drift(FLOOR, alpha)
        alarms += any(drift.add_overlap(draw(rng)) for _ in range(samples))

    # Three standard deviations of a count whose chance is at most alpha.
    assert alarms <= alpha * runs + 3 * (alpha * (1 - alpha) * runs) ** 0.5


def test_an_alarm_stays_and_says_when() -> None:
    drift = Drift(FLOOR, DRIFT_ALPHA)
    while not drift.add_overlap(0.0):
        pass
    alarmed_after = drift.alarm_after_samples
    for _ in range(1_000):
        drift.add_overlap(1.0)

    assert (
        drift.is_drift_found
        and drift.alarm_after_samples == alarmed_after
        and alarmed_after is not None
        and alarmed_after < 20
    )


def test_evidence_is_bounded_however_bad_it_gets() -> None:
    drift = Drift(FLOOR, DRIFT_ALPHA)
    for _ in range(10_000):
        drift.add_overlap(0.0)

    assert np.isfinite(drift.evidence)

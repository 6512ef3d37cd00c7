"""Whether a canary is published or abandoned: every measure within its limit, or not at all."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from precompute.comparison import Comparison, Totals, decide, psi, shift
from precompute.sections import CanaryConfig
from serving.arms import Counts, bucket

SEED = 1_703
LIMITS = CanaryConfig(requests_min=100, feedback_event="click")


def arm(*, requests: int = 1_000, l2: int = 800, mean: float = 4.0, clicks: int = 100) -> Totals:
    """As replicas count it: lists with log-normal top scores around `mean`."""
    rng = np.random.default_rng(SEED)
    scores = mean * np.exp(rng.normal(0, 0.3, requests))
    sources = {"l2": l2, "l1": requests - l2}
    buckets = Counter(bucket(float(each)) for each in scores)
    return Totals(requests, Counter(sources), buckets, float(scores.sum()), Counter(click=clicks))


def test_a_canary_like_the_live_one_is_published() -> None:
    found = Comparison.of(arm(), arm(requests=500, l2=395, mean=4.0, clicks=52))

    verdict, against = decide(found, LIMITS)

    assert (verdict, against) == ("publish", [])
    assert found.feedback["click"] == pytest.approx(1.04)


@pytest.mark.parametrize(
    ("canary", "says"),
    [
        (arm(requests=99, l2=79, clicks=10), "at least 100 are needed"),
        (arm(l2=700), "source_shift 0.1000 is above 0.05"),
        (arm(mean=6.0), "score_psi"),
        (arm(clicks=80), "click per request is 0.8000 of live's"),
        (Totals(1_000, Counter(l2=800, l1=200)), "score_psi inf"),
        (Totals(), "canary answered 0 requests"),
    ],
)
def test_a_canary_that_differs_is_abandoned_and_the_reason_says_by_how_much(
    canary: Totals, says: str
) -> None:
    verdict, against = decide(Comparison.of(arm(), canary), LIMITS)

    assert verdict == "abandon" and any(says in each for each in against)


def test_feedback_that_was_asked_for_and_never_came_is_no_consent() -> None:
    found = Comparison.of(arm(clicks=0), arm(clicks=0))

    assert decide(found, LIMITS)[0] == "abandon"
    assert decide(found, CanaryConfig(requests_min=100))[0] == "publish"


def test_a_measure_that_is_not_a_number_speaks_against() -> None:
    found = Comparison({"live": 1_000, "canary": 1_000}, math.nan, math.nan, {}, {})

    assert len(decide(found, CanaryConfig(requests_min=1))[1]) == 2


def test_the_mix_and_the_distribution_are_compared_by_share() -> None:
    assert shift({"l1": 90, "l2": 10}, {"l1": 9, "l2": 1}) == pytest.approx(0)
    assert shift({"l1": 10}, {"default": 10}) == 1 and shift({}, {"l1": 1}) == 1
    rng = np.random.default_rng(SEED)
    one, other = (Counter(rng.poisson(40, size).tolist()) for size in (20_000, 1_000))
    assert psi(one, one) == pytest.approx(0) and psi(one, other) < 0.03
    assert psi(one, {each + 8: count for each, count in other.items()}) > 0.25
    assert psi(one, {}) == math.inf


def test_arms_of_several_replicas_add_up_after_a_trip_through_json() -> None:
    counts = Counts()
    answers: list[dict[str, Any]] = [
        {"source": "l2", "scores": np.array([3.5, 2.0], np.float32)},
        {"source": "previous", "scores": [9.0]},
        {"source": "default", "scores": []},
    ]
    counts.answered(answers)
    counts.heard("click", 3)

    total = Totals.of([counts.to_json(), counts.to_json()])

    assert total.requests == 2 and total.feedback == {"click": 6}
    assert total.sources == {"l2": 2, "previous": 2, "default": 2}
    # Only scores of the arm's own generation.
    assert total.scores == {bucket(3.5): 2} and total.mean_score == 3.5


def test_buckets_grow_with_the_score_and_are_bounded() -> None:
    scores = sorted(
        [0.0, -0.0, 1e-30, math.inf, -math.inf]
        + [sign * 2.0**power for sign in (-1, 1) for power in range(-20, 21)]
    )

    found = [bucket(each) for each in scores]

    assert found == sorted(found) and -256 <= found[0] <= found[-1] <= 256
    assert len({bucket(each) for each in (1.0, 1.1, 1.2, 1.3)}) == 4


def test_kinds_of_feedback_are_bounded() -> None:
    counts = Counts()

    for number in range(100):
        counts.heard(f"event_{number}", 1)

    assert len(counts.feedback) == 17 and counts.feedback["other"] == 84

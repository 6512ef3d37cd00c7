"""Whether a canary is published or abandoned: every measure within its limit, or not at all."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from cache.config.night import CanaryConfig
from precompute.traffic.arm_comparison import (
    ArmComparison,
    CanaryArmTotals,
    decide,
    mix_shift,
    population_stability_index,
)
from serving.traffic.canary import ArmCounts, KeySample, bucket_of_score

SEED = 1_703
LIMITS = CanaryConfig(requests_min=100, feedback_event="click")


def arm(
    *, requests: int = 4_000, defaults: int = 80, mean: float = 4.0, clicks: int = 400, keys: int = 2_000
) -> CanaryArmTotals:
    """As one replica counts it: keys with log-normal top scores around `mean`, some answered by defaults."""
    rng = np.random.default_rng(SEED)
    scores = mean * np.exp(rng.normal(0, 0.3, keys - defaults))
    return CanaryArmTotals.of(
        [
            {
                "requests": requests,
                "keys": keys,
                "weight": 1,
                "kinds": {"stored": keys - defaults, "default": defaults},
                "scores": Counter(bucket_of_score(float(score)) for score in scores),
                "score_sum": float(scores.sum()),
                "feedback": {"click": clicks},
            }
        ]
    )


def test_a_canary_like_the_live_one_is_published() -> None:
    comparison = ArmComparison.of(arm(), arm(requests=2_000, keys=1_000, defaults=43, clicks=208))

    verdict, against = decide(comparison, LIMITS)

    assert (verdict, against) == ("publish", [])
    assert comparison.feedback["click"] == pytest.approx(1.04)


@pytest.mark.parametrize(
    ("canary", "says"),
    [
        (arm(defaults=400), "source_shift 0.1600 is above 0.05"),
        (arm(mean=6.0), "score_psi"),
        (arm(clicks=250), "click per request is 0.6250 of live's"),
        (arm(defaults=2_000), "score_psi inf"),
    ],
)
def test_a_canary_that_differs_is_abandoned_and_the_reason_says_by_how_much(canary: CanaryArmTotals, says: str) -> None:
    verdict, against = decide(ArmComparison.of(arm(), canary), LIMITS)

    assert verdict == "abandon" and any(says in reason for reason in against)


@pytest.mark.parametrize(
    ("canary", "says"),
    [
        (arm(requests=99, clicks=10), "99 requests, at least 100 are needed"),
        (arm(keys=150, defaults=6), "150 keys, at least 200 are needed"),
        (arm(keys=250, defaults=25), "may be chance with so few keys"),
        (arm(clicks=350), "but values down to"),
        (CanaryArmTotals(), "canary answered 0 requests"),
        (arm(keys=20, defaults=20), "at least 200 are needed"),
    ],
)
def test_what_was_counted_too_seldom_decides_nothing(canary: CanaryArmTotals, says: str) -> None:
    verdict, against = decide(ArmComparison.of(arm(), canary), LIMITS)

    assert verdict == "undecided" and any(says in reason for reason in against)


def test_feedback_that_was_asked_for_and_never_came_is_no_consent() -> None:
    comparison = ArmComparison.of(arm(clicks=0), arm(clicks=0))

    assert decide(comparison, LIMITS)[0] == "undecided"
    assert decide(comparison, CanaryConfig(requests_min=100))[0] == "publish"


def test_a_measure_that_is_not_a_number_is_no_consent() -> None:
    enough, chance = {"live": 1_000, "canary": 1_000}, {"source_shift": 0.01, "score_psi": 0.01}
    comparison = ArmComparison(enough, enough, math.nan, math.nan, chance, {}, {}, {})

    assert decide(comparison, CanaryConfig(requests_min=1))[0] == "undecided"


def test_a_key_that_every_replica_counted_makes_nothing_more_certain() -> None:
    rng = np.random.default_rng(SEED)
    counts = [ArmCounts() for _ in range(3)]
    for number in range(300):
        top = [float(rng.lognormal())]
        for replica_counts in counts:
            replica_counts.count_answers(b"key-%d" % number, [{"source": "l2", "scores": top}])

    total = CanaryArmTotals.of(replica_counts.to_json() for replica_counts in counts)

    assert total.effective_key_count == pytest.approx(300, rel=0.1)
    assert total.distinct_key_estimate == pytest.approx(300, rel=0.1)


@pytest.mark.parametrize("replica_count", [1, 2, 5])
def test_keys_that_replicas_share_out_are_counted_together(replica_count: int) -> None:
    counts = [ArmCounts() for _ in range(replica_count)]
    for number in range(40):
        counts[number % replica_count].count_answers(b"key-%d" % number, [{"source": "l2"}])

    total = CanaryArmTotals.of(replica_counts.to_json() for replica_counts in counts)

    comparison = ArmComparison.of(total, total)
    assert comparison.keys["live"] == pytest.approx(40, rel=0.1)
    assert total.effective_key_count == pytest.approx(40, rel=0.3)


def test_keys_of_replicas_that_send_no_sketch_may_be_the_same() -> None:
    counts = [ArmCounts() for _ in range(2)]
    for number in range(40):
        counts[number % 2].count_answers(b"key-%d" % number, [{"source": "l2"}])
    heartbeat_counts = [replica_counts.to_json() for replica_counts in counts]
    del heartbeat_counts[0]["sketch"]

    total = CanaryArmTotals.of(heartbeat_counts)

    assert (total.distinct_key_estimate, total.effective_key_count) == (20, 20)


def test_more_keys_than_are_kept_are_sampled_without_regard_to_how_busy_they_are() -> None:
    keys, rng = KeySample(sampled_keys_max=1_000), np.random.default_rng(SEED)
    for number in rng.zipf(1.3, 200_000).tolist():  # busy keys have low numbers, and scores to match
        keys.add_answer(b"key-%d" % number, "stored", 1.0 if number < 10_000 else 2.0)

    assert keys.sampling_level > 0 and 400 < len(keys) <= 1_000
    assert keys.count_by_kind == {"stored": len(keys)} and keys.count_by_score_bucket.total() == len(keys)
    assert (
        keys.top_score_sum
        == keys.count_by_score_bucket[bucket_of_score(1.0)] + 2.0 * keys.count_by_score_bucket[bucket_of_score(2.0)]
    )


def test_the_mix_and_the_distribution_are_compared_by_share() -> None:
    assert mix_shift({"l1": 90, "l2": 10}, {"l1": 9, "l2": 1}) == pytest.approx(0)
    assert mix_shift({"l1": 10}, {"default": 10}) == 1 and mix_shift({}, {"l1": 1}) == 1
    rng = np.random.default_rng(SEED)
    large_histogram, small_histogram = (Counter(rng.poisson(40, size).tolist()) for size in (20_000, 1_000))
    assert (
        population_stability_index(large_histogram, large_histogram) == pytest.approx(0)
        and population_stability_index(large_histogram, small_histogram) < 0.03
    )
    assert (
        population_stability_index(
            large_histogram, {bucket_index + 8: count for bucket_index, count in small_histogram.items()}
        )
        > 0.25
    )
    assert population_stability_index(large_histogram, {}) == math.inf


def test_arms_of_several_replicas_add_up_after_a_trip_through_json() -> None:
    counts = ArmCounts()
    list_: dict[str, Any] = {"source": "l2", "scores": np.array([3.5, 2.0], np.float32)}
    counts.count_answers(b"a", [list_, {"source": "previous", "scores": [9.0]}])
    counts.count_answers(b"a", [{"source": "default", "scores": []}])
    counts.count_answers(b"b", [{"source": "l1", "producer": "live"}])
    counts.count_answers(b"c", [{"source": "previous", "scores": [9.0]}])
    counts.count_feedback("click", 3)

    total = CanaryArmTotals.of([counts.to_json(), counts.to_json()])

    assert total.request_count == 8 and total.count_by_feedback_event == {"click": 6}
    assert total.keys_by_answer_source == {"stored": 2, "live": 2, "previous": 2}
    # Only scores of the arm's own generation count.
    assert total.keys_by_top_score == {bucket_of_score(3.5): 2} and total.mean_top_score == 3.5


def test_buckets_grow_with_the_score_and_are_bounded() -> None:
    scores = sorted(
        [0.0, -0.0, 1e-30, math.inf, -math.inf] + [sign * 2.0**power for sign in (-1, 1) for power in range(-20, 21)]
    )

    buckets = [bucket_of_score(score) for score in scores]

    assert buckets == sorted(buckets) and -256 <= buckets[0] <= buckets[-1] <= 256
    assert len({bucket_of_score(score) for score in (1.0, 1.1, 1.2, 1.3)}) == 4


def test_kinds_of_feedback_are_bounded_and_the_one_that_decides_is_never_among_the_others() -> None:
    counts = ArmCounts("purchase")

    for number in range(100):
        counts.count_feedback(f"event_{number}", 1)
    counts.count_feedback("purchase", 5)

    assert len(counts.feedback_count_by_event) == 18 and counts.feedback_count_by_event["other"] == 84
    assert counts.feedback_count_by_event["purchase"] == 5

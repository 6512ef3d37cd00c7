"""The policy: whom it trusts after how much evidence, what it audits, and how it takes back its trust."""

import math
from random import Random

import numpy as np

from serving.near.reuse_policy import ALPHA, AUDITED, DOUBTS, ReusePolicy

ERROR, PLACES = 0.01, 4


def policy(seed: int = 0, error: float = ERROR) -> ReusePolicy:
    return ReusePolicy(error, PLACES, Random(seed))


def trusted(seed: int = 0) -> tuple[ReusePolicy, int]:
    """A policy that trusts neighbourhood 0, and how many samples that took."""
    made = policy(seed)
    for samples in range(10_000):
        if made.decide(0) != "learn":
            return made, samples
        made.judge(0, is_audit=False, wrong=False)
    raise AssertionError


def test_a_neighbourhood_is_trusted_by_its_own_samples_alone() -> None:
    made, samples = trusted()

    least = math.log(2 * PLACES / ALPHA) / -math.log1p(-ERROR)
    assert least < samples < 1.5 * least
    assert {made.decide(other) for other in (1, 2, 3)} == {"learn"}
    assert made.is_reusing and not policy().is_reusing


def test_a_share_of_what_could_be_reused_is_audited_by_a_coin() -> None:
    (made, _), (other, _) = trusted(), trusted(1)
    count = 20_000

    audits, others = ([each.decide(0) == "audit" for _ in range(count)] for each in (made, other))

    assert abs(sum(audits) / count - AUDITED) < 4 * (AUDITED / count) ** 0.5
    assert audits != others


def test_one_wrong_audit_takes_the_trust_back_and_has_everything_audited_for_a_while() -> None:
    made, samples = trusted()
    for _ in range(samples):
        made.judge(1, is_audit=False, wrong=False)
    assert made.decide(1) != "learn"

    made.judge(0, is_audit=True, wrong=True)

    assert made.decide(0) == "learn" and not made.is_reusing and not made.is_off
    for _ in range(DOUBTS):
        assert made.decide(1) == "audit"
        made.judge(1, is_audit=True, wrong=False)
    assert made.is_reusing and "reuse" in {made.decide(1) for _ in range(100)}
    again = 0
    while made.decide(0) == "learn":
        made.judge(0, is_audit=False, wrong=False)
        again += 1
    assert again > samples  # a second chance is at a smaller part of alpha


def test_a_neighbourhood_that_is_shown_to_be_wrong_is_left_alone() -> None:
    made = policy()
    while made.may_use(2):
        made.judge(2, is_audit=False, wrong=True)

    assert made.decide(2) == "leave" and made.decide(1) == "learn"


def test_audits_that_show_too_much_error_turn_everything_off_for_good() -> None:
    made, samples = trusted()
    for _ in range(samples):
        made.judge(1, is_audit=False, wrong=False)
    audits = 0
    while not made.is_off and audits < 100:
        audits += 1
        made.judge(audits % 2, is_audit=True, wrong=True)

    assert audits < 10 and made.interval[0] > 0
    for _ in range(5_000):
        made.judge(0, is_audit=False, wrong=False)
    assert {made.decide(place) for place in range(PLACES)} == {"leave"} and not made.is_reusing


def test_what_is_right_for_long_and_turns_is_off_after_a_few_audits() -> None:
    made, _ = trusted()
    for _ in range(20_000):
        made.judge(0, is_audit=True, wrong=False)

    handed_out = 0
    while made.decide(0) == "reuse":
        handed_out += 1
    made.judge(0, is_audit=True, wrong=True)

    assert handed_out < 10 / AUDITED and made.decide(0) == "learn" and not made.is_reusing


def test_rates_above_the_bound_are_hardly_ever_trusted_however_often_one_looks() -> None:
    runs, rng = 100, np.random.default_rng(3)
    ever = 0
    for run in range(runs):
        made = policy(run, error=0.1)
        for wrong in rng.random(1_500) < 0.105:
            made.judge(0, is_audit=False, wrong=bool(wrong))
            if made.decide(0) != "learn":
                ever += made.may_use(0)
                break

    alpha = ALPHA / PLACES
    assert ever <= alpha * runs + 3 * (alpha * runs) ** 0.5


def test_rates_well_below_it_are_trusted() -> None:
    for run in range(5):
        made, rng = policy(run), np.random.default_rng(run)
        for wrong in rng.random(10_000) < ERROR / 4:
            made.judge(0, is_audit=False, wrong=bool(wrong))
        assert made.decide(0) in ("reuse", "audit")

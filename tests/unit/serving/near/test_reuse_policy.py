"""The policy: what it trusts after how much evidence, what it audits, and how it takes back its trust."""

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.near.reuse_policy import ALPHA, AUDITED, DOUBTS, ReusePolicy

ERROR, RANGES = 0.01, 4
FAR, CLOSE = 1, 3


def policy(seed: int = 0, error: float = ERROR) -> ReusePolicy:
    return ReusePolicy(error, RANGES, Random(seed))


def learn(reuse_policy: ReusePolicy, closeness: int) -> int:
    """Has it see nothing wrong until it trusts a range; the number of samples."""
    for samples in range(20_000):
        if reuse_policy.decide(closeness) != "learn":
            return samples
        reuse_policy.judge(closeness, is_audit=False, is_wrong=False)
    raise AssertionError


def test_a_range_is_trusted_after_as_many_samples_as_a_bound_that_always_holds_takes() -> None:
    reuse_policy = policy()

    samples = learn(reuse_policy, CLOSE)

    samples_min = math.log(2 * RANGES / ALPHA) / -math.log1p(-ERROR)
    assert samples_min < samples < 1.5 * samples_min
    assert {reuse_policy.decide(closeness) for closeness in range(CLOSE)} == {"learn"}
    assert reuse_policy.is_reusing and not policy().is_reusing


def test_closer_ranges_speak_for_a_farther_one_only_with_samples_of_its_own() -> None:
    reuse_policy = policy()
    samples = learn(reuse_policy, CLOSE)

    more = learn(reuse_policy, FAR)

    assert 2 / ERROR <= more < samples
    assert reuse_policy.decide(FAR + 1) == "learn"  # it lies between the two, and nobody has seen it
    assert learn(reuse_policy, FAR + 1) == 2 / ERROR


def test_closer_ranges_do_not_outweigh_what_a_farther_one_says_against_itself() -> None:
    reuse_policy = policy()
    learn(reuse_policy, CLOSE)
    for _ in range(5_000):
        reuse_policy.judge(CLOSE, is_audit=False, is_wrong=False)

    for sample in range(2_000):  # wrong as often as the bound, and more often than half of it
        reuse_policy.judge(FAR, is_audit=False, is_wrong=sample % 125 == 0)
        assert reuse_policy.decide(FAR) in ("learn", "leave")
    assert reuse_policy.decide(CLOSE) in ("reuse", "audit")


def test_farther_ranges_never_speak_for_a_closer_one() -> None:
    reuse_policy = policy()
    learn(reuse_policy, FAR)

    assert reuse_policy.decide(CLOSE) == "learn"


def test_a_share_of_what_could_be_reused_is_audited_by_a_coin() -> None:
    first_policy, second_policy = policy(), policy(1)
    count = 20_000
    for reuse_policy in (first_policy, second_policy):
        learn(reuse_policy, CLOSE)

    audits, second_audits = (
        [reuse_policy.decide(CLOSE) == "audit" for _ in range(count)] for reuse_policy in (first_policy, second_policy)
    )

    assert abs(sum(audits) / count - AUDITED) < 4 * (AUDITED / count) ** 0.5
    assert audits != second_audits


def test_one_wrong_audit_takes_the_trust_back_and_has_everything_audited_for_a_while() -> None:
    reuse_policy = policy()
    samples = learn(reuse_policy, CLOSE)
    learn(reuse_policy, FAR)

    reuse_policy.judge(FAR, is_audit=True, is_wrong=True)

    assert reuse_policy.decide(FAR) == "learn" and not reuse_policy.is_reusing and not reuse_policy.is_off
    for _ in range(DOUBTS):
        assert reuse_policy.decide(CLOSE) == "audit"
        reuse_policy.judge(CLOSE, is_audit=True, is_wrong=False)
    assert reuse_policy.is_reusing and "reuse" in {reuse_policy.decide(CLOSE) for _ in range(100)}

    reuse_policy.judge(CLOSE, is_audit=True, is_wrong=True)
    assert learn(reuse_policy, CLOSE) > samples  # a second chance is at a smaller part of alpha


def test_a_range_that_is_shown_to_be_wrong_is_left_alone() -> None:
    reuse_policy = policy()
    while reuse_policy.may_use(FAR):
        reuse_policy.judge(FAR, is_audit=False, is_wrong=True)

    assert reuse_policy.decide(FAR) == "leave" and reuse_policy.decide(CLOSE) == "learn"


def test_audits_that_show_too_much_error_turn_everything_off_for_good() -> None:
    reuse_policy = policy()
    learn(reuse_policy, CLOSE)
    audits = 0
    while not reuse_policy.is_off and audits < 100:
        audits += 1
        reuse_policy.judge(CLOSE, is_audit=True, is_wrong=True)

    assert audits < 10 and reuse_policy.error_interval[0] > 0
    for _ in range(5_000):
        reuse_policy.judge(CLOSE, is_audit=False, is_wrong=False)
    assert {reuse_policy.decide(closeness) for closeness in range(RANGES)} == {"leave"} and not reuse_policy.is_reusing


def test_what_is_right_for_long_and_turns_is_off_after_a_few_audits() -> None:
    reuse_policy = policy()
    learn(reuse_policy, CLOSE)
    for _ in range(20_000):
        reuse_policy.judge(CLOSE, is_audit=True, is_wrong=False)

    handed_out = 0
    while reuse_policy.decide(CLOSE) == "reuse":
        handed_out += 1
    reuse_policy.judge(CLOSE, is_audit=True, is_wrong=True)

    assert handed_out < 10 / AUDITED and reuse_policy.decide(CLOSE) == "learn" and not reuse_policy.is_reusing


@pytest.mark.parametrize("range_probabilities", [(0, 0, 0, 1), (0.25, 0.25, 0.25, 0.25)])
def test_rates_above_the_bound_are_hardly_ever_trusted_however_often_one_looks(
    range_probabilities: tuple[float, ...],
) -> None:
    runs, rng = 60, np.random.default_rng(3)
    ever = 0
    for run in range(runs):
        reuse_policy = policy(run, error=0.1)
        ranges = rng.choice(RANGES, 1_200, p=range_probabilities).tolist()
        for closeness, chance in zip(ranges, rng.random(1_200).tolist(), strict=True):
            reuse_policy.judge(closeness, is_audit=False, is_wrong=chance < 0.105)
            if reuse_policy.is_reusing:
                ever += 1
                break

    assert ever <= ALPHA * runs + 3 * (ALPHA * runs) ** 0.5


def test_rates_well_below_it_are_trusted() -> None:
    for run in range(5):
        reuse_policy, rng = policy(run), np.random.default_rng(run)
        for wrong in rng.random(10_000) < ERROR / 4:
            reuse_policy.judge(CLOSE, is_audit=False, is_wrong=bool(wrong))
        assert reuse_policy.decide(CLOSE) in ("reuse", "audit")


@given(
    st.integers(0, 2**32), st.lists(st.sampled_from([0.0, 0.02, 0.2, 1.0]), min_size=RANGES, max_size=RANGES)
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_whatever_comes_nothing_is_reused_that_its_own_samples_speak_against(seed: int, rates: list[float]) -> None:
    reuse_policy, counts_by_range = policy(error=0.1), [[0, 0] for _ in range(RANGES)]
    rng = np.random.default_rng(seed)
    drawn = zip(rng.integers(0, RANGES, 1_000).tolist(), rng.random(1_000).tolist(), strict=True)
    for closeness, chance in drawn:
        decision, range_counts = reuse_policy.decide(closeness), counts_by_range[closeness]
        if decision in ("reuse", "audit"):
            assert range_counts[0] >= 20 and range_counts[1] <= 0.05 * range_counts[0]
        if decision in ("learn", "audit"):
            wrong = chance < rates[closeness]
            reuse_policy.judge(closeness, is_audit=decision == "audit", is_wrong=wrong)
            is_anew = decision == "audit" and wrong
            counts_by_range[closeness] = [0, 0] if is_anew else [range_counts[0] + 1, range_counts[1] + wrong]

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


def learn(made: ReusePolicy, closeness: int) -> int:
    """Has it see nothing wrong until it trusts a range; the number of samples."""
    for samples in range(20_000):
        if made.decide(closeness) != "learn":
            return samples
        made.judge(closeness, is_audit=False, wrong=False)
    raise AssertionError


def test_a_range_is_trusted_after_as_many_samples_as_a_bound_that_always_holds_takes() -> None:
    made = policy()

    samples = learn(made, CLOSE)

    least = math.log(2 * RANGES / ALPHA) / -math.log1p(-ERROR)
    assert least < samples < 1.5 * least
    assert {made.decide(other) for other in range(CLOSE)} == {"learn"}
    assert made.is_reusing and not policy().is_reusing


def test_closer_ranges_speak_for_a_farther_one_only_with_samples_of_its_own() -> None:
    made = policy()
    samples = learn(made, CLOSE)

    more = learn(made, FAR)

    assert 2 / ERROR <= more < samples
    assert made.decide(FAR + 1) == "learn"  # it lies between the two, and nobody has seen it
    assert learn(made, FAR + 1) == 2 / ERROR


def test_closer_ranges_do_not_outweigh_what_a_farther_one_says_against_itself() -> None:
    made = policy()
    learn(made, CLOSE)
    for _ in range(5_000):
        made.judge(CLOSE, is_audit=False, wrong=False)

    for sample in range(2_000):  # wrong as often as the bound, and more often than half of it
        made.judge(FAR, is_audit=False, wrong=sample % 125 == 0)
        assert made.decide(FAR) in ("learn", "leave")
    assert made.decide(CLOSE) in ("reuse", "audit")


def test_farther_ranges_never_speak_for_a_closer_one() -> None:
    made = policy()
    learn(made, FAR)

    assert made.decide(CLOSE) == "learn"


def test_a_share_of_what_could_be_reused_is_audited_by_a_coin() -> None:
    made, other = policy(), policy(1)
    count = 20_000
    for each in (made, other):
        learn(each, CLOSE)

    audits, others = (
        [each.decide(CLOSE) == "audit" for _ in range(count)] for each in (made, other)
    )

    assert abs(sum(audits) / count - AUDITED) < 4 * (AUDITED / count) ** 0.5
    assert audits != others


def test_one_wrong_audit_takes_the_trust_back_and_has_everything_audited_for_a_while() -> None:
    made = policy()
    samples = learn(made, CLOSE)
    learn(made, FAR)

    made.judge(FAR, is_audit=True, wrong=True)

    assert made.decide(FAR) == "learn" and not made.is_reusing and not made.is_off
    for _ in range(DOUBTS):
        assert made.decide(CLOSE) == "audit"
        made.judge(CLOSE, is_audit=True, wrong=False)
    assert made.is_reusing and "reuse" in {made.decide(CLOSE) for _ in range(100)}

    made.judge(CLOSE, is_audit=True, wrong=True)
    assert learn(made, CLOSE) > samples  # a second chance is at a smaller part of alpha


def test_a_range_that_is_shown_to_be_wrong_is_left_alone() -> None:
    made = policy()
    while made.may_use(FAR):
        made.judge(FAR, is_audit=False, wrong=True)

    assert made.decide(FAR) == "leave" and made.decide(CLOSE) == "learn"


def test_audits_that_show_too_much_error_turn_everything_off_for_good() -> None:
    made = policy()
    learn(made, CLOSE)
    audits = 0
    while not made.is_off and audits < 100:
        audits += 1
        made.judge(CLOSE, is_audit=True, wrong=True)

    assert audits < 10 and made.interval[0] > 0
    for _ in range(5_000):
        made.judge(CLOSE, is_audit=False, wrong=False)
    assert {made.decide(place) for place in range(RANGES)} == {"leave"} and not made.is_reusing


def test_what_is_right_for_long_and_turns_is_off_after_a_few_audits() -> None:
    made = policy()
    learn(made, CLOSE)
    for _ in range(20_000):
        made.judge(CLOSE, is_audit=True, wrong=False)

    handed_out = 0
    while made.decide(CLOSE) == "reuse":
        handed_out += 1
    made.judge(CLOSE, is_audit=True, wrong=True)

    assert handed_out < 10 / AUDITED and made.decide(CLOSE) == "learn" and not made.is_reusing


@pytest.mark.parametrize("shares", [(0, 0, 0, 1), (0.25, 0.25, 0.25, 0.25)])
def test_rates_above_the_bound_are_hardly_ever_trusted_however_often_one_looks(
    shares: tuple[float, ...],
) -> None:
    runs, rng = 60, np.random.default_rng(3)
    ever = 0
    for run in range(runs):
        made = policy(run, error=0.1)
        ranges = rng.choice(RANGES, 1_200, p=shares).tolist()
        for closeness, chance in zip(ranges, rng.random(1_200).tolist(), strict=True):
            made.judge(closeness, is_audit=False, wrong=chance < 0.105)
            if made.is_reusing:
                ever += 1
                break

    assert ever <= ALPHA * runs + 3 * (ALPHA * runs) ** 0.5


def test_rates_well_below_it_are_trusted() -> None:
    for run in range(5):
        made, rng = policy(run), np.random.default_rng(run)
        for wrong in rng.random(10_000) < ERROR / 4:
            made.judge(CLOSE, is_audit=False, wrong=bool(wrong))
        assert made.decide(CLOSE) in ("reuse", "audit")


@given(
    st.integers(0, 2**32), st.lists(st.sampled_from([0.0, 0.02, 0.2, 1.0]), min_size=RANGES, max_size=RANGES)
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_whatever_comes_nothing_is_reused_that_its_own_samples_speak_against(
    seed: int, rates: list[float]
) -> None:
    made, seen = policy(error=0.1), [[0, 0] for _ in range(RANGES)]
    rng = np.random.default_rng(seed)
    drawn = zip(rng.integers(0, RANGES, 1_000).tolist(), rng.random(1_000).tolist(), strict=True)
    for closeness, chance in drawn:
        decision, own = made.decide(closeness), seen[closeness]
        if decision in ("reuse", "audit"):
            assert own[0] >= 20 and own[1] <= 0.05 * own[0]
        if decision in ("learn", "audit"):
            wrong = chance < rates[closeness]
            made.judge(closeness, is_audit=decision == "audit", wrong=wrong)
            is_anew = decision == "audit" and wrong
            seen[closeness] = [0, 0] if is_anew else [own[0] + 1, own[1] + wrong]

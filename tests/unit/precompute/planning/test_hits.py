"""Hit rates of L1 foretold, held against the L1 that is served from."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.tiers.l1 import Entry, LocalKey, LocalTier, ReadyAnswer
from precompute.planning.forecast import estimate_popularity, l1_hit_rates, zipf_popularity

MIB = 1 << 20
RECORD = 616
USERS, REQUESTS = 20_000, 100_000


def drawn(exponent, seed=0):
    weights = np.arange(1, USERS + 1.0) ** -exponent
    return np.random.default_rng(seed).choice(USERS, REQUESTS, p=weights / weights.sum())


def served(users, max_bytes, answer_bytes):
    """(hit rate from empty, of the second half), entries in the end: as the service fills its L1."""
    tier, hit_flags = LocalTier(max_bytes), []
    for user in users.tolist():
        request = b"%d" % user
        if answer_bytes and tier.find_ready_answer(request) is not None:
            hit_flags.append(True)
            continue
        key = LocalKey("g", "t", user)
        hit_flags.append(tier.get(key) is not None)
        if not hit_flags[-1]:
            tier.put(key, Entry(bytes(RECORD), user))
        elif answer_bytes:
            body = bytes(answer_bytes - 2 * len(request))
            tier.keep_ready_answer(ReadyAnswer(0, body, b"", 0, ("t", request), request))
    return np.mean(hit_flags), np.mean(hit_flags[REQUESTS // 2 :]), len(tier)


@pytest.mark.parametrize("exponent", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("answer_bytes", [0, 900])
@pytest.mark.parametrize("mib", [1, 6])
def test_the_service_own_l1_hits_as_foretold_within_two_points(exponent, answer_bytes, mib):
    users = drawn(exponent)

    foretold = l1_hit_rates(
        zipf_popularity(USERS, exponent), mib * MIB, record_bytes=RECORD, answer_bytes=answer_bytes,
        daily_requests_per_process=REQUESTS,
    )  # fmt: skip

    from_cold, steady, entries = served(users, mib * MIB, answer_bytes)
    assert foretold.from_cold == pytest.approx(from_cold, abs=0.02)
    assert foretold.steady == pytest.approx(steady, abs=0.02)
    assert foretold.entries == pytest.approx(entries, rel=0.1)


def test_a_log_foretells_requests_that_are_not_in_it():
    log = np.bincount(drawn(1.0, seed=1), minlength=USERS)

    foretold = l1_hit_rates(estimate_popularity(log[log > 0], USERS), 4 * MIB, record_bytes=RECORD)

    assert foretold.steady == pytest.approx(served(drawn(1.0), 4 * MIB, 0)[1], abs=0.02)


def test_an_l1_that_holds_every_user_misses_all_of_them_once():
    hit_rates = l1_hit_rates(zipf_popularity(100, 0.0), MIB, record_bytes=RECORD, daily_requests_per_process=1000)

    assert (hit_rates.steady, hit_rates.entries) == (1.0, 100)
    # Expected: 100 users uniformly at random in 1,000 requests; only a share of e**-10 of them never appears.
    assert hit_rates.from_cold == pytest.approx(1 - 100 * (1 - math.exp(-10)) / 1000)


def test_without_a_number_of_requests_there_is_no_first_day():
    assert l1_hit_rates(zipf_popularity(100, 1.0), MIB, record_bytes=RECORD).from_cold is None


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 50_000), st.floats(0, 3))
def test_bins_of_far_ranks_hold_what_their_ranks_would(users, exponent):
    popularity = zipf_popularity(users, exponent)

    weights = np.arange(1, users + 1.0) ** -exponent
    assert popularity.key_counts.sum() == pytest.approx(users)
    assert popularity.request_probabilities @ popularity.key_counts == pytest.approx(1)
    assert popularity.request_probabilities[0] == pytest.approx(weights[0] / weights.sum(), rel=1e-3)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=200), st.integers(0, 500))
def test_a_log_gives_every_user_a_share(counts, unseen):
    users = len(counts) + unseen

    popularity = estimate_popularity(np.array(counts), users)

    # If no user was seen exactly once, nothing is left for users who were not seen.
    assert popularity.key_counts.sum() == (users if 1 in counts else len(counts))
    assert popularity.request_probabilities @ popularity.key_counts == pytest.approx(1)
    assert (popularity.request_probabilities > 0).all()


@settings(deadline=None, max_examples=30)
@given(st.floats(0.2, 2), st.integers(1, 40), st.booleans())
def test_more_memory_never_hits_less(exponent, mib, has_answers):
    popularity, answer = zipf_popularity(200_000, exponent), 900 if has_answers else 0

    small, large = (
        l1_hit_rates(popularity, size * MIB, record_bytes=RECORD, answer_bytes=answer, daily_requests_per_process=1e6)
        for size in (mib, 2 * mib)
    )

    assert 0 <= small.steady <= large.steady <= 1
    assert small.from_cold is not None and large.from_cold is not None
    assert small.from_cold <= min(large.from_cold, small.steady) + 1e-9

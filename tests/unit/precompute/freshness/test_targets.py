"""Targets of a replay against the definition, row by row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.errors import SourceError
from precompute.freshness.targets import Targets, cut_before_days, lists_per_day
from precompute.freshness.timed_log import TimedLog
from precompute.freshness.ways import EVENTS, HOURLY, NIGHT, WAYS

HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US
CUT_US = 20_000 * DAY_US

rows = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.integers(0, 6),
        st.integers(-2 * DAY_US, 3 * DAY_US - 1) | st.integers(-3, 70).map(lambda each: each * HOUR_US),
    ),
    max_size=60,
)  # fmt: skip


def log_of(found):
    users, items, times = (
        (np.array(each, np.int64) for each in zip(*found, strict=True))
        if found
        else (np.empty(0, np.int64),) * 3
    )
    return TimedLog.of(users, items, times + CUT_US)


@settings(deadline=None, max_examples=200)
@given(rows)
def test_targets_are_items_of_a_first_time_and_histories_end_before_they_are_computed(found):
    log = log_of(found)
    expected = []
    for user in sorted({user for user, _, _ in found}):
        own = [each for each in found if each[0] == user]
        firsts = {item: min(at for _, other, at in own if other == item) for _, item, _ in own}
        for item, at in firsts.items():
            if at >= 0:
                ends = {}
                for way in WAYS:
                    period = way.period_s * 1_000_000
                    until = at // period * period if period else at
                    ends[way] = sum(other < until for _, _, other in own)
                expected.append((item, at % DAY_US, ends))
    if not expected:
        with pytest.raises(SourceError):
            Targets.of(log, CUT_US, WAYS, 100, np.random.default_rng(0))
        return

    targets = Targets.of(log, CUT_US, WAYS, 100, np.random.default_rng(0))

    told = [
        (
            int(targets.items[row]),
            int(targets.since_night_us[row]),
            {way: int(ends[row] - targets.starts[row]) for way, ends in targets.ends.items()},
        )
        for row in range(len(targets))
    ]
    key = repr
    assert sorted(told, key=key) == sorted(expected, key=key)
    assert set(targets.users.tolist()) == set(range(int(targets.users.max()) + 1))
    assert (targets.has_newer == (targets.ends[EVENTS] > targets.ends[NIGHT])).all()


@settings(deadline=None, max_examples=200)
@given(rows)
def test_lists_a_day_are_those_of_periods_in_which_users_did_something(found):
    log = log_of(found)
    after = [(user, at) for user, _, at in found if at >= 0]
    if not after:
        return
    days = (max(at for _, at in after) + 1) / DAY_US
    nights = range(0, max(at for _, at in after) + 1, HOUR_US)
    known = sum(len({user for user, _, at in found if at < night}) for night in nights)

    hourly, everybody = lists_per_day(log, CUT_US, HOURLY)

    assert hourly == pytest.approx(len({(user, at // HOUR_US) for user, at in after}) / days)
    assert everybody == pytest.approx(known / days)
    changed, everybody = lists_per_day(log, CUT_US, EVENTS)
    assert changed == pytest.approx(len(set(after)) / days) and everybody is None


def test_of_many_users_some_are_drawn_with_all_that_they_did():
    log = log_of([(user, item, item * HOUR_US) for user in range(50) for item in range(4)])

    some = Targets.of(log, CUT_US, WAYS, 10, np.random.default_rng(0))
    others = Targets.of(log, CUT_US, WAYS, 10, np.random.default_rng(1))

    assert len(some) == 40 and np.bincount(some.users).tolist() == [4] * 10
    assert set(some.starts.tolist()) != set(others.starts.tolist())


@pytest.mark.parametrize(("days", "cut"), [(1, 3), (2, 2), (3, 1)])
def test_the_last_days_are_whole_days_and_the_one_that_the_log_ends_in(days, cut):
    log = log_of([(0, 0, 5), (0, 1, 3 * DAY_US + 7 * HOUR_US)])

    assert cut_before_days(log, days) == CUT_US + cut * DAY_US
    with pytest.raises(SourceError, match="too short"):
        cut_before_days(log, 4)

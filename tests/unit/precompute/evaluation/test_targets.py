"""Targets of a replay against the definition, row by row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.errors import SourceError
from precompute.evaluation.freshness import (
    EVENTS,
    HOURLY,
    NIGHT,
    STRATEGIES,
    Targets,
    TimedLog,
    count_lists_per_day,
    cut_before_days,
)

HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US
CUT_US = 20_000 * DAY_US

rows = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.integers(0, 6),
        st.integers(-2 * DAY_US, 3 * DAY_US - 1) | st.integers(-3, 70).map(lambda hours: hours * HOUR_US),
    ),
    max_size=60,
)  # fmt: skip


def log_of(log_rows):
    users, items, times = (
        (np.array(column, np.int64) for column in zip(*log_rows, strict=True))
        if log_rows
        else (np.empty(0, np.int64),) * 3
    )
    return TimedLog.of(users, items, times + CUT_US)


@settings(deadline=None, max_examples=200)
@given(rows)
def test_targets_are_items_of_a_first_time_and_histories_end_before_they_are_computed(found):
    log = log_of(found)
    expected = []
    for user in sorted({user for user, _, _ in found}):
        user_rows = [log_row for log_row in found if log_row[0] == user]
        firsts = {item: min(at for _, row_item, at in user_rows if row_item == item) for _, item, _ in user_rows}
        for item, at in firsts.items():
            if at >= 0:
                ends = {}
                for strategy in STRATEGIES:
                    period = strategy.period_s * 1_000_000
                    computed_at = at // period * period if period else at
                    ends[strategy] = sum(row_at < computed_at for _, _, row_at in user_rows)
                expected.append((item, at % DAY_US, ends))
    if not expected:
        with pytest.raises(SourceError):
            Targets.of(log, CUT_US, STRATEGIES, 100, np.random.default_rng(0))
        return

    targets = Targets.of(log, CUT_US, STRATEGIES, 100, np.random.default_rng(0))

    computed_targets = [
        (
            int(targets.item_indices[row]),
            int(targets.since_night_us[row]),
            {
                strategy: int(ends[row] - targets.first_rows[row])
                for strategy, ends in targets.end_rows_by_strategy.items()
            },
        )
        for row in range(len(targets))
    ]
    key = repr
    assert sorted(computed_targets, key=key) == sorted(expected, key=key)
    assert set(targets.user_numbers.tolist()) == set(range(int(targets.user_numbers.max()) + 1))
    assert (
        targets.has_newer_events == (targets.end_rows_by_strategy[EVENTS] > targets.end_rows_by_strategy[NIGHT])
    ).all()


@settings(deadline=None, max_examples=200)
@given(rows)
def test_lists_a_day_are_those_of_periods_in_which_users_did_something(found):
    log = log_of(found)
    after = [(user, at) for user, _, at in found if at >= 0]
    if not after:
        return
    days = (max(at for _, at in after) + 1) / DAY_US
    nights = range(0, max(at for _, at in after) + 1, HOUR_US)
    all_list_count = sum(len({user for user, _, at in found if at < night}) for night in nights)

    hourly, all_per_day = count_lists_per_day(log, CUT_US, HOURLY)

    assert hourly == pytest.approx(len({(user, at // HOUR_US) for user, at in after}) / days)
    assert all_per_day == pytest.approx(all_list_count / days)
    changed_per_day, all_per_day = count_lists_per_day(log, CUT_US, EVENTS)
    assert changed_per_day == pytest.approx(len(set(after)) / days) and all_per_day is None


def test_of_many_users_some_are_drawn_with_all_that_they_did():
    log = log_of([(user, item, item * HOUR_US) for user in range(50) for item in range(4)])

    sampled_targets = Targets.of(log, CUT_US, STRATEGIES, 10, np.random.default_rng(0))
    resampled_targets = Targets.of(log, CUT_US, STRATEGIES, 10, np.random.default_rng(1))

    assert len(sampled_targets) == 40 and np.bincount(sampled_targets.user_numbers).tolist() == [4] * 10
    assert set(sampled_targets.first_rows.tolist()) != set(resampled_targets.first_rows.tolist())


@pytest.mark.parametrize(("days", "cut"), [(1, 3), (2, 2), (3, 1)])
def test_the_last_days_are_whole_days_and_the_one_that_the_log_ends_in(days, cut):
    log = log_of([(0, 0, 5), (0, 1, 3 * DAY_US + 7 * HOUR_US)])

    assert cut_before_days(log, days) == CUT_US + cut * DAY_US
    with pytest.raises(SourceError, match="too short"):
        cut_before_days(log, 4)

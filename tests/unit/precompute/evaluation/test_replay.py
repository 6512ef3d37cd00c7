"""The replay of planted logs: what each way finds is known beforehand."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.errors import ConfigError, SourceError
from precompute.config.settings import Sources
from precompute.evaluation.freshness import EVENTS, HOURLY, NIGHT, NIGHT_LESS_SEEN, replay
from precompute.evaluation.options import ReplayOptions
from tests.unit.precompute.evaluation.planted import DAY_S, DAYS, HOUR_S, make_earlier_rows, write

DAY = ReplayOptions(days=1)


def jumping(rng):
    """Users who turn to another group on the day: four items within the hour from 10:00 on, a fifth at 12:30."""
    rows, group_by_user = make_earlier_rows(rng, users=300, groups=20, size=10, items_per_user=5)
    for user in range(0, 300, 3):
        new_group = (group_by_user[user] + 7) % 20
        times = [DAYS * DAY_S + 10 * HOUR_S + 600 * step for step in range(4)]
        times.append(DAYS * DAY_S + 12 * HOUR_S + 1800)
        for item, at in zip(rng.choice(10, 5, replace=False), times, strict=True):
            rows.append((user, int(new_group * 10 + item), at))
    return rows


@pytest.mark.parametrize("seed", range(3))
def test_where_interest_jumps_events_find_what_nights_do_not(tmp_path, seed):
    config = write(tmp_path, jumping(np.random.default_rng(seed)))

    report = replay(config, replace(DAY, seed=seed))

    # Then of five items no strategy finds the first, events find four and the hourly night the last one; the rest of a
    # list has items of any group, and a few of them are right.
    everything = report.target_groups[0]
    recall = {strategy: estimate.mean_value for strategy, estimate in everything.recall_by_strategy.items()}
    assert (everything.target_count, everything.newer_event_count) == (500, 400)
    assert recall[NIGHT] == pytest.approx(recall[NIGHT_LESS_SEEN], abs=0.02) and recall[NIGHT] < 0.15
    assert 0.8 <= recall[EVENTS] < 0.85
    assert recall[HOURLY] - recall[NIGHT] == pytest.approx(0.2, abs=0.03)
    gain = everything.recall_gain_by_strategy[EVENTS]
    assert 0.6 < gain.interval_low < gain.mean_value < gain.interval_high < 0.85
    assert everything.recall_gain_by_strategy.keys() == {NIGHT_LESS_SEEN, HOURLY, EVENTS}


def test_hours_since_the_night_and_users_it_knows_part_the_targets(tmp_path):
    rows = jumping(np.random.default_rng(0))
    newcomer = [(1000, item, DAYS * DAY_S + 5 * HOUR_S + item) for item in (30, 31, 32)]
    config = write(tmp_path, rows + newcomer)

    report = replay(config, DAY)

    groups = {group.group_name: group for group in report.target_groups}
    assert {name: group.target_count for name, group in groups.items()} == {
        "all": 503, "with newer events": 402, "user known to the night": 500,
        "user new since the night": 3, "3 to 6 h since the night": 3, "6 to 12 h since the night": 400,
        "12 to 24 h since the night": 100,
    }  # fmt: skip
    late = groups["12 to 24 h since the night"]
    assert late.recall_by_strategy[HOURLY].mean_value == late.recall_by_strategy[EVENTS].mean_value == 1.0
    # A new user's first item leads to the second and third; the hourly night does not know the user yet.
    new = groups["user new since the night"].recall_by_strategy
    assert new[EVENTS].mean_value >= 2 / 3 and new[HOURLY].mean_value == new[NIGHT].mean_value


@pytest.mark.parametrize("seed", range(3))
def test_where_nothing_changes_no_way_is_better_within_the_interval(tmp_path, seed):
    rng = np.random.default_rng(seed)
    rows, group_by_user = make_earlier_rows(rng, users=400, groups=2, size=200, items_per_user=8)
    initial_pairs = {(user, item) for user, item, _ in rows}
    for user in range(400):
        remaining_items = [
            item
            for item in range(group_by_user[user] * 200, group_by_user[user] * 200 + 200)
            if (user, item) not in initial_pairs
        ]
        for item in rng.choice(remaining_items, 2, replace=False):
            at = DAYS * DAY_S + int(rng.integers(0, DAY_S))
            rows.append((user, int(item), at))

    report = replay(write(tmp_path, rows, groups=2), replace(DAY, k=40, seed=seed))

    everything = report.target_groups[0]
    assert everything.recall_by_strategy[NIGHT].mean_value == pytest.approx(40 / 192, abs=0.06)
    for gain in everything.recall_gain_by_strategy.values():
        assert gain.interval_low <= 0 <= gain.interval_high and gain.interval_high - gain.interval_low < 0.1


def test_items_had_since_the_night_are_left_out_of_its_list(tmp_path):
    # Given that on the day every user takes up all remaining items of the user's group, in 4 steps of 3
    rng = np.random.default_rng(0)
    rows, group_by_user = make_earlier_rows(rng, users=120, groups=6, size=20, items_per_user=8)
    initial_pairs = {(user, item) for user, item, _ in rows}
    for user in range(120):
        remaining_items = [
            item
            for item in range(group_by_user[user] * 20, group_by_user[user] * 20 + 20)
            if (user, item) not in initial_pairs
        ]
        for index, item in enumerate(rng.permutation(remaining_items)):
            rows.append((user, int(item), DAYS * DAY_S + (1 + index // 3) * HOUR_S))

    report = replay(write(tmp_path, rows, groups=6), replace(DAY, k=3))

    # Then a list of 3 is always right if items the user has are left out, and the night's own list is right less and
    # less
    recall = {
        strategy: estimate.mean_value for strategy, estimate in report.target_groups[0].recall_by_strategy.items()
    }
    steps = np.mean([3 / 12, 3 / 9, 3 / 6, 3 / 3])
    assert recall[NIGHT] == pytest.approx(3 / 12, abs=0.05)
    assert recall[NIGHT_LESS_SEEN] == pytest.approx(steps, abs=0.05)
    assert recall[EVENTS] == pytest.approx(steps, abs=0.05)
    ndcg = report.target_groups[0].ndcg_by_strategy
    assert all(ndcg[strategy].mean_value < recall[strategy] for strategy in recall)


def test_the_same_log_and_seed_find_the_same_times_apart(tmp_path):
    config = write(tmp_path, jumping(np.random.default_rng(0)))
    options = replace(DAY, users=40, seed=5)

    first, second = replay(config, options), replay(config, options)
    reseeded_report = replay(config, replace(options, seed=6))

    assert first.replay_facts == second.replay_facts and first.target_groups == second.target_groups
    assert first.replay_facts["users_evaluated"] == 40 and first.target_groups[0].target_count == 200
    assert first.target_groups != reseeded_report.target_groups


def test_costs_are_lists_a_day_and_the_time_of_one(tmp_path):
    config = write(tmp_path, jumping(np.random.default_rng(0)))

    report = replay(config, DAY)

    # The time from the cut to the last row is 12.5 hours, in which 100 users have 5 events each within 2 hours.
    days = 12.5 / 24
    night, hourly, events = report.strategy_costs
    assert [cost.strategy for cost in report.strategy_costs] == [NIGHT, HOURLY, EVENTS]
    changed_counts = [cost.changed_lists_per_day * days for cost in report.strategy_costs]
    assert changed_counts == pytest.approx([100, 200, 500])
    assert night.all_lists_per_day == pytest.approx(300 / days)
    assert hourly.all_lists_per_day == pytest.approx(13 * 300 / days)
    assert events.all_lists_per_day is None
    assert all(cost.ms_per_list > 0 and cost.seconds_per_day > 0 for cost in report.strategy_costs)


def test_items_that_came_after_the_cut_are_counted_and_not_sought(tmp_path):
    rows = jumping(np.random.default_rng(0))
    rows += [(3, 10_000 + number, DAYS * DAY_S + number) for number in range(7)]

    report = replay(write(tmp_path, rows), DAY)

    assert (report.replay_facts["replayed"], report.replay_facts["of_items_unknown_at_the_cut"]) == (507, 7)
    assert report.target_groups[0].target_count == 500 and report.replay_facts["items"] == 207


def test_a_log_that_cannot_be_replayed_is_refused_with_what_to_do(tmp_path):
    rows = jumping(np.random.default_rng(0))
    config = write(tmp_path, rows)
    timeless = replace(config, sources=Sources(("log.parquet",), timestamp_column="user"))
    untimed_path = tmp_path / "once.parquet"
    pq.write_table(pa.table({"user": ["a", "b"], "item": ["x", "y"]}), untimed_path)

    with pytest.raises(SourceError, match=r"no times .*timestamp_column"):
        replay(replace(config, sources=Sources((str(untimed_path),))), DAY)
    with pytest.raises(SourceError, match="time"):
        replay(timeless, DAY)
    with pytest.raises(SourceError, match=r"spans 10.5 days: too short to replay its last 11"):
        replay(config, replace(DAY, days=11))
    with pytest.raises(SourceError, match="no user in the log"):
        replay(write(tmp_path, [*rows[:1500], (0, rows[0][1], (DAYS + 1) * DAY_S)]), DAY)
    with pytest.raises(ConfigError, match="--data"):
        replay(replace(config, sources=Sources()), DAY)

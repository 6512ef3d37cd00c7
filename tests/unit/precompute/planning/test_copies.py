"""A night that copies, foretold: lists that items touch, users by their times, and what is left of scoring."""

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cache.records import Layout
from precompute.planning.forecast import (
    ITEMS_CHANGED_SHARES,
    USERS_CHANGED_SHARE,
    copying_night,
    copying_nights,
    find_active_share,
    find_changed_share,
    touched_share,
)
from precompute.planning.trial import TimeSpent, Timings

NO_TIME = TimeSpent(0.0, 0.0)
TIMINGS = Timings(
    embed=TimeSpent(10, 10), prepare=TimeSpent(1, 1), shards=TimeSpent(1, 1), users=TimeSpent(100, 100),
    items=TimeSpent(20, 20),
    seconds_by_stage={"read": 5.0, "tower": 10.0, "topk": 80.0, "write": 5.0}, recorded_share=1.0,
    extrapolation_note="",
    seal=NO_TIME,
)  # fmt: skip
DAY_US = 86_400_000_000


def shape(**layouts: Any) -> Any:
    return SimpleNamespace(
        item_count=40_000, layout_by_table=layouts or {"user_topk": ("user", Layout("topk", 100, "f2"))}
    )


def sample(times: list[int], owners: list[int], users: int) -> Any:
    return SimpleNamespace(
        interaction_times=np.array(times), owner_indices=np.array(owners), user_ids=[str(user) for user in range(users)]
    )


def test_one_percent_of_the_items_touches_most_lists_of_100_and_a_thousandth_a_tenth() -> None:
    assert touched_share(1_000_000, 0.01, 100) == pytest.approx(1 - 0.99**100, abs=1e-4)
    assert touched_share(1_000_000, 0.001, 100) == pytest.approx(1 - 0.999**100, abs=1e-4)
    assert 0.6 < touched_share(40_000, 0.01, 100) < 0.7 and 0.09 < touched_share(40_000, 0.001, 100) < 0.1


def test_a_list_of_most_items_is_touched_as_often_as_drawing_says() -> None:
    assert touched_share(120, 1 / 120, 50) == pytest.approx(50 / 120)
    assert touched_share(120, 2 / 120, 50) == pytest.approx(1 - 70 / 120 * 69 / 119)
    assert touched_share(50, 0.5, 50) == 1.0 and touched_share(50, 0.0, 50) == 0.0
    assert touched_share(50, 0.5, 0) == pytest.approx(0.0)


def test_where_no_item_changed_only_the_users_who_did_something_are_computed() -> None:
    forecast = copying_night(TIMINGS, shape(), 0.1, 0.0, np.array([10]))

    assert forecast.inputs == pytest.approx(0.1) and (forecast.lost, forecast.entered) == (0.0, 0.0)
    assert forecast.copied == pytest.approx(0.9)
    # reading and writing all, a tenth of towers and lists, and preparing the items
    assert forecast.scoring.cpu_s == pytest.approx(2 + 5 + 1 + 8 + 5)


def test_items_that_change_cost_lists_histories_and_the_towers_of_all() -> None:
    none, few_changed, many_changed = copying_nights(TIMINGS, shape(), 0.1, None, np.array([10, 10]))

    assert [forecast.items_changed for forecast in (none, few_changed, many_changed)] == list(ITEMS_CHANGED_SHARES)
    lost_share = touched_share(40_000, 0.001, 100)
    stay = 0.9 * (1 - touched_share(40_000, 0.001, 10))
    assert few_changed.inputs == pytest.approx(1 - stay)
    assert few_changed.lost == pytest.approx(stay * lost_share)
    assert few_changed.entered == pytest.approx(stay * (1 - lost_share) * lost_share)
    assert none.copied > few_changed.copied > many_changed.copied > 0
    assert none.scoring.cpu_s + 9 < few_changed.scoring.cpu_s < many_changed.scoring.cpu_s < TIMINGS.total.cpu_s


def test_with_more_items_than_may_enter_everybody_is_computed_and_nothing_is_dearer_than_all() -> None:
    (forecast,) = copying_nights(TIMINGS, shape(), 0.1, 0.1, np.array([10]))
    (all_,) = copying_nights(TIMINGS, shape(), 1.0, 1.0, np.array([10]))

    assert forecast.copied == pytest.approx(0.0)
    assert all_.scoring.cpu_s == pytest.approx(TIMINGS.total.cpu_s)
    assert set(all_.to_json()) == {
        "items_changed", "inputs", "lost", "entered", "copied", "scoring_s", "scoring_cpu_s",
    }  # fmt: skip


def test_lists_of_items_are_touched_by_their_own_length() -> None:
    with_items = shape(user_topk=("user", Layout("topk", 100, "f2")), item_similar=("item", Layout("topk", 50, "f2")))
    (short,) = copying_nights(TIMINGS, shape(), 0.1, 0.001, np.array([10]))
    (forecast,) = copying_nights(TIMINGS, with_items, 0.1, 0.001, np.array([10]))

    assert forecast.copied == short.copied and forecast.scoring.cpu_s > short.scoring.cpu_s


def test_active_users_are_those_of_the_last_day_before_the_cut() -> None:
    cut = datetime(2026, 1, 10, tzinfo=UTC)
    end = int(cut.timestamp()) * 1_000_000
    times = [end - 1, end - 2, end - DAY_US, end - DAY_US - 1, 5]
    drawn_sample = sample(times, [0, 0, 1, 2, 3], users=5)

    assert find_active_share(drawn_sample, cut) == pytest.approx(2 / 5)
    assert find_active_share(drawn_sample, None) == pytest.approx(2 / 5)
    assert find_changed_share(None, drawn_sample, cut)[0] == pytest.approx(2 / 5)


def test_what_is_stated_goes_first_and_without_times_a_tenth_is_assumed() -> None:
    drawn_sample = sample([0, 0], [0, 1], users=2)

    assert find_changed_share(0.25, drawn_sample, None) == (0.25, "25.0% of the users changed, as stated")
    changed_share, note = find_changed_share(None, drawn_sample, None)
    assert changed_share == USERS_CHANGED_SHARE and "assumed" in note
    assert find_active_share(sample([], [], users=2), None) is None

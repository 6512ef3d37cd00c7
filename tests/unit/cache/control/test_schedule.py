"""When a generation should exist, by cron and zone, and whether the one that is live will do."""

from datetime import UTC, datetime
from typing import Any

import pytest
from croniter import croniter

from cache.config.timetable import CLOCKS_APART_S, MISSED_TICKS_MAX, Schedule
from cache.errors import ConfigError

HOUR_S = 3_600


def at(text: str) -> float:
    """Unix seconds of an ISO time; UTC unless it says otherwise."""
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


@pytest.mark.parametrize(
    ("now_text", "tick"),
    [
        ("2026-05-02T03:00:00", "2026-05-02T03:00:00"),
        ("2026-05-02T02:59:59", "2026-05-01T03:00:00"),
        ("2026-05-02T03:00:00.5", "2026-05-02T03:00:00"),
        ("2026-01-01T00:00:00", "2025-12-31T03:00:00"),
    ],
)
def test_a_tick_counts_from_its_very_second(now_text: str, tick: str) -> None:
    assert Schedule().tick_before(at(now_text)) == at(tick)


@pytest.mark.parametrize(
    ("zone", "cron", "now_text", "tick"),
    [
        # 02:30 is skipped on 2026-03-29 in Berlin and on 2026-03-08 in New York: due an hour later.
        ("Europe/Berlin", "30 2 * * *", "2026-03-29T12:00+02:00", "2026-03-29T03:30+02:00"),
        ("Europe/Berlin", "30 2 * * *", "2026-03-29T03:29+02:00", "2026-03-28T02:30+01:00"),
        ("America/New_York", "30 2 * * *", "2026-03-08T12:00-04:00", "2026-03-08T03:30-04:00"),
        # 02:30 comes twice on 2026-10-25 in Berlin: due the second time only.
        ("Europe/Berlin", "30 2 * * *", "2026-10-25T02:45+02:00", "2026-10-24T02:30+02:00"),
        ("Europe/Berlin", "30 2 * * *", "2026-10-25T02:45+01:00", "2026-10-25T02:30+01:00"),
        ("America/New_York", "30 1 * * *", "2026-11-01T01:45-04:00", "2026-10-31T01:30-04:00"),
        # An hourly cron is due both times.
        ("Europe/Berlin", "30 * * * *", "2026-10-25T02:45+02:00", "2026-10-25T02:30+02:00"),
        ("Europe/Berlin", "30 * * * *", "2026-10-25T02:15+01:00", "2026-10-25T02:30+02:00"),
        ("Europe/Berlin", "30 * * * *", "2026-03-29T03:15+02:00", "2026-03-29T01:30+01:00"),
    ],
)
def test_a_change_of_clocks_neither_loses_nor_doubles_a_night(zone: str, cron: str, now_text: str, tick: str) -> None:
    assert Schedule(cron, zone).tick_before(at(now_text)) == at(tick)


def test_a_generation_is_missing_once_the_grace_has_passed_and_not_before() -> None:
    nights, tick = Schedule(grace_s=2 * HOUR_S), at("2026-05-02T03:00")
    yesterday = at("2026-05-01T03:10")

    assert not nights.is_generation_missing(tick + 2 * HOUR_S - 1, yesterday)
    assert nights.is_generation_missing(tick + 2 * HOUR_S, yesterday)
    assert not nights.is_generation_missing(tick + 2 * HOUR_S, tick + 600)


def test_where_nothing_was_ever_published_a_generation_is_missing() -> None:
    assert Schedule().is_generation_missing(at("2026-05-02T03:00"), None)


def test_what_was_rolled_back_to_is_too_old_to_stand_for_the_last_night() -> None:
    two_nights_ago = at("2026-04-30T03:10")

    assert Schedule().is_generation_missing(at("2026-05-02T07:00"), two_nights_ago)


def test_clocks_a_few_minutes_apart_change_nothing_and_a_wrong_one_is_no_proof() -> None:
    nights, tick = Schedule(), at("2026-05-02T03:00")
    now_s = tick + 4 * HOUR_S

    assert not nights.is_generation_missing(now_s, tick - CLOCKS_APART_S)
    assert nights.is_generation_missing(now_s, tick - CLOCKS_APART_S - 1)
    assert not nights.is_generation_missing(now_s, now_s + CLOCKS_APART_S)
    assert nights.is_generation_missing(now_s, now_s + CLOCKS_APART_S + 1)


def test_between_close_ticks_the_clocks_may_differ_by_half_their_distance_only() -> None:
    nights, now_s = Schedule("*/4 * * * *", grace_s=0), at("2026-05-02T03:04:30")

    assert not nights.is_generation_missing(now_s, at("2026-05-02T03:02"))
    assert nights.is_generation_missing(now_s, at("2026-05-02T03:01:59"))


@pytest.mark.parametrize(
    "cron", ["", "x", "* * * *", "* * * * * *", "61 * * * *", "0 0 30 2 *", "R R * * *", "H * * * *"]
)
def test_a_cron_without_ticks_is_refused_with_an_example_of_a_good_one(cron: str) -> None:
    with pytest.raises(ConfigError, match=r"0 3 \* \* \*"):
        Schedule(cron)


@pytest.mark.parametrize("zone", ["", "Mars/Olympus", "Europe", "../UTC", "/etc/localtime"])
def test_an_unknown_zone_is_refused_with_a_remedy(zone: str) -> None:
    with pytest.raises(ConfigError, match="tzdata"):
        Schedule(timezone=zone)


@pytest.mark.parametrize("grace_s", [-1.0, float("nan"), float("inf"), 1e11, 366 * 86_400.0 + 1])
def test_a_grace_is_a_number_of_seconds_up_to_a_year(grace_s: float) -> None:
    with pytest.raises(ConfigError, match="schedule_grace_s"):
        Schedule(grace_s=grace_s)


def test_nights_that_are_missed_are_counted_one_by_one_up_to_a_bound() -> None:
    weekdays = Schedule("0 3 * * 1-5", grace_s=HOUR_S)
    friday = at("2026-05-01T03:10")

    def missed(now_text: str) -> int:
        return weekdays.count_missed_ticks(at(now_text), friday)

    assert missed("2026-05-01T12:00") == missed("2026-05-04T03:59") == 0  # a weekend is no night
    assert missed("2026-05-04T04:00") == missed("2026-05-05T03:59") == 1
    assert missed("2026-05-05T04:00") == 2
    assert missed("2026-09-05T04:00") == MISSED_TICKS_MAX
    assert weekdays.count_missed_ticks(at("2026-05-04T04:00"), None) == MISSED_TICKS_MAX
    assert weekdays.count_missed_ticks(at("2026-05-05T04:00"), friday, missed_ticks_max=1) == 1


@pytest.mark.parametrize("cron", ["0 3 * * *", "*/7 * * * *", "30 2 * * 0", "0 0 29 2 *", "5 1,2,3 * * *"])
@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/New_York"])
def test_the_next_tick_is_the_first_that_comes_after(cron: str, zone: str) -> None:
    schedule = Schedule(cron, zone)
    # Around both changes of clocks in Berlin, and an arbitrary day.
    for at in (1_774_745_999.0, 1_774_749_600.0, 1_792_890_000.0, 1_792_893_601.5, 1_800_000_000.0):
        after = schedule.tick_after(at)

        assert after > at and schedule.tick_before(after) == after
        assert schedule.tick_before(after - 0.001) == schedule.tick_before(at) <= at


def test_a_second_call_in_the_same_second_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[object] = []
    get_prev = croniter.get_prev

    def record_call(*arguments: Any, **more: Any) -> Any:
        computed.append(arguments)
        return get_prev(*arguments, **more)

    schedule = Schedule("17 4 * * *", "Europe/Berlin", 600.0)
    monkeypatch.setattr(croniter, "get_prev", record_call)
    now_s = 1_790_000_000.0
    first = [schedule.count_missed_ticks(now_s, now_s - 86_400), schedule.due_tick(now_s)]
    first_call_count = len(computed)

    for part in range(1, 1_000):
        later = now_s + part / 1_000
        assert [schedule.count_missed_ticks(later, now_s - 86_400), schedule.due_tick(later)] == first

    assert 0 < first_call_count == len(computed)

"""What a replica tells Redis of its hot ids, and what it makes of what others told."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from cache.errors import TierUnavailable
from cache.store.blocklist import Blocklist
from cache.usage.hot_keys import (
    HOT_LIFE_S,
    HOT_WINDOW,
    MEMBERS_MAX,
    EntityName,
    HotKeyReport,
    SharedHotKeys,
    Window,
    hottest_names,
    sketch_member_of,
)
from serving.engine.answer_observer import RECENT_NAMES_MAX, RecentNames
from serving.generations.snapshot import Snapshot
from serving.usage.hot_keys import REPORTED_NAMES_MAX, HotKeySketch
from tests.fakes import FakeClock
from tests.unit.serving.world import World


@dataclass
class FakeRedis(SharedHotKeys):
    """Keeps reports and answers with what tests say is hot."""

    down: bool = False
    reports: list[HotKeyReport] = field(default_factory=list)
    answers: list[EntityName] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    async def add_report(self, report: HotKeyReport) -> None:
        if self.down:
            raise TierUnavailable("gone", reason="connection")
        self.reports.append(report)

    async def fetch_names(self, hour: int, window: Window = HOT_WINDOW) -> list[EntityName]:
        if self.down:
            raise TierUnavailable("gone", reason="connection")
        self.asked.append(hour)
        return self.answers


def user(number: int) -> EntityName:
    return "user_topk", b"u%d" % number


class Replica:
    """One replica's sketch over a fake Redis."""

    def __init__(self) -> None:
        self.clock, self.redis, self.recent = FakeClock(7_205.0), FakeRedis(), RecentNames()
        self.live: Snapshot | None = World().snapshot()
        self.sketch = HotKeySketch(self.redis, self.recent, lambda: self.live, self.clock)

    def block(self, **ids: Any) -> None:
        assert self.live is not None
        self.live = replace(self.live, blocklist=Blocklist(1, **ids))


@pytest.fixture
def replica() -> Replica:
    return Replica()


async def test_a_report_tells_each_request_once_under_its_hour(replica: Replica) -> None:
    replica.recent.extend([user(1), user(2), user(1)])
    await replica.sketch.report()
    replica.clock.tick(3_600)
    replica.recent.append(user(2))
    await replica.sketch.report()
    await replica.sketch.report()

    assert [(report.window_number, dict(report.name_counts)) for report in replica.redis.reports] == [
        (2, {user(1): 2, user(2): 1}),
        (3, {user(2): 1}),
    ]
    assert replica.sketch.reported_count == 3


async def test_a_report_is_bounded_and_keeps_what_was_asked_most(replica: Replica) -> None:
    for number in range(REPORTED_NAMES_MAX + 100):
        replica.recent.append(user(number))
    replica.recent.extend([user(REPORTED_NAMES_MAX + 99)] * 2)

    await replica.sketch.report()

    counts = [counted_name for report in replica.redis.reports for counted_name in report.name_counts]
    assert len(counts) == len(dict(counts)) == REPORTED_NAMES_MAX == replica.sketch.reported_count
    assert counts[0] == (user(REPORTED_NAMES_MAX + 99), 3)
    assert max(len(report.name_counts) for report in replica.redis.reports) < REPORTED_NAMES_MAX


def test_batches_are_remembered_as_if_one_by_one() -> None:
    recent, named = RecentNames(), [user(number) for number in range(RECENT_NAMES_MAX + 300)]
    for at in range(0, len(named), 100):
        recent.add("user_topk", [raw for _, raw in named[at : at + 100]])
    assert list(recent.all_names()) == named[-RECENT_NAMES_MAX:]
    assert recent.take_new() == named[-RECENT_NAMES_MAX:]
    recent.append(user(1))
    recent.add("user_topk", [b"2"] * 2)

    assert recent.take_new() == [user(1), ("user_topk", b"2"), ("user_topk", b"2")]


def test_what_is_remembered_is_bounded_and_a_mark_that_was_pushed_out_loses_nothing() -> None:
    recent = RecentNames()
    recent.append(user(0))
    assert recent.take_new() == [user(0)]
    assert recent.take_new() == [] and recent.take_new() == []
    recent.extend(user(number) for number in range(RECENT_NAMES_MAX + 5))

    assert recent.take_new() == [user(number) for number in range(5, RECENT_NAMES_MAX + 5)]
    assert len(recent) == RECENT_NAMES_MAX


async def test_tables_that_the_live_generation_lacks_are_not_told(replica: Replica) -> None:
    replica.recent.extend([("gone", b"u1"), user(1)])

    await replica.sketch.report()

    assert dict(replica.redis.reports[0].name_counts) == {user(1): 1}


async def test_what_is_blocked_is_not_told_and_what_was_told_before_is_taken_back(replica: Replica) -> None:
    replica.recent.extend([user(1), user(2)])
    await replica.sketch.report()
    replica.block(users=frozenset({b"u2"}), entities=frozenset({b"u3"}))
    replica.recent.extend([user(1), user(3)])

    await replica.sketch.report()

    _, report = replica.redis.reports
    assert dict(report.name_counts) == {user(1): 1}
    assert set(report.removed_names) == {user(2), user(3)}
    await replica.sketch.report()
    assert len(replica.redis.reports) == 2


async def test_without_redis_a_report_is_lost_but_what_must_go_still_goes_later(replica: Replica) -> None:
    replica.recent.append(user(2))
    await replica.sketch.report()
    replica.block(users=frozenset({b"u2"}))
    replica.redis.down = True
    replica.recent.append(user(1))
    await replica.sketch.report()
    assert replica.sketch.failed_count == 1

    replica.redis.down = False
    await replica.sketch.report()

    assert replica.redis.reports[-1] == HotKeyReport(2, [], [user(2)])


async def test_a_replica_without_a_generation_tells_nothing(replica: Replica) -> None:
    replica.live = None
    replica.recent.append(user(1))

    await replica.sketch.report()

    assert replica.redis.reports == []


async def test_what_is_hot_is_asked_of_redis_clock_and_nothing_when_it_is_gone(replica: Replica) -> None:
    replica.redis.answers = [user(3)]
    assert await replica.sketch.hottest_names() == [user(3)]
    assert replica.redis.asked == [2]

    replica.redis.down = True

    assert list(await replica.sketch.hottest_names()) == []


def test_two_hours_are_one_ranking() -> None:
    current_scores = [b"t:a", b"3", b"t:b:c", b"1"]
    previous_scores = [b"t:b:c", b"4.0", b"nonsense", b"9"]

    assert hottest_names([current_scores, previous_scores]) == [("t", b"b:c"), ("t", b"a")]
    assert hottest_names([[], []]) == []


def test_a_report_carries_its_bounds() -> None:
    report = HotKeyReport(5, [(user(1), 2)], [user(2)])

    assert report.script_arguments() == [MEMBERS_MAX, HOT_LIFE_S, 1, 2, b"user_topk:u1", b"user_topk:u2"]
    assert sketch_member_of(("t", b"a:b")) == b"t:a:b"

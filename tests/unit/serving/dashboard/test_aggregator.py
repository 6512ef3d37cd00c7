"""What workers tell a Redis that fails, forgets and comes back, and what a reader makes of it."""

import orjson
import pytest

from cache.format.redis_keys import Keyspace
from serving.dashboard.aggregator import (
    _FULL_READ_INTERVAL_S,
    RECENT_BIN_COUNT,
    WORKER_SILENCE_MAX_S,
    FleetReading,
    FleetView,
)
from serving.dashboard.counters import (
    _PUBLICATIONS_PER_SWEEP,
    BIN_S,
    BINS_AT_ONCE,
    BINS_MAX,
    WORKER_GONE_S,
    Counts,
    MetricsPublisher,
    merged_counts,
)
from serving.metrics.collectors import refine_bounds
from tests.fakes import FakeClock
from tests.unit.serving.dashboard.hashes import FakeRedis

KEYS = Keyspace("test")
BOUNDS = refine_bounds((0.001, 1.0))


class Worker:
    """One worker's teller and reader, and what it has counted."""

    def __init__(self, redis: FakeRedis, clock: FakeClock, name: str) -> None:
        self.counts: Counts = {}
        about = {"replica": name, "breaker": "closed"}
        self.teller = MetricsPublisher(redis, name, clock, lambda: dict(self.counts), lambda: about)
        self.fleet_view = FleetView(redis, self.teller, BOUNDS, clock, clock)

    def count(self, n: int) -> None:
        self.counts = merged_counts((self.counts, {"r": n, "h:l1:50": n}))


class World:
    """Two workers and their Redis."""

    def __init__(self) -> None:
        self.redis, self.clock = FakeRedis(), FakeClock(1_000_000.0)
        self.first_worker, self.second_worker = (
            Worker(self.redis, self.clock, worker_name) for worker_name in ("one", "other")
        )

    async def publish_all(self) -> None:
        for worker in (self.first_worker, self.second_worker):
            await worker.teller.publish()


@pytest.fixture
def world() -> World:
    return World()


def requests(reading: FleetReading) -> int:
    return sum(row.request_count for row in reading.bin_by_start.values())


async def test_reports_of_two_workers_add_up_to_one_fleet_view(world: World) -> None:
    world.first_worker.count(3)
    world.second_worker.count(4)
    await world.publish_all()
    world.first_worker.count(10)  # not told yet: the worker that is asked knows it all the same
    own_reading, theirs = (await world.first_worker.fleet_view.read(), await world.second_worker.fleet_view.read())

    assert own_reading.trouble_text is None and (requests(own_reading), requests(theirs)) == (17, 7)
    assert sum(counts["r"] for counts in own_reading.recent_counts_by_start.values()) == 17
    assert {name: worker_row["counts"]["r"] for name, worker_row in own_reading.worker_rows.items()} == {
        "one": 13, "other": 4,
    }  # fmt: skip


async def test_a_drawn_bin_is_drawn_again_when_more_is_reported(world: World) -> None:
    for expected in (1, 2, 3):
        world.second_worker.count(1)
        await world.publish_all()
        assert requests(await world.first_worker.fleet_view.read()) == expected


async def test_a_reply_that_was_lost_counts_nothing_twice(world: World) -> None:
    world.first_worker.count(3)
    world.redis.loses = True
    await world.first_worker.teller.publish()
    assert world.first_worker.teller.trouble_text is not None
    world.redis.loses = False
    world.first_worker.count(1)
    await world.first_worker.teller.publish()

    assert requests(await world.second_worker.fleet_view.read()) == 4


async def test_without_redis_it_is_the_workers_own_and_afterwards_the_whole(world: World) -> None:
    world.second_worker.count(4)
    await world.publish_all()
    world.redis.down = True
    world.first_worker.count(3)
    await world.first_worker.teller.publish()
    alone = await world.first_worker.fleet_view.read()
    assert alone.trouble_text == "gone" and requests(alone) == 3 and set(alone.worker_rows) == {"one"}
    world.clock.tick(5 * BIN_S)
    world.redis.down = False
    await world.publish_all()

    assert (
        requests(await world.first_worker.fleet_view.read())
        == requests(await world.second_worker.fleet_view.read())
        == 7
    )


async def test_a_redis_that_came_back_empty_receives_the_whole_hour_again(world: World) -> None:
    bins = BINS_AT_ONCE + 10
    for _ in range(bins):
        world.first_worker.count(1)
        world.clock.tick(BIN_S)
        await world.first_worker.teller.publish()
    world.redis.hashes.clear()
    for _ in range(3):
        await world.first_worker.teller.publish()

    assert requests(await world.second_worker.fleet_view.read()) == bins
    assert not world.first_worker.teller.bins.unpublished_starts


async def test_an_hour_is_kept_and_no_more(world: World) -> None:
    for _ in range(BINS_MAX + 50):
        world.first_worker.count(1)
        world.clock.tick(BIN_S)
        await world.first_worker.teller.publish()
        reading = await world.first_worker.fleet_view.read()

    drawn = world.first_worker.fleet_view._fleet_bins
    assert BINS_MAX - 1 <= len(drawn.bin_by_start) <= BINS_MAX
    assert len(reading.bin_by_start) == len(drawn.blobs_digest_by_start) == requests(reading) == len(drawn.bin_by_start)
    assert (
        RECENT_BIN_COUNT - 1
        <= len(reading.recent_counts_by_start)
        == len(drawn.recent_counts_by_start)
        <= RECENT_BIN_COUNT
    )


async def test_a_late_report_about_an_old_bin_is_seen_within_a_minute(world: World) -> None:
    world.redis.down = True
    world.second_worker.count(5)
    await world.second_worker.teller.publish()
    world.redis.down = False
    world.clock.tick(30 * BIN_S)
    assert requests(await world.first_worker.fleet_view.read()) == 0
    await world.second_worker.teller.publish()
    world.clock.tick(_FULL_READ_INTERVAL_S)

    assert requests(await world.first_worker.fleet_view.read()) == 5


async def test_a_silent_worker_is_not_shown_and_later_taken_out(world: World) -> None:
    world.second_worker.count(5)
    await world.publish_all()
    world.clock.tick(WORKER_SILENCE_MAX_S)
    assert set((await world.first_worker.fleet_view.read()).worker_rows) == {"one"}
    world.clock.tick(WORKER_GONE_S)
    for _ in range(_PUBLICATIONS_PER_SWEEP):
        await world.first_worker.teller.publish()

    assert set(world.redis.hashes[KEYS.dashboard_workers]) == {b"one"}
    await world.first_worker.teller.sign_off()
    assert not world.redis.hashes[KEYS.dashboard_workers]


async def test_rows_of_other_versions_spoil_nothing(world: World) -> None:
    now_s = world.clock()
    world.redis.hashes[KEYS.dashboard_workers] |= {
        b"older": orjson.dumps({"at": now_s}),
        b"broken": b"{",
        b"strange": b"[1]",
    }
    world.redis.hashes[KEYS.dashboard_bin(int(now_s) // BIN_S * BIN_S)] |= {b"older": b"?", b"x": b"[1,2]"}
    world.first_worker.count(2)
    reading = await world.first_worker.fleet_view.read()

    assert set(reading.worker_rows) == {"one", "older"} and requests(reading) == 2
    assert reading.worker_rows["older"]["counts"] is None

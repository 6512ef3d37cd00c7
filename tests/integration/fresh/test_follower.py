"""The follower of the stream, step by step over a real Redis."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from cache.events.event import Event
from cache.format.redis_keys import Keyspace
from cache.format.stream_position import STREAM_BEGINNING, Position
from cache.process.redis_server import RedisServer
from cache.store.blocklist import Blocklist
from serving.events.follower import EVENTS_BEHIND, EventMetrics
from tests.integration.fresh.followed_stream import Stream
from tests.integration.serving_app import eventually


async def test_events_behind_the_oldest_generation_are_read_in_their_order(stream: Stream) -> None:
    old = stream.click("u", "old")
    stream.click("u", "a")
    stream.click("v", "b")
    newest_position = stream.click("u", "c")
    stream.hold_generations(newest_position, old)

    assert await stream.steps()

    assert stream.items("u") == [b"a", b"c"] and stream.items("v") == [b"b"]
    assert stream.newer_events.users.last_number == newest_position.number
    assert stream.notes == [EVENTS_BEHIND, None] and stream.follower.lag_s() == 0.0


async def test_nothing_is_followed_before_a_generation_tells_of_events(stream: Stream) -> None:
    stream.click("u")
    assert not await stream.steps()
    stream.hold_generations()

    assert not await stream.steps()

    assert not stream.newer_events.packed_input_by_id and EVENTS_BEHIND not in stream.notes


async def test_what_all_generations_have_is_forgotten_and_read_again_for_an_older_one(stream: Stream) -> None:
    first, second = stream.click("u", "a"), stream.click("v", "b")
    stream.click("u", "c")
    stream.hold_generations(STREAM_BEGINNING)
    await stream.steps()
    probed = stream.newer_events.packed_input_by_id

    stream.hold_generations(second)
    await stream.steps()
    assert stream.items("u") == [b"c"] and not stream.items("v")

    stream.hold_generations(second, first)  # one that was rolled back to
    await stream.steps()
    assert stream.items("u") == [b"c"] and stream.items("v") == [b"b"]
    assert stream.newer_events.packed_input_by_id is probed  # probes go on where they were
    packed = sum(180 + len(user) + len(packed_events) for user, packed_events in probed.items())
    assert stream.newer_events.users.size_bytes == packed


async def test_what_is_no_event_is_passed_over_once(stream: Stream) -> None:
    stream.hold_generations(STREAM_BEGINNING)
    stream.client.xadd(stream.keyspace.events, {"e": b"{"})
    stream.client.xadd(stream.keyspace.events, {"x": b"1"})
    stream.click("u", "a")

    await stream.steps(2)

    assert stream.items("u") == [b"a"] and stream.follower.unreadable_count == 2


BIG = "x" * 1_000
EVENTS: dict[str, Callable[[int], Event]] = {
    "click": lambda number: Event(f"e{number}", 0, f"u{number}".encode(), b"i"),
    "attribute": lambda number: Event(f"e{number}", 0, None, b"%d" % number, attributes={"a": BIG}),
    "new item": lambda number: Event(f"e{number}", 0, None, b"%d" % number, vector=(0.5,) * 250),
}


@pytest.mark.parametrize("kind", EVENTS)
async def test_a_full_memory_takes_no_more_in_says_so_and_goes_on_when_there_is_room(
    redis_server: RedisServer, keyspace: Keyspace, kind: str
) -> None:
    """Whatever kind of events fills it: each is held by a part of its own, and no other part has room for it."""
    stream = Stream(redis_server, keyspace, limit_bytes=1_000)
    stream.hold_generations(STREAM_BEGINNING)
    for number in range(300):
        last = stream.accept(EVENTS[kind](number))
    for _ in range(4):
        await stream.steps()

    newer_events = stream.newer_events
    held_count = {
        "click": len(newer_events.users),
        "attribute": len(newer_events.values.values_set_after("item", 0)),
        "new item": len(newer_events.items),
    }[kind]
    assert 0 < held_count <= 256 and stream.notes[-1] == EVENTS_BEHIND  # one read beyond the bound
    assert newer_events.users.last_number < last.number
    assert newer_events.users.size_bytes < 256 * 300
    assert stream.follower.lag_s() > 0.0

    stream.hold_generations(last)
    after = stream.click("u7", "new")
    await stream.steps(3)

    assert stream.items("u7") == [b"new"] and stream.notes[-1] is None
    assert stream.newer_events.users.last_number == after.number
    stream.client.close()


async def test_a_worker_that_has_read_nothing_yet_is_behind_since_there_is_something_to_read(
    redis_server: RedisServer, keyspace: Keyspace, tmp_path: Path
) -> None:
    clock_s = [1_000.0]
    stream = Stream(redis_server, keyspace, timer=lambda: clock_s[0], url=f"unix://{tmp_path}/nobody")
    following = asyncio.create_task(stream.follower.run())

    async def tried(notes: int) -> bool:
        return len(stream.notes) >= notes

    await asyncio.sleep(0)
    clock_s[0] += 60
    assert stream.follower.lag_s() == 0.0 and not stream.notes  # no generation tells of events
    stream.hold_generations(STREAM_BEGINNING)
    assert await eventually(lambda: tried(1))
    clock_s[0] += 7
    assert await eventually(lambda: tried(2))
    following.cancel()
    await asyncio.wait([following])
    families = EventMetrics(stream.follower).collect()
    values = {family.name: family.samples[0].value for family in families}
    assert values["larder_events_lag_seconds"] == 7.0 and {*stream.notes} == {EVENTS_BEHIND}

    redis_client = Redis.from_url(redis_server.url, protocol=2)
    await stream.follower.step(redis_client, 1)
    await redis_client.aclose()

    assert stream.follower.lag_s() == 0.0 and stream.notes[-1] is None
    stream.client.close()


async def test_events_of_the_blocked_are_forgotten_and_found_again_once_they_are_free(stream: Stream) -> None:
    stream.hold_generations(STREAM_BEGINNING)
    stream.click("u", "a")
    stream.click("v", "b")
    await stream.steps()
    stream.holder.blocklist = Blocklist(users=frozenset([b"u"]))
    stream.click("u", "c")
    await stream.steps(2)
    assert not stream.items("u") and stream.items("v") == [b"b"]

    stream.holder.blocklist = Blocklist()
    await stream.steps()

    assert stream.items("u") == [b"a", b"c"]


async def test_a_readmitted_item_does_not_bring_back_events_that_the_stream_lost(stream: Stream) -> None:
    stream.hold_generations(STREAM_BEGINNING)
    position = stream.click("u", "erased")
    stream.click("u", "other")
    await stream.steps()
    stream.holder.blocklist = Blocklist(items=frozenset([b"erased"]), erased_items=frozenset([b"erased"]))
    await stream.steps()
    stream.client.xdel(stream.keyspace.events, str(position))

    stream.holder.blocklist = Blocklist()
    await stream.steps()

    assert stream.items("u") == [b"other"]
    assert stream.notes[-1] is None and stream.recheck_count == 1


async def test_values_that_one_item_has_too_many_of_are_counted_and_delay_no_others(stream: Stream) -> None:
    stream.hold_generations(STREAM_BEGINNING)
    for number in range(2):
        names = [f"a{number}-{index}" for index in range(40)]
        event = Event(f"v{number}", 0, None, b"i", attributes=dict.fromkeys(names, 1))
        stream.accept(event)
    await stream.steps()

    assert stream.notes[-1] is None and stream.newer_events.values.refusal_count == 1
    families = EventMetrics(stream.follower).collect()
    values = {family.name: family.samples[0].value for family in families}
    assert values["larder_event_values_refused"] == 1


async def test_an_outage_leaves_the_known_events_and_is_reported(own_redis: RedisServer) -> None:
    stream = Stream(own_redis, Keyspace("outage"))
    stream.hold_generations(STREAM_BEGINNING)
    stream.click("u", "a")
    async with stream.follower.connect() as client:
        await stream.follower.step(client, 1)
        stream.client.shutdown(nosave=True)
        with pytest.raises((RedisError, OSError)):
            await stream.follower.step(client, 1)

    assert stream.items("u") == [b"a"]
    stream.client.close()


@pytest.mark.parametrize("has_later_events", [False, True])
async def test_a_redis_that_came_back_without_counted_events_is_told_until_a_night_is_live(
    stream: Stream, has_later_events: bool
) -> None:
    # given events that were counted after the newest night
    last_of_night = stream.click("u", "a")
    stream.hold_generations(last_of_night)
    for item in ("b", "c", "d"):
        newest_position = stream.click("u", item)
    await stream.steps()
    await stream.steps()
    assert stream.follower.lost_since() is None

    # when Redis comes back without the stream, perhaps after another replica accepted an event
    stream.client.delete(stream.keyspace.events)
    if has_later_events:
        stream.client.xadd(stream.keyspace.events, {"e": b""}, id=f"{newest_position.ms + 1}-0")
    await stream.steps()

    # then that is told until a night has later events
    assert stream.follower.lost_since() == last_of_night
    stream.hold_generations(Position(newest_position.ms + 2, 0))
    assert stream.follower.lost_since() is None


async def test_a_stream_that_nights_trimmed_or_that_was_lost_before_the_first_event_has_lost_nothing(
    stream: Stream,
) -> None:
    stream.hold_generations(Position(1_700_000_000_000, 0))
    await stream.steps()
    assert stream.follower.lost_since() is None

    stream.click("u")
    await stream.steps()
    stream.client.xtrim(stream.keyspace.events, maxlen=0)
    await stream.steps()

    assert stream.follower.lost_since() is None


async def test_a_server_that_describes_no_stream_does_not_end_the_following(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def describe_oddly(_client: Redis, _key: str) -> object:
        return [1]

    monkeypatch.setattr(Redis, "xinfo_stream", describe_oddly)
    stream.hold_generations(STREAM_BEGINNING)
    stream.click("u", "a")

    assert await stream.steps() and stream.items("u") == [b"a"]
    assert stream.follower.lost_since() is None

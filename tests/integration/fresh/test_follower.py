"""The follower of the stream, step by step over a real Redis."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from redis.exceptions import RedisError

from cache.events.accept import SCRIPT, StreamBounds, call_of, outcomes, packed
from cache.events.event import Event
from cache.events.position import BEGINNING, Position
from cache.format.redis_keys import Keyspace
from cache.process.redis_server import RedisServer
from cache.store.blocklist import Blocklist
from serving.fresh import event_follower
from serving.fresh.event_follower import BEHIND, EventFollower
from serving.fresh.newer_events import NewerEvents

BOUNDS = StreamBounds(256 << 20, 86_400_000, 100_000)


@dataclass
class Stream:
    """A stream, a follower of it, and the generations held, by the positions that they were made at."""

    server: RedisServer
    keyspace: Keyspace
    limit_bytes: int = 1 << 20
    newer: NewerEvents = field(default_factory=NewerEvents)
    notes: list[str | None] = field(default_factory=list)
    shelf: Any = field(default_factory=lambda: SimpleNamespace(holding=None, blocklist=Blocklist()))

    def __post_init__(self) -> None:
        self.client = redis.Redis.from_url(self.server.url, protocol=2)
        self.follower = EventFollower(
            self.server.url, self.keyspace, self.newer, self.shelf, self.notes.append,
            limit_bytes=self.limit_bytes,
        )  # fmt: skip
        self._count = 0

    def hold(self, *untils: Position) -> None:
        """Holds generations made at these positions, and one that tells of no events."""
        told = [SimpleNamespace(events=SimpleNamespace(until=each.number)) for each in untils]
        self.shelf.holding = SimpleNamespace(snapshots=[*told, SimpleNamespace(events=None)])

    def click(self, user: str, item: str = "i") -> Position:
        """One more event, accepted."""
        self._count += 1
        event = Event(f"e{self._count}", self._count, user.encode(), item.encode())
        keys, args = call_of(self.keyspace, BOUNDS, [packed(self.keyspace, event)])
        (told,) = outcomes(self.client.eval(SCRIPT, len(keys), *keys, *args))
        assert told.position is not None
        return told.position

    async def steps(self, count: int = 1) -> bool:
        """Takes some steps that wait for nothing."""
        async with self.follower.connected() as client:
            return all([await self.follower.step(client, 1) for _ in range(count)])

    def items(self, user: str, after: Position = BEGINNING) -> list[bytes]:
        """Items of a user's events in memory."""
        return [each.item for each in self.newer.users.newer(user.encode(), after.number)]


@pytest.fixture
def stream(redis_server: RedisServer, keyspace: Keyspace) -> Iterator[Stream]:
    found = Stream(redis_server, keyspace)
    yield found
    found.client.close()


async def test_events_behind_the_oldest_generation_are_read_in_their_order(stream: Stream) -> None:
    old = stream.click("u", "old")
    stream.click("u", "a")
    stream.click("v", "b")
    newest = stream.click("u", "c")
    stream.hold(newest, old)

    assert await stream.steps()

    assert stream.items("u") == [b"a", b"c"] and stream.items("v") == [b"b"]
    assert stream.newer.users.last == newest.number
    assert stream.notes == [BEHIND, None] and stream.follower.lag_s() == 0.0


async def test_nothing_is_followed_before_a_generation_tells_of_events(stream: Stream) -> None:
    stream.click("u")
    assert not await stream.steps()
    stream.hold()

    assert not await stream.steps()

    assert not stream.newer.packed and BEHIND not in stream.notes


async def test_what_all_generations_have_is_forgotten_and_read_again_for_an_older_one(
    stream: Stream,
) -> None:
    first, second = stream.click("u", "a"), stream.click("v", "b")
    stream.click("u", "c")
    stream.hold(BEGINNING)
    await stream.steps()
    probed = stream.newer.packed

    stream.hold(second)
    await stream.steps()
    assert stream.items("u") == [b"c"] and not stream.items("v")

    stream.hold(second, first)  # one that was rolled back to
    await stream.steps()
    assert stream.items("u") == [b"c"] and stream.items("v") == [b"b"]
    assert stream.newer.packed is probed  # probes go on where they were
    packed = sum(180 + len(user) + len(each) for user, each in probed.items())
    assert stream.newer.users.size_bytes == packed


async def test_what_is_no_event_is_passed_over_once(stream: Stream) -> None:
    stream.hold(BEGINNING)
    stream.client.xadd(stream.keyspace.events, {"e": b"{"})
    stream.client.xadd(stream.keyspace.events, {"x": b"1"})
    stream.click("u", "a")

    await stream.steps(2)

    assert stream.items("u") == [b"a"] and stream.follower.unreadable == 2


async def test_a_full_memory_takes_no_more_in_says_so_and_goes_on_when_there_is_room(
    redis_server: RedisServer, keyspace: Keyspace
) -> None:
    stream = Stream(redis_server, keyspace, limit_bytes=1_000)
    stream.hold(BEGINNING)
    for number in range(300):
        last = stream.click(f"u{number}")
    for _ in range(4):
        await stream.steps()

    assert 0 < len(stream.newer.users) < 300 and stream.notes[-1] == BEHIND
    assert stream.newer.users.size_bytes < 256 * 300  # one read beyond the bound
    assert stream.follower.lag_s() > 0.0

    stream.hold(last)
    after = stream.click("u7", "new")
    await stream.steps(3)

    assert stream.items("u7") == [b"new"] and stream.notes[-1] is None
    assert stream.newer.users.last == after.number
    stream.client.close()


async def test_events_of_the_blocked_are_forgotten_and_found_again_once_they_are_free(
    stream: Stream,
) -> None:
    stream.hold(BEGINNING)
    stream.click("u", "a")
    stream.click("v", "b")
    await stream.steps()
    stream.shelf.blocklist = Blocklist(users=frozenset([b"u"]))
    stream.click("u", "c")
    await stream.steps(2)
    assert not stream.items("u") and stream.items("v") == [b"b"]

    stream.shelf.blocklist = Blocklist()
    await stream.steps()

    assert stream.items("u") == [b"a", b"c"]


async def test_who_is_free_again_costs_nobody_else_anything_and_the_newest_go_on_being_counted(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.shelf.blocklist = Blocklist(users=frozenset([b"u"]))
    stream.hold(BEGINNING)
    for number in range(600):
        stream.click("u" if number % 100 == 0 else "v", f"i{number}")
    await stream.steps(4)
    packed, known = stream.newer.packed[b"v"], stream.newer.users.last
    stream.click("u", "new")
    stream.click("w", "new")
    while_reading = watched(stream, monkeypatch, "w")

    stream.shelf.blocklist = Blocklist()
    await stream.steps()

    assert stream.items("u") == [b"i%d" % each for each in range(0, 600, 100)] + [b"new"]
    assert while_reading[-1] == [b"new"] and stream.newer.users.last > known
    assert stream.newer.packed[b"v"] is packed
    assert stream.notes[-2:] == [BEHIND, None]


async def test_for_an_older_generation_only_what_lacks_is_read_and_put_in_front(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = stream.click("u", "before")
    for number in range(600):
        second = stream.click("u", f"i{number}")
    stream.click("u", "c")
    stream.click("v", "d")
    stream.hold(second)
    await stream.steps()
    packed = stream.newer.packed[b"v"]
    stream.click("w", "new")
    while_reading = watched(stream, monkeypatch, "w")

    stream.hold(second, first)
    await stream.steps()

    assert stream.items("u") == [b"i%d" % each for each in range(600)] + [b"c"]
    assert len(while_reading) == 3 and while_reading[-1] == stream.items("w") == [b"new"]
    assert stream.newer.packed[b"v"] is packed
    assert stream.newer.users.since == stream.newer.values.since == first.number


async def test_an_outage_while_somebodys_events_are_read_again_loses_none(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.shelf.blocklist = Blocklist(users=frozenset([b"u"]))
    stream.hold(BEGINNING)
    stream.click("u", "a")
    await stream.steps()
    stream.shelf.blocklist = Blocklist()
    stream.click("u", "b")
    read = stream.follower._read

    async def fails(client: Any, newer: NewerEvents, wait_ms: int | None, **more: Any) -> int:
        found = await read(client, newer, wait_ms, **more)
        if newer is stream.newer:
            raise RedisError("away")
        return found

    monkeypatch.setattr(stream.follower, "_read", fails)
    with pytest.raises(RedisError):
        await stream.steps()
    monkeypatch.setattr(stream.follower, "_read", read)
    await stream.steps()

    assert stream.items("u") == [b"a", b"b"]


async def test_a_blocklist_is_looked_through_once(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Blocklist] = []
    union = event_follower._blocked

    def look(blocklist: Blocklist) -> frozenset[bytes]:
        looked.append(blocklist)
        return union(blocklist)

    monkeypatch.setattr(event_follower, "_blocked", look)
    stream.shelf.blocklist = blocklist = Blocklist(users=frozenset([b"u"]))
    stream.hold(BEGINNING)
    for _ in range(5):
        stream.click("u")
        await stream.steps()

    assert looked == [blocklist] and not stream.items("u")


def watched(stream: Stream, monkeypatch: pytest.MonkeyPatch, user: str) -> list[list[bytes]]:
    """The user's items in memory at each read of what is read again."""
    found: list[list[bytes]] = []
    read = stream.follower._read

    async def watch(client: Any, newer: NewerEvents, wait_ms: int | None, **more: Any) -> int:
        if newer is not stream.newer:
            found.append(stream.items(user))
        return await read(client, newer, wait_ms, **more)

    monkeypatch.setattr(stream.follower, "_read", watch)
    return found


async def test_an_outage_leaves_what_is_known_and_is_told(own_redis: RedisServer) -> None:
    stream = Stream(own_redis, Keyspace("outage"))
    stream.hold(BEGINNING)
    stream.click("u", "a")
    async with stream.follower.connected() as client:
        await stream.follower.step(client, 1)
        stream.client.shutdown(nosave=True)
        with pytest.raises((RedisError, OSError)):
            await stream.follower.step(client, 1)

    assert stream.items("u") == [b"a"]
    stream.client.close()

"""Requests' events on their way into one call: together, in order, each caller for itself."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from cache.events.stream import PackedEvent, StreamBounds
from cache.format.redis_keys import Keyspace
from cache.format.stream_position import Position
from serving.events import intake as acceptor_module
from serving.events.connection import EventsFull, EventsUnavailable
from serving.events.intake import EVENTS_PER_CALL, Acceptor, EventsBusy

BOUNDS = StreamBounds(1 << 20, 1_000, 10)


class FakeEventsRedis:
    """Accepts whatever comes, one position each, when the gate is open; fails as it is told."""

    def __init__(self) -> None:
        self.calls: list[list[bytes]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails_with: Exception | None = None
        self._number = 0

    async def accept(self, keys: Sequence[bytes], arguments: Sequence[Any], script: str) -> list[bytes]:
        assert arguments[3] == "7-5"
        bodies = list(arguments[4:])
        assert len(keys) == 1 + 2 * len(bodies)
        self.calls.append(bodies)
        await self.gate.wait()
        if self.fails_with is not None:
            raise self.fails_with
        replies = []
        for body in bodies:
            self._number += 1
            replies.append(b"repeated" if body == b"again" else b"1-%d" % self._number)
        return replies


def make_acceptor(redis: FakeEventsRedis) -> Acceptor:
    return Acceptor(redis, Keyspace("test"), BOUNDS, lambda: Position(7, 5))  # type: ignore[arg-type]


def events(*bodies: bytes) -> list[PackedEvent]:
    return [PackedEvent(b"id", b"source", body) for body in bodies]


async def test_requests_of_one_iteration_travel_in_one_call_and_get_their_own_outcomes() -> None:
    redis = FakeEventsRedis()
    acceptor = make_acceptor(redis)

    first_outcomes, two, none = await asyncio.gather(
        acceptor.accept(events(b"a", b"again")), acceptor.accept(events(b"c")), acceptor.accept([])
    )

    assert redis.calls == [[b"a", b"again", b"c"]]
    assert [outcome.rejection_reason for outcome in first_outcomes] == [None, "repeated"] and none == []
    assert str(two[0].position) == "1-3"


async def test_what_comes_during_a_call_goes_with_the_next_one() -> None:
    redis = FakeEventsRedis()
    redis.gate.clear()
    acceptor = make_acceptor(redis)
    first = asyncio.create_task(acceptor.accept(events(b"a")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    later_tasks = [asyncio.create_task(acceptor.accept(events(body))) for body in (b"b", b"c")]
    await asyncio.sleep(0)
    assert redis.calls == [[b"a"]]

    redis.gate.set()
    await asyncio.gather(first, *later_tasks)

    assert redis.calls == [[b"a"], [b"b", b"c"]]


async def test_a_large_request_goes_in_pieces_and_keeps_its_order() -> None:
    redis = FakeEventsRedis()
    bodies = [b"%d" % number for number in range(2 * EVENTS_PER_CALL + 7)]

    outcomes = await make_acceptor(redis).accept(events(*bodies))

    assert [len(call) for call in redis.calls] == [EVENTS_PER_CALL, EVENTS_PER_CALL, 7]
    assert [body for call in redis.calls for body in call] == bodies
    positions = [outcome.position for outcome in outcomes if outcome.position]
    assert positions == sorted(positions) and len(positions) == len(bodies)


async def test_an_outage_ends_all_that_wait_and_the_next_one_is_tried_anew() -> None:
    redis = FakeEventsRedis()
    redis.gate.clear()
    redis.fails_with = EventsUnavailable("gone")
    acceptor = make_acceptor(redis)
    large = [b"x"] * EVENTS_PER_CALL
    tasks = [asyncio.create_task(acceptor.accept(events(*large))) for _ in range(5)]
    await asyncio.sleep(0)
    redis.gate.set()

    errors = await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(error) for error in errors] == [EventsUnavailable] * 5 and len(redis.calls) == 1
    redis.fails_with = None
    assert len(await acceptor.accept(events(b"a"))) == 1


async def test_a_full_stream_refuses_the_call_and_others_are_tried_for_themselves() -> None:
    redis = FakeEventsRedis()
    redis.fails_with = EventsFull("full")
    acceptor = make_acceptor(redis)

    errors = await asyncio.gather(
        *(acceptor.accept(events(*[b"x"] * EVENTS_PER_CALL)) for _ in range(2)), return_exceptions=True
    )

    assert [type(error) for error in errors] == [EventsFull] * 2 and len(redis.calls) == 2


async def test_a_cancelled_caller_cancels_no_other() -> None:
    redis = FakeEventsRedis()
    redis.gate.clear()
    acceptor = make_acceptor(redis)
    leaver = asyncio.create_task(acceptor.accept(events(b"a")))
    stayer = asyncio.create_task(acceptor.accept(events(b"b")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    late = asyncio.create_task(acceptor.accept(events(b"c")))
    await asyncio.sleep(0)

    leaver.cancel()
    late.cancel()
    await asyncio.sleep(0)
    redis.gate.set()

    assert len(await stayer) == 1
    assert redis.calls == [[b"a", b"b"]]  # who left before the call was made is not sent
    await acceptor.aclose()


async def test_events_beyond_the_bound_are_refused_unsent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "WAITING_BYTES_MAX", 10)
    redis = FakeEventsRedis()
    redis.gate.clear()
    acceptor = make_acceptor(redis)
    first = asyncio.create_task(acceptor.accept(events(b"x" * 8)))
    await asyncio.sleep(0)
    second = asyncio.create_task(acceptor.accept(events(b"x" * 8)))
    await asyncio.sleep(0)

    with pytest.raises(EventsBusy):
        await acceptor.accept(events(b"x" * 8))

    redis.gate.set()
    await asyncio.gather(first, second)
    await acceptor.accept(events(b"x" * 8))


async def test_what_an_outage_refused_takes_no_room_of_what_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an outage that refused the waiting events
    monkeypatch.setattr(acceptor_module, "WAITING_BYTES_MAX", 10)
    redis = FakeEventsRedis()
    redis.gate.clear()
    redis.fails_with = EventsUnavailable("gone")
    acceptor = make_acceptor(redis)
    tasks = [asyncio.create_task(acceptor.accept(events(b"x" * 5)))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(acceptor.accept(events(b"x" * 5))))
    await asyncio.sleep(0)
    redis.gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)

    # When Redis is back, and as many events come at once as may wait
    redis.fails_with = None
    request_outcomes = await asyncio.gather(*(acceptor.accept(events(b"x" * 5)) for _ in range(2)))

    # Then all of them are accepted
    assert [len(accepted) for accepted in request_outcomes] == [1, 1]


async def test_a_service_that_stops_refuses_what_waits() -> None:
    redis = FakeEventsRedis()
    redis.gate.clear()
    acceptor = make_acceptor(redis)
    under_way = asyncio.create_task(acceptor.accept(events(b"a")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting = asyncio.create_task(acceptor.accept(events(b"b")))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(redis.gate.set)

    await acceptor.aclose()

    assert len(await under_way) == 1
    with pytest.raises(EventsUnavailable, match="stops"):
        await waiting

"""A Redis of events that comes back without its stream, and with an older clock: positions go on, nothing is lost."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cache.errors import CorruptArtefact
from cache.events.event import Event
from cache.events.newer_events import UserEvents
from cache.events.stream import TAKEN_POSITION_PATH, read_taken_position
from cache.format.redis_keys import Keyspace
from cache.format.stream_position import STREAM_BEGINNING, Position
from cache.store.artefacts import ArtefactStore
from precompute.events.files import last_taken_position
from precompute.events.stream import take_events
from serving.events.follower import NewestPosition
from serving.events.newer_events import NewerEvents
from serving.process.resources import StoreThreads
from tests.integration.events.durable_redis import DurableRedis, stream_of
from tests.integration.events.intakes import event, intake
from tests.integration.fresh.followed_stream import Held

AHEAD_MS = 3_600_000


@pytest.fixture
def store_ahead(client: Any, keyspace: Keyspace, tmp_path: Path) -> ArtefactStore:
    """A store that has an event of an hour ahead of Redis' clock, whose stream is gone."""
    store, now_ms = ArtefactStore(str(tmp_path)), client.time()[0] * 1000
    body = Event("old", 0, b"u", b"i").to_bytes()
    client.xadd(keyspace.events, {"e": body}, id=f"{now_ms + AHEAD_MS}-3")
    take_events(store, client, keyspace)
    client.delete(keyspace.events)
    return store


def newest_of(
    store: ArtefactStore, *snapshot_positions: Position, followed: Position = STREAM_BEGINNING
) -> NewestPosition:
    snapshots = [Held(position.number) for position in snapshot_positions]
    holder: Any = SimpleNamespace(served=SimpleNamespace(snapshots=snapshots) if snapshot_positions else None)
    users = UserEvents()
    users.last_number = followed.number
    return NewestPosition(NewerEvents(users), holder, store)


async def at_once(work: Any, /, *args: Any, **kwargs: Any) -> Any:
    return work(*args, **kwargs)


AT_ONCE = cast(StoreThreads, at_once)


async def test_new_events_stand_behind_what_nights_have_and_the_next_one_has_them(
    server: DurableRedis, client: Any, keyspace: Keyspace, store_ahead: ArtefactStore
) -> None:
    newest_position = newest_of(store_ahead)
    await newest_position.load_taken_position(AT_ONCE)
    last_position = last_taken_position(store_ahead)
    async with intake(server.url, keyspace) as running_intake:
        running_intake.newest_position = newest_position()
        receipts = [await running_intake.accept_events(event(number)) for number in range(3)]
        repeat_receipt = await running_intake.accept_events(event(1))

    positions = [Position.parse(receipt["position"]) for receipt in receipts]
    assert positions[0] == Position(last_position.ms + 1, 0)
    assert positions == sorted({*positions}) and repeat_receipt["repeated"] == 1
    assert [stored_event["id"] for stored_event in stream_of(client, keyspace)] == ["e-0", "e-1", "e-2"]
    taken_events = take_events(store_ahead, client, keyspace)
    assert taken_events.event_count == 3 and taken_events.until_position == positions[-1] == read_taken_position(
        store_ahead
    )


async def test_a_clock_that_is_not_behind_gives_positions_as_ever(
    server: DurableRedis, client: Any, keyspace: Keyspace
) -> None:
    now_ms = client.time()[0] * 1000
    async with intake(server.url, keyspace) as running_intake:
        running_intake.newest_position = Position(now_ms - 1_000, 7)
        first = Position.parse((await running_intake.accept_events(event(0)))["position"])
        running_intake.newest_position = Position(first.ms, first.sequence + 9)  # as another replica knows it
        second = Position.parse((await running_intake.accept_events(event(1)))["position"])

    assert now_ms <= first.ms <= now_ms + 60_000
    assert Position(first.ms, first.sequence + 9) < second < Position(first.ms + 60_000, 0)


async def test_the_newest_of_all_that_is_known_counts(tmp_path: Path, store_ahead: ArtefactStore) -> None:
    taken_until = last_taken_position(store_ahead)
    later, empty = (Position(taken_until.ms, taken_until.sequence + 1), ArtefactStore(str(tmp_path / "empty")))

    assert newest_of(empty)() == STREAM_BEGINNING
    assert newest_of(empty, Position(5, 1), Position(3, 0))() == Position(5, 1)
    assert newest_of(empty, Position(5, 1), followed=Position(6, 0))() == Position(6, 0)
    for snapshot_position, expected_position in ((STREAM_BEGINNING, taken_until), (later, later)):
        newest_position = newest_of(store_ahead, snapshot_position)
        await newest_position.load_taken_position(AT_ONCE)
        assert newest_position() == expected_position


async def test_without_a_readable_position_in_the_store_that_of_the_snapshots_counts_and_a_warning_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ArtefactStore(str(tmp_path))
    store.write(TAKEN_POSITION_PATH, b'{"until": "noon"}')
    with pytest.raises(CorruptArtefact, match=TAKEN_POSITION_PATH):
        read_taken_position(store)
    newest_position = newest_of(store, Position(5, 0))

    await newest_position.load_taken_position(AT_ONCE)

    assert newest_position() == Position(5, 0) and "is unknown" in caplog.text

"""Events that are read again, after an unblocking or for an older generation, while the newest go on being counted."""

from typing import Any

import pytest
from redis.exceptions import RedisError

from cache.format.stream_position import STREAM_BEGINNING
from cache.store.blocklist import Blocklist
from serving.events import follower
from serving.events.follower import EVENTS_BEHIND
from serving.events.newer_events import NewerEvents
from tests.integration.fresh.followed_stream import Stream


async def test_an_unblocked_user_costs_no_others_anything_and_the_newest_go_on_being_counted(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.holder.blocklist = Blocklist(users=frozenset([b"u"]))
    stream.hold_generations(STREAM_BEGINNING)
    for number in range(600):
        stream.click("u" if number % 100 == 0 else "v", f"i{number}")
    await stream.steps(4)
    packed, last_number = stream.newer_events.packed_input_by_id[b"v"], stream.newer_events.users.last_number
    stream.click("u", "new")
    stream.click("w", "new")
    while_reading = watched(stream, monkeypatch, "w")

    stream.holder.blocklist = Blocklist()
    await stream.steps()

    assert stream.items("u") == [b"i%d" % item_number for item_number in range(0, 600, 100)] + [b"new"]
    assert while_reading[-1] == [b"new"] and stream.newer_events.users.last_number > last_number
    assert stream.newer_events.packed_input_by_id[b"v"] is packed
    assert stream.notes[-2:] == [EVENTS_BEHIND, None]


async def test_for_an_older_generation_only_what_lacks_is_read_and_put_in_front(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = stream.click("u", "before")
    for number in range(600):
        second = stream.click("u", f"i{number}")
    stream.click("u", "c")
    stream.click("v", "d")
    stream.hold_generations(second)
    await stream.steps()
    packed = stream.newer_events.packed_input_by_id[b"v"]
    stream.click("w", "new")
    while_reading = watched(stream, monkeypatch, "w")

    stream.hold_generations(second, first)
    await stream.steps()

    assert stream.items("u") == [b"i%d" % item_number for item_number in range(600)] + [b"c"]
    assert len(while_reading) == 3 and while_reading[-1] == stream.items("w") == [b"new"]
    assert stream.newer_events.packed_input_by_id[b"v"] is packed
    assert (
        stream.newer_events.users.complete_after_number
        == stream.newer_events.values.complete_after_number
        == first.number
    )


async def test_an_outage_while_somebodys_events_are_read_again_loses_none(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.holder.blocklist = Blocklist(users=frozenset([b"u"]))
    stream.hold_generations(STREAM_BEGINNING)
    stream.click("u", "a")
    await stream.steps()
    stream.holder.blocklist = Blocklist()
    stream.click("u", "b")
    read = stream.follower._add_entries

    async def fails(client: Any, newer_events: NewerEvents, wait_ms: int | None, **more: Any) -> int:
        read_count = await read(client, newer_events, wait_ms, **more)
        if newer_events is stream.newer_events:
            raise RedisError("away")
        return read_count

    monkeypatch.setattr(stream.follower, "_add_entries", fails)
    with pytest.raises(RedisError):
        await stream.steps()
    monkeypatch.setattr(stream.follower, "_add_entries", read)
    await stream.steps()

    assert stream.items("u") == [b"a", b"b"]


async def test_a_blocklist_is_looked_through_once(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    blocklists: list[Blocklist] = []
    union = follower._owners_in_blocklist

    def record_blocklist(blocklist: Blocklist) -> Any:
        blocklists.append(blocklist)
        return union(blocklist)

    monkeypatch.setattr(follower, "_owners_in_blocklist", record_blocklist)
    stream.holder.blocklist = blocklist = Blocklist(users=frozenset([b"u"]))
    stream.hold_generations(STREAM_BEGINNING)
    for _ in range(5):
        stream.click("u")
        await stream.steps()

    assert blocklists == [blocklist] and not stream.items("u")


def watched(stream: Stream, monkeypatch: pytest.MonkeyPatch, user: str) -> list[list[bytes]]:
    """The user's items in memory at each read of what is read again."""
    items_per_read: list[list[bytes]] = []
    read = stream.follower._add_entries

    async def watch(client: Any, newer_events: NewerEvents, wait_ms: int | None, **more: Any) -> int:
        if newer_events is not stream.newer_events:
            items_per_read.append(stream.items(user))
        return await read(client, newer_events, wait_ms, **more)

    monkeypatch.setattr(stream.follower, "_add_entries", watch)
    return items_per_read

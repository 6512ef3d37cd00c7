"""The inbox: what producers write into Redis is taken in once, whoever dies in between."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cache.events.stream import StreamBounds, accept_script_arguments
from cache.format.redis_keys import Keyspace
from cache.store.blocklist import Blocklist
from serving.events import intake as inbox_module
from serving.events.connection import EventsRedis
from serving.events.intake import INBOX_GROUP
from tests.integration.events.durable_redis import DurableRedis, durable_redis, stream_of
from tests.integration.events.intakes import intake, rejected
from tests.integration.serving_app import eventually


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let consumers be taken for dead within moments, and let retries follow at once."""
    for name, value in (
        ("CLAIM_AFTER_MS", 100),
        ("CLAIM_EVERY_S", 0.05),
        ("INBOX_PAUSE_S", 0.05),
        ("INBOX_BLOCK_MS", 50),
    ):
        monkeypatch.setattr(inbox_module, name, value)


def write(client: Any, keyspace: Keyspace, *numbers: int, user: str = "u") -> None:
    for number in numbers:
        fields = {"user": user, "item": f"i-{number}", "id": f"e-{number}", "time": "1700000000"}
        client.xadd(keyspace.inbox, fields)


async def is_empty(client: Any, keyspace: Keyspace) -> bool:
    return client.xlen(keyspace.inbox) == 0 and not client.xpending(keyspace.inbox, INBOX_GROUP)["pending"]


async def test_what_lies_there_and_what_comes_is_taken_in_and_removed(
    server: DurableRedis, client: Any, keyspace: Keyspace
) -> None:
    write(client, keyspace, *range(300))
    client.xadd(keyspace.inbox, {"e": '{"user":"u","item":"json","time":1}'})
    async with intake(server.url, keyspace, inbox=True):
        assert await eventually(lambda: is_empty(client, keyspace))
        write(client, keyspace, 300)
        assert await eventually(lambda: is_empty(client, keyspace))

    stored_events = stream_of(client, keyspace)
    assert [stored_event["item"] for stored_event in stored_events] == [
        *(f"i-{n}" for n in range(300)),
        "json",
        "i-300",
    ]


async def test_entries_under_a_producers_own_ids_delay_no_others(
    server: DurableRedis, client: Any, keyspace: Keyspace
) -> None:
    # Microseconds as ids are no positions of events. Write the entries before the service starts, since it reads the
    # oldest.
    for sequence in range(2):
        fields = {"user": "u", "item": f"i-{sequence}", "time": "1"}
        client.xadd(keyspace.inbox, fields, id=f"1769860800391000-{sequence}")
    async with intake(server.url, keyspace, inbox=True) as running_intake:
        await running_intake.parts.intake.counts.refresh()
        assert await eventually(lambda: is_empty(client, keyspace))

    assert [stored_event["id"] for stored_event in stream_of(client, keyspace)] == [
        "1769860800391000-0",
        "1769860800391000-1",
    ]


async def test_an_entry_that_is_no_event_is_kept_as_rejected_and_delays_no_others(
    server: DurableRedis, client: Any, keyspace: Keyspace
) -> None:
    client.xadd(keyspace.inbox, {"user": "u"})
    client.xadd(keyspace.inbox, {"e": "{"})
    write(client, keyspace, 1)
    async with intake(server.url, keyspace, inbox=True) as running_intake:
        assert await eventually(lambda: is_empty(client, keyspace))

    assert [rejection["reason"] for rejection in rejected(client, keyspace)] == ["missing_field", "invalid_json"]
    assert running_intake.results["accepted"] == 1 and len(stream_of(client, keyspace)) == 1


async def test_a_malformed_event_of_an_erased_user_leaves_nothing_of_itself(
    server: DurableRedis, client: Any, keyspace: Keyspace
) -> None:
    broken = [{"user": "gone"}, {"user": "gone", "item": b"\xff"}, {"e": '{"user":"gone","x":1}'}]
    async with intake(server.url, keyspace, inbox=True) as running_intake:
        running_intake.blocklist = Blocklist(users=frozenset([b"gone"]))
        for fields in broken:
            client.xadd(keyspace.inbox, fields)

        async def all_rejected() -> bool:
            return running_intake.results["erased"] == len(broken) and await is_empty(client, keyspace)

        assert await eventually(all_rejected)
        receipt = await running_intake.accept_events({"user": "gone", "weight": "x"})

    assert [rejection["reason"] for rejection in receipt["rejected"]] == ["erased"]
    rejections = rejected(client, keyspace)
    assert len(rejections) == 4 and "gone" not in str(rejections)


async def test_words_of_a_rejection_are_cut(server: DurableRedis, client: Any, keyspace: Keyspace) -> None:
    client.xadd(keyspace.inbox, {"user": "u", "item": "i", "x" * 5_000: "1"})
    async with intake(server.url, keyspace, inbox=True):
        assert await eventually(lambda: is_empty(client, keyspace))

    (rejection,) = rejected(client, keyspace)
    assert rejection["reason"] == "unknown_field" and len(rejection["detail"]) <= 400


async def test_two_consumers_share_the_inbox(server: DurableRedis, client: Any, keyspace: Keyspace) -> None:
    async with intake(server.url, keyspace, inbox=True), intake(server.url, keyspace, "two", inbox=True):
        for start in range(0, 500, 50):
            write(client, keyspace, *range(start, start + 50))
            await asyncio.sleep(0)
        assert await eventually(lambda: is_empty(client, keyspace))

    ids = [stored_event["id"] for stored_event in stream_of(client, keyspace)]
    assert sorted(ids) == sorted(f"e-{n}" for n in range(500))


@pytest.mark.parametrize("is_accepted", [False, True])
async def test_what_a_killed_consumer_took_counts_once(
    server: DurableRedis, client: Any, keyspace: Keyspace, *, is_accepted: bool
) -> None:
    # Kill it right after it has taken entries, or right after the script has accepted them.
    write(client, keyspace, *range(10))
    client.xadd(keyspace.inbox, {"user": "u", "item": "unnamed", "time": "1"})
    client.xgroup_create(keyspace.inbox, INBOX_GROUP, "0")
    claimed_entries = client.xreadgroup(INBOX_GROUP, "killed", {keyspace.inbox: ">"})[0][1]
    assert len(claimed_entries) == 11
    if is_accepted:
        async with intake(server.url, keyspace) as dead:
            reader = dead.parts.intake.reader
            packed = [
                reader.parse_inbox_entry(fields, entry.decode(), 1.8e9, dead.blocklist)
                for entry, fields in claimed_entries
            ]
            calls = EventsRedis(server.url, "any")
            await calls.accept(*accept_script_arguments(keyspace, StreamBounds(1 << 30, 10**6, 100), packed))
            await calls.aclose()

    async with intake(server.url, keyspace, inbox=True) as successor_intake:
        assert await eventually(lambda: is_empty(client, keyspace))

    stored_events = stream_of(client, keyspace)
    assert [stored_event["item"] for stored_event in stored_events] == [*(f"i-{n}" for n in range(10)), "unnamed"]
    assert successor_intake.results["repeated"] == (11 if is_accepted else 0)


async def test_an_entry_deleted_while_a_consumer_had_it_delays_no_others(
    server: DurableRedis, client: Any, keyspace: Keyspace
) -> None:
    write(client, keyspace, 1, 2)
    client.xgroup_create(keyspace.inbox, INBOX_GROUP, "0")
    claimed_entries = client.xreadgroup(INBOX_GROUP, "one", {keyspace.inbox: ">"})[0][1]
    client.xdel(keyspace.inbox, claimed_entries[0][0])

    async with intake(server.url, keyspace, "one", inbox=True):
        assert await eventually(lambda: is_empty(client, keyspace))

    assert [stored_event["id"] for stored_event in stream_of(client, keyspace)] == ["e-2"]


async def test_a_full_stream_leaves_the_inbox_as_it_is(server: DurableRedis, client: Any, keyspace: Keyspace) -> None:
    async with intake(server.url, keyspace, stream_bytes=1 << 20, inbox=True) as running_intake:
        filler = {"e": b"x" * 1_000}
        with client.pipeline(transaction=False) as pipeline:
            for _ in range(1_500):
                pipeline.xadd(keyspace.events, filler)
            pipeline.execute()
        write(client, keyspace, *range(5))
        await asyncio.sleep(0.2)  # several tries
        assert client.xlen(keyspace.inbox) == 5 and not running_intake.results["accepted"]
        refusals = running_intake.parts.intake.counts.refusal_count_by_reason

        async def is_refused_twice() -> bool:
            return refusals["events_full"] >= 2  # each try: the alert goes on as long as the inbox waits

        assert await eventually(is_refused_twice)

        client.delete(keyspace.events)

        assert await eventually(lambda: is_empty(client, keyspace))
    assert refusals["events_unavailable"] == refusals["overloaded"] == 0
    assert len(stream_of(client, keyspace)) == 5


async def test_an_inbox_is_emptied_at_redis_maxmemory_by_a_starting_service(tmp_path: Path, keyspace: Keyspace) -> None:
    with durable_redis(tmp_path, maxmemory="100mb") as small, small.client() as client:
        client.xgroup_create(keyspace.inbox, INBOX_GROUP, "0", mkstream=True)
        client.xadd(keyspace.inbox, {"user": "u"})
        write(client, keyspace, *range(300))
        client.config_set("maxmemory", "1")
        async with intake(small.url, keyspace, inbox=True) as running_intake:
            assert await eventually(lambda: is_empty(client, keyspace))

        assert len(stream_of(client, keyspace)) == 300
        # The entry was rejected, and there was no memory to store the reason.
        assert running_intake.results["missing_field"] == 1 and running_intake.parts.intake.counts.dropped_count == 1


async def test_an_inbox_that_is_gone_with_its_group_begins_anew(
    server: DurableRedis, client: Any, keyspace: Keyspace
) -> None:
    async with intake(server.url, keyspace, inbox=True):
        write(client, keyspace, 1)
        assert await eventually(lambda: is_empty(client, keyspace))
        client.delete(keyspace.inbox)
        write(client, keyspace, 2)

        async def came() -> bool:
            return [stored_event["id"] for stored_event in stream_of(client, keyspace)] == ["e-1", "e-2"]

        assert await eventually(came)


async def test_consumers_without_entries_are_forgotten_after_a_while(
    server: DurableRedis, client: Any, keyspace: Keyspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_module, "FORGET_CONSUMER_AFTER_MS", 200)
    monkeypatch.setattr(inbox_module, "CLAIM_AFTER_MS", 60_000)
    write(client, keyspace, 1)
    client.xgroup_create(keyspace.inbox, INBOX_GROUP, "0")
    client.xgroup_createconsumer(keyspace.inbox, INBOX_GROUP, "idle")
    client.xreadgroup(INBOX_GROUP, "holds", {keyspace.inbox: ">"})

    async def names() -> set[bytes]:
        return {consumer["name"] for consumer in client.xinfo_consumers(keyspace.inbox, INBOX_GROUP)}

    async def forgotten() -> bool:
        return b"idle" not in await names()

    async with intake(server.url, keyspace, inbox=True):
        assert await eventually(forgotten)
        # A consumer that still holds entries stays: they would be lost with it.
        assert b"holds" in await names()

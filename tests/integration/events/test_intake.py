"""Events into a real Redis: once each, within bounds, and only where it keeps them as demanded."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from redis.asyncio import ConnectionPool

from cache.format.redis_keys import Keyspace
from cache.format.stream_position import Position
from cache.store.blocklist import Blocklist
from serving.requests.errors import Problem
from tests.integration.events.durable_redis import DurableRedis, durable_redis, stream_of
from tests.integration.events.intakes import event, intake, rejected
from tests.integration.serving_app import eventually


async def test_events_are_accepted_once_in_their_order(server: DurableRedis, client: Any, keyspace: Keyspace) -> None:
    async with intake(server.url, keyspace, durability="always") as running_intake:
        first = await running_intake.accept_events(*(event(number) for number in range(600)))
        repeat_receipt = await running_intake.accept_events(event(5), event(600), event(600))

    assert (first["accepted"], first["repeated"], first["rejected"]) == (600, 0, [])
    assert first["durability"] == "always"
    assert (repeat_receipt["accepted"], repeat_receipt["repeated"]) == (1, 2)
    assert [stored_event["id"] for stored_event in stream_of(client, keyspace)] == [f"e-{n}" for n in range(601)]
    newest_position = Position.parse(client.xrevrange(keyspace.events, count=1)[0][0])
    assert Position.parse(repeat_receipt["position"]) == newest_position > Position.parse(first["position"])
    assert (running_intake.results["accepted"], running_intake.results["repeated"]) == (601, 2)


async def test_rejected_events_are_reported_in_the_receipt_counted_and_kept(
    server: DurableRedis, client: Any, keyspace: Keyspace
) -> None:
    async with intake(server.url, keyspace, of_one=2) as running_intake:
        running_intake.blocklist = Blocklist(users=frozenset([b"gone"]))
        receipt = await running_intake.accept_events(
            event(0), {"id": "x"}, event(1, "gone"), event(2), event(3), event(4, "other")
        )

    reasons = [(rejection["index"], rejection["reason"]) for rejection in receipt["rejected"]]
    assert reasons == [(1, "missing_field"), (2, "erased"), (4, "too_many")]
    assert receipt["accepted"] == 3
    stored_rejections = rejected(client, keyspace)
    assert sorted(rejection["reason"] for rejection in stored_rejections) == ["erased", "missing_field", "too_many"]
    # An erased user is not in the stored rejections.
    assert not any("gone" in text for rejection in stored_rejections for text in rejection.values())
    assert {rejection["event"] for rejection in stored_rejections if rejection["reason"] == "missing_field"} == {
        '{"id":"x"}'
    }
    assert running_intake.results["too_many"] == running_intake.results["erased"] == 1


async def test_a_user_and_an_item_of_one_id_are_no_repetition_and_bounded_separately(
    server: DurableRedis, client: Any, keyspace: Keyspace
) -> None:
    async with intake(server.url, keyspace, of_one=1) as running_intake:
        receipt = await running_intake.accept_events(
            {"user": "7", "id": "1", "attributes": {"country": "NL"}},
            {"item": "7", "id": "1", "attributes": {"price": 2}},
        )

    assert (receipt["accepted"], receipt["repeated"], receipt["rejected"]) == (2, 0, [])
    assert len(stream_of(client, keyspace)) == 2


async def test_a_rejected_event_too_deep_to_be_written_is_counted_and_reported(
    server: DurableRedis, client: Any, keyspace: Keyspace
) -> None:
    deep = orjson.loads(b'{"id":"1","user":' + b"[" * 600 + b"]" * 600 + b"}")
    async with intake(server.url, keyspace) as running_intake:
        receipt = await running_intake.accept_events(event(0), deep)

    assert receipt["accepted"] == 1
    assert [rejection["reason"] for rejection in receipt["rejected"]] == ["missing_field"]
    assert [rejection["event"] for rejection in rejected(client, keyspace)] == [""]


async def test_a_flood_by_one_user_costs_others_nothing(server: DurableRedis, client: Any, keyspace: Keyspace) -> None:
    async with intake(server.url, keyspace, of_one=20) as running_intake:
        flood = [
            await running_intake.accept_events(*(event(100 * call + n, "loud") for n in range(100)))
            for call in range(5)
        ]
        quiet_receipt = await running_intake.accept_events(*(event(n, "quiet") for n in range(20)))

    assert [receipt["accepted"] for receipt in flood] == [20, 0, 0, 0, 0]
    assert quiet_receipt["accepted"] == 20
    users = [stored_event["user"] for stored_event in stream_of(client, keyspace)]
    assert (users.count("loud"), users.count("quiet")) == (20, 20)


async def test_a_full_stream_takes_nothing_until_it_is_trimmed(
    server: DurableRedis, client: Any, keyspace: Keyspace
) -> None:
    async with intake(server.url, keyspace, stream_bytes=1 << 20, of_one=10**6, batch=10**6) as running_intake:
        sent_count = 0

        async def fill() -> None:
            nonlocal sent_count
            while sent_count < 100_000:
                await running_intake.accept_events(
                    *(event(sent_count + n, f"u-{n}", type="x" * 60) for n in range(500))
                )
                sent_count += 500

        with pytest.raises(Problem) as caught:
            await fill()
        assert (caught.value.status, caught.value.reason) == (429, "events_full")
        assert caught.value.details["retry_after_seconds"]
        length = client.xlen(keyspace.events)
        assert sent_count <= length < sent_count + 500
        assert client.memory_usage(keyspace.events) < (1 << 20) + (256 << 10)

        client.xtrim(keyspace.events, maxlen=10, approximate=False)

        repeated_events = [event(sent_count + n, f"u-{n}", type="x" * 60) for n in range(500)]
        receipt = await running_intake.accept_events(*repeated_events)
        # Events that were accepted before the stream was full count once.
        assert receipt["accepted"] + receipt["repeated"] == 500 and receipt["repeated"] == length - sent_count


async def test_a_redis_at_its_maxmemory_is_full(tmp_path: Path, keyspace: Keyspace) -> None:
    with durable_redis(tmp_path, maxmemory="100mb") as small, small.client() as client:
        async with intake(small.url, keyspace) as running_intake:
            await running_intake.accept_events(event(0))
            client.config_set("maxmemory", "1")
            with pytest.raises(Problem) as caught:
                await running_intake.accept_events(event(1))
            client.config_set("maxmemory", "100mb")
            receipt = await running_intake.accept_events(event(0), event(1))

    assert caught.value.reason == "events_full"
    assert (receipt["accepted"], receipt["repeated"]) == (1, 1)


async def test_a_repetition_is_a_write_so_that_waiting_for_the_disk_waits_for_it(
    server: DurableRedis, client: Any, keyspace: Keyspace
) -> None:
    async with intake(server.url, keyspace) as running_intake:
        await running_intake.accept_events(event(0))
        (id_key,) = client.keys(keyspace.event_ids + b"*")
        client.pexpire(id_key, 10_000)

        assert (await running_intake.accept_events(event(0)))["repeated"] == 1

    assert client.pttl(id_key) > 10_000


async def test_positions_hold_while_redis_clock_stands_still(
    server: DurableRedis, client: Any, keyspace: Keyspace
) -> None:
    # Add an entry of tomorrow: for Redis' ids, the clock stands still until then.
    ms = int(client.time()[0]) * 1000 + 86_400_000
    client.xadd(keyspace.events, {"e": "{}"}, id=f"{ms}-{(1 << 19) - 1}")
    async with intake(server.url, keyspace) as running_intake:
        first = await running_intake.accept_events(event(0))
        second_receipt = await running_intake.accept_events(event(1), event(2))
        client.xtrim(keyspace.events, maxlen=0, approximate=False)
        last = await running_intake.accept_events(event(3))

    assert [receipt["position"] for receipt in (first, second_receipt, last)] == [
        f"{ms}-{1 << 19}",
        f"{ms + 1}-1",
        f"{ms + 1}-2",
    ]


async def test_a_policy_that_evicts_ids_is_logged(
    server: DurableRedis, client: Any, keyspace: Keyspace, caplog: pytest.LogCaptureFixture
) -> None:
    async def warned(**events: Any) -> bool:
        caplog.clear()
        async with intake(server.url, keyspace, inbox=True, **events):
            return "volatile-lru" in caplog.text

    assert not await warned(durability="always")
    client.config_set("maxmemory-policy", "volatile-lru")
    try:
        assert await warned(durability="always") and not await warned(durability="any")
    finally:
        client.config_set("maxmemory-policy", "noeviction")


async def test_less_durability_than_demanded_accepts_nothing_until_it_is_mended(
    tmp_path: Path, keyspace: Keyspace
) -> None:
    with durable_redis(tmp_path, "everysec") as server, server.client() as client:
        async with intake(server.url, keyspace, durability="always") as strict:
            with pytest.raises(Problem) as caught:
                await strict.accept_events(event(0))
            assert (caught.value.status, caught.value.reason) == (503, "events_unavailable")
            assert "'everysec'" in caught.value.message
            assert client.xlen(keyspace.events) == 0
            async with intake(server.url, keyspace, durability="everysec") as patient:
                assert (await patient.accept_events(event(0)))["durability"] == "everysec"

            client.config_set("appendfsync", "always")

            assert (await strict.accept_events(event(1)))["durability"] == "always"


async def test_another_server_behind_the_same_address_is_looked_at_anew(tmp_path: Path, keyspace: Keyspace) -> None:
    with durable_redis(tmp_path) as server:
        async with intake(server.url, keyspace, durability="always") as strict:
            assert (await strict.accept_events(event(0)))["accepted"] == 1
            server.stop()
            server._settings["appendonly"] = "no"
            server.start()

            async def refused() -> bool:
                with pytest.raises(Problem) as caught:
                    await strict.accept_events(event(1))
                return "'none'" in caught.value.message

            assert await eventually(refused)  # the first one may only notice that a connection broke
            with server.client() as client:
                assert client.xlen(keyspace.events) == 0


async def test_an_outage_is_reported_and_over_when_redis_is_back(tmp_path: Path, keyspace: Keyspace) -> None:
    with durable_redis(tmp_path) as server:
        async with intake(server.url, keyspace) as running_intake:
            await running_intake.accept_events(event(0))
            server.kill()
            with pytest.raises(Problem) as caught:
                await running_intake.accept_events(event(1))
            assert (caught.value.status, caught.value.reason) == (503, "events_unavailable")
            assert running_intake.parts.intake.counts.refusal_count_by_reason["events_unavailable"] == 1
            await running_intake.parts.intake.counts.refresh()
            assert running_intake.parts.intake.counts.value_by_gauge == {"up": 0.0}
            server.start()

            receipt = await running_intake.accept_events(event(0), event(1))

            assert (receipt["accepted"], receipt["repeated"]) == (1, 1)


async def test_a_full_disk_is_named_to_callers_counted_as_not_accepting_and_over_when_there_is_room(
    tmp_path: Path, keyspace: Keyspace, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a Redis of events with the shipped durability
    with durable_redis(tmp_path, "everysec") as server:
        async with intake(server.url, keyspace, inbox=True) as running_intake:
            counts = running_intake.parts.intake.counts
            await running_intake.accept_events(event(0))

            # When its disk is full
            with server.full_disk():
                with pytest.raises(Problem) as caught:
                    await running_intake.accept_events(event(1))
                await counts.refresh()
                full_gauges, refusal = counts.value_by_gauge, counts.write_refusal

            # Then callers get the cause, the log has Redis' own words, and the gauge of the alert is 0
            assert (caught.value.status, caught.value.reason) == (503, "events_unavailable")
            assert "answers, but refuses to write: it cannot write to its disk" in caught.value.message
            assert "MISCONF Errors writing to the AOF file" in caplog.text
            assert (full_gauges["up"], full_gauges["stream_length"]) == (0.0, 1.0) and refusal is not None

            # And once there is room again, it accepts events without help
            await counts.refresh()
            assert counts.value_by_gauge["up"] == 1.0 and counts.write_refusal is None
            assert (await running_intake.accept_events(event(1)))["accepted"] == 1


async def test_a_service_that_starts_before_a_full_disk_says_so(
    tmp_path: Path, keyspace: Keyspace, caplog: pytest.LogCaptureFixture
) -> None:
    with durable_redis(tmp_path, "everysec") as server, server.full_disk():
        async with intake(server.url, keyspace, inbox=True):
            pass

    assert "no events are accepted for now: the Redis of events answers, but refuses to write (MISCONF" in caplog.text


@pytest.mark.parametrize(
    ("refuses", "accepts", "why"),
    [
        (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE"), "it is a read-only replica"),
        (
            ("CONFIG", "SET", "min-replicas-to-write", "1"), ("CONFIG", "SET", "min-replicas-to-write", "0"),
            "too few replicas follow it",
        ),
    ],
    ids=["a replica", "too few replicas"],
)  # fmt: skip
async def test_a_redis_that_refuses_to_write_for_another_reason_is_named_as_well(
    server: DurableRedis, client: Any, keyspace: Keyspace, refuses: tuple[str, ...], accepts: tuple[str, ...], why: str
) -> None:
    async with intake(server.url, keyspace) as running_intake:
        client.execute_command(*refuses)
        try:
            with pytest.raises(Problem) as caught:
                await running_intake.accept_events(event(0))
            await running_intake.parts.intake.counts.refresh()
            up = running_intake.parts.intake.counts.value_by_gauge["up"]
        finally:
            client.execute_command(*accepts)

    assert f"answers, but refuses to write: {why}" in caught.value.message and up == 0.0


async def test_the_script_comes_back_by_itself(server: DurableRedis, client: Any, keyspace: Keyspace) -> None:
    async with intake(server.url, keyspace) as running_intake:
        await running_intake.accept_events(event(0))
        client.script_flush()

        assert (await running_intake.accept_events(event(1)))["accepted"] == 1


async def test_requests_at_once_of_many_callers_count_every_event_once(
    server: DurableRedis, client: Any, keyspace: Keyspace
) -> None:
    async with intake(server.url, keyspace) as first_intake, intake(server.url, keyspace, "two") as two:
        receipts = await asyncio.gather(
            *(
                target_intake.accept_events(event(n), event(n + 1))
                for n in range(50)
                for target_intake in (first_intake, two)
            )
        )

    assert sum(receipt["accepted"] for receipt in receipts) == 51
    assert sum(receipt["repeated"] for receipt in receipts) == 200 - 51
    assert sorted(stored_event["id"] for stored_event in stream_of(client, keyspace)) == sorted(
        f"e-{n}" for n in range(51)
    )


async def test_a_connection_that_closes_while_it_opens_is_an_outage_and_any_other_defect_is_one(
    server: DurableRedis, keyspace: Keyspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with intake(server.url, keyspace) as running_intake:
        error_messages = ["unable to perform operation on <TCPTransport>; the handler is closed", "a defect"]

        async def opened(_: object) -> None:
            raise RuntimeError(error_messages.pop(0))

        monkeypatch.setattr(ConnectionPool, "get_connection", opened)
        with pytest.raises(Problem) as caught:
            await running_intake.accept_events(event(1))
        with pytest.raises(RuntimeError, match="a defect"):
            await running_intake.accept_events(event(1))

    assert (caught.value.status, caught.value.reason) == (503, "events_unavailable")

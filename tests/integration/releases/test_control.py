"""Control keys as others may leave them: beats from the future, junk, rows and pointers that cannot be read."""

import logging
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import redis

from cache.control.control_keys import REPLICA_DEAD_S, Control
from cache.errors import CorruptArtefact, Refused, TierUnavailable
from cache.format.redis_keys import Keyspace
from cache.l2.sync_clients import connect
from cache.store.artefacts import ArtefactStore
from cache.store.releases import Release, all_releases, intent_path
from tests.integration.release_world import A, World


@pytest.fixture
def world(tmp_path: Path, redis_url: str, keyspace: Keyspace) -> Iterator[World]:
    with connect(redis_url, 5.0) as client:
        yield World(ArtefactStore(str(tmp_path)), client, keyspace)


def beat(control: Control, name: str, at: float) -> None:
    control.client.zadd(control.keyspace.replicas, {orjson.dumps({"replica": name}): at})


def test_a_beat_from_the_future_is_nobodys_and_is_pruned_with_the_dead(redis_url: str, keyspace: Keyspace) -> None:
    with connect(redis_url, 5.0) as client:
        control = Control(client, keyspace)
        now_s = control.time()
        for name, at in (("alive", now_s), ("ahead", now_s + 1), ("future", now_s + 3_600)):
            beat(control, name, at)

        assert {replica.name for replica in control.replicas(now_s)} == {"alive", "ahead"}
        assert control.forget_dead_replicas(now_s, silence_max_s=REPLICA_DEAD_S) == 1
        assert client.zcard(keyspace.replicas) == 2


def test_what_is_no_heartbeat_is_skipped_and_logged_once(
    redis_url: str, keyspace: Keyspace, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(redis_url, 5.0) as client, caplog.at_level(logging.WARNING):
        control = Control(client, keyspace)
        now_s = control.time()
        beat(control, "alive", now_s)
        for junk in (b"junk", b"[]", b"{}", b'{"replica": "x", "holds": 3}'):
            client.zadd(keyspace.replicas, {junk: now_s})

        for _ in range(2):
            assert [replica.name for replica in control.replicas(now_s)] == ["alive"]

        assert len(caplog.records) == 4 and keyspace.replicas in caplog.text


@pytest.mark.parametrize("row", [b"junk", b"{}", b"3", b'{"state": "odd", "at": 1}'])
def test_a_row_that_cannot_be_read_is_named_with_what_to_do(redis_url: str, keyspace: Keyspace, row: bytes) -> None:
    with connect(redis_url, 5.0) as client:
        client.hset(keyspace.generations, A, row.decode())
        with pytest.raises(CorruptArtefact) as caught:
            Control(client, keyspace).rows()

    for expected_part in (A, keyspace.namespace, f"HDEL {keyspace.generations} {A}", "restore"):
        assert expected_part in caught.value.message


@pytest.mark.parametrize("raw", [b"garbage", b"{}", b"[]", b'{"epoch": 1, "canary": 3}'])
def test_a_pointer_that_cannot_be_read_is_named_with_what_to_do(redis_url: str, keyspace: Keyspace, raw: bytes) -> None:
    with connect(redis_url, 5.0) as client:
        client.set(keyspace.live, raw)
        with pytest.raises(CorruptArtefact, match="--adopt") as caught:
            Control(client, keyspace).read_pointer()

    assert keyspace.live in caught.value.message


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"epoch": 1}', b"\xff", "another's"])
def test_a_release_record_that_cannot_be_read_is_named_with_what_to_do(world: World, raw: bytes | str) -> None:
    world.publish(A)
    (record,) = all_releases(world.store)
    number = record.number + 1
    if isinstance(raw, str):  # whole, under another record's name
        raw = record.to_bytes()
    world.store.write(intent_path(number), raw)

    for read_releases in (world.releases.view, world.releases.ledger):
        with pytest.raises(CorruptArtefact, match="aside") as caught:
            read_releases()
        assert f"releases/{number}.json" in caught.value.message
        assert world.store.url in caught.value.message


def test_an_unknown_action_is_no_release_record() -> None:
    record = Release(1, "pin", A, None, "x", 0.0)
    raw = record.to_bytes().replace(b'"pin"', b'"dance"')
    with pytest.raises(CorruptArtefact, match="dance"):
        Release.from_bytes(raw, is_done=False)


def test_an_unreachable_redis_is_named_without_its_password() -> None:
    url = "redis://loader:sec%2Fret@127.0.0.1:1/3?socket_timeout=1"
    with pytest.raises(TierUnavailable) as caught, connect(url, 1.0) as client:
        client.ping()

    message = caught.value.message
    assert "redis://loader@127.0.0.1:1/3" in message and "sec" not in message.replace("second", "")
    assert "REDIS_URL" in message and "again" in message


def test_a_full_redis_says_what_was_refused_and_nothing_it_cannot_know(redis_url: str) -> None:
    with pytest.raises(Refused) as caught, connect(redis_url, 1.0):
        raise redis.exceptions.OutOfMemoryError("command not allowed")

    assert "raise maxmemory" in caught.value.message
    assert "published" not in caught.value.message

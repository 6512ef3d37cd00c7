"""A primary with a real replica: nothing is published that a node might not have."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from cache.errors import Conflict
from cache.l2.sync_clients import connect
from cache.process.redis_server import RedisServer, join_or_start_server
from cache.store.artefacts import ArtefactStore
from precompute.releases import moves, replication
from precompute.releases.replication import UNREACHABLE, confirm_pages, run_ids, wait_for_replicas
from tests.conftest import redis_binary
from tests.integration.release_world import A, B, World, pages_of
from tests.integration.releases.test_restore import Paced
from tests.polling import poll_until


@pytest.fixture
def primary(own_redis, tmp_path, keyspace) -> Iterator[World]:
    with connect(own_redis.url, 5.0) as client:
        client.config_set("repl-diskless-sync-delay", 0)
        yield World(ArtefactStore(str(tmp_path / "artefacts")), client, keyspace)


@pytest.fixture
def replica(own_redis, tmp_path, primary) -> Iterator[RedisServer]:
    with join_or_start_server(tmp_path / "replica", server_binary=redis_binary()) as running:
        port = int(own_redis.url.rsplit(":", 1)[1].split("/")[0])
        with connect(running.url, 5.0) as client:
            client.replicaof("127.0.0.1", port)
        assert poll_until(lambda: primary.client.info("replication").get("slave0", {}).get("state") == "online", 20.0)
        yield running


def report(world):
    return {"run_ids": run_ids(world.client)}


def spoil(world, generation):
    """A page of the right length that is not what was verified."""
    page = min(pages_of(world, generation))
    sound = world.client.get(page)
    world.client.setrange(page, 7, bytes([sound[7] ^ 255]))
    return page, sound


def test_without_replicas_and_with_the_same_primary_nothing_is_read_back(primary, monkeypatch):
    primary.load(B)
    monkeypatch.setattr(replication, "reload", lambda *_arguments, **_options: pytest.fail("read"))
    assert confirm_pages(primary.releases, B, report(primary), timeout_s=1.0) == []


@pytest.mark.parametrize("verified", [None, {}, {"run_ids": {"primary": "another"}}])
def test_pages_are_read_back_when_the_primary_is_not_the_one_that_was_verified(primary, verified):
    primary.load(B)
    page, sound = spoil(primary, B)
    assert confirm_pages(primary.releases, B, verified, timeout_s=1.0) == ["primary"]
    assert primary.client.get(page) == sound


def test_reading_pages_back_is_paced_for_the_readers(primary):
    primary.load(B)
    governor = Paced()

    confirm_pages(primary.releases, B, None, timeout_s=1.0, governor=governor)

    assert governor.paced > 0


def test_a_primary_restarted_between_verify_and_publish_is_noticed(tmp_path, keyspace):
    with ExitStack() as stack:
        first = stack.enter_context(join_or_start_server(tmp_path / "first", server_binary=redis_binary()))
        with connect(first.url, 5.0) as client:
            world = World(ArtefactStore(str(tmp_path / "artefacts")), client, keyspace)
            world.load(A)
            dump_by_key: dict[Any, Any] = {key: client.dump(key) for key in client.keys("*")}
            verified = report(world)
        stack.close()
        second = stack.enter_context(join_or_start_server(tmp_path / "second", server_binary=redis_binary()))
        with connect(second.url, 5.0) as client:
            for key, value in dump_by_key.items():
                client.restore(key, 0, value)
            second_world = World(world.store, client, keyspace)
            page, sound = spoil(second_world, A)
            assert confirm_pages(second_world.releases, A, verified, timeout_s=1.0) == ["primary"]
            assert client.get(page) == sound


def test_replicas_are_known_by_their_run_ids_and_waited_for(primary, replica):
    primary.load(B)
    verified = report(primary)
    assert len(verified["run_ids"]) == 2 and UNREACHABLE not in verified["run_ids"].values()
    assert confirm_pages(primary.releases, B, verified, timeout_s=5.0) == []
    assert wait_for_replicas(primary.client, timeout_s=5.0) == 1
    with connect(replica.url, 5.0) as client:
        replica_keys: Any = client.keys("*:g:*:score:*")
        assert {key.decode() for key in replica_keys} == pages_of(primary, B)


def test_a_replica_that_lags_or_hangs_is_a_conflict_and_nothing_is_published(primary, replica):
    primary.publish(A)
    primary.load(B)
    verified = report(primary)
    with connect(replica.url, 5.0) as client:
        process = int(client.info("server")["process_id"])
    os.kill(process, signal.SIGSTOP)
    try:
        primary.client.set(primary.keys.staging_note, b"written after it stopped")
        with pytest.raises(Conflict, match="0 of 1 Redis replicas"):
            confirm_pages(primary.releases, B, verified, timeout_s=0.3)
    finally:
        os.kill(process, signal.SIGCONT)
    assert primary.live().generation == A
    confirm_pages(primary.releases, B, verified, timeout_s=20.0)
    moves.publish(primary.releases, B, attempt="again")
    assert primary.live().generation == B

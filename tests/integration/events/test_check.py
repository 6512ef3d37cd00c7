"""The line of `larder check` about the Redis of events."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cache.config.events import EventsConfig
from cache.config.serving import ServingConfig
from cache.errors import ConfigError
from infra.cli.check import CHECK_BY_SUBJECT
from precompute.config.settings import NightConfig
from tests.integration.events.durable_redis import DurableRedis, durable_redis


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DurableRedis]:
    with durable_redis(tmp_path_factory.mktemp("durable"), "everysec") as running:
        yield running


def check_events(folder: Path, url: str = "", **events: Any) -> tuple[str, str]:
    config = NightConfig(events_url=url, events=EventsConfig(**events), base=str(folder))
    return CHECK_BY_SUBJECT["events"](config)


def test_without_events_no_redis_is_looked_at(tmp_path: Path) -> None:
    assert check_events(tmp_path)[0] == "not used"


def test_a_fit_one_is_shown_with_its_durability(server: DurableRedis, tmp_path: Path) -> None:
    state, detail = check_events(tmp_path, server.url, enabled=True, durability="everysec")

    assert state == "ok" and "durability everysec" in detail and "noeviction" in detail


def test_less_than_is_demanded_is_to_be_done(server: DurableRedis, tmp_path: Path) -> None:
    state, detail = check_events(tmp_path, server.url, enabled=True, durability="always")

    assert state == "to do" and "appendfsync always" in detail


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru", "volatile-ttl"])
def test_one_that_may_evict_events_or_their_ids_is_to_be_changed(
    server: DurableRedis, tmp_path: Path, policy: str
) -> None:
    with server.client() as client:
        client.config_set("maxmemory-policy", policy)
        try:
            state, detail = check_events(tmp_path, server.url, enabled=True)
        finally:
            client.config_set("maxmemory-policy", "noeviction")

    assert state == "to do" and policy in detail and "set noeviction" in detail


def test_one_that_is_shared_with_pages_may_evict_ids_and_says_so(server: DurableRedis, tmp_path: Path) -> None:
    config = NightConfig(redis_url=server.url, events=EventsConfig(enabled=True), base=str(tmp_path))
    with server.client() as client:
        client.config_set("maxmemory-policy", "volatile-lru")
        try:
            state, detail = CHECK_BY_SUBJECT["events"](config)
        finally:
            client.config_set("maxmemory-policy", "noeviction")

    assert state == "ok" and "a repeated event may count twice" in detail


def test_one_that_is_away_is_named_without_its_password(tmp_path: Path) -> None:
    state, detail = check_events(tmp_path, "redis://:secret@127.0.0.1:1/0", enabled=True)

    assert state == "to do" and "127.0.0.1:1" in detail and "secret" not in detail


@pytest.mark.parametrize("kind", [NightConfig, ServingConfig])
def test_events_do_not_lie_in_a_cluster(kind: Any) -> None:
    with pytest.raises(ConfigError, match="LARDER_EVENTS_URL"):
        kind(redis_url="redis+cluster://127.0.0.1:1", events=EventsConfig(enabled=True))

    kind(redis_url="redis+cluster://127.0.0.1:1", events_url="redis://127.0.0.1:1", events=EventsConfig(enabled=True))


def test_one_whose_disk_is_full_is_named_with_its_remedy(server: DurableRedis, tmp_path: Path) -> None:
    with server.full_disk():
        state, detail = check_events(tmp_path, server.url, enabled=True, durability="everysec")

    assert state == "to do" and "MISCONF" in detail and "its disk is full or fails; make room there" in detail
    assert check_events(tmp_path, server.url, enabled=True, durability="everysec")[0] == "ok"


@pytest.mark.parametrize(
    ("refuses", "accepts", "remedy"),
    [
        (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE"), "point LARDER_EVENTS_URL at its primary"),
        (
            ("CONFIG", "SET", "min-replicas-to-write", "1"), ("CONFIG", "SET", "min-replicas-to-write", "0"),
            "lower min-replicas-to-write",
        ),
    ],
    ids=["a replica", "too few replicas"],
)  # fmt: skip
def test_one_that_answers_and_refuses_to_write_is_named_with_its_remedy(
    server: DurableRedis, tmp_path: Path, refuses: tuple[str, ...], accepts: tuple[str, ...], remedy: str
) -> None:
    with server.client() as client:
        client.execute_command(*refuses)
        try:
            state, detail = check_events(tmp_path, server.url, enabled=True)
        finally:
            client.execute_command(*accepts)

    assert state == "to do" and "answers, but refuses to write" in detail and remedy in detail


def test_one_at_its_maxmemory_is_full(server: DurableRedis, tmp_path: Path) -> None:
    with server.client() as client:
        client.config_set("maxmemory", "1")
        try:
            state, detail = check_events(tmp_path, server.url, enabled=True)
        finally:
            client.config_set("maxmemory", "0")

    assert state == "to do" and "is refused with 429" in detail
    assert "at its maxmemory" in detail and "larder night" in detail


def test_one_whose_stream_has_all_that_it_may_is_full(server: DurableRedis, tmp_path: Path) -> None:
    keys = NightConfig().keyspace()
    with server.client() as client:
        client.xadd(keys.events, {"e": b"x" * (1 << 20)})
        try:
            state, detail = check_events(tmp_path, server.url, enabled=True, stream_bytes=1 << 20)
        finally:
            client.delete(keys.events)

    assert state == "to do" and "[events] stream_bytes is 1,048,576" in detail and "larder night" in detail

"""What `larder check` says of a server: its kind, its version, what is missing."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from cache.process.redis_server import RedisServer
from infra.cli import check
from infra.cli.check import CHECK_BY_SUBJECT, LACK_EFFECT_BY_COMMAND, NEEDED_COMMANDS, inspect_redis
from precompute.config.settings import NightConfig
from tests.integration.events.durable_redis import DurableRedis
from tests.integration.program import ROOT

CONNECTING = {"asking", "auth", "client", "cluster", "command", "exec", "hello", "multi"}
"""Of connections, transactions and clusters, which every server has that lets a client in, or is not asked for."""
OF_THE_RUNBOOK = {"latency", "slowlog"}


@contextmanager
def lacking(folder: Path, *commands: str) -> Iterator[redis.Redis]:
    """A server without some commands."""
    folder.mkdir()
    (folder / "conf").write_text("".join(f'rename-command {command} ""\n' for command in commands))
    server = DurableRedis(folder / "data", appendonly="no", include=str(folder / "conf"))
    server.start()
    try:
        with server.client() as client:
            yield client
    finally:
        server.stop()


def test_a_server_that_has_all_is_named_with_its_version(redis_server: RedisServer) -> None:
    with redis.Redis.from_url(redis_server.url, protocol=2) as client:
        server_kind = inspect_redis(client)

    assert server_kind.product_name in ("Redis", "Valkey") and re.fullmatch(
        r"\d+\.\d+\.\d+", server_kind.product_version
    )
    assert (server_kind.missing_requirements, server_kind.absent_optional_commands) == ((), ())
    state, check_message = CHECK_BY_SUBJECT["redis"](NightConfig(redis_url=redis_server.url))
    assert state == "ok" and check_message.endswith(f"; {server_kind}")


def test_the_check_asks_for_missing_commands_and_names_those_that_larder_does_without(tmp_path: Path) -> None:
    with lacking(tmp_path / "eval", "EVAL", "XAUTOCLAIM") as client:
        server_kind = inspect_redis(client)
        port = client.connection_pool.connection_kwargs["port"]
        state, check_message = CHECK_BY_SUBJECT["redis"](NightConfig(redis_url=f"redis://127.0.0.1:{port}"))
    with lacking(tmp_path / "config", "CONFIG") as client:
        without = inspect_redis(client)

    assert server_kind.missing_requirements[0].startswith("scripts with flags")
    assert set(server_kind.missing_requirements[1:]) == {"EVAL", "XAUTOCLAIM"}
    assert state == "to do" and str(server_kind) in check_message and "no XAUTOCLAIM" in check_message
    assert without.missing_requirements == () and without.absent_optional_commands[0].startswith("CONFIG (")


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (("REPLICAOF", "127.0.0.1", "1"), "only replica"),
        (("CONFIG", "SET", "min-replicas-to-write", "1"), "NOREPLICAS"),
    ],
)
def test_a_server_that_refuses_writes_is_not_taken_for_an_old_one(
    tmp_path: Path, command: tuple[str, ...], text: str
) -> None:
    with lacking(tmp_path / "none") as client:
        client.execute_command(*command)
        port = client.connection_pool.connection_kwargs["port"]
        state, check_message = CHECK_BY_SUBJECT["redis"](NightConfig(redis_url=f"redis://127.0.0.1:{port}"))

    assert state == "to do" and text in check_message and "scripts with flags" not in check_message


@pytest.mark.parametrize(
    ("server_info", "expected"),
    [
        ({"redis_version": "6.2.14", "executable": "/usr/bin/redis-server"}, "Redis 6.2.14"),
        ({"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "8.0.1"}, "Valkey 8.0.1"),
        ({"redis_version": "6.3.4", "executable": "/opt/keydb-server"}, "KeyDB 6.3.4"),
        ({"redis_version": "7.4.0", "dragonfly_version": "df-v1.25.0"}, "Dragonfly 1.25.0"),
        ({}, "Redis"),
    ],
)  # fmt: skip
def test_servers_that_call_themselves_redis_are_distinguished(server_info: dict[str, Any], expected: str) -> None:
    name, version = check._product_and_version(server_info)

    assert f"{name} {version}".strip() == expected


def test_the_commands_looked_for_are_those_that_the_users_may_send() -> None:
    text = (ROOT / "infra/redis.conf").read_text() + (ROOT / "infra/redis-events.conf").read_text()
    rules = [line for line in text.splitlines() if line.startswith("user larder-")]
    granted = {
        granted_command.partition("|")[0]
        for line in rules
        for granted_command in re.findall(r"\+([a-z]+(?:\|[a-z]+)?)", line)
    }

    # If a user may read settings, `waitaof` is not needed.
    assert granted - CONNECTING - OF_THE_RUNBOOK == {*NEEDED_COMMANDS, *LACK_EFFECT_BY_COMMAND} - {"waitaof"}

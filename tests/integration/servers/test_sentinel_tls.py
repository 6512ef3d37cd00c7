"""Sentinels with a password, and TLS to them and to the primary, for night and service."""

import socket
from pathlib import Path

import pytest
import redis

from cache.errors import TierUnavailable
from cache.format.redis_keys import Keyspace
from cache.l2.sync_clients import clone_client, open_client
from cache.l2.tier import RemoteConfig, RemoteTier
from cache.process.child_process import GuardedCommand
from precompute.gates.judge import GateConnectionPool, GateConnections
from tests.certificates import self_signed
from tests.conftest import redis_binary
from tests.polling import poll_until


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def can_ask(url: str) -> bool:
    client = open_client(url, protocol=2, socket_timeout=5.0)
    try:
        return bool(client.ping())
    except redis.exceptions.RedisError:
        return False
    finally:
        client.close()


async def test_server_and_sentinel_are_reached_over_tls_with_their_own_passwords(tmp_path: Path) -> None:
    tls = self_signed(tmp_path)
    lines = "".join(f"{name} {value}\n" for name, value in tls.items())
    server, sentinel = free_port(), free_port()
    watch = f"sentinel monitor pages 127.0.0.1 {server} 1\nsentinel auth-pass pages pages\n"
    for name, text in (
        ("server", f"tls-port {server}\nrequirepass pages\n"),
        ("sentinel", f"tls-port {sentinel}\ntls-replication yes\nrequirepass watches\n{watch}"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "conf").write_text(f"port 0\ndir {tmp_path / name}\n{lines}{text}")
    options = f"ssl_ca_certs={tls['tls-ca-cert-file']}"
    url = f"rediss+sentinel://:pages@127.0.0.1:{sentinel}/pages?{options}&sentinel_password=watches"
    wrong = url.replace("password=watches", "password=wrong")
    with (
        GuardedCommand([redis_binary(), tmp_path / "server/conf"], log_path=tmp_path / "server/log") as first,
        GuardedCommand(
            [redis_binary(), tmp_path / "sentinel/conf", "--sentinel"], log_path=tmp_path / "sentinel/log"
        ) as second,
    ):
        if not poll_until(lambda: can_ask(url), 10) and "tls" in first.log_tail() + second.log_tail():
            pytest.skip(f"this server was built without TLS: {first.log_tail(3)}")
        assert can_ask(url), second.log_tail()
        assert not can_ask(wrong)

        client = open_client(url, protocol=2)
        leash = GateConnections()
        gate = clone_client(client, lambda **settings: GateConnectionPool(leash, **settings))
        gate.set("larder:1:{x}:live", b"{}")
        tier = RemoteTier(RemoteConfig(url, control_timeout_s=5.0), Keyspace("x"))
        assert await tier.control.watch() == (b"{}", None)
        await tier.aclose()
        leash.end()
        with pytest.raises(redis.exceptions.ConnectionError, match="time is over"):
            gate.ping()
        client.close()
        refused = RemoteTier(RemoteConfig(wrong), Keyspace("x"))
        with pytest.raises(TierUnavailable):
            await refused.control.watch()
        await refused.aclose()

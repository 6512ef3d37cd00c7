"""A primary and a replica under three sentinels, with the users of the documents, as real processes on loopback."""

import hashlib
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cache.process.child_process import GuardedCommand
from tests.conftest import redis_binary
from tests.integration.program import ROOT
from tests.polling import poll_until

SERVICE = "mymaster"
DOWN_AFTER_MS = 500
PAGE = ROOT / "docs/how-to/use-redis-sentinel.md"
PASSWORDS = {"READER": "reads", "LOADER": "loads", "SENTINEL": "watches", "REPLICA": "copies"}


def settings(namespace: str) -> str:
    """Return `infra/redis.conf` with the lines that the documents add, for this namespace."""
    text = (ROOT / "infra/redis.conf").read_text()
    text += "\n".join(re.findall(r"^(?:user|masteruser|masterauth) .+$", PAGE.read_text(), re.MULTILINE))
    for name, password in PASSWORDS.items():
        digest = hashlib.sha256(password.encode()).hexdigest()
        text = text.replace(f"{name}_PASSWORD_SHA256", digest).replace(f"{name}_PASSWORD", password)
    return text.replace("{default}", f"{{{namespace}}}").replace(":default:", f":{namespace}:") + "\n"


class WatchedServer:
    """A server or a sentinel whose port and folder outlive its process."""

    def __init__(self, folder: Path, text: str, *more: str) -> None:
        folder.mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._folder, self._more = folder, more
        (folder / "conf").write_text(f"{text}port {self.port}\ndir {folder}\n")
        self._process: GuardedCommand | None = None

    def client(self) -> redis.Redis:
        """Return a client with the sentinels' rights."""
        is_server = not self._more or self._more[0] != "--sentinel"
        user: dict[str, Any] = {"username": "sentinel", "password": PASSWORDS["SENTINEL"]} if is_server else {}
        return redis.Redis(port=self.port, protocol=2, socket_timeout=5.0, retry=Retry(NoBackoff(), 0), **user)

    def has_replica(self) -> bool:
        """Return whether the server is a primary with an up-to-date replica."""
        with self.client() as client:
            replication_info: dict[str, Any] = client.info("replication")
        first = replication_info.get("slave0")
        return isinstance(first, dict) and first["state"] == "online"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        command: list[str | Path] = [redis_binary(), self._folder / "conf", *self._more]
        self._process = GuardedCommand(command, log_path=self._folder / "log")
        assert poll_until(self._answers), self._process.log_tail()

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        with self.client() as client:
            pid = int(client.info("server")["process_id"])
        os.kill(pid, signal.SIGKILL)
        assert poll_until(lambda: not self._answers())
        self.stop()

    def stop(self) -> None:
        """End the server if it runs."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except (redis.exceptions.ConnectionError, redis.exceptions.BusyLoadingError):
            return False


class WatchedPair:
    """The two servers and their sentinels."""

    def __init__(self, servers: list[WatchedServer], sentinels: list[WatchedServer]) -> None:
        self.servers, self.sentinels = servers, sentinels

    def url(self, user: str) -> str:
        """The URL as a deployment would write it."""
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        password = PASSWORDS[user.rpartition("-")[2].upper()]
        return f"redis+sentinel://{user}:{password}@{hosts}/{SERVICE}"

    def primary(self) -> WatchedServer:
        """The server that the sentinels name."""
        with self.sentinels[-1].client() as client:
            _, port = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return next(server for server in self.servers if server.port == int(port))

    def is_whole(self) -> bool:
        """Return whether the replica is up to date, and the sentinels know it and each other."""
        return self.primary().has_replica() and all(map(self._knows_all, self.sentinels))

    def _knows_all(self, sentinel: WatchedServer) -> bool:
        with sentinel.client() as client:
            master_info = client.sentinel_masters()[SERVICE]
        return (master_info["num-slaves"], master_info["num-other-sentinels"]) == (1, len(self.sentinels) - 1)


@contextmanager
def watched_pair(folder: Path, namespace: str) -> Iterator[WatchedPair]:
    """Start all, wait until they replicate and know one another, stop them at the end."""
    text = settings(namespace)
    first = WatchedServer(folder / "a", text)
    second = WatchedServer(folder / "b", text + f"replicaof 127.0.0.1 {first.port}\n")
    watch = (
        f"sentinel monitor {SERVICE} 127.0.0.1 {first.port} 2\n"
        f"sentinel auth-user {SERVICE} sentinel\nsentinel auth-pass {SERVICE} {PASSWORDS['SENTINEL']}\n"
        f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}\n"
        f"sentinel failover-timeout {SERVICE} 5000\nbind 127.0.0.1\n"
    )
    watchers = [WatchedServer(folder / f"sentinel-{n}", watch, "--sentinel") for n in range(3)]
    pair = WatchedPair([first, second], watchers)
    try:
        for server in pair.servers:
            server.start()
        # A sentinel asks a primary for its replicas at its start, and then every ten seconds.
        assert poll_until(first.has_replica)
        for sentinel in pair.sentinels:
            sentinel.start()
        assert poll_until(pair.is_whole)
        yield pair
    finally:
        for node in (*pair.sentinels, *pair.servers):
            node.stop()

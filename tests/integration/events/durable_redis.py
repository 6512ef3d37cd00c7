"""A Redis with an append-only file, which a test kills and restarts over the same folder."""

import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cache.format.redis_keys import Keyspace
from cache.process.child_process import GuardedCommand
from tests.conftest import redis_binary


class DurableRedis:
    """One server on one port; `fsync` is its `appendfsync`, `more` further settings."""

    def __init__(self, folder: Path, fsync: str = "always", **more: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.kills = 0
        self._folder = folder
        self._settings = {"appendonly": "yes", "appendfsync": fsync, "save": "", **more}
        self._process: GuardedCommand | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """Start the server over the existing folder."""
        # A write beyond the file size limit must fail, as on a full disk; by default the signal SIGXFSZ ends the
        # process.
        command = [
            "sh",
            "-c",
            'trap "" XFSZ; exec "$0" "$@"',
            str(redis_binary()),
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
        ]
        command += ["--dir", str(self._folder.resolve())]
        for name, value in self._settings.items():
            command += [f"--{name}", value]
        self._process = GuardedCommand(command, log_path=self._folder / "log")
        give_up = time.monotonic() + 20
        while time.monotonic() < give_up:
            with contextlib.suppress(redis.RedisError), self.client() as client:
                client.ping()
                return
            time.sleep(0.01)
        raise AssertionError(self._process.log_tail())

    @property
    def pid(self) -> int:
        """Process id of the server itself."""
        with self.client() as client:
            return int(client.info("server")["process_id"])

    @contextlib.contextmanager
    def full_disk(self) -> Iterator[None]:
        """Within the block the server cannot write to its disk, and knows it."""
        pid = self.pid
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        try:
            with self.client() as client:
                with contextlib.suppress(redis.ResponseError):
                    client.set("larder:test:full", "x")
                _wait_for(client, "aof_last_write_status", "err")
            yield
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            with self.client() as client:
                _wait_for(client, "aof_last_write_status", "ok")

    def kill(self) -> None:
        """End the server with SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)
        self.kills += 1
        self.stop()

    def stop(self) -> None:
        """Stop the server and wait for its end."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def client(self) -> Any:
        """Return a plain client."""
        return redis.Redis(port=self.port, protocol=2, socket_timeout=5, retry=Retry(NoBackoff(), 0))


def _wait_for(client: Any, field: str, value: str) -> None:
    give_up = time.monotonic() + 20
    while client.info("persistence")[field] != value:
        assert time.monotonic() < give_up, f"{field} is not {value}"
        time.sleep(0.01)


@contextlib.contextmanager
def durable_redis(folder: Path, fsync: str = "always", **more: str) -> Iterator[DurableRedis]:
    """Run a server, and stop it at the end."""
    server = DurableRedis(folder, fsync, **more)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def stream_of(client: Any, keyspace: Keyspace) -> list[dict[str, Any]]:
    """Return all accepted events in the order of the stream."""
    return [orjson.loads(fields[b"e"]) for _, fields in client.xrange(keyspace.events)]

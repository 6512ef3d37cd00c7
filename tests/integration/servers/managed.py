"""A Redis as managed services offer it: only TLS, no CONFIG, users without that right; and a log of all commands."""

import hashlib
import re
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from cache.process.child_process import GuardedCommand
from tests.certificates import self_signed
from tests.conftest import redis_binary
from tests.integration.program import ROOT
from tests.polling import poll_until

ADMIN = "user admin on >administers ~* &* +@all"
_QUOTED_ARGUMENT = re.compile(rb'"((?:[^"\\]|\\.)*)"')


class ManagedServer:
    """A server with the users of `infra/redis.conf` that need no CONFIG, and an administrator."""

    def __init__(self, folder: Path, namespace: str, tls: Mapping[str, str]) -> None:
        folder.mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._trusted = tls["tls-ca-cert-file"]
        text = (ROOT / "infra/redis.conf").read_text()
        text = text.replace(" +config|get", "").replace(" (+config|get)", "")
        for name, password in (("READER", "reads"), ("LOADER", "loads")):
            digest = hashlib.sha256(password.encode()).hexdigest()
            text = text.replace(f"{name}_PASSWORD_SHA256", digest)
        text = text.replace("{default}", f"{{{namespace}}}").replace(":default:", f":{namespace}:")
        text += f'\n{ADMIN}\nport 0\ntls-port {self.port}\ndir {folder}\nrename-command CONFIG ""\n'
        text += "".join(f"{name} {value}\n" for name, value in tls.items())
        (folder / "redis.conf").write_text(text)
        self.process = GuardedCommand([redis_binary(), folder / "redis.conf"], log_path=folder / "log")

    def url(self, user: str, password: str) -> str:
        """The server's URL as a deployment would write it."""
        where = f"127.0.0.1:{self.port}/0?ssl_ca_certs={self._trusted}"
        return f"rediss://{user}:{password}@{where}"

    def client(self) -> redis.Redis:
        """Return a client with all rights."""
        return redis.Redis.from_url(self.url("admin", "administers"), protocol=2, socket_timeout=None)

    def answers(self) -> bool:
        """Return whether the server answers."""
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.exceptions.ConnectionError:
            return False


@contextmanager
def managed_server(folder: Path, namespace: str) -> Iterator[ManagedServer]:
    """Run such a server."""
    folder.mkdir(parents=True)
    server = ManagedServer(folder / "server", namespace, self_signed(folder))
    try:
        assert poll_until(lambda: server.answers() or not server.process.is_running), server.process.log_tail()
        if not server.answers() and "tls" in server.process.log_tail():
            pytest.skip(f"this server was built without TLS: {server.process.log_tail(3)}")
        assert server.answers(), server.process.log_tail()
        yield server
    finally:
        server.process.stop()


class CommandLog:
    """All commands that the server and its scripts received during the block (MONITOR)."""

    def __init__(self, server: ManagedServer) -> None:
        self._client = server.client()
        self._marker_client = server.client()
        self._connection: Any = self._client.connection_pool.get_connection()
        self._connection.send_command("MONITOR")
        assert self._connection.read_response() == b"OK"
        self.lines: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while (line := self._connection.read_response()) and b'"END OF THE LOG"' not in line:
            self.lines.append(line)

    def close(self) -> None:
        """Wait until the log has all commands sent before."""
        with self._marker_client as client:
            client.echo("END OF THE LOG")
            self._reader.join(30)
        self._connection.disconnect()
        self._client.close()

    def scripts(self) -> list[tuple[set[bytes], list[list[bytes]]]]:
        """Return the keys that each script call declared and the commands that it sent."""
        script_calls: list[tuple[set[bytes], list[list[bytes]]]] = []
        for line in self.lines:
            sender, command = (
                line.partition(b"] ")[0],
                [word_match[1] for word_match in _QUOTED_ARGUMENT.finditer(line)],
            )
            if sender.endswith(b" lua"):
                script_calls[-1][1].append(command)
            elif command and command[0].upper() in (b"EVAL", b"EVALSHA"):
                script_calls.append((set(command[3 : 3 + int(command[2])]), []))
        return script_calls


@contextmanager
def logged(server: ManagedServer) -> Iterator[CommandLog]:
    """Log the server's commands during the block."""
    log = CommandLog(server)
    try:
        yield log
    finally:
        log.close()


def keys_of(client: redis.Redis, command: Sequence[bytes]) -> set[bytes]:
    """Return the keys of a command, by the server's own rule."""
    try:
        keys: Any = client.execute_command("COMMAND GETKEYS", *command)
    except redis.exceptions.ResponseError:  # it has none
        return set()
    return {key.encode() if isinstance(key, str) else key for key in keys}

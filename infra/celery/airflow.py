"""Airflow with CeleryExecutor on this machine: a broker, a temporary PostgreSQL server, and one worker per queue."""

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

DEBIAN_POSTGRES_FOLDER = Path("/usr/lib/postgresql")


POSTGRES_USER = "postgres"
"""System user that runs PostgreSQL if this process is root: PostgreSQL refuses root. Debian's package creates it."""


_FOLDER_PREFIX = "larder-postgres-"


_INSTALL_REMEDY = "on Debian `apt-get install postgresql`, on macOS `brew install postgresql`"


_POSTGRES_START_S_MAX = 60.0


# The database holds metadata of runs that end with this command, so it need not survive a crash of the machine.
_POSTGRES_SETTINGS = ("listen_addresses=", "fsync=off", "synchronous_commit=off", "full_page_writes=off")


def find_postgres(environ: Mapping[str, str] = os.environ, debian_folder: Path = DEBIAN_POSTGRES_FOLDER) -> Path:
    """Return the folder with `initdb` and `postgres`: from PATH, else Debian's newest; raise ConfigError if none."""
    bin_folders = [Path(path_entry) for path_entry in environ.get("PATH", "").split(os.pathsep) if path_entry]
    debian_bin_folders = [
        bin_folder for bin_folder in debian_folder.glob("*/bin") if bin_folder.parent.name.isdecimal()
    ]
    bin_folders += sorted(debian_bin_folders, key=lambda bin_folder: int(bin_folder.parent.name), reverse=True)
    for candidate_folder in bin_folders:
        if all((candidate_folder / program_name).is_file() for program_name in ("initdb", "postgres")):
            return candidate_folder
    raise ConfigError(
        f"no PostgreSQL server (initdb and postgres) on PATH or in {debian_folder}/*/bin: {_INSTALL_REMEDY}"
    )


def postgres_account(user_id: int, system_user: str = POSTGRES_USER) -> pwd.struct_passwd:
    """Return the account for the server: that of `user_id`, or `system_user` for root; raise ConfigError if missing."""
    if user_id != 0:
        return pwd.getpwuid(user_id)
    try:
        return pwd.getpwnam(system_user)
    except KeyError:
        raise ConfigError(
            f"PostgreSQL does not run as root and there is no system user {system_user!r}: "
            f"{_INSTALL_REMEDY}, or `useradd --system {system_user}`"
        ) from None


@contextmanager
def run_postgres(state_folder: Path) -> Iterator[str]:
    """Yield the SQLAlchemy URL of an empty database that is removed when the block ends; its log is in `state_folder`.

    Only one process at a time may use a `state_folder`. Raises ConfigError if the server cannot be started.
    """
    programs_folder, account = find_postgres(), postgres_account(os.geteuid())
    folder_link, log_path = state_folder / "postgres", state_folder / "postgres.log"
    _remove_linked_folder(folder_link)
    log_path.unlink(missing_ok=True)
    # Not under `state_folder`: the server's account may lack access to it, and a socket's path has at most 107 bytes.
    postgres_folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
    folder_link.symlink_to(postgres_folder)
    try:
        owner_prefix = _command_prefix_as(account)
        if owner_prefix:
            os.chown(postgres_folder, account.pw_uid, account.pw_gid)
        data_folder = postgres_folder / "data"
        initdb_command = [*owner_prefix, programs_folder / "initdb", "-D", data_folder, "-U", "airflow", "--auth=trust"]
        initdb_command += ["--encoding=UTF8", "--no-locale", "--no-sync"]
        with GuardedCommand(initdb_command, log_path=log_path, cwd=postgres_folder) as initdb_process:
            _wait(initdb_process, lambda: not initdb_process.is_running)
            if initdb_process.returncode != 0:
                raise ConfigError(f"initdb failed: {initdb_process.log_tail(5)}")
        server_command = [*owner_prefix, programs_folder / "postgres", "-D", data_folder, "-k", postgres_folder]
        for setting in _POSTGRES_SETTINGS:
            server_command += ["-c", setting]
        with GuardedCommand(server_command, log_path=log_path, cwd=postgres_folder) as server_process:
            _wait(server_process, lambda: "ready to accept connections" in server_process.log_tail())
            yield f"postgresql+psycopg2://airflow@/postgres?host={postgres_folder}"
    finally:
        _remove_linked_folder(folder_link)


def _command_prefix_as(account: pwd.struct_passwd) -> list[str | Path]:
    """Return the command prefix that switches to `account`; empty if this process already runs as it."""
    if account.pw_uid == os.geteuid():
        return []
    return ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--init-groups"]


def _remove_linked_folder(folder_link: Path) -> None:
    """Remove the link `folder_link` and its target folder, which a killed command may have left."""
    if not folder_link.is_symlink():
        return
    folder = folder_link.readlink()
    if folder.name.startswith(_FOLDER_PREFIX):
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
    folder_link.unlink()


def _wait(process: GuardedCommand, condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + _POSTGRES_START_S_MAX
    while not condition():
        if not process.is_running or time.monotonic() > give_up_at:
            raise ConfigError(f"{Path(process.command[0]).name} of PostgreSQL failed: {process.log_tail(5)}")
        time.sleep(0.02)


WORKER_START_S_MAX = 120.0


class CeleryWorkers:
    """One Celery worker per queue of a running Airflow; the workers stop when the `with` block ends."""

    def __init__(self, airflow: LocalAirflow, tasks_at_once_by_queue: Mapping[str, int]) -> None:
        """Take the queues, with the number of tasks that the worker of each runs at a time."""
        self._airflow = airflow
        self._concurrency_by_queue = dict(tasks_at_once_by_queue)
        self._worker_by_queue: dict[str, GuardedCommand] = {}
        self._start_count = 0

    def __enter__(self) -> Self:
        try:
            self._start(*self._concurrency_by_queue)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def worker_session_id(self, queue_name: str) -> int:
        """Return the session id of a queue's worker, which its tasks' processes share."""
        return self._worker_by_queue[queue_name].pid

    def worker_log(self, queue_name: str) -> str:
        """Return the log of a queue's worker since its last start."""
        return self._worker_by_queue[queue_name].log_path.read_text("utf-8", "replace")

    def restart_dead_workers(self) -> dict[str, int | None]:
        """Restart dead workers and wait until they listen; return the exit code by queue.

        Airflow retries the tasks of a dead worker when their heartbeat times out. Raises AirflowFailed if a new worker
        dies, or does not listen within WORKER_START_S_MAX.
        """
        dead_workers = {
            queue_name: worker for queue_name, worker in self._worker_by_queue.items() if not worker.is_running
        }
        for worker in dead_workers.values():
            worker.stop()
        self._start(*dead_workers)
        return {queue_name: worker.returncode for queue_name, worker in dead_workers.items()}

    def _start(self, *queues: str) -> None:
        for queue in queues:
            self._start_count += 1
            self._worker_by_queue[queue] = self._airflow.start(
                f"worker-{queue}-{self._start_count}",
                *("celery", "worker", "--queues", queue, "--celery-hostname", queue),
                *("--concurrency", str(self._concurrency_by_queue[queue]), "--skip-serve-logs"),
            )
        give_up_at = time.monotonic() + WORKER_START_S_MAX
        while waiting_queues := [
            queue_name for queue_name in queues if f"celery@{queue_name} ready" not in self.worker_log(queue_name)
        ]:
            worker = self._worker_by_queue[waiting_queues[0]]
            if not worker.is_running or time.monotonic() > give_up_at:
                raise AirflowFailed(f"the worker of the queue {waiting_queues[0]} does not listen\n{worker.log_tail()}")
            time.sleep(0.1)

    def _stop(self) -> None:
        for worker in self._worker_by_queue.values():
            worker.close_pipe_end()  # lets all workers shut down at the same time
        for worker in self._worker_by_queue.values():
            worker.stop()


CONCURRENCY_BY_QUEUE: Mapping[str, int] = {"default": 2, "gpu": 2}
"""Queue -> number of tasks that its worker runs at a time; the pool `gpu` has as many slots as the queue."""


HEARTBEAT_SETTINGS: Mapping[str, str] = {
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "30",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
}
"""Seconds without a task's heartbeat until Airflow retries the task, and between Airflow's checks for such tasks."""


_PACKAGES = ("apache-airflow", "apache-airflow-providers-celery", "celery", "psycopg2-binary")


@dataclass(frozen=True, slots=True)
class CeleryAirflow:
    """A running Airflow and the Celery workers of its queues."""

    airflow: LocalAirflow
    workers: CeleryWorkers


@contextmanager
def celery_airflow(state_folder: Path, *, task_environment: Mapping[str, str]) -> Iterator[CeleryAirflow]:
    """Run broker, database, Airflow and workers until the block ends; `task_environment` overrides this process's.

    Raises ConfigError if a program or package is missing, AirflowFailed if a program does not start.
    """
    check_installed()
    state_folder = state_folder.resolve()
    celery_folder = state_folder / "celery"
    celery_folder.mkdir(parents=True, exist_ok=True)
    lock_error = AirflowFailed(f"another command already runs Airflow in {state_folder}")
    with (
        hold_lock(state_folder / "celery.lock", lock_error),
        join_or_start_server(celery_folder / "broker") as broker,
        run_postgres(celery_folder) as database_url,
        LocalAirflow(
            state_folder,
            task_environment={**celery_settings(broker.url, database_url), **task_environment},
            slots_by_pool={"gpu": CONCURRENCY_BY_QUEUE["gpu"]},
            parallelism=sum(CONCURRENCY_BY_QUEUE.values()),
        ) as airflow,
        CeleryWorkers(airflow, CONCURRENCY_BY_QUEUE) as workers,
    ):
        yield CeleryAirflow(airflow, workers)


def check_installed() -> None:
    """Raise ConfigError, naming the packages to install, if Airflow, Celery, the broker or PostgreSQL is missing."""
    # Distributions are looked up by name, because importing Airflow writes to the home folder.
    missing_packages = [package_name for package_name in _PACKAGES if not any(distributions(name=package_name))]
    if missing_packages:
        raise ConfigError(
            f"{', '.join(missing_packages)} is not installed: `make env`, or {install_command('airflow')}"
        )
    find_server()
    find_postgres()


def celery_settings(broker_url: str, database_url: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return CeleryExecutor settings to add to LocalAirflow's; `environ` takes precedence over HEARTBEAT_SETTINGS."""
    return {
        "AIRFLOW__CORE__EXECUTOR": "CeleryExecutor",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": database_url,
        "AIRFLOW__CELERY__BROKER_URL": broker_url,
        "AIRFLOW__CELERY__RESULT_BACKEND": f"db+{database_url}",
        "AIRFLOW__CELERY__SYNC_PARALLELISM": "1",
        "LARDER_SCORE_QUEUE": "gpu",
        **{setting_name: environ.get(setting_name) or value for setting_name, value in HEARTBEAT_SETTINGS.items()},
    }


def absolute_folders(environ: Mapping[str, str]) -> dict[str, str]:
    """Return LARDER_ARTIFACTS and LARDER_STATE with absolute paths, so that they hold in any working folder."""
    return {
        variable_name: folder_path if "://" in folder_path else str(Path(folder_path).absolute())
        for variable_name in ("LARDER_ARTIFACTS", "LARDER_STATE")
        if (folder_path := environ.get(variable_name))
    }

"""Airflow on this machine: its processes with SQLite, a client of its REST API, and a lock on its folder."""

import fcntl
import json
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import httpx

from cache.process.child_process import GuardedCommand

ROOT = Path(__file__).parents[2]
DAGS_FOLDER = ROOT / "dags"

MANUAL_SCHEDULE = "0 0 29 2 *"
"""Schedule (29 February) for nights that are only triggered: the clock starts none, not even an overdue one."""

NEW_RUN_S_MAX = 60.0
TERMINAL_STATES = frozenset({"success", "failed"})


class AirflowFailed(RuntimeError):
    """Airflow did not start, or a run did not end as expected; the message has the end of the log."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """Try of a task; `map_index` is -1 for unmapped tasks; the task's process titles contain `instance_id`."""

    task_id: str
    map_index: int
    state: str
    duration_s: float
    try_number: int
    instance_id: str


@dataclass(frozen=True, slots=True)
class RunReport:
    """DAG run with its task instances, in the order of their starts."""

    dag_id: str
    run_id: str
    run_type: str
    state: str
    duration_s: float
    tasks: tuple[TaskReport, ...]


class LocalAirflow:
    """Airflow processes that end with the `with` block, and a client of their REST API; files: `state_folder`/airflow.

    Methods raise AirflowFailed if the API answers with an error.
    """

    def __init__(
        self,
        state_folder: Path,
        *,
        task_environment: Mapping[str, str],
        slots_by_pool: Mapping[str, int],
        parallelism: int = 4,
    ) -> None:
        """Prepare the environment of Airflow and its tasks: this process's, overridden by `task_environment`."""
        self.home = state_folder.resolve() / "airflow"
        self.url = f"http://127.0.0.1:{_free_port()}"
        self._http = httpx.Client(base_url=self.url, timeout=30.0)
        self._slot_count_by_pool = slots_by_pool
        self._environment = {
            **os.environ,
            **local_airflow_settings(self.home, self.url, parallelism),
            **task_environment,
        }
        self._exit_stack = ExitStack()
        self._processes: tuple[GuardedCommand, ...] = ()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._exit_stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.close_pipe_end()  # all shut down at the same time; the stack then waits for each
        self._exit_stack.close()

    def start(self, program_name: str, *arguments: str) -> GuardedCommand:
        """Start another Airflow program in the same environment; the caller must stop it before the block ends."""
        return GuardedCommand(
            [sys.executable, "-m", "airflow", *arguments],
            log_path=self.home / "processes" / f"{program_name}.log",
            env=self._environment,
            cwd=self.home,
        )

    def log_in(self) -> bool:
        """Fetch a token and return True; return False if the server does not answer yet."""
        with suppress(httpx.TransportError):
            token = self._call("GET", "/auth/token")["access_token"]
            self._http.headers["Authorization"] = f"Bearer {token}"
        return "Authorization" in self._http.headers

    def is_ready(self, dag_count: int) -> bool:
        """Return True if scheduler and DAG processor are healthy and at least `dag_count` DAGs are parsed.

        Raises AirflowFailed if a DAG file cannot be imported.
        """
        health = self._call("GET", "/api/v2/monitor/health")
        if any(health[component_name]["status"] != "healthy" for component_name in ("scheduler", "dag_processor")):
            return False
        import_errors = self._call("GET", "/api/v2/importErrors")["import_errors"]
        if import_errors:
            raise AirflowFailed(f"{import_errors[0]['filename']}: {import_errors[0]['stack_trace']}")
        return int(self._call("GET", "/api/v2/dags")["total_entries"]) >= dag_count

    def add_pool(self, pool_name: str, slot_count: int) -> None:
        """Create a pool, of whose tasks at most `slot_count` run at a time."""
        self._call("POST", "/api/v2/pools", {"name": pool_name, "slots": slot_count})

    def trigger(self, dag_id: str, run_parameters: Mapping[str, Any] | None = None) -> str:
        """Start a run with these parameters and return its id; there is no logical date."""
        request_body = {"logical_date": None, "conf": dict(run_parameters or {})}
        return str(self._call("POST", f"/api/v2/dags/{dag_id}/dagRuns", request_body)["dag_run_id"])

    def pause(self, dag_id: str, is_paused: bool) -> None:
        """Pause or unpause a DAG; asset events during the pause never start it."""
        path = f"/api/v2/dags/{dag_id}?update_mask=is_paused"
        self._call("PATCH", path, {"is_paused": is_paused})

    def announce(self, asset_name: str) -> None:
        """Create an event of an asset, which starts the DAGs that are scheduled on it."""
        assets = self._call("GET", f"/api/v2/assets?name_pattern={quote(asset_name)}")["assets"]
        asset_id = next(asset_record["id"] for asset_record in assets if asset_record["name"] == asset_name)
        self._call("POST", "/api/v2/assets/events", {"asset_id": asset_id, "extra": {}})

    def clear(self, dag_id: str, run_id: str) -> None:
        """Run all tasks of a run again, under the same run id."""
        path = f"/api/v2/dags/{dag_id}/dagRuns/{quote(run_id)}/clear"
        self._call("POST", path, {"dry_run": False})

    def run_ids(self, dag_id: str) -> tuple[str, ...]:
        """Return the ids of all runs, oldest first, asset-triggered ones included."""
        path = f"/api/v2/dags/{dag_id}/dagRuns?order_by=run_after&limit=100"
        return tuple(str(run["dag_run_id"]) for run in self._call("GET", path)["dag_runs"])

    def report(self, dag_id: str, run_id: str) -> RunReport:
        """Return the current state of a run and its tasks."""
        path = f"/api/v2/dags/{dag_id}/dagRuns/{quote(run_id)}"
        run = self._call("GET", path)
        instances_reply = self._call("GET", f"{path}/taskInstances?limit=1000&order_by=start_date")
        tasks = tuple(
            TaskReport(
                task["task_id"],
                task["map_index"],
                task["state"] or "none",
                task["duration"] or 0.0,
                task["try_number"],
                task["id"],
            )
            for task in instances_reply["task_instances"]
        )
        return RunReport(dag_id, run_id, run["run_type"], run["state"], run["duration"] or 0.0, tasks)

    def task_log(self, report: RunReport, task_id: str, line_count: int = 25) -> str:
        """Return the last lines of a task's latest log as text."""
        task = next(task_report for task_report in reversed(report.tasks) if task_report.task_id == task_id)
        return _read_task_log(self.home / "logs", report, task, line_count)

    @property
    def scheduler_session_id(self) -> int:
        """Return the session id of the scheduler, which the processes of all tasks share."""
        return next(process.pid for process in self._processes if process.log_path.stem == "scheduler")

    def wait_for_new_run(self, dag_id: str, earlier_run_ids: tuple[str, ...]) -> str:
        """Wait for a run that is not among `earlier_run_ids`, such as one started by an asset; return its id."""
        give_up_at = time.monotonic() + NEW_RUN_S_MAX
        while time.monotonic() < give_up_at:
            self.check()
            for run_id in self.run_ids(dag_id):
                if run_id not in earlier_run_ids:
                    return run_id
            time.sleep(0.25)
        raise AirflowFailed(f"no new run of {dag_id} within {NEW_RUN_S_MAX:.0f} s\n{self._log_ends()}")

    def wait(
        self, dag_id: str, run_id: str, timeout_s: float, *, on_task: Callable[[TaskReport], None] | None = None
    ) -> RunReport:
        """Wait until a run has succeeded; raise AirflowFailed with failed tasks' logs if it fails or times out."""
        give_up_at = time.monotonic() + timeout_s
        reported_tasks: set[TaskReport] = set()
        while True:
            self.check()
            report = self.report(dag_id, run_id)
            for task_report in report.tasks:
                if on_task is not None and task_report.state in TERMINAL_STATES and task_report not in reported_tasks:
                    reported_tasks.add(task_report)
                    on_task(task_report)
            if report.state == "success":
                return report
            if report.state == "failed" or time.monotonic() > give_up_at:
                raise AirflowFailed(self._describe_failure(report, timeout_s))
            time.sleep(0.25)

    def check(self) -> None:
        """Raise AirflowFailed if one of the Airflow processes has ended."""
        for process in self._processes:
            if not process.is_running:
                raise AirflowFailed(
                    f"airflow {process.log_path.stem} ended unexpectedly ({process.returncode})\n{process.log_tail()}"
                )

    def _start(self) -> None:
        self.home.parent.mkdir(parents=True, exist_ok=True)
        lock_error = AirflowFailed(f"another command already runs Airflow in {self.home}")
        self._exit_stack.enter_context(hold_lock(self.home.parent / "airflow.lock", lock_error))
        # Otherwise Airflow would resume a run of an interrupted command.
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir()
        migrate_process = self._start_guarded("migrate", "db", "migrate")
        self._wait_until("the database", lambda: not migrate_process.is_running, 120.0)
        if migrate_process.returncode != 0:
            raise AirflowFailed(f"airflow db migrate failed\n{migrate_process.log_tail()}")
        port = self.url.rpartition(":")[2]
        self._processes = (
            self._start_guarded("api-server", "api-server", "--host", "127.0.0.1", "--port", port),
            self._start_guarded("scheduler", "scheduler", "--skip-serve-logs"),
            self._start_guarded("dag-processor", "dag-processor"),
        )
        self._wait_until("the API server", self.log_in, 120.0)
        for pool_name, slot_count in self._slot_count_by_pool.items():
            self.add_pool(pool_name, slot_count)
        # DAG files are parsed one after another, so wait until all DAGs are there.
        dag_count = len(list(DAGS_FOLDER.glob("[!_]*.py")))
        self._wait_until("the scheduler and the DAGs", lambda: self.is_ready(dag_count), 120.0)

    def _start_guarded(self, name: str, *arguments: str) -> GuardedCommand:
        return self._exit_stack.enter_context(self.start(name, *arguments))

    def _wait_until(self, awaited_subject: str, condition: Callable[[], bool], timeout_s: float) -> None:
        give_up_at = time.monotonic() + timeout_s
        while not condition():
            self.check()
            if time.monotonic() > give_up_at:
                raise AirflowFailed(f"{awaited_subject} not ready within {timeout_s:.0f} s\n{self._log_ends()}")
            time.sleep(0.1)

    def _call(self, http_method: str, api_path: str, request_body: Mapping[str, Any] | None = None) -> Any:
        response = self._http.request(http_method, api_path, json=request_body)
        if not response.is_success:
            raise AirflowFailed(f"{http_method} {api_path}: {response.status_code} {response.text[:2000]}")
        return response.json()

    def _log_ends(self) -> str:
        return "\n".join(f"-- {process.log_path.stem}\n{process.log_tail(8)}" for process in self._processes)

    def _describe_failure(self, report: RunReport, timeout_s: float) -> str:
        report_lines = [f"{report.dag_id} {report.run_id} is {report.state}"]
        if report.state != "failed":
            task_states_text = ", ".join(f"{task_report.task_id} {task_report.state}" for task_report in report.tasks)
            report_lines = [f"{report_lines[0]} after {timeout_s:.0f} s: {task_states_text}"]
        for task in report.tasks:
            if task.state in ("failed", "up_for_retry"):
                report_lines += [
                    f"-- {task.task_id} [{task.map_index}]",
                    _read_task_log(self.home / "logs", report, task),
                ]
        return "\n".join(report_lines)


def local_airflow_settings(airflow_home: Path, url: str, parallelism: int) -> dict[str, str]:
    """Return Airflow's settings for one machine: loopback only, short intervals, no telemetry."""
    return {
        "AIRFLOW_HOME": str(airflow_home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(DAGS_FOLDER),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
        "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
        "AIRFLOW__CORE__PARALLELISM": str(parallelism),
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{airflow_home / 'airflow.db'}",
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": url.rpartition(":")[2],
        "AIRFLOW__API__BASE_URL": url,
        "AIRFLOW__API__WORKERS": "1",
        "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_urlsafe(64),
        # By default the scheduler sleeps 1 s when idle, and a slot stays occupied for 5 s after each task.
        "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.1",
        "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        # Let tasks import the packages of this clone.
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }


def _read_task_log(logs_folder: Path, report: RunReport, task: TaskReport, line_count: int = 25) -> str:
    task_folder = logs_folder / f"dag_id={report.dag_id}" / f"run_id={report.run_id}"
    task_folder /= f"task_id={task.task_id}"
    if task.map_index >= 0:
        task_folder /= f"map_index={task.map_index}"
    try:
        log_text = (task_folder / f"attempt={task.try_number}.log").read_text("utf-8", "replace")
    except OSError:
        return "(no log)"
    log_lines = [_readable_log_line(line) for line in log_text.splitlines()]
    return "\n".join([line for line in log_lines if not line.startswith("info: ::")][-line_count:])


def _readable_log_line(json_line: str) -> str:
    """Return a JSON log line of a task as text, with type, message and last stack frames of errors."""
    try:
        log_entry = json.loads(json_line)
    except ValueError:
        return json_line
    readable_text = f"{log_entry.get('level', '')}: {log_entry.get('event', '')}"
    for error in log_entry.get("error_detail") or ():
        readable_text += f"\n    {error.get('exc_type')}: {error.get('exc_value')}"
        for stack_frame in (error.get("frames") or [])[-3:]:
            readable_text += (
                f"\n        {stack_frame.get('filename')}:{stack_frame.get('lineno')} {stack_frame.get('name')}"
            )
    return readable_text


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def hold_lock(lock_path: Path, lock_error: Exception) -> Iterator[None]:
    """Lock the file during the block; raise `lock_error` without waiting if another process holds the lock."""
    with lock_path.open("a") as lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise lock_error from None
        yield

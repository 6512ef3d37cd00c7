"""A client of Airflow's REST API: runs started, looked at and cleared."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx


class AirflowFailed(RuntimeError):
    """Airflow did not come up, or a run did not end as it should; the message holds the log's end."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """Try of a task; `map_index` is -1 for a task that is not mapped, `instance_id` is in its processes' names."""

    task_id: str
    map_index: int
    state: str
    duration_s: float
    try_number: int
    instance_id: str


@dataclass(frozen=True, slots=True)
class RunReport:
    """DAG run with its task instances in the order in which they started."""

    dag_id: str
    run_id: str
    run_type: str
    state: str
    duration_s: float
    tasks: tuple[TaskReport, ...]


class AirflowClient:
    """Client of the Airflow at `url`; AirflowFailed where it answers with an error."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=30.0)

    def log_in(self) -> bool:
        """Fetch a token; False while nobody answers."""
        with suppress(httpx.TransportError):
            token = self._call("GET", "/auth/token")["access_token"]
            self._http.headers["Authorization"] = f"Bearer {token}"
        return "Authorization" in self._http.headers

    def is_ready(self, dags: int) -> bool:
        """True once scheduler and DAG processor are healthy and so many DAGs are parsed; raises AirflowFailed."""
        health = self._call("GET", "/api/v2/monitor/health")
        if any(health[name]["status"] != "healthy" for name in ("scheduler", "dag_processor")):
            return False
        errors = self._call("GET", "/api/v2/importErrors")["import_errors"]
        if errors:
            raise AirflowFailed(f"{errors[0]['filename']}: {errors[0]['stack_trace']}")
        return int(self._call("GET", "/api/v2/dags")["total_entries"]) >= dags

    def add_pool(self, name: str, slots: int) -> None:
        """Make a pool, so that at most so many of its tasks run at a time."""
        self._call("POST", "/api/v2/pools", {"name": name, "slots": slots})

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None) -> str:
        """Start a run with these parameters and return its id; there is no logical date."""
        body = {"logical_date": None, "conf": dict(conf or {})}
        return str(self._call("POST", f"/api/v2/dags/{dag_id}/dagRuns", body)["dag_run_id"])

    def pause(self, dag_id: str, is_paused: bool) -> None:
        """Pause a DAG, or let it go on; what an asset tells a paused one is lost to it."""
        path = f"/api/v2/dags/{dag_id}?update_mask=is_paused"
        self._call("PATCH", path, {"is_paused": is_paused})

    def announce(self, asset: str) -> None:
        """Say that an asset changed, as a task that lists it among its outlets does: its DAGs start."""
        assets = self._call("GET", f"/api/v2/assets?name_pattern={quote(asset)}")["assets"]
        number = next(
            asset_record["id"] for asset_record in assets if asset_record["name"] == asset
        )
        self._call("POST", "/api/v2/assets/events", {"asset_id": number, "extra": {}})

    def clear(self, dag_id: str, run_id: str) -> None:
        """Run all tasks of a run again, under the same run id."""
        path = f"/api/v2/dags/{dag_id}/dagRuns/{quote(run_id)}/clear"
        self._call("POST", path, {"dry_run": False})

    def run_ids(self, dag_id: str) -> tuple[str, ...]:
        """Return the ids of all runs, oldest first: asset-triggered ones appear here by themselves."""
        path = f"/api/v2/dags/{dag_id}/dagRuns?order_by=run_after&limit=100"
        return tuple(str(run["dag_run_id"]) for run in self._call("GET", path)["dag_runs"])

    def report(self, dag_id: str, run_id: str) -> RunReport:
        """Look at a run as it is now."""
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
        return RunReport(
            dag_id, run_id, run["run_type"], run["state"], run["duration"] or 0.0, tasks
        )

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        answer = self._http.request(method, path, json=body)
        if not answer.is_success:
            raise AirflowFailed(f"{method} {path}: {answer.status_code} {answer.text[:2000]}")
        return answer.json()

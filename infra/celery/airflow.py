"""Airflow with CeleryExecutor on this machine: a broker, a database, and a worker for each queue."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from cache.errors import ConfigError
from cache.process.extras import install_command
from cache.process.redis_server import find_server, server
from infra.celery.postgres import find_postgres, postgres
from infra.celery.workers import CeleryWorkers
from infra.local.airflow import LocalAirflow
from infra.local.airflow_client import AirflowFailed
from infra.local.lock import alone

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
    """Run all of it until the block ends; `environment` is what tasks see, and wins over our settings.

    Raises ConfigError where something is not installed, AirflowFailed where something does not come up.
    """
    check_installed()
    state = state.resolve()
    folder = state / "celery"
    folder.mkdir(parents=True, exist_ok=True)
    lock_error = AirflowFailed(f"another command already runs Airflow in {state}")
    with (
        alone(state / "celery.lock", lock_error),
        server(folder / "broker") as broker,
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
    """Raises ConfigError with what to install."""
    # Looked up by name: importing Airflow writes to the home folder.
    missing = [name for name in _PACKAGES if not any(distributions(name=name))]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} is not installed: `make env`, or {install_command('airflow')}"
        )
    find_server()
    find_postgres()


def settings(broker: str, database: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Airflow's settings for CeleryExecutor, on top of those of one machine; `environ` wins over those of NOTICED."""
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

"""Celery workers, one per queue; one that dies is started again."""

import time
from collections.abc import Mapping
from typing import Self

from cache.process.child_process import GuardedCommand
from infra.local.airflow import LocalAirflow
from infra.local.airflow_client import AirflowFailed

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
        return self._running[queue].log.read_text("utf-8", "replace")

    def revive(self) -> dict[str, int | None]:
        """Start again what has died and wait until it listens; its queues with their exit codes.

        What a dead worker had in hand comes back by itself: Airflow misses its heartbeat. Raises AirflowFailed where
        a worker dies before it listens.
        """
        dead = {name: worker for name, worker in self._running.items() if not worker.running}
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
            if not worker.running or time.monotonic() > give_up:
                raise AirflowFailed(
                    f"the worker of the queue {waiting[0]} does not listen\n{worker.tail()}"
                )
            time.sleep(0.1)

    def _stop(self) -> None:
        for worker in self._running.values():
            worker.cut()  # all at once
        for worker in self._running.values():
            worker.stop()

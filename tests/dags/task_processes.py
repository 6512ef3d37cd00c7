"""Processes of Airflow's running tasks, found by their names, so that a test may kill them."""

import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

WORKER = "airflow worker -- LocalExecutor: "

How = Literal["task", "worker", "both"]


@dataclass(frozen=True, slots=True)
class TaskProcesses:
    """The worker that supervises one try of a task, and its child that does the work."""

    instance_id: str
    worker: int
    task: int

    def kill(self, how: How) -> None:
        """SIGKILL: the worker sees its task die; nobody sees a worker die but by its silence, and then the task may
        live on, or not.
        """
        if how != "task":
            os.kill(self.worker, signal.SIGKILL)
        if how != "worker":
            with suppress(ProcessLookupError):  # it ends by itself when its worker is gone
                os.kill(self.task, signal.SIGKILL)


def task_processes(session: int) -> list[TaskProcesses]:
    """Return the processes of all tasks that run in a session of processes."""
    completed_process = subprocess.run(
        ["ps", "-wwAo", "pid=,ppid=,sess=,args="], check=True, capture_output=True, text=True
    )
    rows = [line.split(maxsplit=3) for line in completed_process.stdout.splitlines()]
    session_processes = [(int(row[0]), int(row[1]), row[3]) for row in rows if row[2] == str(session)]
    children = {parent: pid for pid, parent, name in session_processes if name.startswith("airflow worker")}
    return [
        TaskProcesses(name.removeprefix(WORKER), pid, children[pid])
        for pid, _, name in session_processes
        if name.startswith(WORKER) and pid in children
    ]

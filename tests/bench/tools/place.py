"""Placement of the parts of a bench on cores: it decides latency, so it is chosen and printed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from cache.process.redis_server import RedisServer, join_or_start_server


def cores() -> list[int]:
    """The cores this process may use; empty where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def pin(pid: int, core: int | None) -> str:
    """Keep a process (0 = this one) with all its threads on the core at that index of `cores`, wrapping around."""
    available = cores_at_start
    if core is None or len(available) < 2:
        return "anywhere"
    core_id = available[core % len(available)]
    tasks = Path(f"/proc/{pid or 'self'}/task")
    for task in [int(task_path.name) for task_path in tasks.iterdir()] if tasks.exists() else [pid]:
        os.sched_setaffinity(task, {core_id})
    return f"core {core_id}"


def unpin() -> None:
    """Give this process all its cores back."""
    if cores_at_start:
        os.sched_setaffinity(0, cores_at_start)


@contextmanager
def own_server(core: int = -1) -> Iterator[RedisServer]:
    """A Redis of the bench's own, pinned to one core (by default the last)."""
    with TemporaryDirectory(prefix="larder-bench-") as folder, join_or_start_server(Path(folder)) as running:
        pin(running.pid, core)
        yield running


@contextmanager
def awake(core: int) -> Iterator[int]:
    """Keep a core from halting, by a process (its id) that runs only when nothing else wants it.

    A halted virtual core takes up to milliseconds to wake, so that a machine at rest would look slower than a busy one.
    """
    # The process ends with its parent, however that ends; otherwise it would spoil every later measurement.
    spin = (
        "import os\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nparent = os.getppid()\n"
        "while os.getppid() == parent:\n    for _ in range(10_000_000): pass"
    )
    running = subprocess.Popen([sys.executable, "-S", "-c", spin])
    try:
        pin(running.pid, core)
        yield running.pid
    finally:
        running.kill()
        running.wait()


cores_at_start = cores()

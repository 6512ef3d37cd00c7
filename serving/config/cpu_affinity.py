"""CPU affinity and priority of threads: the cores that live inference may use, and who goes first there."""

import contextlib
import os
import sys
import threading

from cache.errors import ConfigError


def check_cores(cores: tuple[int, ...]) -> None:
    """Raises ConfigError when this process may not run on one of them, or the system cannot pin threads."""
    if not cores:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(
            "threads cannot be pinned here: leave live_cores empty", field="live_cores"
        )
    allowed = os.sched_getaffinity(0)
    if missing := sorted(set(cores) - allowed):
        raise ConfigError(
            f"live_cores names {missing}, this process may use {sorted(allowed)}",
            field="live_cores",
        )


LAST = 19


def step_back(nice: int) -> None:
    """Lets other threads go before the calling one and those that it starts: 0 as ever, 19 last in line."""
    if nice and sys.platform == "linux":  # elsewhere a thread has no priority of its own
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def place_thread(cores: tuple[int, ...], nice: int) -> None:
    """Keeps the calling thread, and the threads that it starts, on these cores, if any, and sets its niceness."""
    if cores:
        os.sched_setaffinity(0, cores)
    step_back(nice)

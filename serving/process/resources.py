"""Resources of a process: cores and priority of threads, threads for the store, open files, garbage collection."""

import asyncio
import contextlib
import contextvars
import gc
import logging
import os
import resource
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from cache.errors import ConfigError

log = logging.getLogger(__name__)

NICE_LAST = 19

STORE_THREADS = 16
"""Threads of the pool: the blocklist, records, archive, sweep, loads, explanations have one or two reads each."""

FILES_HEADROOM = 256
"""Descriptors for Redis, the files of generations, scrapers, and connections that are about to end."""

GC_YOUNG_OBJECTS = 25_000
"""Objects before the young are looked through. By Python's own 700 that happened several times within one batch, whose
objects are all still in use; by 5,000 batches of 100 still cost 4 % more."""

GC_YOUNG_PASSES = 30
"""Collections of the youngest objects per collection of the middle generation, which takes 85 ms for 130,000 objects,
nearly all of them connections and L1 entries, of which at most a few dozen were garbage."""

P = ParamSpec("P")

T = TypeVar("T")


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


def lower_thread_priority(nice: int) -> None:
    """Lets other threads go before the calling one and those that it starts: 0 as ever, 19 last in line."""
    if nice and sys.platform == "linux":  # elsewhere a thread has no priority of its own
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def place_thread(cores: tuple[int, ...], nice: int) -> None:
    """Keeps the calling thread, and the threads that it starts, on these cores, if any, and sets its niceness."""
    if cores:
        os.sched_setaffinity(0, cores)
    lower_thread_priority(nice)


class StoreThreads:
    """Thread pool for the store: one that hangs keeps some of these, none of asyncio's, which all else runs in."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(STORE_THREADS, "larder-store")

    async def __call__(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the work in one of these threads, with the caller's context; return its result or raise its error."""
        # The request that an explanation is for stays named in what the store logs.
        run = partial(contextvars.copy_context().run, work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, run)

    def close(self) -> None:
        """Begins no other read; those under way end by themselves."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def raise_file_limit(connections: int) -> int:
    """Raises the soft limit of open files as far as so many connections need it; returns how many have room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    required_files = connections + FILES_HEADROOM
    if soft == resource.RLIM_INFINITY or soft >= required_files:
        return connections
    soft = _raise_soft_limit(
        required_files if hard == resource.RLIM_INFINITY else min(hard, required_files), soft, hard
    )
    room = min(connections, connection_room(soft))
    if room < connections:
        log.warning(
            "room for %d connections instead of %d: only %d files may be open (ulimit -Hn)",
            room, connections, soft,
        )  # fmt: skip
    return room


def connection_room(files: int) -> int:
    """Connections that have room among so many open files."""
    return max(files - FILES_HEADROOM, files // 2)


def _raise_soft_limit(new_limit: int, soft: int, hard: int) -> int:
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))
    except (OSError, ValueError):  # a system with a lower limit of its own
        return soft
    return new_limit


def freeze_objects() -> None:
    """Freeze existing objects, which the garbage collector then skips: walking them held every request for 50 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_YOUNG_OBJECTS, GC_YOUNG_PASSES, gc.get_threshold()[2])

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

LOWEST_PRIORITY_NICE = 19

STORE_THREAD_COUNT = 16
"""Threads of the pool: the blocklist, records, archive, sweep, loads, explanations have one or two reads each."""

OPEN_FILES_HEADROOM = 256
"""Descriptors for Redis, the files of generations, scrapers, and connections that are about to end."""

GC_YOUNG_OBJECTS = 25_000
"""Objects before the young are looked through. By Python's own 700 that happened several times within one batch, whose
objects are all still in use; by 5,000 batches of 100 still cost 4 % more."""

GC_YOUNG_PASSES = 30
"""Collections of the youngest objects per collection of the middle generation, which takes 85 ms for 130,000 objects,
nearly all of them connections and L1 entries, of which at most a few dozen were garbage."""

WorkParameters = ParamSpec("WorkParameters")

WorkResult = TypeVar("WorkResult")


def check_cores(cores: tuple[int, ...]) -> None:
    """Raise ConfigError when this process may not run on one of them, or the system cannot pin threads."""
    if not cores:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("threads cannot be pinned here: leave live_cores empty", field="live_cores")
    allowed_cores = os.sched_getaffinity(0)
    if missing_cores := sorted(set(cores) - allowed_cores):
        raise ConfigError(
            f"live_cores names {missing_cores}, this process may use {sorted(allowed_cores)}", field="live_cores"
        )


def lower_thread_priority(nice: int) -> None:
    """Let other threads go before the calling one and those that it starts: 0 as ever, 19 last in line."""
    if nice and sys.platform == "linux":  # elsewhere a thread has no priority of its own
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def place_thread(cores: tuple[int, ...], nice: int) -> None:
    """Keep the calling thread, and the threads that it starts, on these cores, if any, and set its niceness."""
    if cores:
        os.sched_setaffinity(0, cores)
    lower_thread_priority(nice)


class StoreThreads:
    """Thread pool for the store: one that hangs keeps some of these, none of asyncio's, which all else runs in."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(STORE_THREAD_COUNT, "larder-store")

    async def __call__(
        self, work: Callable[WorkParameters, WorkResult], /, *args: WorkParameters.args, **kwargs: WorkParameters.kwargs
    ) -> WorkResult:
        """Run the work in one of these threads, with the caller's context; return its result or raise its error."""
        # The request that an explanation is for stays named in what the store logs.
        run = partial(contextvars.copy_context().run, work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, run)

    def close(self) -> None:
        """Begin no other read; those under way end by themselves."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def raise_file_limit(connections: int) -> int:
    """Raise the soft limit of open files as far as so many connections need it; return how many have room."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    required_files = connections + OPEN_FILES_HEADROOM
    if soft_limit == resource.RLIM_INFINITY or soft_limit >= required_files:
        return connections
    soft_limit = _raise_soft_limit(
        required_files if hard_limit == resource.RLIM_INFINITY else min(hard_limit, required_files),
        soft_limit,
        hard_limit,
    )
    connections_max = min(connections, connections_with_room(soft_limit))
    if connections_max < connections:
        log.warning(
            "room for %d connections instead of %d: only %d files may be open (ulimit -Hn)",
            connections_max, connections, soft_limit,
        )  # fmt: skip
    return connections_max


def connections_with_room(open_files_max: int) -> int:
    """Connections that have room among so many open files."""
    return max(open_files_max - OPEN_FILES_HEADROOM, open_files_max // 2)


def _raise_soft_limit(new_limit: int, soft_limit: int, hard_limit: int) -> int:
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard_limit))
    except (OSError, ValueError):  # a system with a lower limit of its own
        return soft_limit
    return new_limit


def freeze_objects() -> None:
    """Freeze existing objects, which the garbage collector then skips: walking them held every request for 50 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_YOUNG_OBJECTS, GC_YOUNG_PASSES, gc.get_threshold()[2])

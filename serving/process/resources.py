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
"""Threads of the pool: blocklist, records, checks, archive, sweep, loads, explanations have one or two reads each."""

OPEN_FILES_HEADROOM = 256
"""Descriptors for Redis, the files of generations, scrapers, and connections that are about to end."""

GC_YOUNG_OBJECTS = 25_000
"""New objects per collection of the youngest generation. With Python's default of 700 it ran several times within one
batch, whose objects are all still in use; with 5,000, batches of 100 still cost 4 % more."""

GC_YOUNG_PASSES = 30
"""Collections of the youngest generation per collection of the middle one, which takes 85 ms for 130,000 objects.
Nearly all of these are connections and L1 entries; at most a few dozen were garbage."""

WorkParameters = ParamSpec("WorkParameters")

WorkResult = TypeVar("WorkResult")


def check_cores(core_numbers: tuple[int, ...]) -> None:
    """Raise ConfigError if this process may not run on one of the cores, or the system cannot pin threads."""
    if not core_numbers:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("threads cannot be pinned here: leave live_cores empty", field="live_cores")
    allowed_cores = os.sched_getaffinity(0)
    if missing_cores := sorted(set(core_numbers) - allowed_cores):
        raise ConfigError(
            f"live_cores names {missing_cores}, but only {sorted(allowed_cores)} are allowed", field="live_cores"
        )


def lower_thread_priority(niceness: int) -> None:
    """Set the niceness of the calling thread and threads that it starts: 0 is normal, 19 the lowest priority."""
    if niceness and sys.platform == "linux":  # other systems have no niceness per thread
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def place_thread(core_numbers: tuple[int, ...], niceness: int) -> None:
    """Pin the calling thread and threads that it starts to these cores, if any, and set its niceness."""
    if core_numbers:
        os.sched_setaffinity(0, core_numbers)
    lower_thread_priority(niceness)


class StoreThreads:
    """Thread pool for reads of the store: a store that hangs blocks these threads, not asyncio's default pool."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(STORE_THREAD_COUNT, "larder-store")

    async def __call__(
        self, work: Callable[WorkParameters, WorkResult], /, *args: WorkParameters.args, **kwargs: WorkParameters.kwargs
    ) -> WorkResult:
        """Run the work in one of these threads, with the caller's context; return its result or raise its error."""
        # The caller's context, so that log lines of the store name the request.
        run = partial(contextvars.copy_context().run, work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, run)

    def close(self) -> None:
        """Start no more reads; reads under way end by themselves."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def raise_file_limit(connection_count: int) -> int:
    """Raise the soft limit of open files for this many connections; return how many connections fit."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    required_files = connection_count + OPEN_FILES_HEADROOM
    if soft_limit == resource.RLIM_INFINITY or soft_limit >= required_files:
        return connection_count
    soft_limit = _raise_soft_limit(
        required_files if hard_limit == resource.RLIM_INFINITY else min(hard_limit, required_files),
        soft_limit,
        hard_limit,
    )
    connections_max = min(connection_count, connections_with_room(soft_limit))
    if connections_max < connection_count:
        log.warning(
            "room for %d connections instead of %d: only %d files may be open (ulimit -Hn)",
            connections_max, connection_count, soft_limit,
        )  # fmt: skip
    return connections_max


def connections_with_room(open_files_max: int) -> int:
    """Return the number of connections that fit into this limit of open files."""
    return max(open_files_max - OPEN_FILES_HEADROOM, open_files_max // 2)


def _raise_soft_limit(new_limit: int, soft_limit: int, hard_limit: int) -> int:
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard_limit))
    except (OSError, ValueError):  # the system has a lower limit
        return soft_limit
    return new_limit


def freeze_objects() -> None:
    """Freeze existing objects, so that the garbage collector skips them: visiting them delayed requests by 50 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_YOUNG_OBJECTS, GC_YOUNG_PASSES, gc.get_threshold()[2])

"""Threads for reads of the artefact store, apart from those that requests wait for."""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, Protocol, TypeVar

THREADS = 16
"""Threads of the pool: the blocklist, records, archive, sweep, loads, explanations have one or two reads each."""

P = ParamSpec("P")
T = TypeVar("T")


class InThread(Protocol):
    """Runs blocking work aside; `asyncio.to_thread` is one."""

    async def __call__(
        self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:  # pragma: no cover
        """Returns or raises what the work does; a caller that leaves does not end it."""


class StoreThreads:
    """Thread pool for the store: one that hangs keeps some of these, none of asyncio's, which all else runs in."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(THREADS, "larder-store")

    async def __call__(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs the work in one of these threads, with the caller's context, and returns or raises what it does."""
        # The request that an explanation is for stays named in what the store logs.
        run = partial(contextvars.copy_context().run, work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, run)

    def close(self) -> None:
        """Begins no other read; those under way end by themselves."""
        self._executor.shutdown(wait=False, cancel_futures=True)

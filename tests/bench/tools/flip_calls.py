"""Callers for the flip bench, in a process of their own: a fixed rate, so that a stall is felt by all it delays."""

import asyncio
import gc
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.http_connection import HttpConnection

CONNECTIONS = 8
"""Per replica; as many requests may be under way there."""


@dataclass(slots=True)
class Calls:
    """What was asked of one replica: when it was due (Unix seconds) and how long after that the answer was there."""

    due: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failed: int = 0


@contextmanager
def calling(
    urls: Sequence[str], paths: Sequence[str], *, rate: float, seed: int, folder: Path
) -> Iterator["Recording"]:
    """Callers at `rate` requests a second over all replicas, until the block ends."""
    context = multiprocessing.get_context("spawn")
    started, over = context.Event(), context.Event()
    calls_path = folder / "calls.npz"
    process = context.Process(target=_main, args=(list(urls), list(paths), rate, seed, str(calls_path), started, over))
    process.start()
    recording = Recording(calls_path)
    try:
        if not started.wait(30):
            raise RuntimeError("the callers did not start")
        yield recording
    finally:
        over.set()
        process.join(30)
        if process.is_alive():
            process.kill()
    recording.read()


class Recording:
    """All calls, sorted by when they were due."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.due: NDArray[np.float64] = np.empty(0)
        self.seconds: NDArray[np.float64] = np.empty(0)
        self.failed = 0

    def read(self) -> None:
        """Read the calls once the callers have ended."""
        with np.load(self._path) as call_arrays:
            order = np.argsort(call_arrays["due"])
            self.due, self.seconds = call_arrays["due"][order], call_arrays["seconds"][order]
            self.failed = int(call_arrays["failed"])

    def between(self, start: float, end: float) -> NDArray[np.float64]:
        """Return seconds of the calls that were due in [start, end), in Unix seconds."""
        first, last = np.searchsorted(self.due, [start, end])
        return self.seconds[first:last]


def _main(
    urls: list[str], paths: list[str], rate: float, seed: int, calls_path: str, started: Event, over: Event
) -> None:
    gc.disable()  # a pause of the caller would look like one of the service
    calls = asyncio.run(_call_all(urls, paths, rate, seed, started, over))
    np.savez(
        calls_path,
        due=np.concatenate([replica_calls.due for replica_calls in calls]),
        seconds=np.concatenate([replica_calls.seconds for replica_calls in calls]),
        failed=sum(replica_calls.failed for replica_calls in calls),
    )


async def _call_all(
    urls: list[str], paths: list[str], rate: float, seed: int, started: Event, over: Event
) -> list[Calls]:
    calls = [Calls() for _ in urls]
    first_due_at = time.time() + 0.2
    lanes = []
    total = len(urls) * CONNECTIONS
    for number in range(total):
        replica = number % len(urls)
        # Request a popular few and a long tail, as returning users do.
        rng = np.random.default_rng([seed, number])
        lanes.append(
            _call_on_connection(
                urls[replica], paths, rng, calls[replica], over,
                first=first_due_at + number / rate, every=total / rate,
            )
        )  # fmt: skip
    started.set()
    await asyncio.gather(*lanes)
    return calls


async def _call_on_connection(
    url: str, paths: list[str], rng: np.random.Generator, calls: Calls, over: Event, *, first: float, every: float
) -> None:
    due, drawn, at = first, np.empty(0, np.int64), 0
    async with HttpConnection(url) as connection:
        while not over.is_set():
            if at == len(drawn):
                drawn, at = (rng.zipf(1.3, 1_000) - 1) % len(paths), 0
            path = paths[int(drawn[at])]
            at += 1
            if (early := due - time.time()) > 0:
                await asyncio.sleep(early)
            try:
                status, _ = await connection.request("GET", path)
            except (OSError, EOFError, TimeoutError):
                status = 0
            # Measure from the time at which the call was due, so that waiting for a connection counts.
            calls.due.append(due)
            calls.seconds.append(time.time() - due)
            calls.failed += status != 200
            due += every

"""The parent of several workers: one listening socket for all, and another worker for each that dies."""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cache.process.background_loops import BackgroundLoops, cancel_and_wait
from serving.access.quota import QuotaTable

log = logging.getLogger(__name__)

READY, RETIRE = b"ready", b"retire"
"""Messages of worker and parent over their control socket; its end says that the other is gone."""

START_S = 600.0
"""Seconds that a worker has to become ready: a generation's files are read and checked before."""
GRACE_S = 5.0
STEADY_S = 10.0
"""Seconds after which a worker that was ready starts the count of failures anew."""
TRIES = 5
QUOTAS = "quotas"
"""Name of the file with the standings of all quotas, in the workers' folder."""


def pause_s(failures: int) -> float:
    """Seconds before the next start, after so many short lives in a row."""
    return 0.0 if failures < 1 else min(30.0, 0.2 * 2.0 ** min(failures - 1, 10))


@dataclass(slots=True, eq=False)
class Worker:
    """A worker process; no other that lives has its slot."""

    slot: int
    process: asyncio.subprocess.Process
    control: socket.socket
    ready_at: float | None = None

    def send_signal(self, signal_: signal.Signals) -> None:
        """Sends the process a signal, unless it has ended."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal_)

    @property
    def is_steady(self) -> bool:
        """True if the worker became ready long enough ago for its end to be no failed start."""
        return self.ready_at is not None and time.monotonic() - self.ready_at >= STEADY_S

    def retire(self) -> None:
        """Ask the worker to take no new connections, to answer pending requests, and to end."""
        with contextlib.suppress(OSError):
            self.control.send(RETIRE)

    def __str__(self) -> str:
        return f"worker {self.slot} (process {self.process.pid})"


@dataclass(frozen=True, slots=True)
class WorkerSpawner:
    """Starts workers; each is a program of its own and reads its settings anew."""

    listener: socket.socket
    folder: Path
    redis_url: str
    log_level: str
    program: tuple[str, ...] = ("-m", "serving.worker")

    async def __call__(self, slot: int) -> Worker:
        """Start a worker; raises OSError where the system has no room for another process or file."""
        parent_socket, its = socket.socketpair()
        parent_socket.setblocking(False)
        files = (self.listener.fileno(), its.fileno())
        with its:
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, *self.program, *map(str, files),
                    str(self.folder), str(slot), self.log_level,
                    # Not among the arguments: they can be read by anybody on the host, and the URL holds a password.
                    env=os.environ | {"REDIS_URL": self.redis_url},
                    stdin=asyncio.subprocess.DEVNULL, pass_fds=files,
                    start_new_session=True,  # Ctrl-C is told to the parent, which tells its workers once
                )  # fmt: skip
            except BaseException:
                parent_socket.close()  # a process that was forked all the same ends by this
                raise
        return Worker(slot, process, parent_socket)

    def clean(self, slot: int) -> None:
        """Remove files and counts that a worker that ended may have left."""
        (self.folder / f"{slot}.sock").unlink(missing_ok=True)
        QuotaTable.clear_column_in_file(self.folder / QUOTAS, slot)


@dataclass(slots=True, eq=False)
class Workers:
    """Supervisor that keeps `count` workers running until it is stopped."""

    count: int
    spawn: WorkerSpawner
    drain_s: float
    announce: Callable[[], None]
    pause_s: Callable[[int], float] = pause_s
    _workers_by_slot: list[Worker | None] = field(default_factory=list)
    _slots: set[int] = field(default_factory=set)
    _living: set[Worker] = field(default_factory=set)
    _reaping: set[asyncio.Task[None]] = field(default_factory=set)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _rolling: asyncio.Event = field(default_factory=asyncio.Event)
    _loops: BackgroundLoops = field(default_factory=BackgroundLoops)
    _code: int = 0
    _is_announced: bool = False

    async def run(self) -> int:
        """The exit code: 0 after a clean stop, else 1, or a worker's own if none could start."""
        loop = asyncio.get_running_loop()
        for stop_signal in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(stop_signal, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._rolling.set)
        self._workers_by_slot = [None] * self.count
        rolling = self._loops.start("rolling_restart", self._roll, wait=self._rolling.wait)
        keeping = [
            self._loops.start(
                "workers", functools.partial(self._keep, worker_index),
                is_due=lambda: not self._stopping.is_set(),
            )
            for worker_index in range(self.count)
        ]  # fmt: skip
        await asyncio.wait(keeping)
        while self._reaping:  # one that a rolling restart has just started or retired
            await asyncio.wait(self._reaping)
        await cancel_and_wait([rolling])
        return self._code

    def _stop(self) -> None:
        """Stops the workers: at the first signal they drain, at the second they end at once."""
        bound_s = GRACE_S + (0.0 if self._stopping.is_set() else self.drain_s)
        self._stopping.set()
        self.spawn.listener.close()  # the workers' own keep it open while they drain
        for worker in self._living:
            worker.send_signal(signal.SIGTERM)
        asyncio.get_running_loop().call_later(bound_s, self._kill)

    def _kill(self) -> None:
        for worker in self._living:
            log.warning("%s did not stop in time and is killed", worker)
            worker.send_signal(signal.SIGKILL)

    async def _keep(self, worker_index: int) -> None:
        """Keep a worker in one place: where one ends, or cannot be started, another try follows after a pause."""
        workers, failures = self._workers_by_slot, 0
        while not self._stopping.is_set():
            # One may be there: this begins again after an error.
            worker = workers[worker_index] or await self._start()
            workers[worker_index] = worker
            last: Worker | None = None
            code: int | None = None
            while worker is not None:
                self._announce_once()
                code = await worker.process.wait()
                # A rolling restart may have put another one in its place.
                last, worker = (
                    worker,
                    workers[worker_index] if workers[worker_index] is not worker else None,
                )
            workers[worker_index] = None
            if self._stopping.is_set():
                return
            failures = 1 if last is not None and last.is_steady else failures + 1
            if self._is_hopeless(last, code, failures):
                return
            if last is None:
                log.warning(
                    "no worker could be started: trying again in %.1f s", self.pause_s(failures)
                )
            else:
                log.warning(
                    "%s ended with code %d: another starts in %.1f s",
                    last, code, self.pause_s(failures),
                )  # fmt: skip
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.pause_s(failures)):
                    await self._stopping.wait()

    def _is_hopeless(self, last: Worker | None, code: int | None, failures: int) -> bool:
        """Returns whether starting again is given up; never while any worker answers.

        `last` is the worker that ended with `code`; None where not even its process could be started.
        """
        if any(worker.ready_at is not None for worker in self._living):
            return False
        is_refused = code == 2 and not self._is_announced  # its settings; it said what is wrong
        was_ready = last is not None and last.ready_at is not None
        if was_ready or not (is_refused or failures >= TRIES):
            return False
        if not self._stopping.is_set():
            how = "no process" if last is None else f"{last} ended with code {code}"
            log.error("%s: giving up after %d starts", how, failures)
            self._code = 2 if is_refused else 1
            self._stop()
        return True

    def _announce_once(self) -> None:
        is_whole = all(worker and worker.ready_at is not None for worker in self._workers_by_slot)
        if is_whole and not self._is_announced:
            self._is_announced = True
            self.announce()

    async def _start(self) -> Worker | None:
        """A worker that is ready, or that has ended or is about to; None where no process can be started now."""
        slot = min(set(range(len(self._slots) + 1)) - self._slots)
        self._slots.add(slot)
        try:
            worker = await self.spawn(slot)
        except Exception as error:  # of any kind: the workers that run must not end with it
            self._slots.discard(slot)
            log.error(
                "worker %d cannot be started: %s",
                slot,
                error,
                exc_info=not isinstance(error, OSError),
            )
            return None
        self._living.add(worker)
        reaping = asyncio.create_task(self._reap(worker))
        self._reaping.add(reaping)
        reaping.add_done_callback(self._reaping.discard)
        if self._stopping.is_set():
            worker.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(START_S):
                ready_message = await asyncio.get_running_loop().sock_recv(
                    worker.control, len(READY)
                )
        except (TimeoutError, OSError):
            ready_message = b""
        if ready_message == READY:
            worker.ready_at = time.monotonic()
        elif not self._stopping.is_set():
            await self._end(worker, GRACE_S)
        return worker

    async def _reap(self, worker: Worker) -> None:
        await worker.process.wait()
        worker.control.close()
        self._living.discard(worker)
        try:
            self.spawn.clean(worker.slot)
        except OSError as error:
            log.error("what %s left cannot be removed: %s", worker, error)
        self._slots.discard(worker.slot)

    async def _end(self, worker: Worker, bound_s: float) -> None:
        try:
            async with asyncio.timeout(bound_s):
                await worker.process.wait()
        except TimeoutError:
            log.warning("%s did not end in time and is killed", worker)
            worker.send_signal(signal.SIGKILL)
            await worker.process.wait()

    async def _roll(self) -> None:
        """Replaces one worker after the other, the new one ready before the old one is let go."""
        self._rolling.clear()
        for worker_index, old in enumerate(self._workers_by_slot):
            if self._stopping.is_set():
                return
            if old is None or old.ready_at is None:
                continue  # it is starting, with the settings of today
            new = await self._start()
            if self._stopping.is_set():
                return
            if new is None or new.ready_at is None:
                log.error(
                    "%s did not become ready: the workers that run go on as they are",
                    new or "a new worker",
                )
                return
            if self._workers_by_slot[worker_index] is old:
                self._workers_by_slot[worker_index] = new
            else:  # it died meanwhile, and has a successor
                old = new
            old.retire()
            await self._end(old, self.drain_s + GRACE_S)
        log.info("all workers have been replaced")

"""Parent process of several workers: one listening socket for all, and a new worker for each that dies."""

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

READY_MESSAGE, RETIRE_MESSAGE = b"ready", b"retire"
"""Messages of worker and parent over their control socket; end of file means that the other process has ended."""

START_MAX_S = 600.0
"""Seconds that a worker may take to become ready, which includes reading and checking a generation's files."""
KILL_GRACE_S = 5.0
STEADY_AFTER_S = 10.0
"""Seconds of readiness after which a worker resets the count of failures."""
FAILED_STARTS_MAX = 5
QUOTAS_FILE_NAME = "quotas"
"""Name of the quota table's file in the workers' folder."""


def restart_pause_s(failure_count: int) -> float:
    """Return the seconds before the next start, after this many short-lived workers in a row."""
    return 0.0 if failure_count < 1 else min(30.0, 0.2 * 2.0 ** min(failure_count - 1, 10))


@dataclass(slots=True, eq=False)
class Worker:
    """Worker process; its slot is unique among living workers."""

    worker_slot: int
    process: asyncio.subprocess.Process
    control_socket: socket.socket
    ready_at: float | None = None

    def send_signal(self, signal_: signal.Signals) -> None:
        """Send the process a signal, unless it has ended."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal_)

    @property
    def is_steady(self) -> bool:
        """True if the worker has been ready long enough for its end not to count as a failed start."""
        return self.ready_at is not None and time.monotonic() - self.ready_at >= STEADY_AFTER_S

    def retire(self) -> None:
        """Ask the worker to accept no more connections, answer pending requests, and end."""
        with contextlib.suppress(OSError):
            self.control_socket.send(RETIRE_MESSAGE)

    def __str__(self) -> str:
        return f"worker {self.worker_slot} (process {self.process.pid})"


@dataclass(frozen=True, slots=True)
class WorkerSpawner:
    """Starts workers; each is a separate program that reads its settings again."""

    listener: socket.socket
    workers_folder: Path
    redis_url: str
    log_level: str
    worker_program: tuple[str, ...] = ("-m", "serving.worker")

    async def __call__(self, worker_slot: int) -> Worker:
        """Start a worker; raise OSError if the system cannot create another process or file."""
        parent_socket, worker_socket = socket.socketpair()
        parent_socket.setblocking(False)
        inherited_descriptors = (self.listener.fileno(), worker_socket.fileno())
        with worker_socket:
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, *self.worker_program, *map(str, inherited_descriptors),
                    str(self.workers_folder), str(worker_slot), self.log_level,
                    # Not an argument: other users of the host can read arguments, and the URL contains a password.
                    env=os.environ | {"REDIS_URL": self.redis_url},
                    stdin=asyncio.subprocess.DEVNULL, pass_fds=inherited_descriptors,
                    start_new_session=True,  # own session: Ctrl-C goes to the parent only, which signals its workers
                )  # fmt: skip
            except BaseException:
                parent_socket.close()  # also ends a process that was forked although an error occurred
                raise
        return Worker(worker_slot, process, parent_socket)

    def clean(self, worker_slot: int) -> None:
        """Remove the files and counts that an ended worker may have left."""
        (self.workers_folder / f"{worker_slot}.sock").unlink(missing_ok=True)
        QuotaTable.clear_column_in_file(self.workers_folder / QUOTAS_FILE_NAME, worker_slot)


@dataclass(slots=True, eq=False)
class WorkerSupervisor:
    """Supervisor that keeps `worker_count` workers running until it is stopped."""

    worker_count: int
    spawn: WorkerSpawner
    drain_timeout_s: float
    announce_start: Callable[[], None]
    get_restart_pause_s: Callable[[int], float] = restart_pause_s
    _workers_by_slot: list[Worker | None] = field(default_factory=list)
    _used_slots: set[int] = field(default_factory=set)
    _living_workers: set[Worker] = field(default_factory=set)
    _reap_tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _stop_event: asyncio.Event = field(default_factory=asyncio.Event)
    _roll_event: asyncio.Event = field(default_factory=asyncio.Event)
    _loops: BackgroundLoops = field(default_factory=BackgroundLoops)
    _exit_code: int = 0
    _is_announced: bool = False

    async def run(self) -> int:
        """Run until stopped; return 0 after a clean stop, else 1, or a worker's exit code if none could start."""
        loop = asyncio.get_running_loop()
        for stop_signal in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(stop_signal, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._roll_event.set)
        self._workers_by_slot = [None] * self.worker_count
        roll_task = self._loops.start("rolling_restart", self._roll_workers, wait=self._roll_event.wait)
        keep_tasks = [
            self._loops.start(
                "workers", functools.partial(self._keep_worker, worker_index),
                is_due=lambda: not self._stop_event.is_set(),
            )
            for worker_index in range(self.worker_count)
        ]  # fmt: skip
        await asyncio.wait(keep_tasks)
        while self._reap_tasks:  # also workers that a rolling restart has just started or retired
            await asyncio.wait(self._reap_tasks)
        await cancel_and_wait([roll_task])
        return self._exit_code

    def _stop(self) -> None:
        """Stop the workers: at the first signal they drain, at the second they end at once."""
        bound_s = KILL_GRACE_S + (0.0 if self._stop_event.is_set() else self.drain_timeout_s)
        self._stop_event.set()
        self.spawn.listener.close()  # the workers' descriptors keep it open while they drain
        for worker in self._living_workers:
            worker.send_signal(signal.SIGTERM)
        asyncio.get_running_loop().call_later(bound_s, self._kill)

    def _kill(self) -> None:
        for worker in self._living_workers:
            log.warning("%s did not stop in time and was killed", worker)
            worker.send_signal(signal.SIGKILL)

    async def _keep_worker(self, worker_index: int) -> None:
        """Keep a worker running in one slot: if it ends or cannot be started, try again after a pause."""
        workers, failure_count = self._workers_by_slot, 0
        while not self._stop_event.is_set():
            # A worker may already run: this function is restarted after an error.
            worker = workers[worker_index] or await self._start_worker()
            workers[worker_index] = worker
            ended_worker: Worker | None = None
            exit_code: int | None = None
            while worker is not None:
                self._announce_once()
                exit_code = await worker.process.wait()
                # A rolling restart may have replaced the worker.
                ended_worker, worker = (worker, workers[worker_index] if workers[worker_index] is not worker else None)
            workers[worker_index] = None
            if self._stop_event.is_set():
                return
            failure_count = 1 if ended_worker is not None and ended_worker.is_steady else failure_count + 1
            if self._is_hopeless(ended_worker, exit_code, failure_count):
                return
            if ended_worker is None:
                log.warning(
                    "no worker could be started: trying again in %.1f s", self.get_restart_pause_s(failure_count)
                )
            else:
                log.warning(
                    "%s ended with code %d: another starts in %.1f s",
                    ended_worker, exit_code, self.get_restart_pause_s(failure_count),
                )  # fmt: skip
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.get_restart_pause_s(failure_count)):
                    await self._stop_event.wait()

    def _is_hopeless(self, ended_worker: Worker | None, exit_code: int | None, failure_count: int) -> bool:
        """Return whether to stop restarting workers; never while any worker answers.

        `ended_worker` is the worker that ended with `exit_code`; None if its process could not even be started.
        """
        if any(worker.ready_at is not None for worker in self._living_workers):
            return False
        is_refused = exit_code == 2 and not self._is_announced  # invalid settings, which the worker has reported
        was_ready = ended_worker is not None and ended_worker.ready_at is not None
        if was_ready or not (is_refused or failure_count >= FAILED_STARTS_MAX):
            return False
        if not self._stop_event.is_set():
            failure_text = "no process" if ended_worker is None else f"{ended_worker} ended with code {exit_code}"
            log.error("%s: giving up after %d starts", failure_text, failure_count)
            self._exit_code = 2 if is_refused else 1
            self._stop()
        return True

    def _announce_once(self) -> None:
        is_whole = all(worker and worker.ready_at is not None for worker in self._workers_by_slot)
        if is_whole and not self._is_announced:
            self._is_announced = True
            self.announce_start()

    async def _start_worker(self) -> Worker | None:
        """Start a worker; return it once it is ready or ends; None if no process can be started."""
        slot = min(set(range(len(self._used_slots) + 1)) - self._used_slots)
        self._used_slots.add(slot)
        try:
            worker = await self.spawn(slot)
        except Exception as error:  # any error: running workers must not be affected
            self._used_slots.discard(slot)
            log.error("worker %d cannot be started: %s", slot, error, exc_info=not isinstance(error, OSError))
            return None
        self._living_workers.add(worker)
        reap_task = asyncio.create_task(self._reap_worker(worker))
        self._reap_tasks.add(reap_task)
        reap_task.add_done_callback(self._reap_tasks.discard)
        if self._stop_event.is_set():
            worker.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(START_MAX_S):
                ready_message = await asyncio.get_running_loop().sock_recv(worker.control_socket, len(READY_MESSAGE))
        except (TimeoutError, OSError):
            ready_message = b""
        if ready_message == READY_MESSAGE:
            worker.ready_at = time.monotonic()
        elif not self._stop_event.is_set():
            await self._end_worker(worker, KILL_GRACE_S)
        return worker

    async def _reap_worker(self, worker: Worker) -> None:
        await worker.process.wait()
        worker.control_socket.close()
        self._living_workers.discard(worker)
        try:
            self.spawn.clean(worker.worker_slot)
        except OSError as error:
            log.error("files of %s cannot be removed: %s", worker, error)
        self._used_slots.discard(worker.worker_slot)

    async def _end_worker(self, worker: Worker, end_timeout_s: float) -> None:
        try:
            async with asyncio.timeout(end_timeout_s):
                await worker.process.wait()
        except TimeoutError:
            log.warning("%s did not end in time and was killed", worker)
            worker.send_signal(signal.SIGKILL)
            await worker.process.wait()

    async def _roll_workers(self) -> None:
        """Replace the workers one by one; each new worker is ready before the old one is retired."""
        self._roll_event.clear()
        for worker_index, old_worker in enumerate(self._workers_by_slot):
            if self._stop_event.is_set():
                return
            if old_worker is None or old_worker.ready_at is None:
                continue  # it is still starting, so it has the current settings
            new_worker = await self._start_worker()
            if self._stop_event.is_set():
                return
            if new_worker is None or new_worker.ready_at is None:
                log.error(
                    "%s did not become ready: the remaining workers are not replaced", new_worker or "a new worker"
                )
                return
            if self._workers_by_slot[worker_index] is old_worker:
                self._workers_by_slot[worker_index] = new_worker
            else:  # it has died and was replaced meanwhile
                old_worker = new_worker
            old_worker.retire()
            await self._end_worker(old_worker, self.drain_timeout_s + KILL_GRACE_S)
        log.info("all workers have been replaced")

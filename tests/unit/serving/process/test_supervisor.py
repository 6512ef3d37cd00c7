"""The parent of workers outlives a system that has no room for another process, and so do the workers that run."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from serving.process.supervisor import FAILED_STARTS_MAX, WorkerSpawner, WorkerSupervisor
from tests.integration.serving_app import eventually

WORKER = "import socket, sys; control = socket.socket(fileno=int(sys.argv[2])); control.send(b'ready'); control.recv(9)"
"""A worker that is ready at once, and ends when it is retired or its parent is gone."""


class Parent:
    """Two workers and what they said, with a system that refuses processes as often as it is told to."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.announced = 0
        self.refusals = 0
        self._start_process: Callable[..., Any] = asyncio.create_subprocess_exec
        patch.setattr(asyncio, "create_subprocess_exec", self._start_or_refuse)
        listener = socket.create_server(("127.0.0.1", 0))
        spawn = WorkerSpawner(listener, folder, "", "info", ("-c", WORKER))
        self.workers = WorkerSupervisor(2, spawn, 1.0, self.announce, lambda _failures: 0.0)

    def announce(self) -> None:
        self.announced += 1

    async def _start_or_refuse(self, *arguments: Any, **options: Any) -> Any:
        if self.refusals > 0:
            self.refusals -= 1
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return await self._start_process(*arguments, **options)

    @property
    def pids(self) -> set[int]:
        """Process ids of the workers that are ready."""
        return {worker.process.pid for worker in self.workers._workers_by_slot if worker and worker.ready_at}

    async def are_two(self, without: frozenset[int] = frozenset()) -> bool:
        return len(self.pids - without) == 2


@pytest.fixture
async def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Parent]:
    parent = Parent(tmp_path, monkeypatch)
    running = asyncio.create_task(parent.workers.run())
    assert await eventually(parent.are_two)
    yield parent
    if not running.done():
        parent.workers._stop()
    assert await running == 0


async def test_a_successor_that_cannot_be_started_is_tried_again_while_the_others_go_on(
    parent: Parent, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = sorted(parent.pids)
    parent.refusals = 2

    with caplog.at_level(logging.WARNING, "serving.process.supervisor"):
        os.kill(first, signal.SIGKILL)

        async def has_successor() -> bool:
            return len(parent.pids) == 2 and first not in parent.pids

        assert await eventually(has_successor)

    assert second in parent.pids and parent.refusals == 0 and parent.announced == 1
    assert "cannot be started: [Errno 11] Resource temporarily unavailable" in caplog.text


async def test_a_rolling_restart_works_after_one_that_could_not_start_a_worker(
    parent: Parent, caplog: pytest.LogCaptureFixture
) -> None:
    pids_before = parent.pids
    parent.refusals = 1
    os.kill(os.getpid(), signal.SIGHUP)

    async def has_given_up() -> bool:
        return "the remaining workers are not replaced" in caplog.text

    assert await eventually(has_given_up)
    assert parent.pids == pids_before

    os.kill(os.getpid(), signal.SIGHUP)

    async def are_replaced() -> bool:
        return await parent.are_two(frozenset(pids_before))

    assert await eventually(are_replaced)


async def test_a_parent_that_can_start_no_process_at_all_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parent = Parent(tmp_path, monkeypatch)
    parent.refusals = 1_000

    assert await parent.workers.run() == 1

    assert parent.announced == 0 and 1_000 - parent.refusals <= 2 * FAILED_STARTS_MAX
    assert f"giving up after {FAILED_STARTS_MAX} starts" in caplog.text


async def test_an_announcement_that_fails_ends_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = Parent(tmp_path, monkeypatch)

    def announce() -> None:
        raise BrokenPipeError("nobody reads what is printed")

    parent.workers.announce_start = announce
    running = asyncio.create_task(parent.workers.run())
    assert await eventually(parent.are_two)
    pids = parent.pids
    (killed, _) = sorted(pids)
    with contextlib.suppress(ProcessLookupError):
        os.kill(killed, signal.SIGKILL)

    async def has_successor() -> bool:
        return len(parent.pids) == 2 and killed not in parent.pids

    assert await eventually(has_successor)
    assert len(parent.pids & pids) == 1
    parent.workers._stop()
    assert await running == 0

"""Work in a process of its own that is killed with SIGKILL: after some seconds, or at its n-th mark.

A mark is every moment around which a crash may leave another world behind: before each file is opened for writing,
renamed, linked or removed, before each piece of a Redis command, and before each reply.
"""

import itertools
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import redis

from cache.config.timetable import NIGHT_STEPS

PRELOAD = (*(f"precompute.steps.{step}" for step in NIGHT_STEPS), __name__)
"""A night imports each step only when it runs it."""
HANGS_S = 120.0

_FILE_EVENTS = frozenset({"os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"})
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT

# A warm interpreter without threads of its own, so that a step costs a fork and no imports.
_WARM = multiprocessing.get_context("forkserver")
_WARM.set_forkserver_preload(list(PRELOAD))


@dataclass(frozen=True, slots=True)
class Point:
    """The point at which work is killed: after `seconds`, or at mark number `mark` (from 1); never if both are None."""

    seconds: float | None = None
    mark_number: int | None = None

    def __str__(self) -> str:
        return f"mark {self.mark_number}" if self.seconds is None else f"{self.seconds * 1e3:.1f} ms"


NOWHERE = Point()


@dataclass(frozen=True, slots=True)
class CompletedWork:
    """Work that was not killed: its result, its duration, and the number of marks that it passed."""

    result: Any
    seconds: float
    mark_count: int

    def point(self, moments: random.Random) -> Point:
        """Return a random point of the same work, by time or by mark."""
        if moments.random() < 0.5:
            return Point(seconds=moments.uniform(0.0, self.seconds))
        return Point(mark_number=moments.randint(1, max(1, self.mark_count)))


def run(work: Callable[[], Any], point: Point = NOWHERE) -> CompletedWork | None:
    """Run picklable `work`; None when it was killed at `point`. Raises AssertionError when it fails or hangs."""
    receiving_end, theirs = _WARM.Pipe(duplex=False)
    process = _WARM.Process(target=_work, args=(work, point.mark_number, theirs))
    process.start()
    theirs.close()
    outcome: CompletedWork | str | None = None
    try:
        receiving_end.recv()
        if point.seconds is not None and not receiving_end.poll(point.seconds):
            process.kill()
        if not receiving_end.poll(HANGS_S):
            process.kill()
            raise AssertionError(f"{work} hangs")
        outcome = receiving_end.recv()
    except EOFError:
        pass  # killed before it could say anything
    finally:
        process.join()
        receiving_end.close()
    if isinstance(outcome, str):
        raise AssertionError(outcome)
    assert process.exitcode in ((0, -signal.SIGKILL) if outcome else (-signal.SIGKILL,))
    return outcome


def _work(work: Callable[[], Any], mark_number: int | None, pipe: Any) -> None:
    passed = _die_at(mark_number)
    pipe.send("begun")
    started_at = time.perf_counter()
    try:
        result = work()
    except BaseException:
        pipe.send(traceback.format_exc())
        return
    pipe.send(CompletedWork(result, time.perf_counter() - started_at, passed()))


def _die_at(number: int | None) -> Callable[[], int]:
    mark_counter = itertools.count(1)

    def pass_mark() -> None:
        if next(mark_counter) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _FILE_EVENTS or (event == "open" and int(arguments[2] or 0) & _WRITING):
            pass_mark()

    def marked(pieces: Iterable[Any]) -> Iterable[Any]:
        for piece in pieces:
            pass_mark()
            yield piece

    send = redis.connection.AbstractConnection.send_packed_command
    receive = redis.connection.AbstractConnection.read_response

    def send_marked(connection: Any, command: Any, check_health: bool = True) -> Any:
        pieces = [command] if isinstance(command, str | bytes) else command
        return send(connection, marked(pieces), check_health)

    def receive_marked(connection: Any, *arguments: Any, **options: Any) -> Any:
        pass_mark()
        return receive(connection, *arguments, **options)

    patched: Any = redis.connection.AbstractConnection
    patched.send_packed_command, patched.read_response = send_marked, receive_marked
    sys.addaudithook(heard)
    return lambda: next(mark_counter) - 1

"""Requests at given moments over raw sockets, whatever becomes of the earlier ones; times count from when each was due.

So a stall is felt by all whom it delays (no coordinated omission). A process of its own sends them: its pauses would
look like pauses of the service. A request for which no connection is free waits in line, and is given up when its time
has gone by.
"""

import gc
import multiprocessing
import select
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from tests.bench.tools.place import pin

SOURCES = ("none", "l1", "l2", "live", "previous", "default")
_CODES = {name[:2].encode(): code for code, name in enumerate(SOURCES)}
_SOURCE_KEY = b'"source":"'
_OVERLOADED = b'"overloaded"'
_AFTER_S = 5.0
"""How long after the last was due an answer is waited for, beside the time of so many at `_RATE_MIN`."""
_RATE_MIN = 500


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals:
    """Request `requests[which[i]]` is due `due[i]` seconds after the start; it is given up after `patience_s`."""

    url: str
    requests: Sequence[bytes]
    request_indexes: NDArray[np.int64]
    due: NDArray[np.float64]
    connections: int
    patience_s: float = float("inf")


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """Of each arrival: seconds from due to answer (inf: none), status (0: none), place in SOURCES, `overloaded`."""

    due: NDArray[np.float64]
    seconds: NDArray[np.float64]
    status: NDArray[np.int64]
    source: NDArray[np.int64]
    is_shed: NDArray[np.bool_]
    elapsed_s: float
    given_up: int
    busy: float

    def good(self, within_s: float) -> NDArray[np.bool_]:
        """Answered with 200 in time."""
        is_good: NDArray[np.bool_] = (self.status == 200) & (self.seconds <= within_s)
        return is_good


@contextmanager
def caller() -> Iterator[ProcessPoolExecutor]:
    """The process that sends: `submit(drive, arrivals)`."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_prepare) as pool:
        yield pool


def _prepare() -> None:
    pin(0, -1)
    gc.disable()


@dataclass(slots=True, eq=False)
class _Line:
    """One connection; `at` is the arrival that it waits for, -1 for none."""

    where: tuple[str, int]
    wire: socket.socket = field(init=False)
    data: bytes = b""
    at: int = -1

    def __post_init__(self) -> None:
        self.wire = socket.create_connection(self.where)
        self.wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def drive(arrivals: Arrivals) -> Outcomes:
    """Sends everything, each when it is due or as soon after as a connection is free."""
    gc.collect()
    return _Drive(arrivals).run()


class _Drive:
    def __init__(self, arrivals: Arrivals) -> None:
        count = len(arrivals.due)
        self._arrivals = arrivals
        self._due = arrivals.due.tolist()
        self._request_indexes = arrivals.request_indexes.tolist()
        self._seconds = np.full(count, np.inf)
        self._status = np.zeros(count, np.int64)
        self._source = np.zeros(count, np.int64)
        self._is_shed = np.zeros(count, np.bool_)
        parts = urlsplit(arrivals.url)
        self._where = parts.hostname or "127.0.0.1", parts.port or 80
        self._poll = select.epoll()
        self._lines: dict[int, _Line] = {}
        self._idle: list[_Line] = []
        self._given_up = self._open = 0

    def run(self) -> Outcomes:
        for _ in range(self._arrivals.connections):
            self._connect()
        self._settle()
        spent, started_at = time.process_time(), time.monotonic()
        try:
            elapsed_s = self._loop(started_at)
        finally:
            for line in self._lines.values():
                line.wire.close()
            self._poll.close()
        busy = (time.process_time() - spent) / (time.monotonic() - started_at)
        return Outcomes(
            self._arrivals.due, self._seconds, self._status, self._source, self._is_shed,
            elapsed_s, self._given_up, busy,
        )  # fmt: skip

    def _settle(self) -> None:
        """Wait until the service has accepted every connection, which is not measured."""
        line = self._idle[-1]
        line.wire.sendall(self._arrivals.requests[0])
        while not _is_whole(line.data):
            piece = line.wire.recv(1 << 18)
            if not piece:
                raise RuntimeError("the service closed a connection before it was used")
            line.data += piece

    def _connect(self) -> None:
        line = _Line(self._where)
        self._lines[line.wire.fileno()] = line
        self._poll.register(line.wire.fileno(), select.EPOLLIN)
        self._idle.append(line)

    def _loop(self, started_at: float) -> float:
        due, count, patience_s = self._due, len(self._due), self._arrivals.patience_s
        waiting: deque[int] = deque()
        up_to, last = 0, started_at
        give_up = started_at + due[-1] + _AFTER_S + count / _RATE_MIN
        while up_to < count or waiting or self._open:
            now_s = time.monotonic()
            if now_s > give_up:
                break
            while up_to < count and started_at + due[up_to] <= now_s:
                waiting.append(up_to)
                up_to += 1
            while waiting and (self._idle or now_s - started_at - due[waiting[0]] > patience_s):
                at = waiting.popleft()
                if now_s - started_at - due[at] > patience_s:
                    self._given_up += 1
                else:
                    self._send(self._idle.pop(), at)
            rest_s = started_at + due[up_to] - time.monotonic() if up_to < count else 0.05
            # `poll` rounds up to milliseconds, so calls that are due in between would be sent in clumps.
            ready, _, _ = select.select([self._poll], [], [], min(max(rest_s, 0.0), 0.05))
            for number, _ in self._poll.poll(0) if ready else ():
                if self._receive(self._lines[number], started_at):
                    last = time.monotonic()
        self._given_up += len(waiting)
        return last - started_at

    def _send(self, line: _Line, at: int) -> None:
        line.at, line.data = at, b""
        self._open += 1
        try:
            line.wire.send(self._arrivals.requests[self._request_indexes[at]])
        except OSError:
            self._handle_disconnect(line)

    def _handle_disconnect(self, line: _Line) -> None:
        """A connection that the service closed: idle ones are, after a while."""
        if line.at >= 0:
            self._open -= 1
        else:
            self._idle.remove(line)
        self._poll.unregister(line.wire.fileno())
        del self._lines[line.wire.fileno()]
        line.wire.close()
        self._connect()

    def _receive(self, line: _Line, started_at: float) -> bool:
        """Receive bytes; return whether an answer is complete."""
        try:
            data = line.wire.recv(1 << 18)
        except OSError:
            data = b""
        if not data:
            self._handle_disconnect(line)
            return False
        data = line.data = line.data + data if line.data else data
        if not _is_whole(data):
            return False
        number = line.at
        self._seconds[number] = time.monotonic() - started_at - self._due[number]
        self._status[number] = int(data[9:12])
        source_start = data.find(_SOURCE_KEY)
        if source_start > 0:
            self._source[number] = _CODES[data[source_start + len(_SOURCE_KEY) : source_start + len(_SOURCE_KEY) + 2]]
            self._is_shed[number] = data.find(_OVERLOADED, source_start) > 0
        line.at = -1
        self._open -= 1
        self._idle.append(line)
        return True


def _is_whole(data: bytes) -> bool:
    """Whether these bytes are a response of one piece, head and body."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return False
    at = data.lower().find(b"content-length:", 0, end) + 15
    return len(data) >= end + 4 + int(data[at : data.index(b"\r", at)])

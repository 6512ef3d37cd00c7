"""Callers that behave well: requests at given moments from 127.0.0.2, each noting when it was sent."""

import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.bench.tools.hostile_server import CALLERS, Times

CONNECTIONS = 32
NEW_EVERY = 50
"""One request in so many comes on a connection of its own."""


class Answered(NamedTuple):
    """How many requests, how many of them without a 200 within the deadline, and the slowest, all as callers saw it."""

    requests: int
    missed: int
    slowest_ms: float


class _Call(NamedTuple):
    wire: socket.socket
    sent_at: float
    data: bytearray


class Calls:
    """One run."""

    def __init__(self, where: tuple[str, int], times: Path, deadline_s: float) -> None:
        self._where, self._deadline_s = where, deadline_s
        self._times = Times(times)
        self._poll = select.epoll()
        self._under_way: dict[int, _Call] = {}
        self._free: deque[socket.socket] = deque(self._wire() for _ in range(CONNECTIONS))
        self._missed, self._slowest_s = 0, 0.0

    def run(self, requests: Sequence[bytes], due: Sequence[float]) -> Answered:
        """Sends each when it is due, or as soon after as it can."""
        started_at = time.monotonic()
        for number, (request, at) in enumerate(zip(requests, due, strict=True)):
            self._wait(started_at + at)
            self._send(request, is_new=number % NEW_EVERY == 0)
        give_up = time.monotonic() + 2.0
        while self._under_way and time.monotonic() < give_up:
            self._hear(0.01)
        self._missed += len(self._under_way)
        return Answered(len(due), self._missed, round(self._slowest_s * 1000, 3))

    def _wait(self, due_at: float) -> None:
        while (rest_s := due_at - time.monotonic()) > 0:
            self._hear(rest_s)
        self._hear(0)

    def _wire(self) -> socket.socket:
        wire = socket.create_connection(self._where, timeout=5, source_address=(CALLERS, 0))
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._poll.register(wire.fileno(), select.EPOLLIN)
        return wire

    def _send(self, request: bytes, *, is_new: bool) -> None:
        if self._free and not is_new:
            wire = self._free.popleft()
        else:
            if self._free:
                self._close(self._free.popleft())
            wire = self._wire()
        self._times.sent_at_ns[wire.getsockname()[1]] = time.monotonic_ns()
        self._under_way[wire.fileno()] = _Call(wire, time.monotonic(), bytearray())
        wire.send(request)

    def _close(self, wire: socket.socket) -> None:
        self._poll.unregister(wire.fileno())
        wire.close()

    def _hear(self, seconds: float) -> None:
        # `poll` rounds up to milliseconds, so calls that are due in between would be sent in clumps.
        ready, _, _ = select.select([self._poll], [], [], seconds)
        for number, _ in self._poll.poll(0) if ready else ():
            if number in self._under_way:
                self._receive(number)
            else:  # idle, and closed by the service
                wire = next(free_wire for free_wire in self._free if free_wire.fileno() == number)
                self._free.remove(wire)
                self._close(wire)

    def _receive(self, number: int) -> None:
        call = self._under_way[number]
        try:
            data = call.wire.recv(1 << 18)
        except OSError:
            data = b""
        call.data.extend(data)
        if data and not _is_whole(call.data):
            return
        del self._under_way[number]
        took_s = time.monotonic() - call.sent_at
        self._slowest_s = max(self._slowest_s, took_s)
        self._missed += took_s > self._deadline_s or not call.data.startswith(b"HTTP/1.1 200")
        if data and b"connection: close" not in call.data and len(self._free) < CONNECTIONS:
            self._free.append(call.wire)
        else:
            self._close(call.wire)


def _is_whole(data: bytearray) -> bool:
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return False
    length = bytes(data[:end]).lower().partition(b"content-length:")[2].partition(b"\r")[0]
    return len(data) >= end + 4 + int(length)


def call(
    where: tuple[str, int], times: Path, requests: Sequence[bytes], due: Sequence[float], deadline_s: float
) -> Answered:
    """One run, for a process of its own."""
    return Calls(where, times, deadline_s).run(requests, due)

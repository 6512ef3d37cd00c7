"""Peers of a service that ask nothing, or never end what they ask.

Run as `python -m tests.bench.tools.hostile_peers URL KIND...`.

As many peers as words, each of the kind that its word names. Says `ready` once all are connected. A peer that the
service ended comes back after a while, as one would that means it.
"""

import contextlib
import heapq
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

from tests.bench.tools.place import pin

BACK_S = 2.5, 7.5
"""Until a peer that was ended comes back, each after a time of its own: all at once is how they come at first."""
STAYS_S = 15.0, 25.0
"""A peer that does not read cannot tell that it was ended: it begins anew after this."""

_TRICKLED = (
    b"POST /v1/lookup/user_topk HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer wrong\r\nContent-Length: 8000000\r\n\r\n{"
)
KINDS: dict[str, tuple[bytes, bytes, float]] = {
    "idle": (b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n", b"", 0.0),
    "silent": (b"", b"", 0.0),
    "headers": (b"GET / HTTP/1.1\r\n", b"a:b\r\n" * 800, 0.01),
    "half": (b"GET / HTTP/1.1\r\nHost: a\r\nX: ", b"x", 1.0),
    "pipeline": (b"GET /v1/lookup/user_topk/nobody HTTP/1.1\r\nHost: a\r\n\r\n" * 500, b"", 0.0),
    "trickle": (_TRICKLED, b" ", 1.0),
}
"""What a peer sends first, and again how often (seconds)."""
HOSTILE = tuple(kind for kind in KINDS if kind != "idle")


class Peers:
    """All peers in one loop."""

    def __init__(self, where: tuple[str, int], kinds: Sequence[str]) -> None:
        self._where, self._kinds = where, kinds
        self._wires: dict[int, tuple[socket.socket, int]] = {}
        self._poll = select.epoll()
        self._due: list[tuple[float, int, int, Callable[[int], None]]] = []
        self._numbers: list[int] = [-1] * len(kinds)
        self._sequence_number = 0
        self._rng = random.Random(0)
        self.disconnect_count = 0

    def open(self, peer_index: int) -> None:
        """Connect the peer with this index, and send its first bytes."""
        wire = socket.socket()
        if self._kinds[peer_index] == "pipeline":
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        wire.settimeout(5)
        try:
            wire.connect(self._where)
        except OSError:
            wire.close()
            self._after(self._rng.uniform(*BACK_S), peer_index, self.open)
            return
        wire.setblocking(False)
        number = wire.fileno()
        self._wires[number], self._numbers[peer_index] = (wire, peer_index), number
        self._poll.register(number, select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR)
        first, _, every_s = KINDS[self._kinds[peer_index]]
        self._send(wire, first)
        if every_s:
            self._after(every_s, peer_index, self._send_more)
        elif self._kinds[peer_index] == "pipeline":
            self._after(self._rng.uniform(*STAYS_S), peer_index, self._anew)

    def run(self) -> None:
        """Run for ever."""
        while True:
            rest_s = self._due[0][0] - time.monotonic() if self._due else 1.0
            for number, _ in self._poll.poll(min(max(rest_s, 0.001), 1.0)):
                self._handle_disconnect(self._wires[number][1])
            while self._due and self._due[0][0] <= time.monotonic():
                _, _, peer_index, act = heapq.heappop(self._due)
                act(peer_index)

    def _send(self, wire: socket.socket, data: bytes) -> None:
        with contextlib.suppress(OSError):  # full, or closed: the poll tells
            wire.send(data)

    def _send_more(self, peer_index: int) -> None:
        if (number := self._numbers[peer_index]) >= 0:
            _, more, every_s = KINDS[self._kinds[peer_index]]
            self._send(self._wires[number][0], more)
            self._after(every_s, peer_index, self._send_more)

    def _anew(self, peer_index: int) -> None:
        if self._numbers[peer_index] >= 0:
            self._handle_disconnect(peer_index, 0.0)

    def _handle_disconnect(self, peer_index: int, back_s: float | None = None) -> None:
        number = self._numbers[peer_index]
        self._poll.unregister(number)
        self._wires.pop(number)[0].close()
        self._numbers[peer_index] = -1
        self.disconnect_count += 1
        self._after(self._rng.uniform(*BACK_S) if back_s is None else back_s, peer_index, self.open)

    def _after(self, seconds: float, peer_index: int, act: Callable[[int], None]) -> None:
        self._sequence_number += 1
        heapq.heappush(self._due, (time.monotonic() + seconds, self._sequence_number, peer_index, act))


@contextmanager
def peers(url: str, kinds: Sequence[str]) -> Iterator[None]:
    """Peers of these kinds in a process of their own, connected."""
    command = [sys.executable, "-m", "tests.bench.tools.hostile_peers", url, *kinds]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("the peers did not start")
        yield
    finally:
        process.kill()
        process.wait()


def main(arguments: Sequence[str]) -> None:
    """Run until killed."""
    pin(0, -1)
    # Callers and Redis, on the same core, always preempt this process: only what reaches the service is measured.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    where = urlsplit(arguments[0])
    all_peers = Peers((where.hostname or "", where.port or 0), arguments[1:])
    for peer_index in range(len(arguments) - 1):
        all_peers.open(peer_index)
        if peer_index % 50 == 49:
            time.sleep(0.02)
    print("ready", flush=True)
    all_peers.run()


if __name__ == "__main__":
    main(sys.argv[1:])

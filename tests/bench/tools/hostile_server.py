"""`python -m serving` that notes, for the callers of a bench, the time from a request's arrival to its answer's write.

A caller writes when it sent a request into memory that both see, at the number of its port: on one machine that is when
the request arrived, also while the service was busy with others and had not read it. The service's code is as it is: a
subclass of its connections gets a transport that looks at the clock when it is written to.
"""

import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import serving.http.lookup_connection
from serving.__main__ import main
from tests.bench.tools.place import pin

CALLERS = "127.0.0.2"
"""Where callers call from; peers do so from 127.0.0.1."""
FILE = "LARDER_BENCH_TIMES"
PORTS, TIMES = 1 << 16, 1 << 20


class Times:
    """Memory of callers, service and bench: when each port sent, and how long answers took since (nanoseconds)."""

    def __init__(self, path: Path) -> None:
        size = 8 * (1 + PORTS + 2 * TIMES)
        if not path.exists():
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size)
        mapped_array: NDArray[np.int64] = np.frombuffer(self._memory, np.int64)
        self._count, self.sent_at_ns = mapped_array[:1], mapped_array[1 : 1 + PORTS]
        self._durations_ns, self._is_get = mapped_array[1 + PORTS :].reshape(2, TIMES)

    def add(self, duration_ns: int, is_get: bool) -> None:
        """Add the time of one answer."""
        at = int(self._count[0])
        if at < TIMES:
            self._durations_ns[at], self._is_get[at] = duration_ns, is_get
            self._count[0] = at + 1

    def drain_times(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """All times since the last call, and which of them are of a GET."""
        count = int(self._count[0])
        durations_and_kinds = (self._durations_ns[:count].copy(), self._is_get[:count].astype(np.bool_))
        self._count[0] = 0
        return durations_and_kinds


class _Noting:
    """A transport that notes the first write after each arrival."""

    def __init__(self, transport: Any, times: Times) -> None:
        self._transport, self._times = transport, times
        self._port = transport.get_extra_info("peername")[1]
        self.is_closing = transport.is_closing
        self.is_get = True

    def write(self, data: bytes) -> None:
        self._transport.write(data)
        if sent_ns := int(self._times.sent_at_ns[self._port]):
            self._times.sent_at_ns[self._port] = 0
            self._times.add(time.monotonic_ns() - sent_ns, self.is_get)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Timed(serving.http.lookup_connection.LookupConnection):
    """A connection whose answers are timed if it is a caller's."""

    times: Times

    def connection_made(self, transport: Any) -> None:
        """See uvicorn."""
        if transport.get_extra_info("peername")[0] == CALLERS:
            transport = _Noting(transport, self.times)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """See uvicorn."""
        if isinstance(self.transport, _Noting):
            self.transport.is_get = data[:4] == b"GET "
        super().data_received(data)


if __name__ == "__main__":
    pin(0, 0)
    Timed.times = Times(Path(os.environ[FILE]))
    serving.http.lookup_connection.LookupConnection = Timed  # type: ignore[misc]
    sys.exit(main())

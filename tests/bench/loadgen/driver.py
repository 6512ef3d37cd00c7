"""Turns LoadGen's queries into HTTP requests; runs in its own environment, where nothing of this project is imported.

The job on standard input names the scenario, the service's URL, the file of samples and the folder for LoadGen's logs.
LoadGen's own thread sends where a connection is free, else a query waits; this thread receives. A sample's latency is
LoadGen's: in the Server scenario it counts from when the query was due. The answer is what its logs cannot say: answers
that were not 200, those of strangers that came from the model, the driver's processor time and the seconds it took.
"""

import gc
import json
import select
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from typing import Any, NamedTuple
from urllib.parse import urlsplit

NS_PER_S = 1_000_000_000
LIVE = b'"source":"live"'
_SWITCH_S = 0.0002


class Sample:
    """One sample: a request of its own, and an entity in a request of many; a stranger's number goes between parts."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.request = [part.encode() for part in raw["request"]]
        self.entity = [part.encode() for part in raw["entity"]]
        self.is_stranger = len(self.request) > 1


class Query(NamedTuple):
    """A request under way; `ids` are LoadGen's of the samples that it asks for."""

    ids: list[int]
    request: bytes
    is_stranger: bool


class Wire:
    """A keep-alive connection; `query` is what it waits for an answer to."""

    def __init__(self, where: tuple[str, int]) -> None:
        self.socket = socket.create_connection(where)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.data = b""
        self.query: Query | None = None


class Driver:
    """The system under test, as LoadGen calls it."""

    def __init__(self, job: dict[str, Any], loadgen: Any) -> None:
        with open(job["samples"]) as lines:  # noqa: PTH123 - a plain script
            self.samples = [Sample(json.loads(line)) for line in lines]
        parts = urlsplit(job["url"])
        self._where = str(parts.hostname), int(parts.port or 80)
        self._loadgen = loadgen
        self._path, self._k = job["path"], job["k"]
        self._is_together = job["scenario"] == "MultiStream"
        self._lock = threading.Lock()
        self._poll = select.epoll()
        self._wires: dict[int, Wire] = {}
        self._idle: deque[Wire] = deque()  # used in turn, so that none stands idle for long
        self._waiting: deque[Query] = deque()
        self._strangers = job["first_stranger"]
        self.stop_event = threading.Event()
        self.error_counts: dict[str, int] = {}
        self.strangers = self.live = self.retried = 0
        for _ in range(job["connections"]):
            self._connect()

    def issue(self, queries: Any) -> None:
        """Called by LoadGen with the samples of one query, or of several that were due."""
        if self._is_together:
            entities = b",".join(self._text(self.samples[query_sample.index].entity) for query_sample in queries)
            self._send(Query([query_sample.id for query_sample in queries], self._batch_request(entities), False))
            return
        for query_sample in queries:
            sample = self.samples[query_sample.index]
            self._send(Query([query_sample.id], self._text(sample.request), sample.is_stranger))

    def _text(self, parts: list[bytes]) -> bytes:
        if len(parts) == 1:
            return parts[0]
        self._strangers += 1
        return (b"%012d" % self._strangers).join(parts)

    def _batch_request(self, entities: bytes) -> bytes:
        body = b'{"entities":[%b],"k":%d}' % (entities, self._k)
        return b"POST %b HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
            self._path.encode(),
            len(body),
            body,
        )

    def _send(self, query: Query) -> None:
        with self._lock:
            if not self._idle:
                self._waiting.append(query)
                return
            wire = self._idle.popleft()
            wire.query = query
        self._write(wire, query)

    def _write(self, wire: Wire, query: Query) -> None:
        with suppress(OSError):  # the receiving thread sees it, too
            wire.socket.sendall(query.request)

    def receive(self) -> None:
        """Receive answers until LoadGen has all of them."""
        while not self.stop_event.is_set():
            answered: list[int] = []
            for number, _ in self._poll.poll(0.05):
                self._read(self._wires[number], answered)
            if answered:
                self._complete(answered)

    def _complete(self, ids: list[int]) -> None:
        response = self._loadgen.QuerySampleResponse
        self._loadgen.QuerySamplesComplete([response(sample_id, 0, 0) for sample_id in ids])

    def _read(self, wire: Wire, answered: list[int]) -> None:
        try:
            piece = wire.socket.recv(1 << 18)
        except OSError:
            piece = b""
        if not piece:
            self._handle_disconnect(wire, answered)
            return
        data = wire.data = wire.data + piece if wire.data else piece
        if not is_whole(data):
            return
        wire.data = b""
        query = wire.query
        if query is None:
            raise RuntimeError(f"an answer that nobody asked for: {data[:200]!r}")
        if not data.startswith(b"HTTP/1.1 200"):
            self._note(data[9:12].decode(errors="replace"))
        if query.is_stranger:
            self.strangers += 1
            self.live += data.find(LIVE) > 0
        answered += query.ids
        self._free(wire)

    def _note(self, error_name: str) -> None:
        self.error_counts[error_name] = self.error_counts.get(error_name, 0) + 1

    def _free(self, wire: Wire) -> None:
        with self._lock:
            wire.query = self._waiting.popleft() if self._waiting else None
            if wire.query is None:
                self._idle.append(wire)
        if wire.query is not None:
            self._write(wire, wire.query)

    def _handle_disconnect(self, wire: Wire, answered: list[int]) -> None:
        """A closed connection: idle ones are after a while, and a query that was just sent goes to another."""
        self._poll.unregister(wire.socket.fileno())
        del self._wires[wire.socket.fileno()]
        with self._lock:
            query = wire.query
            if query is None:
                self._idle.remove(wire)
        wire.socket.close()
        if query is not None and wire.data:
            self._note("cut short")
            answered += query.ids
        elif query is not None:
            self.retried += 1
            self._send(query)
        self._connect()

    def _connect(self) -> None:
        wire = Wire(self._where)
        self._wires[wire.socket.fileno()] = wire
        self._poll.register(wire.socket.fileno(), select.EPOLLIN)
        self._free(wire)


def is_whole(data: bytes) -> bool:
    """Whether these bytes are a response of one piece, head and body."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return False
    at = data.lower().find(b"content-length:", 0, end) + 15
    return len(data) >= end + 4 + int(data[at : data.index(b"\r", at)])


def settings_of(job: dict[str, Any], loadgen: Any) -> Any:
    """LoadGen's settings for one performance run."""
    settings = loadgen.TestSettings()
    settings.mode = loadgen.TestMode.PerformanceOnly
    settings.scenario = getattr(loadgen.TestScenario, job["scenario"])
    settings.min_duration_ms = int(job["seconds"] * 1000)
    settings.min_query_count = 1
    settings.qsl_rng_seed = settings.sample_index_rng_seed = settings.schedule_rng_seed = job["seed"]
    match job["scenario"]:
        case "Server":
            settings.server_target_qps = job["rate"]
            settings.server_target_latency_ns = int(job["bound_s"] * NS_PER_S)
            settings.server_target_latency_percentile = 0.99
            settings.server_coalesce_queries = True
        case "Offline":
            settings.offline_expected_qps = job["rate"]
        case "MultiStream":
            settings.multi_stream_samples_per_query = job["samples_per_query"]
            settings.multi_stream_expected_latency_ns = int(NS_PER_S / job["rate"])
    return settings


def logs_to(folder: str, loadgen: Any) -> Any:
    """LoadGen's log settings: summary and detail in a folder, no trace."""
    output = loadgen.LogOutputSettings()
    output.outdir = folder
    output.copy_summary_to_stdout = False
    logs = loadgen.LogSettings()
    logs.log_output = output
    logs.enable_trace = False
    return logs


def main() -> None:
    """One run."""
    job = json.load(sys.stdin)
    loadgen = import_module("mlperf_loadgen")
    sys.setswitchinterval(_SWITCH_S)
    driver = Driver(job, loadgen)
    count = len(driver.samples)
    system = loadgen.ConstructSUT(driver.issue, lambda: None)
    library = loadgen.ConstructQSL(count, count, lambda _: None, lambda _: None)
    gc.collect()
    gc.disable()
    spent, started_at = time.process_time(), time.monotonic()

    def test() -> None:
        try:
            loadgen.StartTestWithLogSettings(system, library, settings_of(job, loadgen), logs_to(job["log"], loadgen))
        finally:
            driver.stop_event.set()

    testing = threading.Thread(target=test)
    testing.start()
    driver.receive()
    testing.join()
    elapsed_s = time.monotonic() - started_at
    loadgen.DestroyQSL(library)
    loadgen.DestroySUT(system)
    driver_report = {
        "version": f"mlcommons-loadgen {version('mlcommons-loadgen')}",
        "seconds": elapsed_s,
        "busy": (time.process_time() - spent) / elapsed_s,
        "bad": driver.error_counts,
        "strangers": driver.strangers,
        "live": driver.live,
        "retried": driver.retried,
    }
    print(json.dumps(driver_report), flush=True)


if __name__ == "__main__":
    main()

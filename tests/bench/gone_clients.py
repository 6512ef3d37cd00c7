"""What clients that give up cost a ready answer and a health probe, beside as many clients that wait.

- `l1_p99_of_4`, `l1_p99_of_16`: 99th percentile of the time that a keep-alive client waits for ids in L1, with so many
  clients that post 40 strangers and 20 known ids, close their connection 4 ms later and begin again, over the same with
  clients that wait for their answers (at most 2 is wanted). Both alternate in one service.
- `health_of_4`, `health_of_16`: the slowest `GET /healthz`, on a connection of its own, of all runs with clients that
  leave, in ms over 200 ms (at most 1 is wanted).

Clients are a process each, as many callers are: on a machine of two cores they share one of them, so that what the
service gets is what that core can send. A/A is the second half of the runs with patient clients over the first.
"""

import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from urllib.parse import quote, urlsplit

import numpy as np

from tests.bench.read_path import TABLE, make_case
from tests.bench.tools.harness import Options, Promise, Ratio, Report, parse
from tests.bench.tools.http_load import Program, pin_programs, program
from tests.bench.tools.place import cores_at_start, own_server
from tests.integration.nights import environment

CLIENTS = (4, 16)
READY_IDS = 200
PROBE_MS = 200.0
_PAUSE_S, _PROBE_PAUSE_S = 0.005, 0.1
_QUICK_PROBES = 3
_TOLERANCE = 0.5
"""A/A of a 99th percentile beside processes that share a core differs by so much; the margin is a factor of two."""


class Run(NamedTuple):
    """Milliseconds of ready answers and health probes, and the clients' statuses."""

    p99_ms: float
    slowest_ms: float
    health_ms: float
    requests: int
    answered: int


class Bench(NamedTuple):
    """The service, ids that it knows, and the length of a run."""

    larder: Program
    ids: Sequence[str]
    ids_file: Path
    seconds: float

    def run(self, clients: int, mode: str) -> Run:
        """Measure ready answers and health probes with so many clients."""
        where = urlsplit(self.larder.url)
        started = [
            subprocess.Popen(
                [*_prefix(), sys.executable, "-m", "tests.bench.tools.leaving_clients", str(where.hostname),
                 str(where.port), str(seed), str(self.seconds), mode, str(self.ids_file)],
                stdout=subprocess.PIPE, text=True,
            )
            for seed in range(clients)
        ]  # fmt: skip
        stop_event, probes = threading.Event(), list[float]()
        probing = threading.Thread(target=self._probe, args=(stop_event, probes))
        probing.start()
        try:
            durations_ms = self._time_lookups(self.seconds + 0.5)
        finally:
            client_outputs = [client.communicate()[0] for client in started]
            stop_event.set()
            probing.join()
        self._settle()
        counts = [[int(count_text) for count_text in line.split()] for line in client_outputs]
        return Run(
            round(float(np.percentile(durations_ms, 99, method="higher")), 3),
            round(max(durations_ms), 1),
            round(max(probes), 1),
            sum(requests for requests, _, _ in counts),
            sum(answered for _, answered, _ in counts),
        )

    def warm(self) -> None:
        """Look up every id, so that all answers are ready."""
        for _ in range(2):
            for name in self.ids:
                self._get(_path(name))

    def shed(self) -> str:
        """Counts of `larder_shed_total` by stage."""
        lines = self._get("/metrics").decode().splitlines()
        shed_samples = [line.split() for line in lines if line.startswith("larder_shed_total{")]
        return " ".join(f"{name.split(chr(34))[1]}={float(count):g}" for name, count in shed_samples)

    def _get(self, path: str) -> bytes:
        """Return the body of an answer on a connection of its own."""
        where = urlsplit(self.larder.url)
        connection = HTTPConnection(str(where.hostname), where.port, timeout=120)
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        finally:
            connection.close()

    def _time_lookups(self, seconds: float) -> list[float]:
        where, draw = urlsplit(self.larder.url), random.Random(1)
        connection = HTTPConnection(str(where.hostname), where.port, timeout=60)
        durations_ms, ends_at = list[float](), time.monotonic() + seconds
        while time.monotonic() < ends_at:
            started_at = time.perf_counter()
            connection.request("GET", _path(draw.choice(self.ids)))
            connection.getresponse().read()
            durations_ms.append(1000 * (time.perf_counter() - started_at))
            time.sleep(_PAUSE_S)
        connection.close()
        return durations_ms

    def _settle(self) -> None:
        """Wait until the service has answered or dropped all requests."""
        quick = 0
        while quick < _QUICK_PROBES:
            started_at = time.perf_counter()
            self._get("/healthz")
            quick = quick + 1 if time.perf_counter() - started_at < PROBE_MS / 1000 else 0
            time.sleep(_PROBE_PAUSE_S)

    def _probe(self, stop_event: threading.Event, durations_ms: list[float]) -> None:
        while not stop_event.wait(_PROBE_PAUSE_S):
            started_at = time.perf_counter()
            self._get("/healthz")
            durations_ms.append(1000 * (time.perf_counter() - started_at))


def _path(name: str) -> str:
    return f"/v1/lookup/{TABLE}/{quote(name)}?k=20"


def _prefix() -> list[str]:
    """Keep clients off the service's core, if there are several cores."""
    if len(cores_at_start) < 2:
        return []
    return ["taskset", "-c", ",".join(map(str, cores_at_start[1:]))]


def measure(report: Report, bench: Bench, rounds: int) -> None:
    """Alternate runs with clients that wait and clients that leave."""
    bench.run(CLIENTS[0], "leave")
    for clients in CLIENTS:
        runs: dict[str, list[Run]] = {"wait": [], "leave": []}
        for number in range(rounds):
            for mode in ("wait", "leave") if number % 2 == 0 else ("leave", "wait"):
                run = bench.run(clients, mode)
                runs[mode].append(run)
                print(f"{clients} that {mode}: {run}", file=sys.stderr, flush=True)
        patient, leaving_p99s_ms = ([run.p99_ms for run in runs[mode]] for mode in ("wait", "leave"))
        half = rounds // 2
        report.ratios[f"l1_p99_of_{clients}"] = Ratio(
            round(statistics.median(leaving_p99s_ms) / statistics.median(patient), 3),
            round(statistics.median(patient[half:]) / statistics.median(patient[:half]), 3),
            rounds, statistics.median(leaving_p99s_ms), statistics.median(patient), _TOLERANCE,
        )  # fmt: skip
        health_ms = max(run.health_ms for run in runs["leave"])
        report.ratios[f"health_of_{clients}"] = Ratio(round(health_ms / PROBE_MS, 3), 1.0, rounds, health_ms, PROBE_MS)
        for mode in runs:
            for name in ("slowest_ms", "health_ms"):
                report.figures[f"{clients} that {mode}: worst {name}"] = max(getattr(run, name) for run in runs[mode])
            report.figures[f"{clients} that {mode}: requests, answered"] = (
                f"{sum(run.requests for run in runs[mode])}, {sum(run.answered for run in runs[mode])}"
            )
        quick = "runs of two seconds have few requests in their slowest hundredth"
        report.promises[f"l1_p99_of_{clients}"] = Promise(maximum=2.0, quick=quick)
        report.promises[f"health_of_{clients}"] = Promise(maximum=1.0)
    report.figures["shed"] = bench.shed()


def main() -> None:
    """Measure and report."""
    options: Options = parse(__doc__ or "")
    report = Report("gone_clients", ("fastapi", "uvicorn", "uvloop"))
    with own_server() as redis, TemporaryDirectory(prefix="larder-bench-") as name:
        folder = Path(name)
        case = make_case(folder, redis.url, quick=True)
        ids = case.users[:READY_IDS]
        ids_file = folder / "ids"
        ids_file.write_text("\n".join(case.users))
        installed = {"LARDER_DEADLINE_MS": "300", "LARDER_L2_DEADLINE_MS": "75"}
        serve = [sys.executable, "-m", "serving", "--port", "0", "--log-level", "error"]
        env = {**environment(case.night), **installed}
        with program(serve, folder / "serving.log", env) as larder:
            report.figures["service"] = pin_programs(larder)
            bench = Bench(larder, ids, ids_file, 2.0 if options.quick else 6.0)
            bench.warm()
            measure(report, bench, options.rounds)
    report.show(options)


if __name__ == "__main__":
    main()

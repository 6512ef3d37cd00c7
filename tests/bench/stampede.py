"""Many callers of the same cold answers at once: what is computed, what Redis is asked, how long it takes.

- `loads_per_key`: inferences over cold answers, the worst of all rounds of two scenes in one process: 10,000 callers of
  one answer and 10 callers of each of 1,000 (`--quick`: a fifth), over the whole read path and a real model, without
  HTTP.
- `two_replicas_loads_per_key`: the same two scenes in two processes at once.

Deadlines and the wait for another process are long, so that the machine's speed decides nothing. Counts are exact, so
A/A is 1; seconds and processor time stand beside them. Other libraries' decorators run over the
same Redis with a loader of 5 ms in place of the model, where there is an environment for them (they need an older
redis-py): `python -m venv .venv-peers && .venv-peers/bin/pip install cashews "aiocache[redis]" "cacheme[redis]"`.
"""

import asyncio
import json
import multiprocessing
import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import redis

from serving.bootstrap import running
from serving.config.settings import ServingConfig
from serving.http.routes import Service
from serving.requests.models import LookupRequest
from serving.requests.parsing import lookup_from_body
from tests.bench.read_path import TABLE, Case, make_case
from tests.bench.tools import stampede_peers
from tests.bench.tools.harness import Options, Ratio, Report, parse
from tests.bench.tools.place import own_server, pin
from tests.integration.serving_app import settings

PEERS = Path(".venv-peers/bin/python")
SCENES = {False: ((1, 10_000), (1_000, 10)), True: ((1, 2_000), (200, 10))}
"""Cold answers, and callers of each; smaller with `--quick`."""
_PEER_S = {False: 60.0, True: 6.0}
_LONG_MS = 60_000.0


@dataclass(frozen=True, slots=True)
class Run:
    """What one stampede cost a process; `reads` are look-ups of overlays in Redis, by everybody."""

    loads: int
    batches: int
    reads: int
    seconds: float
    cpu_s: float
    sources: tuple[str, ...]


def asks(service: Service, items: list[str], name: str, keys: int) -> list[LookupRequest]:
    """Return one request for each of so many users unknown to the night."""
    rng = random.Random(name)
    lookups = []
    for number in range(keys):
        entity = {"id": f"{name}-{number}", "history": rng.sample(items, 20)}
        body = json.dumps({"entities": [entity], "k": 20}).encode()
        lookups.append(lookup_from_body({}, body, "json", TABLE, service.limits))
    return lookups


async def stampede(service: Service, url: str, lookups: list[LookupRequest], waiters: int) -> Run:
    """Start all callers at once."""
    served = service.capture_served()
    loads, batches = _inferred(service)
    reads, cpu, started_at = _reads(url), time.process_time(), time.perf_counter()
    answers = await asyncio.gather(
        *(service.ladder.lookup(served, lookup, time.monotonic()) for lookup in lookups * waiters)
    )
    seconds, cpu_s = time.perf_counter() - started_at, time.process_time() - cpu
    loads_now, batches_now = _inferred(service)
    sources = {str(answer["source"]) for (answer,) in answers}
    return Run(
        int(loads_now - loads), int(batches_now - batches), _reads(url) - reads, seconds, cpu_s,
        tuple(sorted(sources)),
    )  # fmt: skip


def _inferred(service: Service) -> tuple[float, float]:
    (family,) = service.metrics.live_batch.collect()
    value_by_sample = {sample.name: sample.value for sample in family.samples}
    return value_by_sample["larder_live_batch_size_sum"], value_by_sample["larder_live_batch_size_count"]


def _reads(url: str) -> int:
    with redis.Redis.from_url(url, protocol=2) as connection:
        stats = connection.info("commandstats")
    return int(stats.get("cmdstat_pttl", {}).get("calls", 0))


def replica(config: ServingConfig, items: list[str], pipe: Connection) -> None:
    """A process that answers stampedes until its pipe says None; each is named, with its size."""

    async def serve() -> None:
        async with running(config) as service:
            while (order := await asyncio.to_thread(pipe.recv)) is not None:
                name, keys, waiters = order
                lookups = asks(service, items, name, keys)
                pipe.send("ready")
                await asyncio.to_thread(pipe.recv)
                pipe.send(await stampede(service, config.redis_url, lookups, waiters))

    asyncio.run(serve())


@contextmanager
def replicas(case: Case, config: ServingConfig, count: int) -> Iterator[list[Connection]]:
    """So many processes with one service each."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(count)]
    processes = [context.Process(target=replica, args=(config, case.items, theirs)) for _, theirs in pipes]
    parent_ends = [parent_end for parent_end, _ in pipes]
    try:
        for process in processes:
            process.start()
        yield parent_ends
        for pipe in parent_ends:
            pipe.send(None)
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def measure(report: Report, case: Case, options: Options) -> None:
    """Run with one process, then two; no answer of a stampede was requested before."""
    # The counts must not depend on the speed of the machine, so no deadline may end a call.
    config = settings(
        case.night,
        deadline_ms=_LONG_MS,
        deadline_max_ms=_LONG_MS,
        l2_deadline_ms=_LONG_MS / 2,
        lease_wait_ms=_LONG_MS / 2,
    )
    rounds = options.rounds
    for count, name in ((1, "loads_per_key"), (2, "two_replicas_loads_per_key")):
        with replicas(case, config, count) as pipes:
            scenes = {
                keys: [_run_simultaneously(pipes, f"{name}-{keys}-{at}", keys, waiters) for at in range(rounds)]
                for keys, waiters in SCENES[options.quick]
            }
        for keys, runs in scenes.items():
            _figures(report, f"{count} process(es), {keys:,} answers", runs)
        loads, keys = max(
            ((sum(run.loads for run in process_runs), keys) for keys, runs in scenes.items() for process_runs in runs),
            key=lambda pair: pair[0] / pair[1],
        )  # fmt: skip
        report.ratios[name] = Ratio(loads / keys, 1.0, rounds, loads, keys)


def _run_simultaneously(pipes: list[Connection], name: str, keys: int, waiters: int) -> list[Run]:
    for pipe in pipes:
        pipe.send((name, keys, waiters))
    for pipe in pipes:
        pipe.recv()
    for pipe in pipes:
        pipe.send("go")
    return [pipe.recv() for pipe in pipes]


def _figures(report: Report, name: str, runs: list[list[Run]]) -> None:
    loads = [sum(run.loads for run in process_runs) for process_runs in runs]
    middle = sorted(runs, key=lambda process_runs: max(run.seconds for run in process_runs))[len(runs) // 2]
    report.figures[f"{name}: loads"] = f"{min(loads):,} to {max(loads):,}"
    report.figures[f"{name}: inferences' batches"] = sum(run.batches for run in middle)
    report.figures[f"{name}: overlay reads"] = max(run.reads for run in middle)
    report.figures[f"{name}: seconds"] = round(max(run.seconds for run in middle), 3)
    report.figures[f"{name}: processor seconds"] = round(sum(run.cpu_s for run in middle), 3)
    report.figures[f"{name}: sources"] = ", ".join(sorted({source for run in middle for source in run.sources}))


def peers(report: Report, url: str, options: Options) -> None:
    """Each library once in each scene."""
    if not PEERS.exists():
        report.figures["other libraries"] = f"absent: no {PEERS}, see this bench's docstring"
        return
    for library in stampede_peers.LIBRARIES:
        for keys, waiters in SCENES[options.quick]:
            name = f"{library}, {keys:,} answers x {waiters:,}"
            report.figures[name] = _peer(library, url, keys, waiters, _PEER_S[options.quick])


def _peer(library: str, url: str, keys: int, waiters: int, limit_s: float) -> str:
    program = Path(stampede_peers.__file__)
    command: list[str | Path] = [PEERS, program, library, url, str(keys), str(waiters)]
    try:
        completed_process = subprocess.run(command, capture_output=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"not done after {limit_s:g} s"
    if completed_process.returncode:
        return f"failed: {completed_process.stderr.decode().strip().splitlines()[-1]}"
    value_by_name = json.loads(completed_process.stdout.splitlines()[-1])
    return ", ".join(f"{name} {value}" for name, value in value_by_name.items())


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    report = Report("stampede", ("redis", "hiredis", "onnxruntime"))
    with own_server() as server, TemporaryDirectory(prefix="larder-bench-") as folder:
        report.figures["placement"] = f"Redis on {pin(server.pid, -1)}, all else anywhere"
        case = make_case(Path(folder), server.url, options.quick)
        measure(report, case, options)
        peers(report, server.url, options)
    report.show(options)


if __name__ == "__main__":
    main()

"""One answer from each tier beside the least it could cost: bare HTTP, a bare Redis client, the bare model.

- `l1_vs_bare_asgi`: requests/s of `GET /v1/lookup/user_topk/{id}?k=20` from L1 over a raw ASGI app that sends the same
  bytes, both on uvicorn with uvloop and httptools, 32 keep-alive connections from wrk over 200 ids.
- `l2_vs_bare_client`: reads/s of 616-byte records through the whole read path with an empty L1 (directory, flight,
  merged pipeline, fingerprint) over `redis.asyncio` `GET` of the same bytes from a pool, 32 tasks each.
- `live_vs_bare_model`: live answers/s through ladder, flight, micro-batch and thread, 32 in flight, each with a history
  of its own, over the same inferences called directly in batches of 32 (tower, search, exclusion, encoding).

A rate over HTTP is void unless the server used at least 95 % of its core.
"""

import asyncio
import itertools
import json
import random
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal
from urllib.parse import quote

import redis.asyncio
import uvloop

from cache.format.redis_keys import Keyspace, hash_hex
from cache.l2.tier import RemoteConfig, RemoteTier
from cache.model.input_preparation import LiveInput
from cache.tiers.l1 import LocalTier, NegativeCache
from cache.tiers.reads import Hit
from cache.tiers.tiered import TieredCache
from precompute.config.settings import NightConfig, TableConfig
from serving.bootstrap import running
from serving.engine.batch_inference import compute
from serving.engine.entity import find_record_key
from serving.engine.micro_batcher import InferenceJob
from serving.http.routes import Service
from serving.requests.models import LookupRequest
from serving.requests.parsing import lookup_from_body
from tests.bench.tools.harness import Options, Report, alternate, parse
from tests.bench.tools.http_load import BUSY, Load, Program, paths_script, pin_programs, program, wrk
from tests.bench.tools.place import own_server, pin, unpin
from tests.integration.nights import environment, histories, prepare, publish_night
from tests.integration.serving_app import settings

CONNECTIONS = 32
BATCH = 32
TABLE: Literal["user_topk"] = "user_topk"
DATA_UNTIL = "2026-01-29T00:00:00Z"

Rate = Callable[[], Coroutine[None, None, float]]


@dataclass(frozen=True, slots=True)
class Case:
    """A published night and ids it knows."""

    folder: Path
    night: NightConfig
    generation: str
    users: list[str]
    items: list[str]


def make_case(folder: Path, redis_url: str, quick: bool) -> Case:
    """A real night of 616-byte records."""
    night = prepare(folder, redis_url, users=2_000 if quick else 10_000, items=2_000)
    tables: dict[str, TableConfig] = {TABLE: TableConfig(TABLE, k=100)}
    night = replace(night, tables=tables, page_bytes=NightConfig().page_bytes)
    generation = publish_night(night, DATA_UNTIL)
    history_by_user = histories(night, DATA_UNTIL)
    items = sorted({item for history in history_by_user.values() for item in history})
    return Case(folder, night, generation, sorted(history_by_user), items)


def over_http(report: Report, case: Case, options: Options) -> None:
    """L1 hits beside the bare app, both on the first core, wrk on the last."""
    users = random.Random(0).sample(case.users, 200)
    paths = [f"/v1/lookup/{TABLE}/{quote(user, safe='')}?k=20" for user in users]
    script = paths_script(case.folder / "paths.lua", paths)
    serve = [sys.executable, "-m", "serving", "--port", "0", "--log-level", "warning"]
    body = case.folder / "body.json"
    with program(serve, case.folder / "serving.log", environment(case.night)) as larder:
        body.write_bytes(body_of(larder, paths))
        bare_command: list[str | Path] = [sys.executable, "-m", "tests.bench.tools.bare_asgi", body]
        with program(bare_command, case.folder / "bare.log") as bare:
            core = pin_programs(larder, bare)
            report.figures["placement, HTTP"] = f"servers on {core}, wrk and redis on the last core"
            report.figures["body bytes"] = body.stat().st_size
            _compare(report, options, larder, bare, script)
        sources = {json.loads(_get(larder.url + path))["source"] for path in paths}
        report.figures["sources under load"] = ", ".join(sorted(sources))


def body_of(larder: Program, paths: list[str]) -> bytes:
    """An answer of middle length; all of them are in L1 and ready after it."""
    for _ in range(2):
        for path in paths:
            _get(larder.url + path)
    answers = [_get(larder.url + path) for path in paths]
    return sorted(answers, key=len)[len(answers) // 2]


def _compare(report: Report, options: Options, larder: Program, bare: Program, script: Path) -> None:
    duration_s = 2 if options.quick else 5
    loads: dict[str, list[Load]] = {"larder": [], "bare": []}

    def run(name: str, target: Program) -> Callable[[], float]:
        def measure_rate() -> float:
            load = wrk(target, script, connections=CONNECTIONS, duration_s=duration_s)
            loads[name].append(load)
            return load.requests_per_s

        return measure_rate

    ratio = alternate(run("bare", bare), {"l1": run("larder", larder)}, rounds=options.rounds, rounds_max=7)["l1"]
    for name, runs in loads.items():
        middle = sorted(runs, key=lambda load: load.busy)[len(runs) // 2]
        report.figures[f"{name}: share of its core used"] = round(middle.busy, 3)
        report.figures[f"{name}: p99 ms"] = sorted(load.p99_ms for load in runs)[len(runs) // 2]
        if middle.busy < BUSY:
            ratio = replace(ratio, tolerance=-1.0)  # void, whatever its A/A
    report.ratios["l1_vs_bare_asgi"] = ratio


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url) as response:  # noqa: S310 - our own loopback server
        response_body: bytes = response.read()
    return response_body


def in_process(report: Report, case: Case, options: Options) -> None:
    """L2 and live without HTTP, on the first core; Redis is on the last."""
    report.figures["placement, in process"] = f"client on {pin(0, 0)}, redis on the last core"
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stack = AsyncExitStack()
        # The model runs in its own thread, so it may use both cores, as it may when it is called directly.
        config = settings(case.night, deadline_ms=10_000.0)
        service = runner.run(stack.enter_async_context(running(config)))
        reads, bare_reads = runner.run(_readers(stack, service, case, options))
        report.ratios["l2_vs_bare_client"] = alternate(
            lambda: runner.run(bare_reads()), {"l2": lambda: runner.run(reads())},
            rounds=options.rounds,
        )["l2"]  # fmt: skip
        unpin()
        live, bare_model = _models(service, case, options)
        report.ratios["live_vs_bare_model"] = alternate(
            bare_model, {"live": lambda: runner.run(live())}, rounds=options.rounds
        )["live"]
        runner.run(stack.aclose())


async def _readers(stack: AsyncExitStack, service: Service, case: Case, options: Options) -> tuple[Rate, Rate]:
    snapshot = service.capture_served().live
    table = snapshot.manifest.tables[TABLE]
    record_keys = [find_record_key(snapshot, table, user.encode()) for user in case.users]
    url = case.night.redis_url or ""
    remote = RemoteTier(RemoteConfig(url, deadline_s=5.0), Keyspace(case.night.namespace))
    stack.push_async_callback(remote.aclose)
    tiers = TieredCache(LocalTier(0), NegativeCache(0, 0.0), remote)
    client = redis.asyncio.Redis.from_url(url, protocol=2, max_connections=CONNECTIONS)
    stack.push_async_callback(client.aclose)
    names = [f"bench:{hash_hex(record_key.hash_or_digest)}" for record_key in record_keys]
    read_results = [await tiers.get(snapshot.view, record_key) for record_key in record_keys]
    for name, read_result in zip(names, read_results, strict=True):
        if not isinstance(read_result, Hit) or read_result.tier != "l2":
            raise RuntimeError(f"a known user is not in L2: {read_result}")
        await client.set(name, read_result.record)
    count = (10_000 if options.quick else 50_000) // CONNECTIONS

    async def read(number: int) -> None:
        record_key = record_keys[number % len(record_keys)]
        outcome = await tiers.get(snapshot.view, record_key)
        if outcome.__class__ is not Hit:
            raise RuntimeError(f"a known user is not in L2: {outcome}")

    async def get(number: int) -> None:
        if not await client.get(names[number % len(names)]):
            raise RuntimeError("a record is gone")

    async def rate(read_one: Callable[[int], Awaitable[None]]) -> float:
        async def caller(first: int) -> None:
            for number in range(first, first + count):
                await read_one(number)

        started_at = time.perf_counter()
        await asyncio.gather(*(caller(caller_index * 61) for caller_index in range(CONNECTIONS)))
        return CONNECTIONS * count / (time.perf_counter() - started_at)

    return lambda: rate(read), lambda: rate(get)


def _models(service: Service, case: Case, options: Options) -> tuple[Rate, Callable[[], float]]:
    rng = random.Random(1)
    numbers = itertools.count()
    count = 1_024 if options.quick else 8_192

    def histories_of(number: int) -> list[list[str]]:
        return [rng.sample(case.items, rng.randint(5, 30)) for _ in range(number)]

    def asks() -> list[LookupRequest]:
        lookups = []
        for history in histories_of(count):
            entity = {"id": f"stranger-{next(numbers)}", "history": history}
            body = json.dumps({"entities": [entity], "k": 20}).encode()
            lookups.append(lookup_from_body({}, body, "json", TABLE, service.limits))
        return lookups

    async def live() -> float:
        waiting = iter(asks())

        async def caller() -> None:
            for lookup in waiting:
                (answer,) = await service.ladder.lookup(service.capture_served(), lookup, time.monotonic())
                if answer["source"] != "live":
                    raise RuntimeError(f"not a live answer: {answer}")

        started_at = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(CONNECTIONS)))
        return count / (time.perf_counter() - started_at)

    def bare() -> float:
        snapshot = service.capture_served().live
        jobs = [
            InferenceJob(snapshot, TABLE, LiveInput(tuple(item_id.encode() for item_id in history)), 1, 1)
            for history in histories_of(count)
        ]
        started_at = time.perf_counter()
        for at in range(0, count, BATCH):
            compute(jobs[at : at + BATCH])
        return count / (time.perf_counter() - started_at)

    return live, bare


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    report = Report("read_path", ("redis", "hiredis", "uvicorn", "uvloop", "onnxruntime"))
    with own_server() as server, TemporaryDirectory(prefix="larder-bench-") as folder:
        case = make_case(Path(folder), server.url, options.quick)
        over_http(report, case, options)
        in_process(report, case, options)
    report.show(options)


if __name__ == "__main__":
    main()

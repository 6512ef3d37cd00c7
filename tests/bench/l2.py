"""Reads that L1 cannot answer, over HTTP, beside what a plain client of the same Redis costs.

- `single_vs_fastapi_get`: `GET /v1/lookup/user_topk/{id}?k=20`, 32 in flight, over a FastAPI route that awaits one
  redis-py `GET` of 616 bytes; `single_vs_bare_asgi`: over a raw ASGI app that sends as many bytes and asks nobody.
- `batch100_json_vs_mget`: entities of `POST /v1/lookup/user_topk` with 100 ids and k = 20 over keys of a redis-py
  asyncio `MGET` of 100 such values without HTTP.
- `batch100_binary_vs_mget`: the same with Arrow IPC streams in both directions.

L1 holds nothing. The figure is requests (entities, keys) per second of processor time of the process that asks Redis.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import redis.asyncio
import uvloop

from serving.arrow.schema import ARROW_MEDIA_TYPE
from serving.client.calls import write_arrow_ids
from tests.bench.read_path import TABLE, Case, make_case
from tests.bench.tools.harness import Options, Report, alternate, compare, parse
from tests.bench.tools.http_load import Program, pin_programs, program
from tests.bench.tools.place import own_server, pin
from tests.bench.tools.sockets import per_cpu_s, request
from tests.integration.nights import environment

RECORD_BYTES = 616
BATCH = 100
TASKS = 4
_NO_L1 = "1"
"""Bytes: nothing fits."""


def measure(report: Report, case: Case, redis_url: str, options: Options) -> None:
    """Servers and client on the first core, Redis on the last."""
    body = case.folder / "body.json"
    body.write_bytes(bytes(RECORD_BYTES))
    serve = [sys.executable, "-m", "serving", "--port", "0", "--log-level", "warning"]
    plain_app: list[str | Path] = [sys.executable, "-m", "tests.bench.tools.plain_fastapi", body]
    env = environment(case.night, LARDER_L1_BYTES=_NO_L1)
    with ExitStack() as stack:
        larder = stack.enter_context(program(serve, case.folder / "serving.log", env))
        fastapi_server = stack.enter_context(program([*plain_app, redis_url], case.folder / "plain.log"))
        bare_app: list[str | Path] = [sys.executable, "-m", "tests.bench.tools.bare_asgi", body]
        bare = stack.enter_context(program(bare_app, case.folder / "bare.log"))
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        names = runner.run(_fill(redis_url, len(case.users)))
        where = pin(0, 0)
        report.figures["placement"] = f"servers on {pin_programs(larder, fastapi_server, bare)}, client on {where}"
        report.figures["unit"] = "per second of processor time"
        _singles(report, case, larder, (fastapi_server, bare), names, options)
        mget = _mget(runner, redis_url, names, 100 if options.quick else 1_000)
        path, batches = f"/v1/lookup/{TABLE}", _batches(case.users)
        texts = [request(path, json.dumps({"entities": ids, "k": 20}).encode()) for ids in batches]
        streams = [request(path, write_arrow_ids(ids, {"k": "20"}), ARROW_MEDIA_TYPE) for ids in batches]
        count = 200 if options.quick else 2_000
        forms = {"batch100_json_vs_mget": texts, "batch100_binary_vs_mget": streams}

        def rate(posts: list[bytes]) -> Callable[[], float]:
            return lambda: BATCH * per_cpu_s(larder, posts, count, connections=TASKS)

        ratio_by_name = alternate(mget, {name: rate(posts) for name, posts in forms.items()}, rounds=options.rounds)
        report.ratios |= ratio_by_name


def _singles(
    report: Report, case: Case, larder: Program, baselines: tuple[Program, Program], names: list[str], options: Options
) -> None:
    count = 4_000 if options.quick else 30_000
    gets = [request(f"/redis/{name}") for name in names]
    lookups = [request(f"/v1/lookup/{TABLE}/{quote(user, safe='')}?k=20") for user in case.users]
    fastapi_server, bare = baselines
    ratio_by_pair = compare(
        {
            "fastapi_get": lambda: per_cpu_s(fastapi_server, gets, count),
            "bare_asgi": lambda: per_cpu_s(bare, [request("/")], count),
        },
        {"single": lambda: per_cpu_s(larder, lookups, count)},
        rounds=options.rounds,
    )
    for (baseline, candidate), ratio in ratio_by_pair.items():
        report.ratios[f"{candidate}_vs_{baseline}"] = ratio


def _batches(users: list[str]) -> list[list[str]]:
    rng = random.Random(0)
    return [rng.sample(users, BATCH) for _ in range(64)]


async def _fill(redis_url: str, count: int) -> list[str]:
    """Store values of a record's size, one per user."""
    rng = random.Random(1)
    names = [f"bench-{number}" for number in range(count)]
    async with redis.asyncio.Redis.from_url(redis_url, protocol=2) as client:
        for name in names:
            await client.set(name, rng.randbytes(RECORD_BYTES))
    return names


def _mget(runner: asyncio.Runner, redis_url: str, names: list[str], count: int) -> Callable[[], float]:
    batches = _batches(names)

    async def measure_rate() -> float:
        client = redis.asyncio.Redis.from_url(redis_url, protocol=2, max_connections=TASKS)
        async with client:
            await client.mget(batches[0])
            waiting = iter(range(count))

            async def caller() -> None:
                for number in waiting:
                    await client.mget(batches[number % len(batches)])

            cpu_start_s = time.thread_time()
            await asyncio.gather(*(caller() for _ in range(TASKS)))
            return count * BATCH / (time.thread_time() - cpu_start_s)

    return lambda: runner.run(measure_rate())


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    report = Report("l2", ("redis", "hiredis", "fastapi", "uvicorn", "uvloop"))
    with own_server() as server, TemporaryDirectory(prefix="larder-bench-") as folder:
        case = make_case(Path(folder), server.url, options.quick)
        measure(report, case, server.url, options)
    report.show(options)


if __name__ == "__main__":
    main()

"""Events into the service: accepted per second of its processor time, and by the clock.

`python -m tests.bench.events.ingest`. One worker over a Redis of its own with `appendonly yes` and `appendfsync
everysec`; POST /v1/events over 4 connections.

- `batches`: 500 events in a request; `singles`: one.
- baseline: what the least program pays that writes the same events unseen: a body parsed, each event one `XADD` of a
  redis-py pipeline, in this process.

Each round sends new events, of users that have few each; the stream is emptied before it.
"""

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
import redis

from cache.format.redis_keys import Keyspace
from tests.bench.tools.harness import Options, Report, compare, parse
from tests.bench.tools.http_load import Program, pin_programs, program
from tests.bench.tools.place import pin
from tests.bench.tools.sockets import drive, request
from tests.integration.events.durable_redis import DurableRedis, durable_redis

ROOT = Path(__file__).parents[3]
BATCH, CONNECTIONS, USERS = 500, 4, 20_000
KEYS = Keyspace("bench")
SETTINGS = """\
[events]
enabled = true
durability = "everysec"
stream_bytes = 1073741824
of_one = 1000000
"""


def bodies(numbers: Iterator[int], count: int, batch: int) -> list[bytes]:
    """Bodies of so many requests, each event with an id that no other has."""
    now_s = time.time()
    return [
        orjson.dumps(
            {
                "events": [
                    {
                        "user": f"u-{number % USERS}",
                        "item": f"i-{number % 40_981}",
                        "id": f"{number:x}",
                        "time": now_s,
                        "type": "click",
                    }
                    for number in itertools.islice(numbers, batch)
                ]
            }
        )
        for _ in range(count)
    ]


@contextmanager
def service(folder: Path, url: str) -> Iterator[Program]:
    """A service without a generation: it answers no lookup, and takes events in."""
    (folder / "larder.toml").write_text(SETTINGS)
    environ = {
        "LARDER_CONFIG": str(folder / "larder.toml"), "LARDER_NAMESPACE": KEYS.namespace, "REDIS_URL": url,
        "LARDER_ARTIFACTS": str(folder / "artifacts"), "LARDER_STATE": str(folder / "state"), "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = ["env", "-C", str(ROOT), sys.executable, "-m", "serving", "--port", "0", "--log-level", "error"]
    with program(command, folder / "serving.log", environ) as running:
        yield running


def through(
    target: Program,
    server: DurableRedis,
    numbers: Iterator[int],
    count: int,
    batch: int,
    rates_by_measure: dict[str, list[float]],
) -> Callable[[], float]:
    """Return a function that runs one way once; the figure is events per second of the service's processor time."""

    def run() -> float:
        with server.client() as client:
            client.flushall()
            requests = [request("/v1/events", body) for body in bodies(numbers, count, batch)]
            redis_s_before = spent_s(client)
            driven = drive(target, requests, count, CONNECTIONS)
            redis_s = spent_s(client) - redis_s_before
            if (length := client.xlen(KEYS.events)) != count * batch:
                raise RuntimeError(f"{count * batch} events were sent, {length} are there")
        rates_by_measure["by the clock"].append(driven.per_s * batch)
        rates_by_measure["per second of Redis' processor time"].append(count * batch / max(redis_s, 1e-9))
        return driven.per_cpu_s * batch

    return run


def spent_s(client: "redis.Redis") -> float:
    """Return the processor time of Redis' main thread so far."""
    cpu_info = client.info("cpu")
    return float(cpu_info["used_cpu_user_main_thread"]) + float(cpu_info["used_cpu_sys_main_thread"])


def written(server: DurableRedis, numbers: Iterator[int], count: int) -> Callable[[], float]:
    """Return a function that runs the baseline once."""

    def run() -> float:
        with server.client() as client:
            client.flushall()
            request_bodies = bodies(numbers, count, BATCH)
            cpu_start_s = time.process_time()
            for body in request_bodies:
                with client.pipeline(transaction=False) as pipeline:
                    for event in orjson.loads(body)["events"]:
                        pipeline.xadd(KEYS.events, {b"e": orjson.dumps(event)})
                    pipeline.execute()
            return count * BATCH / (time.process_time() - cpu_start_s)

    return run


def median(values: Sequence[float]) -> float:
    """Value in the middle."""
    return sorted(values)[len(values) // 2]


def measure(report: Report, folder: Path, options: Options) -> None:
    """Both ways beside the baseline, in alternating rounds."""
    numbers = itertools.count()
    batches, singles = (60, 2_000) if options.quick else (200, 10_000)
    with durable_redis(folder / "redis", "everysec") as server, service(folder, server.url) as target:
        with server.client() as client:
            report.figures["redis"] = str(client.info("server")["redis_version"])
            pin(int(client.info("server")["process_id"]), -1)
        report.figures["placement"] = f"service on {pin_programs(target)}"
        rates_by_kind: dict[str, dict[str, list[float]]] = {
            name: {"by the clock": [], "per second of Redis' processor time": []} for name in ("batches", "singles")
        }
        ratio_by_pair = compare(
            {"": written(server, numbers, batches)},
            {
                "batches": through(target, server, numbers, batches, BATCH, rates_by_kind["batches"]),
                "singles": through(target, server, numbers, singles, 1, rates_by_kind["singles"]),
            },
            rounds=options.rounds,
        )
    for (_, name), ratio in ratio_by_pair.items():
        report.ratios[f"{name}_vs_xadd"] = ratio
        report.figures[f"{name}: events per second of the service's processor time"] = round(ratio.candidate)
        for of, values in rates_by_kind[name].items():
            report.figures[f"{name}: events per second {of}"] = round(median(values))
    report.figures["events in a batch"] = BATCH


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    report = Report("ingest", ("redis", "hiredis", "orjson", "uvicorn", "uvloop"))
    with TemporaryDirectory(prefix="larder-bench-") as folder:
        measure(report, Path(folder), options)
    report.show(options)


if __name__ == "__main__":
    main()

"""Traffic that no cache can help: every id is new and brings a history of its own.

`vs_no_cache`: lookups of one id, answered per second of the server's processor time, over the same service without any
cache: nothing is looked up and nothing is kept. At least 0.9 is wanted. Such traffic has been going on for a while, so
the service has seen that hardly an input comes again, and leaves overlays unread but for probes. `always_vs_no_cache`
is with `overlay_reads = "always"`: each overlay is read, each lease taken. `batch_vs_no_cache` and `batch_always_...`
are the same for requests of 100 entities. Their model is tiny (2,000 items of 16 dimensions), so that little hides what
a miss costs; `catalogue_...` are the same over 40,981 items of 128 dimensions (drawn; int8 tower, the index that the
night chooses). `in_process_...` are without HTTP, by the clock: the path from body to answer, tiny model.

The servers, their model's threads with them, are on the first core; sender and Redis on the last.
"""

import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop

from serving.bootstrap import running
from serving.config.settings import ServingConfig
from serving.http.routes import Service
from serving.process.resources import freeze_objects
from serving.requests.models import LookupRequest
from serving.requests.parsing import lookup_from_body
from tests.bench.read_path import TABLE, Case, make_case
from tests.bench.tools.catalogue import make_catalogue
from tests.bench.tools.harness import Options, Report, alternate, parse
from tests.bench.tools.http_load import Program, pin_programs, program
from tests.bench.tools.place import own_server
from tests.bench.tools.sockets import drive, request
from tests.bench.tools.uncached import no_tiers
from tests.integration.nights import environment
from tests.integration.serving_app import settings

STRANGERS_BEFORE = 3_000
"""Until the service knows what traffic this is."""

IN_FLIGHT = {1: 64, 100: 4}
"""Requests at once, by entities per request."""

SERVICES: Mapping[str, tuple[str, str]] = {
    "no_cache": ("tests.bench.tools.uncached", "auto"),
    "": ("serving", "auto"),
    "always_": ("serving", "always"),
}
"""Module and `overlay_reads` of each."""


class Strangers:
    """Requests with ids and histories that never repeat."""

    def __init__(self, case: Case) -> None:
        self._items = case.items
        self._rng = random.Random(1)
        self._numbers = itertools.count()

    def bodies(self, requests: int, entities: int) -> list[bytes]:
        """Return so many JSON bodies."""
        return [
            json.dumps({"entities": [self._entity() for _ in range(entities)], "k": 20}).encode()
            for _ in range(requests)
        ]

    def requests(self, requests: int, entities: int) -> list[bytes]:
        """Return the same bodies with their HTTP heads."""
        return [request(f"/v1/lookup/{TABLE}", body) for body in self.bodies(requests, entities)]

    def _entity(self) -> dict[str, object]:
        history = self._rng.sample(self._items, self._rng.randint(5, 30))
        return {"id": f"stranger-{next(self._numbers)}", "history": history}


def over_http(report: Report, case: Case, strangers: Strangers, options: Options, prefix: str = "") -> None:
    """Measure both request sizes over one night; rows are named with the prefix."""
    with ExitStack() as stack:
        servers: dict[str, Program] = {}
        for name, (module, reads) in SERVICES.items():
            command = [sys.executable, "-m", module, "--port", "0", "--log-level", "warning"]
            night = environment(case.night, LARDER_OVERLAY_READS=reads, LARDER_DEADLINE_MS="10000")
            log = case.folder / f"{name}serving.log"
            servers[name] = stack.enter_context(program(command, log, night))
        where = pin_programs(*servers.values())
        report.figures["placement"] = f"servers on {where}, sender and redis on the last core"
        for server in servers.values():
            drive(server, strangers.requests(STRANGERS_BEFORE, 1), STRANGERS_BEFORE, IN_FLIGHT[1])
        for entities, size in ((1, prefix), (100, f"{prefix}batch_")):
            count = (800 if options.quick else 4_000) // entities
            busy: dict[str, list[float]] = {name: [] for name in servers}

            def run(
                name: str, entities: int = entities, count: int = count, busy: dict[str, list[float]] = busy
            ) -> Callable[[], float]:
                def measure_rate() -> float:
                    requests = strangers.requests(count, entities)
                    driven = drive(servers[name], requests, count, IN_FLIGHT[entities])
                    busy[name].append(driven.busy)
                    return entities * driven.per_cpu_s

                return measure_rate

            ratio_by_name = alternate(
                run("no_cache"),
                {name: run(name) for name in servers if name != "no_cache"},
                rounds=options.rounds,
                rounds_max=7 if options.quick else None,
            )
            for name, ratio in ratio_by_name.items():
                report.ratios[f"{size}{name}vs_no_cache"] = ratio
            busy_share = min(statistics.median(busy_shares) for busy_shares in busy.values())
            report.figures[f"{size or 'single_'}share of the core used, at least"] = round(busy_share, 3)


def in_process(report: Report, case: Case, strangers: Strangers, options: Options) -> None:
    """Measure the same without HTTP, in this process."""
    config = settings(case.night, deadline_ms=10_000.0)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stack = AsyncExitStack()

        def service(config: ServingConfig) -> Service:
            return runner.run(stack.enter_async_context(running(config)))

        services = {"": service(config), "always_": service(replace(config, overlay_reads="always"))}
        with no_tiers():
            services["no_cache"] = service(config)
        for running_service in services.values():
            runner.run(_answer(running_service, strangers.bodies(STRANGERS_BEFORE, 1), IN_FLIGHT[1]))
        freeze_objects()
        for entities, size in ((1, ""), (100, "batch_")):
            count = (800 if options.quick else 4_000) // entities

            def run(name: str, entities: int = entities, count: int = count) -> Callable[[], float]:
                def measure_rate() -> float:
                    bodies = strangers.bodies(count, entities)
                    started_at = time.perf_counter()
                    runner.run(_answer(services[name], bodies, IN_FLIGHT[entities]))
                    return count * entities / (time.perf_counter() - started_at)

                return measure_rate

            ratio_by_name = alternate(
                run("no_cache"),
                {name: run(name) for name in services if name != "no_cache"},
                rounds=options.rounds,
                rounds_max=7 if options.quick else None,
            )
            for name, ratio in ratio_by_name.items():
                report.ratios[f"in_process_{size}{name}vs_no_cache"] = ratio
        runner.run(stack.aclose())


async def _answer(service: Service, bodies: Sequence[bytes], in_flight: int) -> None:
    waiting = iter(bodies)

    async def caller() -> None:
        for body in waiting:
            lookup: LookupRequest = lookup_from_body({}, body, "json", TABLE, service.limits)
            for answer in await service.ladder.lookup(service.capture_served(), lookup, time.monotonic()):
                if answer["source"] != "live":
                    raise RuntimeError(f"not a live answer: {answer}")

    await asyncio.gather(*(caller() for _ in range(in_flight)))


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    report = Report("all_miss", ("redis", "onnxruntime", "faiss-cpu", "uvicorn", "uvloop"))
    with own_server() as server, TemporaryDirectory(prefix="larder-bench-") as folder:
        case = make_case(Path(folder), server.url, options.quick)
        strangers = Strangers(case)
        over_http(report, case, strangers, options)
        in_process(report, case, strangers, options)
    with own_server() as server, TemporaryDirectory(prefix="larder-bench-") as folder:
        case = make_catalogue(Path(folder), server.url)
        over_http(report, case, Strangers(case), options, "catalogue_")
    report.show(options)


if __name__ == "__main__":
    main()

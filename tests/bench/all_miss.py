"""Traffic that no cache can help: every id is new and brings a history of its own.

`vs_no_cache`: answers/s of the whole path without HTTP (parse, directory, L1, live inference, write-through, reply)
over the same path that calls the model directly: nothing is looked up and nothing is kept. At least 0.9 is wanted. Such
traffic has been going on for a while, so the service has seen that hardly an input comes again, and leaves overlays
unread but for probes. `always_vs_no_cache` is with `overlay_reads = "always"`: each overlay is read, each lease taken.
`batch_vs_no_cache` and `batch_always_...` are the same for requests of 100 entities. Their model is tiny (2,000 items
of 16 dimensions), so that nothing hides what a miss costs; `catalogue_...` are the same over 40,981 items of 128
dimensions (drawn; int8 tower, the index that the night chooses). The ratios by processor time of this process stand in
the figures; Redis has a core of its own.
"""

import asyncio
import gc
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop

from cache.lease import Mark
from cache.outcomes import MissReason
from cache.tiered import Missed, Outcome, View, Want
from serving.ask import Ask
from serving.config import ServingConfig
from serving.infer import Inferences
from serving.ladder import Ladder
from serving.live import MicroBatcher, compute
from serving.metrics import Metrics
from serving.parse import lookup_body
from serving.routes import Service
from serving.running import running
from tests.bench.catalogue import make_catalogue
from tests.bench.harness import Options, Report, alternate, parse
from tests.bench.place import own_server
from tests.bench.read_path import TABLE, Case, make_case
from tests.integration.serving_app import settings

STRANGERS_BEFORE = 3_000
"""Until the service knows what traffic this is."""

IN_FLIGHT = {1: 64, 100: 4}
"""Requests at once, by entities per request."""


class NoTiers:
    """No cache at all."""

    async def get_many(
        self, view: View, wants: Sequence[Want], deadline: float
    ) -> Sequence[Outcome]:
        """Nothing is stored."""
        return [Missed(MissReason.NOT_IN_GENERATION)] * len(wants)

    def discard(self, view: View, want: Want) -> None:
        """There is nothing to forget."""

    def probe(self, view: View, want: Want, tell: Callable[[bool], None]) -> None:
        """There is nothing to ask."""

    def put_live(
        self,
        view: View,
        want: Want,
        record: bytes,
        digest: bytes,
        ttl_s: float,
        mark: Mark | None = None,
    ) -> None:
        """Nothing is kept."""


def without_cache(config: ServingConfig, stack: AsyncExitStack) -> Ladder:
    """The ladder straight over a model thread of its own."""
    pool = stack.enter_context(ThreadPoolExecutor(config.live_workers))
    batcher = MicroBatcher(
        pool,
        workers=config.live_workers,
        max_batch=config.live_batch,
        max_queue=config.live_queue,
        max_queue_bytes=config.live_queue_bytes,
        compute=compute,
    )
    nothing = NoTiers()
    inferences = Inferences(
        batcher, nothing, overlay_ttl_s=config.overlay_ttl_s, outage_ttl_s=config.outage_ttl_s
    )
    return Ladder(nothing, inferences, Metrics(), l2_deadline_s=config.l2_deadline_ms / 1000)


class Strangers:
    """Requests whose ids and histories never come again."""

    def __init__(self, case: Case) -> None:
        self._items = case.items
        self._rng = random.Random(1)
        self._numbers = itertools.count()

    def bodies(self, requests: int, entities: int) -> list[bytes]:
        """JSON bodies of so many requests."""
        return [
            json.dumps({"entities": [self._entity() for _ in range(entities)], "k": 20}).encode()
            for _ in range(requests)
        ]

    def _entity(self) -> dict[str, object]:
        history = self._rng.sample(self._items, self._rng.randint(5, 30))
        return {"id": f"stranger-{next(self._numbers)}", "history": history}


def measure(report: Report, case: Case, options: Options, prefix: str = "") -> None:
    """Both request sizes, over one night; rows are named with the prefix."""
    config = settings(case.night, deadline_ms=10_000.0)
    strangers = Strangers(case)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stack = AsyncExitStack()
        service = runner.run(stack.enter_async_context(running(config)))
        always = replace(config, overlay_reads="always")
        thorough = runner.run(stack.enter_async_context(running(always)))
        ladders = {
            "no_cache": without_cache(config, stack),
            "": service.ladder,
            "always_": thorough.ladder,
        }
        for ladder in ladders.values():
            runner.run(_answer(service, ladder, strangers.bodies(STRANGERS_BEFORE, 1), 64))
        # As the service does at its start: collections need not walk what stays for good.
        gc.collect()
        gc.freeze()
        for entities, size in ((1, prefix), (100, f"{prefix}batch_")):
            count = (800 if options.quick else 8_000) // entities
            spent: dict[str, list[float]] = {each: [] for each in ladders}

            def run(
                which: str,
                entities: int = entities,
                count: int = count,
                spent: dict[str, list[float]] = spent,
            ) -> Callable[[], float]:
                def once() -> float:
                    bodies = strangers.bodies(count, entities)
                    began, processor = time.perf_counter(), time.process_time()
                    runner.run(_answer(service, ladders[which], bodies, IN_FLIGHT[entities]))
                    spent[which].append(time.process_time() - processor)
                    return count * entities / (time.perf_counter() - began)

                return once

            cached = ["", "always_"]
            ratios = alternate(
                run("no_cache"),
                {each: run(each) for each in cached},
                rounds=options.rounds,
                rounds_max=7 if options.quick else None,
            )
            for each in cached:
                name = f"{size}{each}vs_no_cache"
                report.ratios[name] = ratios[each]
                share = statistics.median(spent["no_cache"]) / statistics.median(spent[each])
                report.figures[f"{name}, by processor time"] = round(share, 3)
        runner.run(stack.aclose())
        gc.unfreeze()


async def _answer(
    service: Service, ladder: Ladder, bodies: Sequence[bytes], in_flight: int
) -> None:
    waiting = iter(bodies)

    async def caller() -> None:
        for body in waiting:
            ask: Ask = lookup_body(body, TABLE, service.limits)
            for answer in await ladder.lookup(service.holding(), ask, time.monotonic()):
                if answer["source"] != "live":
                    raise RuntimeError(f"not a live answer: {answer}")

    await asyncio.gather(*(caller() for _ in range(in_flight)))


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    report = Report("all_miss", ("redis", "onnxruntime", "faiss-cpu", "uvloop"))
    with own_server() as server, TemporaryDirectory(prefix="larder-bench-") as folder:
        measure(report, make_case(Path(folder), server.url, options.quick), options)
    with own_server() as server, TemporaryDirectory(prefix="larder-bench-") as folder:
        measure(report, make_catalogue(Path(folder), server.url), options, "catalogue_")
    report.show(options)


if __name__ == "__main__":
    main()

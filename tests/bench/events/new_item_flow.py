"""Computed lists in L1 while new items come, in one process.

100 lookups a second in open loop, of 200 inputs by Zipf, none of which the night knows: L1 has what was computed of
each, until a new item comes that any list may name. Phases follow each other: no new items, 1 a second, 10 a second,
and none again, where those before stay. Before the first and the last each input is asked for once.

- `l1_under_new_items`: share of answers from L1 at 1 a second over that at none; A/A: none again over none.
- `l1_under_many_new_items`: the same at 10 a second.

Figures: shares and milliseconds (p50, p99, from when a lookup was due) of each phase. Nothing is promised.
"""

import asyncio
import itertools
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import uvloop

from cache.events.event import Event
from cache.format.stream_position import Position
from precompute.config.settings import NightConfig
from serving.bootstrap import running
from serving.http.routes import Service
from serving.requests.models import LookupRequest, RequestedEntity
from serving.requests.options import RequestOptions
from tests.attached import newer_events_of
from tests.bench.tools.harness import Ratio, Report, parse
from tests.bench.tools.place import own_server
from tests.integration.attributes.test_night import FIRST, prepared
from tests.integration.feature_towers import DIMS
from tests.integration.fresh.events_world import EVENTS
from tests.integration.nights import histories, publish_night
from tests.integration.serving_app import settings

RATE, INPUTS = 100, 200
SECONDS, QUICK_SECONDS = 30.0, 8.0
PHASES: Final = {"none": 0, "1 a second": 1, "10 a second": 10, "none again": 0}


@dataclass(slots=True)
class Phase:
    """Answers of one phase: how many of each source, and seconds of each."""

    sources: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    @property
    def l1_share(self) -> float:
        """Share of answers from L1."""
        return self.sources["l1"] / self.sources.total()


class Flow:
    """A running service, inputs that it does not know, and items that come."""

    def __init__(self, service: Service, config: NightConfig) -> None:
        self._service, self._rng = service, np.random.default_rng(0)
        history_by_user = histories(config, FIRST)
        items = sorted({item.encode() for history in history_by_user.values() for item in history})
        self._entities = [
            RequestedEntity(
                "user_topk", None, None, "features",
                tuple(items[int(item_index)] for item_index in self._rng.integers(len(items), size=8)),
                {"country": at % 5},
            )
            for at in range(INPUTS)
        ]  # fmt: skip
        weights = 1 / np.arange(1, INPUTS + 1)
        self._weights, self._numbers = weights / weights.sum(), itertools.count(1)

    async def fill_l1(self) -> None:
        """Put the computed answer of each input into L1."""
        await asyncio.sleep(1.0)  # the last new items are in force
        for entity in self._entities:
            await self._look_up(entity, time.perf_counter(), Phase())

    async def phase(self, new_per_s: int, seconds: float) -> Phase:
        """Send lookups when they are due, and new items in between."""
        phase, count = Phase(), int(seconds * RATE)
        drawn = self._rng.choice(INPUTS, count, p=self._weights).tolist()
        every = RATE // new_per_s if new_per_s else count
        started_at = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for arrival_index, entity in enumerate(drawn):
                if new_per_s and arrival_index % every == every // 2:
                    self._bring()
                due = started_at + arrival_index / RATE
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(self._look_up(self._entities[entity], due, phase))
        return phase

    async def _look_up(self, entity: RequestedEntity, due: float, phase: Phase) -> None:
        lookup = LookupRequest((entity,), RequestOptions(10.0))
        (answer,) = await self._service.ladder.lookup(self._service.capture_served(), lookup, time.monotonic())
        phase.seconds.append(time.perf_counter() - due)
        phase.sources[str(answer["source"])] += 1

    def _bring(self) -> None:
        number = next(self._numbers)
        features: dict[str, Any] = {"looks": tuple(self._rng.standard_normal(DIMS).tolist()), "brand": "acme"}
        event = Event(f"n{number}", number, None, b"new-%d" % number, features=features)
        at = Position(int(time.time() * 1000) + number, 0)
        newer_events_of(self._service).add(at, event)


def main() -> None:
    """Measure and report."""
    options = parse(__doc__ or "")
    report = Report("events", ("onnxruntime", "faiss-cpu", "uvloop"))
    with own_server() as server, TemporaryDirectory(prefix="larder-bench-") as folder:
        config = replace(prepared(Path(folder), server.url), events=EVENTS)
        publish_night(config, FIRST)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            stack = AsyncExitStack()
            served = settings(config, events=EVENTS, deadline_ms=10_000.0)
            service = runner.run(stack.enter_async_context(running(served)))
            flow, seconds = Flow(service, config), QUICK_SECONDS if options.quick else SECONDS
            phases = {}
            for name, rate in PHASES.items():
                if not rate:
                    runner.run(flow.fill_l1())
                phases[name] = runner.run(flow.phase(rate, seconds))
            runner.run(stack.aclose())
    for name, phase in phases.items():
        report.figures[f"{name}: from L1"] = round(phase.l1_share, 3)
        for percent in (50, 99):
            value = 1e3 * float(np.percentile(phase.seconds, percent))
            report.figures[f"{name}: p{percent}, ms"] = round(value, 2)
    base, final_share = phases["none"].l1_share, phases["none again"].l1_share
    for key, name in (("l1_under_new_items", "1 a second"), ("l1_under_many_new_items", "10 a second")):  # fmt: skip
        under = phases[name].l1_share
        report.ratios[key] = Ratio(under / base, final_share / base, 1, under, base)
    report.show(options)


if __name__ == "__main__":
    main()

"""A service over users who click, in the process of a bench."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop

from serving.bootstrap import running
from serving.http.routes import Service
from tests.bench.tools.harness import Options, Report
from tests.bench.tools.place import own_server
from tests.integration.fresh.events_world import EVENTS, EventWorld
from tests.integration.nights import prepare
from tests.integration.serving_app import settings


@contextmanager
def in_process(report: Report, options: Options) -> Iterator[tuple[EventWorld, Service, asyncio.Runner]]:
    """A published night, a service that runs on the runner's loop, and their sizes in the report."""
    with own_server() as server, TemporaryDirectory(prefix="larder-bench-") as folder:
        users = 2_000 if options.quick else 10_000
        world = EventWorld(prepare(Path(folder), server.url, users=users, items=2_000))
        world.publish()
        report.figures["users"], report.figures["items"] = users, len(world.items)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            stack = AsyncExitStack()
            config = settings(world.config, events=EVENTS, deadline_ms=10_000.0)
            service = runner.run(stack.enter_async_context(running(config)))
            try:
                yield world, service, runner
            finally:
                runner.run(stack.aclose())

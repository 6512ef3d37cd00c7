"""Every background task of a running service is under the one wrapper, and goes on after an unexpected error."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cache.config.events import EventsConfig
from cache.config.serving import NearConfig
from cache.process.background_loops import BackgroundLoop, BackgroundLoops
from cache.store.blocklist import change_blocklist
from precompute.config.settings import NightConfig
from precompute.traffic import experiments
from precompute.traffic.experiments import ArmOption, ExperimentOption
from serving.app import create_app, make_server
from serving.http.asgi_app import AsgiApp
from serving.http.routes import Service
from serving.traffic.router import ExperimentRouter
from tests.attached import attached
from tests.certificates import Authority
from tests.integration.experiments.arms import arms
from tests.integration.serving_app import PATIENT, eventually, settings
from tests.integration.token_files import TokenPlace

NAMES = {
    "announcements", "arms_blocklist", "attribute_values", "blocklist", "certificate", "cold_ids", "connections",
    "dashboard", "event_figures", "event_inbox", "event_rejections", "events", "experiments", "exposures", "heartbeat",
    "host_copies", "host_disk", "hot_ids", "l1_advisor", "loop_lag", "pointer", "quality_report", "quality_samples",
    "redis_memory", "releases", "store", "tokens",
}  # fmt: skip
"""Loops of a service with everything switched on; an arm's namespace adds its own under the same names."""

NOT_LOOPS = ("Server.serve", "LifespanOn.main")
"""Tasks of uvicorn: the server itself, and the life of the application."""


class Replica:
    """A service on a socket of its own, in this process, with an arm of an experiment beside its own namespace."""

    def __init__(self, night: NightConfig, front: AsgiApp, foreign_tasks: set[asyncio.Task[Any]]) -> None:
        self.night, self.front, self._foreign_tasks = night, front, foreign_tasks

    @property
    def service(self) -> Service:
        service: Service = self.front.state.service
        return service

    @property
    def loops(self) -> BackgroundLoops:
        loops: BackgroundLoops = self.front.state.loops
        return loops

    async def holds_arm(self) -> bool:
        """True once the arm's namespace runs its loops beside those of the service's own."""
        return [loop.name for loop in self.loops.running].count("announcements") == 2

    def other_tasks(self) -> set[str]:
        """Names of coroutines that run as tasks of the service, and are neither loops nor uvicorn's own."""
        excluded_tasks = {loop.task for loop in self.loops.running} | {asyncio.current_task()}
        tasks = asyncio.all_tasks() - self._foreign_tasks - excluded_tasks
        names = {getattr(task.get_coro(), "__qualname__", repr(task)) for task in tasks}
        return {name for name in names if name not in NOT_LOOPS}


@pytest.fixture
async def replica(tmp_path: Path, redis_url: str) -> AsyncIterator[Replica]:
    service_night, arm_night = await asyncio.to_thread(arms, tmp_path / "night", redis_url)
    _start_experiment(service_night, arm_night)
    tokens = TokenPlace(tmp_path / "tokens.json")
    tokens.add("ana")
    tls = Authority.create(tmp_path / "tls").signed("replica")
    config = settings(
        service_night, tokens_file=str(tokens.path), tls_certificate=str(tls.certificate),
        tls_key=str(tls.key), events=EventsConfig(enabled=True), near={"user_topk": NearConfig()},
        **PATIENT,
    )  # fmt: skip
    foreign_tasks = asyncio.all_tasks()
    front, is_serving = create_app(config), asyncio.Event()
    server = make_server(front, config, "warning", is_serving.set)
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server._serve([listener]), name="server")
    foreign_tasks.add(serving)
    try:
        async with asyncio.timeout(60):
            await is_serving.wait()
        replica = Replica(service_night, front, foreign_tasks)
        assert await eventually(replica.holds_arm)
        yield replica
    finally:
        server.should_exit = True
        await serving
        listener.close()


def _start_experiment(service_night: NightConfig, arm_night: NightConfig) -> None:
    named = (ArmOption("control", service_night.namespace, 0.5), ArmOption("b", arm_night.namespace, 0.5))
    experiments.start(service_night, ExperimentOption(service_night.namespace, "one", named, 0.6))


async def test_every_background_task_of_a_service_is_a_loop_of_the_wrapper(replica: Replica) -> None:
    async def nothing_else_runs() -> bool:  # what was begun by a request or a look ends by itself
        return replica.other_tasks() == set()

    assert await eventually(nothing_else_runs, 10.0), replica.other_tasks()
    assert {loop.name for loop in replica.loops.running} == NAMES
    assert set(replica.loops.failure_count_by_loop) >= NAMES


async def test_every_background_loop_goes_on_after_an_unexpected_error(replica: Replica) -> None:
    loops = replica.loops.running
    assert {loop.name for loop in loops} == NAMES

    for loop in loops:
        iterations_before = loop.iteration_count
        await _plant_error(loop)

        async def goes_on(loop: BackgroundLoop = loop, iterations_before: int = iterations_before) -> bool:
            return loop.iteration_count > iterations_before or loop.task.done()

        assert await eventually(goes_on), f"{loop.name} neither ended nor began another turn"
        assert not loop.task.done(), f"{loop.name} ended"

    assert set(replica.loops.running) == set(loops)
    health = replica.service.follower.health
    assert health.is_ready and health.stale_reason is None
    await _assert_work_goes_on(replica)


async def _plant_error(loop: BackgroundLoop) -> None:
    """Let whatever the loop waits for end with an error that nothing in it expects."""
    waiter: Any = None

    async def waits() -> bool:
        nonlocal waiter
        waiter = loop.task._fut_waiter  # type: ignore[attr-defined]  # no public name has it
        return waiter is not None and not waiter.done()

    assert await eventually(waits)
    while isinstance(waiter, asyncio.Task):
        waiter = waiter._fut_waiter  # type: ignore[attr-defined]
    waiter.set_exception(RuntimeError("planted"))


async def _assert_work_goes_on(replica: Replica) -> None:
    """Assert that a blocked item is blocked in both namespaces, whose loops have all failed once."""
    arms_held = attached(replica.service, ExperimentRouter)._arm_holder
    shelves = [service.follower.holder for service in (replica.service, *arms_held.answering_services)]
    assert len(shelves) == 2
    await asyncio.to_thread(change_blocklist, replica.night.store(), block_items=[b"planted"])

    async def is_blocked() -> bool:
        return all(b"planted" in holder.blocklist.items for holder in shelves)

    assert await eventually(is_blocked)


async def test_a_loop_that_keeps_failing_marks_the_replica_and_its_metrics_until_it_does_well(replica: Replica) -> None:
    # given
    beating = next(loop for loop in replica.loops.running if loop.name == "heartbeat")
    real = beating.body

    async def broken() -> None:
        raise RuntimeError("planted")

    async def is_marked() -> bool:
        return replica.service.follower.health.stale_reason == "background_failing"

    async def is_well() -> bool:
        return replica.service.follower.health.stale_reason is None

    # when
    beating.body = broken
    assert await eventually(is_marked)
    exposed = (await replica.service.expose_metrics()).decode()
    beating.body = real

    # then
    assert 'larder_background_failing{loop="heartbeat"} 1.0' in exposed
    assert 'larder_background_failing{loop="pointer"} 0.0' in exposed
    (failures,) = (
        line for line in exposed.splitlines()
        if line.startswith('larder_background_failures_total{loop="heartbeat"}')
    )  # fmt: skip
    assert float(failures.split()[-1]) >= 3
    assert await eventually(is_well)

"""Admission: what a standing queue does to live, who is refused, and that every place is given back."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest
from fastapi.responses import PlainTextResponse
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from starlette.types import Message, Scope

from cache.model.input_preparation import LiveInput
from serving.admission.controller import Admission, LoopLagSampler, Valve
from serving.engine.batch_inference import compute
from serving.engine.inference import LiveInferences
from serving.engine.ladder import Ladder
from serving.engine.micro_batcher import ComputedRecord, InferenceJob, MicroBatcher
from serving.generations.served_set import ServedGenerations
from serving.http.asgi_app import ADMITTED_KEY, AsgiApp
from tests.fakes import FakeClock
from tests.unit.serving.world import PATHS, World, ask, entity, gate_of, ids

TARGET_S, INTERVAL_S, LOOK_S = 0.02, 0.1, 0.01


def admission(requests_max: int = 100) -> Admission:
    return Admission(target_s=TARGET_S, interval_s=INTERVAL_S, requests_max=requests_max)


def observe_waits(valve: Valve, clock: FakeClock, wait: float, seconds: float) -> None:
    """Sees one wait, ten times an interval."""
    for _ in range(round(seconds / LOOK_S)):
        clock.tick(LOOK_S)
        valve.observe(wait, clock())


async def run_loop_until(is_so: Callable[[], bool]) -> bool:
    """Lets the event loop go on until it is so, for a bounded number of turns."""
    for _ in range(1_000):
        if is_so():
            return True
        await asyncio.sleep(0)
    return False


def admitted(valve: Valve, of: int = 1_000) -> int:
    return sum(valve.try_admit() for _ in range(of))


def test_an_idle_process_admits_everything() -> None:
    valve, clock = Valve(TARGET_S, INTERVAL_S), FakeClock()

    observe_waits(valve, clock, wait=0.0001, seconds=5)

    assert admitted(valve) == 1_000 and valve.interval_wait == 0.0001


def test_a_queue_that_stands_closes_the_valve_and_its_end_opens_it_within_half_a_second() -> None:
    valve, clock = Valve(TARGET_S, INTERVAL_S), FakeClock()

    observe_waits(valve, clock, wait=0.05, seconds=0.3)
    admitted_count = admitted(valve)
    observe_waits(valve, clock, wait=0.05, seconds=2)
    none = admitted(valve)
    observe_waits(valve, clock, wait=0.001, seconds=0.5)

    assert 100 <= admitted_count <= 600 and none == 0
    assert admitted(valve) == 1_000


def test_a_burst_that_drains_within_the_interval_is_no_overload() -> None:
    valve, clock = Valve(TARGET_S, INTERVAL_S), FakeClock()

    for _ in range(50):
        observe_waits(valve, clock, wait=0.09, seconds=0.04)
        observe_waits(valve, clock, wait=0.001, seconds=0.01)
        assert valve.admitted_share == 1.0


def test_one_long_pause_is_no_overload_however_long() -> None:
    valve, clock = Valve(TARGET_S, INTERVAL_S), FakeClock()

    clock.tick(1.5)
    valve.observe(1.5, clock())
    observe_waits(valve, clock, wait=0.001, seconds=0.1)
    paused = valve.admitted_share
    observe_waits(valve, clock, wait=1.5, seconds=0.3)

    assert paused == 1.0 and valve.admitted_share < 1.0


def test_what_opened_the_valve_too_far_closes_it_and_the_next_steps_are_small_again() -> None:
    valve, clock = Valve(TARGET_S, INTERVAL_S), FakeClock()
    valve.admitted_share = 0.0

    def sample(wait: float) -> float:
        clock.tick(INTERVAL_S)
        valve.observe(wait, clock())
        return valve.admitted_share

    opened = [sample(wait) for wait in (0.001, 0.001, 0.001, 0.001, 0.04)]
    closed, reopened_share = sample(0.04), sample(0.001)

    assert opened == pytest.approx([0.0, 0.1, 0.3, 0.7, 1.0])
    assert (closed, reopened_share) == pytest.approx((0.5, 0.6))


def test_where_samples_are_rare_every_one_is_judged() -> None:
    valve, clock, admitted_shares = Valve(TARGET_S, INTERVAL_S), FakeClock(), list[float]()
    for _ in range(4):
        clock.tick(0.12)
        valve.observe(0.04, clock())
        admitted_shares.append(valve.admitted_share)

    assert admitted_shares == pytest.approx([1.0, 0.5, 0.25, 0.125])


class Process:
    """An event loop with requests of two kinds, in fake time: 5 % are new and may have an inference.

    Each turn answers all that stood before it. After `seconds` at `load` times its most, it is asked for half of that.
    The costs are those measured of the service, processor time on one core.
    """

    HIT_S, LIVE_S, DEFAULT_S, REFUSED_S, DEADLINE_S = 15e-6, 400e-6, 160e-6, 20e-6, 0.3
    CAPACITY_PER_S = 1 / (0.95 * HIT_S + 0.05 * LIVE_S)

    def __init__(self, gate: Admission, load: float, seconds: float, calm_s: float) -> None:
        rng = np.random.default_rng(0)
        rates = ((load * self.CAPACITY_PER_S, 0.0, seconds), (0.5 * self.CAPACITY_PER_S, seconds, calm_s))
        self.due = np.concatenate(
            [began_at + np.cumsum(rng.exponential(1 / r, int(r * t))) for r, began_at, t in rates]
        )
        self.is_new = rng.random(len(self.due)) < 0.05
        self.is_live, self.is_refused = self.is_new.copy(), np.zeros(len(self.due), bool)
        self.latencies_s = np.zeros(len(self.due))
        self._gate = gate
        self._run()

    def _run(self) -> None:
        now_s, up_to, next_observation_at = 0.0, 0, 0.0
        while up_to < len(self.due):
            now_s = max(now_s, self.due[up_to])
            began_at, end = now_s, int(np.searchsorted(self.due, now_s, side="right"))
            for at in range(up_to, end):
                now_s += self._answer(at) if self.is_new[at] else self.HIT_S
                self.latencies_s[at] = now_s - self.due[at]
            up_to = end
            if now_s >= next_observation_at:
                self._gate.observe(now_s - began_at, 0.0, now_s)
                next_observation_at = now_s + LOOK_S

    def _answer(self, at: int) -> float:
        if not self._gate.admit_costly():
            self.is_live[at], self.is_refused[at] = False, True
            return self.REFUSED_S
        self.is_live[at] = self._gate.admit_live()
        return self.LIVE_S if self.is_live[at] else self.DEFAULT_S

    @property
    def is_good(self) -> NDArray[np.bool_]:
        """Answered in time."""
        good: NDArray[np.bool_] = (self.latencies_s <= self.DEADLINE_S) & ~self.is_refused
        return good


def test_a_process_asked_for_half_as_much_again_answers_in_time_and_recovers() -> None:
    never = Admission(target_s=float("inf"), interval_s=INTERVAL_S, requests_max=1)
    without = Process(never, load=1.5, seconds=3.0, calm_s=3.0)
    process = Process(admission(), load=1.5, seconds=3.0, calm_s=3.0)

    during = process.due < 3.0
    assert without.is_good[during].mean() < 0.5
    assert process.is_good[during].sum() / 3.0 >= 1.2 * Process.CAPACITY_PER_S
    assert process.latencies_s[during].max() < Process.DEADLINE_S
    later = process.due > 3.8
    assert process.is_good[later].all() and process.is_live[later & process.is_new].all()


def test_where_leaving_live_out_is_enough_hardly_anybody_is_refused() -> None:
    process = Process(admission(), load=1.1, seconds=3.0, calm_s=0.5)

    assert not process.is_live[process.is_new].all()
    assert process.is_refused[process.is_new].mean() < 0.03
    assert process.latencies_s.max() < Process.DEADLINE_S


def test_a_process_at_twice_its_capacity_answers_cheap_requests() -> None:
    process = Process(admission(), load=2.1, seconds=3.0, calm_s=3.0)

    during = process.due < 3.0
    assert process.is_good[during].mean() >= 0.9
    assert process.is_refused[during & process.is_new].mean() >= 0.5
    later = process.due > 3.8
    assert process.is_good[later].all() and process.is_live[later & process.is_new].all()


def test_a_process_that_is_nearly_full_leaves_nothing_out() -> None:
    process = Process(admission(), load=0.9, seconds=3.0, calm_s=0.5)

    assert process.is_good.all() and process.is_live[process.is_new].all()


@given(st.floats(0.011, 1.0), st.integers(1, 500))
def test_the_share_is_kept_exactly_and_spread_evenly(share: float, of: int) -> None:
    valve = Valve(1.0, 1.0)
    valve.admitted_share = share

    is_admitted = [valve.try_admit() for _ in range(of)]

    for upto in range(1, of + 1):
        assert abs(sum(is_admitted[:upto]) - share * upto) < 1 + 1e-6


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 0.5)), max_size=200))
def test_the_share_stays_between_none_and_all_whatever_is_seen(seen: list[tuple[float, float]]) -> None:
    valve, clock = Valve(TARGET_S, INTERVAL_S), FakeClock()

    for wait, passed in seen:
        clock.tick(passed)
        valve.observe(wait, clock())
        assert 0.0 <= valve.admitted_share <= 1.0


def test_either_queue_keeps_live_from_new_work() -> None:
    for turn_s, model_wait in ((0.05, 0.0), (0.001, 0.9)):
        gate, clock = admission(), FakeClock()
        for _ in range(300):
            clock.tick(LOOK_S)
            gate.observe(turn_s, model_wait, clock())

        assert not gate.admit_live() and gate.live_admitted_share == 0.0 and gate.shed_counts["live"] == 1


def test_a_request_is_late_only_when_the_queue_has_taken_all_its_time() -> None:
    gate, clock = admission(), FakeClock()
    assert not gate.is_loop_behind
    observe_waits(gate.loop_valve, clock, wait=0.25, seconds=0.2)

    assert gate.is_loop_behind and not gate.is_late(0.3) and gate.shed_counts["late"] == 0
    assert gate.is_late(0.2) and gate.shed_counts["late"] == 1


async def test_overload_leaves_live_out_and_says_so_and_only_for_new_work() -> None:
    world, is_open, goes_on = World(), True, asyncio.Event()
    compute_at_once = world.infer

    async def infer(job: InferenceJob) -> ComputedRecord:
        await goes_on.wait()
        return await compute_at_once(job)

    world.infer = infer  # type: ignore[method-assign]
    inferences = LiveInferences(
        cast(MicroBatcher, world), world.tiers, overlay_ttl_s=600.0, outage_ttl_s=15.0, admit_input=lambda: is_open
    )
    ladder = Ladder(world.tiers, inferences, world.metrics, l2_deadline_s=1.0, clock=world.clock)
    served = ServedGenerations(world.snapshot())
    now_s = asyncio.get_running_loop().time()

    async def look_up(id_: str) -> dict[str, Any]:
        stranger = entity(id_, history=ids("i3"))
        return (await ladder.lookup(served, ask(stranger), now_s))[0]

    first = asyncio.ensure_future(look_up("new"))
    assert await run_loop_until(lambda: len(inferences.flights) == 1)
    is_open = False
    joiner = asyncio.ensure_future(look_up("new"))
    assert await run_loop_until(lambda: inferences.flights.shared_count == 1)
    goes_on.set()
    assert [(await task)["source"] for task in (first, joiner)] == ["live", "live"]
    shed, stored_answer, known_answer = (await look_up("other"), await look_up("new"), await look_up("u3"))

    assert (shed["source"], shed["reason"], shed["live"]) == (
        "default", "not_in_generation", "overloaded",
    )  # fmt: skip
    assert stored_answer["source"] == "l1" and known_answer["source"] == "l2" and len(world.jobs) == 1
    await world.tiers.aclose()


async def test_the_oldest_input_tells_how_much_of_its_time_it_has_waited() -> None:
    world, clock, gate = World(), FakeClock(), threading.Event()
    world.predictor.gate = gate
    snapshot = world.snapshot()
    with ThreadPoolExecutor(1) as pool:
        batches = MicroBatcher(
            pool, worker_count=1, batch_size_max=4, queued_jobs_max=100, queued_bytes_max=1 << 20,
            compute_batch=compute, monotonic_clock=clock,
        )  # fmt: skip

        def job(time_s: float) -> InferenceJob:
            return InferenceJob(snapshot, "user_topk", LiveInput(ids("i1")), 1, 1, clock() + time_s)

        running = batches.infer(job(1.0))
        await asyncio.to_thread(world.predictor.started.wait, 5)
        assert batches.longest_wait_share() == 0.0
        waiting = [batches.infer(job(time_left_s)) for time_left_s in (0.4, 0.1)]
        clock.tick(0.1)

        assert batches.longest_wait_share() == pytest.approx(0.25)
        gate.set()
        await asyncio.gather(running, *waiting, return_exceptions=True)
        assert batches.longest_wait_share() == 0.0


async def test_a_pulse_sees_every_long_iteration_and_ends() -> None:
    clock, observations, loop = (FakeClock(), list[tuple[float, float, float]](), asyncio.get_running_loop())
    enough = asyncio.Event()

    def observe(turn_s: float, model_wait: float, now_s: float) -> None:
        observations.append((turn_s, model_wait, now_s))
        if len(observations) == 3:
            enough.set()

    def work() -> None:
        clock.tick(0.03)
        if not enough.is_set():
            loop.call_soon(work)

    pulse = LoopLagSampler(observe, lambda: 0.5, sampling_interval_s=0.001, monotonic_clock=clock)
    pulse.start()
    work()
    async with asyncio.timeout(10):
        await enough.wait()
    pulse.stop()

    turns_s, model_waits, times = zip(*observations, strict=True)
    assert turns_s == pytest.approx([0.03] * 3) and set(model_waits) == {0.5}
    assert np.diff(times) == pytest.approx([0.03] * 2)


async def test_a_pulse_goes_on_after_an_observer_that_raises() -> None:
    observation_count, enough = 0, asyncio.Event()

    def observe(_turn_s: float, _model_wait: float, _now_s: float) -> None:
        nonlocal observation_count
        observation_count += 1
        if observation_count == 1:
            raise RuntimeError("planted")
        enough.set()

    pulse = LoopLagSampler(observe, lambda: 0.0, sampling_interval_s=0.001)
    pulse.start()
    async with asyncio.timeout(10):
        await enough.wait()
    pulse.stop()


class Request:
    """One request to the application, answered once."""

    def __init__(self, path: str, method: str = "PUT") -> None:
        self.scope: Scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(),
            "query_string": b"", "headers": [], "root_path": "",
        }  # fmt: skip
        self.messages: list[Message] = []

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    async def receive(self) -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    @property
    def statuses(self) -> list[int]:
        return [message["status"] for message in self.messages if message["type"] == "http.response.start"]


def front(gate: Admission, open_: asyncio.Event, crowd: list[int]) -> AsgiApp:
    """An application whose lookups wait for `open_` and say how many are under way."""
    app = AsgiApp(api_paths=PATHS)

    async def slow() -> PlainTextResponse:
        crowd.append(gate.requests_under_way)
        await open_.wait()
        return PlainTextResponse("done")

    async def fails() -> None:
        raise RuntimeError("a defect")

    app.add_api_route("/v1/lookup/slow", slow, methods=["PUT"])
    app.add_api_route("/v1/lookup/fails", fails, methods=["PUT"])
    app.add_api_route("/healthz", lambda: {"status": "ok"}, methods=["PUT"])
    app.gate = gate_of(gate)
    return app


@given(st.integers(1, 6), st.lists(st.sampled_from(["slow", "fails", "gone"]), max_size=30))
def test_never_more_than_the_limit_are_under_way_and_all_are_answered_once(most: int, kinds: list[str]) -> None:
    async def play() -> None:
        gate, open_, crowd = admission(most), asyncio.Event(), list[int]()
        app = front(gate, open_, crowd)
        requests = [Request(f"/v1/lookup/{'slow' if k == 'gone' else k}") for k in kinds]
        tasks = [asyncio.ensure_future(app(r.scope, r.receive, r.send)) for r in requests]
        for _ in range(20):
            await asyncio.sleep(0)
        for task, kind in zip(tasks, kinds, strict=True):
            if kind == "gone":
                task.cancel()
        open_.set()
        await asyncio.gather(*tasks, return_exceptions=True)

        assert max(crowd, default=0) <= most and gate.requests_under_way == 0
        refused = 0
        for request, kind, task in zip(requests, kinds, tasks, strict=True):
            if task.cancelled():
                continue
            (status,) = request.statuses
            refused += status == 503
            assert status in ({200, 503} if kind != "fails" else {500, 503})
        assert refused == gate.shed_counts["full"]

    asyncio.run(play())


def test_a_request_with_a_body_is_judged_once_where_it_arrives() -> None:
    gate, reported_statuses = admission(), list[int]()
    app = AsgiApp(api_paths=PATHS)
    assert app.refuse_if_overloaded() is None  # nothing to answer from: the routes say so
    app.gate = gate_of(gate, requested=lambda _route, status: reported_statuses.append(status))
    assert app.refuse_if_overloaded() is None and gate.shed_counts["queue"] == 0
    gate.costly_valve.admitted_share = 0.0

    refused = app.refuse_if_overloaded()

    assert refused is not None and refused[0]["status"] == 503 and reported_statuses == [503]
    assert (b"retry-after", b"1") in refused[0]["headers"] and gate.shed_counts["queue"] == 1


async def test_who_was_admitted_where_it_arrived_is_not_judged_again() -> None:
    gate, open_ = admission(), asyncio.Event()
    app = front(gate, open_, [])
    open_.set()
    gate.costly_valve.admitted_share = 0.0
    admitted_, new = Request("/v1/lookup/slow"), Request("/v1/lookup/slow")
    admitted_.scope[ADMITTED_KEY] = True

    for request in (admitted_, new):
        await app(request.scope, request.receive, request.send)

    assert (admitted_.statuses, new.statuses) == ([200], [503])


async def test_a_refused_request_learns_when_to_retry_and_health_is_never_refused() -> None:
    gate = admission(requests_max=1)
    app = front(gate, asyncio.Event(), [])
    observe_waits(gate.loop_valve, FakeClock(), wait=0.5, seconds=0.2)
    late, health = Request("/v1/lookup/slow"), Request("/healthz")

    await app(late.scope, late.receive, late.send)
    await app(health.scope, health.receive, health.send)

    head = dict(late.messages[0]["headers"])
    assert late.statuses == [503] and head[b"retry-after"] == b"1"
    assert head[b"content-type"] == b"application/json"
    assert b'"code":"overloaded"' in late.messages[1]["body"] and gate.shed_counts["late"] == 1
    assert health.statuses == [200] and gate.requests_under_way == 0

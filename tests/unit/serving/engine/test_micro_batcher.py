"""The micro-batcher: who travels with whom, and what one failure costs."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cache.model.input_preparation import LiveInput
from serving.engine.batch_inference import compute
from serving.engine.micro_batcher import ComputedRecord, InferenceJob, InferenceOutcome, LiveUnavailable, MicroBatcher
from serving.generations.snapshot import Snapshot
from tests.fakes import FakeClock
from tests.unit.serving.world import World, ids


def job(snapshot: Snapshot, *history: str, table: str = "user_topk", size_bytes: int = 100) -> InferenceJob:
    return InferenceJob(snapshot, table, LiveInput(ids(*history)), 1, size_bytes)


def batcher(executor: ThreadPoolExecutor, **changes: Any) -> MicroBatcher:
    settings: dict[str, Any] = {"worker_count": 1, "batch_size_max": 4, "queued_jobs_max": 100}
    settings |= {"queued_bytes_max": 1 << 20, "compute_batch": compute} | changes
    return MicroBatcher(executor, **settings)


@pytest.fixture
def executor():
    with ThreadPoolExecutor(2) as pool:
        yield pool


async def test_what_one_turn_submits_travels_in_one_batch(executor: ThreadPoolExecutor) -> None:
    world = World()
    snapshot = world.snapshot()
    batches = batcher(executor)

    outcomes = await asyncio.gather(*(batches.infer(job(snapshot, f"i{n}")) for n in range(3)))

    assert [len(batch) for batch in world.predictor.batches] == [3]
    assert len({outcome.record for outcome in outcomes}) == 3 and batches.queued == batches.queued_bytes == 0


async def test_a_lone_job_starts_at_once_and_later_ones_gather_meanwhile(executor: ThreadPoolExecutor) -> None:
    world = World()
    snapshot, gate = world.snapshot(), threading.Event()
    world.predictor.gate = gate
    batches = batcher(executor)

    first = asyncio.ensure_future(batches.infer(job(snapshot, "i0")))
    await asyncio.to_thread(world.predictor.started.wait, 5)
    later_inferences = [asyncio.ensure_future(batches.infer(job(snapshot, f"i{n}"))) for n in range(1, 7)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(first, *later_inferences)

    assert [len(batch) for batch in world.predictor.batches] == [1, 4, 2]


async def test_generations_and_tables_never_share_a_batch(executor: ThreadPoolExecutor) -> None:
    world = World()
    first_snapshot, second_snapshot = (world.snapshot(), world.snapshot("20261119T000000Z-000000000002"))
    batches = batcher(executor)

    await asyncio.gather(
        batches.infer(job(first_snapshot, "i1")),
        batches.infer(job(second_snapshot, "i2")),
        batches.infer(job(first_snapshot, "i3", table="user_vector")),
    )

    assert sorted(len(batch) for batch in world.predictor.batches) == [1, 1, 1]


async def test_a_poisoned_input_costs_its_batch_mates_nothing(executor: ThreadPoolExecutor) -> None:
    world = World()
    snapshot = world.snapshot()
    batches = batcher(executor)

    outcomes = await asyncio.gather(
        batches.infer(job(snapshot, "i1")),
        batches.infer(job(snapshot, "i2", "poison")),
        batches.infer(job(snapshot, "no", "known", "item")),
        return_exceptions=True,
    )

    assert isinstance(outcomes[0], ComputedRecord) and isinstance(outcomes[1], RuntimeError)
    assert isinstance(outcomes[2], LiveUnavailable) and outcomes[2].reason == "no_usable_input"


async def test_a_poisoned_input_is_found_in_a_few_runs(executor: ThreadPoolExecutor) -> None:
    world = World()
    snapshot = world.snapshot()
    batches = batcher(executor, batch_size_max=64, queued_bytes_max=1 << 30)

    jobs = [job(snapshot, "i1") for _ in range(63)]
    jobs.insert(40, job(snapshot, "i2", "poison"))
    outcomes = await asyncio.gather(*map(batches.infer, jobs), return_exceptions=True)

    assert [isinstance(outcome, ComputedRecord) for outcome in outcomes] == [index != 40 for index in range(64)]
    assert isinstance(outcomes[40], RuntimeError)
    assert sum(len(batch) for batch in world.predictor.batches) <= 64 * 7
    assert len(world.predictor.batches) <= 2 * 6 + 1


async def test_a_full_queue_refuses_at_once_by_count_and_by_bytes(executor: ThreadPoolExecutor) -> None:
    world = World()
    snapshot, gate = world.snapshot(), threading.Event()
    world.predictor.gate = gate
    for limits in ({"queued_jobs_max": 2}, {"queued_bytes_max": 250}):
        gate.clear()
        world.predictor.started.clear()
        batches = batcher(executor, **limits)
        running = asyncio.ensure_future(batches.infer(job(snapshot, "i0")))
        await asyncio.to_thread(world.predictor.started.wait, 5)
        queued = [asyncio.ensure_future(batches.infer(job(snapshot, "i1"))) for _ in range(2)]
        await asyncio.sleep(0)

        with pytest.raises(LiveUnavailable) as refused:
            await batches.infer(job(snapshot, "i2"))

        assert refused.value.reason == "busy"
        gate.set()
        await asyncio.gather(running, *queued)


async def test_a_job_whose_caller_left_is_not_computed(executor: ThreadPoolExecutor) -> None:
    world = World()
    snapshot, gate = world.snapshot(), threading.Event()
    world.predictor.gate = gate
    batches = batcher(executor)
    running = asyncio.ensure_future(batches.infer(job(snapshot, "i0")))
    await asyncio.to_thread(world.predictor.started.wait, 5)
    cancelled_inference = asyncio.ensure_future(batches.infer(job(snapshot, "i1")))
    stays = asyncio.ensure_future(batches.infer(job(snapshot, "i2")))
    await asyncio.sleep(0)

    cancelled_inference.cancel()
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(running, stays)

    assert [len(batch) for batch in world.predictor.batches] == [1, 1]
    assert batches.queued == 0


async def test_a_job_that_cannot_end_in_time_is_refused_and_not_computed(executor: ThreadPoolExecutor) -> None:
    # Given batches that are known to take a second
    world = World()
    snapshot, clock = world.snapshot(), FakeClock(100.0)

    def slow(jobs: Sequence[InferenceJob]) -> list[InferenceOutcome]:
        clock.now_s += 1.0
        return compute(jobs)

    batches = batcher(executor, compute_batch=slow, monotonic_clock=clock)
    await batches.infer(job(snapshot, "i0"))

    # When one job has half a second left and another has two
    late, early = job(snapshot, "i1"), job(snapshot, "i2")
    late.deadline_at, early.deadline_at = clock.now_s + 0.5, clock.now_s + 2.0
    outcomes = await asyncio.gather(batches.infer(late), batches.infer(early), return_exceptions=True)

    # Then only the second is computed
    assert isinstance(outcomes[0], LiveUnavailable) and outcomes[0].reason == "timeout"
    assert isinstance(outcomes[1], ComputedRecord)
    assert [len(batch) for batch in world.predictor.batches] == [1, 1]
    assert batches.hopeless_count == 1 and batches.queued == batches.queued_bytes == 0


async def test_a_wrong_estimate_does_not_stop_the_model_for_good(executor: ThreadPoolExecutor) -> None:
    world = World()
    snapshot, clock = world.snapshot(), FakeClock(100.0)
    seconds = iter([60.0])

    def once_slow(jobs: Sequence[InferenceJob]) -> list[InferenceOutcome]:
        clock.now_s += next(seconds, 0.001)
        return compute(jobs)

    batches = batcher(executor, compute_batch=once_slow, monotonic_clock=clock)
    await batches.infer(job(snapshot, "i0"))

    answered = 0
    for _ in range(100):
        soon = job(snapshot, "i1")
        soon.deadline_at = clock.now_s + 0.3
        outcomes = await asyncio.gather(batches.infer(soon), return_exceptions=True)
        answered += isinstance(outcomes[0], ComputedRecord)

    assert answered > 40


async def test_a_pool_that_is_shut_down_fails_what_waits(executor: ThreadPoolExecutor) -> None:
    batches = batcher(executor)
    executor.shutdown()

    with pytest.raises(LiveUnavailable) as refused:
        await batches.infer(job(World().snapshot(), "i0"))

    assert refused.value.reason == "failed"


def test_an_error_of_the_model_says_where_it_came_from_and_holds_nothing() -> None:
    world = World()

    (error,) = compute([job(world.snapshot(), "i1", "poison")])

    assert isinstance(error, RuntimeError) and error.__traceback__ is None
    assert "in predict" in error.__notes__[0]

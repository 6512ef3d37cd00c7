"""A background loop goes on whatever its body raises, and tells log, counts and who is to know that it fails."""

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from cache.errors import TierUnavailable
from cache.process import background_loops
from cache.process.background_loops import (
    FAILING_AFTER_FAILURES,
    PAUSE_MAX_S,
    BackgroundLoops,
    cancel_and_wait,
    pause_s,
)
from tests.integration.serving_app import eventually


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_loops, "_FIRST_PAUSE_S", 0.0)


@pytest.fixture
async def loops() -> AsyncIterator[BackgroundLoops]:
    loop_runner = BackgroundLoops()
    yield loop_runner
    await cancel_and_wait([loop.task for loop in loop_runner.running])


async def forever() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("error", [RuntimeError("planted"), asyncio.CancelledError(), MemoryError()])
async def test_a_loop_goes_on_after_an_error_which_is_counted(loops: BackgroundLoops, error: BaseException) -> None:
    iteration_errors: list[BaseException | None] = [error, None, error, None]
    is_done = asyncio.Event()

    async def body() -> None:
        if not iteration_errors:
            is_done.set()
            await forever()
        if (planted := iteration_errors.pop()) is not None:
            raise planted

    task = loops.start("body", body)
    async with asyncio.timeout(30):
        await is_done.wait()

    assert not task.done()
    assert loops.failure_count_by_loop["body"] == 2 and loops.error_by_failing_loop == {}


async def test_a_loop_that_keeps_failing_is_reported_until_it_recovers(
    loops: BackgroundLoops, caplog: pytest.LogCaptureFixture
) -> None:
    failure_reports: list[dict[str, str]] = []
    loops.on_change = lambda: failure_reports.append(loops.error_by_failing_loop)
    is_broken, iteration_count = True, 0

    async def body() -> None:
        nonlocal iteration_count
        iteration_count += 1
        if is_broken:
            raise RuntimeError("no pages at redis://reader:secret@host")
        await asyncio.sleep(0)

    with caplog.at_level(logging.WARNING, "cache.process.background_loops"):
        loops.start("body", body, wait=lambda: asyncio.sleep(0))
        assert await eventually(lambda: _truth(iteration_count >= 100))
        is_broken = False
        assert await eventually(lambda: _truth(len(failure_reports) == 2))

    assert failure_reports == [{"body": "no pages at redis://reader:***@host"}, {}]
    tracebacks = [record for record in caplog.records if record.exc_info]
    assert 7 <= len(tracebacks) < 20, "each doubling of the failures alone is logged"
    assert "body" in tracebacks[0].getMessage()


async def test_an_error_of_larder_is_logged_in_a_sentence(
    loops: BackgroundLoops, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        raise TierUnavailable("Redis: TIME was answered by 1.5, not by two numbers")

    with caplog.at_level(logging.WARNING, "cache.process.background_loops"):
        loops.start("body", body)
        assert await eventually(lambda: _truth(loops.failure_count_by_loop["body"] > 1))

    assert caplog.records[0].getMessage() == (
        "background loop body failed (1 in a row); it runs again in 0.00 s: Redis: TIME was answered by 1.5, not by "
        "two numbers"
    )
    assert not any(record.exc_info for record in caplog.records)


async def test_an_endless_body_does_well_once_it_has_run_for_a_while(
    loops: BackgroundLoops, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_loops, "STEADY_AFTER_S", 0.0)

    async def body() -> None:
        if loops.failure_count_by_loop["body"] < FAILING_AFTER_FAILURES:
            raise RuntimeError("planted")
        assert loops.error_by_failing_loop
        await forever()

    loops.start("body", body)

    assert await eventually(lambda: _truth(loops.failure_count_by_loop["body"] == FAILING_AFTER_FAILURES))
    assert await eventually(lambda: _truth(not loops.error_by_failing_loop))


async def test_a_loop_ends_when_it_is_stopped_or_has_nothing_to_do(loops: BackgroundLoops) -> None:
    work = [1, 2, 3]

    async def pop_work_item() -> None:
        if work.pop() == 2:
            raise RuntimeError("planted")

    emptying = loops.start("emptying", pop_work_item, is_due=lambda: bool(work))
    endless = loops.start("endless", forever)
    await emptying
    await cancel_and_wait([endless, None])

    assert work == [] and loops.failure_count_by_loop == {"emptying": 1, "endless": 0}
    assert endless.cancelled() and loops.running == ()


async def test_a_cancellation_that_a_body_swallows_is_repeated(loops: BackgroundLoops) -> None:
    swallowed = 0

    async def body() -> None:
        nonlocal swallowed
        try:
            await forever()
        except asyncio.CancelledError:
            swallowed += 1
            if swallowed == 2:
                raise

    task = loops.start("body", body)
    await asyncio.sleep(0)
    await cancel_and_wait([task])

    assert task.cancelled() and swallowed == 2


def test_pauses_grow_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    pauses = [pause_s(failures) for failures in range(1, 40)]

    assert pauses == sorted(pauses) and 0 < pauses[0] < pauses[-1] == PAUSE_MAX_S


async def _truth(is_so: bool) -> bool:
    return is_so

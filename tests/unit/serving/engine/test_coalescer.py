"""Single lookups that come together: how many there were of late decides whether the next ones wait for one another."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from serving.engine.coalescer import GROUP_SIZE_MIN, ITERATIONS_MAX, GetCoalescer


@pytest.fixture
def coalescer() -> GetCoalescer:
    """A coalescer whose service has the time 0, and may take 0.1 s for a read of L2."""
    service: Any = SimpleNamespace(monotonic_clock=lambda: 0.0, l2_bound_s=lambda: 0.1)
    return GetCoalescer(service, cast(Any, None), lambda: 0.0)


async def run_loop_iterations(count: int) -> None:
    """Let the event loop begin this many turns."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_as_many_as_make_a_group_make_the_next_ones_wait_for_company(coalescer: GetCoalescer) -> None:
    assert not any(coalescer.note_arrival() for _ in range(GROUP_SIZE_MIN))
    await run_loop_iterations(3)

    assert coalescer.is_busy and coalescer.note_arrival()


async def test_fewer_than_make_a_group_go_on_alone(coalescer: GetCoalescer) -> None:
    for _ in range(GROUP_SIZE_MIN - 1):
        coalescer.note_arrival()
    await run_loop_iterations(3)

    assert not coalescer.is_busy and not coalescer.note_arrival()


async def test_who_comes_in_the_next_turn_comes_along(coalescer: GetCoalescer) -> None:
    # Given one request fewer than make a group
    for _ in range(GROUP_SIZE_MIN - 1):
        coalescer.note_arrival()
    await run_loop_iterations(1)

    # When the last one comes in the next iteration of the loop
    coalescer.note_arrival()
    await run_loop_iterations(3)

    # Then they count together
    assert coalescer.is_busy


async def test_a_wave_ends_though_every_iteration_brings_one_more(coalescer: GetCoalescer) -> None:
    assert ITERATIONS_MAX < GROUP_SIZE_MIN
    for _ in range(GROUP_SIZE_MIN):
        coalescer.note_arrival()
        await run_loop_iterations(1)

    assert not coalescer.is_busy


async def test_what_came_of_late_is_forgotten_by_halves(coalescer: GetCoalescer) -> None:
    for _ in range(2 * GROUP_SIZE_MIN):
        coalescer.note_arrival()
    await run_loop_iterations(3)

    busy = []
    for _ in range(2):
        coalescer.note_arrival()
        await run_loop_iterations(3)
        busy.append(coalescer.is_busy)

    assert busy == [True, False]


@pytest.mark.parametrize(("started", "deadline_s", "has_time"), [(0.0, 0.1, True), (-0.01, 0.1, False)])
async def test_a_read_needs_no_clock_for_who_has_as_long_as_it_may_take(
    coalescer: GetCoalescer, started: float, deadline_s: float, has_time: bool
) -> None:
    get: Any = SimpleNamespace(request_started_at=started, options=SimpleNamespace(deadline_s=deadline_s))

    assert coalescer.has_time_for_l2(get) is has_time

import asyncio
import gc
from collections.abc import Awaitable, Sequence
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.tiers.singleflight import FlightAbandoned, SingleFlight, board_absent_keys

T = TypeVar("T")


class Work:
    """A computation that ends when told to, and says how often it ran and whether it was cancelled."""

    def __init__(self, value: int = 42, error: Exception | None = None, iterations: int = 0) -> None:
        self.value = value
        self.error = error
        self.iterations = iterations
        self.go = asyncio.Event()
        self.runs = 0
        self.cancelled = 0

    async def __call__(self) -> int:
        self.runs += 1
        try:
            await self.go.wait()
            for _ in range(self.iterations):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return self.value


async def within(awaited: Awaitable[T], limit_s: float = 5.0) -> T:
    """The result, or a failure instead of a test that hangs."""
    return await asyncio.wait_for(awaited, limit_s)


async def run_loop_iterations(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_callers_of_one_key_share_one_piece_of_work() -> None:
    flights, work = SingleFlight[str, int](), Work()
    callers = [asyncio.create_task(flights.do("key", work)) for _ in range(10_000)]
    await run_loop_iterations()

    work.go.set()

    assert set(await within(asyncio.gather(*callers))) == {42}
    assert work.runs == 1 and flights.started_count == 1 and flights.shared_count == 9_999
    assert len(flights) == 0


async def test_different_keys_do_not_wait_for_one_another() -> None:
    flights, slow, fast = SingleFlight[str, int](), Work(1), Work(2)
    waiting = asyncio.create_task(flights.do("slow", slow))
    await run_loop_iterations()

    fast.go.set()

    assert await flights.do("fast", fast) == 2
    assert not waiting.done()
    slow.go.set()
    assert await waiting == 1


async def test_cancelling_the_first_caller_cancels_no_other() -> None:
    flights, work = SingleFlight[str, int](), Work()
    first, second = (asyncio.create_task(flights.do("key", work)) for _ in range(2))
    await run_loop_iterations()

    first.cancel()
    await run_loop_iterations()
    work.go.set()

    assert await within(second) == 42
    assert first.cancelled() and work.runs == 1 and work.cancelled == 0


async def test_the_work_is_cancelled_when_the_last_caller_has_left() -> None:
    flights, work = SingleFlight[str, int](), Work()
    callers = [asyncio.create_task(flights.do("key", work)) for _ in range(3)]
    await run_loop_iterations()

    for caller in callers:
        caller.cancel()
        await run_loop_iterations()

    assert work.cancelled == 1 and len(flights) == 0


async def test_a_newcomer_does_not_board_work_that_is_being_cancelled() -> None:
    flights, new = SingleFlight[str, int](), Work(2)
    let_go = asyncio.Event()

    async def old() -> int:
        try:
            return await asyncio.Event().wait() and 1
        finally:
            await let_go.wait()

    caller = asyncio.create_task(flights.do("key", old))
    await run_loop_iterations()
    caller.cancel()
    await run_loop_iterations()
    assert caller.cancelled() and not let_go.is_set()
    new.go.set()

    assert await within(flights.do("key", new)) == 2
    let_go.set()


async def test_an_error_reaches_every_caller_and_the_next_one_starts_afresh() -> None:
    """A failed leader leaves nobody waiting, and nothing of it is kept."""
    flights, broken = SingleFlight[str, int](), Work(error=ValueError("broken"))
    callers = [asyncio.create_task(flights.do("key", broken)) for _ in range(3)]
    await run_loop_iterations()

    broken.go.set()
    outcomes = await within(asyncio.gather(*callers, return_exceptions=True))

    assert all(isinstance(outcome, ValueError) for outcome in outcomes)
    sound = Work(7)
    sound.go.set()
    assert await within(flights.do("key", sound)) == 7


async def test_work_cancelled_from_outside_is_an_error_to_its_callers_and_not_their_cancellation() -> None:
    flights = SingleFlight[str, int]()
    inner: list[asyncio.Future[int]] = []

    def work() -> Awaitable[int]:
        inner.append(asyncio.get_running_loop().create_future())
        return inner[0]

    callers = [asyncio.create_task(flights.do("key", work)) for _ in range(2)]
    await run_loop_iterations()
    inner[0].cancel()

    outcomes = await within(asyncio.gather(*callers, return_exceptions=True))

    assert all(isinstance(outcome, FlightAbandoned) for outcome in outcomes)


async def test_many_keys_take_off_together_and_join_what_is_under_way() -> None:
    """A follower is counted as shared, once."""
    flights = SingleFlight[str, int]()
    key_batches: list[Sequence[str]] = []
    go = asyncio.Event()

    async def work(keys: Sequence[str]) -> Sequence[int]:
        key_batches.append(tuple(keys))
        await go.wait()
        return [len(key) for key in keys]

    first = asyncio.create_task(flights.do_many(["a", "bb"], work))
    await run_loop_iterations()
    second = asyncio.create_task(flights.do_many(["bb", "ccc", "ccc", "a"], work))
    await run_loop_iterations()
    go.set()

    assert await first == [1, 2]
    assert await second == [2, 3, 3, 1]
    assert key_batches == [("a", "bb"), ("ccc",)]
    assert flights.started_count == 3 and flights.shared_count == 3


async def test_an_error_in_one_of_several_flights_is_raised_and_leaves_no_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    flights, sound, broken = SingleFlight[str, int](), Work(), Work(error=ValueError("broken"))
    sound_task = asyncio.create_task(flights.do("sound", sound))
    broken_task = asyncio.create_task(flights.do("broken", broken))
    await run_loop_iterations()

    async def none(keys: Sequence[str]) -> Sequence[int]:
        raise AssertionError("both keys have flights")

    batch_task = asyncio.create_task(flights.do_many(["sound", "broken"], none))
    await run_loop_iterations()
    broken.go.set()
    with pytest.raises(ValueError, match="broken"):
        await within(broken_task)
    sound.go.set()

    with pytest.raises(ValueError, match="broken"):
        await within(batch_task)
    assert await sound_task == 42
    gc.collect()
    assert "never retrieved" not in caplog.text


@st.composite
def cancellations(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(turn, caller) pairs: who is cancelled when."""
    return draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), max_size=8))


@settings(max_examples=300, deadline=None)
@given(
    cancelled=cancellations(),
    joins=st.lists(st.integers(0, 10), min_size=6, max_size=6),
    ends_at=st.integers(0, 12),
    fails=st.booleans(),
    work_turns=st.integers(0, 3),
)
def test_every_order_of_cancellations_leaves_the_remaining_callers_with_the_outcome(
    cancelled: list[tuple[int, int]], joins: list[int], ends_at: int, fails: bool, work_turns: int
) -> None:
    """A cancel at every await, by any caller, before, while and after the work ends."""

    async def run() -> None:
        flights = SingleFlight[str, int]()
        works: list[Work] = []
        go = asyncio.Event()

        def work() -> Awaitable[int]:
            started_work = Work(len(works), ValueError("broken") if fails else None, work_turns)
            started_work.go = go
            works.append(started_work)
            return started_work()

        callers: dict[int, asyncio.Task[int]] = {}
        hit: set[int] = set()
        for iteration in range(14):
            for caller, at in enumerate(joins):
                if at == iteration:
                    callers[caller] = asyncio.create_task(flights.do("key", work))
            for at, caller in cancelled:
                if at == iteration and caller in callers and callers[caller].cancel():
                    hit.add(caller)
            if iteration == ends_at:
                go.set()
            await asyncio.sleep(0)
        _, pending = await asyncio.wait(callers.values(), timeout=1.0)

        assert not pending, "somebody waits for ever"
        assert len(flights) == 0
        for caller, task in callers.items():
            if caller in hit and task.cancelled():
                continue
            assert not task.cancelled(), "a caller that nobody cancelled was cancelled"
            if fails:
                assert isinstance(task.exception(), ValueError)
            else:
                assert task.result() in range(len(works))
        assert flights.started_count == len(works)
        assert flights.started_count + flights.shared_count <= len(callers)

    asyncio.run(run())


async def test_a_future_is_used_as_it_is() -> None:
    flights = SingleFlight[str, int]()
    futures: list[asyncio.Future[Sequence[int]]] = []

    def work(keys: Sequence[str]) -> Awaitable[Sequence[int]]:
        futures.append(asyncio.get_running_loop().create_future())
        return futures[0]

    caller = asyncio.create_task(flights.do_many(["a", "b"], work))
    await run_loop_iterations()
    futures[0].set_result([1, 2])

    assert await within(caller) == [1, 2]


async def test_work_that_cannot_even_start_leaves_no_flight() -> None:
    flights = SingleFlight[str, int]()

    def work(keys: Sequence[str]) -> Awaitable[Sequence[int]]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        await flights.do_many(["a"], work)

    assert len(flights) == 0


async def test_a_lone_caller_whose_time_is_over_leaves_alone() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    landing: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    patient = asyncio.create_task(flights.do("key", lambda: landing))
    await run_loop_iterations()

    with pytest.raises(TimeoutError):
        await within(flights.do("key", lambda: landing, 0.0))

    assert not landing.done() and not patient.done()
    landing.set_result(42)
    assert await within(patient) == 42 and len(flights) == 0


async def test_work_is_cancelled_when_the_time_of_its_only_caller_is_over() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    landing: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError):
        await within(flights.do("key", lambda: landing, 0.0))

    assert landing.cancelled() and len(flights) == 0


@given(
    initial_flights=st.dictionaries(st.integers(0, 9), st.just("other"), max_size=5),
    keys=st.lists(st.integers(0, 9), max_size=12),
)
def test_keys_that_enter_are_those_that_were_not_there(initial_flights: dict[int, object], keys: list[int]) -> None:
    under_way, flight = dict(initial_flights), object()

    joined_indexes = board_absent_keys(under_way, keys, flight)

    own_keys = [key for index, key in enumerate(keys) if index not in joined_indexes]
    assert len(set(own_keys)) == len(own_keys) and set(own_keys) == set(keys) - set(initial_flights)
    assert under_way == initial_flights | dict.fromkeys(own_keys, flight)

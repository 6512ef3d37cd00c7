"""Work on the event loop goes on by the portion: sockets first, begun work before new, nothing for who has gone."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from serving.admission.controller import Admission
from serving.admission.work_pacer import CallerGone, WorkPacer, noted_wait_s, store_wait, wait_for_next_portion
from serving.http.asgi_app import AsgiApp
from tests.fakes import FakeClock
from tests.unit.serving.world import PATHS, gate_of

BUDGET_S, PORTION_S = 0.004, 0.003


def stays() -> bool:
    return False


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def pacer(clock: FakeClock) -> WorkPacer:
    return WorkPacer(BUDGET_S, clock)


class Iterations:
    """Numbers of the event loop's iterations, counted for as long as it is entered."""

    def __init__(self) -> None:
        self.iteration_number = 0
        self._handle: asyncio.Handle | None = None

    def __enter__(self) -> "Iterations":
        self._count()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._handle is not None
        self._handle.cancel()

    def _count(self) -> None:
        self.iteration_number += 1
        self._handle = asyncio.get_running_loop().call_soon(self._count)


async def test_an_iteration_has_no_more_work_than_its_budget(pacer: WorkPacer, clock: FakeClock) -> None:
    worked: list[int] = []

    async def work() -> None:
        await pacer.wait_to_begin(stays)
        for _ in range(3):
            worked.append(iterations.iteration_number)
            clock.tick(PORTION_S)
            await pacer.go_on()

    with Iterations() as iterations:
        await asyncio.gather(*(work() for _ in range(40)))

    # A second portion begins within the budget and ends after it.
    assert len(worked) == 120 and max(worked.count(number) for number in set(worked)) == 2


async def test_requests_that_got_their_replies_at_once_go_on_by_the_budget(pacer: WorkPacer, clock: FakeClock) -> None:
    # Given requests that began one by one and all wait for one reply of Redis
    reply_event = asyncio.Event()
    worked: list[int] = []

    async def work() -> None:
        await pacer.wait_to_begin(stays)
        await reply_event.wait()
        await pacer.resume()
        worked.append(iterations.iteration_number)
        clock.tick(PORTION_S)

    with Iterations() as iterations:
        tasks = [asyncio.create_task(work()) for _ in range(20)]
        await asyncio.sleep(0)
        # When the reply comes
        reply_event.set()
        await asyncio.gather(*tasks)

    # Then an iteration works until its budget is spent, which the second of two portions exceeds
    assert len(worked) == 20 and max(worked.count(number) for number in set(worked)) == 2


async def test_work_goes_on_at_once_where_the_iteration_has_room(pacer: WorkPacer) -> None:
    with Iterations() as iterations:
        initial_iteration = iterations.iteration_number
        await pacer.wait_to_begin(stays)
        await pacer.resume()
        assert iterations.iteration_number == initial_iteration


async def test_small_requests_wait_for_the_sockets_once_in_a_budget_of_work(pacer: WorkPacer, clock: FakeClock) -> None:
    # Given requests of a little over an eighth of the budget each, one after the other, on a loop that is never idle
    async def work() -> bool:
        iteration = iterations.iteration_number
        await pacer.wait_to_begin(stays)
        clock.tick(BUDGET_S / 7.9)
        return iterations.iteration_number > iteration

    with Iterations() as iterations:
        waited = [await asyncio.create_task(work()) for _ in range(9)]

    assert waited == [False] * 8 + [True]


async def test_requests_begin_in_their_order_and_begun_ones_end_first(pacer: WorkPacer, clock: FakeClock) -> None:
    worked_portions: list[tuple[int, int]] = []

    async def work(number: int) -> None:
        await pacer.wait_to_begin(stays)
        for portion in range(2):
            worked_portions.append((number, portion))
            clock.tick(2 * BUDGET_S)
            await pacer.go_on()

    await asyncio.gather(*(work(number) for number in range(5)))

    begin_order = [number for number, portion in worked_portions if portion == 0]
    assert begin_order == sorted(begin_order)
    assert worked_portions.index((1, 1)) < worked_portions.index((3, 0))


async def test_who_is_alone_begins_at_once(pacer: WorkPacer) -> None:
    with Iterations() as iterations:
        initial_iteration = iterations.iteration_number
        assert await pacer.wait_to_begin(stays) == 0.0
        assert iterations.iteration_number == initial_iteration


async def test_work_waits_while_there_is_something_at_the_sockets_and_not_for_ever(
    pacer: WorkPacer, clock: FakeClock
) -> None:
    ticking = True

    async def handle_sockets() -> None:
        while ticking:
            clock.tick(0.001)
            await asyncio.sleep(0)

    handling = asyncio.create_task(handle_sockets())
    await pacer.wait_to_begin(stays)  # alone: at once
    clock.tick(BUDGET_S)
    began_at = clock()
    waited_s = await pacer.wait_to_begin(stays)
    assert 0.045 < waited_s < 0.06 and clock() - began_at == pytest.approx(waited_s)

    ticking = False
    await handling
    clock.tick(BUDGET_S)
    assert await pacer.wait_to_begin(stays) == 0.0


async def test_who_has_gone_while_it_waited_is_dropped(pacer: WorkPacer, clock: FakeClock) -> None:
    worked: list[int] = []

    async def work(number: int) -> None:
        await pacer.wait_to_begin(lambda: number % 2 == 1)
        worked.append(number)
        clock.tick(0.06)

    outcomes = await asyncio.gather(*(work(number) for number in range(20)), return_exceptions=True)

    assert worked == list(range(0, 20, 2))
    assert [type(outcome) for outcome in outcomes[1::2]] == [CallerGone] * 10
    assert pacer.is_backlogged  # more of them are expected for a second
    clock.tick(1.0)
    assert not pacer.is_backlogged


async def test_dropped_connections_are_expected_no_longer_than_work_waits(pacer: WorkPacer, clock: FakeClock) -> None:
    # Given work that waits for a second
    await pacer.wait_to_begin(stays)
    clock.tick(BUDGET_S)
    waiting = asyncio.create_task(pacer.wait_to_begin(stays))
    await asyncio.sleep(0)
    clock.tick(1.0)

    # When a connection is dropped, the work goes on, and more connections are dropped after it
    pacer.note_dropped_connection()
    await waiting
    for _ in range(9):
        clock.tick(0.1)
        assert pacer.is_backlogged
        pacer.note_dropped_connection()

    # Then no more are expected a second after the first one
    clock.tick(0.1)
    assert not pacer.is_backlogged


async def test_a_cancelled_waiter_holds_up_no_other(pacer: WorkPacer, clock: FakeClock) -> None:
    await pacer.wait_to_begin(stays)
    clock.tick(BUDGET_S)
    waiting = [asyncio.create_task(pacer.wait_to_begin(stays)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    clock.tick(1.0)
    assert pacer.is_backlogged and pacer.longest_wait_s() == 1.0

    outcomes = await asyncio.gather(*waiting, return_exceptions=True)

    assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, float, float]
    assert not pacer.is_backlogged and pacer.longest_wait_s() == 0.0


async def test_short_work_goes_ahead(pacer: WorkPacer, clock: FakeClock) -> None:
    order: list[str] = []

    async def work(name: str, *, is_short: bool) -> None:
        await pacer.wait_to_begin(stays, is_short_request=is_short)
        order.append(name)
        clock.tick(2 * BUDGET_S)

    tasks = [asyncio.create_task(work(f"long-{number}", is_short=False)) for number in range(3)]
    tasks.append(asyncio.create_task(work("short", is_short=True)))
    await asyncio.gather(*tasks)

    assert order.index("short") <= 1


async def test_without_a_pacer_others_get_the_loop_all_the_same() -> None:
    with Iterations() as iterations:
        initial_iteration = iterations.iteration_number
        await wait_for_next_portion()
        assert iterations.iteration_number > initial_iteration


def test_a_wait_is_kept_with_the_request() -> None:
    scope: dict[str, Any] = {}
    assert noted_wait_s(scope) == 0.0

    store_wait(scope, 0.5)
    assert noted_wait_s(scope) == 0.5


def front(clock: FakeClock, work_s: float = 0.1) -> tuple[AsgiApp, list[str], Admission]:
    """An application whose lookups take so long, the ids that it worked on, and its admission."""
    worked: list[str] = []
    app = AsgiApp(api_paths=PATHS)

    @app.post("/v1/lookup/{name}")
    async def lookup(name: str) -> str:
        worked.append(name)
        clock.tick(work_s)
        return name

    admission = Admission(target_s=0.02, interval_s=0.1, requests_max=100)
    admission.work_pacer = WorkPacer(BUDGET_S, clock)
    app.gate = gate_of(admission, deadline_ms=450.0)
    return app, worked, admission


async def collect_messages(app: AsgiApp, name: str, is_gone: Callable[[], bool] = stays) -> list[Any]:
    """Messages that the application sends for a lookup of this name."""
    messages: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        messages.append(message)

    path = f"/v1/lookup/{name}"
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "root_path": "", "state": {}, "larder.is_gone": is_gone,
    }  # fmt: skip
    await app(scope, receive, send)
    return messages


async def test_nothing_is_done_and_nothing_sent_for_a_client_that_has_gone(clock: FakeClock) -> None:
    app, worked, admission = front(clock, work_s=0.01)

    answers = await asyncio.gather(
        collect_messages(app, "first"), collect_messages(app, "gone", lambda: True), collect_messages(app, "last")
    )

    assert worked == ["first", "last"] and [len(messages) for messages in answers] == [2, 0, 2]
    assert admission.shed_counts["gone"] == 1 and admission.requests_under_way == 0


async def test_who_waited_for_all_of_its_deadline_is_refused(clock: FakeClock) -> None:
    app, worked, admission = front(clock)

    answers = await asyncio.gather(*(collect_messages(app, str(number)) for number in range(8)))

    statuses = [messages[0]["status"] for messages in answers]
    # Two begin at once; those behind them wait for 0.1 s each.
    assert statuses == [200] * 6 + [503] * 2 and worked == list("012345")
    assert b'"overloaded"' in answers[-1][1]["body"] and admission.shed_counts["late"] == 2


async def test_a_queue_of_work_counts_as_one_of_the_loop(clock: FakeClock) -> None:
    app, _, admission = front(clock)
    tasks = [asyncio.create_task(collect_messages(app, str(number))) for number in range(4)]
    await asyncio.sleep(0)
    clock.tick(0.2)
    for _ in range(2):
        admission.observe(0.001, 0.0, clock())
        clock.tick(0.1)

    assert admission.is_loop_behind and admission.loop_valve.admitted_share < 1.0
    await asyncio.gather(*tasks)


async def test_no_large_answer_is_begun_while_peers_do_not_take_theirs(clock: FakeClock) -> None:
    app, worked, admission = front(clock)
    app.has_room_for_answer = lambda: False

    messages = await collect_messages(app, "batch")

    assert messages[0]["status"] == 503 and worked == [] and admission.shed_counts["full"] == 1

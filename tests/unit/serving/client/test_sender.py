"""Faults on the way, planted in a transport; time is a clock that only sleeping moves."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
import pytest

from serving.client import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    Garbled,
    GenerationGone,
    InvalidRequest,
    Options,
    Pace,
    Policy,
    Refusal,
    Unauthorized,
    Unavailable,
    Unreachable,
)
from serving.client.sender import ExtraRequestBudget

URL = "http://larder"
ANSWER = {
    "id": "u-1", "table": "t", "source": "l1", "generation": "g-1",
    "age_seconds": 1.0, "published_at": "2026-01-01T00:00:00Z", "items": ["i-1"], "scores": [0.5],
}  # fmt: skip
Step = httpx.Response | Exception
Reply = Callable[[httpx.Request], Coroutine[None, None, httpx.Response]]


def good(**fields: Any) -> httpx.Response:
    return httpx.Response(200, content=orjson.dumps(ANSWER | fields))


def make_error_response(status: int, code: str = "not_ready", **headers: str) -> httpx.Response:
    error = {"code": code, "message": "no", "field": "k", "held": ["g-2"]}
    return httpx.Response(status, content=orjson.dumps({"error": error}), headers=headers)


@dataclass
class Clock:
    now_s: float = 100.0
    slept: list[float] = field(default_factory=list)
    seed: int = 1

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds
        await asyncio.sleep(0)

    def pace(self) -> Pace:
        return Pace(lambda: self.now_s, self.sleep, random.Random(self.seed))


@dataclass
class Script:
    """Answers request after request with the next step, the last one for ever."""

    steps: list[Step]
    requests: list[httpx.Request] = field(default_factory=list)

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        step = self.steps[min(len(self.requests), len(self.steps) - 1)]
        self.requests.append(request)
        if isinstance(step, Exception):
            raise step
        return httpx.Response(step.status_code, headers=step.headers, content=step.content)


def client(reply: Reply, clock: Clock | None = None, **policy: Any) -> AsyncClient:
    return AsyncClient(
        URL, policy=Policy(**policy), pace=(clock or Clock()).pace(), transport=httpx.MockTransport(reply)
    )


def get_deadlines_ms(script: Script) -> list[float]:
    return [float(request.headers["x-deadline-ms"]) for request in script.requests]


@pytest.mark.parametrize(
    "fault",
    [httpx.ConnectError("x"), httpx.ReadError("x"), httpx.RemoteProtocolError("x"), make_error_response(502),
    make_error_response(503), make_error_response(504)],
)  # fmt: skip
async def test_a_lookup_is_tried_again_after_what_may_pass(fault: Step) -> None:
    script, clock = Script([fault, good()]), Clock()

    answer = await client(script, clock).lookup("t", "u-1")

    assert answer.items == ("i-1",) and len(script.requests) == 2
    assert 0 < clock.slept[0] <= 0.010


@pytest.mark.parametrize("status", [400, 401, 404, 409, 413, 422, 429, 500, 501])
async def test_what_would_fail_again_is_asked_once(status: int) -> None:
    script = Script([make_error_response(status)])

    with pytest.raises(Refusal):
        await client(script).lookup("t", "u-1")

    assert len(script.requests) == 1


async def test_attempts_are_bounded_and_wait_ever_longer() -> None:
    script, clock = Script([make_error_response(503)]), Clock()

    with pytest.raises(Unavailable, match="not_ready"):
        await client(script, clock, attempts=4, backoff_ms=100, backoff_max_ms=250).lookup("t", 1)

    rng = random.Random(1)
    assert clock.slept == [rng.uniform(0, backoff_max_ms) / 1000 for backoff_max_ms in (100, 200, 250)]


async def test_retry_after_is_kept_and_counts_against_the_deadline() -> None:
    script, clock = Script([make_error_response(503, **{"Retry-After": "2"}), good()]), Clock()

    await client(script, clock, deadline_ms=5_000, told_share=0.9).lookup("t", "u-1")

    (slept,) = clock.slept
    assert 2.0 < slept <= 2.5 and get_deadlines_ms(script) == [4_500, int((5_000 - slept * 1_000) * 0.9)]


async def test_retry_after_may_be_a_date() -> None:
    dated = {"Date": "Sat, 21 Nov 2026 10:00:00 GMT", "Retry-After": "Sat, 21 Nov 2026 10:00:03 GMT"}  # fmt: skip
    script, clock = Script([make_error_response(503, **dated), good()]), Clock()

    await client(script, clock, deadline_ms=5_000).lookup("t", "u-1")

    assert 3.0 < clock.slept[0] <= 3.75


async def test_no_attempt_waits_past_the_deadline() -> None:
    script, clock = Script([make_error_response(503, **{"Retry-After": "1"}), good()]), Clock()

    with pytest.raises(Unavailable) as refused:
        await client(script, clock, deadline_ms=999).lookup("t", "u-1")

    assert (refused.value.code, clock.slept, len(script.requests)) == ("not_ready", [], 1)


async def test_an_outage_does_not_multiply_the_load() -> None:
    script = Script([make_error_response(503)])
    asking = client(script, attempts=3, retry_share=0.2)

    for _ in range(200):
        with pytest.raises(Unavailable):
            await asking.lookup("t", "u-1")

    assert 200 < len(script.requests) <= 200 + 10 + 200 * 0.2


async def test_feedback_that_may_have_been_counted_is_not_sent_again() -> None:
    for fault in (httpx.ReadError("x"), httpx.WriteError("x"), make_error_response(503), make_error_response(502)):
        script = Script([fault])
        with pytest.raises((Unreachable, Unavailable)):
            await client(script).feedback("click", generation="g-1")
        assert len(script.requests) == 1


async def test_feedback_that_never_left_is_sent_again() -> None:
    arm = httpx.Response(200, content=b'{"arm":"canary"}')
    script = Script([httpx.ConnectError("x"), httpx.ConnectTimeout("x"), arm])

    assert await client(script).feedback("click", canary_key=7, count=2) == "canary"

    assert len({request.content for request in script.requests}) == 1
    assert orjson.loads(script.requests[0].content) == {"event": "click", "count": 2, "canary_key": "7"}


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (401, "unauthorized", Unauthorized), (409, "generation_gone", GenerationGone),
        (422, "invalid_k", InvalidRequest), (500, "internal_error", Unavailable),
    ],
)  # fmt: skip
async def test_a_refusal_carries_the_services_own_reason(status: int, code: str, kind: type[Refusal]) -> None:
    with pytest.raises(kind) as refused:
        await client(Script([make_error_response(status, code)])).lookup("t", "u-1")

    refusal = refused.value
    assert (refusal.status, refusal.code, refusal.field) == (status, code, "k")
    assert refusal.details["held"] == ["g-2"]


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b'{"error": "x"}', b"", b"\xff"])
async def test_a_proxys_own_page_is_a_refusal_too(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await client(Script([httpx.Response(404, content=body)])).lookup("t", "u-1")

    assert refused.value.code == "http_error"


@pytest.mark.parametrize("body", [b"", b"[]", b'{"id":"u-1"}', b'{"scores":["x"]}', b"{"])
async def test_what_is_no_answer_is_not_taken_for_one(body: bytes) -> None:
    with pytest.raises(Garbled):
        await client(Script([httpx.Response(200, content=body)])).lookup("t", "u-1")


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_a_batch_of_another_length_is_not_taken_for_the_answer(count: int) -> None:
    body = httpx.Response(200, content=orjson.dumps({"answers": [ANSWER] * count}))

    with pytest.raises(Garbled, match="2 entities"):
        await client(Script([body])).lookup_many("t", ["a", "b"])


async def test_a_service_that_never_answers_is_given_up_at_the_deadline() -> None:
    handler_ended = asyncio.Event()

    async def never(_request: httpx.Request) -> httpx.Response:
        try:
            await asyncio.Event().wait()
        finally:
            handler_ended.set()
        raise AssertionError

    with pytest.raises(DeadlineExceeded):
        await client(never).lookup("t", "u-1", Options(deadline_ms=20))

    assert handler_ended.is_set()


@dataclass
class Crowd:
    """Requests are answered when the test lets them go; the most at once are counted."""

    let_go: asyncio.Event = field(default_factory=asyncio.Event)
    paths: list[str] = field(default_factory=list)
    crowded_at: int = 1
    is_crowded: asyncio.Event = field(default_factory=asyncio.Event)
    under_way: int = 0
    most: int = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(request.url.path)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        if len(self.paths) == self.crowded_at:
            self.is_crowded.set()
        try:
            await self.let_go.wait()
        finally:
            self.under_way -= 1
        return good()


async def test_no_more_requests_than_connections_enter_the_pool_at_once() -> None:
    crowd = Crowd(crowded_at=4)
    asking = client(crowd, connections=4, deadline_ms=60_000)
    calls = [asyncio.create_task(asking.lookup("t", f"u-{number}")) for number in range(200)]
    async with asyncio.timeout(10):
        await crowd.is_crowded.wait()

    crowd.let_go.set()
    answers = await asyncio.gather(*calls)

    assert len(answers) == 200 and crowd.most == 4
    assert crowd.paths == [f"/v1/lookup/t/u-{number}" for number in range(200)]


async def test_waiting_for_a_connection_counts_for_the_deadline() -> None:
    crowd = Crowd()
    asking = client(crowd, connections=1)
    first_call = asyncio.create_task(asking.lookup("t", "u-1", Options(deadline_ms=60_000)))
    async with asyncio.timeout(10):
        await crowd.is_crowded.wait()

    with pytest.raises(DeadlineExceeded, match=r"all 1 connections are in use.*lookup_many"):
        await asking.lookup("t", "u-2", Options(deadline_ms=20))
    crowd.let_go.set()

    assert (await first_call).id == "u-1" and (await asking.lookup("t", "u-3", Options(deadline_ms=60_000))).id == "u-1"
    assert crowd.paths == ["/v1/lookup/t/u-1", "/v1/lookup/t/u-3"]


async def test_what_is_told_to_the_service_is_what_is_left_after_the_wait() -> None:
    script, clock = Script([good()]), Clock()
    asking = client(script, clock, connections=1, deadline_ms=1_000, told_share=0.5)
    slots = asking._sender._connection_slots
    await slots.acquire()
    call = asyncio.create_task(asking.lookup("t", "u-1"))
    await asyncio.sleep(0)

    clock.now_s += 0.6
    slots.release()
    await call

    assert get_deadlines_ms(script) == [pytest.approx(200, abs=1)]


async def test_the_deadline_that_a_call_names_is_the_one_the_service_is_asked_for() -> None:
    script = Script([good()])

    await client(script, deadline_ms=100, told_share=0.5).lookup("t", "u-1", Options(deadline_ms=3_000))  # fmt: skip

    assert get_deadlines_ms(script) == [1_500] and script.requests[0].url.params["deadline_ms"] == "3000"


async def test_errors_name_no_library_but_keep_the_cause() -> None:
    with pytest.raises(Unreachable) as failed:
        await client(Script([httpx.ConnectError("refused")]), attempts=1).lookup("t", "u-1")

    assert not failed.value.is_sent and isinstance(failed.value.__cause__, httpx.ConnectError)


@dataclass
class Slow:
    """The first request hangs until it is cancelled or let go; later ones are answered."""

    let_go: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    request_count: int = 0
    later: httpx.Response = field(default_factory=lambda: good(id="second"))

    async def __call__(self, _request: httpx.Request) -> httpx.Response:
        self.request_count += 1
        if self.request_count % 2 == 0:
            self.failed.set()
            return self.later
        try:
            await self.let_go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return good(id="first")


async def earned(asking: AsyncClient, requests: int) -> None:
    for _ in range(requests):
        asking._sender._hedge_budget.earn()


async def test_a_second_request_wins_where_the_first_hangs_and_ends_it() -> None:
    slow, clock = Slow(), Clock()
    asking = client(slow, clock, hedge_after_ms=20, hedge_share=0.1)
    await earned(asking, 10)

    answer = await asking.lookup("t", "u-1")

    assert answer.id == "second" and clock.slept == [0.020]
    async with asyncio.timeout(5):
        await slow.cancelled.wait()


async def test_hedges_are_a_bounded_share() -> None:
    slow = Slow()
    slow.let_go.set()

    async def hang(_request: httpx.Request) -> httpx.Response:
        slow.request_count += 1
        for _ in range(5):  # longer than the alarm, which takes one turn of the loop
            await asyncio.sleep(0)
        return good()

    asking = client(hang, hedge_after_ms=1, hedge_share=0.1)

    for _ in range(100):
        await asking.lookup("t", "u-1")

    assert slow.request_count == 110


async def test_a_quick_answer_is_not_asked_for_twice() -> None:
    script, waiting = Script([good()]), asyncio.Event()

    async def sleep(_seconds: float) -> None:
        await waiting.wait()

    asking = AsyncClient(
        URL, policy=Policy(hedge_after_ms=5), pace=Pace(sleep=sleep), transport=httpx.MockTransport(script),
    )  # fmt: skip
    await earned(asking, 100)

    await asking.lookup("t", "u-1")

    assert len(script.requests) == 1


async def test_a_hedge_that_fails_leaves_the_first_its_chance() -> None:
    slow = Slow(later=make_error_response(503))
    asking = client(slow, hedge_after_ms=5)
    await earned(asking, 10)

    work = asyncio.create_task(asking.lookup("t", "u-1"))
    async with asyncio.timeout(5):
        await slow.failed.wait()
    for _ in range(10):  # turns of the loop in which the failure is heard of
        await asyncio.sleep(0)
    slow.let_go.set()

    assert (await work).id == "first" and slow.request_count == 2


async def test_feedback_is_never_hedged() -> None:
    slow, clock = Slow(later=httpx.Response(200, content=b'{"arm":null}')), Clock()
    asking = client(slow, clock, hedge_after_ms=1, deadline_ms=20)
    await earned(asking, 100)

    with pytest.raises(DeadlineExceeded):
        await asking.feedback("click", generation="g-1")

    assert slow.request_count == 1


def test_an_allowance_saves_up_to_its_bound() -> None:
    allowance = ExtraRequestBudget(0.5, saved_requests_max=2.0)
    for _ in range(100):
        allowance.earn()

    assert [allowance.try_spend() for _ in range(3)] == [True, True, False]


def test_threads_share_a_client_without_a_loop() -> None:
    transport = httpx.MockTransport(Script([good()]))
    with Client(URL, transport=transport) as larder, ThreadPoolExecutor(4) as pool:
        answer_ids = list(pool.map(lambda _: larder.lookup("t", "u-1").id, range(40), timeout=30))

    assert answer_ids == ["u-1"] * 40
    with pytest.raises(RuntimeError, match="closed"):
        larder.lookup("t", "u-1")
    larder.close()


@pytest.mark.parametrize("url", ["larder:8000", "ftp://larder", "http://", "http://larder:x", ""])
def test_a_url_that_names_no_server_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match=r"http|URL"):
        AsyncClient(url)


@pytest.mark.parametrize("token", ["two words", "line\n", "bell\a"])
def test_a_token_that_no_header_can_carry_is_refused_at_once(token: str) -> None:
    with pytest.raises(ValueError, match="token"):
        AsyncClient(URL, token=token)


@pytest.mark.parametrize("setting", [{"deadline_ms": 0}, {"attempts": 0}, {"told_share": 0}, {"hedge_share": 1.5}])
def test_a_policy_that_cannot_be_kept_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        Policy(**setting)


def test_a_client_from_before_a_fork_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(URL, transport=httpx.MockTransport(Script([good()]))) as larder:
        with monkeypatch.context() as patch:
            patch.setattr("serving.client.clients.os.getpid", lambda: -1)
            with pytest.raises(RuntimeError, match="fork"):
                larder.lookup("t", "u-1")
        assert larder.lookup("t", "u-1").id == "u-1"


async def test_no_request_leaves_once_the_deadline_is_over() -> None:
    script, clock = Script([good()]), Clock()

    class Late(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            clock.now_s += 10  # all of the call's time goes with its first piece
            return await script(request)

    body = httpx.Response(200, content=orjson.dumps({"answers": [ANSWER]}))
    script.steps = [body]
    asking = AsyncClient(URL, policy=Policy(max_batch=1, at_once=1), pace=clock.pace(), transport=Late())

    with pytest.raises(DeadlineExceeded):
        await asking.lookup_many("t", ["a", "b", "c"])

    assert len(script.requests) == 1


async def test_who_was_refused_at_one_moment_does_not_come_back_at_one_moment() -> None:
    clocks = [Clock(seed=seed) for seed in range(20)]
    for clock in clocks:
        script = Script([make_error_response(503, **{"Retry-After": "1"}), good()])
        await client(script, clock, deadline_ms=5_000).lookup("t", "u-1")

    slept = [clock.slept[0] for clock in clocks]
    assert len(set(slept)) == 20 and min(slept) >= 1.0 and max(slept) - min(slept) > 0.1

"""What a request may hold on its way through the application: a place until its answer starts, room for its body."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from serving.access.callers import Callers
from serving.admission.controller import Admission
from serving.http.asgi_app import AsgiApp
from serving.requests.bodies import BodyBudget
from serving.requests.errors import Problem
from serving.requests.options import Limits
from serving.requests.parsing import QueryOptionsCache
from tests.unit.serving.world import PATHS, gate_of

PATH = "/v1/lookup/x/y"


def front(*, is_known: bool = True, is_behind: bool = False) -> AsgiApp:
    """An application without a route, whose hot route leaves everything to it."""

    async def post(_scope: Any, receive: Any) -> tuple[None, Any]:
        return None, receive

    admission = Admission(target_s=0.02, interval_s=0.1, requests_max=1)
    admission.loop_valve.interval_wait = 1.0 if is_behind else 0.0
    app = AsgiApp(api_paths=PATHS, bodies_bytes_max=10)
    app.fast_path = SimpleNamespace(ready=lambda _scope: None, parse_get=lambda _scope: None, post=post)
    app.callers = Callers(answers_without_token=is_known)
    app.gate = gate_of(admission, deadline_ms=100_000.0)
    return app


def scope(method: str) -> dict[str, Any]:
    """Of a request without headers."""
    return {
        "type": "http", "method": method, "path": PATH, "raw_path": PATH.encode(), "query_string": b"", "headers": [],
        "root_path": "", "state": {},
    }  # fmt: skip


async def never() -> Any:
    """What nobody may ask for."""
    raise AssertionError("the body was read")


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_who_does_not_read_holds_no_place(method: str) -> None:
    async def run() -> None:
        app, started = front(), asyncio.Event()

        async def send(_message: Any) -> None:
            started.set()
            await asyncio.Event().wait()

        assert app.gate is not None
        task = asyncio.create_task(app(scope(method), never, send))
        await started.wait()
        assert app.gate.admission.requests_under_way == 0
        assert app.gate.admission.enter()
        task.cancel()
        await asyncio.wait([task])
        assert app.gate.admission.requests_under_way == 1  # given back once

    asyncio.run(run())


@pytest.mark.parametrize("is_known", [False, True])
def test_of_a_stranger_no_body_is_read_however_late_the_service_is(is_known: bool) -> None:
    async def run() -> None:
        app, sent_messages, read = (front(is_known=is_known, is_behind=True), list[Any](), list[int]())

        async def receive() -> Any:
            read.append(1)
            return {"type": "http.request", "body": b""}

        async def send(message: Any) -> None:
            sent_messages.append(message)

        await app(scope("POST"), receive, send)
        assert sent_messages[0]["status"] == 404
        assert len(read) == is_known

    asyncio.run(run())


def receiving(*bodies: bytes) -> Callable[[], Awaitable[Any]]:
    """A body in these pieces."""
    pieces = list(bodies)

    async def receive() -> Any:
        body = pieces.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(pieces)}

    return receive


def test_bodies_of_all_requests_have_a_bound_and_give_their_room_back() -> None:
    async def run() -> None:
        bodies = BodyBudget(10)
        with bodies.of(receiving(b"1234", b"56")) as first:
            assert [(await first())["body"] for _ in range(2)] == [b"1234", b"56"]
            with bodies.of(receiving(b"7890", b"1")) as second:
                assert (await second())["body"] == b"7890"
                with pytest.raises(Problem) as refused:
                    await second()
            assert bodies.held_bytes == 6
        assert bodies.held_bytes == 0
        assert (refused.value.status, refused.value.reason) == (503, "overloaded")

    asyncio.run(run())


def test_a_body_that_finds_no_room_is_refused() -> None:
    async def run() -> None:
        app, sent_messages = front(is_behind=True), list[Any]()

        async def send(message: Any) -> None:
            sent_messages.append(message)

        await app(scope("POST"), receiving(b"x" * 11), send)
        assert sent_messages[0]["status"] == 503 and b'"overloaded"' in sent_messages[1]["body"]
        assert app.body_budget.held_bytes == 0

    asyncio.run(run())


def test_long_queries_are_read_and_not_kept() -> None:
    queries = QueryOptionsCache(Limits(1, 1, 1, 100.0, 100.0))
    short, long_ = b"k=5", b"k=5" + b"&k=5" * 100

    assert queries.of(short) == queries.of(long_) and queries.of(long_) is not None
    assert list(queries._options_by_query) == [short]

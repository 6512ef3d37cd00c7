"""The client against the real application over a real night: every route, long batches, flips, deadlines."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime, timedelta

import httpx
import numpy as np
import pytest

from precompute.config.settings import NightConfig
from serving.client import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    Entity,
    GenerationGone,
    InvalidRequest,
    NewEvent,
    Options,
    Policy,
    Source,
    Unreachable,
)
from tests.integration.nights import DATA_UNTIL, build_night, build_verified, histories, publish
from tests.integration.serving_app import BASE, Running, eventually, serving
from tests.polling import poll_until

PATIENT = 10_000.0


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    return build_night(tmp_path_factory.mktemp("night"), redis_url, users=200, items=60)


@pytest.fixture
async def app(night: NightConfig) -> AsyncIterator[Running]:
    async with serving(night) as running:
        yield running


class Watched(httpx.AsyncBaseTransport):
    """The application itself, with every request noted and something done before some of them."""

    def __init__(self, app: Running) -> None:
        self._inner = app.http._transport
        self.requests: list[httpx.Request] = []
        self.hook_by_number: dict[int, Callable[[], Awaitable[None]]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if (event := self.hook_by_number.pop(len(self.requests), None)) is not None:
            await event()
        return await self._inner.handle_async_request(request)


def asking(transport: Watched, **policy: float) -> AsyncClient:
    settings = {"deadline_ms": PATIENT} | policy
    return AsyncClient(BASE, transport=transport, policy=Policy(**settings))  # type: ignore[arg-type]


async def test_every_documented_route_under_v1_has_a_method(app: Running, night: NightConfig) -> None:
    documented = set((await app.get("/openapi.json"))["paths"])
    user, history = min(histories(night).items())
    watched = Watched(app)

    async with asking(watched) as larder:
        await larder.lookup("user_topk", user)
        await larder.lookup_many("user_topk", [user])
        await larder.lookup_tables([Entity(user, table="user_vector")])
        await larder.score(user, history)
        await larder.feedback("click", generation="g")
        await larder.generations()
        with pytest.raises(InvalidRequest, match="events_disabled"):
            await larder.send_events([NewEvent("1", user=user, item="i")])

    paths = {request.url.path for request in watched.requests}
    called = {
        f"/v1/lookup/user_topk/{user}": "/v1/lookup/{table}/{entity}",
        "/v1/lookup/user_topk": "/v1/lookup/{table}",
    }
    # The client has no method for explanations, which people read: `larder explain`.
    assert {called.get(path, path) for path in paths} == {
        path for path in documented if path.startswith("/v1/") and "/explain/" not in path
    }


async def test_results_are_typed_and_cannot_be_changed(app: Running, night: NightConfig) -> None:
    user, history = min(histories(night).items())
    raw = await app.post("/v1/lookup", {"entities": [{"table": "user_vector", "id": user}]})

    async with asking(Watched(app)) as larder:
        top = await larder.lookup("user_topk", user, Options(k=5))
        vector = (await larder.lookup_tables([Entity(user, table="user_vector")]))[0].vector
        absent_answer = await larder.lookup("user_affinity", "nobody")
        ranked = await larder.score(user, [*history, "no-such-item"])
        generations = await larder.generations()

    assert top.items is not None and top.scores is not None and len(top.items) == 5
    assert top.scores.dtype == np.float32 and not top.scores.flags.writeable
    assert vector is not None and np.array_equal(vector, np.array(raw["answers"][0]["vector"], np.float32))
    assert absent_answer.values is None and absent_answer.reason == "not_in_generation"
    assert ranked.unknown == ("no-such-item",) and set(ranked.items) == set(history)
    assert list(ranked.scores) == sorted(ranked.scores, reverse=True)
    assert generations.live.generation == top.generation and generations.ready and generations.canary is None
    assert "user_topk" in generations.live.details["tables"]
    with pytest.raises(AttributeError):
        top.source = Source.LIVE  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        vector[0] = 0


async def test_a_batch_beyond_the_services_limit_comes_back_whole_and_in_order(
    app: Running, night: NightConfig
) -> None:
    users = sorted(histories(night))
    ids = [users[index % len(users)] for index in range(2_345)]
    watched = Watched(app)

    async with asking(watched) as larder:
        answers = await larder.lookup_many("user_topk", ids, Options(k=1))
        none = await larder.lookup_many("user_topk", [])

    assert [answer.id for answer in answers] == ids and none == []
    assert len(watched.requests) == 3


async def test_a_long_batch_is_of_one_generation_though_a_flip_falls_into_it(night: NightConfig, app: Running) -> None:
    users = sorted(histories(night))[:30]
    later = (datetime.fromisoformat(DATA_UNTIL) + timedelta(minutes=30)).isoformat()
    next_ = await asyncio.to_thread(build_verified, night, later)
    watched = Watched(app)

    async def flip() -> None:
        await asyncio.to_thread(publish, night, next_)

        async def followed() -> bool:
            served = app.service.follower.served
            return served is not None and served.live.generation == next_

        assert await eventually(followed)

    watched.hook_by_number[2] = flip
    async with asking(watched, max_batch=10, at_once=1, deadline_ms=120_000.0) as larder:
        generation_before = (await larder.generations()).live.generation
        watched.requests.clear()
        answers = await larder.lookup_many("user_topk", users, Options(k=1))
        after = (await larder.generations()).live.generation

    assert (generation_before != next_, after) == (True, next_)
    assert [answer.id for answer in answers] == users
    assert {answer.generation for answer in answers} == {generation_before}


async def test_a_pin_is_kept_or_refused(app: Running, night: NightConfig) -> None:
    user = min(histories(night))

    async with asking(Watched(app)) as larder:
        live = (await larder.generations()).live.generation
        pinned = await larder.lookup("user_topk", user, Options(generation=live))
        with pytest.raises(GenerationGone) as exc_info:
            await larder.lookup_many("user_topk", [user], Options(generation="g-of-old"))

    assert pinned.generation == live
    assert live in exc_info.value.details["held"] and exc_info.value.field == "generation"


async def test_the_service_hears_of_the_deadline_and_gives_up_by_then(
    app: Running, night: NightConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[float] = []
    lookup = app.service.ladder.lookup

    async def listen(served, request, started):
        heard.append(request.options.deadline_s)
        return await lookup(served, request, started)

    monkeypatch.setattr(type(app.service.ladder), "lookup", lambda self, *given: listen(*given))
    user = min(histories(night))
    async with asking(Watched(app), told_share=0.5) as larder:
        await larder.lookup("user_topk", user, Options(deadline_ms=1_000, fresh=True))
        await larder.lookup_many("user_topk", [user], Options(deadline_ms=8_000))

    # The time on the network is missing, and a busy machine may need a lot of it.
    assert 0 < heard[0] <= 0.5 and 0.5 < heard[1] <= 4.0


async def test_a_service_that_hangs_costs_the_deadline_and_no_more(app: Running) -> None:
    watched, hung = Watched(app), asyncio.Event()
    watched.hook_by_number[1] = hung.wait  # type: ignore[assignment]

    async with asking(watched) as larder:
        with pytest.raises(DeadlineExceeded):
            await larder.lookup("user_topk", "u-1", Options(deadline_ms=30))
        after = await larder.lookup("user_topk", "u-1")

    assert after.source == "default" and len(watched.requests) == 2


async def test_a_bad_request_names_its_field(app: Running) -> None:
    async with asking(Watched(app)) as larder:
        with pytest.raises(InvalidRequest) as wrong:
            await larder.lookup_many("user_topk", ["fine", ""])
        with pytest.raises(InvalidRequest) as unknown:
            await larder.lookup("no_such_table", "u-1")

    assert wrong.value.field == "entities[1].id" and wrong.value.status == 422
    assert unknown.value.status == 404 and unknown.value.code == "unknown_table"


def test_a_port_without_a_listener_is_unreachable_in_one_line() -> None:
    with Client("http://127.0.0.1:9") as larder, pytest.raises(Unreachable) as exc_info:
        larder.lookup("user_topk", "u-1")

    assert not exc_info.value.is_sent and "\n" not in str(exc_info.value)


def test_threads_that_wait_are_released_by_close() -> None:
    async def never(_request: httpx.Request) -> httpx.Response:
        waiting.append(True)
        await asyncio.Event().wait()
        raise AssertionError

    waiting: list[bool] = []
    errors: list[BaseException] = []
    larder = Client(BASE, transport=httpx.MockTransport(never), policy=Policy(deadline_ms=600_000))

    def look_up_user() -> None:
        try:
            larder.lookup("user_topk", "u-1")
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=look_up_user, daemon=True)
    thread.start()
    assert poll_until(lambda: bool(waiting))
    larder.close()
    thread.join(10)

    assert not thread.is_alive() and "closed" in str(errors[0])


async def test_the_connection_of_a_request_that_lost_is_closed() -> None:
    hung_up, request_count = asyncio.Event(), 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal request_count
        await reader.readuntil(b"\r\n\r\n")
        request_count += 1
        if request_count == 1:  # nothing waits between the count and this: one request, not both
            assert await reader.read() == b""  # until the other side goes
            hung_up.set()
        else:
            body = (
                b'{"id":"u-1","table":"t","source":"l1","generation":"g",'
                b'"age_seconds":1,"published_at":"2026-01-01T00:00:00Z"}'
            )
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    policy = Policy(deadline_ms=PATIENT, hedge_after_ms=1, hedge_share=1.0)
    async with server, AsyncClient(f"http://127.0.0.1:{port}", policy=policy) as larder:
        answer = await larder.lookup("t", "u-1")
        async with asyncio.timeout(10):
            await hung_up.wait()

    assert answer.id == "u-1" and request_count == 2


async def test_no_proxy_of_the_environment_comes_between(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{"arm":"live"}')
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    policy = Policy(deadline_ms=PATIENT)
    async with server, AsyncClient(f"http://127.0.0.1:{port}", policy=policy) as larder:
        assert await larder.feedback("click", generation="g") == "live"

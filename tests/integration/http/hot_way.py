"""One request through the hot route and through the ordinary routes, compared byte for byte."""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import unquote

from precompute.config.settings import NightConfig
from serving.app import create_app
from serving.engine.coalescer import GROUP_SIZE_MIN
from serving.engine.hot_route import FastLookups
from serving.http.asgi_app import AsgiApp
from serving.http.routes import Service
from serving.requests.bodies import ResponseMessages
from serving.requests.request_record import CALLER_KEY
from tests.integration.serving_app import PATIENT, settings

NOW_S = 1_800_000_000.125
PER_REQUEST_HEADERS = (b"server-timing", b"x-request-id")


class AsgiResponse(NamedTuple):
    """A response as the ASGI application sends it."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


@dataclass(frozen=True)
class AsgiRequest:
    """A request as received, with its body in pieces."""

    method: str
    path: bytes
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    pieces: tuple[bytes, ...] = (b"",)


@dataclass
class Ways:
    """The same running service, with and without its hot route."""

    app: AsgiApp
    runner: asyncio.Runner
    fast_lookups: FastLookups = field(init=False)
    joins: bool = False
    """Whether requests of one turn come as from a connection that needs no task for them."""
    joined: int = 0
    """How many did."""

    def __post_init__(self) -> None:
        assert self.app.fast_path is not None
        self.fast_lookups = FastLookups(self.service, clock=lambda: NOW_S)
        ladder: Any = self.service.ladder
        ladder._clock = ladder.answer_builder._clock = lambda: NOW_S

    @property
    def service(self) -> Service:
        """The service of both paths."""
        service: Service = self.app.state.service
        return service

    def forget(self) -> None:
        """Empty L1 and its negative entries."""
        local = self.service.tiers.local_tier
        for key in list(local._entries):
            local._remove_entry(key)
        self.service.tiers.negative_cache._keys.clear()

    def send(self, request: AsgiRequest, *, is_fast: bool = True) -> AsgiResponse:
        """Send one request by one path."""
        self.app.fast_path = self.fast_lookups if is_fast else None
        return self.runner.run(_call(self.app, request))

    def ask_at_once(self, requests: Iterable[AsgiRequest]) -> list[AsgiResponse]:
        """Send requests in one iteration of the loop by the hot route, as in a busy service."""
        self.app.fast_path = self.fast_lookups
        self.fast_lookups._single_lookups._coalescer._expected_arrivals = GROUP_SIZE_MIN

        async def all_of_them() -> list[AsgiResponse]:
            call = self._joined if self.joins else _call
            return await asyncio.gather(*(call(self.app, request) for request in requests))

        return self.runner.run(all_of_them())

    async def _joined(self, app: AsgiApp, request: AsgiRequest) -> AsgiResponse:
        get = self.fast_lookups.parse_get(self._identified(_scope(request)))
        group_future = None if get is None else app.try_join(get)
        if get is not None and group_future is not None:
            assert not group_future.done()
            self.joined += 1
            await asyncio.wait([group_future])
            if (body := app.finish_joined(group_future)) is not None:
                head = ((b"content-length", b"%d" % len(body)), (b"content-type", b"application/json"))
                return AsgiResponse(200, head, body)
            if (messages := await app.answer_after_join(get, group_future)) is not None:
                start, end = messages
                return AsgiResponse(start["status"], _without_request_headers(start["headers"]), end["body"])
        return await _call(app, request)

    def _identified(self, scope: dict[str, Any]) -> dict[str, Any]:
        return {**scope, CALLER_KEY: self.app.callers.identify(scope["headers"])}

    async def alone(self, scope: dict[str, Any]) -> ResponseMessages | None:
        """Return the fast path's own answer to a GET of one id."""
        parsed_get = self.fast_lookups.parse_get(self._identified(scope))
        return None if parsed_get is None else await self.fast_lookups.get(parsed_get)

    def send_both_ways(self, request: AsgiRequest, times: int = 3) -> tuple[list[AsgiResponse], list[AsgiResponse]]:
        """Send the request several times each way from an empty L1: from Redis, from L1, and as a ready answer."""
        response_lists = []
        for is_fast in (True, False):
            self.forget()
            response_lists.append([self.send(request, is_fast=is_fast) for _ in range(times)])
        return response_lists[0], response_lists[1]

    def scraped(self, name: str) -> dict[str, float]:
        """Return samples of a metric by their labels as text."""
        lines = self.service.metrics.expose().decode().splitlines()
        rows = [line.rpartition(" ") for line in lines if line.startswith((name + "{", name + " "))]
        return {labels[len(name) :]: float(value) for labels, _, value in rows}


def _scope(request: AsgiRequest) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "path": unquote(request.path.decode("ascii")),
        "raw_path": request.path,
        "query_string": request.query,
        "headers": list(request.headers),
        "root_path": "",
        "scheme": "http",
        "server": ("larder", 80),
        "client": ("test", 1),
        "state": {},
    }


async def _call(app: AsgiApp, request: AsgiRequest) -> AsgiResponse:
    pieces = list(request.pieces)
    messages: list[Any] = []

    async def receive() -> Any:
        if not pieces:
            return {"type": "http.disconnect"}
        body = pieces.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(pieces)}

    async def send(message: Any) -> None:
        messages.append(message)

    await app(_scope(request), receive, send)
    start, *body_messages = messages
    body = b"".join(message.get("body", b"") for message in body_messages)
    return AsgiResponse(start["status"], _without_request_headers(start["headers"]), body)


def _without_request_headers(headers: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[bytes, bytes], ...]:
    """Remove the headers that differ with each request."""
    return tuple((name, value) for name, value in headers if name not in PER_REQUEST_HEADERS)


def running(night: NightConfig, **changes: object) -> Iterator[Ways]:
    """Run one service with both paths, which polls Redis and the blocklist only at its start."""
    # The service must not report requested ids to Redis: on a busy machine the next service would preload them into L1.
    seldom = {"poll_s": 60.0, "blocklist_poll_s": 60.0, "sketch_s": 0.0}
    app = create_app(settings(night, **PATIENT | seldom | changes))
    with asyncio.Runner() as runner:
        life = app.router.lifespan_context(app)
        runner.run(life.__aenter__())
        try:
            yield Ways(app, runner)
        finally:
            runner.run(life.__aexit__(None, None, None))

"""Watches the requests that no ready answer serves: how long their stages take, what to log, what to trace."""

import time
from collections.abc import Awaitable, Callable, Container, Iterable, MutableMapping
from typing import Any, NamedTuple, Protocol

from starlette.types import Message, Receive, Scope, Send

from serving.why.request_id import accepted, new_id
from serving.why.seen import CURRENT, Seen
from serving.why.trace_context import Parent, parent_of

ASKED = b"x-larder-timing"
"""A request with this header is answered past the ready answers, so that its response can tell where time went."""

_NAMES = frozenset({b"x-request-id", b"traceparent", b"tracestate", ASKED})
_ROUTES = {
    "/v1/lookup": "/v1/lookup/{table}",
    "/v1/explain": "/v1/explain/{table}",
}
_PLAIN = frozenset(
    {"/v1/lookup", "/v1/score", "/v1/feedback", "/v1/generations", "/healthz", "/readyz", "/metrics"}
)  # fmt: skip
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})

Below = Callable[[Scope, Receive, Send], Awaitable[None]]


class Request(NamedTuple):
    """What may be told of a request: no id of an entity, unless somebody asked for that."""

    method: str
    route: str
    table: str | None
    entity: str | None


class Journal(Protocol):
    """Where finished requests are told."""

    def told(self, seen: Seen, request: Request, seconds: float) -> None:
        """Writes a line, or not."""


class Tracer(Protocol):
    """What makes spans."""

    def judged(self, scope: Scope, parent: Parent | None) -> bool:
        """Whether this request is traced; the same answer however often it is asked of one request."""

    def begin(self, seen: Seen) -> Any:
        """The request's span, and its ids for the log."""

    def end(self, span: Any, seen: Seen, request: Request, seconds: float) -> None:
        """Ends it, with a span for each stage that was seen."""


class Watch:
    """`times`: stage times go into `Server-Timing`; `tables`: names that may stand in logs and spans."""

    def __init__(
        self,
        tables: Callable[[], Container[str]],
        *,
        times: bool,
        journal: Journal | None = None,
        tracer: Tracer | None = None,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tables = tables
        self._times = times
        self._journal = journal
        self._tracer = tracer
        self._timer = timer

    async def __call__(self, below: Below, scope: Scope, receive: Receive, send: Send) -> None:
        """Has the request answered by `below`, and tells what was seen of it."""
        sent = _watched(scope["headers"])
        parent = parent_of(sent.get(b"traceparent", ()), sent.get(b"tracestate", ()))
        own = sent.get(b"x-request-id")
        seen = Seen(self._timer(), accepted(own[0] if own else None) or new_id(), parent)
        span: Any = None
        if self._tracer is not None and self._tracer.judged(scope, parent):
            span = self._tracer.begin(seen)
        if ASKED in sent:  # the hot route takes only headers that it knows
            kept = [each for each in scope["headers"] if each[0] != ASKED]
            scope = {**scope, "headers": kept}
        current = CURRENT.set(seen)
        try:
            await below(scope, receive, self._telling(seen, send))
        except Exception:
            seen.status = 500
            raise
        finally:
            CURRENT.reset(current)
            self._end(seen, scope, span)
            seen.end()

    def _telling(self, seen: Seen, send: Send) -> Send:
        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.status = message["status"]
                message = {**message, "headers": [*message["headers"], *self._headers(seen)]}
            else:
                seen.body = message.get("body", b"")
            await send(message)

        return tell

    def _headers(self, seen: Seen) -> Iterable[tuple[bytes, bytes]]:
        yield b"x-request-id", seen.id.encode()
        if self._times and seen.status not in (401, 403):
            yield b"server-timing", timing(seen, self._timer() - seen.started)

    def _end(self, seen: Seen, scope: Scope, span: Any) -> None:
        if span is None and self._journal is None:
            return
        seconds = self._timer() - seen.started
        request = request_of(scope, self._tables())
        if self._journal is not None:
            self._journal.told(seen, request, seconds)
        if span is not None and self._tracer is not None:
            self._tracer.end(span, seen, request, seconds)


def timing(seen: Seen, total_s: float) -> bytes:
    """The value of `Server-Timing` (https://www.w3.org/TR/server-timing/), in milliseconds."""
    parts = [f"{name};dur={seconds * 1000:.3f}" for name, seconds in seen.by_stage().items()]
    return ", ".join([*parts, f"total;dur={total_s * 1000:.3f}"]).encode()


def request_of(scope: MutableMapping[str, Any], tables: Container[str]) -> Request:
    """What was asked, by its route; a path that is none of ours is `other`."""
    path: str = scope["path"]
    method = scope["method"] if scope["method"] in _METHODS else "other"
    if path in _PLAIN:
        return Request(method, path, None, None)
    parts = path.split("/", 3)
    route = _ROUTES.get("/".join(parts[:3]))
    table, slash, entity = parts[-1].partition("/")
    if route is None or len(parts) < 4 or not table:
        return Request(method, "other", None, None)
    known = table if table in tables else None
    return Request(method, route + "/{entity}" * bool(slash), known, entity or None)


def _watched(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        if name in _NAMES:
            found.setdefault(name, []).append(value)
    return found

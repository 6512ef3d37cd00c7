"""Observer of requests: request ids, times of stages, a log line, and a span."""

import itertools
import logging
import random
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Container, Iterable, MutableMapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from starlette.types import Message, Receive, Scope, Send

from serving.process.log_setup import RECORD_FIELDS_ATTRIBUTE
from serving.requests.options import TIMING_HEADER
from serving.requests.request_record import CALLER_KEY, CURRENT_RECORD, RequestFacts, RequestRecord, parse_parent
from serving.tracing.response_peek import count_sources

if TYPE_CHECKING:
    from serving.tracing.otel_spans import Spans

log = logging.getLogger("larder.requests")

_VALID_REQUEST_ID_PATTERN = re.compile(rb"[A-Za-z0-9._~:+/=@-]{1,128}")

_process_prefix = secrets.token_hex(6)

_request_numbers = itertools.count(1)

_WATCHED_HEADERS = frozenset({b"x-request-id", b"traceparent", b"tracestate", TIMING_HEADER})

_TABLE_ROUTES = {"/v1/lookup": "/v1/lookup/{table}", "/v1/explain": "/v1/explain/{table}"}

_FIXED_ROUTES = frozenset(
    {"/v1/lookup", "/v1/score", "/v1/feedback", "/v1/generations", "/healthz", "/readyz", "/metrics"}
)  # fmt: skip

_NAMED_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})

Below = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True, eq=False)
class RequestLog:
    """Log of requests without ready answers from L1, which are not logged."""

    _: KW_ONLY
    sampled_share: float
    slow_after_s: float
    draw_random_share: Callable[[], float] = random.random

    def choose_level(self, request_record: RequestRecord, request_seconds: float) -> int | None:
        """Return the log level, None for no line; errors and slow requests are logged regardless of the sample."""
        if request_record.http_status >= 500:
            return logging.ERROR
        if request_seconds >= self.slow_after_s:
            return logging.WARNING
        return logging.INFO if self.draw_random_share() < self.sampled_share else None

    def write(
        self, log_level: int, request_record: RequestRecord, request: RequestFacts, request_seconds: float
    ) -> None:
        """Write one line, unless the request is a readiness probe, whose 503 is not an error."""
        if request.route != "/readyz" and log.isEnabledFor(log_level):
            fields = {RECORD_FIELDS_ATTRIBUTE: log_fields(request_record, request, request_seconds)}
            log.log(log_level, "%s %s", request.http_method, request.route, extra=fields)


@dataclass(frozen=True, slots=True, eq=False)
class RequestObserver:
    """Request observer; `get_table_names` returns the names that are allowed in logs and spans."""

    get_table_names: Callable[[], Container[str]]
    _: KW_ONLY
    sends_server_timing: bool
    journal: RequestLog
    tracer: "Spans | None"

    def leaves_unobserved(self, scope: Scope) -> bool:
        """True if a single lookup need not be observed: it requests no timing, is not traced, and costs little."""
        if not _WATCHED_HEADERS.isdisjoint([name for name, _ in scope["headers"]]):
            return False
        return self.tracer is None or not self.tracer.decide_traced(scope, None)

    async def __call__(self, below: Below, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request by `below`, and report its record to log and spans."""
        request_record = RequestRecord(time.monotonic(), "")
        if (caller := scope.get(CALLER_KEY)) is not None:
            request_record.caller_name = caller.name
        if values_by_header := _watched_headers(scope["headers"]):
            scope = _read_request_headers(request_record, values_by_header, scope)
        if not request_record.request_id:
            request_record.request_id = new_request_id()
        span: Any = None
        if self.tracer is not None and self.tracer.decide_traced(scope, request_record.parent):
            span = self.tracer.begin(request_record)
        record_token = CURRENT_RECORD.set(request_record)
        try:
            await below(scope, receive, self._with_answer_headers(request_record, send))
        except Exception:
            request_record.http_status = 500
            raise
        finally:
            CURRENT_RECORD.reset(record_token)
            self._report_request(request_record, scope, span)
            request_record.end()

    def _with_answer_headers(self, request_record: RequestRecord, send: Send) -> Send:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                request_record.http_status = status = message["status"]
                headers = [*message["headers"], (b"x-request-id", request_record.request_id.encode())]
                if self.sends_server_timing and status != 401:  # not for callers without a valid token
                    headers.append(
                        (
                            b"server-timing",
                            server_timing(request_record, time.monotonic() - request_record.request_started_at),
                        )
                    )
                message = {**message, "headers": headers}
            else:
                request_record.last_body_piece = message.get("body", b"")
            await send(message)

        return send_with_headers

    def _report_request(self, request_record: RequestRecord, scope: Scope, span: Any) -> None:
        request_seconds = time.monotonic() - request_record.request_started_at
        log_level = self.journal.choose_level(request_record, request_seconds)
        if log_level is None and span is None:
            return
        request = request_of(scope, self.get_table_names())
        if log_level is not None:
            self.journal.write(log_level, request_record, request, request_seconds)
        if self.tracer is not None and span is not None:
            self.tracer.end(span, request_record, request, request_seconds)


def _read_request_headers(
    request_record: RequestRecord, values_by_header: dict[bytes, list[bytes]], scope: Scope
) -> Scope:
    """Read request id and trace headers; return the scope without them, for the fast path."""
    request_record.request_id = (
        accepted_id(values_by_header[b"x-request-id"][0]) or "" if b"x-request-id" in values_by_header else ""
    )
    if traceparents := values_by_header.get(b"traceparent"):
        request_record.parent = parse_parent(traceparents, values_by_header.get(b"tracestate", ()))
    if TIMING_HEADER not in values_by_header:
        return scope
    return {**scope, "headers": [header for header in scope["headers"] if header[0] != TIMING_HEADER]}


def accepted_id(sent_id: bytes | None) -> str | None:
    """Return the caller's request id (1 to 128 letters, digits and `._~:+/=@-`); None if it is invalid."""
    return sent_id.decode("ascii") if sent_id is not None and _VALID_REQUEST_ID_PATTERN.fullmatch(sent_id) else None


def new_request_id() -> str:
    """Return a new unique id: a random part of this process, and a number."""
    return f"{_process_prefix}-{next(_request_numbers):x}"


def _watched_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, list[bytes]]:
    values_by_header: dict[bytes, list[bytes]] = {}
    for header_name, header_value in headers:
        if header_name in _WATCHED_HEADERS:
            values_by_header.setdefault(header_name, []).append(header_value)
    return values_by_header


def server_timing(request_record: RequestRecord, request_s: float) -> bytes:
    """Return the value of `Server-Timing` (https://www.w3.org/TR/server-timing/), in milliseconds."""
    total_entry = b"total;dur=%.3f" % (request_s * 1000)
    if not request_record.stage_times:
        return total_entry
    stage_times = [
        b"%b;dur=%.3f" % (stage_name.encode(), stage_s * 1000)
        for stage_name, stage_s in request_record.seconds_by_stage().items()
    ]
    return b", ".join([*stage_times, total_entry])


def request_of(scope: MutableMapping[str, Any], table_names: Container[str]) -> RequestFacts:
    """Return the facts of the request, by its route; `other` for an unknown path."""
    path: str = scope["path"]
    method = scope["method"] if scope["method"] in _NAMED_METHODS else "other"
    if path in _FIXED_ROUTES:
        return RequestFacts(method, path, None, None)
    path_parts = path.split("/", 3)
    route = _TABLE_ROUTES.get("/".join(path_parts[:3]))
    table, slash, entity = path_parts[-1].partition("/")
    if route is None or len(path_parts) < 4 or not table:
        return RequestFacts(method, "other", None, None)
    known_table = table if table in table_names else None
    return RequestFacts(method, route + "/{entity}" * bool(slash), known_table, entity or None)


def log_fields(request_record: RequestRecord, request: RequestFacts, request_seconds: float) -> dict[str, Any]:
    """Return the fields of the request's line, none of which is an entity's id."""
    line_fields: dict[str, Any] = dict(request_record.log_ids())
    if request.table_name is not None:
        line_fields["table"] = request.table_name
    if request_record.caller_name:
        line_fields["token"] = request_record.caller_name
    line_fields |= {"status": request_record.http_status, "seconds": round(request_seconds, 6)}
    if count_by_source := count_sources(request_record.last_body_piece):
        line_fields["sources"] = count_by_source
    if seconds_by_stage := request_record.seconds_by_stage():
        line_fields["stages"] = {name: round(stage_s, 6) for name, stage_s in seconds_by_stage.items()}
    return line_fields

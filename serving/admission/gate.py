"""Gate of the requests below L1: admission, deadline checks, refusals and their count."""

import functools
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope

from serving.access.callers import caller_of
from serving.admission.controller import Admission
from serving.requests.bodies import ResponseMessages, declares_longer_body, read_replayable_body, refusal_response
from serving.requests.errors import Problem
from serving.requests.negotiation import parse_forms
from serving.requests.options import Limits, body_deadline_s, query_options, text_options
from serving.requests.parsing import LARGE_BODY_BYTES, HeaderReader, peek_content, run_in_thread_if_large

_DEADLINE_FIELD = b"deadline_ms"


@dataclass(frozen=True, slots=True, eq=False)
class DeadlineCheck:
    """Deadline check of requests; used only while requests queue for the event loop."""

    admission: Admission
    headers: HeaderReader
    limits: Limits

    def is_late(self, scope: MutableMapping[str, Any], body: bytes | None = b"", waited_s: float = 0.0) -> bool:
        """True for a late request, which is counted as shed; False for a malformed one, or a body too long (None)."""
        header_deadline_s = self.headers.deadline_s(scope["headers"])
        if header_deadline_s is None or body is None or not caller_of(scope).is_known:
            return False
        try:
            request_deadline_s = self._request_deadline_s(scope, body)
        except Problem:
            return False
        return self.admission.is_late(min(header_deadline_s, request_deadline_s), waited_s)

    def cache_deadline(self, scope: MutableMapping[str, Any], body: bytes) -> None:
        """Parse a body that names its deadline, and cache the result for `is_late`; counts nothing: for any thread."""
        with suppress(Problem):
            self._request_deadline_s(scope, body)

    def _request_deadline_s(self, scope: MutableMapping[str, Any], body: bytes) -> float:
        """Return the deadline in seconds from a GET's query or another request's body; raise Problem."""
        limits = self.limits
        is_get = scope["method"] == "GET"
        if _DEADLINE_FIELD not in (scope["query_string"] if is_get else body):
            return limits.deadline_ms / 1000
        if is_get:
            return query_options(scope["query_string"], limits).deadline_s
        body_form = parse_forms(scope["headers"]).request_form
        parsed_body = peek_content(scope, body, body_form, limits)
        if body_form == "arrow":
            return text_options(parsed_body.option_text_by_name, limits).deadline_s
        return body_deadline_s(parsed_body, limits)


@dataclass(frozen=True, slots=True)
class AdmissionGate:
    """Gate of one service."""

    admission: Admission
    headers: HeaderReader
    deadline_check: DeadlineCheck
    count_request: Callable[[str, int], None]
    """Callback that counts a request by route and status."""
    body_bytes_max: int
    body_timeout_s: float

    def can_use_fast_path(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """True if the headers are those of a plain lookup."""
        return self.headers.deadline_s(headers) is not None

    def is_late(self, scope: Scope, body: bytes | None, waited_s: float = 0.0) -> bool:
        """True if the request's deadline has passed before its work begins; such a request is counted as shed."""
        return self.deadline_check.is_late(scope, body, waited_s)

    async def receive_unless_late(self, scope: Scope, receive: Receive, waited_s: float = 0.0) -> Receive | None:
        """Return a `receive` for a request that arrived during a standing queue; None if its deadline has passed.

        Raises Problem for a body that arrives too slowly.
        """
        body: bytes | None = b""
        # The body of a request without a valid token is not read.
        reads_body = scope["method"] == "POST" and caller_of(scope).is_known
        if reads_body and self.can_use_fast_path(scope["headers"]):
            body, receive = await self.read_body(scope, receive)
            if body is not None and len(body) > LARGE_BODY_BYTES:
                await run_in_thread_if_large(body, functools.partial(self.deadline_check.cache_deadline, scope, body))
        return None if self.is_late(scope, body, waited_s) else receive

    async def read_body(self, scope: Scope, receive: Receive) -> tuple[bytes | None, Receive]:
        """Read the body within bounds; return it (None if too long or incomplete) and a `receive` that replays it."""
        if declares_longer_body(scope["headers"], self.body_bytes_max):  # the routes refuse it without reading it
            return None, receive
        return await read_replayable_body(receive, self.body_bytes_max, self.body_timeout_s)

    def count_if_refused(self, response_messages: ResponseMessages) -> ResponseMessages:
        """Count a refusal that was made before routing; return the response unchanged."""
        if (status := response_messages[0]["status"]) != 200:
            self.count_request("any", status)
        return response_messages


def refusal_messages(problem: Problem) -> ResponseMessages:
    """Return the response for a problem as ASGI messages."""
    response = refusal_response(problem)
    start_fields = {"status": response.status_code, "headers": response.raw_headers}
    body = {"type": "http.response.body", "body": response.body}
    return {"type": "http.response.start", **start_fields}, body


OVERLOADED_MESSAGES = refusal_messages(Problem(503, "overloaded", "more requests arrive than can be answered in time"))

"""Gate of the requests below L1: admission, deadlines that are gone before their turn, refusals and their count."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from starlette.types import Receive, Scope

from serving.access.callers import caller_of
from serving.admission.controller import Admission
from serving.admission.deadline_check import DeadlineCheck
from serving.requests.bodies import Messages, is_longer, refused, whole_body
from serving.requests.content import LARGE, run_in_thread_if_large
from serving.requests.errors import Problem
from serving.requests.fast_parse import HeaderJudge


def refusal_of(problem: Problem) -> Messages:
    """The response that says what is wrong."""
    response = refused(problem)
    head = {"status": response.status_code, "headers": response.raw_headers}
    body = {"type": "http.response.body", "body": response.body}
    return {"type": "http.response.start", **head}, body


OVERLOADED = refusal_of(Problem(503, "overloaded", "more is asked than can be answered in time"))


@dataclass(frozen=True, slots=True)
class AdmissionGate:
    """Gate of one service."""

    admission: Admission
    headers: HeaderJudge
    lateness: DeadlineCheck
    requested: Callable[[str, int], None]
    """(route, status): counts a request."""
    body_bytes: int
    body_timeout_s: float

    def can_use_fast_path(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Returns whether the headers are those of a plain lookup."""
        return self.headers.deadline_s(headers) is not None

    def is_late(self, scope: Scope, body: bytes | None, waited_s: float = 0.0) -> bool:
        """True if the time of a request is gone before its turn; counted."""
        return self.lateness.is_late(scope, body, waited_s)

    async def late(self, scope: Scope, receive: Receive, waited_s: float = 0.0) -> Receive | None:
        """From where a request can be read that came to a standing queue; None for one that is too late.

        Raises Problem for a body too slow.
        """
        body: bytes | None = b""
        # Of a stranger nothing is read.
        is_read = scope["method"] == "POST" and caller_of(scope).is_known
        if is_read and self.can_use_fast_path(scope["headers"]):
            body, receive = await self.body(scope, receive)
            if body is not None and len(body) > LARGE:
                await run_in_thread_if_large(
                    body, functools.partial(self.lateness.read, scope, body)
                )
        return None if self.is_late(scope, body, waited_s) else receive

    async def body(self, scope: Scope, receive: Receive) -> tuple[bytes | None, Receive]:
        """Reads the body within the service's bounds; None if too long or unended, and a `receive` to replay it."""
        if is_longer(scope["headers"], self.body_bytes):  # told elsewhere, without reading it
            return None, receive
        return await whole_body(receive, self.body_bytes, self.body_timeout_s)

    def count_if_refused(self, answer: Messages) -> Messages:
        """The same response; one that refuses before anybody looked for the route is counted."""
        if (status := answer[0]["status"]) != 200:
            self.requested("any", status)
        return answer

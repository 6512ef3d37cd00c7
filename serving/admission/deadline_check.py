"""Deadline check: finds requests whose time is gone before their turn, by all that they say of their deadline."""

from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from serving.access.callers import caller_of
from serving.admission.controller import Admission
from serving.requests.content import peek
from serving.requests.errors import Problem
from serving.requests.fast_parse import HeaderJudge
from serving.requests.models import Limits
from serving.requests.negotiation import forms
from serving.requests.options import body_deadline_s, query_options, text_options

_MENTION = b"deadline_ms"


@dataclass(frozen=True, slots=True, eq=False)
class DeadlineCheck:
    """Deadline check of requests, asked only while requests stand before the loop."""

    admission: Admission
    headers: HeaderJudge
    limits: Limits

    def is_late(
        self, scope: MutableMapping[str, Any], body: bytes | None = b"", waited_s: float = 0.0
    ) -> bool:
        """True if late, and counted as shed; never one refused for what it says, or whose body is too long (None)."""
        by_headers = self.headers.deadline_s(scope["headers"])
        if by_headers is None or body is None or not caller_of(scope).is_known:
            return False
        try:
            request_deadline_s = self._own_s(scope, body)
        except Problem:
            return False
        return self.admission.is_late(min(by_headers, request_deadline_s), waited_s)

    def read(self, scope: MutableMapping[str, Any], body: bytes) -> None:
        """Reads a body that tells its deadline, for `is_late` to find; counts nothing, so that any thread may do it."""
        with suppress(Problem):
            self._own_s(scope, body)

    def _own_s(self, scope: MutableMapping[str, Any], body: bytes) -> float:
        """Deadline in seconds that a GET has in its query, another request in its body; raises Problem."""
        limits = self.limits
        is_get = scope["method"] == "GET"
        if _MENTION not in (scope["query_string"] if is_get else body):
            return limits.deadline_ms / 1000
        if is_get:
            return query_options(scope["query_string"], limits).deadline_s
        form = forms(scope["headers"]).request_form
        parsed_body = peek(scope, body, form, limits)
        if form == "arrow":
            return text_options(parsed_body.options, limits).deadline_s
        return body_deadline_s(parsed_body, limits)

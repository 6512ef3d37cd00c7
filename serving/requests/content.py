"""Contents of a request's body, read once for all readers: the deadline check, the hot route, the routes."""

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

from serving.requests.errors import Problem
from serving.requests.fields import read_json
from serving.requests.lookup_arrow import read_stream, stream_lookup
from serving.requests.lookup_json import lookup_ask
from serving.requests.models import Limits, LookupRequest
from serving.requests.negotiation import Form

LARGE = 256 << 10
"""Bytes of a body beyond which reading it would hold the event loop for more than some 5 ms."""

_CONTENT_KEY = "larder.content"

T = TypeVar("T")
Scope = MutableMapping[str, Any]


def peek(scope: Scope, body: bytes, form: Form, limits: Limits) -> Any:
    """Reads the body, as JSON or as `ArrowLookup`; raises Problem. Either outcome is kept for the next reader."""
    if _CONTENT_KEY not in scope:
        try:
            is_arrow = form == "arrow"
            scope[_CONTENT_KEY] = (
                read_stream(body, limits) if is_arrow else read_json(body, limits.max_values)
            )
        except Problem as problem:
            scope[_CONTENT_KEY] = problem
    content_or_problem = scope[_CONTENT_KEY]
    if not isinstance(content_or_problem, Exception):
        return content_or_problem
    try:
        raise content_or_problem.with_traceback(None)
    finally:
        del (
            content_or_problem
        )  # else the error holds this frame, and with it the body, until Python looks for cycles


def pop_content(scope: Scope, body: bytes, form: Form, limits: Limits) -> Any:
    """Reads the body for the last reader, as `peek` does, and removes what was kept."""
    try:
        return peek(scope, body, form, limits)
    finally:
        del scope[_CONTENT_KEY]


def lookup_of(
    scope: Scope, body: bytes, form: Form, table: str | None, limits: Limits
) -> LookupRequest:
    """Lookup that a body asks for; the kept contents are removed."""
    content = pop_content(scope, body, form, limits)
    if form == "arrow" and table is not None:
        return stream_lookup(content, table, limits)
    return lookup_ask(content, table, limits)


def refuse(scope: Scope, error: Exception) -> None:
    """Stores an error that every later reader gets; the body is not read again."""
    scope[_CONTENT_KEY] = error.with_traceback(None)  # whose frames hold the body


async def run_in_thread_if_large(body: bytes, read: Callable[[], T]) -> T:
    """Runs `read` for a body: in a thread if the body is large, so that other requests are answered meanwhile."""
    return read() if len(body) <= LARGE else await asyncio.to_thread(read)

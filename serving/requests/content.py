"""Contents of a request's body, read once for all readers: the deadline check, the hot route, the routes."""

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

from serving.requests.errors import Problem
from serving.requests.fields import read_json
from serving.requests.lookup_arrow import read_stream, stream_ask
from serving.requests.lookup_json import lookup_ask
from serving.requests.models import Ask, Limits
from serving.requests.negotiation import Form

LARGE = 256 << 10
"""Bytes of a body beyond which reading it would hold the event loop for more than some 5 ms."""

_KEPT = "larder.content"

T = TypeVar("T")
Scope = MutableMapping[str, Any]


def peek(scope: Scope, body: bytes, form: Form, limits: Limits) -> Any:
    """Reads the body as JSON or `Sent` (of Arrow); raises Problem. Either outcome is kept for the next reader."""
    if _KEPT not in scope:
        try:
            is_arrow = form == "arrow"
            scope[_KEPT] = (
                read_stream(body, limits) if is_arrow else read_json(body, limits.max_values)
            )
        except Problem as problem:
            scope[_KEPT] = problem
    content_or_problem = scope[_KEPT]
    if not isinstance(content_or_problem, Exception):
        return content_or_problem
    try:
        raise content_or_problem.with_traceback(None)
    finally:
        del (
            content_or_problem
        )  # else the error holds this frame, and with it the body, until Python looks for cycles


def take(scope: Scope, body: bytes, form: Form, limits: Limits) -> Any:
    """Reads the body for the last reader, as `peek` does, and removes what was kept."""
    try:
        return peek(scope, body, form, limits)
    finally:
        del scope[_KEPT]


def lookup_of(scope: Scope, body: bytes, form: Form, table: str | None, limits: Limits) -> Ask:
    """Lookup that a body asks for; the kept contents are removed."""
    content = take(scope, body, form, limits)
    if form == "arrow" and table is not None:
        return stream_ask(content, table, limits)
    return lookup_ask(content, table, limits)


def refuse(scope: Scope, error: Exception) -> None:
    """Stores an error that every later reader gets; the body is not read again."""
    scope[_KEPT] = error.with_traceback(None)  # whose frames hold the body


async def beside(body: bytes, read: Callable[[], T]) -> T:
    """Runs `read` for a body: in a thread if the body is large, so that other requests are answered meanwhile."""
    return read() if len(body) <= LARGE else await asyncio.to_thread(read)

"""What the body of a request holds, read once for whoever asks: whether it is late, the hot route, the routes."""

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
"""Bytes whose reading would hold the event loop for more than some 5 ms."""

_KEPT = "larder.content"

T = TypeVar("T")
Scope = MutableMapping[str, Any]


def peek(scope: Scope, body: bytes, form: Form, limits: Limits) -> Any:
    """JSON as Python has it, or Sent; raises Problem. Kept for who asks next, who hears the same."""
    if _KEPT not in scope:
        try:
            is_arrow = form == "arrow"
            scope[_KEPT] = (
                read_stream(body, limits) if is_arrow else read_json(body, limits.max_values)
            )
        except Problem as problem:
            scope[_KEPT] = problem
    found = scope[_KEPT]
    if isinstance(found, Exception):
        raise found.with_traceback(None)
    return found


def take(scope: Scope, body: bytes, form: Form, limits: Limits) -> Any:
    """The same for who asks last."""
    try:
        return peek(scope, body, form, limits)
    finally:
        del scope[_KEPT]


def lookup_of(scope: Scope, body: bytes, form: Form, table: str | None, limits: Limits) -> Ask:
    """The question in a body, which is taken."""
    found = take(scope, body, form, limits)
    if form == "arrow" and table is not None:
        return stream_ask(found, table, limits)
    return lookup_ask(found, table, limits)


def refuse(scope: Scope, why: Exception) -> None:
    """Whoever asks next hears this, and the body is not looked at again."""
    scope[_KEPT] = why.with_traceback(None)  # whose frames hold the body


async def beside(body: bytes, read: Callable[[], T]) -> T:
    """What `read` makes of a body: in a thread if that is large, so that others are answered meanwhile."""
    return read() if len(body) <= LARGE else await asyncio.to_thread(read)

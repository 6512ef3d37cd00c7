"""Request bodies within bounds of bytes, time and memory; responses made of JSON and Arrow."""

import asyncio
import math
from collections import deque
from collections.abc import Iterable

import orjson
from fastapi import Request, Response
from starlette.types import Message, Receive

from serving.arrow.schema import ARROW_MEDIA_TYPE
from serving.requests.errors import Problem
from serving.requests.negotiation import JSON_TYPE, check_codings

Messages = tuple[Message, Message]
"""Both ASGI messages of a whole response: its start, its body."""

BODIES_BYTES_MAX = 64 << 20


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """Reads the whole body; the length that a caller declares can only make it refuse earlier.

    Raises Problem 413, 415 (a body in a content coding) or 408.
    """
    check_codings(request.scope["headers"])
    if declares_longer_body(request.scope["headers"], limit):
        raise _too_large(limit)
    pieces, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                size += len(piece)
                if size > limit:
                    raise _too_large(limit)
                pieces.append(piece)
    except TimeoutError as error:
        raise _too_slow(timeout_s) from error
    return b"".join(pieces)


def _too_large(limit: int) -> Problem:
    problem_message = f"a body has at most {limit} bytes"
    return Problem(413, "body_too_large", problem_message, field="body", limit=limit)


def declares_longer_body(headers: Iterable[tuple[bytes, bytes]], limit: int) -> bool:
    """True if the request's Content-Length is above `limit`; header names in lower case."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit():
            return int(value) > limit
    return False


async def whole_body(
    receive: Receive, limit: int, timeout_s: float
) -> tuple[bytes | None, Receive]:
    """Body of the request, None if it is too long or never ended; and a `receive` that replays all that was read.

    Raises Problem 408 for a body that has not arrived within `timeout_s`, however steadily it trickles.
    """
    messages: deque[Message] = deque()

    async def replay_receive() -> Message:
        return messages.popleft() if messages else await receive()

    size, more = 0, True
    try:
        async with asyncio.timeout(timeout_s):
            while more:
                message = await receive()
                messages.append(message)
                size += len(message.get("body", b""))
                if message["type"] != "http.request" or size > limit:
                    return None, replay_receive
                more = message.get("more_body", False)
    except TimeoutError as error:
        raise _too_slow(timeout_s) from error
    return b"".join([read_message.get("body", b"") for read_message in messages]), replay_receive


def _too_slow(timeout_s: float) -> Problem:
    problem_message = f"the body did not arrive within {timeout_s} s"
    return Problem(408, "body_timeout", problem_message, field="body", limit=timeout_s)


def refusal_response(problem: Problem) -> Response:
    """The response to a request that gets no answer."""
    response = as_json(problem.status, problem.body())
    if problem.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    elif problem.status in (408, 413):
        response.headers["Connection"] = "close"  # the rest of the body is not waited for
    elif problem.status == 415 and problem.field == "content-encoding":
        response.headers["Accept-Encoding"] = "identity"  # RFC 9110, section 15.5.16
    elif (wait_s := problem.details.get("retry_after_seconds")) is not None:
        response.headers["Retry-After"] = str(max(1, math.ceil(float(str(wait_s)))))
    elif problem.status == 503:
        response.headers["Retry-After"] = "1"
    return response


def as_json(status: int, body: object) -> Response:
    """JSON response with this body."""
    return Response(
        orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY), status, media_type=JSON_TYPE
    )


def as_arrow(stream: bytes) -> Response:
    """Response of status 200 with this Arrow IPC stream."""
    return Response(stream, 200, media_type=ARROW_MEDIA_TYPE)


class BodyBudget:
    """Budget of request bodies in bytes, for one event loop."""

    def __init__(self, bytes_max: int = BODIES_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0

    def of(self, receive: Receive) -> "BudgetedBody":
        """The body of one request, counted as it is read."""
        return BudgetedBody(self, receive)


class BudgetedBody:
    """Body of one request; its bytes count against the budget until the context ends."""

    __slots__ = ("_all", "_receive", "_size")

    def __init__(self, bodies: BodyBudget, receive: Receive) -> None:
        self._all, self._receive = bodies, receive
        self._size = 0

    def __enter__(self) -> Receive:
        return self.receive

    def __exit__(self, *_: object) -> None:
        self._all.held_bytes -= self._size

    async def receive(self) -> Message:
        """The next message; raises Problem 503 where the bodies of others leave no room for it."""
        message = await self._receive()
        size = len(message.get("body", b""))
        if self._all.held_bytes + size > self._all.bytes_max:
            problem_message = (
                f"bodies of all requests together have at most {self._all.bytes_max} bytes at once"
            )
            raise Problem(
                503, "overloaded", problem_message, field="body", limit=self._all.bytes_max
            )
        self._all.held_bytes += size
        self._size += size
        return message

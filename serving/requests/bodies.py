"""Request bodies within bounds of bytes, time and memory; responses of JSON and Arrow."""

import asyncio
import math
from collections import deque
from collections.abc import Iterable

import orjson
from fastapi import Request, Response
from starlette.types import Message, Receive

from serving.arrow.schema import ARROW_MEDIA_TYPE
from serving.requests.errors import Problem
from serving.requests.negotiation import JSON_MEDIA_TYPE, check_codings

ResponseMessages = tuple[Message, Message]
"""Both ASGI messages of a complete response: start and body."""

BODIES_BYTES_MAX = 64 << 20


async def read_body(request: Request, body_bytes_max: int, body_timeout_s: float) -> bytes:
    """Read the whole body; a declared length can only cause an earlier refusal.

    Raises Problem 413 (too long), 415 (content coding) or 408 (too slow).
    """
    check_codings(request.scope["headers"])
    if declares_longer_body(request.scope["headers"], body_bytes_max):
        raise _body_too_large_problem(body_bytes_max)
    body_pieces, body_bytes = [], 0
    try:
        async with asyncio.timeout(body_timeout_s):
            async for body_piece in request.stream():
                body_bytes += len(body_piece)
                if body_bytes > body_bytes_max:
                    raise _body_too_large_problem(body_bytes_max)
                body_pieces.append(body_piece)
    except TimeoutError as error:
        raise _body_timeout_problem(body_timeout_s) from error
    return b"".join(body_pieces)


def _body_too_large_problem(body_bytes_max: int) -> Problem:
    problem_message = f"a body may have at most {body_bytes_max} bytes"
    return Problem(413, "body_too_large", problem_message, field="body", limit=body_bytes_max)


def declares_longer_body(headers: Iterable[tuple[bytes, bytes]], body_bytes_max: int) -> bool:
    """True if the request's Content-Length is above `body_bytes_max`; header names in lower case."""
    for header_name, header_value in headers:
        if header_name == b"content-length" and header_value.isdigit():
            return int(header_value) > body_bytes_max
    return False


async def read_replayable_body(
    receive: Receive, body_bytes_max: int, body_timeout_s: float
) -> tuple[bytes | None, Receive]:
    """Return the body, None if it is too long or incomplete; and a `receive` that replays what was read.

    Raises Problem 408 for a body that has not arrived completely within `body_timeout_s`.
    """
    received_messages: deque[Message] = deque()

    async def replay_receive() -> Message:
        return received_messages.popleft() if received_messages else await receive()

    body_bytes, has_more = 0, True
    try:
        async with asyncio.timeout(body_timeout_s):
            while has_more:
                message = await receive()
                received_messages.append(message)
                body_bytes += len(message.get("body", b""))
                if message["type"] != "http.request" or body_bytes > body_bytes_max:
                    return None, replay_receive
                has_more = message.get("more_body", False)
    except TimeoutError as error:
        raise _body_timeout_problem(body_timeout_s) from error
    return b"".join([read_message.get("body", b"") for read_message in received_messages]), replay_receive


def _body_timeout_problem(body_timeout_s: float) -> Problem:
    problem_message = f"the body did not arrive within {body_timeout_s} s"
    return Problem(408, "body_timeout", problem_message, field="body", limit=body_timeout_s)


def refusal_response(problem: Problem) -> Response:
    """Return the response for a refused request."""
    response = json_response(problem.status, problem.body())
    if problem.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    elif problem.status in (408, 413):
        response.headers["Connection"] = "close"  # do not wait for the rest of the body
    elif problem.status == 415 and problem.field == "content-encoding":
        response.headers["Accept-Encoding"] = "identity"  # RFC 9110, section 15.5.16
    elif (wait_s := problem.details.get("retry_after_seconds")) is not None:
        response.headers["Retry-After"] = str(max(1, math.ceil(float(str(wait_s)))))
    elif problem.status == 503:
        response.headers["Retry-After"] = "1"
    return response


def json_response(http_status: int, response_content: object) -> Response:
    """Return a JSON response with this body."""
    return Response(
        orjson.dumps(response_content, option=orjson.OPT_SERIALIZE_NUMPY), http_status, media_type=JSON_MEDIA_TYPE
    )


def arrow_response(arrow_stream: bytes) -> Response:
    """Return a response with status 200 and this Arrow IPC stream."""
    return Response(arrow_stream, 200, media_type=ARROW_MEDIA_TYPE)


class BodyBudget:
    """Budget of request bodies in bytes, for one event loop."""

    def __init__(self, bodies_bytes_max: int = BODIES_BYTES_MAX) -> None:
        self.bodies_bytes_max = bodies_bytes_max
        self.held_bytes = 0

    def of(self, receive: Receive) -> "BudgetedBody":
        """Return the body of one request, which is counted as it is read."""
        return BudgetedBody(self, receive)


class BudgetedBody:
    """Body of one request; its bytes count against the budget until the context ends."""

    __slots__ = ("_budget", "_charged_bytes", "_receive")

    def __init__(self, budget: BodyBudget, receive: Receive) -> None:
        self._budget, self._receive = budget, receive
        self._charged_bytes = 0

    def __enter__(self) -> Receive:
        return self.receive

    def __exit__(self, *_: object) -> None:
        self._budget.held_bytes -= self._charged_bytes

    async def receive(self) -> Message:
        """Return the next message; raise Problem 503 if the bodies of other requests leave no room."""
        message = await self._receive()
        piece_bytes = len(message.get("body", b""))
        if self._budget.held_bytes + piece_bytes > self._budget.bodies_bytes_max:
            problem_message = (
                f"the bodies of all requests together may have at most {self._budget.bodies_bytes_max} bytes"
            )
            raise Problem(503, "overloaded", problem_message, field="body", limit=self._budget.bodies_bytes_max)
        self._budget.held_bytes += piece_bytes
        self._charged_bytes += piece_bytes
        return message

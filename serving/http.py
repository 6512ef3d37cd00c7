"""Bodies in and out: what a request sends is bounded, what it gets is prebuilt JSON."""

from collections import deque

import orjson
from fastapi import Request, Response
from starlette.types import Message, Receive

from serving.arrow_schema import MEDIA_TYPE
from serving.problem import Problem

_JSON = "application/json"


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; what a caller says about its length only ever refuses earlier."""
    too_large = Problem(
        413, "body_too_large", f"a body has at most {limit} bytes", field="body", limit=limit
    )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise too_large
        pieces.append(piece)
    return b"".join(pieces)


async def whole_body(receive: Receive, limit: int) -> tuple[bytes | None, Receive]:
    """The body, None if it is too long or never ended; and from where all that was read can be read again."""
    messages: deque[Message] = deque()

    async def again() -> Message:
        return messages.popleft() if messages else await receive()

    size = 0
    while True:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request":
            return None, again
        size += len(message.get("body", b""))
        if size > limit:
            return None, again
        if not message.get("more_body", False):
            return b"".join([each.get("body", b"") for each in messages]), again


def refused(problem: Problem) -> Response:
    """The response to a request that gets no answer."""
    response = as_json(problem.status, problem.body())
    if problem.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    elif problem.status == 413:
        response.headers["Connection"] = "close"  # the rest of the body is not worth reading
    elif problem.status == 503:
        response.headers["Retry-After"] = "1"
    return response


def as_json(status: int, body: object) -> Response:
    """A response with this body."""
    return Response(orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY), status, media_type=_JSON)


def as_arrow(stream: bytes) -> Response:
    """A response of this Arrow IPC stream."""
    return Response(stream, 200, media_type=MEDIA_TYPE)

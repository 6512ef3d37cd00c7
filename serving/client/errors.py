"""Errors of the client, one type for each way in which a call can fail. Pure."""

from collections.abc import Mapping
from typing import Any

import orjson

_MESSAGE_CHARS_MAX = 200


class Unanswered(Exception):
    """Base class of all errors of a call."""


class InvalidArgument(Unanswered, TypeError, ValueError):
    """Argument that cannot be sent, such as NaN or a text with half of a pair of surrogates; nothing was sent.

    `field` is its place in the request, such as `entities[3].features.price`.
    """

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class DeadlineExceeded(Unanswered):
    """The deadline of the call passed without an answer; `__cause__` is the error of the last attempt, if any."""


class Unreachable(Unanswered):
    """Connection failure; `is_sent` is False if the request was certainly not sent."""

    def __init__(self, message: str, *, is_sent: bool) -> None:
        super().__init__(message)
        self.is_sent = is_sent


class Garbled(Unanswered):
    """Successful response that does not conform to the API, perhaps from a proxy."""


class Refusal(Unanswered):
    """Refusal by the service; `code`, `field` and `details` are for programs, the message is for people."""

    def __init__(self, status: int, error: Mapping[str, Any]) -> None:
        super().__init__(f"{status} {error.get('code')}: {error.get('message')}")
        self.status = status
        self.code = str(error.get("code"))
        self.field: str | None = error.get("field")
        self.details = dict(error)


class InvalidRequest(Refusal):
    """The request can never be answered as sent; `field` is the wrong field."""


class Unauthorized(Refusal):
    """The token is missing or wrong."""


class TokenExpired(Unauthorized):
    """The token has expired."""


class Forbidden(Refusal):
    """The token lacks the scope named by `scope`, which is empty if the service gives no reason."""

    def __init__(self, status: int, error: Mapping[str, Any]) -> None:
        super().__init__(status, error)
        self.scope = str(error.get("scope") or "")


class GenerationGone(Refusal):
    """The requested generation is no longer live or previous at the service."""


class Unavailable(Refusal):
    """The service, or a proxy in front of it, cannot answer now."""


class QuotaExceeded(Unavailable):
    """The token has used up the quota named by `quota`; it may have room again in `retry_after_s` seconds."""

    def __init__(self, status: int, error: Mapping[str, Any]) -> None:
        super().__init__(status, error)
        self.quota = str(error.get("quota") or "")
        wait_s = error.get("retry_after_seconds")
        self.retry_after_s = float(wait_s) if isinstance(wait_s, int | float) else 0.0


def refusal(status: int, body: bytes) -> Refusal:
    """Return the error for an unsuccessful response; `body` may be from another program, such as a proxy's page."""
    error: object = None
    try:
        document = orjson.loads(body)
        error = document.get("error") if isinstance(document, dict) else None
    except orjson.JSONDecodeError:
        pass
    if not isinstance(error, dict):
        body_text = body[:_MESSAGE_CHARS_MAX].decode(errors="replace")
        error = {"code": "http_error", "message": body_text or "no message"}
    return _refusal_class(status, error)(status, error)


def _refusal_class(status: int, error: Mapping[str, Any]) -> type[Refusal]:
    code = error.get("code")
    if status == 401:
        return TokenExpired if code == "token_expired" else Unauthorized
    if status == 403:
        return Forbidden
    if code == "quota_exceeded":
        return QuotaExceeded
    if code == "generation_gone":
        return GenerationGone
    if 400 <= status < 500 and status != 429:
        return InvalidRequest
    return Unavailable if status >= 429 else Refusal

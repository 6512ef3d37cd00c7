"""Refusals of requests: `Problem`, and each code with its status and meaning."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from cache.errors import InvalidInput, LarderError


class Problem(LarderError):
    """Error response: becomes `{"error": {"code", "message", "field", ...}}` with an HTTP status."""

    code = "invalid_request"

    def __init__(self, status: int, code: str, message: str, *, field: str | None = None, **details: object) -> None:
        super().__init__(message, **details)
        self.status = status
        self.reason = code
        self.field = field

    def body(self) -> dict[str, object]:
        """Return the JSON body."""
        error: dict[str, object] = {"code": self.reason, "message": self.message}
        if self.field is not None:
            error["field"] = self.field
        return {"error": error | self.details}


def unprocessable(code: str, message: str, field: str | None, **details: object) -> Problem:
    """Return a Problem 422: the request was understood and can never be answered as sent."""
    return Problem(422, code, message, field=field, **details)


def problem_from_input(error: InvalidInput, field: str) -> Problem:
    """Return the Problem for an InvalidInput of `cache`, with the place in the request."""
    details = {
        detail_name: detail_value for detail_name, detail_value in error.details.items() if detail_name != "field"
    }
    inner_field = error.details.get("field")
    return Problem(
        422, error.code, error.message, field=field if inner_field is None else f"{field}.{inner_field}", **details
    )


class ErrorCode(NamedTuple):
    """Status of a code, its meaning and the remedy."""

    http_status: int
    meaning: str


ERROR_CODES: Final[Mapping[str, ErrorCode]] = {
    "disconnected": ErrorCode(400, "The body ended early; most servers see it first, and answer in plain text"),
    "unauthorized": ErrorCode(401, "No token was sent, or an unknown one"),
    "token_expired": ErrorCode(401, "The token has expired: ask the operator for a new one"),
    "scope_missing": ErrorCode(403, "The token lacks the scope named by `scope`; `scopes` are its scopes"),
    "not_found": ErrorCode(404, "There is no such route"),
    "unknown_table": ErrorCode(404, "There is no such table; /v1/generations lists them"),
    "method_not_allowed": ErrorCode(405, "The route does not support the method; `Allow` lists the supported ones"),
    "not_acceptable": ErrorCode(406, "An answer cannot have this media type; `supported` lists the possible ones"),
    "body_timeout": ErrorCode(408, "The body did not arrive in time"),
    "generation_gone": ErrorCode(409, "The generation is not held here: ask without it"),
    "arm_gone": ErrorCode(409, "The arm of the experiment is not held here: ask without it"),
    "body_too_large": ErrorCode(413, "The body has more than `limit` bytes: send less at once"),
    "unsupported_media_type": ErrorCode(415, "A body cannot have this media type; `supported` lists the possible ones"),
    "unsupported_content_encoding": ErrorCode(415, "The body has a content coding: send it without"),
    "invalid_json": ErrorCode(422, "The body is not JSON"),
    "invalid_arrow": ErrorCode(422, "The body is not an Arrow IPC stream"),
    "unsupported_arrow": ErrorCode(422, "The stream uses a feature that this service does not support"),
    "invalid_field": ErrorCode(422, "`field` does not allow this value"),
    "missing_field": ErrorCode(422, "A required field was not sent"),
    "unknown_field": ErrorCode(422, "There is no such field or option"),
    "invalid_id": ErrorCode(422, "An id is not 1 to 256 bytes of UTF-8 (of an event: 128)"),
    "invalid_input": ErrorCode(422, "Nothing can be computed from what was sent"),
    "invalid_k": ErrorCode(422, "`k` is not between 1 and the length of the table's lists"),
    "invalid_filter": ErrorCode(422, "The filter is invalid; `field` is the place in it"),
    "unknown_filter": ErrorCode(422, "No filter of that name is declared"),
    "unknown_attribute": ErrorCode(422, "The generation has no such attribute"),
    "invalid_rerank": ErrorCode(422, "The re-ranking is invalid; `field` is the place in it"),
    "unknown_rerank": ErrorCode(422, "No re-ranking of that name is declared"),
    "invalid_feature": ErrorCode(422, "A feature is not a text, a number, or a list of one of them"),
    "not_finite": ErrorCode(422, "A number is not finite"),
    "too_many_features": ErrorCode(422, "More features than are allowed"),
    "too_many_values": ErrorCode(
        422, "A feature or the whole body has more values, or an Arrow stream more record batches, than `limit`"
    ),
    "feature_too_long": ErrorCode(422, "A text feature is longer than `limit`"),
    "batch_too_long": ErrorCode(422, "No entities (events, items) at all, or more than `limit`: send several requests"),
    "history_too_long": ErrorCode(422, "A history is longer than `limit`"),
    "exclude_too_long": ErrorCode(422, "`exclude` is longer than `limit`"),
    "too_many_ids": ErrorCode(422, "All histories and `exclude` together hold more ids than `limit`"),
    "too_many_numbers": ErrorCode(422, "All features together hold more values than `limit`"),
    "quota_exceeded": ErrorCode(429, "`quota` is used up: try again after `Retry-After`"),
    "internal_error": ErrorCode(500, "A bug of the service, which has logged it"),
    "not_ready": ErrorCode(503, "No generation is loaded yet: try again after `Retry-After`"),
    "overloaded": ErrorCode(503, "Too many requests are under way: try again after `Retry-After`"),
    "l2_unavailable": ErrorCode(503, "Redis does not answer: try again after `Retry-After`"),
}
"""Error codes, except those of single operations. Invalid HTTP is refused in plain text before it reaches a route."""

"""A request that is refused: status, code, message and the field at fault, as the caller reads them."""

from cache.errors import InvalidInput, LarderError


class Problem(LarderError):
    """Error response: becomes `{"error": {"code", "message", "field", ...}}` with an HTTP status."""

    code = "invalid_request"

    def __init__(
        self, status: int, code: str, message: str, *, field: str | None = None, **details: object
    ) -> None:
        super().__init__(message, **details)
        self.status = status
        self.reason = code
        self.field = field

    def body(self) -> dict[str, object]:
        """The JSON body."""
        error: dict[str, object] = {"code": self.reason, "message": self.message}
        if self.field is not None:
            error["field"] = self.field
        return {"error": error | self.details}


def unprocessable(code: str, message: str, field: str | None, **details: object) -> Problem:
    """Problem 422: the request was understood and can never be answered as sent."""
    return Problem(422, code, message, field=field, **details)


def from_input(error: InvalidInput, field: str) -> Problem:
    """A refusal by cache's own checks, with the place in the request that it is about."""
    details = {name: value for name, value in error.details.items() if name != "field"}
    inner = error.details.get("field")
    return Problem(
        422,
        error.code,
        error.message,
        field=field if inner is None else f"{field}.{inner}",
        **details,
    )

"""Content negotiation: the form of a request and of its answer, by the headers. Pure."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from serving.arrow.schema import ARROW_MEDIA_TYPE
from serving.requests.errors import Problem

JSON_TYPE = "application/json"
Form = Literal["json", "arrow"]

_ARROW = ARROW_MEDIA_TYPE.encode()
_FORM_BY_CONTENT_TYPE: dict[bytes, Form] = {
    _ARROW: "arrow",
    b"application/json": "json",
    # What curl and urllib say of a body when nobody chose a type.
    b"application/x-www-form-urlencoded": "json",
    b"": "json",
}
_FORM_BY_ACCEPT: dict[bytes, Form] = {
    _ARROW: "arrow",
    b"application/json": "json",
    b"application/*": "json",
    b"*/*": "json",
}
_OFFERED = [JSON_TYPE, ARROW_MEDIA_TYPE]


class Forms(NamedTuple):
    """Forms of the request's body and of the answer."""

    request_form: Form
    response_form: Form


def forms(headers: Iterable[tuple[bytes, bytes]]) -> Forms:
    """Forms by Content-Type and Accept, header names in lower case.

    Raises Problem 415 or 406 for any other type, and 415 for a body in a content coding.
    """
    body_form: Form = "json"
    accepted: list[bytes] = []
    for name, value in headers:
        if name == b"content-type":
            body_form = _parse_content_type(value)
        elif name == b"accept":
            accepted.append(value)
        elif name == b"content-encoding":
            _check_coding(value)
    return Forms(body_form, _choose_response_form(b",".join(accepted)) if accepted else "json")


def check_codings(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise Problem 415 for a body in a content coding, such as gzip; header names in lower case."""
    for name, value in headers:
        if name == b"content-encoding":
            _check_coding(value)


def _check_coding(value: bytes) -> None:
    coding = value.strip().lower()
    if coding not in (b"", b"identity"):
        name = coding.decode("ascii", "replace")
        raise Problem(
            415, "unsupported_content_encoding", f"the body is in the coding {name!r}: send it without one",
            field="content-encoding", supported=["identity"],
        )  # fmt: skip


def _parse_content_type(value: bytes) -> Form:
    type_ = value.partition(b";")[0].strip().lower()
    form = _FORM_BY_CONTENT_TYPE.get(type_)
    if form is None:
        raise Problem(
            415, "unsupported_media_type", f"a body is one of {', '.join(_OFFERED)}",
            field="content-type", supported=_OFFERED,
        )  # fmt: skip
    return form


def _choose_response_form(value: bytes) -> Form:
    """Form with the greatest weight, a type named outright before a wildcard, the first of equals."""
    exact_form = _FORM_BY_ACCEPT.get(value)
    if exact_form is not None:
        return exact_form
    best_choice: tuple[float, bool, Form] | None = None
    for media_range in value.lower().split(b","):
        type_, *parameters = (part.strip() for part in media_range.split(b";"))
        form, weight = _FORM_BY_ACCEPT.get(type_), _weight(parameters)
        rank = weight, b"*" not in type_
        if form is not None and weight > 0 and (best_choice is None or rank > best_choice[:2]):
            best_choice = *rank, form
    if best_choice is None:
        raise Problem(
            406, "not_acceptable", f"an answer is one of {', '.join(_OFFERED)}",
            field="accept", supported=_OFFERED,
        )  # fmt: skip
    return best_choice[2]


def _weight(parameters: list[bytes]) -> float:
    for parameter in parameters:
        if parameter.startswith(b"q="):
            try:
                return float(parameter[2:])
            except ValueError:
                return 0.0
    return 1.0

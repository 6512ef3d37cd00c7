"""Content negotiation: the media types of a request and of its answer, by the headers. Pure."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from serving.arrow.schema import ARROW_MEDIA_TYPE
from serving.requests.errors import Problem

JSON_MEDIA_TYPE = "application/json"
BodyForm = Literal["json", "arrow"]

_ARROW_TYPE_BYTES = ARROW_MEDIA_TYPE.encode()
_FORM_BY_CONTENT_TYPE: dict[bytes, BodyForm] = {
    _ARROW_TYPE_BYTES: "arrow",
    b"application/json": "json",
    # The default type that curl and urllib send for a body.
    b"application/x-www-form-urlencoded": "json",
    b"": "json",
}
_FORM_BY_ACCEPT: dict[bytes, BodyForm] = {
    _ARROW_TYPE_BYTES: "arrow",
    b"application/json": "json",
    b"application/*": "json",
    b"*/*": "json",
}
_JSON_SUFFIX = b"+json"
_OFFERED_MEDIA_TYPES = [JSON_MEDIA_TYPE, ARROW_MEDIA_TYPE]


class Forms(NamedTuple):
    """Forms of the request's body and of the answer."""

    request_form: BodyForm
    response_form: BodyForm


def parse_forms(headers: Iterable[tuple[bytes, bytes]]) -> Forms:
    """Return the forms by Content-Type and Accept; header names are in lower case.

    Raises Problem 415 or 406 for any other type, and 415 for a body in a content coding.
    """
    body_form: BodyForm = "json"
    accept_values: list[bytes] = []
    for header_name, header_value in headers:
        if header_name == b"content-type":
            body_form = _parse_content_type(header_value)
        elif header_name == b"accept":
            accept_values.append(header_value)
        elif header_name == b"content-encoding":
            _check_coding(header_value)
    return Forms(body_form, _choose_response_form(b",".join(accept_values)) if accept_values else "json")


def check_json_type(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise Problem 415 for a body of a route without Arrow that is not JSON by Content-Type; names in lower case."""
    for header_name, header_value in headers:
        if header_name == b"content-type" and _body_form(header_value) != "json":
            raise _media_type_problem([JSON_MEDIA_TYPE])


def check_codings(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise Problem 415 for a body in a content coding, such as gzip; header names in lower case."""
    for header_name, header_value in headers:
        if header_name == b"content-encoding":
            _check_coding(header_value)


def _check_coding(header_value: bytes) -> None:
    coding = header_value.strip().lower()
    if coding not in (b"", b"identity"):
        coding_name = coding.decode("ascii", "replace")
        raise Problem(
            415, "unsupported_content_encoding",
                f"the body has the content coding {coding_name!r}: send it without one",
            field="content-encoding", supported=["identity"],
        )  # fmt: skip


def _parse_content_type(header_value: bytes) -> BodyForm:
    body_form = _body_form(header_value)
    if body_form is None:
        raise _media_type_problem(_OFFERED_MEDIA_TYPES)
    return body_form


def _body_form(content_type: bytes) -> BodyForm | None:
    """Return the form of a body by its Content-Type, None for other media types."""
    media_type = content_type.partition(b";")[0].strip().lower()
    body_form = _FORM_BY_CONTENT_TYPE.get(media_type)
    return "json" if body_form is None and media_type.endswith(_JSON_SUFFIX) else body_form


def _media_type_problem(supported_media_types: list[str]) -> Problem:
    return Problem(
        415, "unsupported_media_type", f"the media type of a body here must be {' or '.join(supported_media_types)}",
        field="content-type", supported=supported_media_types,
    )  # fmt: skip


def _choose_response_form(accept_header: bytes) -> BodyForm:
    """Return the form with the greatest weight; explicit types precede wildcards, earlier types later ones."""
    exact_form = _FORM_BY_ACCEPT.get(accept_header)
    if exact_form is not None:
        return exact_form
    best_choice: tuple[float, bool, BodyForm] | None = None
    for media_range in accept_header.lower().split(b","):
        media_type, *parameters = (part.strip() for part in media_range.split(b";"))
        form, weight = _FORM_BY_ACCEPT.get(media_type), _parse_weight(parameters)
        rank = weight, b"*" not in media_type
        if form is not None and weight > 0 and (best_choice is None or rank > best_choice[:2]):
            best_choice = *rank, form
    if best_choice is None:
        raise Problem(
            406, "not_acceptable", f"the media type of an answer can be one of {', '.join(_OFFERED_MEDIA_TYPES)}",
            field="accept", supported=_OFFERED_MEDIA_TYPES,
        )  # fmt: skip
    return best_choice[2]


def _parse_weight(media_type_parameters: list[bytes]) -> float:
    for parameter in media_type_parameters:
        if parameter.startswith(b"q="):
            try:
                return float(parameter[2:])
            except ValueError:
                return 0.0
    return 1.0

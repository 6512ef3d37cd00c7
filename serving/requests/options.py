"""Parser of a request's options, from a body, a query or a header. Pure."""

import contextlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any
from urllib.parse import parse_qsl

import orjson

from cache.errors import InvalidInput
from cache.filters.expression import Filter, InvalidFilter, read_filter
from cache.filters.reranking import InvalidReranking, Reranking, read_reranking
from cache.format.redis_keys import NAME
from cache.format.stream_position import Position
from serving.requests.errors import from_input, unprocessable
from serving.requests.json_fields import read_id, read_ids, read_object
from serving.requests.models import Limits, RequestedArm, RequestOptions

ARM_HEADER = b"x-larder-arm"
"""Header that names an arm, like `arm` in a body or a query."""

TIMING_HEADER = b"x-larder-timing"
"""Header that requests stage times of a single lookup, which then bypasses the ready answers."""

_QUERY_FIELDS = frozenset(
    {
        "k", "fresh", "max_age_seconds", "generation", "deadline_ms", "canary_key", "filter",
        "rerank", "arm", "max_events", "as_of",
    }
)  # fmt: skip

_ARM_CHARS_MAX = 32
_JSON_CHARS_MAX = 16_384
_WHOLE_NUMBER = re.compile(r"-?[0-9]+")
_DIGITS_MAX = 18
_NUMBER = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,3})?")


def body_options(data: Mapping[str, Any], limits: Limits) -> RequestOptions:
    """Return the options of a JSON body."""
    exclude = data.get("exclude")
    fresh = data.get("fresh", False)
    if not isinstance(fresh, bool):
        raise unprocessable("invalid_field", "fresh is true or false", "fresh")
    generation = data.get("generation")
    if generation is not None and not isinstance(generation, str):
        raise unprocessable("invalid_field", "generation is a string", "generation")
    return RequestOptions(
        deadline_s=_deadline(data.get("deadline_ms"), "deadline_ms", limits),
        k=_k(data.get("k")),
        exclude=()
        if exclude is None
        else read_ids(exclude, "exclude", limits.max_exclude, "exclude_too_long"),
        fresh=fresh,
        max_age_s=_max_age(data.get("max_age_seconds")),
        generation=generation,
        canary_key=_canary_key(data.get("canary_key"), "canary_key"),
        filter=_filter(data.get("filter")),
        rerank=_reranking(data.get("rerank"), limits),
        arm=read_arm(data.get("arm"), "arm"),
        max_events=_max_events(data.get("max_events")),
        as_of=_as_of(data.get("as_of")),
    )


def body_deadline_s(data: object, limits: Limits) -> float:
    """Return a JSON body's deadline in seconds, even if other fields are invalid; raise Problem for a bad deadline."""
    sent_deadline_ms = data.get("deadline_ms") if isinstance(data, dict) else None
    return _deadline(sent_deadline_ms, "deadline_ms", limits)


def query_options(query: bytes, limits: Limits) -> RequestOptions:
    """Return the options of a URL's query; without any, all defaults."""
    if not query:
        return RequestOptions(limits.deadline_ms / 1000)
    return text_options(_pairs(query), limits)


def text_options(pairs: Mapping[str, str], limits: Limits) -> RequestOptions:
    """Return the options from texts by name, as in a query."""
    data = read_object(dict(pairs), "body", _QUERY_FIELDS)
    k, fresh = data.get("k"), data.get("fresh", "false").lower()
    if fresh not in ("true", "false", "1", "0"):
        raise unprocessable("invalid_field", "fresh is true or false", "fresh")
    return RequestOptions(
        deadline_s=_deadline(
            _number(data.get("deadline_ms"), "deadline_ms"), "deadline_ms", limits
        ),
        k=None if k is None else _k(_whole_number(k, "k")),
        fresh=fresh in ("true", "1"),
        max_age_s=_max_age(_number(data.get("max_age_seconds"), "max_age_seconds")),
        generation=data.get("generation"),
        canary_key=_canary_key(data.get("canary_key"), "canary_key"),
        filter=_filter_of_text(data.get("filter")),
        rerank=_reranking_of_text(data.get("rerank"), limits),
        arm=read_arm(data.get("arm"), "arm"),
        max_events=_max_events(_number(data.get("max_events"), "max_events")),
        as_of=_as_of(data.get("as_of")),
    )


def with_headers(
    options: RequestOptions, headers: Iterable[tuple[bytes, bytes]], limits: Limits
) -> RequestOptions:
    """Return the options with the request's headers (names in lower case) applied, in one pass.

    The tighter of two deadlines counts; the canary's key, and an arm, only if the body or the query has none.
    """
    for name, value in headers:
        if name == b"x-deadline-ms":
            header_deadline_s = _deadline(
                _number(value.decode("latin-1"), "x-deadline-ms"), "x-deadline-ms", limits
            )
            options = replace(options, deadline_s=min(options.deadline_s, header_deadline_s))
        elif name == b"x-larder-canary-key" and options.canary_key is None:
            key = _canary_key(value.decode(errors="replace"), "x-larder-canary-key")
            options = replace(options, canary_key=key)
        elif name == ARM_HEADER and options.arm is None:
            arm = read_arm(value.decode(errors="replace"), ARM_HEADER.decode())
            options = replace(options, arm=arm)
    return options


def _canary_key(value: object, field: str) -> bytes | None:
    return None if value is None else read_id(value, field)


def read_arm(value: object, field: str) -> RequestedArm | None:
    """Parse an arm `EXPERIMENT=ARM`, None for None; raise Problem for anything else."""
    if value is None:
        return None
    parts = value.split("=") if isinstance(value, str) else []
    if len(parts) != 2 or not all(0 < len(name) <= _ARM_CHARS_MAX for name in parts):
        raise unprocessable("invalid_field", f"{field} is EXPERIMENT=ARM", field)
    return RequestedArm(*parts)


def _filter(value: object) -> Filter | str | None:
    """Parse a filter, or return the name of a declared one, which the answering generation looks up."""
    if value is None or (isinstance(value, str) and NAME.fullmatch(value)):
        return value
    try:
        return read_filter(value)
    except InvalidFilter as error:
        raise from_input(error, "filter") from error


def _filter_of_text(text: str | None) -> Filter | str | None:
    is_name = text is not None and NAME.fullmatch(text)
    return _filter(text if is_name else _json_of(text, "filter"))


def _reranking(value: object, limits: Limits) -> Reranking | None:
    """Return a declared re-ranking by its name, else parse a re-ranking."""
    if value is None:
        return None
    if isinstance(value, str):
        if (declared := limits.rerankings.get(value)) is not None:
            return declared
        declared_names = sorted(limits.rerankings)
        raise unprocessable(
            "unknown_rerank",
            f"no re-ranking {value[:40]!r} is declared; there are {', '.join(declared_names) or 'none'}",
            "rerank",
            declared=declared_names,
        )
    try:
        return read_reranking(value, limits.boost_max)
    except (InvalidReranking, InvalidFilter) as error:
        raise from_input(error, "rerank") from error


def _reranking_of_text(text: str | None, limits: Limits) -> Reranking | None:
    is_json = text is not None and text.startswith("{")
    return _reranking(_json_of(text, "rerank") if is_json else text, limits)


def _json_of(text: str | None, field: str) -> object:
    """Parse JSON in a text; None for None."""
    if text is None:
        return None
    if len(text) > _JSON_CHARS_MAX:
        problem_message = f"{field} has at most {_JSON_CHARS_MAX} characters here"
        raise unprocessable(f"invalid_{field}", problem_message, field, limit=_JSON_CHARS_MAX)
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise unprocessable(f"invalid_{field}", f"{field} is not JSON: {error}", field) from error


def _pairs(query: bytes) -> dict[str, str]:
    try:
        text = query.decode("ascii")
        if "%" in text or "+" in text:
            return dict(parse_qsl(text, keep_blank_values=True, errors="strict"))
    except ValueError as error:
        raise unprocessable(
            "invalid_field", f"the query cannot be read: {error}", "query"
        ) from error
    parts = [part.partition("=") for part in text.split("&") if part]
    return {name: value for name, _, value in parts}


def _number(text: str | None, field: str) -> float | None:
    if text is None:
        return None
    # Not what float() takes: that reads "1_0", "nan" and digits of any script.
    if not _NUMBER.fullmatch(text):
        raise unprocessable("invalid_field", f"{field} is a number, not {text[:40]!r}", field)
    return float(text)


def _whole_number(text: str, field: str) -> int:
    if not _WHOLE_NUMBER.fullmatch(text):
        raise unprocessable(
            f"invalid_{field}", f"{field} is a whole number, not {text[:40]!r}", field
        )
    if len(text) > _DIGITS_MAX:
        raise unprocessable(
            f"invalid_{field}", f"{field} has at most {_DIGITS_MAX} digits, not {len(text)}", field
        )
    return int(text)


def _k(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise unprocessable("invalid_k", "k is a whole number", "k")
    if value < 1:
        raise unprocessable("invalid_k", f"k is 1 or more, not {value}", "k")
    return value


def _max_events(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or value != 0:
        raise unprocessable(
            "invalid_field", "max_events is 0, for the stored answer, or left out", "max_events"
        )
    return 0


def _as_of(value: object) -> int | None:
    """Return the number of the last counted position: a position's own, or of all accepted up to a time."""
    if value is None:
        return None
    if isinstance(value, str):
        with contextlib.suppress(InvalidInput):
            return Position.parse(value).number
        with contextlib.suppress(ValueError):
            at = datetime.fromisoformat(value)
            if at.tzinfo is not None and at.timestamp() >= 0:
                return Position(int(at.timestamp() * 1000 + 0.5) + 1, 0).number - 1
    raise unprocessable(
        "invalid_field",
        "as_of is a position such as 1700000000000-0, or a time with its zone",
        "as_of",
    )


def _max_age(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise unprocessable(
            "invalid_field", "max_age_seconds is a finite number, 0 or more", "max_age_seconds"
        )
    return float(value)


def _deadline(value: object, field: str, limits: Limits) -> float:
    if value is None:
        return limits.deadline_ms / 1000
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise unprocessable("invalid_field", f"{field} is a finite number above 0", field)
    return min(float(value), limits.deadline_max_ms) / 1000

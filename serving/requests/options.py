"""Options of a request: each is declared once, and read from a body, a query or a header. Pure."""

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

import orjson

from cache.errors import InvalidInput
from cache.filters.expression import Filter, InvalidFilter, read_filter
from cache.filters.reranking import BOOSTS_MAX, InvalidReranking, Reranking, read_reranking
from cache.format.redis_keys import NAME_PATTERN
from cache.format.stream_position import Position
from serving.requests.errors import from_input, unprocessable
from serving.requests.json_fields import read_id, read_ids, read_object
from serving.requests.named_schema import (
    ID,
    Json,
    NamedSchema,
    list_of,
    object_of,
    with_description,
)

ARM_HEADER = b"x-larder-arm"
"""Header that names an arm, like `arm` in a body or a query."""

TIMING_HEADER = b"x-larder-timing"
"""Header that requests stage times of a single lookup, which then bypasses the ready answers."""

_ARM_CHARS_MAX = 32
_JSON_CHARS_MAX = 16_384
_WHOLE_NUMBER = re.compile(r"-?[0-9]+")
_DIGITS_MAX = 18
_NUMBER = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,3})?")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the content of one request."""

    max_batch: int
    max_history: int
    max_exclude: int
    deadline_ms: float
    deadline_max_ms: float
    max_ids: int = 50_000
    max_numbers: int = 100_000
    boost_max: float = 4.0
    rerankings: Mapping[str, Reranking] = field(default_factory=dict)
    """Declared re-rankings, by name."""
    feature_text_bytes: int = 65_536

    @property
    def max_values(self) -> int:
        """Bound on the values of any kind in a JSON body: ids, numbers, entities, and a few others."""
        return self.max_ids + 2 * self.max_numbers + 8 * self.max_batch + 64


class RequestedArm(NamedTuple):
    """Arm of an experiment by which a tester wants to be answered."""

    experiment: str
    arm: str


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options that apply to every entity of a request."""

    deadline_s: float
    k: int | None = None
    exclude: tuple[bytes, ...] = ()
    fresh: bool = False
    max_age_s: float | None = None
    generation: str | None = None
    canary_key: bytes | None = None
    filter: Filter | str | None = None
    """Filter that was sent, or the name of one that the generation declares."""
    rerank: Reranking | None = None
    arm: RequestedArm | None = None
    max_events: int | None = None
    """0: newer events are not counted; None: all are."""
    as_of: int | None = None
    """Number of the position up to which events are counted, for explanations; None: all are."""

    @property
    def is_reshaped(self) -> bool:
        """True if lists are filtered or re-ranked."""
        return self.filter is not None or self.rerank is not None


@dataclass(frozen=True, slots=True)
class RequestOption:
    """Declaration of an option; the parsers of bodies and URLs, the schema and the documents follow from it.

    `parse` reads the value of a JSON body. `from_text` makes that value of a URL's text, given the option's name.
    `attribute` is the field of RequestOptions.
    """

    attribute: str
    schema: Json
    parse: Callable[[Any, Limits], Any]
    from_text: Callable[[str, str], object]
    query_schema: Json | None = None
    """Schema in a URL, if it is another one than in a body."""
    is_for_lists_only: bool = False
    """True for an option of lookups in a body alone: neither a URL nor a score request has it."""


def body_options(data: Mapping[str, Any], limits: Limits) -> RequestOptions:
    """Return the options of a JSON body, which has no null fields."""
    options = {
        option.attribute: option.parse(data[name], limits)
        for name, option in REQUEST_OPTIONS.items()
        if name in data
    }
    return _with_deadline(options, limits)


def body_deadline_s(data: object, limits: Limits) -> float:
    """Return a JSON body's deadline in seconds, even if other fields are invalid; raise Problem for a bad deadline."""
    sent_deadline_ms = data.get("deadline_ms") if isinstance(data, dict) else None
    if sent_deadline_ms is None:
        return limits.deadline_ms / 1000
    return _deadline_s(sent_deadline_ms, limits)


def query_options(query: bytes, limits: Limits) -> RequestOptions:
    """Return the options of a URL's query; without any, all defaults."""
    if not query:
        return RequestOptions(limits.deadline_ms / 1000)
    return text_options(_pairs(query), limits)


def text_options(pairs: Mapping[str, str], limits: Limits) -> RequestOptions:
    """Return the options from texts by name, as in a query."""
    data = read_object(dict(pairs), "body", QUERY_FIELDS)
    options = {
        option.attribute: option.parse(option.from_text(data[name], name), limits)
        for name, option in REQUEST_OPTIONS.items()
        if name in data
    }
    return _with_deadline(options, limits)


def _with_deadline(options: dict[str, Any], limits: Limits) -> RequestOptions:
    options.setdefault("deadline_s", limits.deadline_ms / 1000)
    return RequestOptions(**options)


def with_headers(
    options: RequestOptions, headers: Iterable[tuple[bytes, bytes]], limits: Limits
) -> RequestOptions:
    """Return the options with the request's headers (names in lower case) applied, in one pass.

    The tighter of two deadlines counts; the canary's key, and an arm, only if the body or the query has none.
    """
    for name, value in headers:
        if name == b"x-deadline-ms":
            sent_deadline_ms = _number(value.decode("latin-1"), "x-deadline-ms")
            header_deadline_s = _deadline_s(sent_deadline_ms, limits, "x-deadline-ms")
            options = replace(options, deadline_s=min(options.deadline_s, header_deadline_s))
        elif name == b"x-larder-canary-key" and options.canary_key is None:
            key = read_id(value.decode(errors="replace"), "x-larder-canary-key")
            options = replace(options, canary_key=key)
        elif name == ARM_HEADER and options.arm is None:
            arm = read_arm(value.decode(errors="replace"), ARM_HEADER.decode())
            options = replace(options, arm=arm)
    return options


def read_arm(value: object, field: str = "arm") -> RequestedArm:
    """Parse an arm `EXPERIMENT=ARM`; raise Problem for anything else."""
    parts = value.split("=") if isinstance(value, str) else []
    if len(parts) != 2 or not all(0 < len(name) <= _ARM_CHARS_MAX for name in parts):
        raise unprocessable("invalid_field", f"{field} is EXPERIMENT=ARM", field)
    return RequestedArm(*parts)


def _fresh(value: object, _limits: Limits) -> bool:
    if not isinstance(value, bool):
        raise unprocessable("invalid_field", "fresh is true or false", "fresh")
    return value


def _fresh_of_text(text: str, field: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise unprocessable("invalid_field", f"{field} is true or false", field)
    return text.lower() in ("true", "1")


def _generation(value: object, _limits: Limits) -> str:
    if not isinstance(value, str):
        raise unprocessable("invalid_field", "generation is a string", "generation")
    return value


def _filter(value: object, _limits: Limits) -> Filter | str | None:
    """Parse a filter, or return the name of a declared one, which the answering generation looks up."""
    if value is None or (isinstance(value, str) and NAME_PATTERN.fullmatch(value)):
        return value
    try:
        return read_filter(value)
    except InvalidFilter as error:
        raise from_input(error, "filter") from error


def _filter_of_text(text: str, field: str) -> object:
    return text if NAME_PATTERN.fullmatch(text) else _json_of_text(text, field)


def _reranking(value: object, limits: Limits) -> Reranking:
    """Return a declared re-ranking by its name, else parse a re-ranking."""
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


def _reranking_of_text(text: str, field: str) -> object:
    return _json_of_text(text, field) if text.startswith("{") else text


def _json_of_text(text: str, field: str) -> object:
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


def _number(text: str, field: str) -> float:
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


def _k(value: object, _limits: Limits) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise unprocessable("invalid_k", "k is a whole number", "k")
    if value < 1:
        raise unprocessable("invalid_k", f"k is 1 or more, not {value}", "k")
    return value


def _max_events(value: object, _limits: Limits) -> int:
    if isinstance(value, bool) or value != 0:
        raise unprocessable(
            "invalid_field", "max_events is 0, for the stored answer, or left out", "max_events"
        )
    return 0


def _as_of(value: object, _limits: Limits) -> int:
    """Return the number of the last counted position: a position's own, or of all accepted up to a time."""
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


def _max_age_s(value: object, _limits: Limits) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise unprocessable(
            "invalid_field", "max_age_seconds is a finite number, 0 or more", "max_age_seconds"
        )
    return float(value)


def _deadline_s(value: object, limits: Limits, field: str = "deadline_ms") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise unprocessable("invalid_field", f"{field} is a finite number above 0", field)
    return min(float(value), limits.deadline_max_ms) / 1000


def _exclude(value: object, limits: Limits) -> tuple[bytes, ...]:
    return read_ids(value, "exclude", limits.max_exclude, "exclude_too_long")


def _canary_key(value: object, _limits: Limits) -> bytes:
    return read_id(value, "canary_key")


def _arm(value: object, _limits: Limits) -> RequestedArm:
    return read_arm(value)


def _same_text(text: str, _field: str) -> str:
    return text


_FILTER = NamedSchema(
    "Filter",
    {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": True,
        "description": "One operator (and, or, not; ==, in, <, <=, >, >=, contains, exists) and what it takes, such as "
        '{"<": ["price", 20]}',
    },
)


_RERANKING = NamedSchema(
    "Reranking",
    {
        "type": "object",
        "minProperties": 1,
        "description": "Another order of the candidates",
        "properties": {
            "boost": list_of(
                NamedSchema(
                    "Boost",
                    object_of(
                        {
                            "filter": with_description(_FILTER, "Items whose scores are raised"),
                            "factor": {"type": "number", "exclusiveMinimum": 0},
                        },
                        ("filter", "factor"),
                        additionalProperties=False,
                    ),
                ),
                minItems=1,
                maxItems=BOOSTS_MAX,
            ),
            "diversify": NamedSchema(
                "Diversify",
                object_of(
                    {
                        "attribute": {"type": "string", "description": "With `most`"},
                        "most": {
                            "type": "integer",
                            "minimum": 1,
                            "description": "At most so many items of one value of `attribute`",
                        },
                        "mmr": {
                            "type": "number",
                            "description": "Weight of a score against likeness to those before",
                        },
                    },
                    additionalProperties=False,
                ),
            ),
        },
        "additionalProperties": False,
    },
)


_FILTER_OPTION = NamedSchema(
    "FilterOption",
    {
        "anyOf": [{"type": "string"}, _FILTER],
        "description": "Only items that pass, by their attributes: the name of a filter that the generation declares, "
        "or a filter",
    },
)


_RERANK_OPTION = NamedSchema(
    "RerankOption",
    {
        "anyOf": [{"type": "string"}, _RERANKING],
        "description": "Another order of the candidates: the name of one that the settings declare, or a re-ranking",
    },
)


REQUEST_OPTIONS: Final[Mapping[str, RequestOption]] = {
    "k": RequestOption(
        "k",
        {"type": "integer", "minimum": 1, "description": "Items per top-K answer; all by default"},
        _k,
        _whole_number,
    ),
    "exclude": RequestOption(
        "exclude",
        list_of(ID, description="Item ids that must not appear"),
        _exclude,
        _same_text,
        is_for_lists_only=True,
    ),
    "deadline_ms": RequestOption(
        "deadline_s",
        {
            "type": "number",
            "exclusiveMinimum": 0,
            "description": "Milliseconds that an answer may take; what cannot be had in them is answered by a later "
            "rung",
        },
        _deadline_s,
        _number,
    ),
    "fresh": RequestOption(
        "fresh",
        {
            "type": "boolean",
            "description": "Compute from the input though a stored answer exists",
        },
        _fresh,
        _fresh_of_text,
    ),
    "max_age_seconds": RequestOption(
        "max_age_s",
        {
            "type": "number",
            "minimum": 0,
            "description": "Compute from the input if what is stored is older",
        },
        _max_age_s,
        _number,
    ),
    "max_events": RequestOption(
        "max_events",
        {
            "type": "integer",
            "enum": [0],
            "description": "0: the stored answer, whatever events the user has that are newer",
        },
        _max_events,
        _number,
    ),
    "as_of": RequestOption(
        "as_of",
        {
            "type": "string",
            "description": "Count events of the user up to this position, or accepted by this time (RFC 3339), as an "
            "earlier answer told: while they are kept, it is made again",
        },
        _as_of,
        _same_text,
    ),
    "generation": RequestOption(
        "generation",
        {"type": "string", "description": "Answer from this generation, or 409"},
        _generation,
        _same_text,
    ),
    "canary_key": RequestOption(
        "canary_key",
        with_description(
            ID,
            "Decides whether a canary answers, if one runs: the same key always meets the same generation. "
            "By default the user, if the request is about one user alone; without either the live one answers",
        ),
        _canary_key,
        _same_text,
    ),
    "arm": RequestOption(
        "arm",
        {
            "type": "string",
            "pattern": "^[^=]{1,32}=[^=]{1,32}$",
            "description": "EXPERIMENT=ARM that is to answer, or 409; for testers, not counted",
        },
        _arm,
        _same_text,
    ),
    "filter": RequestOption(
        "filter",
        _FILTER_OPTION,
        _filter,
        _filter_of_text,
        query_schema={
            "type": "string",
            "description": "Only items that pass: the name of a declared filter, or the JSON text of one, such as "
            '{"<": ["price", 20]}',
        },
    ),
    "rerank": RequestOption(
        "rerank",
        _RERANK_OPTION,
        _reranking,
        _reranking_of_text,
        query_schema={
            "type": "string",
            "description": "Another order: the name of a declared one, or the JSON text of a re-ranking, such as "
            '{"diversify": {"attribute": "brand", "most": 2}}',
        },
    ),
}
"""Options by their names in bodies and URLs."""

QUERY_FIELDS: Final = frozenset(
    name for name, option in REQUEST_OPTIONS.items() if not option.is_for_lists_only
)
"""Options of a URL, and of a score request."""

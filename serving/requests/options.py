"""Options of a request, each declared once, and parsed from a body, a query or a header. Pure."""

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
from serving.requests.errors import problem_from_input, unprocessable
from serving.requests.json_fields import read_id, read_ids, read_object
from serving.requests.named_schema import ID_SCHEMA, Json, NamedSchema, list_schema, object_schema, with_description

ARM_HEADER = b"x-larder-arm"
"""Header that names an arm, like `arm` in a body or a query."""

TIMING_HEADER = b"x-larder-timing"
"""Header that requests stage times of a single lookup, which then bypasses the ready answers."""

_ARM_NAME_CHARS_MAX = 32
_JSON_TEXT_CHARS_MAX = 16_384
_WHOLE_NUMBER_PATTERN = re.compile(r"-?[0-9]+")
_DIGITS_MAX = 18
_NUMBER_PATTERN = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,3})?")


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
        """Bound on the number of values of any kind in a JSON body: ids, numbers, entities, and a few others."""
        return self.max_ids + 2 * self.max_numbers + 8 * self.max_batch + 64


class RequestedArm(NamedTuple):
    """Arm of an experiment that a tester wants to answer the request."""

    experiment_name: str
    arm_name: str


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
    """The sent filter, or the name of a filter that the generation declares."""
    rerank: Reranking | None = None
    arm: RequestedArm | None = None
    max_events: int | None = None
    """0: newer events are not counted; None: all are counted."""
    as_of: int | None = None
    """Number of the position up to which events are counted; None: all are counted."""

    @property
    def is_reshaped(self) -> bool:
        """True if lists are filtered or re-ranked."""
        return self.filter is not None or self.rerank is not None


@dataclass(frozen=True, slots=True)
class RequestOption:
    """Declaration of an option, used by the parsers of bodies and URLs, the schema and the documents.

    `parse_body_value` parses the value of a JSON body. `parse_url_text` converts a URL's text to that value, given the
    option's name. `options_field` is the field of RequestOptions.
    """

    options_field: str
    schema: Json
    parse_body_value: Callable[[Any, Limits], Any]
    parse_url_text: Callable[[str, str], object]
    query_schema: Json | None = None
    """Schema in a URL, if it differs from that in a body."""
    is_for_lookup_bodies_only: bool = False
    """True for an option that only bodies of lookups may have, not URLs and score requests."""


def body_options(body_fields: Mapping[str, Any], limits: Limits) -> RequestOptions:
    """Return the options of a JSON body, which has no null fields."""
    options = {
        option.options_field: option.parse_body_value(body_fields[option_name], limits)
        for option_name, option in REQUEST_OPTIONS.items()
        if option_name in body_fields
    }
    return _options_with_deadline(options, limits)


def body_deadline_s(parsed_body: object, limits: Limits) -> float:
    """Return a JSON body's deadline in seconds, even if other fields are invalid; raise Problem if it is invalid."""
    sent_deadline_ms = parsed_body.get("deadline_ms") if isinstance(parsed_body, dict) else None
    if sent_deadline_ms is None:
        return limits.deadline_ms / 1000
    return _parse_deadline_s(sent_deadline_ms, limits)


def query_options(query: bytes, limits: Limits) -> RequestOptions:
    """Return the options of a URL's query; without any, the defaults."""
    if not query:
        return RequestOptions(limits.deadline_ms / 1000)
    return text_options(_parse_query(query), limits)


def text_options(text_by_name: Mapping[str, str], limits: Limits) -> RequestOptions:
    """Return the options from texts by name, as in a query."""
    sent_fields = read_object(dict(text_by_name), "body", QUERY_OPTION_NAMES)
    options = {
        option.options_field: option.parse_body_value(
            option.parse_url_text(sent_fields[option_name], option_name), limits
        )
        for option_name, option in REQUEST_OPTIONS.items()
        if option_name in sent_fields
    }
    return _options_with_deadline(options, limits)


def _options_with_deadline(options: dict[str, Any], limits: Limits) -> RequestOptions:
    options.setdefault("deadline_s", limits.deadline_ms / 1000)
    return RequestOptions(**options)


def with_headers(options: RequestOptions, headers: Iterable[tuple[bytes, bytes]], limits: Limits) -> RequestOptions:
    """Return the options with the request's headers (names in lower case) applied, in one pass.

    The shorter of two deadlines applies; canary key and arm only if the body or the query has none.
    """
    for header_name, header_value in headers:
        if header_name == b"x-deadline-ms":
            sent_deadline_ms = _parse_number(header_value.decode("latin-1"), "x-deadline-ms")
            header_deadline_s = _parse_deadline_s(sent_deadline_ms, limits, "x-deadline-ms")
            options = replace(options, deadline_s=min(options.deadline_s, header_deadline_s))
        elif header_name == b"x-larder-canary-key" and options.canary_key is None:
            canary_key = read_id(header_value.decode(errors="replace"), "x-larder-canary-key")
            options = replace(options, canary_key=canary_key)
        elif header_name == ARM_HEADER and options.arm is None:
            arm = read_arm(header_value.decode(errors="replace"), ARM_HEADER.decode())
            options = replace(options, arm=arm)
    return options


def read_arm(sent_value: object, field: str = "arm") -> RequestedArm:
    """Parse an arm `EXPERIMENT=ARM`; raise Problem for anything else."""
    arm_parts = sent_value.split("=") if isinstance(sent_value, str) else []
    if len(arm_parts) != 2 or not all(0 < len(name) <= _ARM_NAME_CHARS_MAX for name in arm_parts):
        raise unprocessable("invalid_field", f"{field} is EXPERIMENT=ARM", field)
    return RequestedArm(*arm_parts)


def _parse_fresh(sent_value: object, _limits: Limits) -> bool:
    if not isinstance(sent_value, bool):
        raise unprocessable("invalid_field", "fresh must be true or false", "fresh")
    return sent_value


def _fresh_from_text(url_text: str, option_name: str) -> bool:
    if url_text.lower() not in ("true", "false", "1", "0"):
        raise unprocessable("invalid_field", f"{option_name} must be true or false", option_name)
    return url_text.lower() in ("true", "1")


def _parse_generation(sent_value: object, _limits: Limits) -> str:
    if not isinstance(sent_value, str):
        raise unprocessable("invalid_field", "generation must be a string", "generation")
    return sent_value


def _parse_filter(sent_value: object, _limits: Limits) -> Filter | str | None:
    """Parse a filter, or return the name of a declared filter, which the generation resolves."""
    if sent_value is None or (isinstance(sent_value, str) and NAME_PATTERN.fullmatch(sent_value)):
        return sent_value
    try:
        return read_filter(sent_value)
    except InvalidFilter as error:
        raise problem_from_input(error, "filter") from error


def _filter_from_text(url_text: str, option_name: str) -> object:
    return url_text if NAME_PATTERN.fullmatch(url_text) else _json_from_text(url_text, option_name)


def _parse_reranking(sent_value: object, limits: Limits) -> Reranking:
    """Return a declared re-ranking by its name, else parse a re-ranking."""
    if isinstance(sent_value, str):
        if (declared := limits.rerankings.get(sent_value)) is not None:
            return declared
        declared_names = sorted(limits.rerankings)
        raise unprocessable(
            "unknown_rerank",
            f"no re-ranking {sent_value[:40]!r} is declared; declared are: {', '.join(declared_names) or 'none'}",
            "rerank",
            declared=declared_names,
        )
    try:
        return read_reranking(sent_value, limits.boost_max)
    except (InvalidReranking, InvalidFilter) as error:
        raise problem_from_input(error, "rerank") from error


def _reranking_from_text(url_text: str, option_name: str) -> object:
    return _json_from_text(url_text, option_name) if url_text.startswith("{") else url_text


def _json_from_text(url_text: str, option_name: str) -> object:
    if len(url_text) > _JSON_TEXT_CHARS_MAX:
        problem_message = f"{option_name} may have at most {_JSON_TEXT_CHARS_MAX} characters in a URL"
        raise unprocessable(f"invalid_{option_name}", problem_message, option_name, limit=_JSON_TEXT_CHARS_MAX)
    try:
        return orjson.loads(url_text)
    except orjson.JSONDecodeError as error:
        raise unprocessable(f"invalid_{option_name}", f"{option_name} is not JSON: {error}", option_name) from error


def _parse_query(query: bytes) -> dict[str, str]:
    try:
        query_text = query.decode("ascii")
        if "%" in query_text or "+" in query_text:
            return dict(parse_qsl(query_text, keep_blank_values=True, errors="strict"))
    except ValueError as error:
        raise unprocessable("invalid_field", f"the query cannot be read: {error}", "query") from error
    query_parts = [query_part.partition("=") for query_part in query_text.split("&") if query_part]
    return {name: sent_value for name, _, sent_value in query_parts}


def _parse_number(url_text: str, option_name: str) -> float:
    # Stricter than float(), which accepts "1_0", "nan" and digits of any script.
    if not _NUMBER_PATTERN.fullmatch(url_text):
        raise unprocessable("invalid_field", f"{option_name} must be a number, not {url_text[:40]!r}", option_name)
    return float(url_text)


def _parse_whole_number(url_text: str, option_name: str) -> int:
    if not _WHOLE_NUMBER_PATTERN.fullmatch(url_text):
        raise unprocessable(
            f"invalid_{option_name}", f"{option_name} must be a whole number, not {url_text[:40]!r}", option_name
        )
    if len(url_text) > _DIGITS_MAX:
        raise unprocessable(
            f"invalid_{option_name}",
            f"{option_name} may have at most {_DIGITS_MAX} digits, not {len(url_text)}",
            option_name,
        )
    return int(url_text)


def _parse_k(sent_value: object, _limits: Limits) -> int:
    if isinstance(sent_value, bool) or not isinstance(sent_value, int):
        raise unprocessable("invalid_k", "k must be a whole number", "k")
    if sent_value < 1:
        raise unprocessable("invalid_k", f"k must be 1 or more, not {sent_value}", "k")
    return sent_value


def _parse_max_events(sent_value: object, _limits: Limits) -> int:
    if isinstance(sent_value, bool) or sent_value != 0:
        raise unprocessable("invalid_field", "max_events must be 0, for the stored answer, or left out", "max_events")
    return 0


def _parse_as_of(sent_value: object, _limits: Limits) -> int:
    """Return the number of the last counted position, given as a position or as a time of acceptance."""
    if isinstance(sent_value, str):
        with contextlib.suppress(InvalidInput):
            return Position.parse(sent_value).number
        with contextlib.suppress(ValueError):
            counted_until = datetime.fromisoformat(sent_value)
            if counted_until.tzinfo is not None and counted_until.timestamp() >= 0:
                return Position(int(counted_until.timestamp() * 1000 + 0.5) + 1, 0).number - 1
    raise unprocessable(
        "invalid_field", "as_of must be a position such as 1700000000000-0, or a time with its zone", "as_of"
    )


def _parse_max_age_s(sent_value: object, _limits: Limits) -> float:
    if isinstance(sent_value, bool) or not isinstance(sent_value, int | float) or not 0 <= sent_value < math.inf:
        raise unprocessable("invalid_field", "max_age_seconds must be a finite number, 0 or more", "max_age_seconds")
    return float(sent_value)


def _parse_deadline_s(sent_value: object, limits: Limits, field: str = "deadline_ms") -> float:
    if isinstance(sent_value, bool) or not isinstance(sent_value, int | float) or not 0 < sent_value < math.inf:
        raise unprocessable("invalid_field", f"{field} must be a finite number above 0", field)
    return min(float(sent_value), limits.deadline_max_ms) / 1000


def _parse_exclude(sent_value: object, limits: Limits) -> tuple[bytes, ...]:
    return read_ids(sent_value, "exclude", limits.max_exclude, "exclude_too_long")


def _parse_canary_key(sent_value: object, _limits: Limits) -> bytes:
    return read_id(sent_value, "canary_key")


def _parse_arm(sent_value: object, _limits: Limits) -> RequestedArm:
    return read_arm(sent_value)


def _unchanged_text(url_text: str, _option_name: str) -> str:
    return url_text


_FILTER_SCHEMA = NamedSchema(
    "Filter",
    {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": True,
        "description": "One operator (and, or, not; ==, in, <, <=, >, >=, contains, exists) and its operands, such as "
        '{"<": ["price", 20]}',
    },
)


_RERANKING_SCHEMA = NamedSchema(
    "Reranking",
    {
        "type": "object",
        "minProperties": 1,
        "description": "Another order of the candidates",
        "properties": {
            "boost": list_schema(
                NamedSchema(
                    "Boost",
                    object_schema(
                        {
                            "filter": with_description(_FILTER_SCHEMA, "Items whose scores are raised"),
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
                object_schema(
                    {
                        "attribute": {"type": "string", "description": "With `most`"},
                        "most": {
                            "type": "integer",
                            "minimum": 1,
                            "description": "Largest number of items with the same value of `attribute`",
                        },
                        "mmr": {
                            "type": "number",
                            "description": "Weight of the score against similarity to earlier items",
                        },
                    },
                    additionalProperties=False,
                ),
            ),
        },
        "additionalProperties": False,
    },
)


_FILTER_OPTION_SCHEMA = NamedSchema(
    "FilterOption",
    {
        "anyOf": [{"type": "string"}, _FILTER_SCHEMA],
        "description": "Only items that pass, by their attributes: the name of a filter that the generation declares, "
        "or a filter",
    },
)


_RERANK_OPTION_SCHEMA = NamedSchema(
    "RerankOption",
    {
        "anyOf": [{"type": "string"}, _RERANKING_SCHEMA],
        "description": "Another order of the candidates: the name of one that the settings declare, or a re-ranking",
    },
)


REQUEST_OPTIONS: Final[Mapping[str, RequestOption]] = {
    "k": RequestOption(
        "k",
        {"type": "integer", "minimum": 1, "description": "Items per top-K answer; all by default"},
        _parse_k,
        _parse_whole_number,
    ),
    "exclude": RequestOption(
        "exclude",
        list_schema(ID_SCHEMA, description="Item ids that must not appear"),
        _parse_exclude,
        _unchanged_text,
        is_for_lookup_bodies_only=True,
    ),
    "deadline_ms": RequestOption(
        "deadline_s",
        {
            "type": "number",
            "exclusiveMinimum": 0,
            "description": "Milliseconds that an answer may take; slower entities are answered by a later rung",
        },
        _parse_deadline_s,
        _parse_number,
    ),
    "fresh": RequestOption(
        "fresh",
        {"type": "boolean", "description": "Compute from the input though a stored answer exists"},
        _parse_fresh,
        _fresh_from_text,
    ),
    "max_age_seconds": RequestOption(
        "max_age_s",
        {"type": "number", "minimum": 0, "description": "Compute from the input if the stored answer is older"},
        _parse_max_age_s,
        _parse_number,
    ),
    "max_events": RequestOption(
        "max_events",
        {"type": "integer", "enum": [0], "description": "0: the stored answer, even if the user has newer events"},
        _parse_max_events,
        _parse_number,
    ),
    "as_of": RequestOption(
        "as_of",
        {
            "type": "string",
            "description": "Count the user's events up to this position, or accepted by this time (RFC 3339): repeats "
            "an earlier answer as long as its events are kept",
        },
        _parse_as_of,
        _unchanged_text,
    ),
    "generation": RequestOption(
        "generation",
        {"type": "string", "description": "Answer from this generation; 409 if it is not held"},
        _parse_generation,
        _unchanged_text,
    ),
    "canary_key": RequestOption(
        "canary_key",
        with_description(
            ID_SCHEMA,
            "Decides whether a running canary answers: the same key always gets the same generation. Default: the "
            "user, if the request is about one user only; without a key the live generation answers",
        ),
        _parse_canary_key,
        _unchanged_text,
    ),
    "arm": RequestOption(
        "arm",
        {
            "type": "string",
            "pattern": "^[^=]{1,32}=[^=]{1,32}$",
            "description": "EXPERIMENT=ARM that must answer; 409 if it is not held. For testers, not counted",
        },
        _parse_arm,
        _unchanged_text,
    ),
    "filter": RequestOption(
        "filter",
        _FILTER_OPTION_SCHEMA,
        _parse_filter,
        _filter_from_text,
        query_schema={
            "type": "string",
            "description": "Only items that pass: the name of a declared filter, or the JSON text of one, such as "
            '{"<": ["price", 20]}',
        },
    ),
    "rerank": RequestOption(
        "rerank",
        _RERANK_OPTION_SCHEMA,
        _parse_reranking,
        _reranking_from_text,
        query_schema={
            "type": "string",
            "description": "Another order: the name of a declared one, or the JSON text of a re-ranking, such as "
            '{"diversify": {"attribute": "brand", "most": 2}}',
        },
    ),
}
"""Options by their names in bodies and URLs."""

QUERY_OPTION_NAMES: Final = frozenset(
    name for name, option in REQUEST_OPTIONS.items() if not option.is_for_lookup_bodies_only
)
"""Names of the options of URLs and score requests."""

"""Parsers of lookups, scores and feedback, from a URL, JSON or Arrow; each body is parsed once."""

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote_to_bytes

from cache.errors import InvalidId
from cache.format.ids import ID_BYTES_MAX, canonical_id, have_allowed_lengths
from cache.native import loader
from serving.arrow.reader import BATCHES_MAX, TooManyBatches, UnsupportedStream, read_frame
from serving.arrow.schema import Field, MalformedStream
from serving.requests.errors import Problem, unprocessable
from serving.requests.json_fields import (
    check_length,
    invalid_id_problem,
    read_features,
    read_id,
    read_ids,
    read_json,
    read_list,
    read_object,
)
from serving.requests.models import FeedbackReport, LookupRequest, RequestedEntity, ScoreRequest
from serving.requests.negotiation import BodyForm
from serving.requests.options import (
    ARM_HEADER,
    QUERY_OPTION_NAMES,
    REQUEST_OPTIONS,
    TIMING_HEADER,
    Limits,
    RequestOptions,
    body_options,
    query_options,
    read_arm,
    text_options,
)

RequestScope = MutableMapping[str, Any]
"""ASGI scope of a request, which caches the parsed body for the next reader."""

T = TypeVar("T")
LOOKUP_PATH_PREFIX = b"/v1/lookup/"

LARGE_BODY_BYTES = 256 << 10
"""Bytes of a body from which parsing would block the event loop for more than about 5 ms."""

_CONTENT_KEY = "larder.content"

_LOOKUP_FIELDS = frozenset({"entities", *REQUEST_OPTIONS})
_BATCH_FIELDS = frozenset({"entities", "k"})
_ENTITY_FIELDS = frozenset({"id", "history", "features"})
_ENTITY_TEXT = "an id (a text or a whole number from -2**63 to 2**64 - 1) or a JSON object with id, history or features"
_TABLE_ENTITY_TEXT = "a JSON object with table, and with id, history or features"
_SCORE_FIELDS = frozenset({"user", "items", *QUERY_OPTION_NAMES})
_FEEDBACK_SUBJECT_NAMES = ("generation", "canary_key", "arm")
_FEEDBACK_FIELDS = frozenset({*_FEEDBACK_SUBJECT_NAMES, "event", "count"})
_FEEDBACK_EVENT_PATTERN = re.compile(r"[a-z][a-z0-9_]{0,31}")
_FEEDBACK_COUNT_MAX = 1_000_000
ID_COLUMN_NAME = "id"

_FOREIGN_METADATA_PREFIXES = ("pandas", "ARROW:")
"""Prefixes of metadata names of other tools, which are ignored."""

_K_DIGITS_MAX = 5
_CACHED_QUERIES_MAX = 1_024
_CACHED_QUERY_BYTES_MAX = 256
_DEADLINE_DIGITS_MAX = 9
_WATCHED_HEADERS = frozenset({b"x-deadline-ms", b"x-larder-canary-key", ARM_HEADER, TIMING_HEADER})


def lookup_from_body(
    scope: RequestScope, request_body: bytes, body_form: BodyForm, table_name: str | None, limits: Limits
) -> LookupRequest:
    """Return the lookup of a body; removes the cached contents."""
    parsed_body = pop_content(scope, request_body, body_form, limits)
    if body_form == "arrow" and table_name is not None:
        return lookup_from_stream(parsed_body, table_name, limits)
    return lookup_from_json(parsed_body, table_name, limits)


def pop_content(scope: RequestScope, request_body: bytes, body_form: BodyForm, limits: Limits) -> Any:
    """Parse the body like `peek_content`, for its last reader, and drop the cached result."""
    try:
        return peek_content(scope, request_body, body_form, limits)
    finally:
        del scope[_CONTENT_KEY]


def peek_content(scope: RequestScope, request_body: bytes, body_form: BodyForm, limits: Limits) -> Any:
    """Parse the body as JSON or `ArrowLookup`; raise Problem. Both outcomes are cached for the next reader."""
    if _CONTENT_KEY not in scope:
        try:
            is_arrow = body_form == "arrow"
            scope[_CONTENT_KEY] = (
                read_arrow_lookup(request_body, limits) if is_arrow else read_json(request_body, limits.max_values)
            )
        except Problem as problem:
            scope[_CONTENT_KEY] = problem
    content_or_problem = scope[_CONTENT_KEY]
    if not isinstance(content_or_problem, Exception):
        return content_or_problem
    try:
        raise content_or_problem.with_traceback(None)
    finally:
        del content_or_problem  # else the error keeps this frame, and so the body, alive


def store_refusal(scope: RequestScope, error: Exception) -> None:
    """Store an error that every later reader gets; the body is not read again."""
    scope[_CONTENT_KEY] = error.with_traceback(None)  # its frames would keep the body


async def run_in_thread_if_large(request_body: bytes, read_body_content: Callable[[], T]) -> T:
    """Run `read_body_content`, in a thread if the body is large, so that other requests are answered meanwhile."""
    return read_body_content() if len(request_body) <= LARGE_BODY_BYTES else await asyncio.to_thread(read_body_content)


def lookup_from_url(raw_path: bytes, path_prefix: bytes, query: bytes, limits: Limits) -> LookupRequest:
    """Return the lookup of `<prefix><table>/<entity>?k=...`; the id is the percent-decoded rest, with slashes."""
    prefix_index = raw_path.find(path_prefix)
    if prefix_index < 0:
        raise Problem(404, "not_found", "the fixed part of this path must not be percent-encoded")
    table, _, encoded_id = raw_path[prefix_index + len(path_prefix) :].partition(b"/")
    try:
        id_text = unquote_to_bytes(encoded_id).decode()
    except UnicodeDecodeError as error:
        raise unprocessable("invalid_id", "the id in the path is not UTF-8", "id") from error
    try:
        id_bytes = canonical_id(id_text)
    except InvalidId as error:
        raise invalid_id_problem(error, "id") from error
    return LookupRequest((RequestedEntity(_path_text(table), id_text, id_bytes, "id"),), query_options(query, limits))


def lookup_from_json(parsed_body: object, table_name: str | None, limits: Limits) -> LookupRequest:
    """Return the lookup of the JSON of POST /v1/lookup/{table}, or of POST /v1/lookup if `table_name` is None."""
    body_fields = read_object(parsed_body, "body", _LOOKUP_FIELDS)
    sent_entities = read_list(body_fields, "entities")
    check_length(sent_entities, 1, limits.max_batch, "entities", "batch_too_long")
    _check_totals(sent_entities, body_fields, limits)
    entities = tuple(
        _read_entity(sent_entity, table_name, f"entities[{index}]", limits)
        for index, sent_entity in enumerate(sent_entities)
    )
    return LookupRequest(entities, body_options(body_fields, limits))


def score_from_json(parsed_body: object, limits: Limits) -> ScoreRequest:
    """Return the score request of the JSON of POST /v1/score."""
    body_fields = read_object(parsed_body, "body", _SCORE_FIELDS)
    if "user" not in body_fields:
        raise unprocessable("missing_field", "user is missing", "user")
    _check_totals([body_fields["user"]], body_fields, limits)
    sent_items = read_list(body_fields, "items")
    candidate_ids = read_ids(sent_items, "items", limits.max_batch, "batch_too_long", ids_min=1)
    return ScoreRequest(
        _read_entity(body_fields["user"], "", "user", limits), candidate_ids, body_options(body_fields, limits)
    )


def feedback_from_json(parsed_body: object) -> FeedbackReport:
    """Return the feedback of the JSON of POST /v1/feedback."""
    body_fields = read_object(parsed_body, "body", _FEEDBACK_FIELDS)
    generation, canary_key = body_fields.get("generation"), body_fields.get("canary_key")
    arm = None if body_fields.get("arm") is None else read_arm(body_fields["arm"])
    subject_names = [name for name in _FEEDBACK_SUBJECT_NAMES if body_fields.get(name) is not None]
    if len(subject_names) != 1:
        problem_message = "send exactly one of generation (of the answer), canary_key and arm (EXPERIMENT=ARM)"
        if subject_names:
            raise unprocessable("invalid_field", f"{problem_message}, not {' and '.join(subject_names)}", "body")
        raise unprocessable("missing_field", problem_message, "body")
    if generation is not None and not isinstance(generation, str):
        raise unprocessable("invalid_field", "generation must be a string", "generation")
    if "event" not in body_fields:
        raise unprocessable("missing_field", "event is missing: say what came of the answer, such as click", "event")
    event, count = body_fields["event"], body_fields.get("count", 1)
    if not isinstance(event, str) or not _FEEDBACK_EVENT_PATTERN.fullmatch(event):
        raise unprocessable(
            "invalid_field", "event must be 1 to 32 characters of a-z, 0-9 and _, beginning with a letter", "event"
        )
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _FEEDBACK_COUNT_MAX:
        raise unprocessable("invalid_field", f"count must be a whole number from 1 to {_FEEDBACK_COUNT_MAX}", "count")
    canary_key = None if canary_key is None else read_id(canary_key, "canary_key")
    return FeedbackReport(generation, canary_key, arm, event, count)


def _read_entity(sent_entity: object, table_name: str | None, field_path: str, limits: Limits) -> RequestedEntity:
    if isinstance(sent_entity, str | int) and table_name is not None:
        sent_entity = {"id": sent_entity}
    known_fields = _ENTITY_FIELDS if table_name is not None else _ENTITY_FIELDS | {"table"}
    if not isinstance(sent_entity, dict):
        raise unprocessable(
            "invalid_field", f"{field_path} is {_TABLE_ENTITY_TEXT if table_name is None else _ENTITY_TEXT}", field_path
        )
    entity_fields = read_object(sent_entity, field_path, known_fields)
    if table_name is None:
        table_field = f"{field_path}.table"
        if "table" not in entity_fields:
            raise unprocessable("missing_field", f"{table_field} is missing: name a table", table_field)
        table_name = entity_fields["table"]
        if not isinstance(table_name, str):
            raise unprocessable("invalid_field", f"{table_field} must be the name of a table", table_field)
    sent_id, sent_history, sent_features = (
        entity_fields.get("id"),
        entity_fields.get("history"),
        entity_fields.get("features"),
    )
    id_bytes = None if sent_id is None else read_id(sent_id, f"{field_path}.id")
    history = (
        None
        if sent_history is None
        else read_ids(sent_history, f"{field_path}.history", limits.max_history, "history_too_long")
    )
    features = (
        None
        if sent_features is None
        else read_features(sent_features, f"{field_path}.features", limits.feature_text_bytes)
    )
    if id_bytes is None and not history and not features:
        raise unprocessable("missing_field", f"{field_path} has neither id nor history nor features", field_path)
    return RequestedEntity(
        table_name, None if id_bytes is None else id_bytes.decode(), id_bytes, field_path, history, features
    )


def _check_totals(entities: list[Any], body_fields: Mapping[str, Any], limits: Limits) -> None:
    """Refuse too many ids or numbers in total, before any is read: each input may be within its own limit."""
    sent_entities = [sent_entity for sent_entity in entities if isinstance(sent_entity, dict)]
    id_lists = [sent_entity.get("history") for sent_entity in sent_entities]
    id_lists.append(body_fields.get("exclude"))
    id_count = sum([len(id_list) for id_list in id_lists if isinstance(id_list, list)])
    if id_count > limits.max_ids:
        raise unprocessable(
            "too_many_ids",
            f"histories and exclude have {id_count} ids in total, {limits.max_ids} are allowed",
            "body",
            limit=limits.max_ids,
        )
    number_count = sum([_count_feature_values(sent_entity.get("features")) for sent_entity in sent_entities])
    if number_count > limits.max_numbers:
        raise unprocessable(
            "too_many_numbers",
            f"features have {number_count} values in total, {limits.max_numbers} are allowed",
            "body",
            limit=limits.max_numbers,
        )


def _count_feature_values(sent_features: object) -> int:
    """Return the number of values: list elements, and features that are not lists."""
    feature_values = sent_features.values() if isinstance(sent_features, dict) else ()
    return sum(
        [max(1, len(feature_value)) if isinstance(feature_value, list) else 1 for feature_value in feature_values]
    )


def _path_text(encoded_text: bytes) -> str:
    return unquote_to_bytes(encoded_text).decode(errors="replace")


class ArrowLookup(NamedTuple):
    """Sent ids as UTF-8 bytes, and options by name as texts."""

    sent_ids: list[bytes]
    option_text_by_name: dict[str, str]


def read_arrow_lookup(request_body: bytes, limits: Limits) -> ArrowLookup:
    """Return ids and options, checking only the number of ids; raise Problem for other streams."""
    try:
        # Reading one more than allowed is enough to refuse.
        cutter = loader.kernels.cut_texts
        read_rows_max = limits.max_batch + 1
        frame = read_frame(
            request_body, read_rows_max, texts_as_bytes=True, text_cutter=cutter, check_fields=_check_column
        )
    except MalformedStream as error:
        raise unprocessable("invalid_arrow", f"the body is not an Arrow IPC stream of ids: {error}", "body") from error
    except TooManyBatches as error:
        raise unprocessable("too_many_values", str(error), "body", limit=BATCHES_MAX) from error
    except UnsupportedStream as error:
        raise unprocessable("unsupported_arrow", str(error), "body") from error
    sent_ids = frame.values_by_column[ID_COLUMN_NAME]
    if None in sent_ids:
        index = sent_ids.index(None)
        raise unprocessable("invalid_field", f"entities[{index}] is null", f"entities[{index}]")
    check_length(sent_ids, 1, limits.max_batch, "entities", "batch_too_long")
    options = {
        option_name: option_text
        for option_name, option_text in frame.schema_metadata.items()
        if not option_name.startswith(_FOREIGN_METADATA_PREFIXES)
    }
    return ArrowLookup(sent_ids, options)


def lookup_from_stream(id_stream: ArrowLookup, table_name: str, limits: Limits) -> LookupRequest:
    """Return the lookup of the stream of POST /v1/lookup/{table}."""
    text_ids = [raw_id.decode() for raw_id in id_stream.sent_ids]
    canonical_ids = [read_id(text_id, f"entities[{index}]") for index, text_id in enumerate(text_ids)]
    entities = tuple(
        RequestedEntity(table_name, entity_id, canonical_id_bytes, f"entities[{index}]")
        for index, (entity_id, canonical_id_bytes) in enumerate(zip(text_ids, canonical_ids, strict=True))
    )
    return LookupRequest(entities, text_options(id_stream.option_text_by_name, limits))


def _check_column(fields: tuple[Field, ...]) -> None:
    if [field.name for field in fields] != [ID_COLUMN_NAME] or fields[0].kind not in ("utf8", "large_utf8"):
        raise unprocessable(
            "invalid_field",
            f"a batch must have one column {ID_COLUMN_NAME!r} of utf8; send histories and features as JSON",
            "entities",
        )


class ParsedLookup(NamedTuple):
    """Lookup of one id in one table."""

    table: str
    id: str
    raw_id: bytes


class IdBatch(NamedTuple):
    """Lookup of many ids in one table; `k` None: all items."""

    raw_ids: list[bytes]
    k: int | None


def parse_single_lookup(request_path: bytes) -> ParsedLookup | None:
    """Return the table and the id of `/v1/lookup/<table>/<id>`."""
    if not request_path.startswith(LOOKUP_PATH_PREFIX):
        return None
    table_name, _, encoded_id = request_path[len(LOOKUP_PATH_PREFIX) :].partition(b"/")
    id_bytes = unquote_to_bytes(encoded_id) if b"%" in encoded_id else encoded_id
    # The routes decode a percent-encoded table.
    if not 0 < len(id_bytes) <= ID_BYTES_MAX or b"%" in table_name:
        return None
    try:
        return ParsedLookup(table_name.decode("ascii"), id_bytes.decode(), id_bytes)
    except UnicodeDecodeError:
        return None


def id_batch_from_json(body_fields: object, ids_max: int) -> IdBatch | None:
    """Return a batch of text ids, perhaps with `k`, from a JSON body; None for any other body."""
    if not isinstance(body_fields, dict) or not body_fields.keys() <= _BATCH_FIELDS:
        return None
    sent_ids, k = body_fields.get("entities"), _plain_k(body_fields)
    if not isinstance(sent_ids, list) or not 1 <= len(sent_ids) <= ids_max or k == 0:
        return None
    try:
        id_bytes_list = [entity_id.encode() for entity_id in sent_ids]
    except (AttributeError, UnicodeEncodeError):
        return None
    return IdBatch(id_bytes_list, k) if have_allowed_lengths(id_bytes_list) else None


def _plain_k(body_fields: Mapping[str, Any]) -> int | None:
    """Return the value of `k`, None if absent; 0 for a value that is refused later."""
    k = body_fields.get("k")
    return k if k is None or (type(k) is int and k > 0) else 0


def id_batch_from_stream(id_stream: ArrowLookup) -> IdBatch | None:
    """Return a batch of plain ids, perhaps with `k`, for the fast path; None for any other stream."""
    id_bytes_list, options = id_stream
    if not have_allowed_lengths(id_bytes_list) or not options.keys() <= {"k"}:
        return None
    k = options.get("k")
    if k is None:
        return IdBatch(id_bytes_list, None)
    is_k = k.isascii() and k.isdigit() and len(k) <= _K_DIGITS_MAX and int(k) > 0
    return IdBatch(id_bytes_list, int(k)) if is_k else None


def tighten_deadline(options: RequestOptions, deadline_s: float) -> RequestOptions:
    """Return the options with the shorter of their deadline and that of the headers."""
    if deadline_s >= options.deadline_s:
        return options
    return replace(options, deadline_s=deadline_s)


class QueryOptionsCache:
    """Cache of options by URL query, for queries with only `k`, a deadline and a filter.

    Only short queries are cached, in a bounded number: queries that repeat are short.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._options_by_query: dict[bytes, RequestOptions | None] = {}

    def of(self, query: bytes) -> RequestOptions | None:
        """Return the options, parsed once per distinct query."""
        if len(query) > _CACHED_QUERY_BYTES_MAX:
            return self._read_plain_options(query)
        try:
            return self._options_by_query[query]
        except KeyError:
            if len(self._options_by_query) >= _CACHED_QUERIES_MAX:
                self._options_by_query.clear()
            options = self._options_by_query[query] = self._read_plain_options(query)
            return options

    def _read_plain_options(self, query: bytes) -> RequestOptions | None:
        try:
            options = query_options(query, self._limits)
        except Problem:
            return None
        plain_options = RequestOptions(options.deadline_s, options.k, filter=options.filter)
        return options if options == plain_options else None


class HeaderReader:
    """Reader of the headers that affect a lookup; names are in lower case."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def deadline_s(self, headers: Iterable[tuple[bytes, bytes]]) -> float | None:
        """Return the headers' deadline in seconds, infinite without one; None if the fast path cannot be used."""
        deadline_s = float("inf")
        for header_name, header_value in headers:
            if header_name not in _WATCHED_HEADERS:
                continue
            if header_name == b"x-deadline-ms":
                sent_ms = header_value.isdigit() and len(header_value) <= _DEADLINE_DIGITS_MAX and int(header_value)
                if not sent_ms:
                    return None
                deadline_s = min(deadline_s, min(sent_ms, self._limits.deadline_max_ms) / 1000)
            # If stage times are reported, TIMING_HEADER has been removed before.
            elif header_name in (ARM_HEADER, TIMING_HEADER) or not (
                header_value.isascii() and 0 < len(header_value) <= ID_BYTES_MAX
            ):
                return None
        return deadline_s

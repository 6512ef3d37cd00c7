"""Parsing of lookups, scores and feedback, from a URL, JSON or Arrow: each body once, plain lookups the short way."""

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote_to_bytes

from cache.errors import InvalidId
from cache.format.ids import ID_BYTES_MAX, canonical_id, have_id_lengths
from cache.native import loader
from serving.arrow.reader import Unsupported, read_frame
from serving.arrow.schema import Field, Malformed
from serving.requests.errors import Problem, unprocessable
from serving.requests.json_fields import (
    check_length,
    read_features,
    read_id,
    read_ids,
    read_json,
    read_object,
    refused_id,
)
from serving.requests.models import FeedbackReport, LookupRequest, RequestedEntity, ScoreRequest
from serving.requests.negotiation import Form
from serving.requests.options import (
    ARM_HEADER,
    QUERY_FIELDS,
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
"""ASGI scope of a request, in which the contents of its body are kept for the next reader."""

T = TypeVar("T")
LOOKUP_PREFIX = b"/v1/lookup/"

LARGE_BODY_BYTES = 256 << 10
"""Bytes of a body beyond which reading it would hold the event loop for more than some 5 ms."""

_CONTENT_KEY = "larder.content"

_LOOKUP_FIELDS = frozenset({"entities", *REQUEST_OPTIONS})
_BATCH_FIELDS = frozenset({"entities", "k"})
_ENTITY_FIELDS = frozenset({"id", "history", "features"})
_SCORE_FIELDS = frozenset({"user", "items", *QUERY_FIELDS})
_FEEDBACK_FIELDS = frozenset({"generation", "canary_key", "arm", "event", "count"})
_FEEDBACK_EVENT = re.compile(r"[a-z][a-z0-9_]{0,31}")
_FEEDBACK_COUNT_MAX = 1_000_000
ID_COLUMN = "id"

_FOREIGN_PREFIXES = ("pandas", "ARROW:")
"""Prefixes of metadata names that other tools leave; they mean nothing here."""

_K_DIGITS_MAX = 5
_CACHED_QUERIES_MAX = 1_024
_CACHED_QUERY_BYTES_MAX = 256
_DEADLINE_DIGITS_MAX = 9
_WATCHED_HEADERS = frozenset({b"x-deadline-ms", b"x-larder-canary-key", ARM_HEADER, TIMING_HEADER})


def lookup_from_body(
    scope: RequestScope, body: bytes, form: Form, table: str | None, limits: Limits
) -> LookupRequest:
    """Lookup that a body asks for; the kept contents are removed."""
    content = pop_content(scope, body, form, limits)
    if form == "arrow" and table is not None:
        return lookup_from_stream(content, table, limits)
    return lookup_from_json(content, table, limits)


def pop_content(scope: RequestScope, body: bytes, form: Form, limits: Limits) -> Any:
    """Parse the body like `peek_content`, for its last reader, and drop the cached result."""
    try:
        return peek_content(scope, body, form, limits)
    finally:
        del scope[_CONTENT_KEY]


def peek_content(scope: RequestScope, body: bytes, form: Form, limits: Limits) -> Any:
    """Reads the body, as JSON or as `ArrowLookup`; raises Problem. Either outcome is kept for the next reader."""
    if _CONTENT_KEY not in scope:
        try:
            is_arrow = form == "arrow"
            scope[_CONTENT_KEY] = (
                read_stream(body, limits) if is_arrow else read_json(body, limits.max_values)
            )
        except Problem as problem:
            scope[_CONTENT_KEY] = problem
    content_or_problem = scope[_CONTENT_KEY]
    if not isinstance(content_or_problem, Exception):
        return content_or_problem
    try:
        raise content_or_problem.with_traceback(None)
    finally:
        del (
            content_or_problem
        )  # else the error holds this frame, and with it the body, until Python looks for cycles


def keep_refusal(scope: RequestScope, error: Exception) -> None:
    """Stores an error that every later reader gets; the body is not read again."""
    scope[_CONTENT_KEY] = error.with_traceback(None)  # whose frames hold the body


async def run_in_thread_if_large(body: bytes, read: Callable[[], T]) -> T:
    """Runs `read` for a body: in a thread if the body is large, so that other requests are answered meanwhile."""
    return read() if len(body) <= LARGE_BODY_BYTES else await asyncio.to_thread(read)


def lookup_from_url(raw_path: bytes, prefix: bytes, query: bytes, limits: Limits) -> LookupRequest:
    """Lookup from `<prefix><table>/<entity>?k=...`; the id is all after the table, percent-decoded, with slashes."""
    start = raw_path.find(prefix)
    if start < 0:
        raise Problem(404, "not_found", "the fixed part of this path must not be percent-encoded")
    table, _, entity = raw_path[start + len(prefix) :].partition(b"/")
    try:
        id_ = unquote_to_bytes(entity).decode()
    except UnicodeDecodeError as error:
        raise unprocessable("invalid_id", "the id in the path is not UTF-8", "id") from error
    try:
        raw = canonical_id(id_)
    except InvalidId as error:
        raise refused_id(error, "id") from error
    return LookupRequest(
        (RequestedEntity(_path_text(table), id_, raw, "id"),), query_options(query, limits)
    )


def lookup_from_json(content: object, table: str | None, limits: Limits) -> LookupRequest:
    """Lookup from the JSON of POST /v1/lookup/{table}, or of POST /v1/lookup when `table` is None."""
    data = read_object(content, "body", _LOOKUP_FIELDS)
    sent_entities = data.get("entities")
    if not isinstance(sent_entities, list):
        raise unprocessable("invalid_field", "entities is a list", "entities")
    check_length(sent_entities, 1, limits.max_batch, "entities", "batch_too_long")
    _check_total(sent_entities, data, limits)
    entities = tuple(
        _entity(sent_entity, table, f"entities[{index}]", limits)
        for index, sent_entity in enumerate(sent_entities)
    )
    return LookupRequest(entities, body_options(data, limits))


def score_from_json(content: object, limits: Limits) -> ScoreRequest:
    """Score request from the JSON of POST /v1/score."""
    data = read_object(content, "body", _SCORE_FIELDS)
    if "user" not in data:
        raise unprocessable("missing_field", "user is missing", "user")
    _check_total([data["user"]], data, limits)
    items = read_ids(data.get("items"), "items", limits.max_batch, "batch_too_long")
    if not items:
        raise unprocessable("invalid_field", "items is a list of 1 or more ids", "items")
    return ScoreRequest(
        _entity(data["user"], "", "user", limits), items, body_options(data, limits)
    )


def feedback_from_json(content: object) -> FeedbackReport:
    """Feedback from the JSON of POST /v1/feedback."""
    data = read_object(content, "body", _FEEDBACK_FIELDS)
    generation, key = data.get("generation"), data.get("canary_key")
    arm = None if data.get("arm") is None else read_arm(data["arm"])
    if sum(subject is not None for subject in (generation, key, arm)) != 1:
        problem_message = (
            "send one of generation, as the answer had it, canary_key, and arm, as EXPERIMENT=ARM"
        )
        raise unprocessable("missing_field", problem_message, "body")
    if generation is not None and not isinstance(generation, str):
        raise unprocessable("invalid_field", "generation is a string", "generation")
    event, count = data.get("event"), data.get("count", 1)
    if not isinstance(event, str) or not _FEEDBACK_EVENT.fullmatch(event):
        raise unprocessable(
            "invalid_field", "event is 1 to 32 of a-z, 0-9 and _, a letter first", "event"
        )
    if (
        isinstance(count, bool)
        or not isinstance(count, int)
        or not 1 <= count <= _FEEDBACK_COUNT_MAX
    ):
        raise unprocessable(
            "invalid_field", f"count is a whole number from 1 to {_FEEDBACK_COUNT_MAX}", "count"
        )
    key = None if key is None else read_id(key, "canary_key")
    return FeedbackReport(generation, key, arm, event, count)


def _entity(value: object, table: str | None, field: str, limits: Limits) -> RequestedEntity:
    if isinstance(value, str | int) and table is not None:
        value = {"id": value}
    known_fields = _ENTITY_FIELDS if table is not None else _ENTITY_FIELDS | {"table"}
    data = read_object(value, field, known_fields)
    if table is None:
        named = data.get("table")
        if not isinstance(named, str):
            raise unprocessable("missing_field", f"{field}.table names a table", f"{field}.table")
        table = named
    sent_id, sent_history, sent_features = data.get("id"), data.get("history"), data.get("features")
    raw = None if sent_id is None else read_id(sent_id, f"{field}.id")
    history = (
        None
        if sent_history is None
        else read_ids(sent_history, f"{field}.history", limits.max_history, "history_too_long")
    )
    features = (
        None
        if sent_features is None
        else read_features(sent_features, f"{field}.features", limits.feature_text_bytes)
    )
    if raw is None and not history and not features:
        raise unprocessable(
            "missing_field", f"{field} has neither id nor history nor features", field
        )
    return RequestedEntity(
        table, None if raw is None else raw.decode(), raw, field, history, features
    )


def _check_total(entities: list[Any], data: Mapping[str, Any], limits: Limits) -> None:
    """Refuses too many ids or numbers in all, before any is read: inputs within their own limits may still add up."""
    sent_entities = [sent_entity for sent_entity in entities if isinstance(sent_entity, dict)]
    lists = [sent_entity.get("history") for sent_entity in sent_entities]
    lists.append(data.get("exclude"))
    total = sum([len(id_list) for id_list in lists if isinstance(id_list, list)])
    if total > limits.max_ids:
        raise unprocessable(
            "too_many_ids",
            f"histories and exclude hold {total} ids in all, {limits.max_ids} are allowed",
            "body",
            limit=limits.max_ids,
        )
    number_count = sum(
        [_count_values(sent_entity.get("features")) for sent_entity in sent_entities]
    )
    if number_count > limits.max_numbers:
        raise unprocessable(
            "too_many_numbers",
            f"features hold {number_count} values in all, {limits.max_numbers} are allowed",
            "body",
            limit=limits.max_numbers,
        )


def _count_values(features: object) -> int:
    """Count of values: each number of a list, and each feature that is no list."""
    values = features.values() if isinstance(features, dict) else ()
    return sum(
        [
            max(1, len(feature_value)) if isinstance(feature_value, list) else 1
            for feature_value in values
        ]
    )


def _path_text(raw: bytes) -> str:
    return unquote_to_bytes(raw).decode(errors="replace")


class ArrowLookup(NamedTuple):
    """Ids that were sent, as bytes of UTF-8, and options by name as texts."""

    ids: list[bytes]
    options: dict[str, str]


def read_stream(body: bytes, limits: Limits) -> ArrowLookup:
    """Return the ids, unchecked except for their number; raise Problem for another kind of stream."""
    try:
        # One more than allowed is enough to tell.
        cutter = loader.kernels.cut_texts
        rows_max = limits.max_batch + 1
        frame = read_frame(body, rows_max, as_bytes=True, cutter=cutter, check=_check_column)
    except Malformed as error:
        raise unprocessable(
            "invalid_arrow", f"the body is no Arrow IPC stream of ids: {error}", "body"
        ) from error
    except Unsupported as error:
        raise unprocessable("unsupported_arrow", str(error), "body") from error
    ids = frame.columns[ID_COLUMN]
    if None in ids:
        index = ids.index(None)
        raise unprocessable("invalid_field", f"entities[{index}] is null", f"entities[{index}]")
    check_length(ids, 1, limits.max_batch, "entities", "batch_too_long")
    options = {
        name: text
        for name, text in frame.metadata.items()
        if not name.startswith(_FOREIGN_PREFIXES)
    }
    return ArrowLookup(ids, options)


def lookup_from_stream(id_stream: ArrowLookup, table: str, limits: Limits) -> LookupRequest:
    """Lookup from the stream of POST /v1/lookup/{table}."""
    ids = [raw_id.decode() for raw_id in id_stream.ids]
    raws = [read_id(text_id, f"entities[{index}]") for index, text_id in enumerate(ids)]
    entities = tuple(
        RequestedEntity(table, id_, raw, f"entities[{index}]")
        for index, (id_, raw) in enumerate(zip(ids, raws, strict=True))
    )
    return LookupRequest(entities, text_options(id_stream.options, limits))


def _check_column(fields: tuple[Field, ...]) -> None:
    if [field.name for field in fields] != [ID_COLUMN] or fields[0].kind not in (
        "utf8",
        "large_utf8",
    ):
        raise unprocessable(
            "invalid_field",
            f"a batch is one column {ID_COLUMN!r} of utf8; histories and features go as JSON",
            "entities",
        )


class ParsedLookup(NamedTuple):
    """Lookup of one id in one table."""

    table: str
    id: str
    raw: bytes


class IdBatch(NamedTuple):
    """Lookup of many ids in one table; `k` None = all."""

    raws: list[bytes]
    k: int | None


def parse_single(path: bytes) -> ParsedLookup | None:
    """The table and the id of `/v1/lookup/<table>/<id>`."""
    if not path.startswith(LOOKUP_PREFIX):
        return None
    table, _, entity = path[len(LOOKUP_PREFIX) :].partition(b"/")
    raw = unquote_to_bytes(entity) if b"%" in entity else entity
    # An encoded table is for those who decode it.
    if not 0 < len(raw) <= ID_BYTES_MAX or b"%" in table:
        return None
    try:
        return ParsedLookup(table.decode("ascii"), raw.decode(), raw)
    except UnicodeDecodeError:
        return None


def id_batch_from_json(data: object, longest: int) -> IdBatch | None:
    """Plain text ids, as most batches are, and perhaps `k`, from the JSON of a body."""
    if not isinstance(data, dict) or not data.keys() <= _BATCH_FIELDS:
        return None
    ids, k = data.get("entities"), _plain_k(data)
    if not isinstance(ids, list) or not 1 <= len(ids) <= longest or k == 0:
        return None
    try:
        raws = [entity_id.encode() for entity_id in ids]
    except (AttributeError, UnicodeEncodeError):
        return None
    return IdBatch(raws, k) if have_id_lengths(raws) else None


def _plain_k(data: Mapping[str, Any]) -> int | None:
    """Return the value of `k`, None if absent; 0 for a value that is refused later."""
    k = data.get("k")
    return k if k is None or (type(k) is int and k > 0) else 0


def id_batch_from_stream(id_stream: ArrowLookup) -> IdBatch | None:
    """Batch for the hot route: plain ids and perhaps `k`; None for all that other routes handle."""
    raws, options = id_stream
    if not have_id_lengths(raws) or not options.keys() <= {"k"}:
        return None
    k = options.get("k")
    if k is None:
        return IdBatch(raws, None)
    is_k = k.isascii() and k.isdigit() and len(k) <= _K_DIGITS_MAX and int(k) > 0
    return IdBatch(raws, int(k)) if is_k else None


def tighten_deadline(options: RequestOptions, deadline_s: float) -> RequestOptions:
    """Options with the tighter of their deadline and the headers'."""
    if deadline_s >= options.deadline_s:
        return options
    return replace(options, deadline_s=deadline_s)


class QueryOptions:
    """Cache of options by URL query, for those that only choose `k`, a deadline and a filter.

    Only short ones are cached: queries that repeat are short, and a bounded number cannot fill the memory.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._options_by_query: dict[bytes, RequestOptions | None] = {}

    def of(self, query: bytes) -> RequestOptions | None:
        """The options, read as everywhere else, once per distinct query."""
        if len(query) > _CACHED_QUERY_BYTES_MAX:
            return self._read(query)
        try:
            return self._options_by_query[query]
        except KeyError:
            if len(self._options_by_query) >= _CACHED_QUERIES_MAX:
                self._options_by_query.clear()
            options = self._options_by_query[query] = self._read(query)
            return options

    def _read(self, query: bytes) -> RequestOptions | None:
        try:
            options = query_options(query, self._limits)
        except Problem:
            return None
        plain_options = RequestOptions(options.deadline_s, options.k, filter=options.filter)
        return options if options == plain_options else None


class HeaderJudge:
    """Judges the headers that matter to a lookup; names come in lower case."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def deadline_s(self, headers: Iterable[tuple[bytes, bytes]]) -> float | None:
        """Deadline in seconds by the request's headers, infinite without one; None: not for the hot route."""
        deadline_s = float("inf")
        for name, value in headers:
            if name not in _WATCHED_HEADERS:
                continue
            if name == b"x-deadline-ms":
                sent_ms = value.isdigit() and len(value) <= _DEADLINE_DIGITS_MAX and int(value)
                if not sent_ms:
                    return None
                deadline_s = min(deadline_s, min(sent_ms, self._limits.deadline_max_ms) / 1000)
            # Where the stages are told, TIMING_HEADER has been taken away before.
            elif name in (ARM_HEADER, TIMING_HEADER) or not (
                value.isascii() and 0 < len(value) <= ID_BYTES_MAX
            ):
                return None
        return deadline_s

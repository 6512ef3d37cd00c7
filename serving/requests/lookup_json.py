"""Reading what a caller asks, by hand, from a URL or from JSON; whatever is wrong is refused with its field. Pure."""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from cache.errors import InvalidId
from cache.format.ids import canonical_id
from serving.requests.errors import Problem, unprocessable
from serving.requests.fields import (
    check_length,
    read_features,
    read_id,
    read_ids,
    read_object,
    refused_id,
)
from serving.requests.models import (
    FeedbackReport,
    Limits,
    LookupRequest,
    RequestedEntity,
    ScoreRequest,
)
from serving.requests.options import body_options, query_options, read_arm

_ENTITY_FIELDS = frozenset({"id", "history", "features"})
_COMMON = {
    "k", "deadline_ms", "fresh", "max_age_seconds", "generation", "canary_key", "filter", "rerank", "arm",
    "max_events", "as_of",
}  # fmt: skip
_LOOKUP_FIELDS = frozenset({"entities", "exclude", *_COMMON})
_SCORE_FIELDS = frozenset({"user", "items", *_COMMON})
_FEEDBACK_FIELDS = frozenset({"generation", "canary_key", "arm", "event", "count"})
_EVENT = re.compile(r"[a-z][a-z0-9_]{0,31}")
_COUNT_MAX = 1_000_000


def lookup_url(raw_path: bytes, prefix: bytes, query: bytes, limits: Limits) -> LookupRequest:
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
        (RequestedEntity(_text(table), id_, raw, "id"),), query_options(query, limits)
    )


def lookup_ask(content: object, table: str | None, limits: Limits) -> LookupRequest:
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


def score_ask(content: object, limits: Limits) -> ScoreRequest:
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


def feedback_of(content: object) -> FeedbackReport:
    """Feedback from the JSON of POST /v1/feedback."""
    data = read_object(content, "body", _FEEDBACK_FIELDS)
    generation, key = data.get("generation"), data.get("canary_key")
    arm = read_arm(data.get("arm"), "arm")
    if sum(subject is not None for subject in (generation, key, arm)) != 1:
        problem_message = (
            "send one of generation, as the answer had it, canary_key, and arm, as EXPERIMENT=ARM"
        )
        raise unprocessable("missing_field", problem_message, "body")
    if generation is not None and not isinstance(generation, str):
        raise unprocessable("invalid_field", "generation is a string", "generation")
    event, count = data.get("event"), data.get("count", 1)
    if not isinstance(event, str) or not _EVENT.fullmatch(event):
        raise unprocessable(
            "invalid_field", "event is 1 to 32 of a-z, 0-9 and _, a letter first", "event"
        )
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _COUNT_MAX:
        raise unprocessable(
            "invalid_field", f"count is a whole number from 1 to {_COUNT_MAX}", "count"
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
    sent_id, sent_history, sent_features = (
        data.get(name) for name in ("id", "history", "features")
    )
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
    total = sum(len(id_list) for id_list in lists if isinstance(id_list, list))
    if total > limits.max_ids:
        raise unprocessable(
            "too_many_ids",
            f"histories and exclude hold {total} ids in all, {limits.max_ids} are allowed",
            "body",
            limit=limits.max_ids,
        )
    numbers = sum(_numbers(sent_entity.get("features")) for sent_entity in sent_entities)
    if numbers > limits.max_numbers:
        raise unprocessable(
            "too_many_numbers",
            f"features hold {numbers} values in all, {limits.max_numbers} are allowed",
            "body",
            limit=limits.max_numbers,
        )


def _numbers(features: object) -> int:
    """Count of values: each number of a list, and each feature that is no list."""
    values = features.values() if isinstance(features, dict) else ()
    return sum(
        [
            max(1, len(feature_value)) if isinstance(feature_value, list) else 1
            for feature_value in values
        ]
    )


def _text(raw: bytes) -> str:
    return unquote_to_bytes(raw).decode(errors="replace")

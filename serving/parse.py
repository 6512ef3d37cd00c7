"""Reading what a caller asks, by hand, from a URL or JSON; whatever is wrong is refused with its field. Pure."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, unquote_to_bytes

import orjson

from cache.errors import InvalidId
from cache.keys import FeatureValue, canonical_id
from serving.ask import Ask, Entity, Limits, Options, ScoreAsk
from serving.problem import Problem, unprocessable

_ENTITY_FIELDS = frozenset({"id", "history", "features"})
_LOOKUP_FIELDS = frozenset(
    {"entities", "k", "exclude", "deadline_ms", "fresh", "max_age_seconds", "generation"}
)
_SCORE_FIELDS = frozenset(
    {"user", "items", "k", "deadline_ms", "fresh", "max_age_seconds", "generation"}
)
_QUERY_FIELDS = frozenset({"k", "fresh", "max_age_seconds", "generation", "deadline_ms"})
_FEATURES_MAX = 256
_FEATURE_WIDTH_MAX = 8_192
_FEATURE_BYTES_MAX = 4_096
_EXACT_MAX = 2**53
"""Whole numbers beyond it are not all different as doubles, which is how a list of numbers is told from another."""
_WHOLE = re.compile(r"-?[0-9]+")
_DIGITS_MAX = 18
_NUMBER = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,3})?")


def lookup_url(raw_path: bytes, prefix: bytes, query: bytes, limits: Limits) -> Ask:
    """`<prefix><table>/<entity>?k=...`; the id is everything after the table, percent-decoded, slashes and all."""
    start = raw_path.find(prefix)
    if start < 0:
        raise Problem(404, "not_found", "the fixed part of this path must not be percent-encoded")
    table, _, entity = raw_path[start + len(prefix) :].partition(b"/")
    try:
        id_ = unquote_to_bytes(entity).decode()
    except UnicodeDecodeError as error:
        raise unprocessable("invalid_id", "the id in the path is not UTF-8", "id") from error
    raw = _id(id_, "id")
    return Ask((Entity(_text(table), id_, raw, "id"),), _query_options(query, limits))


def lookup_body(body: bytes, table: str | None, limits: Limits) -> Ask:
    """The body of POST /v1/lookup/{table}, or of POST /v1/lookup when `table` is None."""
    data = _object(_json(body), "body", _LOOKUP_FIELDS)
    sent = data.get("entities")
    if not isinstance(sent, list):
        raise unprocessable("invalid_field", "entities is a list", "entities")
    _check_length(sent, 1, limits.max_batch, "entities", "batch_too_long")
    _check_total(sent, data, limits)
    entities = tuple(
        _entity(each, table, f"entities[{place}]", limits) for place, each in enumerate(sent)
    )
    return Ask(entities, _body_options(data, limits))


def score_body(body: bytes, limits: Limits) -> ScoreAsk:
    """The body of POST /v1/score."""
    data = _object(_json(body), "body", _SCORE_FIELDS)
    if "user" not in data:
        raise unprocessable("missing_field", "user is missing", "user")
    _check_total([data["user"]], data, limits)
    items = _ids(data.get("items"), "items", limits.max_batch, "batch_too_long")
    if not items:
        raise unprocessable("invalid_field", "items is a list of 1 or more ids", "items")
    return ScoreAsk(_entity(data["user"], "", "user", limits), items, _body_options(data, limits))


def with_deadline_header(options: Options, header: str | None, limits: Limits) -> Options:
    """The same options under the header X-Deadline-Ms; the tighter of the two counts."""
    if header is None:
        return options
    sent = _deadline(_number(header, "x-deadline-ms"), "x-deadline-ms", limits)
    return replace(options, deadline_s=min(options.deadline_s, sent))


def _json(body: bytes) -> object:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise unprocessable(
            "invalid_json", f"the body is not JSON (which has no NaN or Infinity): {error}", "body"
        ) from error


def _object(value: object, field: str, known: frozenset[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise unprocessable("invalid_field", f"{field} is a JSON object", field)
    for name in value:
        # A misspelt "history" that was silently ignored would be answered as if nothing had been sent.
        if name not in known:
            where = name if field == "body" else f"{field}.{name}"
            raise unprocessable(
                "unknown_field", f"{where} is not a field here", where, known=sorted(known)
            )
    return value


def _entity(value: object, table: str | None, field: str, limits: Limits) -> Entity:
    if isinstance(value, str | int) and table is not None:
        value = {"id": value}
    known = _ENTITY_FIELDS if table is not None else _ENTITY_FIELDS | {"table"}
    data = _object(value, field, known)
    if table is None:
        named = data.get("table")
        if not isinstance(named, str):
            raise unprocessable("missing_field", f"{field}.table names a table", f"{field}.table")
        table = named
    sent_id, sent_history, sent_features = (
        data.get(name) for name in ("id", "history", "features")
    )
    raw = None if sent_id is None else _id(sent_id, f"{field}.id")
    history = (
        None
        if sent_history is None
        else _ids(sent_history, f"{field}.history", limits.max_history, "history_too_long")
    )
    features = None if sent_features is None else _features(sent_features, f"{field}.features")
    if raw is None and not history and not features:
        raise unprocessable(
            "missing_field", f"{field} has neither id nor history nor features", field
        )
    return Entity(table, None if raw is None else raw.decode(), raw, field, history, features)


def _id(value: object, field: str) -> bytes:
    try:
        return canonical_id(value)
    except InvalidId as error:
        raise Problem(422, error.code, error.message, field=field, **error.details) from error


def _ids(value: object, field: str, longest: int, code: str) -> tuple[bytes, ...]:
    if not isinstance(value, list):
        raise unprocessable("invalid_field", f"{field} is a list of ids", field)
    _check_length(value, 0, longest, field, code)
    try:
        return tuple([canonical_id(each) for each in value])
    except InvalidId:
        for place, each in enumerate(value):
            _id(each, f"{field}[{place}]")
        raise


def _features(value: object, field: str) -> dict[str, FeatureValue]:
    if not isinstance(value, dict):
        raise unprocessable("invalid_field", f"{field} is a JSON object", field)
    if len(value) > _FEATURES_MAX:
        raise unprocessable("too_many_features", f"at most {_FEATURES_MAX} features", field)
    return {name: _feature(each, f"{field}.{name}") for name, each in value.items()}


def _feature(value: object, field: str) -> FeatureValue:
    if isinstance(value, bool):
        raise unprocessable(
            "invalid_feature", f"{field} is true or false, which no model takes: send 1 or 0", field
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise unprocessable("not_finite", f"{field} is not a finite number", field)
    if isinstance(value, str):
        _check_size(len(value.encode(errors="replace")), _FEATURE_BYTES_MAX, "bytes", field)
        return value
    if isinstance(value, int | float):
        return value
    if isinstance(value, list):
        _check_size(len(value), _FEATURE_WIDTH_MAX, "numbers", field)
        return _vector(value, field)
    raise unprocessable(
        "invalid_feature", f"{field} is a string, a number or a list of numbers", field
    )


def _vector(value: list[Any], field: str) -> tuple[float, ...]:
    """Whole numbers stay whole: what they become is the model's business."""
    kinds = set(map(type, value))
    if not kinds <= {int, float}:
        place = next(at for at, each in enumerate(value) if type(each) not in (int, float))
        where = f"{field}[{place}]"
        raise unprocessable("invalid_feature", f"{where} is not a number", where)
    if int in kinds and max(abs(min(value)), abs(max(value))) > _EXACT_MAX:
        raise unprocessable(
            "invalid_feature", f"{field} holds numbers beyond 2**53 beside whole ones", field
        )
    return tuple(value)


def _check_size(found: int, most: int, unit: str, field: str) -> None:
    if found > most:
        raise unprocessable(
            "feature_too_long", f"{field} has {found} {unit}, {most} are allowed", field, limit=most
        )


def _check_total(entities: list[Any], data: Mapping[str, Any], limits: Limits) -> None:
    """Before anything is read: many histories that are each within their limit are still too much in one request."""
    lists = [each.get("history") for each in entities if isinstance(each, dict)]
    lists.append(data.get("exclude"))
    total = sum(len(each) for each in lists if isinstance(each, list))
    if total > limits.max_ids:
        raise unprocessable(
            "too_many_ids",
            f"histories and exclude hold {total} ids in all, {limits.max_ids} are allowed",
            "body",
            limit=limits.max_ids,
        )


def _check_length(value: list[Any], least: int, most: int, field: str, code: str) -> None:
    if not least <= len(value) <= most:
        raise unprocessable(
            code,
            f"{field} has {len(value)} entries, {least} to {most} are allowed",
            field,
            limit=most,
        )


def _body_options(data: Mapping[str, Any], limits: Limits) -> Options:
    exclude = data.get("exclude")
    fresh = data.get("fresh", False)
    if not isinstance(fresh, bool):
        raise unprocessable("invalid_field", "fresh is true or false", "fresh")
    generation = data.get("generation")
    if generation is not None and not isinstance(generation, str):
        raise unprocessable("invalid_field", "generation is a string", "generation")
    return Options(
        deadline_s=_deadline(data.get("deadline_ms"), "deadline_ms", limits),
        k=_k(data.get("k")),
        exclude=()
        if exclude is None
        else _ids(exclude, "exclude", limits.max_exclude, "exclude_too_long"),
        fresh=fresh,
        max_age_s=_max_age(data.get("max_age_seconds")),
        generation=generation,
    )


def _query_options(query: bytes, limits: Limits) -> Options:
    if not query:
        return Options(limits.deadline_ms / 1000)
    data = _object(_pairs(query), "body", _QUERY_FIELDS)
    k, fresh = data.get("k"), data.get("fresh", "false").lower()
    if fresh not in ("true", "false", "1", "0"):
        raise unprocessable("invalid_field", "fresh is true or false", "fresh")
    return Options(
        deadline_s=_deadline(
            _number(data.get("deadline_ms"), "deadline_ms"), "deadline_ms", limits
        ),
        k=None if k is None else _k(_whole_number(k, "k")),
        fresh=fresh in ("true", "1"),
        max_age_s=_max_age(_number(data.get("max_age_seconds"), "max_age_seconds")),
        generation=data.get("generation"),
    )


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
    if not _WHOLE.fullmatch(text):
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


def _text(raw: bytes) -> str:
    return unquote_to_bytes(raw).decode(errors="replace")

"""Parser of the fields of a JSON body: ids, features and lists within bounds; errors name the field. Pure."""

import math
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.errors import InvalidId
from cache.format.ids import FeatureValue, canonical_id
from serving.requests.errors import Problem, unprocessable

_FEATURES_MAX = 256
_FEATURE_WIDTH_MAX = 8_192

_EXACT_MAX = 2**53
"""Bound of exact whole numbers: larger ones are not all distinct as doubles."""

_SCAN_BYTES = 1 << 16
_COMMA, _LIST, _OBJECT, _QUOTE, _BACKSLASH = b',[{"\\'


def read_json(body: bytes, values_max: int) -> object:
    """Parse a JSON body; raise Problem for malformed JSON, or, before parsing, for more values than allowed."""
    if has_more_values(body, values_max):
        raise unprocessable(
            "too_many_values",
            f"the body holds more than {values_max} lists, objects, texts and numbers: send several requests",
            "body",
            limit=values_max,
        )
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        problem_message = f"the body is not JSON (which has no NaN or Infinity): {error}"
    # Raised out here, else it would hold the parser's error, which holds the whole text.
    raise unprocessable("invalid_json", problem_message, "body")


def read_object(value: object, field: str, known_fields: frozenset[str]) -> dict[str, Any]:
    """Return the fields of a JSON object without null ones; raise Problem for a field not in `known_fields`.

    `field` is the path of the object, "body" for the whole.
    """
    if not isinstance(value, dict):
        raise unprocessable("invalid_field", f"{field} is a JSON object", field)
    for name in value:
        # A misspelt "history" that was silently ignored would be answered as if nothing had been sent.
        if name not in known_fields:
            where = name if field == "body" else f"{field}.{name}"
            raise unprocessable(
                "unknown_field", f"{where} is not a field here", where, known=sorted(known_fields)
            )
    return {name: field_value for name, field_value in value.items() if field_value is not None}


def read_id(value: object, field: str) -> bytes:
    """Return the canonical bytes of one id."""
    try:
        return canonical_id(value)
    except InvalidId as error:
        raise refused_id(error, field) from error


def refused_id(error: InvalidId, field: str) -> Problem:
    """Return the refusal of an invalid id in `field`."""
    return Problem(422, error.code, error.message, field=field, **error.details)


def read_ids(value: object, field: str, longest: int, code: str) -> tuple[bytes, ...]:
    """Return the canonical bytes of a list of at most `longest` ids."""
    if not isinstance(value, list):
        raise unprocessable("invalid_field", f"{field} is a list of ids", field)
    check_length(value, 0, longest, field, code)
    try:
        return tuple([canonical_id(sent_id) for sent_id in value])
    except InvalidId:
        for index, sent_id in enumerate(value):
            read_id(sent_id, f"{field}[{index}]")
        raise


def read_features(value: object, field: str, text_bytes: int) -> dict[str, FeatureValue]:
    """Return named features, of the types and sizes that a model may take; a text has at most `text_bytes` of UTF-8."""
    if not isinstance(value, dict):
        raise unprocessable("invalid_field", f"{field} is a JSON object", field)
    if len(value) > _FEATURES_MAX:
        raise unprocessable("too_many_features", f"at most {_FEATURES_MAX} features", field)
    return {
        name: _feature(feature_value, f"{field}.{name}", text_bytes)
        for name, feature_value in value.items()
    }


def _feature(value: object, field: str, text_bytes: int) -> FeatureValue:
    if isinstance(value, bool):
        raise unprocessable(
            "invalid_feature", f"{field} is true or false, which no model takes: send 1 or 0", field
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise unprocessable("not_finite", f"{field} is not a finite number", field)
    if isinstance(value, str):
        _check_text(value, text_bytes, field)
        return value
    if isinstance(value, int | float):
        return value
    if isinstance(value, list):
        _check_size(len(value), _FEATURE_WIDTH_MAX, "values", field)
        if value and isinstance(value[0], str):
            return _texts(value, field, text_bytes)
        return _vector(value, field)
    raise unprocessable(
        "invalid_feature",
        f"{field} is a text, a number, a list of texts or a list of numbers",
        field,
    )


def _texts(value: list[Any], field: str, text_bytes: int) -> tuple[str, ...]:
    for index, text in enumerate(value):
        where = f"{field}[{index}]"
        if not isinstance(text, str):
            raise unprocessable("invalid_feature", f"{where} is not a text", where)
        _check_text(text, text_bytes, where)
    return tuple(value)


def _check_text(text: str, text_bytes: int, field: str) -> None:
    _check_size(len(text.encode(errors="replace")), text_bytes, "bytes", field)


def _vector(value: list[Any], field: str) -> tuple[float, ...]:
    """Return the numbers of a list feature; whole numbers stay whole, as the model decides their dtype."""
    kinds = set(map(type, value))
    if not kinds <= {int, float}:
        index = next(at for at, element in enumerate(value) if type(element) not in (int, float))
        where = f"{field}[{index}]"
        raise unprocessable("invalid_feature", f"{where} is not a number", where)
    if int in kinds and max(abs(min(value)), abs(max(value))) > _EXACT_MAX:
        raise unprocessable(
            "invalid_feature", f"{field} holds numbers beyond 2**53 beside whole ones", field
        )
    return tuple(value)


def _check_size(size: int, size_max: int, unit: str, field: str) -> None:
    if size > size_max:
        raise unprocessable(
            "feature_too_long",
            f"{field} has {size} {unit}, {size_max} are allowed",
            field,
            limit=size_max,
        )


def check_length(value: list[Any], length_min: int, length_max: int, field: str, code: str) -> None:
    """Raise Problem for a list of fewer than `length_min` or more than `length_max` entries."""
    if not length_min <= len(value) <= length_max:
        raise unprocessable(
            code,
            f"{field} has {len(value)} entries, {length_min} to {length_max} are allowed",
            field,
            limit=length_max,
        )


def has_more_values(text: bytes, values_max: int) -> bool:
    """True if a JSON text has more than `values_max` values: commas and opening brackets outside its strings."""
    value_count, is_inside, odd = 0, False, b""
    for start in range(0, len(text) if len(text) > values_max else 0, _SCAN_BYTES):
        chars = np.frombuffer(odd + text[start : start + _SCAN_BYTES], np.uint8)
        is_quote = chars == _QUOTE
        escaped = _escaped_positions(chars)
        # A run of backslashes that is cut here goes on with as many as count: one or none.
        odd = b"\\" if len(escaped) and escaped[-1] == len(chars) else b""
        is_quote[escaped[: len(escaped) - len(odd)]] = False
        inside = np.bitwise_xor.accumulate(is_quote) ^ is_inside
        is_between = (chars == _COMMA) | (chars == _LIST) | (chars == _OBJECT)
        value_count += int(np.count_nonzero(is_between & ~inside))
        if value_count > values_max:
            return True
        is_inside = bool(inside[-1])
    return False


def _escaped_positions(chars: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the positions after an odd number of backslashes; the last may be the length of the text."""
    slashes = np.flatnonzero(chars == _BACKSLASH)
    ends = np.flatnonzero(np.diff(slashes, append=-1) != 1)
    lengths = np.diff(ends, prepend=-1)
    escaped_positions: NDArray[np.int64] = slashes[ends[lengths % 2 == 1]] + 1
    return escaped_positions

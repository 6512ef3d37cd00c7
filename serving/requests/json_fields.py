"""Parser of the fields of a JSON body: ids, features and lists within bounds; errors name the field. Pure."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from cache.errors import InvalidId
from cache.format.ids import FeatureValue, canonical_id
from serving.requests.errors import Problem, unprocessable

_FEATURES_MAX = 256
_FEATURE_WIDTH_MAX = 8_192

_EXACT_WHOLE_NUMBER_MAX = 2**53
"""Bound of exact integers: larger ones are not all distinct as doubles."""

_SCAN_CHUNK_BYTES = 1 << 16
_COMMA, _OPENING_BRACKET, _OPENING_BRACE, _QUOTE, _BACKSLASH = b',[{"\\'


def read_json(request_body: bytes, json_values_max: int) -> object:
    """Parse a JSON body; raise Problem for malformed JSON, or, before parsing, for more values than allowed."""
    if has_more_values(request_body, json_values_max):
        raise unprocessable(
            "too_many_values",
            f"the body holds more than {json_values_max} lists, objects, texts and numbers: send several requests",
            "body",
            limit=json_values_max,
        )
    try:
        return orjson.loads(request_body)
    except orjson.JSONDecodeError as error:
        problem_message = f"the body is not JSON (which has no NaN or Infinity): {error}"
    # Raised outside the handler: otherwise its context would keep the parser's error, and so the whole text.
    raise unprocessable("invalid_json", problem_message, "body")


def read_object(json_value: object, field: str, known_fields: frozenset[str]) -> dict[str, Any]:
    """Return the fields of a JSON object without null ones; raise Problem for a field not in `known_fields`.

    `field` is the path of the object, "body" for the whole body.
    """
    if not isinstance(json_value, dict):
        raise unprocessable("invalid_field", f"{field} must be a JSON object", field)
    for field_name in json_value:
        # If a misspelt "history" were ignored, the request would be answered as if none had been sent.
        if field_name not in known_fields:
            field_path = field_name if field == "body" else f"{field}.{field_name}"
            raise unprocessable(
                "unknown_field", f"{field_path} is not a known field", field_path, known=sorted(known_fields)
            )
    return {field_name: field_value for field_name, field_value in json_value.items() if field_value is not None}


def read_id(sent_id: object, field: str) -> bytes:
    """Return the canonical bytes of one id."""
    try:
        return canonical_id(sent_id)
    except InvalidId as error:
        raise invalid_id_problem(error, field) from error


def invalid_id_problem(error: InvalidId, field: str) -> Problem:
    """Return the refusal of an invalid id in `field`."""
    return Problem(422, error.code, error.message, field=field, **error.details)


def read_list(body_fields: Mapping[str, Any], field: str) -> list[Any]:
    """Return a list that a body must have; raise Problem if it was not sent, or is no list."""
    if field not in body_fields:
        raise unprocessable("missing_field", f"{field} is missing: send a list", field)
    sent_list = body_fields[field]
    if not isinstance(sent_list, list):
        raise unprocessable("invalid_field", f"{field} is a list", field)
    return sent_list


def read_ids(sent_ids: object, field: str, ids_max: int, error_code: str, *, ids_min: int = 0) -> tuple[bytes, ...]:
    """Return the canonical bytes of a list of `ids_min` to `ids_max` ids."""
    if not isinstance(sent_ids, list):
        raise unprocessable("invalid_field", f"{field} must be a list of ids", field)
    check_length(sent_ids, ids_min, ids_max, field, error_code)
    try:
        return tuple([canonical_id(sent_id) for sent_id in sent_ids])
    except InvalidId:
        for index, sent_id in enumerate(sent_ids):
            read_id(sent_id, f"{field}[{index}]")
        raise


def read_features(sent_features: object, field_path: str, text_bytes_max: int) -> dict[str, FeatureValue]:
    """Return features by name, of types and sizes that a model may use; texts have at most `text_bytes_max` bytes."""
    if not isinstance(sent_features, dict):
        raise unprocessable("invalid_field", f"{field_path} must be a JSON object", field_path)
    if len(sent_features) > _FEATURES_MAX:
        raise unprocessable("too_many_features", f"at most {_FEATURES_MAX} features", field_path)
    return {
        feature_name: _read_feature(feature_value, f"{field_path}.{feature_name}", text_bytes_max)
        for feature_name, feature_value in sent_features.items()
    }


def _read_feature(feature_value: object, field: str, text_bytes_max: int) -> FeatureValue:
    if isinstance(feature_value, bool):
        raise unprocessable("invalid_feature", f"{field} must not be a boolean: send 1 or 0", field)
    if isinstance(feature_value, float) and not math.isfinite(feature_value):
        raise unprocessable("not_finite", f"{field} is not a finite number", field)
    if isinstance(feature_value, str):
        _check_text(feature_value, text_bytes_max, field)
        return feature_value
    if isinstance(feature_value, int | float):
        return feature_value
    if isinstance(feature_value, list):
        _check_feature_size(len(feature_value), _FEATURE_WIDTH_MAX, "values", field)
        if feature_value and isinstance(feature_value[0], str):
            return _read_texts(feature_value, field, text_bytes_max)
        return _read_vector(feature_value, field)
    raise unprocessable("invalid_feature", f"{field} must be a text, a number, or a list of either", field)


def _read_texts(sent_texts: list[Any], field: str, text_bytes_max: int) -> tuple[str, ...]:
    for index, text in enumerate(sent_texts):
        field_path = f"{field}[{index}]"
        if not isinstance(text, str):
            raise unprocessable("invalid_feature", f"{field_path} is not a text", field_path)
        _check_text(text, text_bytes_max, field_path)
    return tuple(sent_texts)


def _check_text(feature_text: str, text_bytes_max: int, field: str) -> None:
    _check_feature_size(len(feature_text.encode(errors="replace")), text_bytes_max, "bytes", field)


def _read_vector(sent_numbers: list[Any], field: str) -> tuple[float, ...]:
    """Return the numbers of a list feature; integers stay integers, because the model decides the dtype."""
    value_types = set(map(type, sent_numbers))
    if not value_types <= {int, float}:
        index = next(position for position, element in enumerate(sent_numbers) if type(element) not in (int, float))
        field_path = f"{field}[{index}]"
        raise unprocessable("invalid_feature", f"{field_path} is not a number", field_path)
    if int in value_types and max(abs(min(sent_numbers)), abs(max(sent_numbers))) > _EXACT_WHOLE_NUMBER_MAX:
        raise unprocessable("invalid_feature", f"{field} mixes integers with numbers beyond 2**53", field)
    return tuple(sent_numbers)


def _check_feature_size(feature_size: int, feature_size_max: int, size_unit: str, field: str) -> None:
    if feature_size > feature_size_max:
        raise unprocessable(
            "feature_too_long",
            f"{field} has {feature_size} {size_unit}, {feature_size_max} are allowed",
            field,
            limit=feature_size_max,
        )


def check_length(sent_list: list[Any], length_min: int, length_max: int, field: str, error_code: str) -> None:
    """Raise Problem for a list of fewer than `length_min` or more than `length_max` entries."""
    if not length_min <= len(sent_list) <= length_max:
        raise unprocessable(
            error_code,
            f"{field} has {len(sent_list)} entries, {length_min} to {length_max} are allowed",
            field,
            limit=length_max,
        )


def has_more_values(json_text: bytes, json_values_max: int) -> bool:
    """True if a JSON text has more than `json_values_max` values: commas and opening brackets outside its strings."""
    value_count, is_in_string, odd_backslash = 0, False, b""
    for chunk_start in range(0, len(json_text) if len(json_text) > json_values_max else 0, _SCAN_CHUNK_BYTES):
        chunk_chars = np.frombuffer(odd_backslash + json_text[chunk_start : chunk_start + _SCAN_CHUNK_BYTES], np.uint8)
        quote_mask = chunk_chars == _QUOTE
        escaped_positions = _escaped_positions(chunk_chars)
        # Of a run of backslashes that continues from the previous piece only its parity matters.
        odd_backslash = b"\\" if len(escaped_positions) and escaped_positions[-1] == len(chunk_chars) else b""
        quote_mask[escaped_positions[: len(escaped_positions) - len(odd_backslash)]] = False
        in_string_mask = np.bitwise_xor.accumulate(quote_mask) ^ is_in_string
        separator_mask = (chunk_chars == _COMMA) | (chunk_chars == _OPENING_BRACKET) | (chunk_chars == _OPENING_BRACE)
        value_count += int(np.count_nonzero(separator_mask & ~in_string_mask))
        if value_count > json_values_max:
            return True
        is_in_string = bool(in_string_mask[-1])
    return False


def _escaped_positions(text_chars: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the positions after an odd number of backslashes; the last may be the length of the text."""
    backslash_positions = np.flatnonzero(text_chars == _BACKSLASH)
    run_ends = np.flatnonzero(np.diff(backslash_positions, append=-1) != 1)
    run_lengths = np.diff(run_ends, prepend=-1)
    escaped_positions: NDArray[np.int64] = backslash_positions[run_ends[run_lengths % 2 == 1]] + 1
    return escaped_positions

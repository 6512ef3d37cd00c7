"""Parser of events in bodies and inbox entries; an invalid event is rejected with its reason. Pure."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, Final, NamedTuple

import orjson

from cache.config.events import EventsConfig
from cache.errors import InvalidId
from cache.events.event import Event
from cache.events.new_items import NewItemInputs, UnfitNewItem, brings_item
from cache.events.stream import PackedEvent, pack_event
from cache.format.ids import canonical_id
from cache.format.iso_times import iso_time
from cache.format.redis_keys import Keyspace
from cache.store.blocklist import Blocklist
from serving.requests.errors import Problem, problem_from_input, unprocessable
from serving.requests.json_fields import check_length, read_features, read_id, read_list, read_object

EVENT_ID_BYTES_MAX: Final = 128
EVENT_TYPE_BYTES_MAX: Final = 64
ATTRIBUTES_MAX: Final = 64
ATTRIBUTE_NAME_BYTES_MAX: Final = 64
ATTRIBUTE_TEXT_BYTES_MAX: Final = 1_024
ATTRIBUTE_TEXTS_MAX: Final = 64
VECTOR_LENGTH_MAX: Final = 8_192

EVENT_BYTES_MAX: Final = 4_096
"""Largest allowed setting of `event_bytes`; no text of an event is longer."""

DETAIL_CHARS_MAX: Final = 400
"""Characters of a rejection's detail text, which is sent and stored, and may quote the event."""

_EVENT_FIELDS = frozenset({"user", "item", "time", "id", "type", "weight", "attributes", "features", "vector"})

_ITEM_ONLY_FIELDS = ("features", "vector")

_INBOX_JSON_FIELD = b"e"
"""Field of an inbox entry with the whole event as JSON."""

_FLOAT_MAX = 3.4e38
"""Largest weight or vector component: nights store both as float32."""

_NUMBER_PATTERN = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?")

_UNIX_SECONDS_MAX = 10**11
"""Bound of Unix seconds; a greater number must be milliseconds."""

_TIME_CHARS_MAX = 64
_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_EVENTS_HEAD_PATTERN: Final = re.compile(rb'\s*\{\s*"events"\s*:\s*\[')
_EVENTS_TAIL_PATTERN: Final = re.compile(rb"\s*\}\s*")

# Possessive quantifiers: an unterminated text is scanned only once.
_JSON_TOKEN_PATTERN: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|["\[\]{},]', re.DOTALL)


class RejectedEvent(NamedTuple):
    """Rejected event: its index in the request, the reason, and an explanation."""

    event_index: int
    rejection_reason: str
    rejection_detail: str


class ParsedEvents(NamedTuple):
    """Acceptable events of one request, each with its index, and the rejected events."""

    event_indices: list[int]
    packed_events: list[PackedEvent]
    rejected_events: list[RejectedEvent]


class UnreadableEvent(NamedTuple):
    """Event in a body that is not JSON, with the parser's message; nothing of it is stored, as its owner is unknown."""

    parser_message: str


@dataclass(frozen=True, slots=True)
class EventReader:
    """Parser of events for one namespace, within its bounds.

    `get_new_item_inputs` returns the inputs with which the live generation can answer for an unknown item; None:
    unknown.
    """

    keyspace: Keyspace
    config: EventsConfig
    get_new_item_inputs: Callable[[], NewItemInputs | None] = lambda: None

    def extract_events(self, parsed_body: object) -> list[Any]:
        """Return the list of events in a request's body, unparsed; raise Problem if it is missing or too long."""
        body_fields = read_object(parsed_body, "body", frozenset({"events"}))
        events = read_list(body_fields, "events")
        check_length(events, 1, self.config.batch, "events", "batch_too_long")
        return events

    def parse_body_events(self, raw_events: Sequence[Any], now_s: float, blocklist: Blocklist) -> ParsedEvents:
        """Parse the events of a body; `now_s` is the service's clock, Unix seconds."""
        read_events = ParsedEvents([], [], [])
        now_us = round(now_s * 1e6)
        for event_index, raw_event in enumerate(raw_events):
            try:
                event = self._parse_and_check(raw_event, f"events[{event_index}]", now_us, blocklist)
            except Problem as problem:
                detail = problem.message[:DETAIL_CHARS_MAX]
                read_events.rejected_events.append(RejectedEvent(event_index, problem.reason, detail))
            else:
                read_events.event_indices.append(event_index)
                read_events.packed_events.append(event)
        return read_events

    def parse_inbox_entry(
        self, entry_fields: Mapping[bytes, bytes], entry_id: str, now_s: float, blocklist: Blocklist
    ) -> PackedEvent:
        """Parse an entry of the inbox, whose id serves as the event's id if it has none; raise Problem."""
        try:
            event_json = entry_fields.get(_INBOX_JSON_FIELD)
            raw_event = _parse_inbox_texts(entry_fields) if event_json is None else orjson.loads(event_json)
        except (UnicodeDecodeError, orjson.JSONDecodeError) as error:
            _refuse_erased(entry_fields.get(b"user", b"").decode(errors="replace"), blocklist)
            raise unprocessable("invalid_json", f"the entry is not an event: {error}", "e") from error
        if isinstance(raw_event, dict) and raw_event.get("id") is None:
            raw_event = {**raw_event, "id": entry_id}
        return self._parse_and_check(raw_event, "event", round(now_s * 1e6), blocklist)

    def _parse_and_check(self, raw_event: object, field_path: str, now_us: int, blocklist: Blocklist) -> PackedEvent:
        """Return the packed event; raise Problem if it is invalid, too large, or its owner is erased or blocked."""
        if isinstance(raw_event, UnreadableEvent):
            detail = (
                f"{field_path} is not JSON (which has no NaN, Infinity or half of a pair of surrogates): "
                f"{raw_event.parser_message}"
            )
            raise unprocessable("invalid_json", detail, field_path)
        # First: nothing of such an event is kept, even if it is also invalid.
        if isinstance(raw_event, dict):
            _refuse_erased(raw_event.get("user"), blocklist)
        event = self._parse_event(raw_event, field_path, now_us)
        if brings_item(event) and (new_item_inputs := self.get_new_item_inputs()) is not None:
            try:
                new_item_inputs.check(event)
            except UnfitNewItem as error:
                raise problem_from_input(error, field_path) from error
        packed_event, event_bytes_max = pack_event(self.keyspace, event), self.config.event_bytes
        if len(packed_event.event_bytes) > event_bytes_max:
            detail = f"the event has {len(packed_event.event_bytes)} bytes, {event_bytes_max} are allowed"
            raise unprocessable("too_large", detail, None, limit=event_bytes_max)
        return packed_event

    def _parse_event(self, raw_event: object, field_path: str, now_us: int) -> Event:
        event_fields = read_object(raw_event, field_path, _EVENT_FIELDS)
        user, item, event_id = (event_fields.get(field_name) for field_name in ("user", "item", "id"))
        if event_id is None:
            raise unprocessable("missing_field", f"{field_path}.id is missing", f"{field_path}.id")
        if user is None and item is None:
            raise unprocessable("missing_field", f"{field_path} has neither user nor item", field_path)
        event_id_bytes = _read_event_id(event_id, f"{field_path}.id")
        event_time_us = read_time_us(event_fields["time"], f"{field_path}.time") if "time" in event_fields else now_us
        if event_time_us > now_us + self.config.ahead_s * 1e6:
            ahead_s = (event_time_us - now_us) / 1e6
            detail = f"{field_path}.time is {ahead_s:.3f} s ahead, {self.config.ahead_s:g} s are allowed"
            raise unprocessable("in_future", detail, f"{field_path}.time")
        raw_features, vector, weight = (
            event_fields.get("features"),
            event_fields.get("vector"),
            event_fields.get("weight"),
        )
        if user is not None and item is not None:
            _refuse_fields(
                event_fields, field_path, ("attributes", *_ITEM_ONLY_FIELDS), "a user alone or an item alone"
            )
        else:
            _refuse_fields(event_fields, field_path, ("weight",), "a user and an item")
            if user is not None:
                _refuse_fields(event_fields, field_path, _ITEM_ONLY_FIELDS, "an item alone")
            if not {"attributes", *_ITEM_ONLY_FIELDS} & event_fields.keys():
                detail = f"{field_path} sets nothing: an event of {'a user' if item is None else 'an item'} alone has"
                detail += " attributes" + ("" if item is None else ", features or a vector")
                raise unprocessable("missing_field", detail, field_path)
        return Event(
            event_id_bytes.decode(),
            event_time_us,
            None if user is None else read_id(user, f"{field_path}.user"),
            None if item is None else read_id(item, f"{field_path}.item"),
            _read_event_type(event_fields["type"], f"{field_path}.type") if "type" in event_fields else None,
            1.0 if weight is None else _read_number(weight, f"{field_path}.weight"),
            _read_attributes(event_fields["attributes"], f"{field_path}.attributes")
            if "attributes" in event_fields
            else None,
            None if raw_features is None else read_features(raw_features, f"{field_path}.features", EVENT_BYTES_MAX),
            None if vector is None else _read_vector(vector, f"{field_path}.vector"),
        )


def _refuse_erased(raw_user: object, blocklist: Blocklist) -> None:
    try:
        user_id = canonical_id(raw_user)
    except InvalidId:
        return
    if user_id in blocklist.users or user_id in blocklist.entities:
        raise unprocessable("erased", "its user is blocked or was erased", None)


def _read_event_id(raw_event_id: object, field_path: str) -> bytes:
    # Of a text, the bounds of other ids are not those of an event's.
    id_size = len(raw_event_id.encode(errors="replace")) if isinstance(raw_event_id, str) else 1
    if not 1 <= id_size <= EVENT_ID_BYTES_MAX:
        detail = f"{field_path} has {id_size} bytes of UTF-8, 1 to {EVENT_ID_BYTES_MAX} are allowed"
        raise unprocessable("invalid_id", detail, field_path, limit=EVENT_ID_BYTES_MAX)
    return read_id(raw_event_id, field_path)


def read_time_us(raw_time: object, field_path: str) -> int:
    """Parse ISO 8601 (UTC without a zone) or Unix seconds to microseconds since 1970; raise Problem."""
    if isinstance(raw_time, str) and len(raw_time) <= _TIME_CHARS_MAX:
        try:
            parsed_time = iso_time(raw_time)
        except ValueError as error:
            detail = f"{field_path} is not an ISO 8601 time, such as 2026-01-31T12:00:00Z"
            raise unprocessable("invalid_field", detail, field_path) from error
        return _check_since_1970((parsed_time - _UNIX_EPOCH) // _MICROSECOND, field_path)
    if isinstance(raw_time, int | float) and not isinstance(raw_time, bool):
        if not abs(raw_time) < _UNIX_SECONDS_MAX:
            raise unprocessable("invalid_field", f"{field_path} must be in seconds since 1970", field_path)
        return _check_since_1970(round(raw_time * 1_000_000), field_path)
    detail = f"{field_path} must be an ISO 8601 time, or seconds since 1970"
    raise unprocessable("invalid_field", detail, field_path)


def _check_since_1970(event_time_us: int, field_path: str) -> int:
    if event_time_us < 0:
        raise unprocessable("invalid_field", f"{field_path} is before 1970", field_path)
    return event_time_us


def _refuse_fields(
    event_fields: Mapping[str, Any], field_path: str, refused_names: Sequence[str], allowed_owners_text: str
) -> None:
    for field_name in refused_names:
        if field_name in event_fields:
            refused_path = f"{field_path}.{field_name}"
            raise unprocessable(
                "invalid_field", f"{refused_path} is only allowed in an event of {allowed_owners_text}", refused_path
            )


def _read_event_type(raw_type: object, field_path: str) -> str:
    if not isinstance(raw_type, str) or not 1 <= len(raw_type.encode()) <= EVENT_TYPE_BYTES_MAX:
        detail = f"{field_path} must be a text of 1 to {EVENT_TYPE_BYTES_MAX} bytes"
        raise unprocessable("invalid_field", detail, field_path)
    return raw_type


def _read_number(raw_number: object, field_path: str) -> float:
    if isinstance(raw_number, bool) or not isinstance(raw_number, int | float) or not abs(raw_number) < _FLOAT_MAX:
        raise unprocessable("invalid_field", f"{field_path} must be a number that float32 can hold", field_path)
    return float(raw_number)


def _read_vector(raw_vector: object, field_path: str) -> tuple[float, ...]:
    if not isinstance(raw_vector, list) or not 1 <= len(raw_vector) <= VECTOR_LENGTH_MAX:
        detail = f"{field_path} must be a list of 1 to {VECTOR_LENGTH_MAX} numbers"
        raise unprocessable("invalid_field", detail, field_path)
    return tuple([_read_number(number, f"{field_path}[{index}]") for index, number in enumerate(raw_vector)])


def _read_attributes(raw_attributes: object, field_path: str) -> dict[str, Any]:
    if not isinstance(raw_attributes, dict) or not 1 <= len(raw_attributes) <= ATTRIBUTES_MAX:
        detail = f"{field_path} must be an object of 1 to {ATTRIBUTES_MAX} values by name"
        raise unprocessable("invalid_field", detail, field_path)
    for attribute_name, attribute_value in raw_attributes.items():
        if not 1 <= len(attribute_name.encode()) <= ATTRIBUTE_NAME_BYTES_MAX:
            detail = f"names in {field_path} must have 1 to {ATTRIBUTE_NAME_BYTES_MAX} bytes"
            raise unprocessable("invalid_field", detail, field_path)
        if not _is_attribute_value(attribute_value):
            attribute_path = f"{field_path}.{attribute_name}"
            detail = (
                f"{attribute_path} must be a text of at most {ATTRIBUTE_TEXT_BYTES_MAX} bytes, a list of at most "
                f"{ATTRIBUTE_TEXTS_MAX} of them, a finite "
                "number, true or false, or null, which clears it"
            )
            raise unprocessable("invalid_field", detail, attribute_path)
    return raw_attributes


def _is_attribute_value(raw_value: object) -> bool:
    if isinstance(raw_value, list):
        return len(raw_value) <= ATTRIBUTE_TEXTS_MAX and all(
            isinstance(list_element, str) and _is_attribute_value(list_element) for list_element in raw_value
        )
    if isinstance(raw_value, str):
        return len(raw_value.encode()) <= ATTRIBUTE_TEXT_BYTES_MAX
    is_finite_float = isinstance(raw_value, float) and math.isfinite(raw_value)
    return raw_value is None or isinstance(raw_value, bool | int) or is_finite_float


def _parse_inbox_texts(entry_fields: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Convert an inbox entry's texts to event fields; a malformed number stays a text, which is refused later."""
    event_fields: dict[str, Any] = {name.decode(): field_text.decode() for name, field_text in entry_fields.items()}
    for field_name in ("time", "weight"):
        number_text = event_fields.get(field_name)
        if isinstance(number_text, str) and _NUMBER_PATTERN.fullmatch(number_text):
            event_fields[field_name] = float(number_text)
    return event_fields


def read_body_of_events(problem: Problem, request_body: bytes, events_max: int) -> object:
    """Return the content of a body that was refused with `problem`; raise `problem` if events cannot be separated."""
    contents = read_separately(request_body, events_max) if problem.reason == "invalid_json" else None
    if contents is None:
        raise problem
    return contents


def read_separately(request_body: bytes, events_max: int) -> dict[str, object] | None:
    """Parse each event of a malformed body separately; None if they cannot be separated, or each one is valid JSON.

    Reads at most `events_max + 1` events. `request_body` as a whole is not JSON.
    """
    try:
        event_pieces = list(islice(_event_pieces(request_body), events_max + 1))
    except _NoListError:
        return None
    events = [_parse_piece(event_piece) for event_piece in event_pieces]
    return {"events": events} if any(isinstance(event, UnreadableEvent) for event in events) else None


class _NoListError(ValueError):
    """The body is not an object with only a list of events, or has unclosed texts or brackets."""


def _event_pieces(request_body: bytes) -> Iterator[bytes]:
    """Yield the text of each event of the list; may raise _NoListError after some of them."""
    head_match = _EVENTS_HEAD_PATTERN.match(request_body)
    if head_match is None:
        raise _NoListError
    piece_start, bracket_depth = head_match.end(), 0
    for token in _JSON_TOKEN_PATTERN.finditer(request_body, piece_start):
        symbol = token[0]
        if symbol == b'"':
            raise _NoListError
        if symbol in b"[{":
            bracket_depth += 1
        elif symbol in b"]}":
            bracket_depth -= 1
        if bracket_depth < 0 or (bracket_depth == 0 and symbol == b","):
            event_piece = request_body[piece_start : token.start()]
            if not event_piece.strip():
                raise _NoListError
            yield event_piece
            piece_start = token.end()
        if bracket_depth < 0:
            if symbol != b"]" or not _EVENTS_TAIL_PATTERN.fullmatch(request_body, piece_start):
                raise _NoListError
            return
    raise _NoListError


def _parse_piece(event_piece: bytes) -> object:
    try:
        return orjson.loads(event_piece)
    except orjson.JSONDecodeError as error:
        return UnreadableEvent(str(error))

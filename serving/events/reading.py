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
from serving.requests.json_fields import check_length, read_features, read_id, read_object

EVENT_ID_BYTES_MAX: Final = 128
EVENT_TYPE_BYTES_MAX: Final = 64
ATTRIBUTES_MAX: Final = 64
ATTRIBUTE_NAME_BYTES_MAX: Final = 64
TEXT_BYTES_MAX: Final = 1_024
TEXTS_MAX: Final = 64
VECTOR_MAX: Final = 8_192

EVENT_BYTES_MAX: Final = 4_096
"""Largest setting of `event_bytes`: no text of an event is longer."""

DETAIL_CHARS: Final = 400
"""Characters of a rejection's text, which is sent and stored, and may quote the event."""

_EVENT_FIELDS = frozenset(
    {"user", "item", "time", "id", "type", "weight", "attributes", "features", "vector"}
)

_ITEM_FIELDS = ("features", "vector")

_JSON_FIELD = b"e"
"""Field of an inbox entry that holds all of an event as JSON."""

_FLOAT_MAX = 3.4e38
"""Largest weight or part of a vector: nights hold both as float32."""

_NUMBER = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?")

_SECONDS_MAX = 10**11
"""Bound of Unix seconds: a greater number must be milliseconds."""

_TIME_CHARS_MAX = 64
_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_LIST_HEAD: Final = re.compile(rb'\s*\{\s*"events"\s*:\s*\[')
_LIST_TAIL: Final = re.compile(rb"\s*\}\s*")

# Possessive: a text that is never closed is read once, and then ends the search.
_JSON_TOKEN: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|["\[\]{},]', re.DOTALL)


class RejectedEvent(NamedTuple):
    """Rejected event: its index in the request, the reason, and an explanation."""

    event_index: int
    reason: str
    detail: str


class ReadEvents(NamedTuple):
    """Events of one request that may be accepted, each with its index, and the rejected ones."""

    event_indices: list[int]
    packed: list[PackedEvent]
    rejected: list[RejectedEvent]


class UnreadableEvent(NamedTuple):
    """Event of a body that is not JSON, with the parser's message; no part of it is stored, as its owner is unknown."""

    reason: str


@dataclass(frozen=True, slots=True)
class EventReader:
    """Parser of events for one namespace, within its bounds.

    `get_new_item_inputs` returns which inputs make an unknown item answerable by the live generation; None: unknown.
    """

    keyspace: Keyspace
    config: EventsConfig
    get_new_item_inputs: Callable[[], NewItemInputs | None] = lambda: None

    def extract_events(self, content: object) -> list[Any]:
        """Return the list of events in a request's body, unparsed; raise Problem if it is missing or too long."""
        data = read_object(content, "body", frozenset({"events"}))
        events = data.get("events")
        if not isinstance(events, list):
            raise unprocessable("invalid_field", "events is a list", "events")
        check_length(events, 1, self.config.batch, "events", "batch_too_long")
        return events

    def of_body(self, events: Sequence[Any], now_s: float, blocklist: Blocklist) -> ReadEvents:
        """Parse the events of a body; `now_s` is the service's clock, Unix seconds."""
        read_events = ReadEvents([], [], [])
        now_us = round(now_s * 1e6)
        for index, raw_event in enumerate(events):
            try:
                event = self._checked(raw_event, f"events[{index}]", now_us, blocklist)
            except Problem as problem:
                detail = problem.message[:DETAIL_CHARS]
                read_events.rejected.append(RejectedEvent(index, problem.reason, detail))
            else:
                read_events.event_indices.append(index)
                read_events.packed.append(event)
        return read_events

    def of_inbox(
        self, fields: Mapping[bytes, bytes], entry: str, now_s: float, blocklist: Blocklist
    ) -> PackedEvent:
        """Parse an entry of the inbox, whose id serves as the event's id if it has none; raise Problem."""
        try:
            raw = fields.get(_JSON_FIELD)
            raw_event = _parse_texts(fields) if raw is None else orjson.loads(raw)
        except (UnicodeDecodeError, orjson.JSONDecodeError) as error:
            _refuse_erased(fields.get(b"user", b"").decode(errors="replace"), blocklist)
            raise unprocessable("invalid_json", f"the entry is no event: {error}", "e") from error
        if isinstance(raw_event, dict) and raw_event.get("id") is None:
            raw_event = {**raw_event, "id": entry}
        return self._checked(raw_event, "event", round(now_s * 1e6), blocklist)

    def _checked(
        self, raw_event: object, field: str, now_us: int, blocklist: Blocklist
    ) -> PackedEvent:
        """Return the event packed; raise Problem if it is invalid, too large, or of an erased or blocked owner."""
        if isinstance(raw_event, UnreadableEvent):
            detail = (
                f"{field} is not JSON (which has no NaN, Infinity or half of a pair of surrogates): "
                f"{raw_event.reason}"
            )
            raise unprocessable("invalid_json", detail, field)
        # First: nothing is kept of it, whatever else is wrong with it.
        if isinstance(raw_event, dict):
            _refuse_erased(raw_event.get("user"), blocklist)
        event = self._event(raw_event, field, now_us)
        if brings_item(event) and (inputs := self.get_new_item_inputs()) is not None:
            try:
                inputs.check(event)
            except UnfitNewItem as error:
                raise problem_from_input(error, field) from error
        packed_event, event_bytes_max = pack_event(self.keyspace, event), self.config.event_bytes
        if len(packed_event.body) > event_bytes_max:
            detail = f"the event has {len(packed_event.body)} bytes, {event_bytes_max} are allowed"
            raise unprocessable("too_large", detail, None, limit=event_bytes_max)
        return packed_event

    def _event(self, raw_event: object, field: str, now_us: int) -> Event:
        data = read_object(raw_event, field, _EVENT_FIELDS)
        user, item, id_ = (data.get(name) for name in ("user", "item", "id"))
        if id_ is None:
            raise unprocessable("missing_field", f"{field}.id is missing", f"{field}.id")
        if user is None and item is None:
            raise unprocessable("missing_field", f"{field} has neither user nor item", field)
        id_raw = read_id(id_, f"{field}.id")
        if len(id_raw) > EVENT_ID_BYTES_MAX:
            detail = f"{field}.id has {len(id_raw)} bytes, {EVENT_ID_BYTES_MAX} are allowed"
            raise unprocessable("invalid_id", detail, f"{field}.id", limit=EVENT_ID_BYTES_MAX)
        at_us = read_time(data["time"], f"{field}.time") if "time" in data else now_us
        if at_us > now_us + self.config.ahead_s * 1e6:
            ahead_s = (at_us - now_us) / 1e6
            detail = f"{field}.time is {ahead_s:.3f} s ahead, {self.config.ahead_s:g} s are allowed"
            raise unprocessable("in_future", detail, f"{field}.time")
        raw_features, vector, weight = data.get("features"), data.get("vector"), data.get("weight")
        if user is not None and item is not None:
            _refuse_fields(
                data, field, ("attributes", *_ITEM_FIELDS), "a user alone or an item alone"
            )
        else:
            _refuse_fields(data, field, ("weight",), "a user and an item")
            if user is not None:
                _refuse_fields(data, field, _ITEM_FIELDS, "an item alone")
            if not {"attributes", *_ITEM_FIELDS} & data.keys():
                detail = f"{field} tells nothing: an event of {'a user' if item is None else 'an item'} alone has"
                detail += " attributes" + ("" if item is None else ", features or a vector")
                raise unprocessable("missing_field", detail, field)
        return Event(
            id_raw.decode(),
            at_us,
            None if user is None else read_id(user, f"{field}.user"),
            None if item is None else read_id(item, f"{field}.item"),
            _type(data["type"], f"{field}.type") if "type" in data else None,
            1.0 if weight is None else _number(weight, f"{field}.weight"),
            _attributes(data["attributes"], f"{field}.attributes") if "attributes" in data else None,
            None if raw_features is None else read_features(raw_features, f"{field}.features", EVENT_BYTES_MAX),
            None if vector is None else _vector(vector, f"{field}.vector"),
        )  # fmt: skip


def _refuse_erased(user: object, blocklist: Blocklist) -> None:
    try:
        raw = canonical_id(user)
    except InvalidId:
        return
    if raw in blocklist.users or raw in blocklist.entities:
        raise unprocessable("erased", "its user is blocked or was erased", None)


def read_time(value: object, field: str) -> int:
    """Parse ISO 8601 (UTC without a zone) or Unix seconds to microseconds since 1970; raise Problem."""
    if isinstance(value, str) and len(value) <= _TIME_CHARS_MAX:
        try:
            parsed_time = iso_time(value)
        except ValueError as error:
            detail = f"{field} is no time of ISO 8601, such as 2026-01-31T12:00:00Z"
            raise unprocessable("invalid_field", detail, field) from error
        return _since_1970((parsed_time - _UNIX_EPOCH) // _MICROSECOND, field)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) < _SECONDS_MAX:
            raise unprocessable("invalid_field", f"{field} is in seconds since 1970", field)
        return _since_1970(round(value * 1_000_000), field)
    detail = f"{field} is a time of ISO 8601, or seconds since 1970"
    raise unprocessable("invalid_field", detail, field)


def _since_1970(at_us: int, field: str) -> int:
    if at_us < 0:
        raise unprocessable("invalid_field", f"{field} is before 1970", field)
    return at_us


def _refuse_fields(data: Mapping[str, Any], field: str, names: Sequence[str], of: str) -> None:
    for name in names:
        if name in data:
            where = f"{field}.{name}"
            raise unprocessable("invalid_field", f"{where} is for an event of {of}", where)


def _type(value: object, field: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value.encode()) <= EVENT_TYPE_BYTES_MAX:
        detail = f"{field} is a text of 1 to {EVENT_TYPE_BYTES_MAX} bytes"
        raise unprocessable("invalid_field", detail, field)
    return value


def _number(value: object, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _FLOAT_MAX:
        raise unprocessable("invalid_field", f"{field} is a number that float32 holds", field)
    return float(value)


def _vector(value: object, field: str) -> tuple[float, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= VECTOR_MAX:
        detail = f"{field} is a list of 1 to {VECTOR_MAX} numbers"
        raise unprocessable("invalid_field", detail, field)
    return tuple([_number(number, f"{field}[{index}]") for index, number in enumerate(value)])


def _attributes(value: object, field: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not 1 <= len(value) <= ATTRIBUTES_MAX:
        detail = f"{field} is an object of 1 to {ATTRIBUTES_MAX} values by name"
        raise unprocessable("invalid_field", detail, field)
    for name, attribute in value.items():
        if not 1 <= len(name.encode()) <= ATTRIBUTE_NAME_BYTES_MAX:
            detail = f"names in {field} have 1 to {ATTRIBUTE_NAME_BYTES_MAX} bytes"
            raise unprocessable("invalid_field", detail, field)
        if not _is_attribute(attribute):
            where = f"{field}.{name}"
            detail = (
                f"{where} is a text of at most {TEXT_BYTES_MAX} bytes, a list of at most {TEXTS_MAX} of them, a finite "
                "number, true or false, or null, which clears it"
            )
            raise unprocessable("invalid_field", detail, where)
    return value


def _is_attribute(value: object) -> bool:
    if isinstance(value, list):
        return len(value) <= TEXTS_MAX and all(
            isinstance(element, str) and _is_attribute(element) for element in value
        )
    if isinstance(value, str):
        return len(value.encode()) <= TEXT_BYTES_MAX
    is_finite = isinstance(value, float) and math.isfinite(value)
    return value is None or isinstance(value, bool | int) or is_finite


def _parse_texts(fields: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Convert an inbox entry's texts to event fields; a malformed number stays a text, which is refused later."""
    event_fields: dict[str, Any] = {name.decode(): value.decode() for name, value in fields.items()}
    for name in ("time", "weight"):
        text = event_fields.get(name)
        if isinstance(text, str) and _NUMBER.fullmatch(text):
            event_fields[name] = float(text)
    return event_fields


def read_body_of_events(problem: Problem, body: bytes, events_max: int) -> object:
    """Return the content of a body that was refused with `problem`; raise it if the events cannot be separated."""
    contents = read_separately(body, events_max) if problem.reason == "invalid_json" else None
    if contents is None:
        raise problem
    return contents


def read_separately(body: bytes, events_max: int) -> dict[str, object] | None:
    """Parse each event of a malformed body on its own; None if they cannot be separated, or each is JSON.

    Reads at most `events_max + 1` events. `body` as a whole is not JSON.
    """
    try:
        pieces = list(islice(_event_pieces(body), events_max + 1))
    except _NoListError:
        return None
    events = [_read_piece(piece) for piece in pieces]
    return (
        {"events": events} if any(isinstance(event, UnreadableEvent) for event in events) else None
    )


class _NoListError(ValueError):
    """The body is no object with only a list of events, or its texts and brackets do not end."""


def _event_pieces(body: bytes) -> Iterator[bytes]:
    """Yield the text of each event of the list; raise _NoListError, perhaps after some of them."""
    head = _LIST_HEAD.match(body)
    if head is None:
        raise _NoListError
    start, depth = head.end(), 0
    for token in _JSON_TOKEN.finditer(body, start):
        symbol = token[0]
        if symbol == b'"':
            raise _NoListError
        if symbol in b"[{":
            depth += 1
        elif symbol in b"]}":
            depth -= 1
        if depth < 0 or (depth == 0 and symbol == b","):
            piece = body[start : token.start()]
            if not piece.strip():
                raise _NoListError
            yield piece
            start = token.end()
        if depth < 0:
            if symbol != b"]" or not _LIST_TAIL.fullmatch(body, start):
                raise _NoListError
            return
    raise _NoListError


def _read_piece(piece: bytes) -> object:
    try:
        return orjson.loads(piece)
    except orjson.JSONDecodeError as error:
        return UnreadableEvent(str(error))

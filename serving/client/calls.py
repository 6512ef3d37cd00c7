"""Requests of the client's callers, and the HTTP requests made of them. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import numpy as np
import orjson

from serving.arrow.schema import ARROW_MEDIA_TYPE, Field
from serving.arrow.writer import whole_text_column, write_stream
from serving.client.errors import InvalidArgument

Id = str | int

EVENT_BODY_BYTES: Final = 4 << 20
"""Bytes of events in one request: the service accepts bodies of 8 MiB by default."""


@dataclass(frozen=True, slots=True)
class Entity:
    """Entity of a request: an id, an input to compute from, or both; `table` is for batches with several tables."""

    id: Id | None = None
    history: Sequence[Id] | None = None
    features: Mapping[str, Any] | None = None
    table: str | None = None

    def to_json(self, field: str = "entity") -> dict[str, Any]:
        """Return the JSON object of the fields that are set; raise InvalidArgument, `field` is the entity's place."""
        body: dict[str, Any] = {}
        if self.id is not None:
            body["id"] = as_id(self.id, f"{field}.id")
        if self.history is not None:
            body["history"] = as_ids(self.history, f"{field}.history")
        if self.features is not None:
            body["features"] = dict(self.features)
            _check_value(body["features"], f"{field}.features")
        if self.table is not None:
            body["table"] = self.table
            _check_value(self.table, f"{field}.table")
        return body


IdsOrEntities = Sequence[Id | Entity]


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a request; None omits a field, so that the service's own setting applies.

    `deadline_ms` is for the whole call including retries: by then it has an answer or an error.
    """

    k: int | None = None
    exclude: Sequence[Id] | None = None
    deadline_ms: float | None = None
    fresh: bool | None = None
    max_age_seconds: float | None = None
    max_events: int | None = None
    """Number of newer events of the user that count; 0: the stored answer."""
    as_of: str | None = None
    """Position or time up to which newer events count, as in an earlier answer."""
    generation: str | None = None
    canary_key: Id | None = None
    arm: str | None = None
    """`EXPERIMENT=ARM` that answers, for tests of an arm; not counted as an exposure."""
    filter: Mapping[str, Any] | str | None = None
    """Expression over attributes of items, such as `{"<": ["price", 20]}`, or the name of a declared filter: the answer
    has only items that pass."""
    rerank: Mapping[str, Any] | str | None = None
    """Name of a declared re-ranking, or an expression such as `{"diversify": {"attribute": "brand", "most": 2}}`."""

    def __post_init__(self) -> None:
        """Raise InvalidArgument for a deadline that is not a finite number above 0."""
        if self.deadline_ms is not None and not 0 < self.deadline_ms < float("inf"):
            raise InvalidArgument(f"deadline_ms must be a finite number above 0, not {self.deadline_ms}", "deadline_ms")

    def pinned(self, generation: str) -> "Options":
        """Return a copy of these options that requests answers from one generation."""
        return replace(self, generation=generation)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the options that are set. Raise InvalidArgument."""
        body = {option_field.name: getattr(self, option_field.name) for option_field in fields(self)}
        for option_name, option_value in body.items():
            if option_value is not None and option_name not in ("exclude", "canary_key"):
                _check_value(option_value, option_name)
        if self.exclude is not None:
            body["exclude"] = as_ids(self.exclude, "exclude")
        if self.canary_key is not None:
            body["canary_key"] = as_id(self.canary_key, "canary_key")
        if isinstance(self.filter, Mapping):
            body["filter"] = dict(self.filter)
        if isinstance(self.rerank, Mapping):
            body["rerank"] = dict(self.rerank)
        return {name: value for name, value in body.items() if value is not None}


@dataclass(frozen=True, slots=True)
class NewEvent:
    """Event to send: an interaction of a user with an item, or values that are set for a user or for an item.

    An event that is sent again with the same `id` counts once. `time` is ISO 8601, a datetime or Unix seconds.
    """

    id: Id
    user: Id | None = None
    item: Id | None = None
    time: str | float | datetime | None = None
    type: str | None = None
    weight: float | None = None
    attributes: Mapping[str, Any] | None = None
    features: Mapping[str, Any] | None = None
    vector: Sequence[float] | None = None

    def to_json(self, field: str = "event") -> dict[str, Any]:
        """Return the JSON object of the fields that are set; raise InvalidArgument, `field` is the event's place."""
        body: dict[str, Any] = {
            name: as_id(value, f"{field}.{name}")
            for name in ("id", "user", "item")
            if (value := getattr(self, name)) is not None
        }
        for name in ("time", "type", "weight", "attributes", "features", "vector"):
            if (value := getattr(self, name)) is not None:
                _check_value(value, f"{field}.{name}")
                body[name] = value
        return body


@dataclass(frozen=True, slots=True)
class Call:
    """HTTP request; `is_repeatable` if sending it twice has the same effect as sending it once."""

    method: str
    path: str
    query_parameters: Mapping[str, str] | None = None
    request_body: bytes | None = None
    is_repeatable: bool = True
    content_type: str = "application/json"
    accept: str = "application/json"


class EventsCall(NamedTuple):
    """Request with some of the events; `first_event_index` is the index of its first event among all events."""

    first_event_index: int
    call: Call


def build_get(table: str, entity: Id, options: Options) -> Call:
    """Build a GET of one entity. Raise InvalidArgument, also for `exclude`, which may be too long for a URL."""
    if options.exclude is not None:
        raise InvalidArgument("exclude is only possible with lookup_many: it may be too long for a URL", "exclude")
    # In a path "." and ".." would be resolved as folders.
    quoted_id = quote(as_id(entity), safe="").replace(".", "%2E")
    return Call("GET", f"{_lookup_path(table)}/{quoted_id}", _option_texts(options))


def build_post(table: str | None, entities: IdsOrEntities, options: Options) -> Call:
    """Build a POST of entities of one table; without `table` each entity names its own."""
    entity_bodies = [
        entity.to_json(f"entities[{index}]") if isinstance(entity, Entity) else {"id": as_id(entity, "entities", index)}
        for index, entity in enumerate(entities)
    ]
    return _build_json_post(_lookup_path(table), {"entities": entity_bodies, **options.to_json()})


def many_binary(table: str, entities: IdsOrEntities, options: Options) -> Call:
    """Build a POST for an Arrow IPC stream; its body is a stream, too, if it has only plain ids and no `exclude`."""
    ids = [entity for entity in entities if not isinstance(entity, Entity)]
    if len(ids) < len(entities) or options.exclude is not None:
        return replace(build_post(table, entities, options), accept=ARROW_MEDIA_TYPE)
    content = write_arrow_ids(as_ids(ids, "entities"), _option_texts(options))
    return Call("POST", _lookup_path(table), None, content, content_type=ARROW_MEDIA_TYPE, accept=ARROW_MEDIA_TYPE)


def write_arrow_ids(ids: Sequence[str], options: Mapping[str, str]) -> bytes:
    """Return the request body for `ids` as an Arrow IPC stream, with the options as the schema's metadata."""
    column = whole_text_column([entity_id.encode() for entity_id in ids])
    return write_stream((Field("id", "utf8"),), [column], len(ids), tuple(options.items()))


def score(user: Id | Entity, candidate_ids: Sequence[Id], options: Options) -> Call:
    """Build a POST of one user's candidates."""
    user_json = user.to_json("user") if isinstance(user, Entity) else as_id(user, "user")
    return _build_json_post(
        "/v1/score", {"user": user_json, "items": as_ids(candidate_ids, "items"), **options.to_json()}
    )


def feedback(event_name: str, generation: str | None, canary_key: Id | None, arm: str | None, event_count: int) -> Call:
    """Build a POST of feedback on answers. It is not repeatable, because it is counted each time it arrives."""
    body: dict[str, Any] = {"event": event_name, "count": event_count}
    if generation is not None:
        body["generation"] = generation
    if canary_key is not None:
        body["canary_key"] = as_id(canary_key, "canary_key")
    if arm is not None:
        body["arm"] = arm
    for name, value in body.items():
        _check_value(value, name)
    return _build_json_post("/v1/feedback", body, is_repeatable=False)


def split(
    entities: IdsOrEntities, options: Options, max_batch: int, max_ids: int, max_numbers: int = 100_000
) -> Iterator[IdsOrEntities]:
    """Yield consecutive pieces of `entities`, each within the limits of one request.

    The limits are `max_batch` entities, `max_ids` ids in histories and `exclude` together, and `max_numbers` feature
    values.
    """
    if isinstance(entities, str):
        raise InvalidArgument(f"entities must be a list, not the text {entities!r}", "entities")
    excluded_count = len(options.exclude or ())
    part_start, id_count, number_count = 0, excluded_count, 0
    for index, entity in enumerate(entities):
        entity_id_count = len(entity.history or ()) if isinstance(entity, Entity) else 0
        entity_number_count = _count_feature_values(entity) if isinstance(entity, Entity) else 0
        is_full = id_count + entity_id_count > max_ids or number_count + entity_number_count > max_numbers
        if index > part_start and (index - part_start == max_batch or is_full):
            yield entities[part_start:index]
            part_start, id_count, number_count = index, excluded_count, 0
        id_count += entity_id_count
        number_count += entity_number_count
    if part_start < len(entities):
        yield entities[part_start:]


def event_calls(events: Sequence[NewEvent], max_batch: int) -> list[EventsCall]:
    """Return requests with all events, in order, each of at most `max_batch` events and `EVENT_BODY_BYTES`.

    Raises InvalidArgument with the event's index for an event that cannot be sent; then nothing is sent.
    """
    calls: list[EventsCall] = []
    event_bodies: list[bytes] = []
    size_bytes = 0
    for index, event in enumerate(events):
        field = f"events[{index}]"
        event_body = _write_json(event.to_json(field), field)
        if event_bodies and (len(event_bodies) == max_batch or size_bytes + len(event_body) > EVENT_BODY_BYTES):
            calls.append(_build_events_call(index, event_bodies))
            event_bodies, size_bytes = [], 0
        event_bodies.append(event_body)
        size_bytes += len(event_body) + 1
    if event_bodies:
        calls.append(_build_events_call(len(events), event_bodies))
    return calls


def as_id(sent_id: object, field: str = "id", list_index: int | None = None) -> str:
    """Return an id as text, an int in decimal form; raise InvalidArgument for other types, including bool.

    `field` is the id's place in the request, with `list_index` that of its list.
    """
    if isinstance(sent_id, str) and (sent_id.isascii() or _is_unicode(sent_id)):
        return str(sent_id)
    if isinstance(sent_id, int) and not isinstance(sent_id, bool):
        return str(sent_id)
    place = field if list_index is None else f"{field}[{list_index}]"
    if isinstance(sent_id, str):
        raise InvalidArgument(
            f"{place}: {sent_id!r} is no valid Unicode (it holds half of a pair of surrogates)", place
        )
    raise InvalidArgument(f"{place}: an id must be a str or an int, not {sent_id!r}", place)


def as_ids(sent_ids: Sequence[Id], field: str = "ids") -> list[str]:
    """Return the texts of a list of ids; raise InvalidArgument for other types, including a text instead of a list."""
    if isinstance(sent_ids, str):
        raise InvalidArgument(f"{field} must be a list of ids, not the text {sent_ids!r}", field)
    return [as_id(sent_id, field, index) for index, sent_id in enumerate(sent_ids)]


def _is_unicode(json_text: str) -> bool:
    try:
        json_text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_value(json_value: object, field: str) -> None:
    """Raise InvalidArgument for a text or a number, at any depth, that JSON does not have."""
    if isinstance(json_value, str):
        if not json_value.isascii() and not _is_unicode(json_value):
            raise InvalidArgument(f"{field} is no valid Unicode (it holds half of a pair of surrogates)", field)
    elif isinstance(json_value, float | np.floating):
        if not np.isfinite(json_value):
            raise InvalidArgument(f"{field} must be a finite number, not {float(json_value)}", field)
    elif isinstance(json_value, np.ndarray):
        if json_value.dtype.kind == "f" and not np.isfinite(json_value).all():
            position = tuple(int(index) for index in np.argwhere(~np.isfinite(json_value))[0])
            place = field + "".join([f"[{index}]" for index in position])
            raise InvalidArgument(f"{place} must be a finite number, not {float(json_value[position])}", place)
    elif isinstance(json_value, Mapping):
        for name, inner_json_value in json_value.items():
            if isinstance(name, str):
                _check_value(name, field)
            _check_value(inner_json_value, f"{field}.{name}")
    elif isinstance(json_value, list | tuple) and not _are_finite_numbers(json_value):
        for index, inner_json_value in enumerate(json_value):
            _check_value(inner_json_value, f"{field}[{index}]")


def _are_finite_numbers(list_elements: Sequence[Any]) -> bool:
    """Whether a list has finite numbers alone: fast, because a list may have thousands of them."""
    try:
        return all(map(math.isfinite, list_elements))
    except (TypeError, OverflowError):
        return False


def _count_feature_values(entity: Entity) -> int:
    feature_values = (entity.features or {}).values()
    value_counts = [
        len(feature_value) if isinstance(feature_value, list | tuple) else np.size(feature_value)
        for feature_value in feature_values
    ]
    return sum([max(1, value_count) for value_count in value_counts])


def _option_texts(options: Options) -> dict[str, str]:
    return {option_name: _option_text(option_value) for option_name, option_value in options.to_json().items()}


def _option_text(option_value: object) -> str:
    if isinstance(option_value, Mapping):
        return _write_json(option_value, "options").decode()
    return str(option_value).lower() if isinstance(option_value, bool) else str(option_value)


def _lookup_path(table: str | None) -> str:
    if table is None:
        return "/v1/lookup"
    if not isinstance(table, str):
        raise InvalidArgument(f"table must be a str, not {table!r}", "table")
    _check_value(table, "table")
    return f"/v1/lookup/{quote(table, safe='')}"


def _build_json_post(path: str, body: Mapping[str, Any], *, is_repeatable: bool = True) -> Call:
    return Call("POST", path, None, _write_json(body, "body"), is_repeatable)


def _write_json(body: Mapping[str, Any], field: str) -> bytes:
    try:
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError as error:
        raise InvalidArgument(f"{field} cannot be written as JSON: {error}", field) from error


def _build_events_call(end_index: int, event_bodies: Sequence[bytes]) -> EventsCall:
    body = b'{"events":[' + b",".join(event_bodies) + b"]}"
    return EventsCall(end_index - len(event_bodies), Call("POST", "/v1/events", None, body))

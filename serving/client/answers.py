"""Results of the client's calls, parsed from JSON or Arrow. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import starmap
from typing import Any, Self, TypeVar

import numpy as np
import orjson

from serving.arrow.reader import UnsupportedStream, read_frame
from serving.arrow.schema import MalformedStream
from serving.client.errors import Garbled
from serving.requests.answers import Answer, Numbers, Origin, Ranking, Source, declared_fields

_T = TypeVar("_T", bound=Origin)

_ARRAY_FIELD_NAMES = frozenset(
    answer_field.name
    for declared in (Answer, Ranking)
    for answer_field in declared_fields(declared)
    if answer_field.field_type is Numbers
)

_SOURCE_BY_NAME: Mapping[str, Source] = {source.value: source for source in Source}


@dataclass(frozen=True, slots=True)
class Held:
    """Generation that a replica holds; `details` has its tables, models and indexes as sent by the service."""

    generation: str
    epoch: int
    published_at: str
    data_until: int
    """End of the generation's data, Unix seconds."""
    details: Mapping[str, Any]

    @classmethod
    def of(cls, generation_fields: Mapping[str, Any] | None) -> Self | None:
        """Parse a held generation from JSON."""
        if generation_fields is None:
            return None
        return cls(
            generation_fields["generation"],
            generation_fields["epoch"],
            generation_fields["published_at"],
            generation_fields["data_until"],
            generation_fields,
        )


@dataclass(frozen=True, slots=True)
class Generations:
    """Generations and state of the replica that answered."""

    live: Held
    previous: Held | None
    next: Held | None
    canary: Mapping[str, Any] | None
    blocklist: Mapping[str, int]
    ready: bool
    stale: str | None
    degraded: str | None


@dataclass(frozen=True, slots=True)
class EventRejection:
    """Event that was not accepted: its index among the sent events, the reason, and an explanation."""

    index: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class EventReceipt:
    """Numbers of accepted and repeated events, the rejected events, durability, and the newest position.

    `durability` is `always`, `everysec`, `none` or `unknown`, as in the settings of the Redis of events.
    """

    accepted: int
    repeated: int
    rejected: tuple[EventRejection, ...]
    durability: str
    position: str | None


def read_answers(response_body: bytes, entity_count: int) -> list[Answer]:
    """Return the answers of one batch of `entity_count` entities, in order. Raise Garbled."""
    body = read_json(response_body).get("answers")
    if not isinstance(body, list) or len(body) != entity_count:
        received_text = f"{len(body)} answers" if isinstance(body, list) else "no list of answers"
        raise Garbled(f"expected answers for {entity_count} entities, received {received_text}")
    return [_build_result(Answer, answer_json) for answer_json in body]


def read_answer(response_body: bytes) -> Answer:
    """Return the answer of a single lookup. Raise Garbled."""
    return _build_result(Answer, read_json(response_body))


def read_arrow_answers(response_body: bytes, entity_count: int) -> list[Answer]:
    """Return the answers of one batch of `entity_count` entities, in order. Raise Garbled."""
    try:
        frame = read_frame(response_body, entity_count)
    except (MalformedStream, UnsupportedStream) as error:
        raise Garbled(f"the body is not an Arrow IPC stream: {error}; it begins with {response_body[:80]!r}") from error
    if frame.row_count != entity_count:
        raise Garbled(f"expected answers for {entity_count} entities, received {frame.row_count}")
    answer_fields = Answer.__dataclass_fields__
    field_names = [
        field_name for field_name in frame.values_by_column if field_name in answer_fields and field_name != "id"
    ]
    table = frame.schema_metadata.get("table")

    def answer(entity_id: str | None, *values: Any) -> Answer:
        field_values = {
            field_name: field_value
            for field_name, field_value in zip(field_names, values, strict=True)
            if field_value is not None
        }
        field_values["source"] = source_of(field_values["source"])
        return Answer(id=entity_id, table=table, **field_values)  # type: ignore[arg-type]

    try:
        return list(
            starmap(
                answer, zip(*(frame.values_by_column[field_name] for field_name in ("id", *field_names)), strict=True)
            )
        )
    except (KeyError, TypeError) as error:
        raise Garbled(f"the response does not conform to the API: {error}") from error


def read_ranking(response_body: bytes) -> Ranking:
    """Return the answer of a score request. Raise Garbled."""
    return _build_result(Ranking, read_json(response_body))


def read_arm(response_body: bytes) -> str | None:
    """Return the arm, of a canary or an experiment, that feedback was counted for, if any. Raise Garbled."""
    body = read_json(response_body)
    arm = body.get("arm") or body.get("experiment")
    if arm is not None and not isinstance(arm, str):
        raise Garbled(f"an arm must be live, canary, EXPERIMENT=ARM or null, not {arm!r}")
    return arm


def read_generations(response_body: bytes) -> Generations:
    """Return the generations and state of a replica. Raise Garbled."""
    body = read_json(response_body)
    try:
        live, previous, next_generation = (Held.of(body[field_name]) for field_name in ("live", "previous", "next"))
        if live is None:
            raise Garbled("the service names no live generation")
        return Generations(
            live,
            previous,
            next_generation,
            *(body[field_name] for field_name in ("canary", "blocklist", "ready", "stale", "degraded")),
        )
    except (KeyError, TypeError) as error:
        raise Garbled(f"the response is not an overview of generations: {error!r}") from error


def read_receipt(response_body: bytes) -> EventReceipt:
    """Return the result of sending the events of one request. Raise Garbled."""
    body = read_json(response_body)
    try:
        rejected = tuple(
            EventRejection(rejection["index"], rejection["reason"], rejection["detail"])
            for rejection in body["rejected"]
        )
        return EventReceipt(
            int(body["accepted"]), int(body["repeated"]), rejected, str(body["durability"]), body["position"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Garbled(f"the response is not a receipt of events: {error!r}") from error


def read_json(response_body: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object. Raise Garbled."""
    try:
        body = orjson.loads(response_body)
    except orjson.JSONDecodeError as error:
        raise Garbled(f"the body is not JSON: {error}; it begins with {response_body[:80]!r}") from error
    if not isinstance(body, dict):
        raise Garbled(f"the body must be a JSON object, not {type(body).__name__}")
    return body


def _build_result(result_class: type[_T], json_fields: Mapping[str, Any]) -> _T:
    """Build a result from its fields; unknown fields of a newer service are ignored. Raise Garbled."""
    dataclass_fields = result_class.__dataclass_fields__
    try:
        field_values = {
            field_name: _parse_field_value(field_name, json_value)
            for field_name, json_value in json_fields.items()
            if field_name in dataclass_fields
        }
        return result_class(**field_values)
    except (TypeError, ValueError, AttributeError) as error:
        raise Garbled(f"the response does not conform to the API: {error}") from error


def source_of(source_name: str) -> Source:
    """Return the source of this name; the name itself if only a newer service knows it."""
    return _SOURCE_BY_NAME.get(source_name, source_name)  # type: ignore[arg-type]


def _parse_field_value(field_name: str, json_value: Any) -> Any:
    if field_name == "source":
        return source_of(json_value)
    if not isinstance(json_value, list):
        return json_value
    if field_name not in _ARRAY_FIELD_NAMES:
        return tuple(json_value)
    number_array = np.array(json_value, np.float32)
    number_array.setflags(write=False)
    return number_array

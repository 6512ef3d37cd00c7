"""Attachment of events to a replica: intake from requests and the inbox, and following of their stream."""

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from cache.config.serving import parse_cores
from cache.events.event_predictor import GenerationEvents
from cache.events.new_items import NewItemEvents
from cache.format.stream_position import Position
from cache.model.predictor import open_event_models
from serving.access.callers import spend_quota
from serving.engine.service import LookupService
from serving.events.counts import counts_by_field
from serving.events.follower import EventFollower, EventMetrics, NewestPosition
from serving.events.intake import EventIntake, EventParts
from serving.events.item_updates import VALUES_CHECK_INTERVAL_S, ItemUpdater, new_item_inputs
from serving.events.newer_events import NewerEvents, compute_from_events
from serving.events.reading import read_body_of_events
from serving.generations.holder import GenerationHolder
from serving.generations.snapshot import Snapshot
from serving.http import schemas
from serving.http.openapi import Operation
from serving.http.routes import read_request_body
from serving.replica.hooks import Handler, Replica
from serving.replica.namespace import HeldNamespace
from serving.requests.bodies import json_response
from serving.requests.errors import ErrorCode, Problem
from serving.requests.named_schema import ID_SCHEMA, Json, NamedSchema, list_schema, nullable_schema
from serving.requests.options import Limits
from serving.requests.parsing import pop_content, run_in_thread_if_large

log = logging.getLogger(__name__)

_ERROR_CODES: Mapping[str, ErrorCode] = {
    "events_disabled": ErrorCode(409, "This service takes no events: `[events] enabled` is false"),
    "events_full": ErrorCode(429, "The stream is full for now: try again after `Retry-After`"),
    "events_unavailable": ErrorCode(
        503,
        "The Redis of events is unreachable, refuses to write, or is less durable than `[events] durability` demands",
    ),
}

_EVENT_FIELD_SCHEMAS: Json = {
    "user": ID_SCHEMA,
    "item": ID_SCHEMA,
    "time": {
        "anyOf": [{"type": "string", "maxLength": 64}, {"type": "number", "minimum": 0}, {"type": "null"}],
        "description": "When it happened: ISO 8601 (UTC without a zone) or seconds since 1970; by default now",
    },
    "id": NamedSchema(
        "EventId",
        {
            "description": "1 to 128 bytes; an event with the id of an earlier event of its user (or item) is repeated",
            "oneOf": [
                {"type": "string", "minLength": 1, "maxLength": 128},
                {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
            ],
        },
    ),
    "type": {"type": "string", "minLength": 1, "maxLength": 64},
    "weight": {"type": "number", "description": "1 by default; with 0 or less the event is part of no history"},
    "attributes": NamedSchema(
        "Attributes",
        {
            "type": "object",
            "additionalProperties": True,
            "minProperties": 1,
            "maxProperties": 64,
            "description": "Of a user alone or an item alone: text, list of texts, number or boolean by name",
        },
    ),
    "features": schemas.FEATURES,
    "vector": list_schema({"type": "number"}, minItems=1, maxItems=8_192),
}


_NULLABLE_FIELDS = ("user", "item", "type", "weight", "attributes", "features", "vector")


_EVENT_SCHEMA = schemas.closed_object_schema(
    "Event",
    _EVENT_FIELD_SCHEMAS | {name: nullable_schema(_EVENT_FIELD_SCHEMAS[name]) for name in _NULLABLE_FIELDS},
    ("id",),
    description="Interaction of a user with an item, or attributes, features or a vector of one of them",
)


_REQUEST_SCHEMA: Json = schemas.closed_object_schema(
    "EventsRequest",
    {
        "events": list_schema(
            _EVENT_SCHEMA,
            minItems=1,
            description="At most as many as `[events] batch` allows; an invalid event is rejected by itself",
        )
    },
    ("events",),
)


_RECEIPT_SCHEMA: Json = schemas.named_object_schema(
    "EventsReceipt",
    {
        "accepted": {"type": "integer", "description": "Events that are in the stream"},
        "repeated": {"type": "integer", "description": "Events that were in the stream before"},
        "rejected": list_schema(
            schemas.named_object_schema(
                "RejectedEvent",
                {
                    "index": {"type": "integer", "description": "Index in the request, from 0"},
                    "reason": {"type": "string"},
                    "detail": {"type": "string"},
                },
                ("index", "reason", "detail"),
                description="An event that was not accepted, and why",
            )
        ),
        "durability": {
            "type": "string",
            "enum": ["always", "everysec", "none", "unknown"],
            "description": "How their Redis keeps them: on disk, on disk within a second, in memory only, or unknown",
        },
        "position": {**schemas.TEXT_OR_NULL, "description": "Position of the newest accepted event; null: none"},
    },
    ("accepted", "repeated", "rejected", "durability", "position"),
    description="Outcome of the events",
)


PROBLEM_LAG_S = 5.0
"""Lag beyond which a replica reports a problem, as the alert LarderEventsBehind does."""


@dataclass(frozen=True, slots=True)
class EventOverview:
    """Overview of one worker's events: intake, newer events, and the events of the live generation."""

    intake: EventIntake
    follower: EventFollower
    holder: GenerationHolder

    def to_json(self) -> dict[str, Any]:
        """Return the event fields of the worker's row; unknown values are left out."""
        redis, newer_events, served = (self.intake.redis, self.follower.newer_events, self.holder.served)
        write_refusal = self.intake.counts.write_refusal
        events_of_night = None if served is None else served.live.manifest.events
        return {
            **self.intake.counts.value_by_gauge,
            "durability": None if redis.found_durability is None else redis.found_durability.persistence,
            "demanded": redis.demanded_durability,
            "writes_refused": None if write_refusal is None else write_refusal.public_message,
            "lag_s": round(self.follower.lag_s(), 3),
            "users": len(newer_events.users),
            "held_bytes": newer_events.size_bytes,
            "held_max_bytes": self.follower.held_bytes_max,
            "counted_until": str(Position.from_number(newer_events.users.last_number)),
            "published_until": None if events_of_night is None else events_of_night.until,
        }

    def problem(self) -> str | None:
        """Return why events are not accepted, not counted, or lost; None if all is well."""
        redis, counts, lag_s = self.intake.redis, self.intake.counts, self.follower.lag_s()
        if counts.write_refusal is not None:
            return counts.write_refusal.public_message
        if counts.value_by_gauge.get("up") == 0.0:
            if "stream_bytes" not in counts.value_by_gauge or redis.found_durability is None:
                return "their Redis is unreachable"
            return (
                f"their Redis is less durable than demanded (found: {redis.found_durability.persistence}, demanded: "
                f"{redis.demanded_durability})"
            )
        if lag_s > PROBLEM_LAG_S:
            return f"it has not counted the newest ones for {lag_s:.0f} s"
        if (lost_since := self.follower.lost_since()) is not None:
            return (
                f"their Redis came back without events that were accepted after position {lost_since}: answers count "
                "them until the next night, which lacks them; send again what was accepted since, and see that this "
                "Redis keeps its files (appendonly yes)"
            )
        return None


def operations(_limits: Limits) -> tuple[Operation, ...]:
    """Return the operation by which events are sent."""
    return (
        Operation(
            method="post",
            path="/v1/events",
            operation_id="sendEvents",
            tag="reports",
            summary="What users do",
            description="Accepts each event once, by its id: an event that is sent again after a refusal counts once. "
            "An invalid event is rejected by itself.",
            answer_schema=_RECEIPT_SCHEMA,
            answer_example={
                "accepted": 1,
                "repeated": 0,
                "rejected": [{"index": 1, "reason": "missing_field", "detail": "item is missing"}],
                "durability": "everysec",
                "position": "1795174289000-0",
            },
            answer_status="202",
            body_schema=_REQUEST_SCHEMA,
            body_example={"events": [{"id": "e-1", "user": "u-00042", "item": "i-02618"}]},
            error_code_by_name=_ERROR_CODES,
            scope="events",
        ),
    )


def attach(replica: Replica) -> EventIntake | None:
    """Accept events and follow their stream if `[events] enabled` is true; else refuse them."""
    if not replica.config.events.enabled:
        replica.hooks.handlers["sendEvents"] = refuse_events
        return None
    config, own_namespace, hooks = replica.config, replica.own_namespace, replica.hooks
    replica.inference.compute_newer = compute_from_events
    follower = follow_events(own_namespace)
    hooks.namespace_hooks.append(follow_events)
    holder, newer_events = own_namespace.holder, follower.newer_events
    newest_position = NewestPosition(newer_events, holder, config.of_events().store())
    event_parts = EventParts.of(
        config, replica.replica_name, lambda: holder.blocklist, newest_position,
        lambda: None if holder.live is None else new_item_inputs(holder.live), replica.loops,
    )  # fmt: skip
    event_parts.add_periodic_tasks(own_namespace.refresher, config.figures_s)
    event_counts = event_parts.intake.counts
    replica.metrics.registry.register(event_counts)

    async def start_intake() -> None:
        await newest_position.load_taken_position(replica.in_thread)
        await event_parts.start()

    hooks.handlers["sendEvents"] = handler_of(replica.service, event_parts.intake)
    hooks.count_readers.append(lambda: counts_by_field(event_counts, replica.metrics.changed_answers))
    overview = EventOverview(event_parts.intake, follower, holder)
    hooks.report_by_name["events"], hooks.problem_by_name["events"] = overview.to_json, overview.problem
    hooks.start_steps.append(start_intake)
    hooks.stop_steps.append(event_parts.aclose)
    return event_parts.intake


def follow_events(namespace: HeldNamespace) -> EventFollower:
    """Make a namespace's answers count the events that are newer than its generations."""
    config, refresher, holder = namespace.config, namespace.refresher, namespace.holder
    newer_events = NewerEvents(items=NewItemEvents(config.events.new_items))
    namespace.components.ladder.newer_inputs = newer_events
    namespace.openers.append(functools.partial(open_events, namespace))
    updater = ItemUpdater(holder, newer_events, namespace.metrics)
    follower = EventFollower(
        config.events_redis_url, config.of_events().keyspace(), newer_events, holder,
        functools.partial(namespace.follower.note_concern, "events"), recheck_values=updater.recheck_values,
        held_bytes_max=config.events.stream_bytes,
    )  # fmt: skip
    refresher.add_periodic("attribute_values", VALUES_CHECK_INTERVAL_S, updater.apply_new_values)
    refresher.add_loop("events", follower.run)
    namespace.metrics.registry.register(EventMetrics(follower))
    return follower


def open_events(namespace: HeldNamespace, snapshot: Snapshot) -> Snapshot:
    """Return a snapshot with its generation's event models; it is degraded if these do not open."""
    config, seen_items, degraded = namespace.config, snapshot.seen_items, snapshot.degraded_reason
    events = None if seen_items is None else GenerationEvents.of(snapshot.manifest, config.events.namespace)
    if events is None or seen_items is None:
        if config.events.namespace:
            log.warning(
                "generation %s of namespace %s was built without the events of %s, so its answers count no events: "
                "set [events] enabled and namespace in the settings of its nights",
                snapshot.generation, config.namespace, config.events.namespace,
            )  # fmt: skip
        return snapshot
    if snapshot.predictor is not None:
        open_with_models = functools.partial(
            events.with_models, snapshot.manifest, snapshot.generation_folder, snapshot.items, seen_items,
            snapshot.predictor,
            threads=config.live_threads, cores=parse_cores(config.live_cores),
            exact_search_bytes_max=config.events.exact_bytes,
        )  # fmt: skip
        events, degraded = open_event_models(namespace.store, snapshot.manifest, open_with_models, events)
    return dataclasses.replace(snapshot.with_part(events), degraded_reason=degraded)


async def refuse_events(_request: Request, _request_started_at: float) -> object:
    """Refuse events, because this service accepts none."""
    problem_message = "this service accepts no events: set enabled = true in [events]"
    raise Problem(409, "events_disabled", problem_message)


def handler_of(service: LookupService, intake: EventIntake) -> Handler:
    """Return the handler of requests that send events."""

    async def accept(request: Request, _request_started_at: float) -> object:
        sent_events = intake.reader.extract_events(await read_events(request))
        spend_quota(request.scope, len(sent_events))
        return json_response(202, await intake.accept_events(sent_events))

    async def read_events(request: Request) -> object:
        body = await read_request_body(service, request)
        parse_body = functools.partial(pop_content, request.scope, body, "json", service.limits)
        try:
            return await run_in_thread_if_large(body, parse_body)
        except Problem as problem:
            events_max = intake.reader.config.batch
            return await asyncio.to_thread(read_body_of_events, problem, body, events_max)

    return accept

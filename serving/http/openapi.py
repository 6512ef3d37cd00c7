"""OpenAPI document of the service: its operations, declared once, and the document built from them. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from cache.formats import RELEASE
from serving.access.token_file import Scope
from serving.dashboard.document import DASHBOARD
from serving.http import schemas
from serving.requests.errors import ERROR_CODES
from serving.requests.models import Limits
from serving.requests.named_schema import Json, collected
from serving.requests.negotiation import JSON_TYPE

BEARER = "bearer"

TAGS: Mapping[str, str] = {
    "lookups": "Answers for entities, each marked with where it came from",
    "reports": "What users do, and what came of answers",
    "explanations": "Why an entity is answered as it is",
    "operation": "State of the service, for probes, dashboards and people",
}
"""Tag -> description of its group."""

_HEADER_PARAMETERS: Mapping[str, Json] = {
    "X-Deadline-Ms": {
        "type": "number",
        "exclusiveMinimum": 0,
        "description": "The tighter of this and deadline_ms",
    },
    "X-Larder-Canary-Key": {
        "type": "string",
        "description": "canary_key, where the request itself has none",
    },
    "X-Larder-Arm": {
        "type": "string",
        "pattern": schemas.OPTIONS["arm"]["pattern"],
        "description": "arm, where the request itself has none",
    },
}

_PATH_PARAMETERS: Mapping[str, Json] = {
    "table": {
        "description": "Table that is asked; /v1/generations lists them",
        "schema": {"type": "string"},
        "example": "user_topk",
    },
    "entity": {
        "description": "Id of the entity, percent-encoded; it may hold slashes",
        "schema": {"type": "string"},
        "example": "u-00042",
    },
}

_RETRY_AFTER: Json = {
    "Retry-After": {
        "description": "Seconds to wait before the next try",
        "schema": {"type": "integer", "minimum": 1},
    }
}

_OTHER_REFUSALS = (
    "Any other refusal. What is no valid HTTP, or beyond its bounds (400, 408, 431, 501, 505), "
    "gets a plain text"
)

_UNANSWERABLE = "The request cannot be answered as sent: `error.code` says why, `error.field` where"
_TOKEN_CODES = ("unauthorized", "token_expired", "scope_missing", "quota_exceeded")
_TABLE_CODES = ("unknown_table", "generation_gone", "arm_gone")
_BODY_CODES = ("disconnected", "body_timeout", "body_too_large", "unsupported_media_type")
_COMMON_CODES = ("internal_error", "not_ready", "overloaded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path, as its callers see it.

    `codes`: codes of refusals that it has besides those of its kind; `has_arrow`: body and answer may be Arrow streams.
    """

    method: str
    path: str
    operation_id: str
    tag: str
    summary: str
    description: str
    answer: Json
    example: object
    """An answer, which the schema of answers allows."""
    status: str = "200"
    body: Json | None = None
    body_example: object = None
    """A body that is answered with `status`."""
    path_names: tuple[str, ...] = ()
    has_query: bool = False
    has_options: bool = False
    has_arrow: bool = False
    codes: tuple[str, ...] = ()
    scope: Scope | None = None
    """Scope that a caller's token needs; None for a public operation."""
    statuses: Mapping[str, Json] = field(default_factory=lambda: MappingProxyType({}))
    """Answers under other statuses that are no refusals."""

    def described(self, *, has_tokens: bool) -> Json:
        """Return the operation object of OpenAPI, with named schemas in it."""
        operation: Json = {
            "operationId": self.operation_id,
            "tags": [self.tag],
            "summary": self.summary,
            "description": self.description,
            "parameters": self._parameters(),
            "responses": self._responses(has_tokens=has_tokens),
        }
        if self.body is not None:
            content = {"schema": self.body, "example": self.body_example}
            operation["requestBody"] = {"required": True, "content": {JSON_TYPE: content}}
        if self.has_arrow:
            # Two media types of one answer make its type a union, which a typed client would have to narrow.
            operation["x-larder-arrow"] = {
                "requestBody": schemas.ARROW_LOOKUP,
                "response": schemas.ARROW_ANSWERS,
            }
        if self.scope is not None and has_tokens:
            operation["security"] = [{BEARER: [self.scope]}]
        return operation

    def _parameters(self) -> list[Json]:
        parameters = [
            {"in": "path", "name": name, "required": True, **_PATH_PARAMETERS[name]}
            for name in self.path_names
        ]
        optional = [("query", schemas.QUERY)] if self.has_query else []
        optional += [("header", dict(_HEADER_PARAMETERS))] if self.has_options else []
        return parameters + [
            {
                "in": location,
                "name": name,
                "required": False,
                "description": schema["description"],
                "schema": {
                    key: keyword_value
                    for key, keyword_value in schema.items()
                    if key != "description"
                },
            }
            for location, parameter_schemas in optional
            for name, schema in parameter_schemas.items()
        ]

    def _responses(self, *, has_tokens: bool) -> Json:
        answered = {"schema": self.answer, "example": self.example}
        responses = {
            self.status: {"description": "Answered", "content": {JSON_TYPE: answered}},
            **self.statuses,
        }
        if self.scope is None:
            return responses
        meanings: dict[int, list[str]] = {}
        for code in self._codes(has_tokens=has_tokens):
            meanings.setdefault(ERROR_CODES[code].status, []).append(
                f"`{code}`: {ERROR_CODES[code].meaning}"
            )
        description_by_status = {
            str(status): "; ".join(lines) for status, lines in meanings.items()
        }
        if has_tokens:
            description_by_status["403"] += f". It needs the scope {self.scope}"
        if self.body is not None or self.has_options:
            description_by_status["422"] = _UNANSWERABLE
        refusals = {
            status: _refusal(text, status) for status, text in sorted(description_by_status.items())
        }
        return responses | refusals | {"default": _refusal(_OTHER_REFUSALS)}

    def _codes(self, *, has_tokens: bool) -> Iterable[str]:
        if has_tokens:
            yield from _TOKEN_CODES
        if self.has_options:
            yield from _TABLE_CODES
        if self.body is not None:
            yield from _BODY_CODES
        if self.has_arrow:
            yield "not_acceptable"
        yield from (*self.codes, *_COMMON_CODES)


def _refusal(description: str, status: str = "") -> Json:
    headers = {"headers": _RETRY_AFTER} if status in ("429", "503") else {}
    return {
        "description": description,
        **headers,
        "content": {JSON_TYPE: {"schema": schemas.ERROR}},
    }


def openapi_document(operations: Iterable[Operation], *, has_tokens: bool) -> Json:
    """Return the document of a service; `has_tokens`: operations with a scope need a token.

    Raises ConfigError if two different schemas have the same name.
    """
    schema_by_name: Json = {}
    paths: Json = {}
    for operation in (*operations, *PROBES):
        described = collected(operation.described(has_tokens=has_tokens), schema_by_name)
        paths.setdefault(operation.path, {})[operation.method] = described
    paths["/metrics"] = {"get": METRICS_OPERATION}
    components: Json = {"schemas": dict(sorted(schema_by_name.items()))}
    if has_tokens:
        components["securitySchemes"] = {
            BEARER: {
                "type": "http",
                "scheme": "bearer",
                "description": "A token of this service, in the header Authorization",
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Larder",
            "version": RELEASE,
            "summary": "Precomputed predictions, each marked with where it came from",
            "description": "Looks up what a model would say about an entity: from memory, from Redis, or computed "
            "live. An answer always says which, and why it is not a plain hit where it is none.",
            "contact": {"name": "Whoever runs this service"},
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/", "description": "This service"}],
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "security": [],
        "paths": paths,
        "components": components,
    }


_READINESS_EXAMPLE = {
    "ready": True,
    "stale": None,
    "degraded": None,
    "failed": None,
    "generation": "20261120T000000Z-4c279bf25f9b",
    "epoch": 1795174289000,
    "schedule": {"missing": False, "due": "2026-11-20T03:00:00Z", "age_seconds": 140.6},
}

PROBES = (
    Operation(
        method="get",
        path="/healthz",
        operation_id="getLiveness",
        tag="operation",
        summary="Does the process answer?",
        description="Answers as long as the process does, under any load, whatever Redis or the store do.",
        answer=schemas.LIVENESS,
        example={"status": "ok"},
    ),
    Operation(
        method="get",
        path="/readyz",
        operation_id="getReadiness",
        tag="operation",
        summary="May this replica be asked?",
        description="For load balancers: whether a generation is served, and why answers may lag behind.",
        answer=schemas.READINESS,
        example=_READINESS_EXAMPLE,
        statuses={
            "503": {
                "description": "Should not be asked: starting, stopping or unable to follow",
                "content": {JSON_TYPE: {"schema": schemas.READINESS}},
            }
        },
    ),
)
"""Public operations that are no handlers of a table."""

METRICS_OPERATION: Json = {
    "operationId": "getMetrics",
    "tags": ["operation"],
    "summary": "Metrics for Prometheus",
    "description": "Counters and gauges of this replica, in Prometheus' text format.",
    "responses": {
        "200": {
            "description": "Answered",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        }
    },
}

_GENERATION_EXAMPLE = "20261120T000000Z-4c279bf25f9b"
_PUBLISHED_EXAMPLE = "2026-11-20T11:31:29Z"

_ORIGIN_EXAMPLE: Json = {
    "source": "l2",
    "producer": "batch",
    "generation": _GENERATION_EXAMPLE,
    "age_seconds": 140.6,
    "published_at": _PUBLISHED_EXAMPLE,
}

_LIST_EXAMPLE: Json = {
    "id": "u-00042",
    "table": "user_topk",
    "items": ["004257", "i-02618"],
    "scores": [1.48, 0.97],
    "short": False,
    **_ORIGIN_EXAMPLE,
}

_VECTOR_EXAMPLE: Json = {
    "id": "u-00042",
    "table": "user_vector",
    "vector": [0.25, -0.5],
    **_ORIGIN_EXAMPLE,
}
_TIER_EXAMPLE: Json = {"found": True, "by": "batch"}

_EXPLANATION_EXAMPLE: Json = {
    "table": "user_topk",
    "id": "u-00042",
    "sentence": "L1 would answer: the night computed it and it was asked before",
    "generation": _GENERATION_EXAMPLE,
    "answer": {"tier": "l1", "reason": None, "live": None},
    "directory": {"known": True},
    "l1": _TIER_EXAMPLE,
    "l2": _TIER_EXAMPLE,
    "model": {"computed_from": None},
}

_GENERATIONS_EXAMPLE: Json = {
    "live": {
        "generation": _GENERATION_EXAMPLE,
        "epoch": 1795174289000,
        "published_at": _PUBLISHED_EXAMPLE,
        "data_until": 1795132800,
    },
    "previous": None,
    "next": None,
    "canary": None,
    "blocklist": {"version": 0, "items": 0, "entities": 0},
    "ready": True,
}

_ORDER_NOTE = (
    "The answers stand in the order of the entities, and are all of one generation, but for those whose `source` is "
    "`previous`."
)


def described_operations(limits: Limits) -> tuple[Operation, ...]:
    """Return the operations of a service with these limits; routes are tried in this order."""
    lookup_body = {"entities": ["u-00042", {"history": ["i-01302", "i-01128"]}], "k": 2}
    return (
        Operation(
            method="get",
            path="/v1/lookup/{table}/{entity}",
            operation_id="lookup",
            tag="lookups",
            summary="Answer for one entity of one table",
            description="Looks the entity up, and says in `source` where the answer came from. An id that nobody "
            "knows gets the defaults of a table of lists, or null with a reason: never an error.",
            answer=schemas.ANSWER,
            example=_LIST_EXAMPLE,
            path_names=("table", "entity"),
            has_query=True,
            has_options=True,
            scope="read",
        ),
        Operation(
            method="post",
            path="/v1/lookup/{table}",
            operation_id="lookupBatch",
            tag="lookups",
            summary="Answers for several entities of one table",
            description=f"Entities may bring a history or features to compute from. {_ORDER_NOTE} Body and answer may "
            "also be Arrow IPC streams, by Content-Type and Accept: see `x-larder-arrow`.",
            answer=schemas.ANSWERS,
            example={"answers": [_LIST_EXAMPLE]},
            body=schemas.lookup_body(limits),
            body_example=lookup_body,
            path_names=("table",),
            has_options=True,
            has_arrow=True,
            scope="read",
        ),
        Operation(
            method="post",
            path="/v1/lookup",
            operation_id="lookupTables",
            tag="lookups",
            summary="Answers for entities of several tables",
            description=f"Each entity names its table. {_ORDER_NOTE}",
            answer=schemas.ANSWERS,
            example={"answers": [_LIST_EXAMPLE, _VECTOR_EXAMPLE]},
            body=schemas.tables_lookup_body(limits),
            body_example={
                "entities": [
                    {"id": "u-00042", "table": "user_topk"},
                    {"id": "u-00042", "table": "user_vector"},
                ]
            },
            has_options=True,
            scope="read",
        ),
        Operation(
            method="post",
            path="/v1/score",
            operation_id="score",
            tag="lookups",
            summary="Rank order of candidates for one user",
            description="Ranks items that the caller chose by the user's stored vector, or by one computed from the "
            "history or features that are sent. Candidates that could not be ranked are named.",
            answer=schemas.RANKED_ITEMS,
            example={
                "id": "u-00042",
                "table": "user_vector",
                "items": ["i-02618", "004257"],
                "scores": [1.48, 0.97],
                "unknown": ["i-99999"],
                "blocked": [],
                "excluded": [],
                **_ORIGIN_EXAMPLE,
            },
            body=schemas.score_body(limits),
            body_example={"user": "u-00042", "items": ["004257", "i-02618", "i-99999"]},
            has_options=True,
            scope="score",
        ),
        Operation(
            method="post",
            path="/v1/feedback",
            operation_id="sendFeedback",
            tag="reports",
            summary="What came of answers",
            description="Counts an event, such as a click, for the generation or the arm that answered. Send "
            "one of generation, canary_key and arm.",
            answer=schemas.FEEDBACK_RECEIPT,
            example={"arm": None},
            body=schemas.FEEDBACK_BODY,
            body_example={"event": "click", "generation": _GENERATION_EXAMPLE},
            scope="feedback",
        ),
        Operation(
            method="post",
            path="/v1/events",
            operation_id="sendEvents",
            tag="reports",
            summary="What users do",
            description="Accepts each event once, under its id: sent again after any refusal it counts once. An event "
            "that cannot be accepted is rejected beside the others.",
            answer=schemas.EVENTS_RECEIPT,
            example={
                "accepted": 1,
                "repeated": 0,
                "rejected": [{"index": 1, "reason": "missing_field", "detail": "item is missing"}],
                "durability": "everysec",
                "position": "1795174289000-0",
            },
            status="202",
            body=schemas.EVENTS_BODY,
            body_example={"events": [{"id": "e-1", "user": "u-00042", "item": "i-02618"}]},
            codes=("events_disabled", "events_full", "events_unavailable"),
            scope="events",
        ),
        Operation(
            method="get",
            path="/v1/explain/{table}/{entity}",
            operation_id="explain",
            tag="explanations",
            summary="Why an entity is answered as it is",
            description="Says which rung would answer, what each holds, and what the model says now. Nothing is "
            "changed by asking.",
            answer=schemas.EXPLANATION,
            example=_EXPLANATION_EXAMPLE,
            path_names=("table", "entity"),
            has_query=True,
            has_options=True,
            scope="explain",
        ),
        Operation(
            method="post",
            path="/v1/explain/{table}",
            operation_id="explainInput",
            tag="explanations",
            summary="Why an entity with an input is answered as it is",
            description="The same for one entity with a history or features.",
            answer=schemas.EXPLANATION,
            example=_EXPLANATION_EXAMPLE,
            body=schemas.lookup_body(limits, 1),
            body_example={"entities": [{"id": "u-00042", "history": ["i-01302"]}]},
            path_names=("table",),
            has_options=True,
            scope="explain",
        ),
        Operation(
            method="get",
            path="/v1/generations",
            operation_id="getGenerations",
            tag="operation",
            summary="What this replica serves from",
            description="The generations that are held, their tables and models, and how far this replica can be "
            "trusted.",
            answer=schemas.GENERATIONS,
            example=_GENERATIONS_EXAMPLE,
            scope="read",
        ),
        Operation(
            method="get",
            path="/dashboard/data",
            operation_id="getDashboard",
            tag="operation",
            summary="Numbers of the dashboard",
            description="What all workers and replicas count, over the last hour.",
            answer=DASHBOARD,
            example={
                "now": 1795174289.5,
                "whole": True,
                "trouble": None,
                "verdict": {"level": "ok", "sentence": "All is well.", "advice": None, "also": []},
            },
            codes=("dashboard_off",),
            scope="admin",
        ),
    )

"""OpenAPI document of the service: its operations, declared once, and the document built from them. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from cache.formats import THIS_RELEASE
from serving.access.token_file import Scope
from serving.http import schemas
from serving.requests.errors import ERROR_CODES, ErrorCode
from serving.requests.named_schema import Json, collect_named_schemas
from serving.requests.negotiation import JSON_MEDIA_TYPE
from serving.requests.options import REQUEST_OPTIONS, Limits

BEARER_SCHEME = "bearer"

_API_PREFIX = "/v1/"

DESCRIPTION_BY_TAG: Mapping[str, str] = {
    "lookups": "Answers for entities, each marked with where it came from",
    "reports": "Interactions of users, and feedback on answers",
    "explanations": "Why an entity is answered as it is",
    "operation": "State of the service, for probes, dashboards and people",
}
"""Description by tag."""

_HEADER_PARAMETERS: Mapping[str, Json] = {
    "X-Deadline-Ms": {"type": "number", "exclusiveMinimum": 0, "description": "The tighter of this and deadline_ms"},
    "X-Larder-Canary-Key": {"type": "string", "description": "canary_key, if the request itself has none"},
    "X-Larder-Arm": {
        "type": "string",
        "pattern": REQUEST_OPTIONS["arm"].schema["pattern"],
        "description": "arm, if the request itself has none",
    },
}

_ARM_PARAMETERS = frozenset({"arm", "X-Larder-Arm"})

_PATH_PARAMETERS: Mapping[str, Json] = {
    "table": {
        "description": "Name of the table; /v1/generations lists all tables",
        "schema": {"type": "string"},
        "example": "user_topk",
    },
    "entity": {
        "description": "Id of the entity, percent-encoded; it may hold slashes",
        "schema": {"type": "string"},
        "example": "u-00042",
    },
}

_RETRY_AFTER_HEADER: Json = {
    "Retry-After": {"description": "Seconds to wait before a retry", "schema": {"type": "integer", "minimum": 1}}
}

_OTHER_REFUSALS_TEXT = (
    "Any other refusal. Invalid HTTP, or HTTP beyond its bounds (400, 408, 431, 501, 505), gets a plain text"
)

_UNANSWERABLE_TEXT = "The request cannot be answered as sent: `error.code` is the reason, `error.field` the place"
_TOKEN_CODES = ("unauthorized", "token_expired", "scope_missing", "quota_exceeded")
_TABLE_CODES = ("unknown_table", "generation_gone")
_BODY_CODES = (
    "disconnected",
    "body_timeout",
    "body_too_large",
    "unsupported_media_type",
    "unsupported_content_encoding",
)
_COMMON_CODES = ("internal_error", "not_ready", "overloaded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Operation of the API: one method of one path.

    `error_code_by_name`: refusal codes in addition to those of its kind; `has_arrow`: body and answer may be Arrow
    streams. `is_limited`: subject to admission, like all paths with its prefix; `is_counted`: `/metrics` counts it.
    """

    method: str
    path: str
    operation_id: str
    tag: str
    summary: str
    description: str
    answer_schema: Json
    answer_example: object
    """Example of an answer, valid by the schema."""
    answer_status: str = "200"
    body_schema: Json | None = None
    body_example: object = None
    """Example of a body that is answered with `answer_status`."""
    path_parameter_names: tuple[str, ...] = ()
    has_query: bool = False
    has_options: bool = False
    may_name_arm: bool = True
    """False: it takes the options of a lookup, and refuses one that names an arm of an experiment."""
    has_arrow: bool = False
    error_code_by_name: Mapping[str, ErrorCode] = field(default_factory=lambda: MappingProxyType({}))
    is_limited: bool = False
    is_counted: bool = True
    scope: Scope | None = None
    """Scope that a caller's token needs; None for a public operation."""
    other_answer_by_status: Mapping[str, Json] = field(default_factory=lambda: MappingProxyType({}))
    """Answers with other statuses that are not refusals."""

    @property
    def fixed_path(self) -> str:
        """Return the path up to its first parameter."""
        return self.path.partition("{")[0]

    def described(self, problem_schema: Json, *, has_tokens: bool) -> Json:
        """Return the OpenAPI operation object with named schemas; `problem_schema` is the schema of refusals."""
        operation: Json = {
            "operationId": self.operation_id,
            "tags": [self.tag],
            "summary": self.summary,
            "description": self.description,
            "parameters": self._parameters(),
            "responses": self._responses(problem_schema, has_tokens=has_tokens),
        }
        if self.body_schema is not None:
            content = {"schema": self.body_schema, "example": self.body_example}
            operation["requestBody"] = {"required": True, "content": {JSON_MEDIA_TYPE: content}}
        if self.has_arrow:
            # Not declared as a second media type: typed clients would get a union type to narrow.
            operation["x-larder-arrow"] = {"requestBody": schemas.ARROW_LOOKUP, "response": schemas.ARROW_ANSWERS}
        if self.scope is not None and has_tokens:
            operation["security"] = [{BEARER_SCHEME: [self.scope]}]
        return operation

    def _parameters(self) -> list[Json]:
        parameters = [
            {"in": "path", "name": parameter_name, "required": True, **_PATH_PARAMETERS[parameter_name]}
            for parameter_name in self.path_parameter_names
        ]
        optional_parameters = [("query", schemas.QUERY_OPTION_SCHEMAS)] if self.has_query else []
        optional_parameters += [("header", dict(_HEADER_PARAMETERS))] if self.has_options else []
        return parameters + [
            {
                "in": location,
                "name": parameter_name,
                "required": False,
                "description": schema["description"],
                "schema": {key: keyword_value for key, keyword_value in schema.items() if key != "description"},
            }
            for location, parameter_schemas in optional_parameters
            for parameter_name, schema in parameter_schemas.items()
            if self.may_name_arm or parameter_name not in _ARM_PARAMETERS
        ]

    def _responses(self, problem_schema: Json, *, has_tokens: bool) -> Json:
        answer_content = {"schema": self.answer_schema, "example": self.answer_example}
        responses = {
            self.answer_status: {"description": "Answered", "content": {JSON_MEDIA_TYPE: answer_content}},
            **self.other_answer_by_status,
        }
        if self.scope is None:
            return responses
        texts_by_status: dict[int, list[str]] = {}
        code_by_name = {**ERROR_CODES, **self.error_code_by_name}
        for code in self._refusal_codes(has_tokens=has_tokens):
            error = code_by_name[code]
            texts_by_status.setdefault(error.http_status, []).append(f"`{code}`: {error.meaning}")
        description_by_status = {str(status): "; ".join(lines) for status, lines in texts_by_status.items()}
        if has_tokens:
            description_by_status["403"] += f". It needs the scope {self.scope}"
        if self.body_schema is not None or self.has_options:
            description_by_status["422"] = _UNANSWERABLE_TEXT
        refusals = {
            status: _refusal_response(problem_schema, status_description, status)
            for status, status_description in sorted(description_by_status.items())
        }
        return responses | refusals | {"default": _refusal_response(problem_schema, _OTHER_REFUSALS_TEXT)}

    def _refusal_codes(self, *, has_tokens: bool) -> Iterable[str]:
        if has_tokens:
            yield from _TOKEN_CODES
        if self.has_options:
            yield from _TABLE_CODES
            if self.may_name_arm:
                yield "arm_gone"
        if self.body_schema is not None:
            yield from _BODY_CODES
        if self.has_arrow:
            yield "not_acceptable"
        yield from (*self.error_code_by_name, *_COMMON_CODES)


def _refusal_response(problem_schema: Json, description: str, http_status: str = "") -> Json:
    headers = {"headers": _RETRY_AFTER_HEADER} if http_status in ("429", "503") else {}
    return {"description": description, **headers, "content": {JSON_MEDIA_TYPE: {"schema": problem_schema}}}


class ApiPaths(NamedTuple):
    """Prefixes of paths, by the checks that their requests pass before routing."""

    scoped_prefixes: tuple[str, ...]
    """Prefixes of paths that require a scope; callers are identified only for these paths."""
    limited_prefixes: tuple[str, ...]
    """Prefixes of the paths whose requests admission limits."""
    single_entity_prefixes: tuple[str, ...]
    """Prefixes of the GET paths that name a single entity."""

    @classmethod
    def of(cls, operations: Iterable[Operation]) -> "ApiPaths":
        """Return the distinct prefixes of these operations' paths."""
        scoped_prefixes, limited_prefixes, single_entity_prefixes = (
            {_API_PREFIX: None},
            dict[str, None](),
            dict[str, None](),
        )
        for operation in operations:
            if operation.scope is not None and not operation.path.startswith(_API_PREFIX):
                scoped_prefixes[operation.fixed_path] = None
            if operation.is_limited:
                limited_prefixes[operation.fixed_path.rstrip("/")] = None
            if operation.method == "get" and "entity" in operation.path_parameter_names:
                single_entity_prefixes[operation.fixed_path] = None
        return cls(tuple(scoped_prefixes), tuple(limited_prefixes), tuple(single_entity_prefixes))


def sorted_by_tag(operations: Iterable[Operation]) -> list[Operation]:
    """Return the operations in the order of their tags in TAGS."""
    tags = list(DESCRIPTION_BY_TAG)
    return sorted(operations, key=lambda operation: tags.index(operation.tag))


def refusal_codes(operations: Iterable[Operation]) -> Mapping[str, ErrorCode]:
    """Return all error codes of a service with these operations, by status."""
    operation_codes = {
        code_name: code for operation in operations for code_name, code in operation.error_code_by_name.items()
    }
    codes = {**ERROR_CODES, **operation_codes}
    return dict(sorted(codes.items(), key=lambda named_code: named_code[1].http_status))


def openapi_document(operations: Sequence[Operation], *, has_tokens: bool) -> Json:
    """Return the document of a service; `has_tokens`: operations with a scope need a token.

    Operations are in the order of their tags in TAGS. Raises ConfigError if two different schemas have the same name.
    """
    schema_by_name: Json = {}
    path_items: Json = {}
    problem_schema = schemas.problem_schema(refusal_codes(operations))
    for operation in (*sorted_by_tag(operations), *PROBES):
        operation_object = collect_named_schemas(
            operation.described(problem_schema, has_tokens=has_tokens), schema_by_name
        )
        path_items.setdefault(operation.path, {})[operation.method] = operation_object
    path_items["/metrics"] = {"get": METRICS_OPERATION}
    components: Json = {"schemas": dict(sorted(schema_by_name.items()))}
    if has_tokens:
        components["securitySchemes"] = {
            BEARER_SCHEME: {
                "type": "http",
                "scheme": "bearer",
                "description": "A token of this service, in the header Authorization",
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Larder",
            "version": THIS_RELEASE,
            "summary": "Precomputed predictions, each marked with where it came from",
            "description": "Looks up a model's prediction for an entity: from memory, from Redis, or computed live. An "
            "answer names its source, and the reason if it is not a plain hit.",
            "contact": {"name": "The operator of this service"},
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/", "description": "This service"}],
        "tags": [
            {"name": tag, "description": tag_description}
            for tag, tag_description in DESCRIPTION_BY_TAG.items()
            if any(operation.tag == tag for operation in (*operations, *PROBES))
        ],
        "security": [],
        "paths": path_items,
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
        description="Answers as long as the process runs, under any load, whatever the state of Redis or the store.",
        answer_schema=schemas.LIVENESS,
        answer_example={"status": "ok"},
    ),
    Operation(
        method="get",
        path="/readyz",
        operation_id="getReadiness",
        tag="operation",
        summary="Is this replica ready?",
        description="For load balancers: whether this replica serves a generation, and why its answers may lag behind.",
        answer_schema=schemas.READINESS,
        answer_example=_READINESS_EXAMPLE,
        other_answer_by_status={
            "503": {
                "description": "Not ready: starting, stopping, or unable to follow",
                "content": {JSON_MEDIA_TYPE: {"schema": schemas.READINESS}},
            }
        },
    ),
)
"""Public operations for probes and scrapers."""

METRICS_OPERATION: Json = {
    "operationId": "getMetrics",
    "tags": ["operation"],
    "summary": "Metrics for Prometheus",
    "description": "Counters and gauges of this replica, in Prometheus' text format.",
    "responses": {"200": {"description": "Answered", "content": {"text/plain": {"schema": {"type": "string"}}}}},
}

GENERATION_EXAMPLE = "20261120T000000Z-4c279bf25f9b"
_PUBLISHED_EXAMPLE = "2026-11-20T11:31:29Z"

_ORIGIN_EXAMPLE: Json = {
    "source": "l2",
    "producer": "batch",
    "generation": GENERATION_EXAMPLE,
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

_VECTOR_EXAMPLE: Json = {"id": "u-00042", "table": "user_vector", "vector": [0.25, -0.5], **_ORIGIN_EXAMPLE}
_GENERATIONS_EXAMPLE: Json = {
    "live": {
        "generation": GENERATION_EXAMPLE,
        "epoch": 1795174289000,
        "published_at": _PUBLISHED_EXAMPLE,
        "data_until": 1795132800,
        "entities": {"user": 4096, "item": 1024},
        "tables": {"user_topk": {"kind": "topk", "entity": "user", "width": 200, "producer": "topk", "labels": None}},
        "models": {
            "user_tower": {
                "digest": "7d0a8468ed220400c0b8e6f335baa7e070ce880a37e2ac5995b9a97b809026de",
                "precision": "int8",
                "provider": "CPUExecutionProvider",
                "fp32_bytes": 270336,
                "int8_bytes": 69632,
                "agreement": {"overlap_at_20": 0.998},
            }
        },
        "indexes": {"items": {"kind": "flat", "recall": 1.0, "size_bytes": 131072}},
    },
    "previous": None,
    "next": None,
    "canary": None,
    "blocklist": {"version": 0, "items": 0, "entities": 0},
    "ready": True,
}

_ORDER_NOTE = (
    "The answers are in the order of the entities, and all are from one generation, except those whose `source` is "
    "`previous`."
)


def core_operations(limits: Limits) -> tuple[Operation, ...]:
    """Return the operations of a service without features, with these limits."""
    lookup_body = {"entities": ["u-00042", {"history": ["i-01302", "i-01128"]}], "k": 2}
    return (
        Operation(
            method="get",
            path="/v1/lookup/{table}/{entity}",
            operation_id="lookup",
            tag="lookups",
            summary="Answer for one entity of one table",
            description="Looks the entity up; `source` says where the answer came from. An unknown id gets the "
            "defaults of a table of lists, or null with a reason, but never an error.",
            answer_schema=schemas.ANSWER,
            answer_example=_LIST_EXAMPLE,
            path_parameter_names=("table", "entity"),
            has_query=True,
            has_options=True,
            is_limited=True,
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
            answer_schema=schemas.ANSWERS,
            answer_example={"answers": [_LIST_EXAMPLE]},
            body_schema=schemas.lookup_body_schema(limits),
            body_example=lookup_body,
            path_parameter_names=("table",),
            has_options=True,
            has_arrow=True,
            is_limited=True,
            scope="read",
        ),
        Operation(
            method="post",
            path="/v1/lookup",
            operation_id="lookupTables",
            tag="lookups",
            summary="Answers for entities of several tables",
            description=f"Each entity names its table. {_ORDER_NOTE}",
            answer_schema=schemas.ANSWERS,
            answer_example={"answers": [_LIST_EXAMPLE, _VECTOR_EXAMPLE]},
            body_schema=schemas.tables_lookup_body(limits),
            body_example={
                "entities": [{"id": "u-00042", "table": "user_topk"}, {"id": "u-00042", "table": "user_vector"}]
            },
            has_options=True,
            is_limited=True,
            scope="read",
        ),
        Operation(
            method="post",
            path="/v1/score",
            operation_id="score",
            tag="lookups",
            summary="Ranking of candidates for one user",
            description="Ranks items chosen by the caller by the user's stored vector, or by one computed from the "
            "sent history or features. Candidates that could not be ranked are listed.",
            answer_schema=schemas.RANKED_ITEMS,
            answer_example={
                "id": "u-00042",
                "table": "user_vector",
                "items": ["i-02618", "004257"],
                "scores": [1.48, 0.97],
                "unknown": ["i-99999"],
                "blocked": [],
                "excluded": [],
                **_ORIGIN_EXAMPLE,
            },
            body_schema=schemas.score_body(limits),
            body_example={"user": "u-00042", "items": ["004257", "i-02618", "i-99999"]},
            has_options=True,
            is_limited=True,
            scope="score",
        ),
        Operation(
            method="get",
            path="/v1/generations",
            operation_id="getGenerations",
            tag="operation",
            summary="Generations of this replica",
            description="Held generations with their tables and models, and reasons why answers may lag behind.",
            answer_schema=schemas.GENERATIONS,
            answer_example=_GENERATIONS_EXAMPLE,
            scope="read",
        ),
    )

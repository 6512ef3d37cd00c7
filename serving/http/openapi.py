"""OpenAPI document of the service: its operations, built from their declarations. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from cache.formats import RELEASE
from serving.access.scopes import Scope
from serving.answers.named_schema import Json, collected
from serving.http.answer_schema import ARROW_ANSWERS, ERROR, HEALTH, LIVENESS
from serving.http.json_schema import ARROW_LOOKUP, OPTIONS, QUERY
from serving.requests.error_codes import CODES

BEARER = "bearer"
JSON_TYPE = "application/json"
TAGS: Mapping[str, str] = {
    "lookups": "Answers for entities, each marked with where it came from",
    "reports": "What users do, and what came of answers",
    "explanations": "Why an entity is answered as it is",
    "operation": "State of the service, for probes, dashboards and people",
}
"""Tag -> description of its group."""

_HEADERS: Mapping[str, Json] = {
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
        "pattern": OPTIONS["arm"]["pattern"],
        "description": "arm, where the request itself has none",
    },
}
_PATH: Mapping[str, Json] = {
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
_REFUSED = "Any other refusal. What is no valid HTTP, or beyond its bounds (400, 408, 431, 501, 505), gets a plain text"
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
    """Scope that a caller's token needs; None where anybody may ask."""
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
            operation["x-larder-arrow"] = {"requestBody": ARROW_LOOKUP, "response": ARROW_ANSWERS}
        if self.scope is not None and has_tokens:
            operation["security"] = [{BEARER: [self.scope]}]
        return operation

    def _parameters(self) -> list[Json]:
        parameters = [
            {"in": "path", "name": name, "required": True, **_PATH[name]}
            for name in self.path_names
        ]
        optional = [("query", QUERY)] if self.has_query else []
        optional += [("header", dict(_HEADERS))] if self.has_options else []
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
            for location, schemas in optional
            for name, schema in schemas.items()
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
            meanings.setdefault(CODES[code].status, []).append(f"`{code}`: {CODES[code].meaning}")
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
        return responses | refusals | {"default": _refusal(_REFUSED)}

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
        "content": {JSON_TYPE: {"schema": ERROR}},
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
        answer=LIVENESS,
        example={"status": "ok"},
    ),
    Operation(
        method="get",
        path="/readyz",
        operation_id="getReadiness",
        tag="operation",
        summary="May this replica be asked?",
        description="For load balancers: whether a generation is served, and why answers may lag behind.",
        answer=HEALTH,
        example=_READINESS_EXAMPLE,
        statuses={
            "503": {
                "description": "Should not be asked: starting, stopping or unable to follow",
                "content": {JSON_TYPE: {"schema": HEALTH}},
            }
        },
    ),
)
"""Operations that anybody may call and that are no handlers of a table."""
METRICS: Json = {
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


def document(operations: Iterable[Operation], *, has_tokens: bool) -> Json:
    """Return the document of a service; `has_tokens`: callers of what has a scope send a token.

    Raises ConfigError where two different schemas have one name.
    """
    schemas: Json = {}
    paths: Json = {}
    for operation in (*operations, *PROBES):
        described = collected(operation.described(has_tokens=has_tokens), schemas)
        paths.setdefault(operation.path, {})[operation.method] = described
    paths["/metrics"] = {"get": METRICS}
    components: Json = {"schemas": dict(sorted(schemas.items()))}
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

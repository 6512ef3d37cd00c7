"""OpenAPI description of a route: parameters, body, responses. Pure."""

from collections.abc import Mapping
from types import MappingProxyType

from serving.access.scopes import Scope
from serving.http.answer_schema import ARROW_ANSWERS, ERROR, HEALTH
from serving.http.json_schema import ARROW_LOOKUP, OPTIONS, Json

BEARER = "bearer"
_QUERY: Json = {
    **{name: OPTIONS[name] for name in OPTIONS if name != "exclude"},
    "filter": {"type": "string", "description": OPTIONS["filter"]["description"]},
    "rerank": {"type": "string", "description": OPTIONS["rerank"]["description"]},
}
_HEADERS: list[tuple[str, str, Json]] = [
    (
        "header",
        "X-Deadline-Ms",
        {
            "type": "number",
            "exclusiveMinimum": 0,
            "description": "The tighter of this and deadline_ms",
        },
    ),
    (
        "header",
        "X-Larder-Canary-Key",
        {"type": "string", "description": "canary_key, where the request itself has none"},
    ),
    (
        "header",
        "X-Larder-Arm",
        {
            "type": "string",
            "pattern": OPTIONS["arm"]["pattern"],
            "description": "arm, where the request itself has none",
        },
    ),
]


def _response(description: str, schema: Json, **others: Json) -> Json:
    content = {"application/json": {"schema": schema}}
    return {"description": description, "content": content | others}


READYZ: Json = {
    "responses": {
        "200": _response("May be asked", HEALTH),
        "503": _response("Should not be asked: starting, stopping or unable to follow", HEALTH),
    }
}


EVENT_CODES = {
    "409": "events_disabled: `[events] enabled` is false here",
    "429": "events_full: the stream takes no more for now; come again after Retry-After",
    "503": "events_unavailable: their Redis cannot be reached, or keeps less than `[events] durability` demands; "
    "overloaded: too many wait. Send them again, under the same ids",
}
"""Meaning by status of what POST /v1/events answers besides what any route does."""


def described(
    answer: Json,
    *,
    body: Json | None = None,
    path_names: tuple[str, ...] = (),
    query: bool = False,
    has_options: bool = True,
    has_arrow: bool = False,
    needs: Scope | None = None,
    status: str = "200",
    codes: Mapping[str, str] = MappingProxyType({}),
) -> Json:
    """`openapi_extra` of a route; `has_arrow`: its body and its answer may be Arrow IPC streams.

    `needs`: the scope that it needs, where callers have tokens. `status`: that of its answer; `codes`: meanings of
    statuses that it alone has.
    """
    string: Json = {"type": "string"}
    parameters = [("path", name, string) for name in path_names]
    parameters += [("query", name, _QUERY[name]) for name in _QUERY if query]
    parameters += _HEADERS if has_options else []
    common: dict[str, str] = {}
    if needs is not None:
        common |= {
            "401": "unauthorized: no token, or nobody's; token_expired",
            "403": f"scope_missing: it needs the scope {needs}",
            "429": "quota_exceeded: come again after Retry-After; `quota` says which",
        }
    if has_options:
        common |= {"404": "no such table", "409": "generation_gone; arm_gone"}
    if has_options or body is not None:
        common |= {"422": "cannot be answered as sent"}
    if body is not None:
        common |= {"408": "body_timeout: it did not arrive", "413": "too large"}
    if has_arrow:
        common |= {"406": "no such form of an answer", "415": "no such form of a body"}
    common |= {"503": "not_ready: nothing loaded yet; overloaded: come again after Retry-After"}
    told = common | {
        code: f"{common[code]}; {why}" if code in common else why for code, why in codes.items()
    }
    extra: Json = {
        "parameters": [
            {"in": where, "name": name, "schema": schema, "required": where == "path"}
            for where, name, schema in parameters
        ],
        "responses": {
            status: _response("Answered", answer, **(ARROW_ANSWERS if has_arrow else {})),
            **{code: _response(why, ERROR) for code, why in sorted(told.items())},
        },
    }
    if body is not None:
        content = {"application/json": {"schema": body}} | (ARROW_LOOKUP if has_arrow else {})
        extra["requestBody"] = {"required": True, "content": content}
    if needs is not None:
        extra["security"] = [{BEARER: [needs]}]
    return extra

"""OpenAPI description of a route: parameters, body, responses. Pure."""

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


def described(
    answer: Json,
    *,
    body: Json | None = None,
    path_names: tuple[str, ...] = (),
    query: bool = False,
    has_options: bool = True,
    has_arrow: bool = False,
    needs: Scope | None = None,
) -> Json:
    """`openapi_extra` of a route; `has_arrow`: its body and its answer may be Arrow IPC streams.

    `needs`: the scope that it needs, where callers have tokens.
    """
    string: Json = {"type": "string"}
    parameters = [("path", name, string) for name in path_names]
    parameters += [("query", name, _QUERY[name]) for name in _QUERY if query]
    parameters += _HEADERS if has_options else []
    codes: dict[str, str] = {}
    if needs is not None:
        codes |= {
            "401": "unauthorized: no token, or nobody's; token_expired",
            "403": f"scope_missing: it needs the scope {needs}",
            "429": "quota_exceeded: come again after Retry-After; `quota` says which",
        }
    if has_options:
        codes |= {"404": "no such table", "409": "generation_gone; arm_gone"}
    if has_options or body is not None:
        codes |= {"422": "cannot be answered as sent"}
    if body is not None:
        codes |= {"408": "body_timeout: it did not arrive", "413": "too large"}
    if has_arrow:
        codes |= {"406": "no such form of an answer", "415": "no such form of a body"}
    codes |= {"503": "not_ready: nothing loaded yet; overloaded: come again after Retry-After"}
    extra: Json = {
        "parameters": [
            {"in": where, "name": name, "schema": schema, "required": where == "path"}
            for where, name, schema in parameters
        ],
        "responses": {
            "200": _response("Answered", answer, **(ARROW_ANSWERS if has_arrow else {})),
            **{code: _response(why, ERROR) for code, why in sorted(codes.items())},
        },
    }
    if body is not None:
        content = {"application/json": {"schema": body}} | (ARROW_LOOKUP if has_arrow else {})
        extra["requestBody"] = {"required": True, "content": content}
    if needs is not None:
        extra["security"] = [{BEARER: [needs]}]
    return extra

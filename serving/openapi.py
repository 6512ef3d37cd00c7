"""How a route is described in OpenAPI: parameters, body, responses. Pure."""

from serving.schema import ERROR, HEALTH, OPTIONS, Json

BEARER = "bearer"
_QUERY: Json = {name: OPTIONS[name] for name in OPTIONS if name != "exclude"}
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
]


def _response(description: str, schema: Json) -> Json:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


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
    path: tuple[str, ...] = (),
    query: bool = False,
    has_options: bool = True,
    has_token: bool = False,
) -> Json:
    """`openapi_extra` of a route."""
    string: Json = {"type": "string"}
    parameters = [("path", name, string) for name in path]
    parameters += [("query", name, _QUERY[name]) for name in _QUERY if query]
    parameters += _HEADERS if has_options else []
    codes = {"401": "no token"} if has_token else {}
    if has_options:
        codes |= {"404": "no such table", "409": "generation_gone"}
    if has_options or body is not None:
        codes |= {"422": "cannot be answered as sent"}
    if body is not None:
        codes |= {"413": "too large"}
    codes |= {"503": "nothing loaded yet"}
    extra: Json = {
        "parameters": [
            {"in": where, "name": name, "schema": schema, "required": where == "path"}
            for where, name, schema in parameters
        ],
        "responses": {
            "200": _response("Answered", answer),
            **{code: _response(why, ERROR) for code, why in sorted(codes.items())},
        },
    }
    if body is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if has_token:
        extra["security"] = [{BEARER: []}]
    return extra

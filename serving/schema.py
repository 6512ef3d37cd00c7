"""What OpenAPI says about the hot routes, which parse by hand. Pure data."""

from typing import Any

Json = dict[str, Any]


def _object(properties: Json, required: tuple[str, ...] = (), **more: object) -> Json:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def _list(of: Json, **more: object) -> Json:
    return {"type": "array", "items": of, **more}


ID: Json = {
    "description": "1 to 256 bytes of UTF-8; an integer becomes its decimal form",
    "oneOf": [{"type": "string"}, {"type": "integer"}],
}
FEATURES: Json = {
    "type": "object",
    "description": "Feature columns by name: string, number, boolean or a list of numbers",
    "additionalProperties": True,
}
INPUT: Json = {
    "id": ID,
    "history": _list(ID, description="Item ids, oldest first; excluded from the answer"),
    "features": FEATURES,
}
OPTIONS: Json = {
    "k": {"type": "integer", "minimum": 1, "description": "Items per top-K answer; all by default"},
    "exclude": _list(ID, description="Item ids that must not appear"),
    "deadline_ms": {"type": "number", "exclusiveMinimum": 0},
    "fresh": {
        "type": "boolean",
        "description": "Compute from the input though a stored answer exists",
    },
    "max_age_seconds": {"type": "number", "minimum": 0},
    "generation": {"type": "string", "description": "Answer from this generation, or 409"},
}
LOOKUP: Json = _object(
    {"entities": _list({"oneOf": [ID, _object(INPUT)]}, minItems=1, maxItems=1000), **OPTIONS},
    ("entities",),
    additionalProperties=False,
)
LOOKUP_MANY: Json = _object(
    {
        "entities": _list(
            _object({"table": {"type": "string"}, **INPUT}, ("table",)), minItems=1, maxItems=1000
        ),
        **OPTIONS,
    },
    ("entities",),
    additionalProperties=False,
)
SCORE: Json = _object(
    {
        "user": {"oneOf": [ID, _object(INPUT)]},
        "items": _list(ID, minItems=1, maxItems=1000),
        **{name: each for name, each in OPTIONS.items() if name != "exclude"},
    },
    ("user", "items"),
    additionalProperties=False,
)
_ORIGIN: Json = {
    "id": {"type": ["string", "null"]},
    "table": {"type": "string"},
    "source": {"enum": ["l1", "l2", "live", "previous", "default"]},
    "producer": {"enum": ["batch", "live", "defaults", None]},
    "generation": {"type": "string"},
    "age_seconds": {"type": "number", "description": "Now minus the generation's data_until"},
    "published_at": {"type": "string", "format": "date-time"},
    "reason": {"type": "string", "description": "Why this is not a plain hit"},
    "live": {"type": "string", "description": "Why live did not answer although it was asked"},
    "dropped_history": {"type": "integer", "description": "History ids the model does not know"},
    "stale": {"type": "string", "description": "Why this replica may lag behind"},
}
_NUMBERS: Json = {"type": ["array", "null"], "items": {"type": "number"}}
ANSWER: Json = _object(
    {
        **_ORIGIN,
        "items": _list({"type": "string"}),
        "scores": _list({"type": "number"}),
        "short": {"type": "boolean", "description": "Fewer than k remain"},
        "vector": _NUMBERS,
        "values": _NUMBERS,
        "labels": _list({"type": "string"}),
    },
    ("id", "table", "source", "generation"),
)
ANSWERS: Json = _object({"answers": _list(ANSWER)}, ("answers",))
SCORES: Json = _object(
    {
        **_ORIGIN,
        "items": _list({"type": "string"}),
        "scores": _list({"type": "number"}),
        **{
            name: _list({"type": "string"})
            for name in ("unknown", "blocked", "excluded", "unscored")
        },
    }
)
ERROR: Json = _object(
    {
        "error": _object(
            {
                "code": {"type": "string"},
                "message": {"type": "string"},
                "field": {"type": "string"},
            },
            ("code", "message"),
            additionalProperties=True,
        )
    }
)
_QUERY: Json = {name: OPTIONS[name] for name in OPTIONS if name != "exclude"}


def described(answer: Json, *, body: Json | None = None, path: tuple[str, ...] = ()) -> Json:
    """`openapi_extra` of a route."""
    query = [] if body is not None else [("query", name, _QUERY[name]) for name in _QUERY]
    parameters = [("path", name, {"type": "string"}) for name in path] + query
    codes = {
        "401": "no token",
        "404": "no such table",
        "409": "generation_gone",
        "413": "too large",
    }
    codes |= {"422": "cannot be answered as sent", "503": "nothing loaded yet"}
    extra: Json = {
        "parameters": [
            {"in": where, "name": name, "schema": schema, "required": where == "path"}
            for where, name, schema in parameters
        ],
        "responses": {
            "200": {"description": "Answered", "content": {"application/json": {"schema": answer}}},
            **{
                code: {"description": why, "content": {"application/json": {"schema": ERROR}}}
                for code, why in codes.items()
            },
        },
    }
    if body is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return extra

"""OpenAPI schemas of the routes, which parse by hand. Pure data."""

from typing import Any

from serving.arrow_ipc.schema import MEDIA_TYPE
from serving.requests.models import Limits

Json = dict[str, Any]


def _object(properties: Json, required: tuple[str, ...] = (), **more: object) -> Json:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def _closed(properties: Json, required: tuple[str, ...] = ()) -> Json:
    """An object whose unknown fields are refused."""
    return _object(properties, required, additionalProperties=False)


def _list(of: Json, **more: object) -> Json:
    return {"type": "array", "items": of, **more}


ID: Json = {
    "description": "1 to 256 bytes of UTF-8; an integer becomes its decimal form",
    "oneOf": [
        {"type": "string", "minLength": 1, "maxLength": 256},
        {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
    ],
}
FEATURES: Json = {
    "type": "object",
    "description": "Feature columns by name: string, number or a list of numbers",
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
    "canary_key": {
        **ID,
        "description": "Decides whether a canary answers, if one runs: the same key always meets the same generation. "
        "By default the user, if the request is about one user alone; without either the live one answers",
    },
}


def _entities(of: Json, limits: Limits) -> Json:
    return _list(of, minItems=1, maxItems=limits.max_batch)


def _input(limits: Limits) -> Json:
    history = {**INPUT["history"], "maxItems": limits.max_history}
    return {**INPUT, "history": history}


def _options(limits: Limits) -> Json:
    return {**OPTIONS, "exclude": {**OPTIONS["exclude"], "maxItems": limits.max_exclude}}


def _asked(properties: Json, required: tuple[str, ...] = ()) -> Json:
    """An object of an entity: with an id, or something to compute from."""
    least = [
        _object({"id": ID}, ("id",)),
        _object({"history": {"type": "array", "minItems": 1}}, ("history",)),
        _object({"features": {"type": "object", "minProperties": 1}}, ("features",)),
    ]
    return {**_closed(properties, required), "anyOf": least}


def lookup(limits: Limits, most: int | None = None) -> Json:
    """The body of POST /v1/lookup/{table}; `most` entities, if there is a limit of its own."""
    entity = {"oneOf": [ID, _asked(_input(limits))]}
    entities = _list(entity, minItems=1, maxItems=most or limits.max_batch)
    return _closed({"entities": entities, **_options(limits)}, ("entities",))


def lookup_many(limits: Limits) -> Json:
    """The body of POST /v1/lookup."""
    entity = _asked({"table": {"type": "string"}, **_input(limits)}, ("table",))
    return _closed({"entities": _entities(entity, limits), **_options(limits)}, ("entities",))


def score(limits: Limits) -> Json:
    """The body of POST /v1/score."""
    return _closed(
        {
            "user": {"oneOf": [ID, _asked(_input(limits))]},
            "items": _entities(ID, limits),
            **{name: each for name, each in OPTIONS.items() if name != "exclude"},
        },
        ("user", "items"),
    )


_ORIGIN: Json = {
    "id": {"type": ["string", "null"]},
    "table": {"type": "string"},
    "source": {"enum": ["l1", "l2", "live", "previous", "default"]},
    "producer": {"enum": ["batch", "live", "defaults", None]},
    "generation": {"type": "string"},
    "age_seconds": {"type": "number", "description": "Now minus the generation's data_until"},
    "published_at": {"type": "string", "format": "date-time"},
    "reason": {
        "type": "string",
        "description": "Why this is not a plain hit; `exhausted`: fewer than k were left of the stored list",
    },
    "live": {
        "type": "string",
        "description": "Why live did not answer although it could have; `overloaded`: it was left out",
    },
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


def _stream(description: str) -> Json:
    schema = {"type": "string", "contentMediaType": MEDIA_TYPE, "description": description}
    return {MEDIA_TYPE: {"schema": schema}}


ARROW_LOOKUP: Json = _stream(
    "An Arrow IPC stream, uncompressed, of one column `id`: utf8 (or large_utf8) without nulls. Options go as texts "
    "into the schema's metadata, by the names that they have in a query; histories, features and `exclude` need JSON"
)
ARROW_ANSWERS: Json = _stream(
    "An Arrow IPC stream, one row per entity in the order asked; the schema's metadata names the `table`. Columns as "
    "the fields in JSON, null where JSON has none: `id`, `source`, `producer`, `generation`, `age_seconds` (float64), "
    "`published_at`, `reason`, `live`, `dropped_history` (int32), `stale`; then, by the table's kind, `items` "
    "(list<utf8>), `scores` (list<float32>) and `short` (bool); `vector` (fixed_size_list<float32>); or `values` "
    "(fixed_size_list<float32>) and `labels` (list<utf8>). `vector` and `values` are list<float32> where rows from "
    "the previous generation have another size"
)
SCORES: Json = _object(
    {
        **_ORIGIN,
        "items": _list({"type": "string"}),
        "scores": _list({"type": "number"}),
        "score_tolerance": {
            "type": "number",
            "description": "How far scores may be off, relative to the vector's largest part; 0 for float32",
        },
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
_TEXT: Json = {"type": ["string", "null"]}
_TIER: Json = _object(
    {"found": {"type": "boolean"}, "reason": {"type": "string"}, "by": {"enum": ["batch", "live"]}},
    ("found",),
)
_FOUND: Json = {"type": ["object", "null"]}
EXPLAINED: Json = _object(
    {
        "table": {"type": "string"},
        "id": _TEXT,
        "sentence": {"type": "string", "description": "Which rung would answer, and why"},
        "generation": {"type": "string"},
        "epoch": {"type": "integer"},
        "published_at": {"type": "string", "format": "date-time"},
        "age_seconds": {"type": "number"},
        "stale": _TEXT,
        "degraded": _TEXT,
        "answer": _object(
            {
                "tier": {"enum": ["l1", "l2", "live", "previous", "default"]},
                "reason": {**_TEXT, "description": "Why it is no plain hit"},
                "live": {**_TEXT, "description": "Why live could not, though it had an input"},
            },
            ("tier", "reason", "live"),
        ),
        "directory": {"type": "object", "description": "Where the night has it, by its hash"},
        "page": {**_FOUND, "description": "Its page in Redis with its checksum; null: unknown"},
        "l1": _TIER,
        "l2": _TIER,
        "same_bytes": {"type": ["boolean", "null"]},
        "record": {**_FOUND, "description": "What is stored, decoded"},
        "previous": {**_FOUND, "description": "What the previous generation has; null: none held"},
        "model": {
            "type": "object",
            "description": "What the model says now, and from what: `computed_from` is `sent`, `own` (the item "
            "itself), `stored_vector` (scores of the stored list only) or null",
        },
        "difference": {**_FOUND, "description": "Model minus record: `exact`, `overlap`, deltas"},
        "default": {**_FOUND, "description": "What answers if nothing else does"},
    },
    ("table", "id", "sentence", "generation", "answer", "directory", "l1", "l2", "model"),
)
_HELD: Json = _object(
    {
        "generation": {"type": "string"},
        "epoch": {"type": "integer"},
        "published_at": {"type": "string", "format": "date-time"},
        "data_until": {"type": "integer", "description": "Unix seconds"},
        **{name: {"type": "object"} for name in ("entities", "tables", "models", "indexes")},
    },
    ("generation", "epoch", "published_at", "data_until"),
)
GENERATIONS: Json = _object(
    {
        "live": _HELD,
        "previous": {"oneOf": [_HELD, {"type": "null"}]},
        "next": {"oneOf": [_HELD, {"type": "null"}], "description": "Held ready beside them"},
        "canary": {
            "type": ["object", "null"],
            "properties": {
                "generation": {"type": "string"},
                "percent": {"type": "number"},
                "since": {"type": "number", "description": "Unix seconds"},
            },
        },
        "blocklist": _object(
            {name: {"type": "integer"} for name in ("version", "items", "entities")}
        ),
        "ready": {"type": "boolean"},
        **dict.fromkeys(("stale", "degraded", "failed"), _TEXT),
    },
    ("live", "previous", "next", "canary", "blocklist", "ready"),
)
HEALTH: Json = _object(
    {
        "ready": {"type": "boolean"},
        "generation": _TEXT,
        "epoch": {"type": ["integer", "null"]},
        **dict.fromkeys(("stale", "degraded", "failed"), _TEXT),
        "schedule": _object(
            {
                "missing": {"type": "boolean"},
                "due": {"type": "string", "format": "date-time"},
                "age_seconds": {"type": ["number", "null"]},
            },
            ("missing", "due", "age_seconds"),
        ),
    },
    ("ready", "schedule"),
)
FEEDBACK_BODY: Json = {
    "oneOf": [{"required": ["generation"]}, {"required": ["canary_key"]}],
    **_closed(
        {
            "generation": {
                "type": "string",
                "description": "As the answer named it; or canary_key",
            },
            "canary_key": {**ID, "description": "As the request had it; or generation"},
            "event": {"type": "string", "pattern": "^[a-z][a-z0-9_]{0,31}$"},
            "count": {"type": "integer", "minimum": 1, "maximum": 1_000_000, "default": 1},
        },
        ("event",),
    ),
}
FEEDBACK: Json = _object(
    {
        "arm": {
            "enum": ["live", "canary", None],
            "description": "What it was counted for; null without a canary",
        }
    },
    ("arm",),
)

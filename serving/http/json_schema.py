"""JSON schemas of what the routes, which parse by hand, are sent. Pure data."""

from typing import Any

from cache.filters.reranking import BOOSTS_MAX
from serving.arrow_ipc.schema import MEDIA_TYPE
from serving.requests.models import Limits

Json = dict[str, Any]


def object_of(properties: Json, required: tuple[str, ...] = (), **more: object) -> Json:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def _closed(properties: Json, required: tuple[str, ...] = ()) -> Json:
    """An object whose unknown fields are refused."""
    return object_of(properties, required, additionalProperties=False)


def _each_or_null(properties: Json) -> Json:
    """Fields that may be left out of a body; one that is null is not sent."""
    return {name: {"anyOf": [each, {"type": "null"}]} for name, each in properties.items()}


def list_of(of: Json, **more: object) -> Json:
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
    "description": "Feature columns by name: a text, a number, a list of texts or a list of numbers",
    "additionalProperties": True,
}
INPUT: Json = {
    "id": ID,
    "history": list_of(ID, description="Item ids, oldest first; excluded from the answer"),
    "features": FEATURES,
}
OPTIONS: Json = {
    "k": {"type": "integer", "minimum": 1, "description": "Items per top-K answer; all by default"},
    "exclude": list_of(ID, description="Item ids that must not appear"),
    "deadline_ms": {"type": "number", "exclusiveMinimum": 0},
    "fresh": {
        "type": "boolean",
        "description": "Compute from the input though a stored answer exists",
    },
    "max_age_seconds": {"type": "number", "minimum": 0},
    "max_events": {
        "type": "integer",
        "enum": [0],
        "description": "0: the stored answer, whatever events the user has that are newer",
    },
    "as_of": {
        "type": "string",
        "description": "Count events of the user up to this position, or accepted by this time (RFC 3339), as an "
        "earlier answer told: while they are kept, it is made again",
    },
    "generation": {"type": "string", "description": "Answer from this generation, or 409"},
    "canary_key": {
        **ID,
        "description": "Decides whether a canary answers, if one runs: the same key always meets the same generation. "
        "By default the user, if the request is about one user alone; without either the live one answers",
    },
    "arm": {
        "type": "string",
        "pattern": "^[^=]{1,32}=[^=]{1,32}$",
        "description": "EXPERIMENT=ARM that is to answer, or 409; for testers, not counted",
    },
    "filter": {
        "anyOf": [
            {"type": "string"},
            {"type": "object", "minProperties": 1, "maxProperties": 1},
        ],
        "description": "Only items that pass, by their attributes: the name of a filter that the generation declares, "
        "or one operator (and, or, not; ==, in, <, <=, >, >=, contains, exists) and what it takes, such as "
        '{"<": ["price", 20]}; in a URL the JSON text of that',
    },
    "rerank": {
        "anyOf": [
            {"type": "string"},
            {
                "type": "object",
                "minProperties": 1,
                "properties": {
                    "boost": {"type": "array", "minItems": 1, "maxItems": BOOSTS_MAX},
                    "diversify": {"type": "object"},
                },
                "additionalProperties": False,
            },
        ],
        "description": "Another order of the candidates: a declared one's name, or boost (a list of filter and factor) "
        "and diversify (at most `most` items of one value of `attribute`; `mmr`, the weight of a score against "
        'likeness to those before), such as {"diversify": {"attribute": "brand", "most": 2}}; in a URL the JSON text '
        "of that",
    },
}


def _entities(of: Json, limits: Limits) -> Json:
    return list_of(of, minItems=1, maxItems=limits.max_batch)


def _input(limits: Limits) -> Json:
    history = {**INPUT["history"], "maxItems": limits.max_history}
    return _each_or_null({**INPUT, "history": history})


def _options(limits: Limits) -> Json:
    exclude = {**OPTIONS["exclude"], "maxItems": limits.max_exclude}
    return _each_or_null({**OPTIONS, "exclude": exclude})


def _asked(properties: Json, required: tuple[str, ...] = ()) -> Json:
    """An object of an entity: with an id, or something to compute from."""
    least = [
        object_of({"id": ID}, ("id",)),
        object_of({"history": {"type": "array", "minItems": 1}}, ("history",)),
        object_of({"features": {"type": "object", "minProperties": 1}}, ("features",)),
    ]
    return {**_closed(properties, required), "anyOf": least}


def lookup(limits: Limits, most: int | None = None) -> Json:
    """The body of POST /v1/lookup/{table}; `most` entities, if there is a limit of its own."""
    entity = {"oneOf": [ID, _asked(_input(limits))]}
    entities = list_of(entity, minItems=1, maxItems=most or limits.max_batch)
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
            **_each_or_null({name: OPTIONS[name] for name in OPTIONS if name != "exclude"}),
        },
        ("user", "items"),
    )


def stream_of(description: str) -> Json:
    schema = {"type": "string", "contentMediaType": MEDIA_TYPE, "description": description}
    return {MEDIA_TYPE: {"schema": schema}}


ARROW_LOOKUP: Json = stream_of(
    "An Arrow IPC stream, uncompressed, of one column `id`: utf8 (or large_utf8) without nulls. Options go as texts "
    "into the schema's metadata, by the names that they have in a query; histories, features and `exclude` need JSON"
)
_GENERATION: Json = {
    "type": "string",
    "description": "As the answer named it; or canary_key or arm",
}
_CANARY_KEY: Json = {**ID, "description": "As the request had it; or generation or arm"}
_ARM: Json = {**OPTIONS["arm"], "description": "EXPERIMENT=ARM, as the answer had them"}
_COUNT: Json = {"type": "integer", "minimum": 1, "maximum": 1_000_000, "default": 1}
_EVENT: Json = {
    "user": ID,
    "item": ID,
    "time": {
        "anyOf": [{"type": "string", "maxLength": 64}, {"type": "number", "minimum": 0}],
        "description": "When it happened: ISO 8601 (UTC without a zone) or seconds since 1970; by default now",
    },
    "id": {
        "description": "1 to 128 bytes; an event that its user (or the item) had under the same id is a repetition",
        "oneOf": [
            {"type": "string", "minLength": 1, "maxLength": 128},
            {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
        ],
    },
    "type": {"type": "string", "minLength": 1, "maxLength": 64},
    "weight": {"type": "number", "default": 1, "description": "0 or less: in no history"},
    "attributes": {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 64,
        "description": "Of a user alone or an item alone: text, list of texts, number or boolean by name",
    },
    "features": FEATURES,
    "vector": list_of({"type": "number"}, minItems=1, maxItems=8_192),
}
EVENTS_BODY: Json = _closed(
    {
        "events": list_of(
            {
                "anyOf": [
                    _closed(_EVENT, ("id",)),
                    {"description": "What is no event: rejected beside the others"},
                ]
            },
            minItems=1,
            description="As many as `[events] batch` has it",
        )
    },
    ("events",),
)
FEEDBACK_BODY: Json = {
    "oneOf": [
        object_of({"generation": _GENERATION}, ("generation",)),
        object_of({"canary_key": _CANARY_KEY}, ("canary_key",)),
        object_of({"arm": _ARM}, ("arm",)),
    ],
    **_closed(
        {
            "event": {"type": "string", "pattern": "^[a-z][a-z0-9_]{0,31}$"},
            **_each_or_null(
                {
                    "generation": _GENERATION,
                    "canary_key": _CANARY_KEY,
                    "arm": _ARM,
                    "count": _COUNT,
                }
            ),
        },
        ("event",),
    ),
}

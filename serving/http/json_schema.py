"""JSON schemas of what the routes, which parse by hand, are sent. Pure data."""

from cache.filters.reranking import BOOSTS_MAX
from serving.answers.named_schema import Json, NamedSchema, or_null, with_description
from serving.arrow_ipc.schema import MEDIA_TYPE
from serving.requests.models import Limits


def object_of(properties: Json, required: tuple[str, ...] = (), **more: object) -> Json:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def _closed(name: str, properties: Json, required: tuple[str, ...] = (), **more: object) -> Json:
    """A named object whose unknown fields are refused."""
    return NamedSchema(name, object_of(properties, required, additionalProperties=False, **more))


def _nullable_fields(properties: Json) -> Json:
    """Fields that may be left out of a body; one that is null is not sent."""
    return {name: or_null(field_schema) for name, field_schema in properties.items()}


def list_of(of: Json, **more: object) -> Json:
    return {"type": "array", "items": of, **more}


ID = NamedSchema(
    "Id",
    {
        "description": "1 to 256 bytes of UTF-8; an integer becomes its decimal form",
        "oneOf": [
            {"type": "string", "minLength": 1, "maxLength": 256},
            {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
        ],
    },
)
FEATURES = NamedSchema(
    "Features",
    {
        "type": "object",
        "description": "Feature columns by name: a text, a number, a list of texts or a list of numbers",
        "additionalProperties": True,
    },
)
HISTORY: Json = list_of(ID, description="Item ids, oldest first; excluded from the answer")
_FILTER = NamedSchema(
    "Filter",
    {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": True,
        "description": "One operator (and, or, not; ==, in, <, <=, >, >=, contains, exists) and what it takes, such as "
        '{"<": ["price", 20]}',
    },
)
_RERANKING = NamedSchema(
    "Reranking",
    {
        "type": "object",
        "minProperties": 1,
        "description": "Another order of the candidates",
        "properties": {
            "boost": list_of(
                NamedSchema(
                    "Boost",
                    object_of(
                        {
                            "filter": with_description(_FILTER, "Items whose scores are raised"),
                            "factor": {"type": "number", "exclusiveMinimum": 0},
                        },
                        ("filter", "factor"),
                        additionalProperties=False,
                    ),
                ),
                minItems=1,
                maxItems=BOOSTS_MAX,
            ),
            "diversify": NamedSchema(
                "Diversify",
                object_of(
                    {
                        "attribute": {"type": "string", "description": "With `most`"},
                        "most": {
                            "type": "integer",
                            "minimum": 1,
                            "description": "At most so many items of one value of `attribute`",
                        },
                        "mmr": {
                            "type": "number",
                            "description": "Weight of a score against likeness to those before",
                        },
                    },
                    additionalProperties=False,
                ),
            ),
        },
        "additionalProperties": False,
    },
)
_NAME_OR_FILTER = NamedSchema(
    "FilterOption",
    {
        "anyOf": [{"type": "string"}, _FILTER],
        "description": "Only items that pass, by their attributes: the name of a filter that the generation declares, "
        "or a filter",
    },
)
_NAME_OR_RERANKING = NamedSchema(
    "RerankOption",
    {
        "anyOf": [{"type": "string"}, _RERANKING],
        "description": "Another order of the candidates: the name of one that the settings declare, or a re-ranking",
    },
)
OPTIONS: Json = {
    "k": {"type": "integer", "minimum": 1, "description": "Items per top-K answer; all by default"},
    "exclude": list_of(ID, description="Item ids that must not appear"),
    "deadline_ms": {
        "type": "number",
        "exclusiveMinimum": 0,
        "description": "Milliseconds that an answer may take; what cannot be had in them is answered by a later rung",
    },
    "fresh": {
        "type": "boolean",
        "description": "Compute from the input though a stored answer exists",
    },
    "max_age_seconds": {
        "type": "number",
        "minimum": 0,
        "description": "Compute from the input if what is stored is older",
    },
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
    "canary_key": with_description(
        ID,
        "Decides whether a canary answers, if one runs: the same key always meets the same generation. "
        "By default the user, if the request is about one user alone; without either the live one answers",
    ),
    "arm": {
        "type": "string",
        "pattern": "^[^=]{1,32}=[^=]{1,32}$",
        "description": "EXPERIMENT=ARM that is to answer, or 409; for testers, not counted",
    },
    "filter": _NAME_OR_FILTER,
    "rerank": _NAME_OR_RERANKING,
}
QUERY: Json = {
    **{name: schema for name, schema in OPTIONS.items() if name != "exclude"},
    "filter": {
        "type": "string",
        "description": "Only items that pass: the name of a declared filter, or the JSON text of one, such as "
        '{"<": ["price", 20]}',
    },
    "rerank": {
        "type": "string",
        "description": "Another order: the name of a declared one, or the JSON text of a re-ranking, such as "
        '{"diversify": {"attribute": "brand", "most": 2}}',
    },
}
"""Options of a URL, by name."""


def _input(limits: Limits) -> Json:
    history = {**HISTORY, "maxItems": limits.max_history}
    return _nullable_fields({"id": ID, "history": history, "features": FEATURES})


def _options(limits: Limits) -> Json:
    exclude = {**OPTIONS["exclude"], "maxItems": limits.max_exclude}
    return _nullable_fields({**OPTIONS, "exclude": exclude})


_ID_OR_INPUT: list[Json] = [
    {
        "anyOf": [
            {"required": ["id"], "properties": {"id": {"not": {"type": "null"}}}},
            {
                "required": ["history"],
                "properties": {"history": {"minItems": 1, "not": {"type": "null"}}},
            },
            {
                "required": ["features"],
                "properties": {"features": {"minProperties": 1, "not": {"type": "null"}}},
            },
        ]
    }
]
"""An entity has an id, or something to compute from."""


def _entity(limits: Limits) -> Json:
    about = "An id, or something to compute an answer from, or both"
    return _closed("EntityInput", _input(limits), allOf=_ID_OR_INPUT, description=about)


def _entity_or_id(limits: Limits) -> Json:
    return NamedSchema("Entity", {"oneOf": [ID, _entity(limits)]})


def lookup(limits: Limits, entities_max: int | None = None) -> Json:
    """The body of POST /v1/lookup/{table}; `entities_max` entities, if there is a limit of its own."""
    entities = list_of(_entity_or_id(limits), minItems=1, maxItems=entities_max or limits.max_batch)
    name = "LookupRequest" if entities_max is None else "ExplainRequest"
    return _closed(name, {"entities": entities, **_options(limits)}, ("entities",))


def lookup_many(limits: Limits) -> Json:
    """The body of POST /v1/lookup."""
    about = "An entity and the table that is asked"
    table = {"type": "string", "description": "Table that is asked"}
    entity = _closed(
        "TableEntityInput", {"table": table, **_input(limits)}, ("table",), allOf=_ID_OR_INPUT, description=about,
    )  # fmt: skip
    entities = list_of(entity, minItems=1, maxItems=limits.max_batch)
    return _closed("TablesLookupRequest", {"entities": entities, **_options(limits)}, ("entities",))


def score(limits: Limits) -> Json:
    """The body of POST /v1/score."""
    return _closed(
        "ScoreRequest",
        {
            "user": _entity_or_id(limits),
            "items": list_of(
                ID, minItems=1, maxItems=limits.max_batch, description="Candidates that are ranked"
            ),
            **_nullable_fields({name: OPTIONS[name] for name in OPTIONS if name != "exclude"}),
        },
        ("user", "items"),
    )


ARROW_LOOKUP: Json = {
    "mediaType": MEDIA_TYPE,
    "description": "An Arrow IPC stream, uncompressed, of one column `id`: utf8 (or large_utf8) without nulls. Options "
    "go as texts into the schema's metadata, by the names that they have in a query; histories, features and "
    "`exclude` need JSON",
}
_GENERATION: Json = {
    "type": "string",
    "description": "As the answer named it; or canary_key or arm",
}
_CANARY_KEY: Json = with_description(ID, "As the request had it; or generation or arm")
_ARM: Json = {**OPTIONS["arm"], "description": "EXPERIMENT=ARM, as the answer had them"}
_COUNT: Json = {
    "type": "integer",
    "minimum": 1,
    "maximum": 1_000_000,
    "description": "1 by default",
}
_EVENT_FIELDS: Json = {
    "user": ID,
    "item": ID,
    "time": {
        "anyOf": [{"type": "string", "maxLength": 64}, {"type": "number", "minimum": 0}],
        "description": "When it happened: ISO 8601 (UTC without a zone) or seconds since 1970; by default now",
    },
    "id": NamedSchema(
        "EventId",
        {
            "description": "1 to 128 bytes; an event that its user (or the item) had under the same id is a repetition",
            "oneOf": [
                {"type": "string", "minLength": 1, "maxLength": 128},
                {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
            ],
        },
    ),
    "type": {"type": "string", "minLength": 1, "maxLength": 64},
    "weight": {"type": "number", "description": "1 by default; 0 or less: in no history"},
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
    "features": FEATURES,
    "vector": list_of({"type": "number"}, minItems=1, maxItems=8_192),
}
_UNSENT_IF_NULL = ("user", "item", "weight", "features", "vector")
EVENT = _closed(
    "Event",
    _EVENT_FIELDS | {name: or_null(_EVENT_FIELDS[name]) for name in _UNSENT_IF_NULL},
    ("id",),
    description="Interaction of a user with an item, or attributes, features or a vector of one of them",
)
EVENTS_BODY: Json = _closed(
    "EventsRequest",
    {
        "events": list_of(
            EVENT,
            minItems=1,
            description="As many as `[events] batch` has it; one that is none is rejected beside the others",
        )
    },
    ("events",),
)
FEEDBACK_BODY: Json = _closed(
    "FeedbackRequest",
    {
        "event": {
            "type": "string",
            "pattern": "^[a-z][a-z0-9_]{0,31}$",
            "description": "What came of the answer, such as `click`",
        },
        **_nullable_fields(
            {"generation": _GENERATION, "canary_key": _CANARY_KEY, "arm": _ARM, "count": _COUNT}
        ),
    },
    ("event",),
    oneOf=[
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
        for name in ("generation", "canary_key", "arm")
    ],
    description="What came of answers: of one generation, of one canary key, or of one arm",
)

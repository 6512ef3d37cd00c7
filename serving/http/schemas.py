"""JSON schemas of the routes' requests and responses. Pure data."""

from collections.abc import Mapping

from serving.arrow.schema import ARROW_MEDIA_TYPE
from serving.requests.answers import (
    ORIGIN_FIELDS,
    PREDICTION_FIELDS_BY_KIND,
    Answer,
    AnswerField,
    Origin,
    Ranking,
    Source,
    declared_fields,
)
from serving.requests.errors import ErrorCode
from serving.requests.named_schema import (
    DETAILS_SCHEMA,
    ID_SCHEMA,
    Json,
    NamedSchema,
    list_schema,
    nullable_schema,
    object_schema,
    open_enum_schema,
    with_description,
)
from serving.requests.options import REQUEST_OPTIONS, Limits
from serving.requests.reasons import PUBLIC_MISS_REASONS, LiveReason, StaleReason

TEXT_OR_NULL: Json = {"type": ["string", "null"]}
DATE_TIME: Json = {"type": "string", "format": "date-time"}


def named_object_schema(
    schema_name: str, property_schemas: Json, required_names: tuple[str, ...] = (), **further_keywords: object
) -> Json:
    """Return the schema of a named object."""
    return NamedSchema(schema_name, object_schema(property_schemas, required_names, **further_keywords))


def closed_object_schema(
    schema_name: str, property_schemas: Json, required_names: tuple[str, ...] = (), **further_keywords: object
) -> Json:
    """Return the schema of a named object whose unknown fields are refused."""
    return NamedSchema(
        schema_name, object_schema(property_schemas, required_names, additionalProperties=False, **further_keywords)
    )


def nullable_fields(property_schemas: Json) -> Json:
    """Return schemas of optional fields of a body; a null field counts as not sent."""
    return {name: nullable_schema(field_schema) for name, field_schema in property_schemas.items()}


def details_schema(description: str, *, is_nullable: bool = False) -> Json:
    """Return the schema of details for people and dashboards, whose names may change."""
    if is_nullable:
        return {**nullable_schema(DETAILS_SCHEMA), "description": description}
    return with_description(DETAILS_SCHEMA, description)


FEATURES = NamedSchema(
    "Features",
    {
        "type": "object",
        "description": "Feature columns by name: a text, a number, a list of texts or a list of numbers",
        "additionalProperties": True,
    },
)


HISTORY: Json = list_schema(ID_SCHEMA, description="Item ids, oldest first; excluded from the answer")


_OPTION_SCHEMAS: Json = {name: option.schema for name, option in REQUEST_OPTIONS.items()}

QUERY_OPTION_SCHEMAS: Json = {
    name: option.query_schema or option.schema
    for name, option in REQUEST_OPTIONS.items()
    if not option.is_for_lookup_bodies_only
}
"""Schemas of the options of a URL, by name."""


def _input_fields(limits: Limits) -> Json:
    history = {**HISTORY, "maxItems": limits.max_history}
    return nullable_fields({"id": ID_SCHEMA, "history": history, "features": FEATURES})


def _body_options(limits: Limits, *, omitted_option: str | None = None) -> Json:
    exclude = {**_OPTION_SCHEMAS["exclude"], "maxItems": limits.max_exclude}
    option_schemas = {**_OPTION_SCHEMAS, "exclude": exclude}
    return nullable_fields({name: schema for name, schema in option_schemas.items() if name != omitted_option})


_ID_OR_INPUT: list[Json] = [
    {
        "anyOf": [
            {"required": ["id"], "properties": {"id": {"not": {"type": "null"}}}},
            {"required": ["history"], "properties": {"history": {"minItems": 1, "not": {"type": "null"}}}},
            {"required": ["features"], "properties": {"features": {"minProperties": 1, "not": {"type": "null"}}}},
        ]
    }
]
"""An entity must have an id, or something to compute from."""


def _entity_schema(limits: Limits) -> Json:
    entity_description = "An id, or something to compute an answer from, or both"
    return closed_object_schema(
        "EntityInput", _input_fields(limits), allOf=_ID_OR_INPUT, description=entity_description
    )


def _entity_or_id_schema(limits: Limits) -> Json:
    return NamedSchema("Entity", {"oneOf": [ID_SCHEMA, _entity_schema(limits)]})


def lookup_body_schema(limits: Limits) -> Json:
    """Return the schema of the body of POST /v1/lookup/{table}."""
    entities = list_schema(_entity_or_id_schema(limits), minItems=1, maxItems=limits.max_batch)
    return closed_object_schema("LookupRequest", {"entities": entities, **_body_options(limits)}, ("entities",))


def explain_body_schema(limits: Limits) -> Json:
    """Return the schema of the body of POST /v1/explain/{table}: one entity, and the options of a lookup but `arm`."""
    entities = list_schema(_entity_or_id_schema(limits), minItems=1, maxItems=1)
    options = _body_options(limits, omitted_option="arm")
    return closed_object_schema("ExplainRequest", {"entities": entities, **options}, ("entities",))


def tables_lookup_body(limits: Limits) -> Json:
    """Return the schema of the body of POST /v1/lookup."""
    about = "An entity and its table"
    table = {"type": "string", "description": "Name of the table"}
    entity = closed_object_schema(
        "TableEntityInput", {"table": table, **_input_fields(limits)}, ("table",), allOf=_ID_OR_INPUT,
        description=about,
    )  # fmt: skip
    entities = list_schema(entity, minItems=1, maxItems=limits.max_batch)
    return closed_object_schema("TablesLookupRequest", {"entities": entities, **_body_options(limits)}, ("entities",))


def score_body(limits: Limits) -> Json:
    """Return the schema of the body of POST /v1/score."""
    return closed_object_schema(
        "ScoreRequest",
        {
            "user": _entity_or_id_schema(limits),
            "items": list_schema(ID_SCHEMA, minItems=1, maxItems=limits.max_batch, description="Candidates to rank"),
            **nullable_fields({name: _OPTION_SCHEMAS[name] for name in QUERY_OPTION_SCHEMAS}),
        },
        ("user", "items"),
    )


ARROW_LOOKUP: Json = {
    "mediaType": ARROW_MEDIA_TYPE,
    "description": "An Arrow IPC stream, uncompressed, of one column `id`: utf8 (or large_utf8) without nulls. Options "
    "are texts in the schema's metadata, with the names of a query; histories, features and `exclude` need JSON",
}


REASON = open_enum_schema(
    "Reason",
    ((miss_reason, miss_reason.meaning) for miss_reason in PUBLIC_MISS_REASONS),
    "Why an answer is not a plain hit",
)


LIVE_REASON = open_enum_schema(
    "LiveReason",
    ((live_reason, live_reason.meaning) for live_reason in LiveReason),
    "Why live inference did not answer, though there was something to compute from",
)


STALE_REASON = open_enum_schema(
    "StaleReason",
    ((stale_reason, stale_reason.meaning) for stale_reason in StaleReason),
    "Why this replica may lag behind; several reasons are separated by commas",
)


_ENUM_SCHEMAS = {"reason": REASON, "live": LIVE_REASON, "stale": STALE_REASON}


SOURCE = NamedSchema(
    "Source",
    {"type": "string", "enum": [str(source) for source in Source], "description": "Rung of the ladder that answered"},
)


def _declared_schema(schema_name: str, answer_class: type[Origin], description: str) -> Json:
    fields = declared_fields(answer_class)
    required_names = [field.name for field in fields if field.declaration.present_when == "always"]
    return named_object_schema(
        schema_name,
        {field.name: _field_schema(field) for field in fields},
        tuple(required_names),
        description=description,
    )


def _field_schema(field: AnswerField) -> Json:
    if field.field_type is Source:
        return SOURCE
    return _ENUM_SCHEMAS.get(field.name, field.json_schema)


def _column_list(fields: tuple[AnswerField, ...]) -> str:
    return ", ".join(f"`{field.name}` ({field.arrow_type_name})" for field in fields)


ANSWER = _declared_schema("Answer", Answer, "Answer for one entity of one table")


ANSWERS: Json = named_object_schema(
    "Answers",
    {"answers": list_schema(ANSWER, description="One answer per entity, in the order of the request")},
    ("answers",),
)


ARROW_ANSWERS: Json = {
    "mediaType": ARROW_MEDIA_TYPE,
    "description": "An Arrow IPC stream, one row per entity in the order of the request; the schema's metadata names "
    "the `table`. Columns are like the fields in JSON, null where JSON has no field: `id` (utf8), "
    f"{_column_list(ORIGIN_FIELDS)}; "
    f"then, by the table's kind, {'; or '.join(map(_column_list, PREDICTION_FIELDS_BY_KIND.values()))}. `vector` and "
    "`values` are list<float32> where rows from the previous generation have another size",
}


RANKED_ITEMS = _declared_schema("RankedItems", Ranking, "Candidates of one user in rank order")


def problem_schema(error_code_by_name: Mapping[str, ErrorCode]) -> Json:
    """Return the schema of a refusal with one of these codes."""
    code = open_enum_schema(
        "ErrorCode", ((name, error.meaning) for name, error in error_code_by_name.items()), "What went wrong"
    )
    error = named_object_schema(
        "ProblemError",
        {
            "code": code,
            "message": {"type": "string", "description": "For people"},
            "field": {"type": "string", "description": "Place of the error in the request"},
        },
        ("code", "message"),
        additionalProperties=True,
        description="What was refused, and why; further members have the numbers of the message",
    )
    return named_object_schema("Problem", {"error": error}, ("error",), description="Body of every refusal")


_HELD_GENERATION = named_object_schema(
    "HeldGeneration",
    {
        "generation": {"type": "string"},
        "epoch": {"type": "integer"},
        "published_at": DATE_TIME,
        "data_until": {"type": "integer", "description": "Unix seconds"},
        "entities": details_schema("Count of entities by entity set"),
        "tables": details_schema("Kind, entity set, width, producer and labels by table"),
        "models": details_schema("Digest, precision and sizes by model"),
        "indexes": details_schema("Kind, recall and size by index"),
        "fallback": {
            "type": ["string", "null"],
            "description": "Why live models run on the CPU although a GPU provider is configured",
        },
    },
    ("generation", "epoch", "published_at", "data_until", "entities", "tables", "models", "indexes"),
    description="A generation that this replica holds",
)


GENERATIONS: Json = named_object_schema(
    "Generations",
    {
        "live": _HELD_GENERATION,
        "previous": nullable_schema(_HELD_GENERATION),
        "next": {**nullable_schema(_HELD_GENERATION), "description": "Staged generation, if any"},
        "canary": nullable_schema(
            named_object_schema(
                "Canary",
                {
                    "generation": {"type": "string"},
                    "percent": {"type": "number"},
                    "since": {"type": "number", "description": "Unix seconds"},
                },
                description="A generation that answers a share of the requests",
            )
        ),
        "blocklist": named_object_schema(
            "BlocklistCounts",
            {name: {"type": "integer"} for name in ("version", "items", "entities")},
            description="The blocklist that is in force",
        ),
        "ready": {"type": "boolean"},
        "stale": nullable_schema(STALE_REASON),
        **dict.fromkeys(("degraded", "failed"), TEXT_OR_NULL),
    },
    ("live", "previous", "next", "canary", "blocklist", "ready"),
    description="What this replica serves from",
)


READINESS: Json = named_object_schema(
    "Readiness",
    {
        "ready": {"type": "boolean"},
        "generation": TEXT_OR_NULL,
        "epoch": {"type": ["integer", "null"]},
        "stale": nullable_schema(STALE_REASON),
        **dict.fromkeys(("degraded", "failed"), TEXT_OR_NULL),
        "schedule": named_object_schema(
            "NightSchedule",
            {
                "missing": {"type": "boolean", "description": "A generation is due but does not exist"},
                "due": DATE_TIME,
                "age_seconds": {"type": ["number", "null"]},
            },
            ("missing", "due", "age_seconds"),
            description="When a generation should exist",
        ),
    },
    ("ready", "schedule"),
    description="Whether this replica is ready, and why not",
)


LIVENESS: Json = named_object_schema(
    "Liveness", {"status": {"type": "string", "enum": ["ok"]}}, ("status",), description="The process answers"
)

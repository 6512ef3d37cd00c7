"""JSON schemas of what the routes answer. Pure data."""

from serving.answers.fields import (
    ORIGIN,
    PREDICTION,
    Answer,
    AnswerField,
    Origin,
    Ranking,
    fields_of,
)
from serving.answers.named_schema import (
    DETAILS,
    Json,
    NamedSchema,
    open_words,
    or_null,
    with_description,
)
from serving.answers.reasons import PUBLIC_REASONS, LiveReason, StaleReason
from serving.answers.sources import Source
from serving.arrow_ipc.schema import MEDIA_TYPE
from serving.http.json_schema import list_of, object_of
from serving.requests.error_codes import CODES

REASON = open_words(
    "Reason",
    ((miss_reason, miss_reason.meaning) for miss_reason in PUBLIC_REASONS),
    "Why an answer is not a plain hit",
)
LIVE_REASON = open_words(
    "LiveReason",
    ((live_reason, live_reason.meaning) for live_reason in LiveReason),
    "Why live inference did not answer, though there was something to compute from",
)
STALE = open_words(
    "StaleReason",
    ((stale_reason, stale_reason.meaning) for stale_reason in StaleReason),
    "Why this replica may lag behind; where there are several reasons, they stand with commas between",
)
_ENUM_SCHEMAS = {"reason": REASON, "live": LIVE_REASON, "stale": STALE}
SOURCE = NamedSchema(
    "Source",
    {
        "type": "string",
        "enum": [str(source) for source in Source],
        "description": "Rung of the ladder that answered",
    },
)


def _named(name: str, properties: Json, required: tuple[str, ...] = (), **more: object) -> Json:
    return NamedSchema(name, object_of(properties, required, **more))


def _declared(name: str, of: type[Origin], description: str) -> Json:
    fields = fields_of(of)
    always = [field.name for field in fields if field.declaration.when == "always"]
    return _named(
        name,
        {field.name: _schema(field) for field in fields},
        tuple(always),
        description=description,
    )


def _schema(field: AnswerField) -> Json:
    if field.type is Source:
        return SOURCE
    return _ENUM_SCHEMAS.get(field.name, field.schema)


def _columns(fields: tuple[AnswerField, ...]) -> str:
    return ", ".join(f"`{field.name}` ({field.column})" for field in fields)


ANSWER = _declared("Answer", Answer, "Answer for one entity of one table")
ANSWERS: Json = _named(
    "Answers",
    {"answers": list_of(ANSWER, description="One for each entity, in the order asked")},
    ("answers",),
)
ARROW_ANSWERS: Json = {
    "mediaType": MEDIA_TYPE,
    "description": "An Arrow IPC stream, one row per entity in the order asked; the schema's metadata names the "
    f"`table`. Columns as the fields in JSON, null where JSON has none: `id` (utf8), {_columns(ORIGIN)}; then, by the "
    f"table's kind, {'; or '.join(map(_columns, PREDICTION.values()))}. `vector` and `values` are list<float32> where "
    "rows from the previous generation have another size",
}
SCORES = _declared("RankedItems", Ranking, "Candidates of one user in rank order")
ERROR_CODE = open_words(
    "ErrorCode", ((code, error.meaning) for code, error in CODES.items()), "What went wrong"
)
ERROR: Json = _named(
    "Problem",
    {
        "error": _named(
            "ProblemError",
            {
                "code": ERROR_CODE,
                "message": {"type": "string", "description": "For people: the thing, the value"},
                "field": {"type": "string", "description": "Place in the request that is at fault"},
            },
            ("code", "message"),
            additionalProperties=True,
            description="What was refused, and why; further members hold the numbers behind the message",
        )
    },
    ("error",),
    description="The body of every refusal",
)
_TEXT: Json = {"type": ["string", "null"]}
_DATE_TIME: Json = {"type": "string", "format": "date-time"}


def _details(description: str, *, is_null: bool = False) -> Json:
    if is_null:
        return {**or_null(DETAILS), "description": description}
    return with_description(DETAILS, description)


_TIER = _named(
    "ExplainedTier",
    {
        "found": {"type": "boolean"},
        "reason": {"type": "string", "description": "Why the tier does not answer"},
        "by": {"type": "string", "enum": ["batch", "live"], "description": "What computed it"},
    },
    ("found",),
    description="What one tier holds",
)
EXPLAINED: Json = _named(
    "Explanation",
    {
        "table": {"type": "string"},
        "id": _TEXT,
        "sentence": {"type": "string", "description": "Which rung would answer, and why"},
        "generation": {"type": "string"},
        "epoch": {"type": "integer"},
        "published_at": _DATE_TIME,
        "age_seconds": {"type": "number"},
        "stale": or_null(STALE),
        "degraded": _TEXT,
        "answer": _named(
            "ExplainedAnswer",
            {
                "tier": SOURCE,
                "reason": {**or_null(REASON), "description": "Why it is no plain hit"},
                "live": {
                    **or_null(LIVE_REASON),
                    "description": "Why live could not, though it had an input",
                },
            },
            ("tier", "reason", "live"),
            description="What would answer",
        ),
        "directory": _details("Where the night has it, by its hash"),
        "events": _details(
            "Newer events that are counted, `as_of` the newest, and `until` where the generation has them; null: none",
            is_null=True,
        ),
        "page": _details("Its page in Redis with its checksum; null: unknown", is_null=True),
        "l1": _TIER,
        "l2": _TIER,
        "same_bytes": {
            "type": ["boolean", "null"],
            "description": "Whether both tiers hold the same; null: one holds nothing",
        },
        "record": _details("What is stored, decoded", is_null=True),
        "previous": _details("What the previous generation has; null: none held", is_null=True),
        "model": _details(
            "What the model says now, and from what: `computed_from` is `sent`, `own` (the item "
            "itself), `events` (the night's input and newer events), `stored_vector` (scores of the stored list "
            "only) or null"
        ),
        "difference": _details("Model minus record: `exact`, `overlap`, deltas", is_null=True),
        "default": _details("What answers if nothing else does", is_null=True),
    },
    ("table", "id", "sentence", "generation", "answer", "directory", "l1", "l2", "model"),
    description="Why an entity is answered as it is",
)
_HELD_GENERATION = _named(
    "HeldGeneration",
    {
        "generation": {"type": "string"},
        "epoch": {"type": "integer"},
        "published_at": _DATE_TIME,
        "data_until": {"type": "integer", "description": "Unix seconds"},
        "entities": _details("Count of entities by entity set"),
        "tables": _details("Kind, entity set, width, producer and labels by table"),
        "models": _details("Digest, precision and sizes by model"),
        "indexes": _details("Kind, recall and size by index"),
        "fallback": {
            "type": ["string", "null"],
            "description": "Why live models run on the processor where a GPU's provider was asked for",
        },
    },
    ("generation", "epoch", "published_at", "data_until"),
    description="A generation that this replica holds",
)
GENERATIONS: Json = _named(
    "Generations",
    {
        "live": _HELD_GENERATION,
        "previous": or_null(_HELD_GENERATION),
        "next": {**or_null(_HELD_GENERATION), "description": "Held ready beside them"},
        "canary": or_null(
            _named(
                "Canary",
                {
                    "generation": {"type": "string"},
                    "percent": {"type": "number"},
                    "since": {"type": "number", "description": "Unix seconds"},
                },
                description="A generation that answers a share of the requests",
            )
        ),
        "blocklist": _named(
            "BlocklistCounts",
            {name: {"type": "integer"} for name in ("version", "items", "entities")},
            description="The blocklist that is in force",
        ),
        "ready": {"type": "boolean"},
        "stale": or_null(STALE),
        **dict.fromkeys(("degraded", "failed"), _TEXT),
    },
    ("live", "previous", "next", "canary", "blocklist", "ready"),
    description="What this replica serves from",
)
HEALTH: Json = _named(
    "Readiness",
    {
        "ready": {"type": "boolean"},
        "generation": _TEXT,
        "epoch": {"type": ["integer", "null"]},
        "stale": or_null(STALE),
        **dict.fromkeys(("degraded", "failed"), _TEXT),
        "schedule": _named(
            "NightSchedule",
            {
                "missing": {"type": "boolean", "description": "A generation is due and not there"},
                "due": _DATE_TIME,
                "age_seconds": {"type": ["number", "null"]},
            },
            ("missing", "due", "age_seconds"),
            description="When a generation should exist",
        ),
    },
    ("ready", "schedule"),
    description="Whether this replica may be asked, and why not",
)
LIVENESS: Json = _named(
    "Liveness",
    {"status": {"type": "string", "enum": ["ok"]}},
    ("status",),
    description="The process answers",
)
EVENTS: Json = _named(
    "EventsReceipt",
    {
        "accepted": {"type": "integer", "description": "Events that are in the stream"},
        "repeated": {"type": "integer", "description": "Events that were there before"},
        "rejected": list_of(
            _named(
                "RejectedEvent",
                {
                    "index": {"type": "integer", "description": "Place in the request, from 0"},
                    "reason": {"type": "string"},
                    "detail": {"type": "string"},
                },
                ("index", "reason", "detail"),
                description="An event that was not accepted, and why",
            )
        ),
        "durability": {
            "type": "string",
            "enum": ["always", "everysec", "none", "unknown"],
            "description": "How their Redis keeps them: on disk by now, within a second, in memory alone, or it does "
            "not tell",
        },
        "position": {
            **_TEXT,
            "description": "Position of the newest accepted one; null: there is none",
        },
    },
    ("accepted", "repeated", "rejected", "durability", "position"),
    description="What became of the events",
)
FEEDBACK: Json = _named(
    "FeedbackReceipt",
    {
        "arm": {
            "type": ["string", "null"],
            "enum": ["live", "canary", None],
            "description": "What it was counted for; null without a canary",
        },
        "experiment": {
            "type": "string",
            "description": "EXPERIMENT=ARM that it was counted for, if any",
        },
    },
    ("arm",),
    description="What the feedback was counted for",
)

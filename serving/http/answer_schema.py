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
from serving.answers.sources import Source
from serving.http.json_schema import Json, list_of, object_of, stream_of


def _declared(of: type[Origin]) -> Json:
    fields = fields_of(of)
    always = [each.name for each in fields if each.said.when == "always"]
    return object_of({each.name: each.schema for each in fields}, tuple(always))


def _columns(fields: tuple[AnswerField, ...]) -> str:
    return ", ".join(f"`{each.name}` ({each.column})" for each in fields)


ANSWER = _declared(Answer)
ANSWERS: Json = object_of({"answers": list_of(ANSWER)}, ("answers",))
ARROW_ANSWERS: Json = stream_of(
    "An Arrow IPC stream, one row per entity in the order asked; the schema's metadata names the `table`. Columns as "
    f"the fields in JSON, null where JSON has none: `id` (utf8), {_columns(ORIGIN)}; then, by the table's kind, "
    f"{'; or '.join(map(_columns, PREDICTION.values()))}. `vector` and `values` are list<float32> where rows from "
    "the previous generation have another size"
)
SCORES = _declared(Ranking)
ERROR: Json = object_of(
    {
        "error": object_of(
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
_TIER: Json = object_of(
    {"found": {"type": "boolean"}, "reason": {"type": "string"}, "by": {"enum": ["batch", "live"]}},
    ("found",),
)
_FOUND: Json = {"type": ["object", "null"]}
EXPLAINED: Json = object_of(
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
        "answer": object_of(
            {
                "tier": {"enum": [each.value for each in Source]},
                "reason": {**_TEXT, "description": "Why it is no plain hit"},
                "live": {**_TEXT, "description": "Why live could not, though it had an input"},
            },
            ("tier", "reason", "live"),
        ),
        "directory": {"type": "object", "description": "Where the night has it, by its hash"},
        "events": {
            **_FOUND,
            "description": "Newer events that are counted, `as_of` the newest, and `until` where the generation has "
            "them; null: none",
        },
        "page": {**_FOUND, "description": "Its page in Redis with its checksum; null: unknown"},
        "l1": _TIER,
        "l2": _TIER,
        "same_bytes": {"type": ["boolean", "null"]},
        "record": {**_FOUND, "description": "What is stored, decoded"},
        "previous": {**_FOUND, "description": "What the previous generation has; null: none held"},
        "model": {
            "type": "object",
            "description": "What the model says now, and from what: `computed_from` is `sent`, `own` (the item "
            "itself), `events` (the night's input and newer events), `stored_vector` (scores of the stored list "
            "only) or null",
        },
        "difference": {**_FOUND, "description": "Model minus record: `exact`, `overlap`, deltas"},
        "default": {**_FOUND, "description": "What answers if nothing else does"},
    },
    ("table", "id", "sentence", "generation", "answer", "directory", "l1", "l2", "model"),
)
_HELD: Json = object_of(
    {
        "generation": {"type": "string"},
        "epoch": {"type": "integer"},
        "published_at": {"type": "string", "format": "date-time"},
        "data_until": {"type": "integer", "description": "Unix seconds"},
        **{name: {"type": "object"} for name in ("entities", "tables", "models", "indexes")},
        "fallback": {
            "type": ["string", "null"],
            "description": "Why live models run on the processor where a GPU's provider was asked for",
        },
    },
    ("generation", "epoch", "published_at", "data_until"),
)
GENERATIONS: Json = object_of(
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
        "blocklist": object_of(
            {name: {"type": "integer"} for name in ("version", "items", "entities")}
        ),
        "ready": {"type": "boolean"},
        **dict.fromkeys(("stale", "degraded", "failed"), _TEXT),
    },
    ("live", "previous", "next", "canary", "blocklist", "ready"),
)
HEALTH: Json = object_of(
    {
        "ready": {"type": "boolean"},
        "generation": _TEXT,
        "epoch": {"type": ["integer", "null"]},
        **dict.fromkeys(("stale", "degraded", "failed"), _TEXT),
        "schedule": object_of(
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
EVENTS: Json = object_of(
    {
        "accepted": {"type": "integer", "description": "Events that are in the stream"},
        "repeated": {"type": "integer", "description": "Events that were there before"},
        "rejected": list_of(
            object_of(
                {
                    "index": {"type": "integer", "description": "Place in the request, from 0"},
                    "reason": {"type": "string"},
                    "detail": {"type": "string"},
                },
                ("index", "reason", "detail"),
            )
        ),
        "durability": {
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
)
FEEDBACK: Json = object_of(
    {
        "arm": {
            "enum": ["live", "canary", None],
            "description": "What it was counted for; null without a canary",
        },
        "experiment": {
            "type": "string",
            "description": "EXPERIMENT=ARM that it was counted for, if any",
        },
    },
    ("arm",),
)

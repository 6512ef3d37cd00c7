"""Operations of the service that callers need a scope for, as the OpenAPI document declares them. Pure data."""

from serving.answers.named_schema import Json
from serving.dashboard.document_schema import DASHBOARD
from serving.http import answer_schema, json_schema
from serving.http.openapi import Operation
from serving.requests.models import Limits

_GENERATION = "20261120T000000Z-4c279bf25f9b"
_PUBLISHED = "2026-11-20T11:31:29Z"
_ORIGIN: Json = {
    "source": "l2",
    "producer": "batch",
    "generation": _GENERATION,
    "age_seconds": 140.6,
    "published_at": _PUBLISHED,
}
_LIST: Json = {
    "id": "u-00042",
    "table": "user_topk",
    "items": ["004257", "i-02618"],
    "scores": [1.48, 0.97],
    "short": False,
    **_ORIGIN,
}
_VECTOR: Json = {"id": "u-00042", "table": "user_vector", "vector": [0.25, -0.5], **_ORIGIN}
_TIER: Json = {"found": True, "by": "batch"}
_EXPLANATION: Json = {
    "table": "user_topk",
    "id": "u-00042",
    "sentence": "L1 would answer: the night computed it and it was asked before",
    "generation": _GENERATION,
    "answer": {"tier": "l1", "reason": None, "live": None},
    "directory": {"known": True},
    "l1": _TIER,
    "l2": _TIER,
    "model": {"computed_from": None},
}
_SUMMARIES: Json = {
    "live": {
        "generation": _GENERATION,
        "epoch": 1795174289000,
        "published_at": _PUBLISHED,
        "data_until": 1795132800,
    },
    "previous": None,
    "next": None,
    "canary": None,
    "blocklist": {"version": 0, "items": 0, "entities": 0},
    "ready": True,
}
_ORDER = (
    "The answers stand in the order of the entities, and are all of one generation, but for those whose `source` is "
    "`previous`."
)


def described_operations(limits: Limits) -> tuple[Operation, ...]:
    """Return the operations of a service with these limits; routes are tried in this order."""
    lookup_body = {"entities": ["u-00042", {"history": ["i-01302", "i-01128"]}], "k": 2}
    return (
        Operation(
            method="get",
            path="/v1/lookup/{table}/{entity}",
            operation_id="lookup",
            tag="lookups",
            summary="Answer for one entity of one table",
            description="Looks the entity up, and says in `source` where the answer came from. An id that nobody "
            "knows gets the defaults of a table of lists, or null with a reason: never an error.",
            answer=answer_schema.ANSWER,
            example=_LIST,
            path_names=("table", "entity"),
            has_query=True,
            has_options=True,
            scope="read",
        ),
        Operation(
            method="post",
            path="/v1/lookup/{table}",
            operation_id="lookupBatch",
            tag="lookups",
            summary="Answers for several entities of one table",
            description=f"Entities may bring a history or features to compute from. {_ORDER} Body and answer may also "
            "be Arrow IPC streams, by Content-Type and Accept: see `x-larder-arrow`.",
            answer=answer_schema.ANSWERS,
            example={"answers": [_LIST]},
            body=json_schema.lookup(limits),
            body_example=lookup_body,
            path_names=("table",),
            has_options=True,
            has_arrow=True,
            scope="read",
        ),
        Operation(
            method="post",
            path="/v1/lookup",
            operation_id="lookupTables",
            tag="lookups",
            summary="Answers for entities of several tables",
            description=f"Each entity names its table. {_ORDER}",
            answer=answer_schema.ANSWERS,
            example={"answers": [_LIST, _VECTOR]},
            body=json_schema.lookup_many(limits),
            body_example={
                "entities": [
                    {"id": "u-00042", "table": "user_topk"},
                    {"id": "u-00042", "table": "user_vector"},
                ]
            },
            has_options=True,
            scope="read",
        ),
        Operation(
            method="post",
            path="/v1/score",
            operation_id="score",
            tag="lookups",
            summary="Rank order of candidates for one user",
            description="Ranks items that the caller chose by the user's stored vector, or by one computed from the "
            "history or features that are sent. Candidates that could not be ranked are named.",
            answer=answer_schema.SCORES,
            example={
                "id": "u-00042",
                "table": "user_vector",
                "items": ["i-02618", "004257"],
                "scores": [1.48, 0.97],
                "unknown": ["i-99999"],
                "blocked": [],
                "excluded": [],
                **_ORIGIN,
            },
            body=json_schema.score(limits),
            body_example={"user": "u-00042", "items": ["004257", "i-02618", "i-99999"]},
            has_options=True,
            scope="score",
        ),
        Operation(
            method="post",
            path="/v1/feedback",
            operation_id="sendFeedback",
            tag="reports",
            summary="What came of answers",
            description="Counts an event, such as a click, for the generation or the arm that answered. Send "
            "one of generation, canary_key and arm.",
            answer=answer_schema.FEEDBACK,
            example={"arm": None},
            body=json_schema.FEEDBACK_BODY,
            body_example={"event": "click", "generation": _GENERATION},
            scope="feedback",
        ),
        Operation(
            method="post",
            path="/v1/events",
            operation_id="sendEvents",
            tag="reports",
            summary="What users do",
            description="Accepts each event once, under its id: sent again after any refusal it counts once. An event "
            "that cannot be accepted is rejected beside the others.",
            answer=answer_schema.EVENTS,
            example={
                "accepted": 1,
                "repeated": 0,
                "rejected": [{"index": 1, "reason": "missing_field", "detail": "item is missing"}],
                "durability": "everysec",
                "position": "1795174289000-0",
            },
            status="202",
            body=json_schema.EVENTS_BODY,
            body_example={"events": [{"id": "e-1", "user": "u-00042", "item": "i-02618"}]},
            codes=("events_disabled", "events_full", "events_unavailable"),
            scope="events",
        ),
        Operation(
            method="get",
            path="/v1/explain/{table}/{entity}",
            operation_id="explain",
            tag="explanations",
            summary="Why an entity is answered as it is",
            description="Says which rung would answer, what each holds, and what the model says now. Nothing is "
            "changed by asking.",
            answer=answer_schema.EXPLAINED,
            example=_EXPLANATION,
            path_names=("table", "entity"),
            has_query=True,
            has_options=True,
            scope="explain",
        ),
        Operation(
            method="post",
            path="/v1/explain/{table}",
            operation_id="explainInput",
            tag="explanations",
            summary="Why an entity with an input is answered as it is",
            description="The same for one entity with a history or features.",
            answer=answer_schema.EXPLAINED,
            example=_EXPLANATION,
            body=json_schema.lookup(limits, 1),
            body_example={"entities": [{"id": "u-00042", "history": ["i-01302"]}]},
            path_names=("table",),
            has_options=True,
            scope="explain",
        ),
        Operation(
            method="get",
            path="/v1/generations",
            operation_id="getGenerations",
            tag="operation",
            summary="What this replica serves from",
            description="The generations that are held, their tables and models, and how far this replica can be "
            "trusted.",
            answer=answer_schema.GENERATIONS,
            example=_SUMMARIES,
            scope="read",
        ),
        Operation(
            method="get",
            path="/dashboard/data",
            operation_id="getDashboard",
            tag="operation",
            summary="Numbers of the dashboard",
            description="What all workers and replicas count, over the last hour.",
            answer=DASHBOARD,
            example={
                "now": 1795174289.5,
                "whole": True,
                "trouble": None,
                "verdict": {"level": "ok", "sentence": "All is well.", "advice": None, "also": []},
            },
            codes=("dashboard_off",),
            scope="admin",
        ),
    )

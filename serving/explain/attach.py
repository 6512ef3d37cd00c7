"""Attachment of explanations to a replica: their operations and handlers."""

from fastapi import Request

from serving.explain.explainer import Explainer
from serving.http import schemas
from serving.http.openapi import GENERATION_EXAMPLE, Operation
from serving.http.routes import read_lookup, with_request_headers
from serving.replica.hooks import Replica
from serving.requests.errors import unprocessable
from serving.requests.models import LookupRequest
from serving.requests.named_schema import Json, nullable_schema
from serving.requests.options import Limits
from serving.requests.parsing import lookup_from_url

PATH_PREFIX = b"/v1/explain/"

_TIER_SCHEMA = schemas.named_object_schema(
    "ExplainedTier",
    {
        "found": {"type": "boolean"},
        "reason": {"type": "string", "description": "Why the tier does not answer"},
        "by": {"type": "string", "enum": ["batch", "live"], "description": "What computed it"},
    },
    ("found",),
    description="Content of one tier",
)


_EXPLANATION_SCHEMA: Json = schemas.named_object_schema(
    "Explanation",
    {
        "table": {"type": "string"},
        "id": schemas.TEXT_OR_NULL,
        "sentence": {"type": "string", "description": "Which rung would answer, and why"},
        "generation": {"type": "string"},
        "epoch": {"type": "integer"},
        "published_at": schemas.DATE_TIME,
        "age_seconds": {"type": "number"},
        "stale": nullable_schema(schemas.STALE_REASON),
        "degraded": schemas.TEXT_OR_NULL,
        "answer": schemas.named_object_schema(
            "ExplainedAnswer",
            {
                "tier": schemas.SOURCE,
                "reason": {**nullable_schema(schemas.REASON), "description": "Why the answer is not a plain hit"},
                "live": {
                    **nullable_schema(schemas.LIVE_REASON),
                    "description": "Why live did not answer although it had an input",
                },
            },
            ("tier", "reason", "live"),
            description="What would answer",
        ),
        "directory": schemas.details_schema("Place of the entity in the night's directory, by its hash"),
        "events": schemas.details_schema(
            "Counted newer events, `as_of` of the newest, and `until`, up to which the generation has events; null: "
            "none",
            is_nullable=True,
        ),
        "new_items": {
            "type": "array",
            "items": schemas.named_object_schema(
                "ExplainedNewItem",
                {
                    "item": {"type": "string"},
                    "position": {"type": "string", "description": "Position of the event that introduced it"},
                },
                ("item", "position"),
                description="An item of the answer that no night knows",
            ),
        },
        "page": schemas.details_schema(
            "Page of its record in Redis with its checksum; null: unknown", is_nullable=True
        ),
        "l1": _TIER_SCHEMA,
        "l2": _TIER_SCHEMA,
        "same_bytes": {
            "type": ["boolean", "null"],
            "description": "Whether both tiers hold the same bytes; null: a tier has no record",
        },
        "record": schemas.details_schema("The stored record, decoded", is_nullable=True),
        "filter": schemas.details_schema(
            "Items that pass the filter (`passing` of `items`), and those of the stored list; null: no filter was sent",
            is_nullable=True,
        ),
        "rerank": schemas.details_schema(
            "What determines the order (`by`), and the stored list in that order; null: no re-ranking", is_nullable=True
        ),
        "previous": schemas.details_schema("Record of the previous generation; null: none is held", is_nullable=True),
        "model": schemas.details_schema(
            "Current output of the model, and its input: `computed_from` is `sent`, `own` (the item "
            "itself), `events` (the night's input and newer events), `stored_vector` (scores of the stored list "
            "only) or null"
        ),
        "difference": schemas.details_schema("Model minus record: `exact`, `overlap`, deltas", is_nullable=True),
        "default": schemas.details_schema("The default answer", is_nullable=True),
    },
    ("table", "id", "sentence", "generation", "answer", "directory", "l1", "l2", "model"),
    description="Why an entity is answered as it is",
)


_TIER_EXAMPLE: Json = {"found": True, "by": "batch"}

_EXPLANATION_EXAMPLE: Json = {
    "table": "user_topk",
    "id": "u-00042",
    "sentence": "L1 would answer: the night computed it and it was requested before",
    "generation": GENERATION_EXAMPLE,
    "answer": {"tier": "l1", "reason": None, "live": None},
    "directory": {"known": True},
    "l1": _TIER_EXAMPLE,
    "l2": _TIER_EXAMPLE,
    "model": {"computed_from": None},
}


def operations(limits: Limits) -> tuple[Operation, ...]:
    """Return the operations of explanations, with these limits."""
    return (
        Operation(
            method="get",
            path="/v1/explain/{table}/{entity}",
            operation_id="explain",
            tag="explanations",
            summary="Why an entity is answered as it is",
            description="Says which rung would answer, what each rung has, and what the model computes now. It "
            "changes nothing. Only for the service's own namespace: `arm` is refused.",
            answer_schema=_EXPLANATION_SCHEMA,
            answer_example=_EXPLANATION_EXAMPLE,
            path_parameter_names=("table", "entity"),
            has_query=True,
            has_options=True,
            may_name_arm=False,
            is_limited=True,
            scope="explain",
        ),
        Operation(
            method="post",
            path="/v1/explain/{table}",
            operation_id="explainInput",
            tag="explanations",
            summary="Why an entity with an input is answered as it is",
            description="The same for one entity with a history or features.",
            answer_schema=_EXPLANATION_SCHEMA,
            answer_example=_EXPLANATION_EXAMPLE,
            body_schema=schemas.explain_body_schema(limits),
            body_example={"entities": [{"id": "u-00042", "history": ["i-01302"]}]},
            path_parameter_names=("table",),
            has_options=True,
            may_name_arm=False,
            is_limited=True,
            scope="explain",
        ),
    )


def attach(replica: Replica) -> Explainer:
    """Attach the handlers that explain the answer for an entity."""
    service, components = replica.service, replica.own_namespace.components
    explainer = Explainer(
        replica.own_namespace.follower, components.tiers, components.remote, replica.batcher, replica.admission,
        replica.own_namespace.store, components.ladder, in_thread=replica.in_thread,
    )  # fmt: skip

    async def explain_one(request: Request, _request_started_at: float) -> object:
        raw_path = request.scope.get("raw_path") or request.url.path.encode()
        lookup_request = lookup_from_url(raw_path, PATH_PREFIX, request.scope["query_string"], service.limits)
        return await explain_request(request, lookup_request)

    async def explain_input(request: Request, _request_started_at: float) -> object:
        lookup_request = await read_lookup(service, request, "json", request.path_params["table"])
        return await explain_request(request, lookup_request)

    async def explain_request(request: Request, lookup_request: LookupRequest) -> object:
        lookup_request = LookupRequest(
            lookup_request.entities, with_request_headers(service, request, lookup_request.options)
        )
        if lookup_request.options.arm is not None:
            problem_message = "explanations are only for the service's own namespace: ask a service of the arm"
            raise unprocessable("invalid_field", problem_message, "arm")
        return await explainer.explain(service.capture_served(), lookup_request)

    replica.hooks.handlers |= {"explain": explain_one, "explainInput": explain_input}
    return explainer

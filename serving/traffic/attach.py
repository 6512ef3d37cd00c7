"""Attachment of canaries and experiments to a replica: the routers of requests, and their counts."""

from fastapi import Request

from serving.http import schemas
from serving.http.openapi import GENERATION_EXAMPLE, Operation
from serving.http.routes import read_json
from serving.metrics.collectors import InternalCounters
from serving.replica.hooks import Replica
from serving.replica.namespace import HeldNamespace
from serving.requests.named_schema import ID_SCHEMA, Json, with_description
from serving.requests.options import REQUEST_OPTIONS, Limits
from serving.requests.parsing import feedback_from_json
from serving.traffic.arms import Arms
from serving.traffic.canary import CanaryMetrics, CanaryRouter, CanaryRouters
from serving.traffic.exposures import FLUSH_S, HELP_BY_EVENT, ExposureLog
from serving.traffic.router import ExperimentMetrics, ExperimentRouter

_GENERATION: Json = {
    "type": "string",
    "description": "As the answer named it; or canary_key or arm",
}
_CANARY_KEY: Json = with_description(ID_SCHEMA, "As the request had it; or generation or arm")
_ARM: Json = {
    **REQUEST_OPTIONS["arm"].schema,
    "description": "EXPERIMENT=ARM, as the answer had them",
}
_COUNT: Json = {
    "type": "integer",
    "minimum": 1,
    "maximum": 1_000_000,
    "description": "1 by default",
}


_BODY: Json = schemas.closed_object_schema(
    "FeedbackRequest",
    {
        "event": {
            "type": "string",
            "pattern": "^[a-z][a-z0-9_]{0,31}$",
            "description": "What came of the answer, such as `click`",
        },
        **schemas.nullable_fields(
            {
                "generation": _GENERATION,
                "canary_key": _CANARY_KEY,
                "arm": _ARM,
                "count": _COUNT,
            }
        ),
    },
    ("event",),
    oneOf=[
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
        for name in ("generation", "canary_key", "arm")
    ],
    description="What came of answers: of one generation, of one canary key, or of one arm",
)


_RECEIPT: Json = schemas.named_object_schema(
    "FeedbackReceipt",
    {
        "arm": {
            "type": ["string", "null"],
            "enum": ["live", "canary", None],
            "description": "What it was counted for; null: for nothing, since no canary runs, or the generation or arm "
            "is not held",
        },
        "experiment": {
            "type": "string",
            "description": "EXPERIMENT=ARM that it was counted for, if any",
        },
    },
    ("arm",),
    description="What the feedback was counted for",
)


def operations(_limits: Limits) -> tuple[Operation, ...]:
    """Return the operation by which callers send feedback on answers."""
    return (
        Operation(
            method="post",
            path="/v1/feedback",
            operation_id="sendFeedback",
            tag="reports",
            summary="What came of answers",
            description="Counts an event, such as a click, for the generation or the arm that answered. Send "
            "one of generation, canary_key and arm.",
            answer_schema=_RECEIPT,
            answer_example={"arm": None},
            body_schema=_BODY,
            body_example={"event": "click", "generation": GENERATION_EXAMPLE},
            scope="feedback",
        ),
    )


def attach(replica: Replica) -> ExperimentRouter:
    """Route requests by the experiments and canaries that run, count them, and hold the arms' namespaces."""
    config, own, hooks = replica.config, replica.own, replica.hooks
    canaries = CanaryRouters()

    def hold_canaries(namespace: HeldNamespace) -> None:
        router = CanaryRouter(namespace.holder, CanaryMetrics(namespace.metrics.registry))
        canaries.add(namespace.holder, router)
        namespace.heartbeat.canary = router.report

    hold_canaries(own)
    hooks.namespaces.append(hold_canaries)
    arms = Arms(
        replica.service, config.namespace, own.store, replica.open_namespace, in_thread=replica.in_thread,
        grace_s=config.deadline_max_ms / 1000,
    )  # fmt: skip
    poll_s = config.blocklist_poll_s
    own.refresher.add_periodic("experiments", poll_s, arms.refresh, b"experiments")
    own.refresher.add_periodic("arms_blocklist", poll_s, arms.enforce)
    own.holder.pass_on_blocklist = arms.enforce
    exposures = ExposureLog(own.store, replica.name, clock=own.clock, in_thread=replica.in_thread)
    own.refresher.add_periodic("exposures", FLUSH_S, exposures.flush)
    replica.metrics.registry.register(InternalCounters(exposures.internal_counters, HELP_BY_EVENT))
    metrics = ExperimentMetrics(replica.metrics.registry)
    metrics.version.set_function(lambda: arms.record.version)
    experiments = ExperimentRouter(arms, exposures, metrics, canaries.of)

    async def feedback(request: Request, _started: float) -> object:
        return experiments.feedback(feedback_from_json(await read_json(replica.service, request)))

    async def close() -> None:
        await arms.aclose()
        await exposures.flush()

    hooks.routers += [experiments.route_request, canaries.route_request]
    hooks.handlers["sendFeedback"] = feedback
    hooks.counts.append(metrics.by_field)
    hooks.reports["arms"] = arms.to_json
    hooks.start.append(arms.refresh)
    hooks.drain.append(arms.drain)
    hooks.close.append(close)
    return experiments

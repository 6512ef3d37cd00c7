"""Attachment of canaries and experiments to a replica: routers of requests, and their counts."""

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
from serving.traffic.arms import ArmHolder
from serving.traffic.canary import CanaryMetrics, CanaryRouter, CanaryRouters
from serving.traffic.exposures import FLUSH_S, HELP_BY_EVENT, ExposureLog
from serving.traffic.router import ExperimentMetrics, ExperimentRouter

_GENERATION_SCHEMA: Json = {"type": "string", "description": "Generation of the answer; or canary_key or arm"}
_CANARY_KEY_SCHEMA: Json = with_description(ID_SCHEMA, "canary_key of the request; or generation or arm")
_ARM_SCHEMA: Json = {**REQUEST_OPTIONS["arm"].schema, "description": "EXPERIMENT=ARM of the answer"}
_COUNT_SCHEMA: Json = {"type": "integer", "minimum": 1, "maximum": 1_000_000, "description": "1 by default"}


_REQUEST_SCHEMA: Json = schemas.closed_object_schema(
    "FeedbackRequest",
    {
        "event": {
            "type": "string",
            "pattern": "^[a-z][a-z0-9_]{0,31}$",
            "description": "Kind of feedback, such as `click`",
        },
        **schemas.nullable_fields(
            {
                "generation": _GENERATION_SCHEMA,
                "canary_key": _CANARY_KEY_SCHEMA,
                "arm": _ARM_SCHEMA,
                "count": _COUNT_SCHEMA,
            }
        ),
    },
    ("event",),
    oneOf=[
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
        for name in ("generation", "canary_key", "arm")
    ],
    description="Feedback for one generation, one canary key, or one arm",
)


_RECEIPT_SCHEMA: Json = schemas.named_object_schema(
    "FeedbackReceipt",
    {
        "arm": {
            "type": ["string", "null"],
            "description": "What the feedback was counted for: `live` or `canary` where a canary runs, else "
            "EXPERIMENT=ARM; null: nothing, since no canary runs, or the generation or arm is not held",
        },
        "experiment": {
            "type": "string",
            "description": "EXPERIMENT=ARM that it was counted for, if any, beside a canary too",
        },
    },
    ("arm",),
    description="Arms that the feedback was counted for",
)


def operations(_limits: Limits) -> tuple[Operation, ...]:
    """Return the operation by which callers send feedback on answers."""
    return (
        Operation(
            method="post",
            path="/v1/feedback",
            operation_id="sendFeedback",
            tag="reports",
            summary="Feedback on answers",
            description="Counts an event, such as a click, for the generation or arm that answered. Send one of "
            "generation, canary_key and arm.",
            answer_schema=_RECEIPT_SCHEMA,
            answer_example={"arm": None},
            body_schema=_REQUEST_SCHEMA,
            body_example={"event": "click", "generation": GENERATION_EXAMPLE},
            scope="feedback",
        ),
    )


def attach(replica: Replica) -> ExperimentRouter:
    """Route requests by the running experiments and canaries, count them, and hold the arms' namespaces."""
    config, own_namespace, hooks = replica.config, replica.own_namespace, replica.hooks
    canary_routers = CanaryRouters()

    def hold_canaries(namespace: HeldNamespace) -> None:
        router = CanaryRouter(namespace.holder, CanaryMetrics(namespace.metrics.registry))
        canary_routers.add(namespace.holder, router)
        namespace.heartbeat.get_canary_report = router.report

    hold_canaries(own_namespace)
    hooks.namespace_hooks.append(hold_canaries)
    arm_holder = ArmHolder(
        replica.service, config.namespace, own_namespace.store, replica.open_namespace, in_thread=replica.in_thread,
        grace_s=config.deadline_max_ms / 1000,
    )  # fmt: skip
    poll_s = config.blocklist_poll_s
    own_namespace.refresher.add_periodic("experiments", poll_s, arm_holder.refresh, b"experiments")
    own_namespace.refresher.add_periodic("arms_blocklist", poll_s, arm_holder.enforce)
    own_namespace.holder.pass_on_blocklist = arm_holder.enforce
    exposure_log = ExposureLog(
        own_namespace.store, replica.replica_name, clock=own_namespace.clock, in_thread=replica.in_thread
    )
    own_namespace.refresher.add_periodic("exposures", FLUSH_S, exposure_log.flush)
    replica.metrics.registry.register(InternalCounters(exposure_log.internal_counters, HELP_BY_EVENT))
    metrics = ExperimentMetrics(replica.metrics.registry)
    metrics.version.set_function(lambda: arm_holder.record.version)
    experiment_router = ExperimentRouter(arm_holder, exposure_log, metrics, canary_routers.of)

    async def answer_feedback(request: Request, _request_started_at: float) -> object:
        return experiment_router.feedback(feedback_from_json(await read_json(replica.service, request)))

    async def close_arms() -> None:
        await arm_holder.aclose()
        await exposure_log.flush()

    hooks.routers += [experiment_router.route_request, canary_routers.route_request]
    hooks.handlers["sendFeedback"] = answer_feedback
    hooks.count_readers.append(metrics.counts_by_field)
    hooks.report_by_name["arms"] = arm_holder.to_json
    hooks.start_steps.append(arm_holder.refresh)
    hooks.drain_steps.append(arm_holder.drain)
    hooks.close_steps.append(close_arms)
    return experiment_router

"""Changes of the contract that were decided since the frozen commit: each is in the changelog."""

from collections.abc import Mapping
from typing import Any, Final

ADDED_FIELDS: Final = frozenset(
    {
        "generations_at",
        "not_judged",
        "remarks",
        "published_at",
        "model",
        "earlier_labels",
        "failure",
        "DashboardNightFailure",
        "ExplainedNewItem",
        "background_failing",
        "overlap_at_20_newest",
        "untimed",
        "writes_refused",
        "tokens_stale",
        "tls_stale",
        "store_problem",
        "canary_problem",
    }
)
"""Fields of JSON documents that the frozen commit does not have."""

ADDED_METRICS: Final = frozenset(
    {"larder_events_new_items_without_vector", "larder_night_failed", "larder_store_problem"}
)
"""Metrics that it does not have."""

ADDED_GATES: Final = frozenset({"unknown_items", "distinct_values", "value_psi"})
"""Gates that it does not have."""

CHANGED_CODES: Final[Mapping[str, tuple[int, int]]] = {"status": (0, 3)}
"""Exit codes of a command before and now: a namespace that no replica serves is not well."""


ADDED_AT: Final[Mapping[str, frozenset[str]]] = {
    "body.components.schemas.Explanation.properties": frozenset({"new_items", "filter", "rerank"}),
    "body.components.schemas.HeldGeneration.required": frozenset({"entities", "tables", "models", "indexes"}),
    "body.components.schemas.DashboardQueue.properties": frozenset(
        {"live_queued", "under_way", "requests_max", "queue_seconds", "shed", "shed_lately"}
    ),
}
"""Names that are new at one place alone: what answers had, and OpenAPI did not say."""


WIDENED_AT: Final = frozenset(
    f"body.components.schemas.Event.properties.{field_name}" for field_name in ("time", "type", "attributes")
) | {"body.components.schemas.FeedbackReceipt.properties.arm"}
"""Schemas that allow more than those of the frozen commit: null, which the service took all along, and the arm of an
experiment in `arm`."""

REMOVED_AT: Final[Mapping[str, frozenset[str]]] = {
    "body.components.schemas.ExplainRequest.properties": frozenset({"arm"}),
    "body.paths./v1/explain/{table}.post.parameters": frozenset({"X-Larder-Arm"}),
    "body.paths./v1/explain/{table}/{entity}.get.parameters": frozenset({"arm", "X-Larder-Arm"}),
}
"""Names that OpenAPI had at one place, for what the service always refused there."""

FILLED_AT: Final = frozenset({"body.arm", "body.answer.live"})
"""Fields that may have a text now where the frozen commit has null: the experiment's arm that feedback counted for,
and an explanation's `live` of a stored answer, which is the answer's own."""

EMPTIED_AT: Final = frozenset({("body.answer.live", "entity_blocked"), ("body.answer.live", "no_producer")})
"""Fields that are null now, with their text of the frozen commit: an explanation's `live` that its answer lacks."""

CHANGED_REFUSALS: Final = frozenset(
    {
        (
            (422, "invalid_field"),
            (422, "missing_field"),
        ),  # a list that is needed, or the event of feedback, is not sent
        ((422, "missing_field"), (422, "invalid_field")),  # two subjects of feedback; a table that is no text
        ((422, "invalid_field"), (422, "batch_too_long")),  # no candidates
        ((422, "unsupported_arrow"), (422, "too_many_values")),  # more than 64 record batches
    }
)
"""Status and code of refusals before and now."""

UNSUPPORTED_TYPE: Final = (415, "unsupported_media_type")
"""Status and code of a body that is not JSON by its Content-Type, which was read as JSON before, on routes of JSON."""


JSON_ROUTES: Final = frozenset(
    {
        "POST /v1/lookup", "POST /v1/score", "POST /v1/feedback", "POST /v1/events", "POST /v1/explain/{table}",
    }
)  # fmt: skip
"""Routes that read each body as JSON before."""


def is_added_sample(labels: Mapping[str, str]) -> bool:
    """Return whether a metric counts requests that only this tree refuses for their type."""
    return labels.get("status") == str(UNSUPPORTED_TYPE[0]) and labels.get("route") in JSON_ROUTES


def is_added_reason(reason: object, is_approximate: object) -> bool:
    """Return whether an answer has a reason added since the frozen commit: stored, without the newer events."""
    return reason == "newer_events" and is_approximate is True


def is_decided_refusal(left: tuple[int, Any], right: tuple[int, Any], *, is_other_type: bool) -> bool:
    """Return whether a refusal was decided to change; each side is a status and a code, None for an answer.

    `is_other_type`: the request says that its body is neither JSON nor what stands for it.
    """
    return (left, right) in CHANGED_REFUSALS or (is_other_type and right == UNSUPPORTED_TYPE)


def without_removed(left: Any, path: str) -> Any:
    """Return `left`, an object or a list of named objects, without what was removed at this path."""
    removed = REMOVED_AT.get(path, frozenset())
    if isinstance(left, dict):
        return {name: value for name, value in left.items() if name not in removed}
    return [value for value in left if not (isinstance(value, dict) and value.get("name") in removed)]


def without_added(left: Any, right: Any, path: str) -> Any:
    """Return `right`, an object or a list of names, without the added fields that `left` does not have."""
    added = (ADDED_FIELDS | ADDED_AT.get(path, frozenset())).difference(name for name in left if isinstance(name, str))
    if isinstance(right, dict):
        if "reason" not in left and is_added_reason(right.get("reason"), right.get("approximate")):
            added |= {"reason"}
        return {name: value for name, value in right.items() if name not in added}
    return [value for value in right if not (isinstance(value, str) and value in added)]

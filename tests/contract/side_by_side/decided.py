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
    }
)
"""Fields of JSON documents that the frozen commit does not have."""

ADDED_METRICS: Final = frozenset({"larder_events_new_items_without_vector", "larder_night_failed"})
"""Metrics that it does not have."""

ADDED_GATES: Final = frozenset({"unknown_items", "distinct_values", "value_psi"})
"""Gates that it does not have."""

CHANGED_CODES: Final[Mapping[str, tuple[int, int]]] = {"status": (0, 3)}
"""Exit codes of a command before and now: a namespace that no replica serves is not well."""


ADDED_AT: Final[Mapping[str, frozenset[str]]] = {
    "body.components.schemas.Explanation.properties": frozenset({"new_items", "filter", "rerank"}),
    "body.components.schemas.HeldGeneration.required": frozenset({"entities", "tables", "models", "indexes"}),
}
"""Names that are new at one place alone: what answers had, and OpenAPI did not say."""


WIDENED_AT: Final = frozenset(
    f"body.components.schemas.Event.properties.{field_name}" for field_name in ("time", "type", "attributes")
)
"""Schemas that allow more than those of the frozen commit: null, which the service took all along."""


def without_added(left: Any, right: Any, path: str) -> Any:
    """Return `right`, an object or a list of names, without the added fields that `left` does not have."""
    added = (ADDED_FIELDS | ADDED_AT.get(path, frozenset())).difference(name for name in left if isinstance(name, str))
    if isinstance(right, dict):
        return {name: value for name, value in right.items() if name not in added}
    return [value for value in right if not (isinstance(value, str) and value in added)]

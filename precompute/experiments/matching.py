"""Arms that can stand in for each other: what their live generations must have in common. Pure but for the reading."""

from collections.abc import Mapping
from typing import Any

from cache.errors import Conflict
from cache.format.manifest import Manifest, Table
from cache.store.artefacts import ArtefactStore, read_manifest
from precompute.control.control_keys import Control


def published(store: ArtefactStore, control: Control) -> Manifest:
    """Manifest of what is live in a namespace; raises Conflict where nothing is."""
    namespace = control.keys.namespace
    pointer = control.pointer()
    if pointer is None:
        raise Conflict(
            f"nothing is published in namespace {namespace!r} (no generation is live in its Redis keys, its files "
            f"would lie in {store.url}): check its name, or run `larder night` with its own settings first",
            namespace=namespace,
        )
    return read_manifest(store, pointer.generation)


def demand_match(own_manifest: Manifest, arm: Manifest) -> None:
    """Raises Conflict unless an arm has each table of the service's own namespace, alike for callers.

    Kind, entity, width (k of a list, dimensions of a vector) and labels must be equal, and the attributes that
    filters name, and the filters that are called by name, must be there: callers do not know which arm answers.
    Precision, model and items may differ, and so may what a name means. Where newer events count in one arm, those of
    the same stream count in all.
    """
    for name, table in own_manifest.tables.items():
        expected, arm_shape = _shape(table), _shape(arm.tables.get(name))
        if expected != arm_shape:
            raise Conflict(
                f"table {name!r} is {_text(expected)} in namespace {own_manifest.namespace!r} and {_text(arm_shape)} "
                "in "
                f"{arm.namespace!r}: tables of all arms must match in kind, entity, width and labels",
                namespace=arm.namespace, table=name,
            )  # fmt: skip
    if lacking := sorted(own_manifest.items.attributes.keys() - arm.items.attributes.keys()):
        raise Conflict(
            f"items of namespace {arm.namespace!r} have no attributes {', '.join(lacking)}, by which requests may "
            "filter: name them in [sources] item_attributes of its settings",
            namespace=arm.namespace, attributes=lacking,
        )  # fmt: skip
    if lacking := sorted(own_manifest.filters.keys() - arm.filters.keys()):
        raise Conflict(
            f"namespace {arm.namespace!r} has no filters {', '.join(lacking)}, which requests call by name: declare "
            "them as [filters.NAME] of its settings",
            namespace=arm.namespace, filters=lacking,
        )  # fmt: skip
    event_namespace = _stream(own_manifest)
    if event_namespace is not None and _stream(arm) != event_namespace:
        raise Conflict(
            f"what is live in namespace {arm.namespace!r} was made without the events of {event_namespace!r}, so its "
            "answers "
            f'would count none: set enabled = true and namespace = "{event_namespace}" in [events] of its settings, '
            "and run "
            "its night again",
            namespace=arm.namespace, events=event_namespace,
        )  # fmt: skip


def _stream(manifest: Manifest) -> str | None:
    """Namespace of the stream of events that a generation has; None where it has none."""
    return None if manifest.events is None else manifest.events.namespace or manifest.namespace


def _shape(table: Table | None) -> Mapping[str, Any] | None:
    if table is None:
        return None
    shape = {"kind": table.kind, "entity": table.entity, "width": table.layout.width}
    return shape | ({"labels": list(table.labels)} if table.labels else {})


def _text(shape: Mapping[str, Any] | None) -> str:
    if shape is None:
        return "absent"
    return " ".join(f"{name} {value}" for name, value in shape.items())

"""Checks events against OpenLineage's schemas, from the checkout that LARDER_OPENLINEAGE_SPEC names."""

import json
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

SPEC = os.environ.get("LARDER_OPENLINEAGE_SPEC", "")
NOT_NAMED = "LARDER_OPENLINEAGE_SPEC names no folder `spec` of github.com/OpenLineage/OpenLineage"
_EVENT = "/OpenLineage.json"


@cache
def schemas() -> Mapping[str, Any]:
    """All schemas of the specification, by their ids."""
    read = [json.loads(path.read_text()) for path in Path(SPEC).rglob("*.json")]
    return {schema["$id"]: schema for schema in read if "$id" in schema}


def complaints(event: Mapping[str, Any]) -> list[str]:
    """Return all faults of an event and its facets."""
    (core,) = [schema_id for schema_id in schemas() if schema_id.endswith(_EVENT)]
    messages = _schema_errors(f"{core}#/$defs/RunEvent", event)
    for name, facet in _facets(event):
        url = facet["_schemaURL"]
        if url.startswith("https://openlineage.io/spec/facets/"):  # others are Airflow's own
            messages += [f"{name}: {message}" for message in _schema_errors(url, facet)]
    return messages


def _schema_errors(url: str, value: Any) -> list[str]:
    if url.partition("#")[0] not in schemas():
        return [f"there is no schema {url}"]
    resources = [(name, Resource.from_contents(schema)) for name, schema in schemas().items()]
    validator = Draft202012Validator({"$ref": url}, registry=Registry().with_resources(resources))
    return [error.message for error in validator.iter_errors(value)]


def _facets(event: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    datasets = [*event.get("inputs", ()), *event.get("outputs", ())]
    facet_maps = [event["run"].get("facets"), event["job"].get("facets")]
    kinds = ("facets", "inputFacets", "outputFacets")
    facet_maps += [dataset.get(kind) for dataset in datasets for kind in kinds]
    for facets in facet_maps:
        yield from (facets or {}).items()

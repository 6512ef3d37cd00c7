"""Events held against OpenLineage's own schemas, of a checkout's folder `spec` that LARDER_OPENLINEAGE_SPEC names."""

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
    read = [json.loads(each.read_text()) for each in Path(SPEC).rglob("*.json")]
    return {each["$id"]: each for each in read if "$id" in each}


def complaints(event: Mapping[str, Any]) -> list[str]:
    """All that is wrong with an event and with its facets."""
    (core,) = [each for each in schemas() if each.endswith(_EVENT)]
    found = _held(f"{core}#/$defs/RunEvent", event)
    for name, facet in _facets(event):
        url = facet["_schemaURL"]
        if url.startswith("https://openlineage.io/spec/facets/"):  # others are Airflow's own
            found += [f"{name}: {each}" for each in _held(url, facet)]
    return found


def _held(url: str, value: Any) -> list[str]:
    if url.partition("#")[0] not in schemas():
        return [f"there is no schema {url}"]
    resources = [(name, Resource.from_contents(each)) for name, each in schemas().items()]
    validator = Draft202012Validator({"$ref": url}, registry=Registry().with_resources(resources))
    return [each.message for each in validator.iter_errors(value)]


def _facets(event: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    datasets = [*event.get("inputs", ()), *event.get("outputs", ())]
    held = [event["run"].get("facets"), event["job"].get("facets")]
    kinds = ("facets", "inputFacets", "outputFacets")
    held += [each.get(kind) for each in datasets for kind in kinds]
    for facets in held:
        yield from (facets or {}).items()

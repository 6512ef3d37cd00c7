"""Reads an OpenAPI document: its operations, its schemas, and whether a value fits a schema."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jsonschema

Json = dict[str, Any]
PREFIX = "#/components/schemas/"


class FoundOperation(NamedTuple):
    """Operation of a document."""

    method: str
    path: str
    described: Json

    @property
    def name(self) -> str:
        """Method and path."""
        return f"{self.method.upper()} {self.path}"

    @property
    def answer(self) -> tuple[str, Json]:
        """Status and content of the only successful answer, without the 503 of readiness."""
        ((status, response),) = (
            (status, response) for status, response in self.described["responses"].items() if status.startswith("2")
        )
        return status, response["content"]


def operations(document: Json) -> Iterator[FoundOperation]:
    """Yield all operations."""
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            yield FoundOperation(method, path, described)


def resolved(document: Json, schema: Json) -> Json:
    """Return a schema, or the one that it refers to."""
    reference = schema.get("$ref")
    if reference is None:
        return schema
    referenced_schema: Json = document["components"]["schemas"][reference.removeprefix(PREFIX)]
    return referenced_schema


def problems(document: Json, schema: Json, value: object) -> list[str]:
    """Return the parts of a value that its schema does not allow."""
    full_schema = {**schema, "components": document["components"]}
    validator = jsonschema.Draft202012Validator(full_schema)
    return [f"{list(error.path)}: {error.message}" for error in validator.iter_errors(value)]


def parts(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every part of a document with its place, examples left out."""
    yield path, value
    if isinstance(value, dict):
        for key, part in value.items():
            if key != "example":
                yield from parts(part, (*path, key))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from parts(part, (*path, str(index)))

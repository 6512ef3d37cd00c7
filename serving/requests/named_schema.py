"""Builders of JSON schemas, and named schemas: written where they are used, collected under `components`. Pure."""

from collections.abc import Iterable
from typing import Any

from cache.errors import ConfigError

Json = dict[str, Any]
_PREFIX = "#/components/schemas/"


class NamedSchema(dict[str, Any]):
    """JSON schema that the document has once, under its name; each use becomes a reference."""

    def __init__(self, name: str, schema: Json) -> None:
        super().__init__(schema)
        self.name = name


DETAILS = NamedSchema(
    "Details",
    {
        "type": "object",
        "additionalProperties": True,
        "description": "Facts for people and dashboards, whose names may change from release to release",
    },
)


def object_of(properties: Json, required: tuple[str, ...] = (), **more: object) -> Json:
    """Return the schema of an object with these properties."""
    return {"type": "object", "properties": properties, "required": list(required), **more}


def list_of(of: Json, **more: object) -> Json:
    """Return the schema of a list of `of`."""
    return {"type": "array", "items": of, **more}


ID = NamedSchema(
    "Id",
    {
        "description": "1 to 256 bytes of UTF-8; an integer becomes its decimal form",
        "oneOf": [
            {"type": "string", "minLength": 1, "maxLength": 256},
            {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
        ],
    },
)


def with_description(schema: NamedSchema, description: str) -> Json:
    """Return a reference to a named schema with a description of this use."""
    return {"$ref": schema, "description": description}


def or_null(schema: Json) -> Json:
    """Return a schema that allows null as well."""
    return {"anyOf": [schema, {"type": "null"}]}


def open_words(name: str, value_meanings: Iterable[tuple[str, str]], meaning: str) -> NamedSchema:
    """Return a named schema of a text that is one of `value_meanings` today; more values may be added."""
    known_value_meanings = list(value_meanings)
    lines = "".join(
        f"\n- `{allowed_value}`: {text}" for allowed_value, text in known_value_meanings
    )
    enum = NamedSchema(
        f"Known{name}",
        {
            "type": "string",
            "enum": [allowed_value for allowed_value, _ in known_value_meanings],
            "description": f"Values of {name} in this release:\n{lines}",
        },
    )
    return NamedSchema(
        name,
        {
            "anyOf": [enum, {"type": "string"}],
            "description": f"{meaning}. The list is open: a later release may send a value that is not among the known "
            "ones, so a client must accept any text",
        },
    )


def collected(value: Any, schemas: Json) -> Any:
    """Return a copy of a part of the document with references in place of named schemas, which are added to `schemas`.

    Raises ConfigError if two different schemas have the same name.
    """
    if isinstance(value, NamedSchema):
        content = {key: collected(part, schemas) for key, part in value.items()}
        if schemas.setdefault(value.name, content) != content:
            raise ConfigError(f"two different schemas of the API are called {value.name}")
        return {"$ref": _PREFIX + value.name}
    if isinstance(value, dict):
        if isinstance(target := value.get("$ref"), NamedSchema):
            sibling_parts = {
                key: collected(part, schemas) for key, part in value.items() if key != "$ref"
            }
            return collected(target, schemas) | sibling_parts
        return {key: collected(part, schemas) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [collected(part, schemas) for part in value]
    return value

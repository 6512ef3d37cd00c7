"""Builders of JSON schemas, and named schemas, which are collected under `components`. Pure."""

from collections.abc import Iterable
from typing import Any

from cache.errors import ConfigError

Json = dict[str, Any]
_REFERENCE_PREFIX = "#/components/schemas/"


class NamedSchema(dict[str, Any]):
    """JSON schema that the document contains once, under its name; each use becomes a reference."""

    def __init__(self, schema_name: str, schema: Json) -> None:
        super().__init__(schema)
        self.name = schema_name


DETAILS_SCHEMA = NamedSchema(
    "Details",
    {
        "type": "object",
        "additionalProperties": True,
        "description": "Facts for people and dashboards, whose names may change from release to release",
    },
)


def object_schema(property_schemas: Json, required_names: tuple[str, ...] = (), **further_keywords: object) -> Json:
    """Return the schema of an object with these properties."""
    return {"type": "object", "properties": property_schemas, "required": list(required_names), **further_keywords}


def list_schema(item_schema: Json, **further_keywords: object) -> Json:
    """Return the schema of a list of `item_schema`."""
    return {"type": "array", "items": item_schema, **further_keywords}


ID_SCHEMA = NamedSchema(
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


def nullable_schema(schema: Json) -> Json:
    """Return a schema that allows null as well."""
    return {"anyOf": [schema, {"type": "null"}]}


def open_enum_schema(name: str, value_meanings: Iterable[tuple[str, str]], meaning: str) -> NamedSchema:
    """Return a named schema of a text with the known values `value_meanings`; more values may be added later."""
    known_value_meanings = list(value_meanings)
    value_lines = "".join(
        f"\n- `{allowed_value}`: {value_meaning}" for allowed_value, value_meaning in known_value_meanings
    )
    known_values_schema = NamedSchema(
        f"Known{name}",
        {
            "type": "string",
            "enum": [allowed_value for allowed_value, _ in known_value_meanings],
            "description": f"Values of {name} in this release:\n{value_lines}",
        },
    )
    return NamedSchema(
        name,
        {
            "anyOf": [known_values_schema, {"type": "string"}],
            "description": f"{meaning}. The list is open: a later release may send a value that is not among the known "
            "ones, so a client must accept any text",
        },
    )


def collect_named_schemas(schema_part: Any, schema_by_name: Json) -> Any:
    """Return a copy of a part of the document with references for named schemas, which are added to `schema_by_name`.

    Raises ConfigError if two different schemas have the same name.
    """
    if isinstance(schema_part, NamedSchema):
        collected_schema = {
            key: collect_named_schemas(inner_part, schema_by_name) for key, inner_part in schema_part.items()
        }
        if schema_by_name.setdefault(schema_part.name, collected_schema) != collected_schema:
            raise ConfigError(f"two different schemas of the API are called {schema_part.name}")
        return {"$ref": _REFERENCE_PREFIX + schema_part.name}
    if isinstance(schema_part, dict):
        if isinstance(referenced_schema := schema_part.get("$ref"), NamedSchema):
            sibling_parts = {
                key: collect_named_schemas(inner_part, schema_by_name)
                for key, inner_part in schema_part.items()
                if key != "$ref"
            }
            return collect_named_schemas(referenced_schema, schema_by_name) | sibling_parts
        return {key: collect_named_schemas(inner_part, schema_by_name) for key, inner_part in schema_part.items()}
    if isinstance(schema_part, list | tuple):
        return [collect_named_schemas(inner_part, schema_by_name) for inner_part in schema_part]
    return schema_part

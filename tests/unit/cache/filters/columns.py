"""Columns of random attributes, and a filter applied to each item in Python."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from cache.filters.attributes import NO_CODE, NO_FLAG, NO_TIME, AttributeColumn, ItemAttributes, TextDictionary
from cache.filters.expression import CombinationNode, ComparisonNode, Expression

Item = Mapping[str, Any]
"""Values of one item by attribute; one that it lacks is not there."""

KINDS = {"brand": "text", "tags": "texts", "price": "number", "stock": "flag", "since": "time"}


def names_of(texts: set[str]) -> tuple[TextDictionary, dict[str, int]]:
    raws = sorted(text.encode() for text in texts)
    offsets = np.cumsum([0, *map(len, raws)], dtype=np.uint64)
    names = TextDictionary(np.frombuffer(b"".join(raws), np.uint8), offsets)
    return names, {raw.decode(): code for code, raw in enumerate(raws)}


def attributes_of(items: list[Item]) -> ItemAttributes:
    """Return the columns of these items."""
    brands, brand_codes = names_of({item["brand"] for item in items if "brand" in item})
    tags, tag_codes = names_of({tag for item in items for tag in item.get("tags", ())})
    lists = [item.get("tags", ()) for item in items]
    columns = {
        "brand": AttributeColumn(
            "text",
            np.array([brand_codes.get(item.get("brand", "?"), NO_CODE) for item in items], np.uint32),
            None,
            brands,
        ),
        "tags": AttributeColumn(
            "texts",
            np.array([tag_codes[tag] for tags_ in lists for tag in tags_], np.uint32),
            np.concatenate([[0], np.cumsum([len(item_tags) for item_tags in lists])]).astype(np.uint64),
            tags,
        ),
        "price": AttributeColumn("number", np.array([item.get("price", np.nan) for item in items], float)),
        "stock": AttributeColumn("flag", np.array([item.get("stock", NO_FLAG) for item in items], np.uint8)),
        "since": AttributeColumn("time", np.array([item.get("since", NO_TIME) for item in items], np.int64)),
    }
    return ItemAttributes(len(items), columns)


def passes(expression: Expression, item: Item) -> bool:
    """Apply a filter in Python, one item at a time."""
    if isinstance(expression, CombinationNode):
        part_results = [passes(part, item) for part in expression.parts]
        match expression.operator:
            case "and":
                return all(part_results)
            case "or":
                return any(part_results)
        return not part_results[0]
    return _compared(expression, item)


def _compared(comparison: ComparisonNode, item: Item) -> bool:
    value = item.get(comparison.attribute)
    if comparison.operator == "exists":
        return value is not None and value != ()
    if value is None:
        return False
    operands = [_as(comparison.attribute, operand) for operand in comparison.values]
    match comparison.operator:
        case "contains":
            return operands[0] in value
        case "==" | "in":
            return value in operands
        case "<":
            return bool(value < operands[0])
        case "<=":
            return bool(value <= operands[0])
        case ">":
            return bool(value > operands[0])
    return bool(value >= operands[0])


def _as(attribute: str, value: Any) -> Any:
    if KINDS[attribute] != "time":
        return value
    if isinstance(value, str):
        moment = datetime.fromisoformat(value)
        return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1e6)
    return round(value * 1_000_000)

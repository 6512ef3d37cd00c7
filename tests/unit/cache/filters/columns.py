"""Columns of drawn attributes, and what passes a filter by a look at each item."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from cache.filters.attributes import (
    NO_CODE,
    NO_FLAG,
    NO_TIME,
    AttributeColumn,
    ItemAttributes,
    Names,
)
from cache.filters.expression import Combining, Comparing, Expression

Item = Mapping[str, Any]
"""Values of one item by attribute; one that it lacks is not there."""

KINDS = {"brand": "text", "tags": "texts", "price": "number", "stock": "flag", "since": "time"}


def names_of(texts: set[str]) -> tuple[Names, dict[str, int]]:
    raws = sorted(each.encode() for each in texts)
    offsets = np.cumsum([0, *map(len, raws)], dtype=np.uint64)
    names = Names(np.frombuffer(b"".join(raws), np.uint8), offsets)
    return names, {raw.decode(): code for code, raw in enumerate(raws)}


def attributes_of(items: list[Item]) -> ItemAttributes:
    """The columns of these items."""
    brands, brand_codes = names_of({each["brand"] for each in items if "brand" in each})
    tags, tag_codes = names_of({tag for each in items for tag in each.get("tags", ())})
    lists = [each.get("tags", ()) for each in items]
    columns = {
        "brand": AttributeColumn(
            "text",
            np.array(
                [brand_codes.get(each.get("brand", "?"), NO_CODE) for each in items], np.uint32
            ),
            None,
            brands,
        ),
        "tags": AttributeColumn(
            "texts",
            np.array([tag_codes[tag] for tags_ in lists for tag in tags_], np.uint32),
            np.concatenate([[0], np.cumsum([len(each) for each in lists])]).astype(np.uint64),
            tags,
        ),
        "price": AttributeColumn(
            "number", np.array([each.get("price", np.nan) for each in items], float)
        ),
        "stock": AttributeColumn(
            "flag", np.array([each.get("stock", NO_FLAG) for each in items], np.uint8)
        ),
        "since": AttributeColumn(
            "time", np.array([each.get("since", NO_TIME) for each in items], np.int64)
        ),
    }
    return ItemAttributes(len(items), columns)


def passes(expression: Expression, item: Item) -> bool:
    """By Python, one item at a time."""
    if isinstance(expression, Combining):
        found = [passes(each, item) for each in expression.parts]
        match expression.operator:
            case "and":
                return all(found)
            case "or":
                return any(found)
        return not found[0]
    return _compared(expression, item)


def _compared(each: Comparing, item: Item) -> bool:
    value = item.get(each.attribute)
    if each.operator == "exists":
        return value is not None and value != ()
    if value is None:
        return False
    wanted = [_as(each.attribute, one) for one in each.values]
    match each.operator:
        case "contains":
            return wanted[0] in value
        case "==" | "in":
            return value in wanted
        case "<":
            return bool(value < wanted[0])
        case "<=":
            return bool(value <= wanted[0])
        case ">":
            return bool(value > wanted[0])
    return bool(value >= wanted[0])


def _as(attribute: str, value: Any) -> Any:
    if KINDS[attribute] != "time":
        return value
    if isinstance(value, str):
        moment = datetime.fromisoformat(value)
        return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1e6)
    return round(value * 1_000_000)

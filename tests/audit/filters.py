"""Filters as docs/how-to/filter-answers.md defines them: their meaning, and random ones."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Mapping

from tests.audit.values import Attribute, Json
from tests.audit.world import BRANDS, EPOCH, TAGS, iso_time

EVERYTHING: Json = {"or": [{"exists": "brand"}, {"not": {"exists": "brand"}}]}
"""A filter that all items pass."""


def passes(expression: Json, attributes: Mapping[str, Attribute]) -> bool:
    """Return whether an item with these attributes passes."""
    ((operator, operand),) = expression.items()
    if operator == "and":
        return all(passes(part, attributes) for part in operand)
    if operator == "or":
        return any(passes(part, attributes) for part in operand)
    if operator == "not":
        return not passes(operand, attributes)
    if operator == "exists":
        return str(operand) in attributes
    name, filter_value = operand
    if name not in attributes:
        return False
    value = attributes[name]
    if operator == "contains":
        return isinstance(value, list) and filter_value in value
    if name == "since":
        value = float(str(value))
        filter_value = (
            [_seconds(moment) for moment in filter_value] if isinstance(filter_value, list) else _seconds(filter_value)
        )
    if operator == "in":
        return bool(value in filter_value)
    if operator == "==":
        return bool(value == filter_value)
    number = float(str(value))
    comparisons = {
        "<": number < filter_value,
        "<=": number <= filter_value,
        ">": number > filter_value,
        ">=": number >= filter_value,
    }
    return bool(comparisons[operator])


def _seconds(value: object) -> float:
    if isinstance(value, str):
        return dt.datetime.fromisoformat(value).timestamp()
    return float(str(value))


def draw_filter(rng: random.Random, depth: int = 0) -> Json:
    """Draw an expression of every operator and kind of attribute."""
    if depth < 2 and rng.random() < 0.45:
        operator = rng.choice(["and", "or", "not"])
        if operator == "not":
            return {"not": draw_filter(rng, depth + 1)}
        return {operator: [draw_filter(rng, depth + 1) for _ in range(rng.randrange(1, 4))]}
    kind = rng.choice(["brand", "tags", "price", "stock", "since", "exists"])
    if kind == "brand":
        if rng.random() < 0.5:
            return {"==": ["brand", rng.choice(BRANDS)]}
        return {"in": ["brand", rng.sample(BRANDS, rng.randrange(1, 4))]}
    if kind == "tags":
        return {"contains": ["tags", rng.choice(TAGS)]}
    if kind == "price":
        return {rng.choice(["<", "<=", ">", ">=", "=="]): ["price", rng.randrange(0, 200) / 4]}
    if kind == "stock":
        return {"==": ["stock", rng.random() < 0.6]}
    if kind == "exists":
        return {"exists": rng.choice(["brand", "tags", "price", "stock", "since"])}
    moment = float(EPOCH + 86_400 * rng.randrange(-30, 30))
    return {rng.choice(["<", "<=", ">", ">=", "=="]): ["since", iso_time(moment) if rng.random() < 0.5 else moment]}
